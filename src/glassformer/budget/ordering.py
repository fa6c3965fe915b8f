"""Which of two designs is better, and which cannot be.

In this order: ratio within a point and expansion within 5 % of the wish, if a design has both;
least drift; the least unusual shape; friendly multiples; and at last exact drift, the distance from
the total and the sizes themselves, so that an answer never depends on chance.
"""

import math

from glassformer.budget.counting import HABITUAL_HEAD, Frame
from glassformer.budget.question import Budget, Free
from glassformer.budget.regions import Box

#: A point of the ratio counts as much as 5 % of the expansion: one unit of drift.
RATIO_UNIT, GLU_UNIT = 0.01, 0.05
#: What a free aspect (d_model / n_layers) and a free expansion settle at: 256 x 8, 128 x 4; 8/3.
ASPECT, EXPANSION = 32.0, 8 / 3

#: What rounding may do to a bound.
SLACK = 1e-9
#: The level of no drift at all, and of a quarter of a unit.
LEAST = 1

Key = tuple[float, ...]
#: Where level and exact drift stand in a key.
LEVEL, DRIFT = 1, 4


def level(units: float) -> int:
    """Drift in steps, from LEAST on: quarters of a unit up to one, tenths of itself beyond.

    Drifts of one level count as equal, so that shape and multiples have a say.
    """
    if units <= 1.0:
        return max(LEAST, math.ceil(units * 4 - 1e-9))
    return 4 + math.ceil(math.log(units, 1.1) - 1e-9)


def least_drift(level: float) -> float:
    """No drift of this level, or of a higher one, is less."""
    if level <= LEAST:
        return 0.0
    return (level - 1) / 4 if level <= 4 else float(1.1 ** (level - 5))


