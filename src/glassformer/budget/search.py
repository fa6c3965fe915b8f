"""Best-first branch and bound: among all designs that keep the hard limits, the best one.

Hard limits are the count, limits on ratio and expansion, depth and aspect. `Ordering` compares what
is left by a key: both wishes nearly met (ratio within a point, expansion within 5 %); least drift
from the wishes, in levels; the most usual shape; multiples that hardware likes; then exact drift,
distance from the total, and the sizes themselves, so that no two designs tie.

Regions are opened in the order of the lower bounds of their keys, so a search ends when its best
design is better than the bound of every unopened region; then the result is proven. If the effort
is spent before, the result is the best so far and `is_proven` is False.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from glassformer.budget.counting import HABITUAL_HEAD, Frame, Widths
from glassformer.budget.question import Budget
from glassformer.budget.regions import Effort, Limits, Region, Regions

#: One unit of drift: a point of the embedding ratio, or 5 % of the expansion.
RATIO_UNIT, GLU_UNIT = 0.01, 0.05
#: The usual d_model / n_layers (256 wide and 8 deep, 128 and 4), and the usual expansion.
ASPECT, EXPANSION = 32.0, 8 / 3

#: Allowance for rounding errors in a bound.
SLACK = 1e-9
#: The lowest level of drift: up to a quarter of a unit.
LEAST = 1
#: A drift that is farther, or infinite, counts as this: what is wished is all but zero.
FARTHEST = 1e300

Key = tuple[float, ...]
#: Index of the level and of the exact drift in a key.
LEVEL, DRIFT = 1, 4


def level(units: float) -> int:
    """Return drift as a level: quarters of a unit up to 1, then steps of 10 %.

    Drifts of one level count as equal, so that shape and multiples decide between them.
    """
    if units <= 1.0:
        return max(LEAST, math.ceil(units * 4 - 1e-9))
    return 4 + math.ceil(math.log(min(units, FARTHEST), 1.1) - 1e-9)


def least_drift(level: float) -> float:
    """Return the lower bound of all drifts of this level."""
    if level <= LEAST:
        return 0.0
    return (level - 1) / 4 if level <= 4 else float(1.1 ** (level - 5))


class Ordering:
    """The order of the designs of one budget with counts between two bounds."""

    def __init__(self, budget: Budget, *, low: int, high: int) -> None:
        self.budget = budget
        self.low, self.high = low, high
        self.ratio = None if budget.ratio is None else budget.ratio.value
        self.glu = None if budget.expansion is None else budget.expansion.value

    def wished_ffn(self, frame: Frame) -> float:
        """Return the d_ff, not rounded, of the wished expansion, or of the usual one."""
        return (EXPANSION if self.glu is None else self.glu) * frame.d_model

    def key(self, frame: Frame, n_layers: int, d_ff: int) -> Key:
        """Return the key of a design; the smallest is the best."""
        ratio = glu = 0.0
        if self.ratio is not None:
            share = frame.covered / frame.count(n_layers, d_ff)
            ratio = abs(share - self.ratio) / RATIO_UNIT
        if self.glu is not None:
            glu = abs(d_ff / (self.glu * frame.d_model) - 1.0) / GLU_UNIT
        sizes = (frame.d_model, d_ff, frame.d_head)
        return (
            float(max(ratio, glu) > 1.0),
            level(ratio + glu),
            self._shape(frame, n_layers, d_ff),
            sum(map(_unfriendly, sizes)),
            round(ratio + glu, 9),
            abs(2 * frame.count(n_layers, d_ff) - self.low - self.high),
            n_layers,
            *sizes,
            frame.n_heads,
            frame.rank or 0,
        )

    def _shape(self, frame: Frame, n_layers: int, d_ff: int) -> int:
        """Return how unusual the shape is, in half powers of two.

        Counted are the aspect, and a head width or expansion that was left free.
        """
        away = abs(math.log2(frame.d_model / n_layers / ASPECT))
        if self.budget.free_head_width:
            away += abs(math.log2(frame.n_heads * frame.d_head / frame.d_model))
        if self.budget.heads == "any":
            away += abs(math.log2(frame.d_head / HABITUAL_HEAD))
        if self.glu is None:
            away += abs(math.log2(d_ff / frame.d_model / EXPANSION))
        return math.ceil(2 * away - 1e-9)

    # --- lower bounds -----------------------------------------------------------------------------

    def bound(self, region: Region) -> Key:
        """Return a lower bound of the first five entries of every key in a region."""
        small, large = region.small, region.large
        low, high = region.least, region.most
        ratio = glu = 0.0
        if self.ratio is not None:
            away = max(small.covered / high - self.ratio, self.ratio - large.covered / low)
            ratio = max(0.0, away / RATIO_UNIT)
        if self.glu is not None:
            glu = self._glu_drift(region, low, high)
        both = ratio + glu
        if self.ratio is not None and self.glu is not None:
            both = max(both, self._both_drifts(region, low, high))
        unfriendly, exact = self._least_unfriendly(region), both
        if self.glu is not None and region.one_width and region.shallow == region.deep:
            more, drift = self._friendly_drift(region, low, high)
            unfriendly, exact = unfriendly + more, max(both, drift)
        return (
            float(max(ratio, glu) > 1.0 + SLACK),
            level(_rounded_down(both)),
            self._least_shape(region, low, high),
            unfriendly,
            round(_rounded_down(exact), 9),
        )

    def _expansions(self, region: Region, low: float, high: float) -> tuple[float, float]:
        """Return the range of expansions of designs with counts from `low` to `high`."""
        small, large, allowed = region.small, region.large, region.allowed
        least = ((low - large.outside) / region.deep - large.base) / large.column
        most = ((high - small.outside) / region.shallow - small.base) / small.column
        if allowed.most_ffn is not None:
            most = min(most, allowed.most_ffn)
        return max(least, allowed.least_ffn) / large.d_model, most / small.d_model

    def _glu_drift(self, region: Region, low: float, high: float) -> float:
        assert self.glu is not None
        least, most = self._expansions(region, low, high)
        return max(least / self.glu - 1.0, 1.0 - most / self.glu, 0.0) / GLU_UNIT

    def _both_drifts(self, region: Region, low: float, high: float) -> float:
        """Return a lower bound of the sum of both drifts, which depend on the same count.

        As a function of the count, the sum is concave or monotone between its break points, so its
        minimum is at one of them. The exception is a range where the ratio's drift falls while
        the expansion's grows: c / count + g * count is least at count = sqrt(c / g).
        """
        assert self.ratio is not None and self.glu is not None
        small, large, glu = region.small, region.large, self.glu
        growth = glu * large.d_model * region.deep * large.column * GLU_UNIT / RATIO_UNIT
        turns = [small.covered / self.ratio, large.covered / self.ratio]
        turns += [low, high, math.sqrt(small.covered * growth)]
        for d_ff in (glu * small.d_model, region.allowed.most_ffn):
            if d_ff is not None:
                turns.append(small.outside + region.shallow * (small.base + small.column * d_ff))
        for d_ff in (glu * large.d_model, region.allowed.least_ffn):
            turns.append(large.outside + region.deep * (large.base + large.column * d_ff))
        least = math.inf
        for count in turns:
            if low <= count <= high:
                ratio = max(small.covered / count - self.ratio, self.ratio - large.covered / count)
                drift = max(0.0, ratio / RATIO_UNIT) + self._glu_drift(region, count, count)
                if drift <= 0.0:
                    return 0.0
                least = min(least, drift)
        return least

    def _friendly_drift(self, region: Region, low: int, high: int) -> tuple[int, float]:
        """Return the lowest `_unfriendly` of a d_ff at one width and depth, and its least drift."""
        assert self.glu is not None
        d_model, wished = region.small.d_model, self.glu * region.small.d_model
        least, most = self._expansions(region, low, high)
        narrow, wide = math.ceil(least * d_model - 1e-3), math.floor(most * d_model + 1e-3)
        units = [math.lcm(by, region.allowed.ffn_step) for by in (64, 8, 2, 1)]
        unfriendly = next((i for i, by in enumerate(units) if wide // by * by >= narrow), None)
        if unfriendly is None:
            return 0, math.inf
        unit = units[unfriendly]
        below = min(math.floor(wished / unit), wide // unit)
        above = max(below + 1, -(-narrow // unit))
        drift = math.inf
        for first, way in ((below, -1), (above, 1)):
            for d_ff in range(first * unit, (first + 4 * way) * unit, way * unit):
                if not narrow <= d_ff <= wide:
                    break
                glu = abs(d_ff / wished - 1.0) / GLU_UNIT
                if glu >= drift:
                    break
                drift = min(drift, glu + self._ratio_drift(region, d_ff))
            else:  # beyond these, the drift of the expansion alone is a bound
                drift = min(drift, abs((first + 4 * way) * unit / wished - 1.0) / GLU_UNIT)
        return unfriendly, drift

    def _ratio_drift(self, region: Region, d_ff: int) -> float:
        """Return the ratio's least drift over all ranks at one width, depth and d_ff."""
        if self.ratio is None:
            return 0.0
        small, large = region.small, region.large
        least = small.covered / small.count(region.deep, d_ff)
        most = large.covered / large.count(region.deep, d_ff)
        return max(0.0, least - self.ratio, self.ratio - most) / RATIO_UNIT

    def _least_shape(self, region: Region, low: int, high: int) -> int:
        small, large = region.small, region.large
        least, most = small.d_model / region.deep / ASPECT, large.d_model / region.shallow / ASPECT
        away = _outside(least, most)
        if region.one_width:
            if self.budget.free_head_width:
                away += abs(math.log2(small.n_heads * small.d_head / small.d_model))
            if self.budget.heads == "any":
                away += abs(math.log2(small.d_head / HABITUAL_HEAD))
        if self.glu is None:
            least, most = self._expansions(region, low, high)
            away += _outside(least / EXPANSION, most / EXPANSION)
        return math.ceil(2 * away - 2 * SLACK)

    def _least_unfriendly(self, region: Region) -> int:
        unfriendly = _friendliest(region.small.d_model, region.large.d_model)
        if region.one_width:
            unfriendly += _unfriendly(region.small.d_head)
        return unfriendly


