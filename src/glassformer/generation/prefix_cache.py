"""`WarmStepper`: the next prompt of a conversation begins like the last one, so its past is kept.

What two prompts share is not read again; where they part, the past is cut. The rest is
`TorchStepper`'s.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from glassformer.generation.prompts import Prompts
from glassformer.generation.stepper import check_decodes, check_eval
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.nn.cache import GrowingCache
from glassformer.spec.errors import InputError

# B batch (always 1), T length, V vocab


@dataclass(slots=True)
class WarmPast:
    """The cache and the ids that it holds; `call` names the decoding it belongs to."""

    cache: GrowingCache
    ids: list[int]
    call: int

    def reorder(self, rows_B: Tensor) -> None:
        if rows_B.tolist() != [0]:
            raise InputError("a warm past holds one row", hint="use TorchStepper for several")


class WarmStepper:
    """A `Stepper` for one decoder and one row at a time; `reused` counts what was read before."""

    def __init__(self, model: Model) -> None:
        check_decodes(model.spec)
        check_eval(model)
        if model.spec.encoder is not None:
            raise InputError("a conversation needs a decoder", hint="use TorchStepper")
        self.model = model
        self.vocab_size = model.spec.vocab_size
        self.max_seq_len = model.spec.max_seq_len
        self.source_vocab: int | None = None
        self.encoder_calls = 0
        self.positions = 0
        self.reused = 0
        self._past = WarmPast(GrowingCache(), [], 0)

    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, WarmPast]:
        """`room` is not needed: the past grows."""
        if len(prompts) != 1:
            raise InputError(f"{len(prompts)} prompts at once", hint="one, or use TorchStepper")
        ids = list(prompts.tokens[0])
        held = self._past
        # The last token is always read: its logits are the answer.
        shared = 0
        while shared < min(len(held.ids), len(ids) - 1) and held.ids[shared] == ids[shared]:
            shared += 1
        held.cache.cut(shared)
        self._past = WarmPast(held.cache, ids[:shared], held.call + 1)
        self.reused += shared
        return self._read(ids[shared:], self._past), self._past

    def step(self, tokens_B: Tensor, *, past: WarmPast) -> Tensor:
        if past.call != self._past.call:
            raise InputError(
                "this past was cut by a later prompt", hint="finish one before another"
            )
        return self._read(tokens_B.tolist(), past)

    @torch.no_grad()
    def _read(self, ids: list[int], past: WarmPast) -> Tensor:
        tokens_BT = torch.tensor([ids], device=next(self.model.parameters()).device)
        try:
            hidden_BTD = self.model.hidden(Inputs(tokens_BT), cache=past.cache)
        except BaseException:  # some layers may hold the new places and others not
            past.cache.cut(0)
            past.ids.clear()
            raise
        past.ids += ids
        self.positions += len(ids)
        return self.model.project(hidden_BTD[:, -1], "next")
