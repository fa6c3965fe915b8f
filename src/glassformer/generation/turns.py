"""`Turns`: the stepper of a conversation, whose turns begin as the turn before did.

One row at a time, over any stepper whose states can be taken back. What the last prompt and its
answer have in common with the next prompt is not read again. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from glassformer.models.prompts import Prompts, shared_length
from glassformer.models.stepping import Stepper
from glassformer.spec.errors import InputError
from glassformer.spec.state import State

if TYPE_CHECKING:
    from torch import Tensor

# B batch (always 1), V vocab


@dataclass(slots=True)
class Turn(State):
    """The state of the conversation so far, and the ids in it."""

    past: State
    ids: list[int]

    def reorder(self, rows: Sequence[int]) -> None:
        if list(rows) != [0]:
            raise InputError("a conversation is one row", hint="use the stepper without turns")


class Turns(Stepper):
    """A stepper for one decoder; `reused` counts the tokens that were not read again."""

    def __init__(self, inner: Stepper) -> None:
        if inner.source_vocab is not None or inner.forward_only:
            what = f"one that {inner.forward_only}" if inner.forward_only else "an encoder-decoder"
            raise InputError(
                f"a conversation needs a decoder whose state can be taken back, not {what}",
                hint="use the stepper without turns",
            )
        # The inner one has checked the spec.
        self.inner, self.facts = inner, inner.facts
        self.vocab_size, self.max_seq_len = inner.vocab_size, inner.max_seq_len
        self.source_vocab = None
        self.finds_likeliest_in_c = inner.finds_likeliest_in_c
        self.turn: Turn | None = None
        self._shared = 0
        self._count()

    def _count(self) -> None:
        self.encoder_calls, self.positions = self.inner.encoder_calls, self.inner.positions
        self.reused = self._shared + self.inner.reused

    def array(self, numbers: NDArray[Any]) -> Any:
        return self.inner.array(numbers)

    def start(self, prompts: Prompts, *, room: int) -> "tuple[Tensor, Turn]":
        """Read the part of the prompt that neither the last turn nor the disk holds."""
        if len(prompts) != 1:
            raise InputError(f"{len(prompts)} prompts at once", hint="one prompt for each turn")
        ids, held = list(prompts.tokens[0]), self.turn
        self.turn, shared = None, 0  # nothing is held if reading is interrupted
        # The last token is always read: its logits are the result.
        if held is not None and self.inner.is_current(held.past):
            shared = held.past.reach(0, shared_length(held.ids, ids[:-1]))
        if held is None or shared <= self.inner.kept(ids):
            logits_1V, past = self.inner.start(prompts, room=room)
        else:
            past = held.past
            past.rewind([shared])
            logits_1V = self.inner.extend(ids[shared:], past=past)
            self.inner.keep(ids, past=past)
            self._shared += shared
        self.turn = Turn(past, ids)
        self._count()
        return logits_1V, self.turn

    def step(self, tokens_B: "Tensor", *, past: Turn) -> "Tensor":
        self._check(past)
        logits_1V = self.inner.step(tokens_B, past=past.past)
        past.ids += tokens_B.tolist()
        self._count()
        return logits_1V

    def run_greedy(
        self,
        tokens_B: "Tensor",
        *,
        past: Turn,
        count: int,
        ends: Sequence[int],
        closed: Sequence[int],
        logprobs: bool,
        seconds: float,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Choose tokens as the inner stepper does; all but the last of them have been read."""
        self._check(past)
        made = self.inner.run_greedy(
            tokens_B,
            past=past.past,
            count=count,
            ends=ends,
            closed=closed,
            logprobs=logprobs,
            seconds=seconds,
        )
        if made[0]:
            past.ids += [*tokens_B.tolist(), *(token for (token,) in made[0][:-1])]
        self._count()
        return made

    def _check(self, past: Turn) -> None:
        if past is not self.turn:
            raise InputError(
                "this past was cut by a later prompt", hint="finish one before another"
            )