class Preference:
    """The order of designs of one budget whose counts lie between two bounds."""

    def __init__(self, budget: Budget, *, low: int, high: int) -> None:
        self.budget = budget
        self.low, self.high = low, high
        ratio, glu = budget.embedding_ratio, budget.glu_expansion
        self.ratio = None if isinstance(ratio, Free) else ratio.value
        self.glu = None if isinstance(glu, Free) else glu.value

    def wished_ffn(self, frame: Frame) -> float:
        """The d_ff, not whole, of the wished expansion, or of the habitual one."""
        return (EXPANSION if self.glu is None else self.glu) * frame.d_model

    def key(self, frame: Frame, n_layers: int, d_ff: int) -> Key:
        """Smaller is better."""
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
        """How unusual: aspect, a head width or expansion that nobody asked for, in half powers."""
        away = abs(math.log2(frame.d_model / n_layers / ASPECT))
        if self.budget.free_head_width:
            away += abs(math.log2(frame.n_heads * frame.d_head / frame.d_model))
        if self.budget.n_heads is None:
            away += abs(math.log2(frame.d_head / HABITUAL_HEAD))
        if self.glu is None:
            away += abs(math.log2(d_ff / frame.d_model / EXPANSION))
        return math.ceil(2 * away - 1e-9)

    # --- what cannot be better ----------------------------------------------------------------

    def bound(self, box: Box) -> Key:
        """No key of a design in this box begins smaller."""
        small, large = box.small, box.large
        low, high = box.least, box.most
        ratio = glu = 0.0
        if self.ratio is not None:
            away = max(small.covered / high - self.ratio, self.ratio - large.covered / low)
            ratio = max(0.0, away / RATIO_UNIT)
        if self.glu is not None:
            glu = self._glu_drift(box, low, high)
        both = ratio + glu
        if self.ratio is not None and self.glu is not None:
            both = max(both, self._both_drifts(box, low, high))
        unfriendly, exact = self._least_unfriendly(box), both
        if self.glu is not None and box.is_settled and box.shallow == box.deep:
            more, drift = self._friendly_drift(box, low, high)
            unfriendly, exact = unfriendly + more, max(both, drift)
        return (
            float(max(ratio, glu) > 1.0 + SLACK),
            level(_rounded_down(both)),
            self._least_shape(box, low, high),
            unfriendly,
            round(_rounded_down(exact), 9),
        )

    def _expansions(self, box: Box, low: float, high: float) -> tuple[float, float]:
        """No expansion of a design in this box that counts from `low` to `high` lies outside."""
        small, large, room = box.small, box.large, box.room
        least = ((low - large.outside) / box.deep - large.base) / large.column
        most = ((high - small.outside) / box.shallow - small.base) / small.column
        if room.wide is not None:
            most = min(most, room.wide)
        return max(least, room.narrow) / large.d_model, most / small.d_model

    def _glu_drift(self, box: Box, low: float, high: float) -> float:
        assert self.glu is not None
        least, most = self._expansions(box, low, high)
        return max(least / self.glu - 1.0, 1.0 - most / self.glu, 0.0) / GLU_UNIT

    def _both_drifts(self, box: Box, low: float, high: float) -> float:
        """The least sum of both drifts, which one count must have together.

        Between its turns the sum is concave or monotone in the count, but where a falling ratio
        meets a growing expansion: there it is least where the two balance.
        """
        assert self.ratio is not None and self.glu is not None
        small, large, glu = box.small, box.large, self.glu
        growth = glu * large.d_model * box.deep * large.column * GLU_UNIT / RATIO_UNIT
        turns = [small.covered / self.ratio, large.covered / self.ratio]
        turns += [low, high, math.sqrt(small.covered * growth)]
        for d_ff in (glu * small.d_model, box.room.wide):
            if d_ff is not None:
                turns.append(small.outside + box.shallow * (small.base + small.column * d_ff))
        for d_ff in (glu * large.d_model, box.room.narrow):
            turns.append(large.outside + box.deep * (large.base + large.column * d_ff))
        least = math.inf
        for count in turns:
            if low <= count <= high:
                ratio = max(small.covered / count - self.ratio, self.ratio - large.covered / count)
                drift = max(0.0, ratio / RATIO_UNIT) + self._glu_drift(box, count, count)
                if drift <= 0.0:
                    return 0.0
                least = min(least, drift)
        return least

    def _friendly_drift(self, box: Box, low: int, high: int) -> tuple[int, float]:
        """At one width and depth: how unfriendly d_ff is at least, and the least drift of those."""
        assert self.glu is not None
        d_model, wished = box.small.d_model, self.glu * box.small.d_model
        least, most = self._expansions(box, low, high)
        narrow, wide = math.ceil(least * d_model - 1e-3), math.floor(most * d_model + 1e-3)
        units = [math.lcm(by, box.room.multiple) for by in (64, 8, 2, 1)]
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
                drift = min(drift, glu + self._ratio_drift(box, d_ff))
            else:  # from there on, the expansion alone
                drift = min(drift, abs((first + 4 * way) * unit / wished - 1.0) / GLU_UNIT)
        return unfriendly, drift

    def _ratio_drift(self, box: Box, d_ff: int) -> float:
        """The least of any rank at one width and depth, with this d_ff."""
        if self.ratio is None:
            return 0.0
        small, large = box.small, box.large
        least = small.covered / small.count(box.deep, d_ff)
        most = large.covered / large.count(box.deep, d_ff)
        return max(0.0, least - self.ratio, self.ratio - most) / RATIO_UNIT

    def _least_shape(self, box: Box, low: int, high: int) -> int:
        small, large = box.small, box.large
        least, most = small.d_model / box.deep / ASPECT, large.d_model / box.shallow / ASPECT
        away = _outside(least, most)
        if box.is_settled:
            if self.budget.free_head_width:
                away += abs(math.log2(small.n_heads * small.d_head / small.d_model))
            if self.budget.n_heads is None:
                away += abs(math.log2(small.d_head / HABITUAL_HEAD))
        if self.glu is None:
            least, most = self._expansions(box, low, high)
            away += _outside(least / EXPANSION, most / EXPANSION)
        return math.ceil(2 * away - 2 * SLACK)

    def _least_unfriendly(self, box: Box) -> int:
        unfriendly = _friendliest(box.small.d_model, box.large.d_model)
        if box.is_settled:
            unfriendly += _unfriendly(box.small.d_head)
        return unfriendly


def _rounded_down(drift: float) -> float:
    return max(0.0, drift * (1.0 - SLACK) - SLACK)


def _outside(least: float, most: float) -> float:
    """How far, in powers of two, from 1 to the nearest number between these."""
    return max(0.0, math.log2(least), -math.log2(max(most, 1e-300)))


def _friendliest(low: int, high: int) -> int:
    """The least unfriendly size between these."""
    return next((i for i, by in enumerate((64, 8, 2)) if high // by * by >= low), 3)


def _unfriendly(size: int) -> int:
    """0 for a multiple of 64, 1 of 8, 2 of 2, 3 for the rest: what hardware likes."""
    return next((i for i, by in enumerate((64, 8, 2)) if size % by == 0), 3)
