"""`WholeStepper`: decoding over nothing but `forward(ids, mask) -> logits`, for models not ours.

`BaseAdapter`: one face for every architecture, for training and for inference.

The methods are source 002's, by its names. An adapter holds a model and what came with it; which
parts the model is made of, how its tensors are named on disk and how its text is cut are its own
affair.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from glassformer.adapters.folder.origin import find_tokenizer
from glassformer.adapters.text_inputs import inspect_text, question
from glassformer.adapters.tokenizers.folder_tokenizer import end_ids, nameless_ids
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.prompts import Prompts, padded, text_prompt
from glassformer.generation.stepper import Rows, Stepper
from glassformer.generation.streaming import generate_batch
from glassformer.lens.heads import HeadName
from glassformer.lens.inspection import Inspection
from glassformer.models.model import Model
from glassformer.quant.status import quantized_numbers
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

# B batch, T length, V vocab

Forward = Callable[[Tensor, Tensor | None], Tensor]


class WholeStepper(Stepper):
    """No cache: the complete sequence at every step, and the last column of its logits."""

    def __init__(self, forward: Forward, spec: ModelSpec, *, device: torch.device) -> None:
        super().__init__(spec)
        self.forward = forward
        self.device = device

    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, Rows]:
        """Read the prompts; nothing is reserved, whatever the room."""
        tokens_BT, valid_BT = padded(prompts.tokens)
        valid = None if valid_BT is None else torch.from_numpy(valid_BT).to(self.device)
        past = Rows(torch.from_numpy(tokens_BT).to(self.device), valid, None, None)
        return self._read(past), past

    def step(self, tokens_B: Tensor, *, past: Rows) -> Tensor:
        """One more token a row, and everything once more."""
        new_B1 = tokens_B.to(self.device)[:, None]
        past.tokens_BT = torch.cat((past.tokens_BT, new_B1), 1)
        if past.valid_BT is not None:
            past.valid_BT = torch.cat((past.valid_BT, torch.ones_like(new_B1, dtype=torch.bool)), 1)
        return self._read(past)

    @torch.no_grad()
    def _read(self, past: Rows) -> Tensor:
        self.positions += past.tokens_BT.shape[1]
        return self.forward(past.tokens_BT, past.valid_BT)[:, -1]


# B batch, T length, V vocab


class BaseAdapter(nn.Module, ABC):
    """A model behind one interface.

    spec: what the model is. origin: the folder it came from, or None. reference: a live module of
    another library that must compute the same, or None; it is no part of this module, so it is
    neither trained nor saved nor moved with it.
    """

    architecture_type: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        *,
        spec: ModelSpec,
        origin: Path | None = None,
        tokenizer: Tokenizer | None = None,
        reference: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.training = model.training
        self.model = model
        self.spec = spec
        self.origin = origin
        self._tokenizer = tokenizer
        self._reference = (reference,)  # a tuple: torch would register a bare module

    # --- source 002's methods ---------------------------------------------------------------------

    @abstractmethod
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits (B, T, V). The mask is (B, T), 1 or True for real tokens."""

    @abstractmethod
    def get_config(self) -> dict[str, Any]:
        """The configuration as plain data, in the words of whoever wrote it."""

    @abstractmethod
    def save_checkpoint(self, path: str | Path) -> None:
        """Write the model, and what came with it, to a folder that `glassformer.load` opens."""

    @abstractmethod
    def load_checkpoint(self, path: str | Path) -> None:
        """Read weights of the same architecture into this model; optimizers keep their hold."""

    def get_architecture_type(self) -> str:
        """`custom-transformer`, `qwen`, `llama`, ..."""
        return self.architecture_type

    def get_num_parameters(self) -> int:
        """How many numbers the model has, quantized or not; what is tied counts once."""
        floats = sum(parameter.numel() for parameter in self.parameters())
        return floats + quantized_numbers(self)

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that came with the model; None for a model of tokens without names."""
        if self._tokenizer is None and self.origin is not None:
            self._tokenizer = find_tokenizer(self.origin)
        return self._tokenizer

    def trainable_parameters(self) -> list[nn.Parameter]:
        """For an optimizer: each once, without those that were frozen."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    # --- what follows from them -------------------------------------------------------------------

    @property
    def reference(self) -> nn.Module | None:
        """The live module that parity is measured against."""
        return self._reference[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """`get_tokenizer`, or an error where there is none."""
        found = self.get_tokenizer()
        if found is None:
            raise InputError(
                "this model came without a tokenizer, so it reads token ids and no text",
                where=str(self.origin or ""),
                hint="adapter(ids) gives logits; glassformer.generation continues rows of ids",
            )
        return found

    def stepper(self) -> Stepper:
        """What decoding runs on: without a cache, unless the adapter knows better."""
        return WholeStepper(self, self.spec, device=next(self.parameters()).device)

    def prompt(self, text: str) -> Prompts:
        """A text as the model expects it."""
        return text_prompt(self.spec, self.tokenizer, text)

    def end_ids(self) -> tuple[int, ...]:
        """The ids at which a text of this model ends, all of them."""
        return end_ids(self.tokenizer)

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 100,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> str:
        """The text that follows a prompt, greedy or drawn; of a model that answers, its answer."""
        if "next" not in self.spec.head_names():
            if temperature or top_k is not None or top_p != 1.0 or stop:
                raise InputError("this model gives one answer: there is nothing to draw or to stop")
            return self.answer(prompt)
        was_training = self.training
        self.eval()
        try:
            spec = DecodeSpec(
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                stop=tuple(stop),
                eos=self.end_ids(),
                forbidden=self.nameless_ids(),
                seed=seed,
            )
            made = generate_batch(
                self.stepper(), self.prompt(prompt), spec=spec, tokenizer=self.tokenizer
            )
            return made[0].text
        finally:
            self.train(was_training)

    @torch.no_grad()
    def answer(self, prompt: str) -> str:
        """The likeliest answer of a model that gives one for a whole sequence."""
        ids = question(self.tokenizer, prompt)
        if "answer" not in self.spec.head_names():
            raise InputError(
                "this model has no head that answers or continues a text",
                hint=f"it has: {', '.join(self.spec.head_names())}",
            )
        assert isinstance(self.model, Model)  # a module of another library only continues texts
        was_training = self.training
        self.eval()
        try:
            logits_1V = self.model(torch.tensor([ids]))["answer"]
        finally:
            self.train(was_training)
        return self.tokenizer.decode([int(logits_1V.argmax())])

    def inspect(
        self, text: str, *, target: str | None = None, ablate: Sequence[str | HeadName] = ()
    ) -> Inspection:
        """One forward pass over a text with everything kept: attention, lens, norms, losses.

        `target` is what should follow: the loss is then of its tokens alone, else of the text's
        own. A model that answers takes its answer. Of an encoder-decoder the text is the source,
        and without a target the model's own greedy answer is looked at. `ablate` silences heads.
        """
        if not isinstance(self.model, Model):
            raise InputError(
                f"{type(self.model).__name__} computes by itself and has no taps, so its "
                "attention, lens, norms and heads are not offered",
                hint='load it with backend="native"',
            )
        greedy = DecodeSpec(max_new_tokens=100, eos=self.end_ids(), forbidden=self.nameless_ids())
        return inspect_text(
            self.model,
            self.tokenizer,
            text,
            target=target,
            ablate=ablate,
            stepper=self.stepper,
            greedy=greedy,
        )

    def nameless_ids(self) -> tuple[int, ...]:
        """Ids that the model's table has and its tokenizer does not: they say nothing."""
        return tuple(i for i in nameless_ids(self.tokenizer) if i < self.spec.vocab_size)


def valid_of(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """An attention mask of zeros and ones as our own: True = real token."""
    if attention_mask is None:
        return None
    if attention_mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, the ids "
            f"{tuple(input_ids.shape)}",
            hint="one number for each token: 1 = real, 0 = padding",
        )
    if attention_mask.dtype == torch.bool:
        return attention_mask
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise InputError(
            "attention_mask holds other numbers than 0 and 1", hint="1 = real token, 0 = padding"
        )
    return attention_mask == 1
