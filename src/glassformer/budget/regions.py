"""The hard limits of a search: what count, ratio, expansion, depth and aspect leave.

Everything here is in whole numbers, and for a box of designs at once: between two frames, the
smallest and the largest of the box, of which a single frame is both.

Boxes of designs: all widths, ranks and depths between two ends, cut by the limits and halved.

What a limit or a bound says of a whole box it says once: a search opens only the boxes in which a
better design may lie, down to one frame at one depth.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from glassformer.budget.counting import Frame, Widths, can_count, heads_of
from glassformer.budget.effort import Effort
from glassformer.budget.question import Budget, Exact, Target, Wish


@dataclass(frozen=True, slots=True)
class Room:
    """What the limits leave a box: its counts, and its d_ff (None: as wide as it goes), of which
    every one is a multiple of `multiple`.
    """

    low: int
    high: int
    narrow: int
    wide: int | None
    multiple: int


class Limits:
    """The limits of one budget between two counts, which a search may bring closer together."""

    def __init__(self, budget: Budget, *, low: int, high: int) -> None:
        self.budget = budget
        self.low, self.high = low, high
        ratio, within = _decimals(budget.embedding_ratio)
        self._ratio_within = within
        self._ratio = _parts(ratio)
        self._most_ratio = _parts(ratio + (within or 0))
        self._least_ratio = _parts(ratio - (within or 0))
        glu, relative = _decimals(budget.glu_expansion)
        self._glu_within = relative
        self._glu = _parts(glu)
        self._least_glu = _parts(glu * (1 - (relative or 0)))
        self._most_glu = _parts(glu * (1 + (relative or 0)))
        self._min_aspect = _parts(Fraction(repr(budget.min_aspect)))
        self._max_aspect = _parts(Fraction(repr(budget.max_aspect or 0.0)))

    def room(self, small: Frame, large: Frame) -> Room:
        """What count, ratio and expansion may be: the limits that do not ask for the depth."""
        low, high, multiple = self.low, self.high, self.budget.ffn_multiple
        if isinstance(self.budget.embedding_ratio, Exact):  # within half a step
            over, under = self._ratio
            low = max(low, _up((2 * small.covered - large.step) * under, 2 * over))
            high = min(high, (2 * large.covered + large.step) * under // (2 * over))
        elif self._ratio_within is not None:
            over, under = self._most_ratio
            low = max(low, _up(small.covered * under, over))
            over, under = self._least_ratio
            if over > 0:
                high = min(high, large.covered * under // over)
        narrow, wide = multiple, None
        if isinstance(self.budget.glu_expansion, Exact):
            over, under = self._glu
            narrow = max(narrow, _up(2 * over * small.d_model - multiple * under, 2 * under))
            wide = (2 * over * large.d_model + multiple * under) // (2 * under)
        elif self._glu_within is not None:
            narrow = max(narrow, _up(self._least_glu[0] * small.d_model, self._least_glu[1]))
            wide = self._most_glu[0] * large.d_model // self._most_glu[1]
        return Room(low, high, narrow, wide, multiple)

    @property
    def is_sparse(self) -> bool:
        """Whether some widths may have no d_ff at all."""
        return self._glu_within is not None

    def has_ffn(self, d_model: int) -> bool:
        """Whether a multiple is within the expansion's limit at this width."""
        multiple = self.budget.ffn_multiple
        least = max(1, _up(self._least_glu[0] * d_model, self._least_glu[1]))
        most = self._most_glu[0] * d_model // self._most_glu[1]
        return most // multiple * multiple >= least

    def depths(self, small: Frame, large: Frame, room: Room) -> range:
        """The depths at which some frame of the box may keep every limit."""
        least = self.budget.min_layers
        if room.low > room.high:
            return range(0)
        if room.wide is not None:
            if room.wide < room.narrow:
                return range(0)
            most_ffn = large.base + large.column * room.wide
            least = max(least, _up(room.low - large.outside, most_ffn))
        most = (room.high - small.outside) // (small.base + small.column * room.narrow)
        if self.budget.max_layers is not None:
            most = min(most, self.budget.max_layers)
        over, under = self._min_aspect
        if over:
            most = min(most, large.d_model * under // over)
        over, under = self._max_aspect
        if over:
            least = max(least, _up(small.d_model * under, over))
        return range(least, most + 1)


def ffns(frame: Frame, room: Room, n_layers: int) -> range:
    """Every d_ff with which this frame and depth keep every limit."""
    fixed, slope = frame.outside + n_layers * frame.base, n_layers * frame.column
    least = max(room.narrow, _up(room.low - fixed, slope))
    most = (room.high - fixed) // slope
    if room.wide is not None:
        most = min(most, room.wide)
    return range(_up(least, room.multiple) * room.multiple, most + 1, room.multiple)


def _decimals(wish: Wish) -> tuple[Fraction, Fraction | None]:
    """The value and its limit as the decimals that were written: bounds are exact."""
    within = wish.within if isinstance(wish, Target) else None
    value = wish.value if isinstance(wish, (Exact, Target)) else 0.0
    return Fraction(repr(value)), None if within is None else Fraction(repr(within))


def _parts(share: Fraction) -> tuple[int, int]:
    """Numerator and denominator: whole numbers are much faster to divide than fractions."""
    return share.numerator, share.denominator


def _up(number: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-number // by)


#: So many widths are looked at one by one where few of them can have the count at all.
FEW_WIDTHS = 64
#: So many counts are solved for the rank one by one, at so many depths.
FEW_COUNTS, FEW_DEPTHS = 16, 4096
#: With more depths than this for each rank, the ranks are looked at one by one instead.
RANK_DEPTHS = 16
#: So many counts solved for the rank take as long as one box.
SOLVED = 4
#: So do so many widths that have no d_ff.
SKIPPED = 16


@dataclass(frozen=True, slots=True)
class Box:
    """Frames from `small` to `large`, depths from `shallow` to `deep`, and what they have room for.

    `is_settled`: both ends are frames of the same width and heads; else they are bounds.
    """

    small: Frame
    large: Frame
    shallow: int
    deep: int
    room: Room
    is_settled: bool

    @property
    def is_frame(self) -> bool:
        """Whether there is one frame in it."""
        return self.is_settled and self.small is self.large

    @property
    def is_leaf(self) -> bool:
        """Whether there is one frame in it, at one depth."""
        return self.is_frame and self.shallow == self.deep

    @property
    def depths(self) -> tuple[int, int]:
        """The shallowest and the deepest."""
        return self.shallow, self.deep

    @property
    def least(self) -> int:
        """No design in it counts less."""
        small = self.small
        inside = self.shallow * (small.base + small.column * self.room.narrow)
        return max(self.room.low, small.outside + inside)

    @property
    def most(self) -> int:
        """No design in it counts more."""
        large, wide = self.large, self.room.wide
        if wide is None:
            return self.room.high
        inside = self.deep * (large.base + large.column * wide)
        return min(self.room.high, large.outside + inside)

    @property
    def d_ffs(self) -> range:
        """Every d_ff that its one frame may have, at one depth or another."""
        frame, room, multiple = self.small, self.room, self.room.multiple
        most = ((room.high - frame.outside) // self.shallow - frame.base) // frame.column
        if room.wide is not None:
            most = min(most, room.wide)
        each = _up(room.low - frame.outside, self.deep) - frame.base
        least = max(room.narrow, _up(each, frame.column))
        return range(_up(least, multiple) * multiple, most + 1, multiple)


class Boxes:
    """How the designs of a budget are divided."""

    def __init__(self, widths: Widths, limits: Limits, effort: Effort) -> None:
        self.widths, self.limits, self.effort = widths, limits, effort
        self._remainder = None
        if widths.budget.rank != "any":
            self._remainder = widths.counts.remainder(widths.fixed_rank)

    def every(self) -> Iterator[Box]:
        """One box with every design, or none."""
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
        depths: tuple[int, int] | None = None,
        d_ffs: range | None = None,
        is_settled: bool = False,
    ) -> Iterator[Box]:
        """The box between two ends without what the limits forbid; nothing if that is all."""
        self.effort.spend(1)
        if self.limits.is_sparse and not is_settled:
            ends = self._admitted(small, large)
            if ends is None:
                return
            small, large = ends
        room = self.limits.room(small, large)
        if d_ffs is not None:
            room = replace(room, narrow=d_ffs[0], wide=d_ffs[-1])
        allowed = self.limits.depths(small, large, room)
        if not allowed:
            return
        shallow, deep = allowed[0], allowed[-1]
        if depths is not None:
            shallow, deep = max(shallow, depths[0]), min(deep, depths[1])
        box = Box(small, large, shallow, deep, room, is_settled)
        if shallow <= deep and box.least <= box.most:
            yield box

    def _admitted(self, small: Frame, large: Frame) -> tuple[Frame, Frame] | None:
        """The same box from its first width to its last that has a d_ff, if one has."""
        narrow, wide, step = small.d_model, large.d_model, self.widths.step
        while narrow <= wide and not self.limits.has_ffn(narrow):
            narrow += step
        while wide > narrow and not self.limits.has_ffn(wide):
            wide -= step
        left_out = narrow - small.d_model + large.d_model - wide
        self.effort.spend(left_out // step // SKIPPED)
        if narrow > wide:
            return None
        if narrow > small.d_model:
            small = self.widths.smallest(narrow, small.rank)
        if wide < large.d_model:
            rank = large.rank
            if self.widths.budget.rank == "any":
                assert rank is not None and small.rank is not None
                rank = min(rank, wide)  # no rank is above its width
                if small.rank > rank:
                    return None
            large = self.widths.largest(wide, rank)
        return small, large

    def split(self, box: Box) -> Iterator[Box]:
        """The parts of a box that is not a leaf, along its longest side."""
        small, large, depths = box.small, box.large, box.depths
        narrow, wide = small.d_model, large.d_model
        if not box.is_settled:
            widths = (wide - narrow) // self.widths.step
            if widths < 2 or (widths < FEW_WIDTHS and self._is_tight(narrow)):
                for d_model in range(narrow, wide + 1, self.widths.step):
                    yield from self._settled(box, d_model)
                return
        elif small is not large and self._are_few_counts(box):
            yield from self._by_count(box)
            return
        elif box.is_frame:
            yield from self._by_size(box)
            return
        # The count grows with the square of the width, and with the depth and the rank.
        sides = ((wide / narrow) ** 2, box.deep / box.shallow, _rank(large) / _rank(small))
        longest = max(sides)
        if longest == sides[0] and wide > narrow:
            yield from self._by_width(box)
        elif longest == sides[1]:
            middle = _middle(*depths)
            for part in ((box.shallow, middle), (middle + 1, box.deep)):
                yield from self.cut(small, large, depths=part, is_settled=box.is_settled)
        else:
            yield from self._by_rank(box)

    def _is_tight(self, d_model: int) -> bool:
        return self.limits.high - self.limits.low < d_model

    def _settled(self, box: Box, d_model: int) -> Iterator[Box]:
        """The frames of one width, a box for each choice of heads."""
        low, high, depths = self.limits.low, self.limits.high, box.depths
        if self._remainder is not None and high - (high - self._remainder) % d_model < low:
            return
        if self.limits.is_sparse and not self.limits.has_ffn(d_model):
            return
        least, most = box.small.rank, box.large.rank
        if self.widths.budget.rank == "any":
            assert least is not None and most is not None
            most = min(most, d_model)
            if least > most:
                return
        for pair in heads_of(self.widths.budget, d_model):
            small = self.widths.frame(d_model, pair, least)
            large = small if least == most else self.widths.frame(d_model, pair, most)
            yield from self.cut(small, large, depths=depths, is_settled=True)

    def _by_width(self, box: Box) -> Iterator[Box]:
        small, large, depths = box.small, box.large, box.depths
        step, least, most = self.widths.step, small.rank, large.rank
        middle = _middle(small.d_model // step, large.d_model // step) * step
        if self.widths.budget.rank == "any":
            assert least is not None and most is not None
            if least > middle:  # no rank is above its width
                yield from self.cut(
                    self.widths.smallest(middle + step, least), large, depths=depths
                )
                return
            most = min(most, middle)
        yield from self.cut(small, self.widths.largest(middle, most), depths=depths)
        yield from self.cut(self.widths.smallest(middle + step, least), large, depths=depths)

    def _by_size(self, box: Box) -> Iterator[Box]:
        """One frame by its depth or by its d_ff, whichever has fewer left."""
        frame, d_ffs = box.small, box.d_ffs
        depths = range(box.shallow, box.deep + 1)
        if not d_ffs:
            return
        if len(d_ffs) == 1 or len(depths) <= len(d_ffs):
            middle = _middle(*box.depths)
            for part in ((box.shallow, middle), (middle + 1, box.deep)):
                yield from self.cut(frame, frame, depths=part, d_ffs=d_ffs, is_settled=True)
            return
        half = len(d_ffs) // 2
        for few in (d_ffs[:half], d_ffs[half:]):
            yield from self.cut(frame, frame, depths=box.depths, d_ffs=few, is_settled=True)

    def _by_rank(self, box: Box) -> Iterator[Box]:
        small, large, depths = box.small, box.large, box.depths
        assert small.rank is not None and large.rank is not None
        middle = _middle(small.rank, large.rank)
        below, above = self._ranked(large, middle), self._ranked(small, middle + 1)
        if middle == small.rank and box.is_settled:
            below = small
        if middle + 1 == large.rank and box.is_settled:
            above = large
        yield from self.cut(small, below, depths=depths, is_settled=box.is_settled)
        yield from self.cut(above, large, depths=depths, is_settled=box.is_settled)

    def _are_few_counts(self, box: Box) -> bool:
        """Whether most ranks miss the counts that are left, at any d_ff."""
        assert box.small.rank is not None and box.large.rank is not None
        counts, ranks = box.room.high - box.room.low, box.large.rank - box.small.rank
        depths = box.deep - box.shallow
        return counts < min(FEW_COUNTS, ranks) and depths < min(FEW_DEPTHS, RANK_DEPTHS * ranks)

    def _by_count(self, box: Box) -> Iterator[Box]:
        """The ranks of one width that can have a count exactly, at each depth.

        A count is what is fixed, and so much a rank and so much a column: for a whole number of
        columns, the ranks are those of one remainder.
        """
        small, large, room = box.small, box.large, box.room
        assert small.rank is not None and large.rank is not None
        each = (large.outside - small.outside) // (large.rank - small.rank)
        depths, counts = box.deep - box.shallow + 1, room.high - room.low + 1
        self.effort.spend(depths * counts // SOLVED)
        for n_layers in range(box.shallow, box.deep + 1):
            column = n_layers * small.column * room.multiple
            shared = math.gcd(each, column)
            period = column // shared
            inverse = pow(each // shared, -1, period)
            for count in range(room.low, room.high + 1):
                left = count - small.outside - n_layers * small.base
                if left < 0 or left % shared:
                    continue
                more = left // shared * inverse % period
                for rank in range(small.rank + more, large.rank + 1, period):
                    frame = self._ranked(small, rank)
                    yield from self.cut(frame, frame, depths=(n_layers, n_layers), is_settled=True)

    def _ranked(self, end: Frame, rank: int) -> Frame:
        """The same frame with another rank."""
        return self.widths.frame(end.d_model, (end.n_heads, end.d_head), rank)


def _rank(frame: Frame) -> int:
    return frame.rank or 1


def _middle(low: int, high: int) -> int:
    """The geometric middle: from `low`, and below `high`."""
    return min(max(low, math.isqrt(low * high)), high - 1)
