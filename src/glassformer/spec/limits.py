"""The hard limits of a search: what count, ratio, expansion, depth and aspect leave.

Everything here is in whole numbers, and for a box of designs at once: between two frames, the
smallest and the largest of the box, of which a single frame is both.
"""

from dataclasses import dataclass
from fractions import Fraction

from glassformer.spec.budget import Budget, Exact, Target, Wish
from glassformer.spec.counting import Frame


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
