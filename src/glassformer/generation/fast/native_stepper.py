"""`NativeStepper`: the native step of a torch model, over the model's own memory.

The default on a CPU (`choice.fastest_stepper`) for models that the C file can run
(`from_model.why_not`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.generation.fast.from_model import ModelSource, why_not
from glassformer.generation.fast.native import ArrayStepper, NativePast
from glassformer.generation.fast.program import PAGE
from glassformer.generation.fast.prompt_cache import LEAST, PromptCache
from glassformer.models.decodable import decodable
from glassformer.models.model import Holder, Model
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import RewindingStepper
from glassformer.nn.linear import PackedWeight
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import InputError

# B rows, V vocab


class NativeStepper(ArrayStepper):
    """An `ArrayStepper` over a torch model; tensors that it gives share memory with its arrays.

    With `prompt_cache`, a folder, prompts are read from where they differ from those that are kept
    there, and are kept in their turn; `reused` counts the tokens that were not read again.
    """

    def __init__(
        self,
        model: Model | Holder,
        *,
        prompt_cache: Path | None = None,
        kv_cache: KVCache = "float",
    ) -> None:
        self.model = decodable(model)
        RewindingStepper.__init__(self, self.model.spec)
        if reason := why_not(self.model, kv_cache=kv_cache):
            raise InputError(f"no native step: {reason}", hint="TorchStepper runs any model")
        if prompt_cache is not None and self.model.spec.encoder is not None:
            raise InputError("a prompt cache is for decoders: answers to a source begin alike")
        self.prompt_cache, self.kv_cache = prompt_cache, kv_cache
        self._version: tuple[int, ...] = ()
        self._kept: PromptCache | None = None
        self._prepare()

    def array(self, numbers: NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers)

    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, NativePast]:
        """Read the prompts in blocks, from where they differ from what is kept."""
        self._notice_new_weights()
        if self._kept is None:
            return super().start(prompts, room=room)
        found = [self._kept.find(row) for row in prompts.tokens]
        lengths = [0 if one is None else one[0] for one in found]
        past = self._begun(prompts)
        past.own.reserve(max(lengths))
        for row, one in enumerate(found):
            if one is not None:
                past.own.fill(row, one[1], length=one[0])
        self.reused += sum(lengths)
        rest = [tokens[length:] for tokens, length in zip(prompts.tokens, lengths, strict=True)]
        logits_BV: Tensor = self.read(rest, past=past)
        for row, tokens in enumerate(prompts.tokens):
            self._keep(tokens, past, row=row, length=lengths[row])
        return logits_BV, past

    def empty_past(self, rows: int, *, room: int) -> NativePast:
        """Return rows without a token, with all the memory that `room` positions of each take."""
        self._notice_new_weights()
        return super().empty_past(rows, room=room)

    def is_current(self, past: NativePast) -> bool:
        """Return True if the weights are those that a past was read with."""
        self._notice_new_weights()
        return past.own.pages is self.pages

    def kept(self, prompt: Sequence[int]) -> int:
        """Return the number of a prompt's first tokens that are in the folder."""
        self._notice_new_weights()
        return 0 if self._kept is None else self._kept.longest(prompt)[0]

    def keep(self, prompt: Sequence[int], *, past: NativePast) -> None:
        self._keep(prompt, past, row=0, length=self.kept(prompt))

    def _keep(self, prompt: Sequence[int], past: NativePast, *, row: int, length: int) -> None:
        """Keep the full pages of a prompt if enough is new; `length` of it are kept already."""
        full = len(prompt) // PAGE
        if self._kept is not None and full >= length // PAGE + LEAST:
            self._kept.keep(prompt[: full * PAGE], past.own.full_pages(row)[:full])

    def _notice_new_weights(self) -> None:
        """Write the program again if the model was trained, loaded or moved since."""
        now = tuple(x for p in self.model.parameters() for x in (p._version, p.data_ptr()))
        now += tuple(m.loads for m in self.model.modules() if isinstance(m, PackedWeight))
        if now == self._version:
            return
        if reason := why_not(self.model, kv_cache=self.kv_cache):
            raise InputError(f"no native step any more: {reason}", hint="make another stepper")
        self._write(self.model.spec, ModelSource(self.model))
        self._kept = None
        if self.prompt_cache is not None:
            self._kept = PromptCache(
                self.prompt_cache, self.model, page=self.pages.page, kv_cache=self.kv_cache
            )
        self._version = now
