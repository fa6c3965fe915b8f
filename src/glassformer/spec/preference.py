"""Which of two designs is better, and which cannot be.

In this order: ratio within a point and expansion within 5 % of the wish, if a design has both;
least drift; the least unusual shape; friendly multiples; and at last exact drift, the distance from
the total and the sizes themselves, so that an answer never depends on chance.
"""

import math

from glassformer.spec.budget import Budget, Free
from glassformer.spec.counting import Frame
from glassformer.spec.widths import HABITUAL_HEAD

#: A point of the ratio counts as much as 5 % of the expansion: one unit of drift.
RATIO_UNIT, GLU_UNIT = 0.01, 0.05
#: What a free aspect (d_model / n_layers) and a free expansion settle at: 256 x 8, 128 x 4; 8/3.
ASPECT, EXPANSION = 32.0, 8 / 3

#: The level of no drift at all, and of a quarter of a unit.
LEAST = 1

Key = tuple[float, ...]


def level(units: float) -> int:
    """Drift in steps, from LEAST on: quarters of a unit up to one, tenths of itself beyond.

    Drifts of one level count as equal, so that shape and multiples have a say.
    """
    if units <= 1.0:
        return max(LEAST, math.ceil(units * 4 - 1e-9))
    return 4 + math.ceil(math.log(units, 1.1) - 1e-9)


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

    def wished_depth(self, frame: Frame) -> float:
        """The depth, not whole, at which the expansion would be the wished one."""
        per_layer = frame.base + frame.column * self.wished_ffn(frame)
        return ((self.low + self.high) / 2 - frame.outside) / per_layer

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
            self.shape(frame, n_layers, d_ff),
            sum(map(_unfriendly, sizes)),
            round(ratio + glu, 9),
            abs(2 * frame.count(n_layers, d_ff) - self.low - self.high),
            n_layers,
            *sizes,
            frame.n_heads,
            frame.rank or 0,
        )

    def shape(self, frame: Frame, n_layers: int, d_ff: int | None) -> int:
        """How unusual: aspect, a head width or expansion that nobody asked for, in half powers."""
        away = abs(math.log2(frame.d_model / n_layers / ASPECT))
        if self.budget.free_head_width:
            away += abs(math.log2(frame.n_heads * frame.d_head / frame.d_model))
        if self.budget.n_heads is None:
            away += abs(math.log2(frame.d_head / HABITUAL_HEAD))
        if self.glu is None and d_ff is not None:
            away += abs(math.log2(d_ff / frame.d_model / EXPANSION))
        return math.ceil(2 * away - 1e-9)

    # --- what cannot be better ----------------------------------------------------------------

    def least_ratio_drift(self, covered: int) -> float:
        """In units, of a model in which the ratio covers so many parameters."""
        if self.ratio is None:
            return 0.0
        away = max(covered / self.high - self.ratio, self.ratio - covered / max(1, self.low), 0.0)
        return away / RATIO_UNIT

    def bound_of_ratio(self, ratio: float) -> Key:
        """No key of a model whose ratio drifts that much begins smaller."""
        return (float(ratio > 1.0), level(ratio))

    def bound(self, frame: Frame, n_layers: int, d_ffs: range, ratio: float) -> Key:
        """No key of this frame and depth begins smaller; `ratio` is its least drift."""
        glu, shape, wished = 0.0, self.shape(frame, n_layers, None), self.wished_ffn(frame)
        if self.glu is not None:
            glu = max(d_ffs[0] / wished - 1.0, 1.0 - d_ffs[-1] / wished, 0.0) / GLU_UNIT
        elif not d_ffs[0] <= wished <= d_ffs[-1]:
            shape = min(self.shape(frame, n_layers, end) for end in (d_ffs[0], d_ffs[-1]))
        return (float(max(ratio, glu) > 1.0), level(ratio + glu), shape)

    def hopeless(self, frame: Frame, n_layers: int, ratio: float, key: Key) -> bool:
        """Whether neither this depth nor one farther from the wished one can beat the key."""
        fixed, slope = frame.outside + n_layers * frame.base, n_layers * frame.column
        whole = slope * self.wished_ffn(frame)
        narrow, wide = (self.low - fixed) / whole, (self.high - fixed) / whole
        if self.glu is None:
            away = max(math.log2(max(narrow, 1.0)), -math.log2(min(max(wide, 1e-9), 1.0)))
            return (float(ratio > 1.0), level(ratio), math.ceil(2 * away - 1e-9)) > key[:3]
        glu = max(narrow - 1.0, 1.0 - wide, 0.0) / GLU_UNIT
        return (float(max(ratio, glu) > 1.0), level(ratio + glu)) > key[:2]


def _unfriendly(size: int) -> int:
    """0 for a multiple of 64, 1 of 8, 2 of 2, 3 for the rest: what hardware likes."""
    return next((i for i, by in enumerate((64, 8, 2)) if size % by == 0), 3)
