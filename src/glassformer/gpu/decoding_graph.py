"""A decoding step as one launch: a CUDA graph, with the choice of the next tokens where requested.

A graph reads and writes fixed addresses, so it has tokens, counters and masks of its own, and a
decoding copies its own into them. What is counted from step to step is counted on the GPU: many
steps are launched without waiting for any, and their choices are read afterwards.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import ModuleType

import torch
from torch import Tensor

from glassformer.gpu.derived_products import Projection
from glassformer.gpu.derived_step import Lines
from glassformer.gpu.products import Gained
from glassformer.models.stepping import BeamRun, BeamStep

# B rows, S positions, V vocab, C steps whose choices are kept, I items (searches)

KEPT = 64  # choices that a graph keeps until they are read
SLICE = 8  # steps that are launched at once
#: The kinds of a record: the step alone, with the likeliest tokens, with beams of some width.
STEP, GREEDY = 0, 1


@dataclass(frozen=True, slots=True)
class StepState:
    """The operands of a step that belong to one decoding.

    `pads_B` counts the columns before each row's first token; masks and crosses have a row for
    each prompt.
    """

    pads_B: Tensor
    mask_B11S: Tensor | None
    crosses: list[tuple[Tensor, Tensor]]
    cross_mask_B11S: Tensor | None
    lines: Lines | None

    def tensors(self) -> list[Tensor]:
        """Return all of them, in one order."""
        found = [self.pads_B, *(self.lines or ())]
        found += [mask for mask in (self.mask_B11S, self.cross_mask_B11S) if mask is not None]
        return found + [one for pair in self.crosses for one in pair]

    def clone(self) -> "StepState":
        """Return copies in memory of their own."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        made = {name: x.clone() for name, x in own.items() if isinstance(x, Tensor)}
        lines = None if self.lines is None else Lines(*(x.clone() for x in self.lines))
        crosses = [(k.clone(), v.clone()) for k, v in self.crosses]
        return StepState(**(own | made | {"lines": lines, "crosses": crosses}))

    def copy_(self, other: "StepState") -> None:
        """Take over the numbers of operands of the same shapes."""
        for own, given in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(given)

    @property
    def shape(self) -> tuple[object, ...]:
        """What a graph is recorded for."""
        cross = self.crosses[0][0].shape if self.crosses else None
        masks = self.mask_B11S is None, self.cross_mask_B11S is None
        prompts = None if self.mask_B11S is None else len(self.mask_B11S)
        return len(self.pads_B), prompts, masks, cross, self.lines is None


