"""The closed boxes of a search, in the order of the best that each may hold.

Now and then one is followed down to its end, always into its most promising part: a design that is
found early spares the boxes that cannot hold a better one, and is there if the search must end.

Depth and d_ff of one frame: every pair whose count is within the limits, or nearest to a target.

A count is what stands outside and depth times layer. So the pairs are found along the depths, along
the values of d_ff, or, where the counts are few, from the divisors of each: whichever are fewer.

The search: of all designs that keep the hard limits, the best one.

Hard are the count, the limits of ratio and expansion, depth and aspect; `preference` orders what is
left. Boxes of designs are opened in the order of the best that they may hold, so a search ends when
the best design found is better than any that a closed box may hold, or when its effort is spent:
then what it has found is the best so far, and `is_proven` is False.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from glassformer.budget.counting import Frame, Widths
from glassformer.budget.effort import Effort
from glassformer.budget.ordering import DRIFT, LEVEL, Key, Preference, least_drift
from glassformer.budget.question import Budget
from glassformer.budget.regions import Box, Boxes, Limits, ffns
from glassformer.spec.divisors import divisors_between

#: After so many boxes one is followed down.
DIVE = 64

Entry = tuple[Key, int, Box]


class Frontier:
    """Boxes that a search has not opened; `bound` is the least key in a box."""

    def __init__(self, bound: Callable[[Box], Key]) -> None:
        self._bound = bound
        self._heap: list[Entry] = []
        self._order = itertools.count(0, -1)  # of two alike the later, which is smaller
        self._turn = itertools.count(1)
        self._dives = False
        self._ahead: Entry | None = None

    def push(self, parts: Iterable[Box], *, best: Key) -> None:
        """Those parts of the last box that may hold something as good as the best."""
        bounds = ((self._bound(box), next(self._order), box) for box in parts)
        entries = [entry for entry in bounds if entry[0] <= best]
        if self._dives and entries:
            self._ahead = min(entries)
            entries.remove(self._ahead)
        for entry in entries:
            heapq.heappush(self._heap, entry)

    def is_done(self, best: Key) -> bool:
        """Whether no closed box may hold something as good as the best."""
        return self._ahead is None and not (self._heap and self._heap[0][0] <= best)

    def pop(self) -> Box:
        """The next box to open."""
        entry, self._ahead = self._ahead, None
        if entry is None:
            self._dives = next(self._turn) % DIVE == 0
            entry = heapq.heappop(self._heap)
        return entry[2]

    def bounds(self, best: Key) -> Iterator[Key]:
        """Of the boxes that may hold something as good as the best."""
        entries = self._heap if self._ahead is None else [self._ahead, *self._heap]
        return (bound for bound, _, _ in entries if bound <= best)


#: Finding the divisors of one count takes as long as so many depths.
DIVIDING = 400
#: So many depths, or values of d_ff, take as long as one box; so many with the nearest count.
GLANCES, NEAREST = 64, 8


def is_tight(box: Box) -> bool:
    """Whether its one frame has at most one d_ff at each depth, and one depth with each d_ff."""
    frame, room = box.small, box.room
    step = min(frame.column * box.shallow, frame.base + frame.column * room.narrow)
    return box.is_frame and room.high - room.low < step


def looks(box: Box) -> int:
    """How many looks `sizes` takes at most."""
    fewer = min(box.deep - box.shallow + 1, len(box.d_ffs))
    if is_tight(box):
        fewer = min(fewer, DIVIDING * len(_shared_counts(box)))
    return 1 + fewer // GLANCES


def nearest_looks(box: Box) -> int:
    """How many looks `nearest` takes at most."""
    if is_tight(box):  # most depths have no count at all
        return looks(box)
    return 1 + min(box.deep - box.shallow + 1, len(box.d_ffs)) // NEAREST


def sizes(box: Box) -> Iterator[tuple[int, range]]:
    """Every depth of the one frame of a box, and each d_ff that it may have there."""
    if not is_tight(box):
        yield from _by_depth(box)
        return
    depths, d_ffs = box.deep - box.shallow + 1, len(box.d_ffs)
    if DIVIDING * len(_shared_counts(box)) < min(depths, d_ffs):
        yield from _by_divisor(box)
    elif d_ffs >= depths:
        yield from _by_depth(box)
    else:
        yield from _by_ffn(box)


def _by_depth(box: Box) -> Iterator[tuple[int, range]]:
    frame, room = box.small, box.room
    outside, base, column, low, high = frame.outside, frame.base, frame.column, room.low, room.high
    for n_layers in range(box.shallow, box.deep + 1):
        fixed, slope = outside + n_layers * base, n_layers * column * room.multiple
        if high - (high - fixed) % slope >= low:
            at_depth = ffns(frame, room, n_layers)
            if at_depth:
                yield n_layers, at_depth


def _by_ffn(box: Box) -> Iterator[tuple[int, range]]:
    frame, room = box.small, box.room
    outside, base, column, low, high = frame.outside, frame.base, frame.column, room.low, room.high
    for d_ff in box.d_ffs:
        layer = base + column * d_ff
        n_layers = (high - outside) // layer
        if outside + n_layers * layer >= low and box.shallow <= n_layers <= box.deep:
            yield n_layers, range(d_ff, d_ff + 1)


def shared(box: Box) -> int:
    """What divides every layer of its one frame."""
    return math.gcd(box.small.base, box.small.column * box.room.multiple)


def _shared_counts(box: Box) -> range:
    """All layers together, in units of what each of them is a multiple of."""
    unit, outside = shared(box), box.small.outside
    least = max(1, -((outside - box.room.low) // unit))
    return range(least, (box.room.high - outside) // unit + 1)


def _by_divisor(box: Box) -> Iterator[tuple[int, range]]:
    frame, d_ffs, unit = box.small, box.d_ffs, shared(box)
    for count in _shared_counts(box):
        for n_layers in divisors_between(count, box.shallow, box.deep):
            d_ff, rest = divmod(count // n_layers * unit - frame.base, frame.column)
            if rest == 0 and d_ff in d_ffs:
                yield n_layers, range(d_ff, d_ff + 1)


def nearest(box: Box, target: int) -> Iterator[tuple[int, int]]:
    """Depth and d_ff of one frame's counts around the target: for each depth, or each d_ff."""
    frame, room, d_ffs = box.small, box.room, box.d_ffs
    if len(d_ffs) > box.deep - box.shallow:
        for n_layers, at_depth in _by_depth(box):
            fixed, slope = frame.outside + n_layers * frame.base, n_layers * frame.column
            below = (target - fixed) // slope // room.multiple * room.multiple
            near = {min(max(f, at_depth[0]), at_depth[-1]) for f in (below, below + room.multiple)}
            yield from ((n_layers, d_ff) for d_ff in near)
        return
    for d_ff in d_ffs:
        layer = frame.base + frame.column * d_ff
        least = max(box.shallow, -(-(room.low - frame.outside) // layer))
        most = min(box.deep, (room.high - frame.outside) // layer)
        if least <= most:
            below = (target - frame.outside) // layer
            near = {min(max(n, least), most) for n in (below, below + 1)}
            yield from ((n_layers, d_ff) for n_layers in near)


#: So many values of d_ff are all looked at; of more, those where something turns.
FEW = 64

#: The bound of a box takes so many looks.
BOUND = 2
#: So many looks for designs of the nearest count one after the other; then the best one first.
TIES = 500

#: What should be small before everything else: the least of it up to a depth and a width.
First = Callable[[int, int], float]
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

    @property
    def drift(self) -> float:
        """How far both wishes were left, in units of the preference."""
        return self.key[DRIFT]


class Search:
    """One budget between two counts, which are its own unless others are given.

    `is_proven`: nothing that was left unopened could be better; else none of it is better than
    `least`, which is a drift, or for the nearest count a distance.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        low: int | None = None,
        high: int | None = None,
        effort: Effort | None = None,
    ) -> None:
        self.budget = budget
        least, most = budget.bounds
        self.low = least if low is None else low
        self.high = most if high is None else high
        self.widths = Widths(budget)
        self.preference = Preference(budget, low=self.low, high=self.high)
        self.effort = Effort() if effort is None else effort
        self.is_proven = True
        self.least = 0.0
        self._begun = self.effort.spent

    @property
    def opened(self) -> int:
        """How many looks it took."""
        return self.effort.spent - self._begun

    def _limits(self) -> Limits:
        return Limits(self.budget, low=self.low, high=self.high)

    def _boxes(self, limits: Limits) -> Boxes:
        return Boxes(self.widths, limits, self.effort)

    # --- the best ---------------------------------------------------------------------------------

    def best(self, *, than: Found | None = None) -> Found | None:
        """The least key, or nothing where no design keeps the limits; or what is best so far."""
        return self._least(lambda deep, wide: 0.0, self._choices, found=than)

    def deepest(self) -> Found | None:
        """The most layers, then the least key."""
        return self._least(lambda deep, wide: -deep, self._few)

    def widest(self) -> Found | None:
        """The largest d_model, then the least key."""
        return self._least(lambda deep, wide: -wide, self._few)

    def _least(
        self,
        first: First,
        choices: Callable[[Frame, int, range], Iterator[int]],
        *,
        found: Found | None = None,
    ) -> Found | None:
        limits, prefer = self._limits(), self.preference
        boxes = self._boxes(limits)
        best: Key = (math.inf,) if found is None else (0.0, *found.key)

        def bound(box: Box) -> Key:
            self.effort.spend(BOUND)
            return (first(box.deep, box.large.d_model), *prefer.bound(box))

        closed = Frontier(bound)
        closed.push(boxes.every(), best=best)
        while not closed.is_done(best):
            if self.effort.is_over:
                self.is_proven = False
                self.least = least_drift(min(bound[1 + LEVEL] for bound in closed.bounds(best)))
                break
            box = closed.pop()
            if not box.is_leaf and not is_tight(box):
                closed.push(boxes.split(box), best=best)
                continue
            frame = box.small
            room = limits.room(frame, frame)  # with each d_ff of its depths
            whole = Box(frame, frame, box.shallow, box.deep, room, is_settled=True)
            self.effort.spend(looks(whole))
            for n_layers, d_ffs in sizes(whole):
                at_depth = first(n_layers, frame.d_model)
                for d_ff in choices(frame, n_layers, d_ffs):
                    self.effort.spend(1)
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
        return self.first() is not None

    def first(self) -> Found | None:
        """A design that keeps every limit, or nothing where none does."""
        boxes = self._boxes(self._limits())
        stack = list(boxes.every())
        while stack:
            if self.effort.is_over:
                self.is_proven = False
                break
            box = stack.pop()
            if not box.is_frame:
                stack.extend(boxes.split(box))
                continue
            self.effort.spend(looks(box))
            for n_layers, d_ffs in sizes(box):
                near = self._few(box.small, n_layers, d_ffs)
                key, d_ff = min((self.preference.key(box.small, n_layers, f), f) for f in near)
                return Found(key, box.small, n_layers, d_ff)
        return None

    def closest(self, target: int) -> Found | None:
        """The count nearest to the target, then the least key."""
        found, rest = self._closest(target, ties=TIES)
        if found is None or not rest:
            return found
        away = abs(found.count - target)
        for count in sorted({target - away, target + away}):
            if self.low <= count <= self.high:
                at_count = Search(self.budget, low=count, high=count, effort=self.effort.share(2))
                at_count.preference = self.preference
                found = at_count.best(than=found)
                self.is_proven &= at_count.is_proven
        return found

    def nearest_count(self, target: int) -> int | None:
        """The nearest count alone: one design that has it is enough."""
        found, _ = self._closest(target, ties=0)
        return None if found is None else found.count

    def _closest(self, target: int, *, ties: int) -> tuple[Found | None, bool]:
        """With the nearest count; whether so many looks have left others that have it too."""
        limits, found = self._limits(), None
        boxes, away = self._boxes(limits), self.high + target
        also, left = int(ties > 0), ties
        closed = Frontier(lambda box: (max(0, box.least - target, target - box.most),))
        closed.push(boxes.every(), best=(away,))
        while not closed.is_done((away - 1 + also,)):
            before, is_nearest = self.effort.spent, closed.is_done((away - 1,))
            if self.effort.is_over and not is_nearest:
                self.is_proven = False
                self.least = min(bound[0] for bound in closed.bounds((away - 1,)))
                return found, False
            if is_nearest and (self.effort.is_over or left <= 0):
                return found, True
            box = closed.pop()
            if not box.is_frame:
                closed.push(boxes.split(box), best=(away - 1 + also,))
            else:
                for near in boxes.cut(box.small, box.small, depths=box.depths, is_settled=True):
                    self.effort.spend(nearest_looks(near))
                    for n_layers, d_ff in nearest(near, target):
                        distance = abs(near.small.count(n_layers, d_ff) - target)
                        if distance >= away + also:
                            continue
                        key = self.preference.key(near.small, n_layers, d_ff)
                        if distance < away or found is None or key < found.key:
                            away, found = distance, Found(key, near.small, n_layers, d_ff)
                limits.low = max(self.low, target - away + 1 - also)
                limits.high = min(self.high, target + away - 1 + also)
            left -= is_nearest * (self.effort.spent - before)
        return found, False