def _rounded_down(drift: float) -> float:
    return max(0.0, drift * (1.0 - SLACK) - SLACK)


def _outside(least: float, most: float) -> float:
    """Return the distance, in powers of two, from 1 to the interval [least, most]."""
    return max(0.0, math.log2(least), -math.log2(max(most, 1e-300)))


def _friendliest(low: int, high: int) -> int:
    """Return the lowest `_unfriendly` of any size between these."""
    return next((i for i, by in enumerate((64, 8, 2)) if high // by * by >= low), 3)


def _unfriendly(size: int) -> int:
    """Return 0 for a multiple of 64, 1 of 8, 2 of 2, and 3 for the rest: what hardware likes."""
    return next((i for i, by in enumerate((64, 8, 2)) if size % by == 0), 3)


#: After this many regions one is followed down to a leaf.
DIVE = 64
#: The bound of a region costs this many evaluations.
BOUND = 2
#: This many runs of depths or d_ffs are one evaluation; in a search for the nearest count, fewer.
RUNS, NEAREST_RUNS = 64, 8
#: Up to this many values of d_ff are all compared; of more, those where the key turns.
FEW = 64
#: Multiples of d_ff that are tried next to such a turn.
FRIENDLY = (1, 8, 64)

#: Compared before the key: the least value up to a depth and a width.
First = Callable[[int, int], float]
Entry = tuple[Key, int, Region]


class Frontier:
    """The unopened regions of a search, by lower bound.

    Now and then one is followed down to its end, always into its most promising part: a design that
    is found early prunes regions, and is there if the search has to stop.
    """

    def __init__(self, bound: Callable[[Region], Key]) -> None:
        self._bound = bound
        self._heap: list[Entry] = []
        self._order = itertools.count(0, -1)  # of two equal bounds the later, which is smaller
        self._turn = itertools.count(1)
        self._dives = False
        self._ahead: Entry | None = None

    def push(self, parts: Iterable[Region], *, best: Key) -> None:
        """Add the parts of the last region that may hold a design as good as `best`."""
        bounds = ((self._bound(region), next(self._order), region) for region in parts)
        entries = [entry for entry in bounds if entry[0] <= best]
        if self._dives and entries:
            self._ahead = min(entries)
            entries.remove(self._ahead)
        for entry in entries:
            heapq.heappush(self._heap, entry)

    def is_done(self, best: Key) -> bool:
        """Return True if no unopened region may hold a design as good as `best`."""
        return self._ahead is None and not (self._heap and self._heap[0][0] <= best)

    def pop(self) -> Region:
        """Return the next region to open."""
        entry, self._ahead = self._ahead, None
        if entry is None:
            self._dives = next(self._turn) % DIVE == 0
            entry = heapq.heappop(self._heap)
        return entry[2]

    def bounds(self, best: Key) -> Iterator[Key]:
        """Yield the lower bounds of the unopened regions that may match `best`."""
        entries = self._heap if self._ahead is None else [self._ahead, *self._heap]
        return (bound for bound, _, _ in entries if bound <= best)


@dataclass(frozen=True, slots=True)
class Found:
    """A design as the search sees it: a frame with depth and d_ff, and its key."""

    key: Key
    frame: Frame
    n_layers: int
    d_ff: int

    @property
    def count(self) -> int:
        """The number of parameters."""
        return self.frame.count(self.n_layers, self.d_ff)

    @property
    def drift(self) -> float:
        """The drift from both wishes, in units of the ordering."""
        return self.key[DRIFT]


class Search:
    """A search through the designs of a budget, between its own bounds or other counts.

    After a search that is not proven, `least` is a lower bound of what was left unopened: of the
    drift, or of the distance in a search for the nearest count.
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
        self.ordering = Ordering(budget, low=self.low, high=self.high)
        self.effort = Effort() if effort is None else effort
        self.is_proven = True
        self.least = 0.0
        self._begun = self.effort.spent

    @property
    def evaluations(self) -> int:
        """The number of evaluations so far."""
        return self.effort.spent - self._begun

    def _regions(self) -> Regions:
        limits = Limits(self.budget, low=self.low, high=self.high)
        return Regions(self.widths, limits, self.effort)

    # --- the best design --------------------------------------------------------------------------

    def best(self, *, than: Found | None = None) -> Found | None:
        """Return the design with the least key, or `than` if none has a smaller one."""
        return self._least(lambda deep, wide: 0.0, self._choices, found=than)

    def deepest(self) -> Found | None:
        """Return the design with the most layers, then the least key."""
        return self._least(lambda deep, wide: -deep, self._few)

    def widest(self) -> Found | None:
        """Return the design with the largest d_model, then the least key."""
        return self._least(lambda deep, wide: -wide, self._few)

    def _least(
        self,
        first: First,
        choices: Callable[[Frame, int, range], Iterator[int]],
        *,
        found: Found | None = None,
    ) -> Found | None:
        regions, ordering = self._regions(), self.ordering
        best: Key = (math.inf,) if found is None else (0.0, *found.key)

        def bound(region: Region) -> Key:
            self.effort.spend(BOUND)
            return (first(region.deep, region.large.d_model), *ordering.bound(region))

        frontier = Frontier(bound)
        frontier.push(regions.every_design(), best=best)
        while not frontier.is_done(best):
            if self.effort.is_spent:
                self.is_proven = False
                self.least = least_drift(min(bound[1 + LEVEL] for bound in frontier.bounds(best)))
                break
            region = frontier.pop()
            if not region.is_leaf and not region.is_tight:
                frontier.push(regions.split(region), best=best)
                continue
            frame = region.small
            allowed = regions.limits.allowed(frame, frame)  # every d_ff, not a part of them
            full = Region(frame, frame, region.shallow, region.deep, allowed, one_width=True)
            for n_layers, d_ffs in self._enumerated(full):
                at_depth = first(n_layers, frame.d_model)
                for d_ff in choices(frame, n_layers, d_ffs):
                    self.effort.spend(1)
                    key = (at_depth, *ordering.key(frame, n_layers, d_ff))
                    if key < best:
                        best, found = key, Found(key[1:], frame, n_layers, d_ff)
        return found

    def _enumerated(self, region: Region) -> Iterator[tuple[int, range]]:
        """Yield each depth of a single frame with every d_ff that is allowed there."""
        self.effort.spend(1 + min(len(region.depths), len(region.d_ffs)) // RUNS)
        for depths, d_ffs in region.runs():
            for n_layers in depths:
                yield n_layers, d_ffs

    def _choices(self, frame: Frame, n_layers: int, d_ffs: range) -> Iterator[int]:
        """Yield every d_ff if they are few, otherwise those where the key turns."""
        yield from d_ffs if len(d_ffs) <= FEW else self._turns(frame, n_layers, d_ffs, FRIENDLY)

    def _few(self, frame: Frame, n_layers: int, d_ffs: range) -> Iterator[int]:
        return self._turns(frame, n_layers, d_ffs, (1,))

    def _turns(
        self, frame: Frame, n_layers: int, d_ffs: range, friendly: tuple[int, ...]
    ) -> Iterator[int]:
        """Yield the ends, the d_ffs that meet a wish or the total, and multiples nearby."""
        if not d_ffs:
            return
        fixed, slope = frame.outside + n_layers * frame.base, n_layers * frame.column
        turns = [((self.low + self.high) / 2 - fixed) / slope, float(d_ffs[0]), float(d_ffs[-1])]
        turns.append(self.ordering.wished_ffn(frame))
        if self.ordering.ratio is not None:
            turns.append((frame.covered / self.ordering.ratio - fixed) / slope)
        seen = set()
        for turn in turns:
            for multiple in friendly:
                unit = math.lcm(multiple, d_ffs.step)
                for chosen in (math.floor(turn / unit) * unit, math.ceil(turn / unit) * unit):
                    if chosen in d_ffs and chosen not in seen:
                        seen.add(chosen)
                        yield chosen

    # --- any design, and the nearest count --------------------------------------------------------

    def is_feasible(self) -> bool:
        """Return True if some design keeps every limit."""
        return self.first() is not None

    def first(self) -> Found | None:
        """Return any design that keeps every limit."""
        regions = self._regions()
        stack = list(regions.every_design())
        while stack:
            if self.effort.is_spent:
                self.is_proven = False
                break
            region = stack.pop()
            if not region.is_frame:
                stack.extend(regions.split(region))
                continue
            for n_layers, d_ffs in self._enumerated(region):
                near = self._few(region.small, n_layers, d_ffs)
                key, d_ff = min((self.ordering.key(region.small, n_layers, f), f) for f in near)
                return Found(key, region.small, n_layers, d_ff)
        return None

    def closest(self, target: int) -> Found | None:
        """Return the design whose count is nearest to `target`, and among equals the best one.

        `nearest` finds the least distance `away`. A design at this distance has one of two counts,
        target - away or target + away, so a search for the best at each of them, with the same
        ordering, finds the best of all. Neither can return nothing that `nearest` has found:
        `best(than=found)` keeps `found` unless it finds a smaller key.
        """
        found = self.nearest(target)
        if found is None or not self.is_proven:
            return found
        away = abs(found.count - target)
        for count in sorted({target - away, target + away}):
            if self.low <= count <= self.high:
                at_count = Search(self.budget, low=count, high=count, effort=self.effort.share(2))
                at_count.ordering = self.ordering
                found = at_count.best(than=found)
                self.is_proven &= at_count.is_proven
        return found

    def nearest(self, target: int) -> Found | None:
        """Return one design whose count is nearest to `target`.

        Regions are opened by the distance from their range of counts to `target`. Once a design is
        found at distance `away`, only smaller distances are of interest: regions with a bound of
        `away` or more are dropped, and the limits are narrowed to counts strictly nearer. So when
        no region with a bound of at most away - 1 is left, no count is nearer.
        """
        regions, found, away = self._regions(), None, self.high + target
        frontier = Frontier(lambda region: (max(0, region.least - target, target - region.most),))
        frontier.push(regions.every_design(), best=(away - 1,))
        while not frontier.is_done((away - 1,)):
            if self.effort.is_spent:
                self.is_proven = False
                self.least = min(bound[0] for bound in frontier.bounds((away - 1,)))
                break
            region = frontier.pop()
            if not region.is_frame:
                frontier.push(regions.split(region), best=(away - 1,))
                continue
            frame, depths = region.small, region.depths
            for narrowed in regions.cut(frame, frame, depths=depths, one_width=True):
                for n_layers, d_ff in self._around(narrowed, target):
                    distance = abs(frame.count(n_layers, d_ff) - target)
                    if distance < away:
                        key = self.ordering.key(frame, n_layers, d_ff)
                        away, found = distance, Found(key, frame, n_layers, d_ff)
            regions.limits.low = max(self.low, target - away + 1)
            regions.limits.high = min(self.high, target + away - 1)
        return found

    def _around(self, region: Region, target: int) -> Iterator[tuple[int, int]]:
        """Yield, for each run of a single frame, its two designs around the target."""
        per_run = RUNS if region.is_tight else NEAREST_RUNS
        self.effort.spend(1 + min(len(region.depths), len(region.d_ffs)) // per_run)
        frame = region.small
        for depths, d_ffs in region.runs():
            if len(d_ffs) > 1:
                fixed = frame.outside + depths[0] * frame.base
                below = (target - fixed) // (depths[0] * frame.column) // d_ffs.step * d_ffs.step
                for d_ff in (below, below + d_ffs.step):
                    yield depths[0], min(max(d_ff, d_ffs[0]), d_ffs[-1])
            else:
                below = (target - frame.outside) // (frame.base + frame.column * d_ffs[0])
                for n_layers in (below, below + 1):
                    yield min(max(n_layers, depths[0]), depths[-1]), d_ffs[0]
