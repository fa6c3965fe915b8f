"""What is done to a curve before it is drawn: an exponential mean, and points left out.

Both say exactly what they do, so that a line on any screen can be made again from the numbers.
"""

import math

import numpy as np
from numpy.typing import NDArray

from glassformer.spec.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Points a drawn series has at most: more than a screen has columns.
MOST = 1_500
#: Without a wish, the smoothed line looks back over this share of its points.
SPAN_SHARE = 0.02


def default_span(count: int) -> float:
    """How many points the mean covers where nobody says: a fiftieth of them, if that is two."""
    share = SPAN_SHARE * count
    return share if share >= 2 else 1.0


def smooth(values: Floats, *, span: float | None = None) -> Floats:
    """The exponential mean, free of its beginning's bias: each point weighs 1 - 1/span of the next.

    Without a span it is 2 % of the points. What is not finite is passed over, and stays as it is.
    """
    span = default_span(len(values)) if span is None else span
    if not 1.0 <= span < math.inf:
        raise InputError(f"a mean over {span} points", hint="1 leaves the curve as it is")
    keep, total, weight = 1.0 - 1.0 / span, 0.0, 0.0
    made = values.astype(np.float64, copy=True)
    for i, value in enumerate(values.tolist()):
        if math.isfinite(value):
            total = keep * total + value
            weight = keep * weight + 1.0
            made[i] = total / weight
    return made


def extremes(values: Floats, *, most: int = MOST) -> Ints:
    """Which points to keep, ascending: of each bucket its lowest and its highest, and both ends.

    Buckets hold equally many neighbours; what is not finite is kept only where a bucket has
    nothing else.
    """
    if most < 4:
        raise InputError(f"{most} points are too few to keep", hint="4 at least")
    count = len(values)
    if count <= most:
        return np.arange(count, dtype=np.int64)
    edges = np.linspace(0, count, (most - 2) // 2 + 1).round().astype(np.int64)
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    kept = {0, count - 1}
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        kept.add(first + int(low[first:last].argmin()))
        kept.add(first + int(high[first:last].argmax()))
    return np.array(sorted(kept), dtype=np.int64)
