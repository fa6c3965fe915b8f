"""`PrefixCacheStepper`: keeps its cache between prompts, because a conversation's next prompt
begins like its last one.

What two prompts share is not read again; where they differ, the cache is cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from glassformer.generation.prompts import Prompts
from glassformer.generation.stepper import Stepper, decodable
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.nn.cache import GrowingCache
from glassformer.spec.errors import InputError

# B batch (always 1), T length, V vocab


@dataclass(slots=True)
class PrefixPast:
    """The cache and the ids in it; `call` numbers the decoding that it belongs to."""

    cache: GrowingCache
    ids: list[int]
    call: int

    def reorder(self, rows_B: Tensor) -> None:
        if rows_B.tolist() != [0]:
            raise InputError("a prefix cache holds one row", hint="use TorchStepper for several")


class PrefixCacheStepper(Stepper):
    """A stepper for one decoder and one row at a time; `reused` counts positions not read again."""

    def __init__(self, model: Model) -> None:
        if model.spec.encoder is not None:
            raise InputError("a conversation needs a decoder", hint="use TorchStepper")
        self.model = decodable(model)
        super().__init__(model.spec)
        self.reused = 0
        self._past = PrefixPast(GrowingCache(), [], 0)

    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, PrefixPast]:
        """Read the part of the prompt that the cache does not hold; the cache grows as needed."""
        if len(prompts) != 1:
            raise InputError(f"{len(prompts)} prompts at once", hint="one, or use TorchStepper")
        ids = list(prompts.tokens[0])
        held = self._past
        # The last token is always read: its logits are the result.
        shared = 0
        while shared < min(len(held.ids), len(ids) - 1) and held.ids[shared] == ids[shared]:
            shared += 1
        held.cache.cut(shared)
        self._past = PrefixPast(held.cache, ids[:shared], held.call + 1)
        self.reused += shared
        return self._read(ids[shared:], self._past), self._past

    def step(self, tokens_B: Tensor, *, past: PrefixPast) -> Tensor:
        if past.call != self._past.call:
            raise InputError(
                "this past was cut by a later prompt", hint="finish one before another"
            )
        return self._read(tokens_B.tolist(), past)

    @torch.no_grad()
    def _read(self, ids: list[int], past: PrefixPast) -> Tensor:
        tokens_BT = torch.tensor([ids], device=next(self.model.parameters()).device)
        try:
            hidden_BTD = self.model.hidden(Inputs(tokens_BT), cache=past.cache)
        except BaseException:  # some layers may hold the new positions and others not
            past.cache.cut(0)
            past.ids.clear()
            raise
        past.ids += ids
        self.positions += len(ids)
        return self.model.project(hidden_BTD[:, -1], "next")
