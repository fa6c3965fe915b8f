"""The one kind of model: the contract of what `gf.build` and `gf.load` return.

    model(tokens)                        logits (B, T, V) of the next token
    model(tokens, valid=mask)            True = real token; `attention_mask` of 1 and 0 works too
    model(tokens, head="class")          another head's logits; `model.forward_heads` gives all
    model.generate("text", top_p=0.9)    text in, text out; token ids in, new token ids out
    model.inspect("text")                one pass with everything kept; token ids work too
    model.tokenizer                      raises where there is none: `model.with_tokenizer(t)`
    model.spec, model.device, model.save(folder)

Such a model is a torch module: `parameters()`, `state_dict()`, `train()` and `to()` are those of
the module inside, `model.model`, with the same parameter names. Inside is one of our own models
(`NativeAdapter`, `glassformer.models`), which training engines, verify, quantization and the lens
work on, or a module of another library (`WrappedAdapter`). The base class is called `BaseAdapter`,
since it adapts any architecture to this contract; a new architecture is a subclass.
"""

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, overload

import numpy as np
import torch
from torch import Tensor, nn

from glassformer.adapters.chat.begin import begin_chat
from glassformer.adapters.chat.template import Conversation
from glassformer.adapters.executors import check_own_cache
from glassformer.adapters.folder.origin import find_tokenizer
from glassformer.adapters.generate import (
    best_of_beams,
    evaluating,
    make_stepper,
    prepare,
    stream_tokens,
)
from glassformer.adapters.text_inputs import Words, inspect_text, question
from glassformer.adapters.tokenizers.folder_tokenizer import end_ids, nameless_ids
from glassformer.data.batch import Batch
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.generation.stepper import Text
from glassformer.generation.streaming import Generated, generate_batch
from glassformer.lens.capture import tapped_model
from glassformer.lens.heads import HeadName
from glassformer.lens.inspection import Inspection, inspect
from glassformer.lens.measure.predictions import class_name
from glassformer.lens.show.text import Names
from glassformer.models.inputs import Inputs
from glassformer.models.prompts import Prompts, padded, text_prompt
from glassformer.models.stepping import Stepper
from glassformer.quant.contents import quantization_report, quantized_numbers
from glassformer.spec.checks import at_least, one_of
from glassformer.spec.decoding import BeamSpec, DecodeSpec, KVCache, nearest_option
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec
from glassformer.store.checkpoint import is_quantized

if TYPE_CHECKING:
    from glassformer.adapters.table import Family

# B batch, T length, V vocab

Forward = Callable[[Tensor, Tensor | None], Tensor]

#: Token ids of one sequence, or of several as rows.
Ids = Sequence[int] | Sequence[Sequence[int]] | Tensor | np.ndarray


class NoSpec(InputError, AttributeError):
    """A question about an architecture that no `ModelSpec` describes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outline:
    """What is known of a model that no `ModelSpec` describes: it continues a text, and its sizes.

    `BaseAdapter` takes one in place of the spec. What needs the architecture itself (taps,
    training, quantization, export) raises an error.
    """

    vocab_size: int
    max_seq_len: int
    encoder: ClassVar[None] = None

    def __post_init__(self) -> None:
        at_least("vocab_size", self.vocab_size)
        at_least("max_seq_len", self.max_seq_len)

    def head_names(self) -> tuple[str, ...]:
        """Return its only head, the next token's."""
        return ("next",)

    def head_size(self, name: str) -> int:
        """Return the number of logits of a head."""
        one_of("head", name, self.head_names())
        return self.vocab_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NoSpec(
            f"no ModelSpec describes this model, so it has no `{name}`",
            hint="it generates and is validated; a model of a ModelSpec does the rest",
        )


