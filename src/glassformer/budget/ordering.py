"""The order of designs: a key for each design, and a lower bound of the keys in a region.

Compared in this order: both wishes nearly met (ratio within a point, expansion within 5 %); least
drift from the wishes, in levels; the most usual shape; multiples that hardware likes; then exact
drift, distance from the total, and the sizes themselves, so that no two designs tie.
"""

import math

from glassformer.budget.counting import HABITUAL_HEAD, Frame
from glassformer.budget.question import Budget
from glassformer.budget.regions import Region

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
