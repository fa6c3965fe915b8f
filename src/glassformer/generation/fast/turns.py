"""`Turns`: the native step of a conversation, whose turns begin as the turn before did.

One row at a time. What the last prompt and its answer have in common with the next prompt is not
read again. Imports no torch; `warm.WarmStepper` is the same over a torch model.
"""

from collections.abc import Sequence
from typing import Any

from glassformer.generation.fast.native import ArrayStepper, NativePast, Rows
from glassformer.generation.fast.program import Source
from glassformer.generation.prompts import Prompts, shared_length
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

# B batch (always 1), V vocab


class Turns(ArrayStepper):
    """A native step for one decoder; `reused` counts the tokens that were not read again."""

    def __init__(self, model: ModelSpec, source: Source, *, kv_cache: KVCache = "float") -> None:
        super().__init__(model, source, kv_cache=kv_cache)
        self._begin_turns(model)

    def _begin_turns(self, model: ModelSpec) -> None:
        if model.encoder is not None:
            raise InputError("a conversation needs a decoder", hint="use NativeStepper")
        self._past: NativePast | None = None
        self._ids: list[int] = []  # of the positions in it

    def start(self, prompts: Prompts, *, room: int) -> tuple[Any, NativePast]:
        """Read the part of the prompt that neither the last past nor the folder holds."""
        if len(prompts) != 1:
            raise InputError(f"{len(prompts)} prompts at once", hint="one, or use NativeStepper")
        self._notice_new_weights()
        ids, held, before = prompts.tokens[0], self._past, self._ids
        self._past, self._ids = None, []  # nothing is held if reading is interrupted
        shared = 0
        if held is not None and held.own.pages is self.pages:
            shared = shared_length(before, ids[:-1])
        kept = None if self._kept is None else self._kept.find(ids)
        length = 0 if kept is None else kept[0]
        if held is None or shared <= length:
            past = NativePast(Rows(self.pages, 1), None)
            logits_1V = self._begin(prompts, [kept], past)
        else:
            past = NativePast(held.own, None)  # the same rows; who has the other past may not step
            past.cut([shared])
            self.reused += shared
            logits_1V = self.read([ids[shared:]], past=past)
            self._keep(prompts, [length], past)
        self._past, self._ids = past, list(ids)
        return logits_1V, past

    def step(self, tokens_B: Any, *, past: NativePast) -> Any:
        self._check(past)
        logits_1V = super().step(tokens_B, past=past)
        self._ids += tokens_B.tolist()
        return logits_1V

    def run_greedy(
        self,
        tokens_B: Any,
        *,
        past: NativePast,
        count: int,
        ends: Sequence[int],
        closed: Sequence[int],
        logprobs: bool,
        seconds: float,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Choose tokens as `ArrayStepper` does; all but the last of them have been read."""
        self._check(past)
        made, values = super().run_greedy(
            tokens_B,
            past=past,
            count=count,
            ends=ends,
            closed=closed,
            logprobs=logprobs,
            seconds=seconds,
        )
        self._ids += [*tokens_B.tolist(), *(token for (token,) in made[:-1])]
        return made, values

    def _check(self, past: NativePast) -> None:
        if past is not self._past:
            raise InputError(
                "this past was cut by a later prompt", hint="finish one before another"
            )