class Recorded:
    """A step over some memory, and its operands; `logits_BV` is overwritten by the next replay.

    `kind` is STEP, GREEDY, or the width of the widest beam search from 2 on. `choose` are the
    kernels that choose tokens, if they can run here; with a `finder`, a head that finds the
    likeliest tokens itself, GREEDY makes no logits. Recording writes to the next column alone.
    """

    def __init__(
        self,
        step: Callable[..., Tensor],
        kvs: list[Tensor],
        state: StepState,
        *,
        length: int,
        kind: int,
        vocab_size: int,
        choose: ModuleType | None,
        finder: Projection | None = None,
    ) -> None:
        self.step_function, self.kvs, self.kind, self.choose = step, kvs, kind, choose
        self.finder = finder if kind == GREEDY else None
        self.state = state.clone()
        device, B = state.pads_B.device, len(state.pads_B)
        self.device = device
        self.flagged: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        self.tokens_B = torch.zeros(B, dtype=torch.long, device=device)
        self.places_B = torch.zeros(B, dtype=torch.long, device=device)
        self.counters = torch.zeros(5, dtype=torch.long, device=device)
        self.flags_V = torch.zeros(vocab_size + 1, dtype=torch.uint8, device=device)
        self.made_CB = torch.zeros(KEPT, B, dtype=torch.long, device=device)
        self.values_CB = torch.zeros(KEPT, B, device=device)
        self.launched = 0
        if kind > GREEDY:
            self.parents_CB = torch.zeros_like(self.made_CB)
            self.totals_CB = torch.zeros(KEPT, B, dtype=torch.float64, device=device)
            # Sums, scores to beat and length penalties, in one tensor: they arrive together.
            self.numbers = torch.zeros(3 * B + KEPT, dtype=torch.float64, device=device)
            self.first = torch.zeros(B + 1, dtype=torch.long, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            return
        # Kernels are compiled and libraries set up on another stream before anything is recorded.
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            for _ in range(2):
                self._count_from(length, limit=0)
                self._run()
        torch.cuda.current_stream().wait_stream(warm_up)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()

    def _run(self) -> None:
        """Run the step and the choice once; this is what is recorded."""
        state = self.state
        lines_BS = None if state.lines is None else state.lines.lines_BS
        if self.choose is not None:
            self.choose.begin(self.counters, state.pads_B, self.places_B, lines_BS)
        else:
            self.counters[:1].add_(self.counters[1:2])
            torch.sub(self.counters[:1] - 1, state.pads_B, out=self.places_B)
        self.logits_BV = self.step_function(
            self.tokens_B,
            self.kvs,
            self.counters[:1],
            positions_B=self.places_B,
            mask_B11S=state.mask_B11S,
            crosses=state.crosses,
            cross_mask_B11S=state.cross_mask_B11S,
            lines=state.lines,
            head=None if self.finder is None else self._find,
        )
        if self.kind == STEP or self.finder is not None:
            return
        assert self.choose is not None
        chosen = self.logits_BV, self.flags_V, self.counters, self.tokens_B
        if self.kind == GREEDY:
            self.choose.choose_likeliest(*chosen, self.made_CB, self.values_CB)
            return
        assert lines_BS is not None
        B = len(self.tokens_B)
        sums_B, last_I, longest_I, shortest_C = self.numbers.split((B, B, B, KEPT))
        self.choose.choose_beams(
            *chosen,
            sums_B,
            lines_BS,
            first=self.first,
            last_I=last_I,
            longest_I=longest_I,
            shortest_C=shortest_C,
            parents_CB=self.parents_CB,
            tokens_CB=self.made_CB,
            totals_CB=self.totals_CB,
            width=self.kind,
        )

    def _find(self, x_BD: Tensor | Gained) -> Tensor:
        """Choose the likeliest tokens without their logits, and return them."""
        assert self.finder is not None and self.choose is not None
        parts = self.finder.find(x_BD, self.flags_V)
        self.choose.keep_likeliest(
            *parts, self.counters, self.tokens_B, self.made_CB, self.values_CB
        )
        return self.tokens_B

    def _count_from(self, length: int, *, limit: int) -> None:
        counters = torch.tensor([length, 1, -1, limit, 0])
        self.counters.copy_(_pinned(counters, self.device), non_blocking=True)
        self.launched = 0

    def _replay(self, times: int) -> None:
        for _ in range(times):
            if self.graph is None:
                self._run()
            else:
                self.graph.replay()
        self.launched += times

    def take_up(self, state: StepState, *, length: int) -> None:
        """Copy a decoding's state in; `length` counts what it has read."""
        self.state.copy_(state)
        self._count_from(length, limit=0)

    def set_tokens(self, tokens_B: Tensor, rows: list[int] | None) -> None:
        """Set the tokens that are read next, of the first rows or of these."""
        tokens_B = tokens_B.to(self.device)
        if rows is None:
            self.tokens_B[: len(tokens_B)].copy_(tokens_B)
        else:
            self.tokens_B.index_copy_(0, self._there(rows), tokens_B)

    def step(self, rows: list[int] | None, count: int) -> Tensor:
        """Return the logits of the rows that go on, the first `count` or these."""
        self._replay(1)
        if rows is None:
            return self.logits_BV[:count]
        return self.logits_BV.index_select(0, self._there(rows))

    def _there(self, rows: list[int]) -> Tensor:
        """Return numbers of rows on the device, without waiting for it."""
        return _pinned(torch.tensor(rows), self.device).to(self.device, non_blocking=True)

    def close(self, closed: Sequence[int], ends: Sequence[int]) -> None:
        """Set the tokens that may not be chosen, and those that end a beam."""
        if (flags := (tuple(closed), tuple(ends))) == self.flagged:
            return
        assert self.choose is not None
        flags_V = torch.zeros(len(self.flags_V), dtype=torch.uint8)
        flags_V[list(ends)] = self.choose.END
        flags_V[list(closed)] |= self.choose.CLOSED
        flags_V[-1] = bool(closed)
        self.flags_V.copy_(flags_V)
        self.flagged = flags

    def launch_greedy(self, count: int, rows: list[int] | None) -> "Ahead":
        """Launch up to `count` steps with the likeliest tokens; return what these rows choose."""
        begin = self.launched % KEPT
        count = min(count, SLICE, KEPT - begin)
        self._replay(count)
        kept = slice(begin, begin + count)
        return Ahead(_fetched(self.made_CB[kept], self.values_CB[kept]), count, rows)

    def run_beams(self, run: BeamRun, *, count: int, length: int) -> list[BeamStep]:
        """Read the tokens, and search on, `count` times at most; see `Stepper.run_beams`."""
        B, I = len(self.tokens_B), len(run.first) - 1  # noqa: E741  items
        numbers = torch.ones(3 * B + KEPT, dtype=torch.float64)
        for begin, some in ((0, run.sums), (B, run.last), (2 * B, run.longest)):
            numbers[begin : begin + len(some)] = torch.tensor(some, dtype=torch.float64)
        numbers[3 * B : 3 * B + count] = torch.tensor(run.shortest[:count], dtype=torch.float64)
        first = torch.full((B + 1,), run.first[-1])
        first[: I + 1] = torch.tensor(run.first)
        self.numbers.copy_(_pinned(numbers, self.device), non_blocking=True)
        self.first.copy_(_pinned(first, self.device), non_blocking=True)
        self._count_from(length, limit=count)
        # One slice is under way while the one before it is looked at: has the search gone on?
        under_way: list[Callable[[], list[Tensor]]] = []
        while self.launched < count + 1:
            self._replay(min(SLICE, count + 1 - self.launched))
            under_way.append(_fetched(self.counters))
            if len(under_way) > 1 and not int(under_way.pop(0)()[0][1]):
                break
        counters = under_way[-1]()[0].tolist()
        made = counters[2]
        histories = _fetched(self.parents_CB[:made], self.made_CB[:made], self.totals_CB[:made])()
        rows = run.first[-1]
        return list(zip(*(one[:, :rows].tolist() for one in histories), strict=True))


@dataclass(slots=True)
class Ahead:
    """Tokens and log-probabilities that the GPU chooses, or has chosen, before they are read."""

    fetch: Callable[[], list[Tensor]]
    count: int
    rows: list[int] | None  # those that are still wanted, of the graph's

    def keep(self, rows: list[int]) -> None:
        """Forget the rows that have ended."""
        self.rows = rows if self.rows is None else [self.rows[row] for row in rows]

    def read(self, *, logprobs: bool) -> tuple[list[list[int]], list[list[float]]]:
        """Return tokens and log-probabilities of each step; NaN if they are not requested."""
        tokens_CB, values_CB = self.fetch()
        if self.rows is not None:
            tokens_CB, values_CB = tokens_CB[:, self.rows], values_CB[:, self.rows]
        tokens: list[list[int]] = tokens_CB.tolist()
        if logprobs:
            return tokens, values_CB.tolist()
        return tokens, [[math.nan] * len(column) for column in tokens]


class RecordedPrompt:
    """The reading of prompts of one shape as one launch."""

    def __init__(self, read: Callable[[Tensor], Tensor], tokens_R: Tensor) -> None:
        self.tokens_R, self.function = tokens_R.clone(), read
        self.graph: torch.cuda.CUDAGraph | None = None
        if tokens_R.is_cuda:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits_BV = read(self.tokens_R)

    def read(self, tokens_R: Tensor) -> Tensor:
        """Return the logits after the last tokens."""
        if self.graph is None:
            return self.function(tokens_R)
        self.tokens_R.copy_(tokens_R)
        self.graph.replay()
        return self.logits_BV.clone()


def _pinned(here: Tensor, device: torch.device) -> Tensor:
    """Return numbers that can be copied to the device without waiting for it."""
    return here.pin_memory() if device.type == "cuda" else here


def _fetched(*there: Tensor) -> Callable[[], list[Tensor]]:
    """Start copying from the device; return a function that waits and returns the copies."""
    if there[0].device.type != "cuda":
        copies = [one.clone() for one in there]
        return lambda: copies
    here = [one.to("cpu", non_blocking=True) for one in there]
    arrived = torch.cuda.Event()
    arrived.record()

    def fetch() -> list[Tensor]:
        arrived.synchronize()
        return here

    return fetch
