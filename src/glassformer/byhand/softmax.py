"""Softmax over the last axis, plain and with a mask, and its Jacobian."""

import numpy as np

from glassformer.byhand.linear import dot_rows
from glassformer.byhand.workspace import Array

# B batch, T query length, S key length, N query heads

#: Scores within these bounds need no shift: exp stays far from overflow and underflow, in float32
#: too (exp(60) = 1e26), whatever the other scores of the row are.
CALM = 60.0


def softmax_forward(x: Array, *, out: Array | None = None) -> tuple[Array, Array]:
    """exp(x - max) / sum, row by row; the result is the cache."""
    out = np.subtract(x, x.max(axis=-1, keepdims=True), out=out)
    np.exp(out, out=out)
    out /= out.sum(axis=-1, keepdims=True)
    return out, out


def softmax_backward(dout: Array, cache: Array, *, dx: Array | None = None) -> Array:
    """The Jacobian diag(p) - p p^T times dout, without ever writing the matrix down."""
    # forward: p = exp(x) / sum exp(x)   =>   dp_i/dx_j = p_i (1[i=j] - p_j)
    #                                    =>   dx_j = p_j (dout_j - sum_i dout_i p_i)
    dot = np.vecdot(dout, cache)[..., None]
    dx = np.subtract(dout, dot, out=dx)
    dx *= cache
    return dx


def masked_softmax(scores_BNTS: Array, *, allow_BNTS: Array | None = None) -> Array:
    """Softmax in place over what `allow` (1 = may attend, 0 = not) lets through.

    A row that may attend to nothing becomes zeros, and `softmax_backward` of it gives zeros.
    Calm scores are not shifted: softmax ignores a constant, and finding each row's largest is the
    dearest part of the work. Which way was taken can differ by rounding only.
    """
    x = scores_BNTS
    if not (x.min() > -CALM and x.max() < CALM):
        if allow_BNTS is not None:
            x -= (1.0 - allow_BNTS) * (np.finfo(x.dtype).max / 8)
        x -= x.max(axis=-1, keepdims=True)
    np.exp(x, out=x)
    if allow_BNTS is not None:
        x *= allow_BNTS
    total_BNT = dot_rows(x, np.ones(x.shape[-1], x.dtype))
    if allow_BNTS is not None:
        total_BNT += total_BNT == 0  # an empty row: 0 / 1
    np.reciprocal(total_BNT, out=total_BNT)
    x *= total_BNT[..., None]
    return x
