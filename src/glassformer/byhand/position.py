"""Positions: the sinusoidal table, rotations of queries and keys, biases of scores by distance.

A learned table is an embedding looked up by position (`embedding.py`); these three learn nothing.
"""

from typing import Any

import numpy as np

from glassformer.byhand.pass_context import Array, Workspace, room
from glassformer.spec.model import Rotary
from glassformer.spec.position import rotary_frequencies

# B batch, T query length, S key length, D d_model, N heads, H d_head


def sinusoids(length: int, *, d_model: int, base: float = 10_000.0) -> Array:
    """Return (length, d_model) in float64: sin in even columns, cos in odd ones."""
    even = np.arange(0, d_model, 2)
    angle = np.arange(length)[:, None] * base ** (-even / d_model)
    table = np.empty((length, d_model))
    table[:, 0::2] = np.sin(angle)
    table[:, 1::2] = np.cos(angle)[:, : d_model // 2]
    return table


def sinusoidal_forward(x_BTD: Array, *, table_SD: Array, positions: "Array | slice") -> Array:
    """x + PE(position), in place. The table is constant, so the gradient passes unchanged."""
    x_BTD += table_SD[positions]
    return x_BTD


def sinusoidal_backward(dout_BTD: Array) -> Array:
    """Return dx."""
    # forward: out = x + constant   =>   dx = dout
    return dout_BTD


def rotations(
    rotary: Rotary, *, length: int, d_head: int, dtype: "np.dtype[Any]"
) -> tuple[Array, Array]:
    """Return cos and sin (length, d_head / 2), each times the scaling's attention factor."""
    frequencies, factor = rotary_frequencies(rotary, d_head)
    angle = np.arange(length, dtype=dtype)[:, None] * np.asarray(frequencies, dtype)
    return (np.cos(angle) * factor).astype(dtype), (np.sin(angle) * factor).astype(dtype)


def rotate_forward(
    x_BNTH: Array, *, cos: Array, sin: Array, ws: Workspace | None = None
) -> tuple[Array, tuple[Array, Array]]:
    """Rotate each pair (x[i], x[i + H/2]) in place; cos and sin (T, H/2) or (B, 1, T, H/2)."""
    # out1 = x1 cos - x2 sin,  out2 = x2 cos + x1 sin
    _turn(x_BNTH, cos, sin, ws)
    return x_BNTH, (cos, sin)


def rotate_backward(
    dout_BNTH: Array, cache: tuple[Array, Array], *, ws: Workspace | None = None
) -> Array:
    """Return dx, in place: the transpose of a rotation rotates the other way."""
    cos, sin = cache
    # forward: out1 = x1 cos - x2 sin,  out2 = x2 cos + x1 sin
    #   =>   dx1 = dout1 cos + dout2 sin,  dx2 = dout2 cos - dout1 sin
    _turn(dout_BNTH, cos, -sin, ws)
    return dout_BNTH


def alibi_bias(slopes_N: Array, *, positions_BS: Array, queries: int) -> Array:
    """Return ALiBi's bias -slope * |i - j|, (B, N, T, S); the queries are the last positions.

    It is a constant that is added to scores, so backward does not involve it.
    """
    apart_BTS = positions_BS[:, -queries:, None] - positions_BS[:, None, :]
    distance_BTS = np.abs(apart_BTS).astype(slopes_N.dtype)
    bias_BNTS: Array = -slopes_N[:, None, None] * distance_BTS[:, None]
    return bias_BNTS


def _turn(x_BNTH: Array, cos: Array, sin: Array, ws: Workspace | None) -> None:
    half = x_BNTH.shape[-1] // 2
    first, second = x_BNTH[..., :half], x_BNTH[..., half:]
    mark = 0 if ws is None else ws.mark()
    from_first = np.multiply(first, sin, out=room(ws, first.shape, first.dtype))
    from_second = np.multiply(second, sin, out=room(ws, first.shape, first.dtype))
    first *= cos
    first -= from_second
    second *= cos
    second += from_first
    if ws is not None:
        ws.release(mark)