class BaseAdapter(nn.Module, ABC):
    """A model behind the contract above.

    model: the module that computes. spec: the architecture, or an `Outline` where no `ModelSpec`
    describes it. origin: the folder or file that it was
    read from, or None. reference: a live module of another library that must compute the same, or
    None; it is neither trained nor saved nor moved with this one.

    The module inside is no submodule of this one: the two share their tables of submodules,
    parameters and buffers, so that names and state are the same with and without the adapter.
    """

    architecture_type: ClassVar[str]
    #: The families of config.json that it reads; none where `open_folder` reads its own folders.
    families: ClassVar["tuple[Family, ...]"] = ()

    def __init__(
        self,
        model: nn.Module,
        *,
        spec: ModelSpec | Outline,
        origin: Path | None = None,
        tokenizer: Tokenizer | None = None,
        reference: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(spec, ModelSpec | Outline):
            raise InputError(
                f"an adapter is made of a ModelSpec, not of {type(spec).__name__}",
                hint="Outline(vocab_size=..., max_seq_len=...) where no ModelSpec describes it",
            )
        self._hold(model)
        self.spec: ModelSpec = cast(ModelSpec, spec)
        self.origin = origin
        self._tokenizer = tokenizer
        self._reference = (reference,)  # a tuple: torch would register a bare module

    # --- the module inside ------------------------------------------------------------------------

    def _hold(self, model: nn.Module) -> None:
        """Let this module be one with `model`: share its submodules, parameters and buffers."""
        self._held = (model,)
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[name] = getattr(model, name)

    @property
    def model(self) -> nn.Module:
        """The module that computes."""
        return self._held[0]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a new `model` replaces the module inside."""
        if name == "model":
            self._hold(value)
        else:
            super().__setattr__(name, value)

    @property
    def training(self) -> bool:
        """The mode of the module inside."""
        held: tuple[nn.Module, ...] = self.__dict__.get("_held", ())
        return held[0].training if held else False

    @training.setter
    def training(self, mode: bool) -> None:
        """Set the mode of the module inside."""
        for model in self.__dict__.get("_held", ()):
            model.training = mode

    @property
    def reference(self) -> nn.Module | None:
        """The live module that parity is measured against."""
        return self._reference[0]

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(chain(self.parameters(), self.buffers())).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first weights; a quantized model keeps its norms in it."""
        return next(self.parameters()).dtype

    def __repr__(self) -> str:
        spec = self.spec
        if isinstance(spec, Outline):
            return (
                f"<{type(self).__name__}: {self.get_num_parameters():,} parameters, vocabulary "
                f"{spec.vocab_size:,}, {self._held_as()}>"
            )
        heads = spec.decoder.heads_in_words()
        layers = f"{spec.n_layers} layers"
        if spec.encoder is not None:
            layers = f"{spec.encoder.n_layers} encoder and {spec.n_layers} decoder layers"
        return (
            f"<{type(self).__name__}: {self.get_num_parameters():,} parameters, {layers}, "
            f"d_model {spec.d_model}, {heads} heads, vocabulary {spec.vocab_size:,}, "
            f"{self._held_as()}>"
        )

    def _held_as(self) -> str:
        """Return what the weights are held in, where, and the folder or file they came from."""
        plain = str(self.dtype).removeprefix("torch.")
        schemes = quantization_report(self).schemes()
        rounded = [
            f"{scheme} in {count} layer{'s' * (count > 1)}" for scheme, count in schemes.items()
        ]
        held = ", ".join([*rounded, f"else {plain}" if rounded else plain])
        if self.origin is None:
            return f"{held} on {self.device}"
        as_read = not rounded or is_quantized(self.origin)
        return f"{held} on {self.device}, {'from' if as_read else 'quantized from'} {self.origin}"

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            """Run `forward`, as torch does."""

    # --- methods that every architecture has ------------------------------------------------------

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        valid: Tensor | None = None,
        head: str | None = None,
    ) -> Tensor:
        """Return logits (B, T, V); the masks are (B, T), True or 1 for real tokens."""

    def hidden_states(self, inputs: Inputs) -> Tensor:
        """Return the states (B, T, D) after the last norm, which the heads read."""
        raise InputError(f"a {type(self).__name__} gives no hidden states, which vectors are of")

    @classmethod
    def open_folder(cls, folder: Path) -> "BaseAdapter":
        """Return the model that `save_checkpoint` wrote; for `load` by architecture type."""
        raise InputError(
            f"{cls.__name__} has no `open_folder`", hint="a classmethod that returns an adapter"
        )

    @abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return the configuration as plain data, in the format that it was written in."""

    @abstractmethod
    def save_checkpoint(self, path: str | Path) -> None:
        """Write the model, and the files that came with it, to a folder that `load` opens."""

    @abstractmethod
    def load_checkpoint(self, path: str | Path) -> None:
        """Copy weights of the same architecture into the parameters of this model."""

    def get_architecture_type(self) -> str:
        """Return `custom-transformer`, `qwen`, `llama`, ..."""
        return self.architecture_type

    def get_num_parameters(self) -> int:
        """Return the number of weights, quantized or not; tied weights count once."""
        floats = sum(parameter.numel() for parameter in self.parameters())
        return floats + quantized_numbers(self)

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer that came with the model, or None."""
        if self._tokenizer is None and self.origin is not None:
            self._tokenizer = find_tokenizer(self.origin)
        return self._tokenizer

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters for an optimizer: each once, without frozen ones."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint folder that `gf.load` opens; an existing one is never overwritten."""
        self.save_checkpoint(folder)
        return Path(folder)

    # --- text -------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; an InputError where there is none."""
        tokenizer = self.get_tokenizer()
        if tokenizer is None:
            raise InputError(
                "this model has no tokenizer, so it reads token ids and no text",
                where=str(self.origin or ""),
                hint="give token ids, or model.with_tokenizer(tokenizer)",
            )
        return tokenizer

    def with_tokenizer(self, tokenizer: Tokenizer) -> Self:
        """Return the same model, weights shared, with this tokenizer."""
        if tokenizer.vocab_size > self.spec.vocab_size:
            raise InputError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model a vocabulary of "
                f"{self.spec.vocab_size}"
            )
        twin = copy.copy(self)
        twin._tokenizer = tokenizer
        return twin

    def end_ids(self) -> tuple[int, ...]:
        """Return all ids at which a text of this model ends."""
        return end_ids(self.tokenizer)

    def nameless_ids(self) -> tuple[int, ...]:
        """Return the ids of the model's vocabulary that its tokenizer has no text for."""
        return tuple(i for i in nameless_ids(self.tokenizer) if i < self.spec.vocab_size)

    # --- decoding ---------------------------------------------------------------------------------

    def stepper(self) -> Stepper:
        """Return what decoding runs on: without a cache, unless a subclass has one."""
        return UncachedStepper(self, self.spec, device=self.device)

    def prompt(self, text: str) -> Prompts:
        """Return a text as the model expects it."""
        return text_prompt(self.spec, self.tokenizer, text)

    def prompts(self, prompt: str | Ids | Prompts) -> Prompts:
        """Return a text, one row of ids, or several rows, as prompts."""
        match prompt:
            case Prompts():
                return prompt
            case str():
                return self.prompt(prompt)
            case _:
                return Prompts.of(_rows(prompt))

    @overload
    def generate(self, prompt: str, **options: Any) -> str: ...

    @overload
    def generate(self, prompt: Ids | Prompts, **options: Any) -> list[Any]: ...

    def generate(self, prompt: str | Ids | Prompts, **options: Any) -> "str | list[Any]":
        """Continue a prompt: text gives text; a row of ids, new ids; several rows, a list of each.

        Options are those of `gf.generate`: max_new_tokens, temperature, top_k, top_p, stop, seed,
        regex, ...; greedy by default, and `width=4` gives the best of a beam search. A model with
        an answer head gives its answer. `gf.generate` also returns log-probabilities and why a
        sequence ended.
        """
        if "next" not in self.spec.head_names():
            return self._answered(prompt, options)
        made = self.generated(prompt, **options)
        if isinstance(prompt, str):
            return made[0].text
        new = [list(row.tokens) for row in made]
        return new[0] if is_one_row(prompt) else new

    def generated(self, prompt: str | Ids | Prompts, **options: Any) -> list[Generated]:
        """Return what `generate` makes of each row, with log-probabilities and why it ended."""
        given = prompt if isinstance(prompt, str) else self.prompts(prompt)
        tokenizer, request, prompts = prepare(self, given, options)
        if isinstance(request.decoding, BeamSpec):
            return best_of_beams(self, tokenizer, request, prompts)
        with evaluating(self):
            return generate_batch(
                make_stepper(self, request.step),
                prompts,
                spec=request.decoding,
                constraint=request.constraint,
                tokenizer=tokenizer,
            )

    @overload
    def stream(self, prompt: str, **options: Any) -> Iterator[str]: ...

    @overload
    def stream(self, prompt: Sequence[int], **options: Any) -> Iterator[int]: ...

    def stream(
        self, prompt: str | Sequence[int], **options: Any
    ) -> "Iterator[str] | Iterator[int]":
        """Yield what `generate` returns while it is made: pieces of text, or ids for ids.

        `gf.stream_tokens` yields tokens with their text, log-probability and the reason of the end.
        """
        new_tokens = stream_tokens(self, prompt, **options)
        if isinstance(prompt, str):
            return (new.text for new in new_tokens if new.text)
        return (new.token for new in new_tokens)

    def chat(
        self,
        *,
        system: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Conversation:
        """Begin a conversation: `talk("hello")` returns the answer, `talk.ask("hello")` streams it.

        The folder that the model came from has the chat template and its sampling settings, which
        `options` of decoding override; `template_options` are the template's own switches.
        """
        if self.origin is None:
            raise InputError(
                "this model came from no folder, so it has no chat template",
                hint="gf.load a folder that has one, or use model.generate",
            )
        return begin_chat(
            self.origin,
            self.tokenizer,
            lambda step: self.eval().chat_stepper(
                prompt_cache=None if step.prompt_cache is None else Path(step.prompt_cache),
                kv_cache=step.kv_cache,
            ),
            vocab_size=self.spec.vocab_size,
            system=system,
            template_options=template_options,
            options=options,
        )

    def chat_stepper(
        self, *, prompt_cache: Path | None = None, kv_cache: KVCache = "float"
    ) -> Stepper:
        """Return what a conversation runs on: a subclass may keep what its turns share."""
        if prompt_cache is not None:
            raise InputError("prompts are kept for our own models; this one is another library's")
        check_own_cache(kv_cache)
        return self.stepper()

    def _answered(self, prompt: str | Ids | Prompts, options: dict[str, Any]) -> "str | list[Any]":
        """Return the answer of each row; nothing is sampled, so other options are refused."""
        defaults = {field.name: field.default for field in dataclasses.fields(DecodeSpec)}
        for name, value in options.items():
            if name not in defaults:
                raise InputError(
                    f"no decoding option '{name}'", hint=nearest_option(name, defaults)
                )
            if name not in ("max_new_tokens", "seed") and value != defaults[name]:
                raise InputError(
                    "this model gives one answer: there is nothing to sample or to stop",
                    hint=f"leave out {name}",
                )
        if isinstance(prompt, str):
            return self.answer(prompt)
        answers = [self.answer_id(row) for row in self.prompts(prompt).tokens]
        return answers if is_one_row(prompt) else [[answer] for answer in answers]

    def answer(self, prompt: str) -> str:
        """Return the likeliest answer of a model that predicts one for a sequence.

        A token's text, or `answer 3` where answers are classes of their own.
        """
        i = self.answer_id(question(self.tokenizer, prompt))
        return class_name(self.spec, "answer", i, lambda token: self.tokenizer.decode([token]))

    @torch.no_grad()
    def answer_id(self, ids: Sequence[int]) -> int:
        """Return the id of the likeliest answer to a sequence of ids."""
        if "answer" not in self.spec.head_names():
            raise InputError(
                "this model has no head that answers or continues a text",
                hint=f"it has: {', '.join(self.spec.head_names())}",
            )
        with evaluating(self):
            logits_1V: Tensor = self(torch.tensor([list(ids)]), head="answer")
        return int(logits_1V.argmax())

    # --- the lens ---------------------------------------------------------------------------------

    def inspect(
        self,
        text: "str | Batch | Inputs | Tensor | np.ndarray | Sequence[int]",
        *,
        target: str | None = None,
        targets: "int | Sequence[int | None] | np.ndarray | Tensor | None" = None,
        ablate: Sequence[str | HeadName] = (),
        head: str | None = None,
        words: Sequence[str] | None = None,
        source_words: Sequence[str] | None = None,
        names: "Names | Sequence[str] | None" = None,
    ) -> Inspection:
        """Run one sequence and keep everything: attention, logit lens, norms, losses.

        A text: `target` is what should follow; the loss is then of its tokens alone, else of the
        text's own. A model with an answer head takes its answer. For an encoder-decoder the text is
        the source, and without a target the model's own greedy output is inspected.
        Token ids, Inputs, or a Batch of one row: `targets` are ids by position, `head` is the
        output head to read, and `words`, `source_words`, `names` are labels of the tokens.
        `ablate` switches attention heads off.
        """
        model = tapped_model(self)
        if not isinstance(text, str):
            if target is not None:
                raise InputError("a target text for token ids", hint="give their ids as `targets`")
            tokenizer = self.get_tokenizer()
            if names is None and tokenizer is not None:
                names = Words(tokenizer)
            return inspect(
                model,
                text,
                words=words,
                source_words=source_words,
                names=names,
                targets=targets,
                ablate=ablate,
                head=head,
            )
        given = {"targets": targets, "head": head, "words": words, "names": names}
        for name in (name for name, value in given.items() if value is not None):
            raise InputError(f"`{name}` goes with token ids", hint="give ids, or leave it out")
        greedy = DecodeSpec(max_new_tokens=100, eos=self.end_ids(), forbidden=self.nameless_ids())
        return inspect_text(
            model,
            self.tokenizer,
            text,
            target=target,
            ablate=ablate,
            stepper=self.stepper,
            greedy=greedy,
        )


def valid_of(
    input_ids: Tensor, attention_mask: Tensor | None, valid: Tensor | None = None
) -> Tensor | None:
    """Return either mask as our own: True = real token."""
    if attention_mask is not None and valid is not None:
        raise InputError("both `valid` and `attention_mask`", hint="give one of the two")
    name, mask = ("attention_mask", attention_mask) if valid is None else ("valid", valid)
    if mask is None:
        return None
    if mask.shape != input_ids.shape:
        raise InputError(
            f"{name} has shape {tuple(mask.shape)}, the ids {tuple(input_ids.shape)}",
            hint="one number for each token: 1 = real, 0 = padding",
        )
    if mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(
            f"{name} holds other numbers than 0 and 1", hint="1 = real token, 0 = padding"
        )
    return mask == 1


def is_one_row(prompt: Ids | Prompts) -> bool:
    """Return whether ids are a single sequence, not rows of several."""
    if isinstance(prompt, Prompts):
        return False
    if isinstance(prompt, Tensor | np.ndarray):
        return prompt.ndim == 1
    return not any(isinstance(item, Sequence | Tensor | np.ndarray) for item in prompt)


def _rows(ids: Ids) -> "list[list[int]]":
    """Return ids of one or of several sequences as rows."""
    rows: Any = [ids] if is_one_row(ids) else ids
    return [row.tolist() if isinstance(row, Tensor | np.ndarray) else list(row) for row in rows]


class UncachedStepper(Stepper):
    """Decoding over nothing but `forward(ids, mask) -> logits`, for models that are not ours.

    There is no cache: every step runs the complete sequence and takes the last column of logits.
    """

    def __init__(self, forward: Forward, spec: ModelSpec, *, device: torch.device) -> None:
        super().__init__(spec)
        self.forward = forward
        self.device = device

    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, Text]:
        """Read the prompts; nothing is reserved, whatever the room."""
        past = Text(list(prompts.tokens))
        return self._read(past), past

    def step(self, tokens_B: Tensor, *, past: Text) -> Tensor:
        """Add one token to each row, and run everything once more."""
        past.add(tokens_B)
        return self._read(past)

    @torch.no_grad()
    def _read(self, past: Text) -> Tensor:
        tokens_BT, valid_BT = padded(past.rows)
        self.positions += tokens_BT.shape[1]
        valid = None if valid_BT is None else torch.from_numpy(valid_BT).to(self.device)
        return self.forward(torch.from_numpy(tokens_BT).to(self.device), valid)[:, -1]
