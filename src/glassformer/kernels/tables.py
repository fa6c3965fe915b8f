"""Tables of positions in NumPy: the one computation that a torch model and a native step share.

Angles are products in the table's precision, as transformers has them; their sines and cosines are
taken in float64 and rounded once, so that the numbers depend on no library's float32 routines.
Imports no torch: a command that decodes without it reads the same bits.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.spec.model import Rotary, Sinusoidal
from glassformer.spec.position import rotary_frequencies


def sinusoids(length: int, d_model: int, *, kind: Sinusoidal | None = None) -> NDArray[np.float64]:
    """Return the (length, d_model) table in float64: sin in even columns, cos in odd ones.

    Other forms have the sines first, then the cosines.
    """
    kind = Sinusoidal() if kind is None else kind
    position = np.arange(length, dtype=np.float64)[:, None] + kind.offset
    powers = np.array(kind.exponents(d_model), dtype=np.float64)
    angle = position * kind.base**-powers
    if kind.form != "interleaved":
        return np.concatenate((np.sin(angle), np.cos(angle)), axis=1)
    table = np.empty((length, d_model), dtype=np.float64)
    table[:, 0::2] = np.sin(angle)
    table[:, 1::2] = np.cos(angle)[:, : d_model // 2]
    return table


def rotations(rotary: Rotary, length: int, d_head: int, *, dtype: Any) -> NDArray[Any]:
    """Return cos and sin of every position and rotated pair: (2, length, pairs)."""
    frequencies, factor = rotary_frequencies(rotary, d_head)
    position = np.arange(length, dtype=dtype)[:, None]
    angle = (position * np.array(frequencies, dtype=dtype)).astype(np.float64)
    table = np.empty((2, *angle.shape), dtype=dtype)
    table[0], table[1] = np.cos(angle), np.sin(angle)
    return table if factor == 1.0 else table * np.asarray(factor, dtype=dtype)
