"""What decoding requires of an engine: `Stepper` for a batch, `Slots` for continuous batching.

Of a stepper, `start` reads prompts and `step` adds one token. Slots read spans: some new tokens of
some sequences, one for a sequence that is being continued, many for a prompt. Imports no torch: a
stepper over plain arrays decodes without it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from glassformer.models.prompts import Prompts
from glassformer.spec.checks import check_tree
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec
from glassformer.store.states import read_state, write_state

if TYPE_CHECKING:
    from torch import Tensor, device

# B batch, T length, C steps, V vocab, R rows (tokens of a step)


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
    tokens of prompts that were not read again. A past is a `State` (`spec.state`) of the stepper
    that made it. `facts` are what a speculating stepper has counted since its last prompt, or None.
    """

    facts: Speculation | None = None
    #: Why its states cannot be taken back and read several tokens at once; empty if they can.
    forward_only = "reads one token at a time"
    #: True if greedy tokens are found by the C routine, as those of its runs are.
    finds_likeliest_in_c = False

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

    def extend(self, tokens: Sequence[int], *, past: Any, every: bool = False) -> "Tensor":
        """Add several tokens to the only row: logits (1, V) after the last, or `every` (T, V)."""
        raise InputError(f"{type(self).__name__} {self.forward_only}", hint="TorchStepper")

    def save(self, path: Path, *, past: Any, tokens: Sequence[int] = ()) -> None:
        """Write a state to a file; `tokens` are what its only row has read, to be noted there."""
        write_state(path, self.stored(past), model=self.identity(), tokens=tokens)

    def load(self, path: Path, *, room: int) -> Any:
        """Read a state that this model has written, with `room` to grow."""
        return self.restored(read_state(path, model=self.identity()), room=room)

    def identity(self) -> str:
        """Return a digest of everything that the numbers of a state depend on."""
        raise InputError(
            f"the states of a {type(self).__name__} are not written to files",
            hint="NativeStepper, TorchStepper and HandStepper have states that are",
        )

    def stored(self, past: Any) -> dict[str, NDArray[Any]]:
        """Return the arrays of a state as NumPy's."""
        found: dict[str, NDArray[Any]] = past.arrays()
        return found

    def restored(self, arrays: Mapping[str, NDArray[Any]], *, room: int) -> Any:
        """Return a state that holds copies of these arrays."""
        raise AssertionError("whoever has an identity has this")

    def is_current(self, past: Any) -> bool:
        """Return True if the weights are those that a past was read with."""
        return True

    def kept(self, prompt: Sequence[int]) -> int:
        """Return the number of a prompt's first tokens that `start` would find on disk."""
        return 0

    def keep(self, prompt: Sequence[int], *, past: Any) -> None:
        """Keep the prompt that the only row has read, if there is a place for it."""
        assert not self.kept(prompt), "what is found again is kept by the same class"

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
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Add the tokens, then the likeliest after them, and so on; or do nothing.

        Return a list of tokens (B) for each step and their log-probabilities (NaN if not
        requested), none if nothing was added: at most `count` steps, about as many as take
        `seconds`. A run may end with a step in which a row has one of `ends`; rows may also leave
        (`reorder`) before its other steps have been read. Of equal tokens the first is chosen,
        never one of `closed`; NOTHING (-1) where there is none. The next run begins with the last
        tokens chosen.
        """
        return [], []

    def array(self, numbers: NDArray[Any]) -> Any:
        """Return an array as this stepper takes and gives them: as a tensor."""
        import torch

        return torch.from_numpy(numbers)

    def run_beams(
        self, tokens_B: "Tensor", *, past: Any, run: BeamRun
    ) -> "tuple[Tensor, list[BeamStep]]":
        """Add the tokens, and then those of any number of beam steps, `run.count` at most.

        Return the logits after the last, as `step` does, and those steps.
        """
        return self.step(tokens_B, past=past), []


# --- slots ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one slot, at positions `start`, `start + 1`, …; what is before is kept.

    Logits are wanted after the last of them; of a `scored` span, after each.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    scored: bool = False

    @property
    def rows(self) -> int:
        """The number of rows of logits that are wanted of it."""
        return len(self.tokens) if self.scored else 1


def wanted_rows(spans: Sequence[Span]) -> list[int]:
    """Return the tokens, counted through all spans, after which logits are wanted."""
    rows: list[int] = []
    end = 0
    for span in spans:
        end += len(span.tokens)
        rows += range(end - span.rows, end)
    return rows


class Slots(ABC):
    """The memory of some sequences and the step over them, as continuous batching uses it.

    `cuts_prompts` says whether a prompt may be read in several spans, and a slot be continued from
    any position; without it a span begins a slot or adds one token.
    """

    cuts_prompts: bool
    invariant: bool
    #: Positions that two prompts must share before copying them is less work than reading them.
    worth_copying = 1
    #: Slots beyond those of a step: they keep what sequences without one have read.
    spare = 0

    def __init__(self, spec: ModelSpec, *, slots: int, context: int) -> None:
        check_decodes(spec)
        if not 1 < context <= spec.max_seq_len:
            raise InputError(
                f"a context of {context} tokens for a model of {spec.max_seq_len}",
                hint=f"2 to {spec.max_seq_len}",
            )
        if slots < 1:
            raise InputError(f"{slots} slots", hint="at least 1")
        self.slots, self.max_seq_len = slots, context
        self.vocab_size = spec.vocab_size
        self.source_vocab = None if spec.encoder is None else spec.source_vocab

    @abstractmethod
    def read(self, spans: Sequence[Span]) -> "Tensor":
        """Read one span of each of some slots: next-token logits (R, V), the spans' rows in order.

        They are valid until the next step.
        """

    def run_greedy(
        self,
        spans: Sequence[Span],
        *,
        count: int,
        ends: Sequence[int],
        closed: Sequence[int],
        seconds: float,
    ) -> list[list[int]]:
        """Read one token of each of some slots, then the likeliest after it, and so on.

        Return the tokens chosen in each step, as `Stepper.run_greedy` does; none: not offered.
        """
        return []

    @abstractmethod
    def copy(self, source: int, target: int, *, length: int) -> None:
        """Copy the first positions of one slot to another."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """The most bytes that keys and values take."""


class AheadSlots(Slots):
    """Slots whose next step is launched before the tokens of the last one have been seen.

    The last token of each slot stays on the `device`.
    """

    device: "device"

    @abstractmethod
    def there(self, values: Any) -> "Tensor":
        """Return numbers on the device, without waiting for what it is doing."""

    @abstractmethod
    def advance(self, slots: Sequence[int], ends: Sequence[int]) -> "Tensor":
        """Read each slot's last token as position end - 1: logits (rows, V), soon overwritten."""

    @abstractmethod
    def keep(self, slots: Sequence[int], tokens_R: "Tensor") -> None:
        """Set the last token of some slots; an id below 0, which is no token, becomes 0."""


def check_decodes(spec: ModelSpec) -> None:
    """Require known parts, and a head that predicts the next token."""
    check_tree(spec)
    if "next" not in spec.head_names():
        raise InputError(
            "this model has no next-token head to decode with",
            hint=f"it has: {', '.join(spec.head_names())}; "
            "{glass inspect shows|model.answer(text) returns} what it predicts",
        )
