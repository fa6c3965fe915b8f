"""The error function, ours: one rational map and one polynomial for the whole axis.

erfc(z) = exp(-z^2) P(s) with s = (2 - z) / (2 + z), for z >= 0. The map folds [0, inf) onto
(-1, 1], where exp(z^2) erfc(z) is smooth; P was fitted with weight exp(-z^2), and
tests/byhand/test_erf_fit.py fits it again. exp(-z^2) is also the bell curve of GELU's slope.
"""

import math
from typing import Any

import numpy as np

from glassformer.byhand.workspace import Array

#: Coefficients of s^0, s^1, ...: error of erfc 9e-19, below float64's rounding.
DOUBLE = (
    0.25539567631050575,
    0.4271858474139564,
    0.24165819424247495,
    0.0789785810161985,
    0.003732892399065239,
    -0.006997461735531252,
    -0.0008471430235245632,
    0.000981975609630472,
    4.3557815026846194e-05,
    -0.00017434864680889863,
    2.744498745024276e-05,
    2.7792870935536852e-05,
    -1.425851124333356e-05,
    -1.2783200022062644e-06,
    4.127886480758393e-06,
    -2.0472928391623544e-06,
    4.994036030120664e-07,
    -5.2425378301282945e-08,
)
#: The same for float32: error 9e-9, below its rounding.
SINGLE = (
    0.25539581422271457,
    0.42717559516884546,
    0.24178502354427908,
    0.07831503129407104,
    0.005557579093345665,
    -0.009831623613643242,
    0.0016025721481338704,
)


def coefficients(dtype: "np.dtype[Any]") -> tuple[float, ...]:
    """P for this precision."""
    return DOUBLE if dtype == np.float64 else SINGLE


def erfc_parts(
    size: Array, *, erfc: Array, bell: Array, square: float = 1.0, factor: float = 1.0
) -> None:
    """Fill factor * erfc(z) and bell = exp(-z^2), z^2 = square * size^2, size >= 0.

    size itself is overwritten. Constants are folded into passes that are made anyway.
    """
    unit = math.sqrt(square)
    np.multiply(size, size, out=bell)
    bell *= -square
    np.exp(bell, out=bell)
    size += 2.0 / unit
    s = np.divide(4.0 / unit, size, out=size)
    s -= 1.0  # (2 - z) / (2 + z) = 4 / (2 + z) - 1
    highest, *rest = (factor * c for c in reversed(coefficients(size.dtype)))
    np.multiply(s, highest, out=erfc)
    for coefficient in rest[:-1]:
        erfc += coefficient
        erfc *= s
    erfc += rest[-1]
    erfc *= bell


def erf(x: Array) -> Array:
    """2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x; error below 1e-15 in float64."""
    x = np.asarray(x)
    if not np.issubdtype(x.dtype, np.floating):
        x = x.astype(np.float64)
    z, out, bell = np.abs(x), np.empty_like(x), np.empty_like(x)
    erfc_parts(z, erfc=out, bell=bell)
    np.subtract(1.0, out, out=out)
    return np.copysign(out, x, out=out)


BELL_HEIGHT = 1.0 / math.sqrt(2.0 * math.pi)
