"""The search: of all designs that keep the hard limits, the best one.

Hard are the count, the limits of ratio and expansion, depth and aspect; `preference` orders what is
left. Boxes of designs are opened in the order of the best that they may hold, so a search ends when
the best design found is better than any that a closed box may hold.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from glassformer.spec.boxes import Box, Boxes
from glassformer.spec.budget import Budget
from glassformer.spec.counting import Frame
from glassformer.spec.limits import Limits, ffns
from glassformer.spec.patience import Clock
from glassformer.spec.preference import Key, Preference
from glassformer.spec.widths import Widths

#: So many values of d_ff are all looked at; of more, those where something turns.
FEW = 64

#: What should be small before everything else: the least of it in a box.
First = Callable[[Box], float]
#: What the values of d_ff around a turn are multiples of.
FRIENDLY = (1, 8, 64)


@dataclass(frozen=True, slots=True)
class Found:
    """A frame with its depth and d_ff, and the key by which it was preferred."""

    key: Key
    frame: Frame
    n_layers: int
    d_ff: int

    @property
    def count(self) -> int:
        """Parameters of the whole model."""
        return self.frame.count(self.n_layers, self.d_ff)


class Search:
    """One budget between two counts, which are its own unless others are given.

    `opened` tells how many boxes and designs were looked at.
    """

    def __init__(self, budget: Budget, *, low: int | None = None, high: int | None = None) -> None:
        self.budget = budget
        least, most = budget.bounds
        self.low = least if low is None else low
        self.high = most if high is None else high
        self.widths = Widths(budget)
        self.preference = Preference(budget, low=self.low, high=self.high)
        self.opened = 0
        self._clock = Clock()

    def _limits(self) -> Limits:
        return Limits(self.budget, low=self.low, high=self.high)

    def _look(self) -> None:
        self.opened += 1
        self._clock.check()

    # --- the best ---------------------------------------------------------------------------------

    def best(self) -> Found | None:
        """The least key, or nothing where no design keeps the limits."""
        return self._least(lambda box: 0.0, self._choices)

    def deepest(self) -> Found | None:
        """The most layers, then the least key."""
        return self._least(lambda box: -box.deep, self._few)

    def widest(self) -> Found | None:
        """The largest d_model, then the least key."""
        return self._least(lambda box: -box.large.d_model, self._few)

    def _least(
        self, first: First, choices: Callable[[Frame, int, range], Iterator[int]]
    ) -> Found | None:
        limits, prefer, order = self._limits(), self.preference, itertools.count(0, -1)
        boxes, found = Boxes(self.widths, limits), None
        best: Key = (math.inf,)
        heap: list[tuple[Key, int, Box]] = []

        def push(parts: Iterator[Box]) -> None:
            for box in parts:
                bound = (first(box), *prefer.bound(box))
                if bound <= best:
                    heapq.heappush(heap, (bound, next(order), box))

        push(boxes.every())
        while heap and heap[0][0] <= best:
            self._look()
            _, _, box = heapq.heappop(heap)
            if not box.is_leaf and not _is_tight(box):
                push(boxes.split(box))
                continue
            frame = box.small
            whole = replace(box, room=limits.room(frame, frame))  # with each d_ff of its depths
            for n_layers, d_ffs in _sizes(whole):
                at_depth = first(replace(box, shallow=n_layers, deep=n_layers))
                for d_ff in choices(frame, n_layers, d_ffs):
                    self.opened += 1
                    key = (at_depth, *prefer.key(frame, n_layers, d_ff))
                    if key < best:
                        best, found = key, Found(key[1:], frame, n_layers, d_ff)
        return found

    def _choices(self, frame: Frame, n_layers: int, d_ffs: range) -> Iterator[int]:
        """All of them if they are few, else the places where a preference turns."""
        yield from d_ffs if len(d_ffs) <= FEW else self._turns(frame, n_layers, d_ffs, FRIENDLY)

    def _few(self, frame: Frame, n_layers: int, d_ffs: range) -> Iterator[int]:
        return self._turns(frame, n_layers, d_ffs, (1,))

    def _turns(
        self, frame: Frame, n_layers: int, d_ffs: range, friendly: tuple[int, ...]
    ) -> Iterator[int]:
        """Ends, the wishes, the total; and the friendly values around them."""
        if not d_ffs:
            return
        fixed, slope = frame.outside + n_layers * frame.base, n_layers * frame.column
        turns = [((self.low + self.high) / 2 - fixed) / slope, float(d_ffs[0]), float(d_ffs[-1])]
        turns.append(self.preference.wished_ffn(frame))
        if self.preference.ratio is not None:
            turns.append((frame.covered / self.preference.ratio - fixed) / slope)
        seen = set()
        for turn in turns:
            for multiple in friendly:
                unit = math.lcm(multiple, d_ffs.step)
                for chosen in (math.floor(turn / unit) * unit, math.ceil(turn / unit) * unit):
                    if chosen in d_ffs and chosen not in seen:
                        seen.add(chosen)
                        yield chosen

    # --- the count alone --------------------------------------------------------------------------

    def feasible(self) -> bool:
        """Whether any design keeps every limit."""
        limits = self._limits()
        boxes = Boxes(self.widths, limits)
        stack = list(boxes.every())
        while stack:
            self._look()
            box = stack.pop()
            if not box.is_frame:
                stack.extend(boxes.split(box))
            elif any(True for _ in _sizes(box)):
                return True
        return False

    def closest(self, target: int) -> Found | None:
        """The count nearest to the target, then the least key."""
        return self._closest(target, ties=True)

    def nearest_count(self, target: int) -> int | None:
        """The nearest count alone: one design that has it is enough."""
        found = self._closest(target, ties=False)
        return None if found is None else found.count

    def _closest(self, target: int, *, ties: bool) -> Found | None:
        limits, order, found = self._limits(), itertools.count(0, -1), None
        boxes, away = Boxes(self.widths, limits), self.high + target
        heap: list[tuple[int, int, Box]] = []

        def push(parts: Iterator[Box]) -> None:
            for box in parts:
                apart = max(0, box.least - target, target - box.most)
                heapq.heappush(heap, (apart, next(order), box))

        push(boxes.every())
        while heap and (heap[0][0] < away or (ties and heap[0][0] == away)):
            self._look()
            box = heapq.heappop(heap)[2]
            if not box.is_frame:
                push(boxes.split(box))
                continue
            for near in boxes.cut(box.small, box.small, depths=box.depths, is_settled=True):
                for n_layers, d_ff in _nearest(near, target):
                    self.opened += 1
                    distance = abs(near.small.count(n_layers, d_ff) - target)
                    if distance > away or (distance == away and not ties):
                        continue
                    key = self.preference.key(near.small, n_layers, d_ff)
                    if distance < away or found is None or key < found.key:
                        away, found = distance, Found(key, near.small, n_layers, d_ff)
            reach = away if ties else away - 1
            limits.low, limits.high = max(self.low, target - reach), min(self.high, target + reach)
        return found


def _is_tight(box: Box) -> bool:
    """Whether its one frame has at most one d_ff at each depth, and one depth with each d_ff."""
    frame, room = box.small, box.room
    step = min(frame.column * box.shallow, frame.base + frame.column * room.narrow)
    return box.is_frame and room.high - room.low < step


def _sizes(box: Box) -> Iterator[tuple[int, range]]:
    """Every depth of the one frame of a box, and each d_ff that it may have there."""
    frame, room, d_ffs = box.small, box.room, box.d_ffs
    outside, base, column, low, high = frame.outside, frame.base, frame.column, room.low, room.high
    if len(d_ffs) > box.deep - box.shallow or not _is_tight(box):
        for n_layers in range(box.shallow, box.deep + 1):
            fixed, slope = outside + n_layers * base, n_layers * column * room.multiple
            if high - (high - fixed) % slope >= low:
                at_depth = ffns(frame, room, n_layers)
                if at_depth:
                    yield n_layers, at_depth
        return
    for d_ff in d_ffs:
        layer = base + column * d_ff
        n_layers = (high - outside) // layer
        if outside + n_layers * layer >= low and box.shallow <= n_layers <= box.deep:
            yield n_layers, range(d_ff, d_ff + 1)


def _nearest(box: Box, target: int) -> Iterator[tuple[int, int]]:
    """Depth and d_ff of one frame's counts around the target: for each depth, or each d_ff."""
    frame, room, d_ffs = box.small, box.room, box.d_ffs
    if len(d_ffs) > box.deep - box.shallow:
        for n_layers, at_depth in _sizes(box):
            fixed, slope = frame.outside + n_layers * frame.base, n_layers * frame.column
            below = (target - fixed) // slope // room.multiple * room.multiple
            near = {min(max(f, at_depth[0]), at_depth[-1]) for f in (below, below + room.multiple)}
            yield from ((n_layers, d_ff) for d_ff in near)
        return
    for d_ff in d_ffs:
        layer = frame.base + frame.column * d_ff
        least = max(box.shallow, _up(room.low - frame.outside, layer))
        most = min(box.deep, (room.high - frame.outside) // layer)
        if least <= most:
            below = (target - frame.outside) // layer
            near = {min(max(n, least), most) for n in (below, below + 1)}
            yield from ((n_layers, d_ff) for n_layers in near)


def _up(number: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-number // by)
