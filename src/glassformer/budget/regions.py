"""Regions of designs: all widths, ranks and depths between two ends, cut by the hard limits.

`Limits` turns the budget's hard limits (count, ratio, expansion, depth, aspect) into integer bounds
for a whole region at once. `Regions` splits a region into parts. What a limit or a bound says about
a region it says about every design inside, so a search opens only regions that may hold a better
design, down to one frame at one depth.

`Effort` limits a search. One evaluation is the work of cutting one region, about ten microseconds.
Evaluations are counted rather than timed, so the same budget gives the same answer on every
machine. A caller with a deadline passes `stop`; this package reads no clock.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from glassformer.budget.counting import Frame, Widths, can_count, heads_of
from glassformer.budget.question import Budget, Wish
from glassformer.spec.errors import MachineError

Stop = Callable[[], bool]


class SearchStopped(MachineError):
    """The caller's `stop` ended a search before it had a result."""


class Effort:
    """The evaluations left to one search or several; unlimited by default.

    A share has a limit of its own, and what it spends is also charged to the effort it came from.
    """

    __slots__ = ("_parent", "_stop", "left", "spent")

    def __init__(
        self,
        limit: float = math.inf,
        *,
        parent: "Effort | None" = None,
        stop: Stop | None = None,
    ) -> None:
        self.left: float = limit if parent is None else min(limit, parent.left)
        self.spent = 0
        self._parent = parent
        self._stop: Stop | None = stop if parent is None else parent._stop

    def share(self, parts: int) -> "Effort":
        """Return one of `parts` equal shares of what is left."""
        return Effort(self.left if self.left == math.inf else self.left // parts, parent=self)

    def spend(self, evaluations: int) -> None:
        """Charge this effort and its parents; raise `SearchStopped` if the caller says stop."""
        effort: Effort | None = self
        while effort is not None:
            effort.spent += evaluations
            effort.left -= evaluations
            effort = effort._parent
        if self._stop is not None and self._stop():
            raise SearchStopped("the search was stopped before it had a result")

    @property
    def is_spent(self) -> bool:
        """True once no evaluation is left."""
        return self.left <= 0


#: Up to this many widths are tried one by one where few of them can have the count at all.
FEW_WIDTHS = 64
#: Up to this many counts are solved for the rank one by one, at up to this many depths.
FEW_COUNTS, FEW_DEPTHS = 16, 4096
#: With more depths than this per rank, ranks are tried one by one instead.
RANK_DEPTHS = 16
#: This many counts solved for the rank, or widths skipped for want of a d_ff, are one evaluation.
SOLVED, SKIPPED = 4, 16


@dataclass(frozen=True, slots=True)
class Allowed:
    """The parameter counts and the d_ff range still allowed inside a region.

    `most_ffn` None means no upper limit. Every d_ff is a multiple of `ffn_step`.
    """

    low: int
    high: int
    least_ffn: int
    most_ffn: int | None
    ffn_step: int


@dataclass(frozen=True, slots=True)
class Region:
    """Frames from `small` to `large`, depths from `shallow` to `deep`, and what is allowed there.

    With `one_width`, both ends are frames of the same width and heads; otherwise they are bounds.
    """

    small: Frame
    large: Frame
    shallow: int
    deep: int
    allowed: Allowed
    one_width: bool

    @property
    def is_frame(self) -> bool:
        """True if the region holds a single frame."""
        return self.one_width and self.small is self.large

    @property
    def is_leaf(self) -> bool:
        """True if the region holds a single frame at a single depth."""
        return self.is_frame and self.shallow == self.deep

    @property
    def depths(self) -> range:
        """Every depth from `shallow` to `deep`."""
        return range(self.shallow, self.deep + 1)

    @property
    def least(self) -> int:
        """A lower bound of the counts inside."""
        small = self.small
        inside = self.shallow * (small.base + small.column * self.allowed.least_ffn)
        return max(self.allowed.low, small.outside + inside)

    @property
    def most(self) -> int:
        """An upper bound of the counts inside."""
        large, most_ffn = self.large, self.allowed.most_ffn
        if most_ffn is None:
            return self.allowed.high
        inside = self.deep * (large.base + large.column * most_ffn)
        return min(self.allowed.high, large.outside + inside)

    @property
    def d_ffs(self) -> range:
        """Every d_ff that the single frame may have at some depth of the region."""
        frame, allowed, step = self.small, self.allowed, self.allowed.ffn_step
        most = ((allowed.high - frame.outside) // self.shallow - frame.base) // frame.column
        if allowed.most_ffn is not None:
            most = min(most, allowed.most_ffn)
        each = _ceil_div(allowed.low - frame.outside, self.deep) - frame.base
        least = max(allowed.least_ffn, _ceil_div(each, frame.column))
        return range(_ceil_div(least, step) * step, most + 1, step)

    @property
    def is_tight(self) -> bool:
        """True if the single frame has at most one d_ff per depth and one depth per d_ff."""
        frame, allowed = self.small, self.allowed
        step = min(frame.column * self.shallow, frame.base + frame.column * allowed.least_ffn)
        return self.is_frame and allowed.high - allowed.low < step

    def runs(self) -> Iterator[tuple[range, range]]:
        """Yield (depths, d_ffs), one of both a single value: together every pair that is allowed.

        Depth and d_ff of a frame are linked by the count, so one run is solved for each value of
        whichever of the two has fewer.
        """
        frame, allowed = self.small, self.allowed
        d_ffs = self.d_ffs
        if len(d_ffs) >= len(self.depths):
            outside, low, high = frame.outside, allowed.low, allowed.high
            base, step = frame.base, frame.column * allowed.ffn_step
            for n_layers in self.depths:
                # Cheaper than `ffns`, and enough to skip a depth without an allowed count.
                if high - (high - outside - n_layers * base) % (n_layers * step) >= low:
                    at_depth = ffns(frame, allowed, n_layers)
                    if at_depth:
                        yield range(n_layers, n_layers + 1), at_depth
            return
        for d_ff in d_ffs:
            layer = frame.base + frame.column * d_ff
            least = max(self.shallow, _ceil_div(allowed.low - frame.outside, layer))
            most = min(self.deep, (allowed.high - frame.outside) // layer)
            if least <= most:
                yield range(least, most + 1), range(d_ff, d_ff + 1)


def ffns(frame: Frame, allowed: Allowed, n_layers: int) -> range:
    """Return every d_ff with which this frame at this depth keeps every limit."""
    fixed, slope = frame.outside + n_layers * frame.base, n_layers * frame.column
    least = max(allowed.least_ffn, _ceil_div(allowed.low - fixed, slope))
    most = (allowed.high - fixed) // slope
    if allowed.most_ffn is not None:
        most = min(most, allowed.most_ffn)
    step = allowed.ffn_step
    return range(_ceil_div(least, step) * step, most + 1, step)


class Limits:
    """The hard limits of a budget between two counts; a search may narrow `low` and `high`.

    Shares are numerators and denominators of the decimals as they were written, so that bounds are
    exact; integers divide much faster than `Fraction`.
    """

    def __init__(self, budget: Budget, *, low: int, high: int) -> None:
        self.budget = budget
        self.low, self.high = low, high
        ratio, within = _decimals(budget.ratio)
        self._has_ratio = within is not None
        self._ratio = ratio.as_integer_ratio()
        self._most_ratio = (ratio + (within or 0)).as_integer_ratio()
        self._least_ratio = (ratio - (within or 0)).as_integer_ratio()
        glu, relative = _decimals(budget.expansion)
        #: True if some widths may have no allowed d_ff at all.
        self.is_sparse = relative is not None
        self._glu = glu.as_integer_ratio()
        self._least_glu = (glu * (1 - (relative or 0))).as_integer_ratio()
        self._most_glu = (glu * (1 + (relative or 0))).as_integer_ratio()
        self._min_aspect = Fraction(repr(budget.min_aspect)).as_integer_ratio()
        self._max_aspect = Fraction(repr(budget.max_aspect or 0.0)).as_integer_ratio()

    def allowed(self, small: Frame, large: Frame) -> Allowed:
        """Return what count, ratio and expansion allow between two frames, at any depth."""
        low, high, step = self.low, self.high, self.budget.ffn_step
        if self.budget.exact_ratio:  # within half a step of what is covered
            over, under = self._ratio
            low = max(low, _ceil_div((2 * small.covered - large.step) * under, 2 * over))
            high = min(high, (2 * large.covered + large.step) * under // (2 * over))
        elif self._has_ratio:
            over, under = self._most_ratio
            low = max(low, _ceil_div(small.covered * under, over))
            over, under = self._least_ratio
            if over > 0:
                high = min(high, large.covered * under // over)
        least_ffn, most_ffn = step, None
        if self.budget.exact_expansion:  # within half a step of d_ff
            over, under = self._glu
            half = _ceil_div(2 * over * small.d_model - step * under, 2 * under)
            least_ffn = max(least_ffn, half)
            most_ffn = (2 * over * large.d_model + step * under) // (2 * under)
        elif self.is_sparse:
            over, under = self._least_glu
            least_ffn = max(least_ffn, _ceil_div(over * small.d_model, under))
            over, under = self._most_glu
            most_ffn = over * large.d_model // under
        return Allowed(low, high, least_ffn, most_ffn, step)

    def has_ffn(self, d_model: int) -> bool:
        """Return True if some d_ff is within the expansion's limit at this width."""
        step = self.budget.ffn_step
        least = max(1, _ceil_div(self._least_glu[0] * d_model, self._least_glu[1]))
        most = self._most_glu[0] * d_model // self._most_glu[1]
        return most // step * step >= least

    def depths(self, small: Frame, large: Frame, allowed: Allowed) -> range:
        """Return the depths at which some frame between the two may keep every limit."""
        least = self.budget.min_layers
        if allowed.low > allowed.high:
            return range(0)
        if allowed.most_ffn is not None:
            if allowed.most_ffn < allowed.least_ffn:
                return range(0)
            largest_layer = large.base + large.column * allowed.most_ffn
            least = max(least, _ceil_div(allowed.low - large.outside, largest_layer))
        most = (allowed.high - small.outside) // (small.base + small.column * allowed.least_ffn)
        if self.budget.max_layers is not None:
            most = min(most, self.budget.max_layers)
        over, under = self._min_aspect
        if over:
            most = min(most, large.d_model * under // over)
        over, under = self._max_aspect
        if over:
            least = max(least, _ceil_div(small.d_model * under, over))
        return range(least, most + 1)


class Regions:
    """The designs of a budget as regions: the first one, and how a region is split."""

    def __init__(self, widths: Widths, limits: Limits, effort: Effort) -> None:
        self.widths, self.limits, self.effort = widths, limits, effort
        self._remainder = widths.remainder()
        self._any_rank = widths.budget.rank == "any"

    def every_design(self) -> Iterator[Region]:
        """Yield one region with every design, or nothing if there is none."""
        low, high = self.limits.low, self.limits.high
        widths = self.widths.within(high)
        if widths and can_count(self.widths, low=low, high=high):
            narrow, wide = widths[0], widths[-1]
            small = self.widths.smallest(narrow, self.widths.ranks(narrow)[0])
            large = self.widths.largest(wide, self.widths.ranks(wide)[1])
            yield from self.cut(small, large)

    def cut(
        self,
        small: Frame,
        large: Frame,
        *,
        depths: range | None = None,
        d_ffs: range | None = None,
        one_width: bool = False,
    ) -> Iterator[Region]:
        """Yield the region between two ends without what the limits forbid, if any is left."""
        self.effort.spend(1)
        if self.limits.is_sparse and not one_width:
            ends = self._trimmed(small, large)
            if ends is None:
                return
            small, large = ends
        allowed = self.limits.allowed(small, large)
        if d_ffs is not None:
            allowed = replace(allowed, least_ffn=d_ffs[0], most_ffn=d_ffs[-1])
        possible = self.limits.depths(small, large, allowed)
        if not possible:
            return
        shallow, deep = possible[0], possible[-1]
        if depths is not None:
            shallow, deep = max(shallow, depths[0]), min(deep, depths[-1])
        region = Region(small, large, shallow, deep, allowed, one_width)
        if shallow <= deep and region.least <= region.most:
            yield region

    def _trimmed(self, small: Frame, large: Frame) -> tuple[Frame, Frame] | None:
        """Move both ends inwards to the first and last width that have a d_ff, if one has."""
        narrow, wide, step = small.d_model, large.d_model, self.widths.step
        while narrow <= wide and not self.limits.has_ffn(narrow):
            narrow += step
        while wide > narrow and not self.limits.has_ffn(wide):
            wide -= step
        skipped = narrow - small.d_model + large.d_model - wide
        self.effort.spend(skipped // step // SKIPPED)
        if narrow > wide:
            return None
        if narrow > small.d_model:
            small = self.widths.smallest(narrow, small.rank)
        if wide < large.d_model:
            rank = large.rank
            if self._any_rank:
                assert rank is not None and small.rank is not None
                rank = min(rank, wide)  # no rank is above its width
                if small.rank > rank:
                    return None
            large = self.widths.largest(wide, rank)
        return small, large

    # --- splitting --------------------------------------------------------------------------------

    def split(self, region: Region) -> Iterator[Region]:
        """Yield the parts of a region that is not a leaf, halved along its longest side."""
        small, large = region.small, region.large
        narrow, wide = small.d_model, large.d_model
        if not region.one_width:
            widths = (wide - narrow) // self.widths.step
            few_counts = self.limits.high - self.limits.low < narrow
            if widths < 2 or (widths < FEW_WIDTHS and few_counts):
                for d_model in range(narrow, wide + 1, self.widths.step):
                    yield from self._at_width(region, d_model)
                return
        elif small is not large and self._are_few_counts(region):
            yield from self._by_count(region)
            return
        elif region.is_frame:
            yield from self._by_size(region)
            return
        # The count grows with the square of the width, and with the depth and the rank.
        ranks = (large.rank or 1) / (small.rank or 1)
        sides = ((wide / narrow) ** 2, region.deep / region.shallow, ranks)
        longest = max(sides)
        if longest == sides[0] and wide > narrow:
            yield from self._by_width(region)
        elif longest == sides[1]:
            for part in _halves(region.depths):
                yield from self.cut(small, large, depths=part, one_width=region.one_width)
        else:
            yield from self._by_rank(region)

    def _at_width(self, region: Region, d_model: int) -> Iterator[Region]:
        """Yield the frames of one width, a region for each choice of heads."""
        low, high = self.limits.low, self.limits.high
        if self._remainder is not None and high - (high - self._remainder) % d_model < low:
            return
        if self.limits.is_sparse and not self.limits.has_ffn(d_model):
            return
        least, most = region.small.rank, region.large.rank
        if self._any_rank:
            assert least is not None and most is not None
            most = min(most, d_model)
            if least > most:
                return
        for heads in heads_of(self.widths.budget, d_model):
            small = self.widths.frame(d_model, heads, least)
            large = small if least == most else self.widths.frame(d_model, heads, most)
            yield from self.cut(small, large, depths=region.depths, one_width=True)

    def _by_width(self, region: Region) -> Iterator[Region]:
        small, large, depths = region.small, region.large, region.depths
        step, least, most = self.widths.step, small.rank, large.rank
        middle = _middle(small.d_model // step, large.d_model // step) * step
        wider = self.widths.smallest(middle + step, least)
        if self._any_rank:
            assert least is not None and most is not None
            if least > middle:  # no rank is above its width
                yield from self.cut(wider, large, depths=depths)
                return
            most = min(most, middle)
        yield from self.cut(small, self.widths.largest(middle, most), depths=depths)
        yield from self.cut(wider, large, depths=depths)

    def _by_size(self, region: Region) -> Iterator[Region]:
        """Halve the depths or the d_ffs of a single frame, whichever are fewer."""
        frame, d_ffs, depths = region.small, region.d_ffs, region.depths
        if not d_ffs:
            return
        if len(d_ffs) == 1 or len(depths) <= len(d_ffs):
            for part in _halves(depths):
                yield from self.cut(frame, frame, depths=part, d_ffs=d_ffs, one_width=True)
            return
        half = len(d_ffs) // 2
        for few in (d_ffs[:half], d_ffs[half:]):
            yield from self.cut(frame, frame, depths=depths, d_ffs=few, one_width=True)

    def _by_rank(self, region: Region) -> Iterator[Region]:
        small, large, depths = region.small, region.large, region.depths
        assert small.rank is not None and large.rank is not None
        middle = _middle(small.rank, large.rank)
        below, above = self._with_rank(large, middle), self._with_rank(small, middle + 1)
        if middle == small.rank and region.one_width:
            below = small
        if middle + 1 == large.rank and region.one_width:
            above = large
        yield from self.cut(small, below, depths=depths, one_width=region.one_width)
        yield from self.cut(above, large, depths=depths, one_width=region.one_width)

    def _are_few_counts(self, region: Region) -> bool:
        """Return True if most ranks miss all of the counts that are left, at any d_ff."""
        assert region.small.rank is not None and region.large.rank is not None
        counts = region.allowed.high - region.allowed.low
        ranks = region.large.rank - region.small.rank
        depths = region.deep - region.shallow
        return counts < min(FEW_COUNTS, ranks) and depths < min(FEW_DEPTHS, RANK_DEPTHS * ranks)

    def _by_count(self, region: Region) -> Iterator[Region]:
        """Yield the ranks of one width that can have an allowed count, at each depth.

        count = fixed + each * rank + column * columns, with a whole number of columns. So
        each * rank = count - fixed (mod column): the solutions are one remainder of the rank
        modulo column / gcd(each, column), or none.
        """
        small, large, allowed = region.small, region.large, region.allowed
        assert small.rank is not None and large.rank is not None
        each = (large.outside - small.outside) // (large.rank - small.rank)
        counts = range(allowed.low, allowed.high + 1)
        self.effort.spend(len(region.depths) * len(counts) // SOLVED)
        for n_layers in region.depths:
            column = n_layers * small.column * allowed.ffn_step
            shared = math.gcd(each, column)
            period = column // shared
            inverse = pow(each // shared, -1, period)
            for count in counts:
                left = count - small.outside - n_layers * small.base
                if left < 0 or left % shared:
                    continue
                more = left // shared * inverse % period
                for rank in range(small.rank + more, large.rank + 1, period):
                    frame = self._with_rank(small, rank)
                    depth = range(n_layers, n_layers + 1)
                    yield from self.cut(frame, frame, depths=depth, one_width=True)

    def _with_rank(self, end: Frame, rank: int) -> Frame:
        return self.widths.frame(end.d_model, (end.n_heads, end.d_head), rank)


def _decimals(wish: Wish | None) -> tuple[Fraction, Fraction | None]:
    """Return value and limit of a wish as the decimals that were written."""
    if wish is None:
        return Fraction(0), None
    return Fraction(repr(wish.value)), None if wish.within is None else Fraction(repr(wish.within))


def _ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def _middle(low: int, high: int) -> int:
    """Return the geometric middle: at least `low`, below `high`."""
    return min(max(low, math.isqrt(low * high)), high - 1)


def _halves(values: range) -> tuple[range, range]:
    cut = _middle(values[0], values[-1]) + 1
    return range(values[0], cut), range(cut, values[-1] + 1)
