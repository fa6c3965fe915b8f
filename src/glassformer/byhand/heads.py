"""Operations before and after a head's projection: a sequence's row, scaled and capped logits.

The projections themselves are `linear.py`'s.
"""

from typing import NamedTuple, assert_never

import numpy as np

from glassformer.byhand.pass_context import Array, Workspace, room
from glassformer.spec.block import Readout

# B batch, T length, D d_model


def readout_forward(
    hidden_BTD: Array, *, valid_BT: Array | None, readout: Readout
) -> tuple[Array, Array]:
    """Return one vector per sequence, a weighted sum over positions: share_BT is the cache.

    last and first have one share of 1; mean has 1 / count at every real token.
    """
    B, T, _ = hidden_BTD.shape
    share_BT = np.zeros((B, T), hidden_BTD.dtype)
    valid = np.ones((B, T), np.bool_) if valid_BT is None else valid_BT
    match readout:
        case "last":
            share_BT[np.arange(B), T - 1 - np.argmax(valid[:, ::-1], axis=1)] = 1.0
        case "first":
            share_BT[np.arange(B), np.argmax(valid, axis=1)] = 1.0
        case "mean":
            share_BT[...] = valid / np.maximum(valid.sum(axis=1, keepdims=True), 1)
        case _ as unreachable:
            assert_never(unreachable)
    return np.matmul(share_BT[:, None, :], hidden_BTD)[:, 0], share_BT


def readout_backward(dout_BD: Array, cache: Array, *, dhidden_BTD: Array | None = None) -> Array:
    """Return dhidden."""
    # forward: out_b = sum_t share_bt hidden_bt   =>   dhidden_bt = share_bt dout_b
    return np.multiply(cache[:, :, None], dout_BD[:, None, :], out=dhidden_BTD)


class AdjustCache(NamedTuple):
    """The factor, and the slope of the cap."""

    scale: float
    slope: Array | None


def adjust_forward(
    x: Array,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    out: Array | None = None,
    ws: Workspace | None = None,
) -> tuple[Array, AdjustCache]:
    """scale * x, then a cap c as c tanh(s / c)."""
    out = np.multiply(x, scale, out=room(ws, x.shape, x.dtype) if out is None else out)
    if softcap is None:
        return out, AdjustCache(scale, None)
    # out = c tanh(s / c)   =>   slope = 1 - tanh^2(s / c)
    out /= softcap
    np.tanh(out, out=out)
    slope = np.multiply(out, out, out=room(ws, x.shape, x.dtype))
    np.subtract(1.0, slope, out=slope)
    out *= softcap
    return out, AdjustCache(scale, slope)


def adjust_backward(dout: Array, cache: AdjustCache, *, dx: Array | None = None) -> Array:
    """Return dx, which may be written into dout itself."""
    # forward: out = cap(scale * x)   =>   dx = dout * slope * scale
    dx = np.multiply(dout, 1.0 if cache.slope is None else cache.slope, out=dx)
    dx *= cache.scale
    return dx
