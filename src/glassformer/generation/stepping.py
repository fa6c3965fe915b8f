"""`Stepper`: what decoding requires of an engine. `start` reads prompts, `step` adds one token.

Imports no torch: a stepper over plain arrays (`fast.native.ArrayStepper`) decodes without it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from glassformer.generation.prompts import Prompts
from glassformer.spec.checks import check_tree
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from glassformer.generation.choosing import Chooser

# B batch, T length, C steps, V vocab


class Past(Protocol):
    """Everything that was read so far, row by row."""

    def reorder(self, rows_B: "Tensor") -> None:
        """Replace row b by row rows_B[b]; rows may repeat, or be fewer."""


@dataclass(frozen=True, slots=True)
class BeamRun:
    """Beam searches that may go on without their caller while each continues all its beams.

    Item i has rows `first[i]` to `first[i + 1]`, of these `sums`. A run ends before a step that
    chooses one of `ends`, or after which no beam of an item can beat the score `last[i]` (NaN:
    any can), by the length penalties of the shortest completion, after each step, and the longest.
    """

    count: int
    seconds: float
    first: list[int]
    sums: list[float]
    closed: tuple[int, ...]
    ends: tuple[int, ...]
    last: list[float]
    shortest: list[float]
    longest: list[float]


#: The beams after one step, by row: the rows that they continue, their tokens and their sums.
BeamStep = tuple[list[int], list[int], list[float]]


@dataclass(slots=True)
class Speculation:
    """Counts of one decoding: passes through the model, guesses, and the right ones among them.

    `passes` are those after the prompt, `tokens` what they added. `rests` is how often guessing was
    given up for a while because it took longer. `why_not` says why nothing was guessed at all.
    """

    passes: int = 0
    tokens: int = 0
    guessed: int = 0
    right: int = 0
    rests: int = 0
    why_not: str = ""

    @property
    def acceptance(self) -> float:
        """The share of guesses that were right; NaN without any."""
        return self.right / self.guessed if self.guessed else float("nan")

    @property
    def tokens_per_pass(self) -> float:
        """Tokens added by a pass through the model; NaN without any."""
        return self.tokens / self.passes if self.passes else float("nan")

    def __str__(self) -> str:
        if self.why_not:
            return f"no speculation: {self.why_not}"
        if not self.guessed:
            return f"speculation: nothing was guessed in {self.tokens} tokens"
        rests = f", given up for a while {self.rests} x (it took longer)" if self.rests else ""
        return (
            f"speculation: {self.tokens_per_pass:.2f} tokens a pass, {self.right} of {self.guessed}"
            f" guesses right ({self.acceptance:.0%}){rests}"
        )


class Stepper(ABC):
    """A model as decoding reads it: next-token logits after a prompt, then token by token.

    `encoder_calls` and `positions` count the work: runs of the encoder, columns read; `reused` the
    tokens of prompts that were not read again. A past belongs to the stepper that made it.
    `facts` are what a speculating stepper has counted since its last prompt, else None.
    """

    facts: Speculation | None = None

    def __init__(self, spec: ModelSpec) -> None:
        check_decodes(spec)
        self.vocab_size = spec.vocab_size
        self.max_seq_len = spec.max_seq_len
        self.source_vocab = None if spec.encoder is None else spec.source_vocab
        self.encoder_calls = 0
        self.positions = 0
        self.reused = 0

    @abstractmethod
    def start(self, prompts: Prompts, *, room: int) -> "tuple[Tensor, Any]":
        """Read checked prompts: next-token logits (B, V), and the past with `room` to grow."""

    @abstractmethod
    def step(self, tokens_B: "Tensor", *, past: Any) -> "Tensor":
        """Add one token to each row: next-token logits (B, V), valid until the next step."""

    def run_greedy(
        self,
        tokens_B: "Tensor",
        *,
        past: Any,
        count: int,
        ends: Sequence[int],
        closed: Sequence[int],
        logprobs: bool,
        seconds: float,
    ) -> tuple[list[list[int]], list[list[float]]] | None:
        """Add the tokens, then the likeliest after them, and so on; None: not offered.

        Return a list of tokens (B) for each step and their log-probabilities (NaN if not
        requested): at most `count` steps, about as many as take `seconds`. A run may end with a
        step in which a row has one of `ends`; rows may also leave (`reorder`) before its other
        steps have been read. Of equal tokens the first is chosen, never one of `closed`; NOTHING
        (-1) where there is none. The next run begins with the last tokens chosen.
        """
        return None

    def chooser(
        self, spec: DecodeSpec, prompts: Prompts, *, logprobs: bool, count: int
    ) -> "Chooser":
        """Return what chooses tokens in one decoding; `count` likeliest are reported, too."""
        import torch

        from glassformer.generation.samplers import SamplingChooser

        return SamplingChooser(
            spec,
            prompts,
            vocab_size=self.vocab_size,
            logprobs=logprobs,
            count=count,
            array=torch.from_numpy,
        )

    def run_beams(
        self, tokens_B: "Tensor", *, past: Any, run: BeamRun
    ) -> "tuple[Tensor, list[BeamStep]]":
        """Add the tokens, and then those of any number of beam steps, `run.count` at most.

        Return the logits after the last, as `step` does, and those steps.
        """
        return self.step(tokens_B, past=past), []


class RewindingStepper(Stepper):
    """A stepper that reads several tokens of one row at once, and takes the last ones back."""

    @abstractmethod
    def read_several(self, tokens: Sequence[int], *, past: Any) -> "Tensor":
        """Add several tokens to the only row: next-token logits (T, V) after each, to be kept."""

    @abstractmethod
    def forget(self, count: int, *, past: Any) -> None:
        """Take back the last tokens that were added."""


def check_decodes(spec: ModelSpec) -> None:
    """Require known parts, and a head that predicts the next token."""
    check_tree(spec)
    if "next" not in spec.head_names():
        raise InputError(
            "this model has no next-token head to decode with",
            hint=f"it has: {', '.join(spec.head_names())}; "
            "{glass inspect shows|model.answer(text) returns} what it predicts",
        )
