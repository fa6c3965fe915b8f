"""Attention: softmax(q k^T / sqrt(H) + bias) v and its gradients, for grouped heads, with a mask.

Query heads of one group share their keys, so their rows are stacked: K products of (G x T) rows
each, and the sum over the group that backward needs happens inside the product.

Projections, norms and rotations of queries and keys are operations of their own.
"""

import math
from typing import NamedTuple

import numpy as np

from glassformer.byhand.linear import (
    dot_rows,
)
from glassformer.byhand.pass_context import Array, PassContext, Workspace

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
    """Multiply dout by the Jacobian diag(p) - p p^T, without forming the matrix."""
    # forward: p = exp(x) / sum exp(x)   =>   dp_i/dx_j = p_i (1[i=j] - p_j)
    #                                    =>   dx_j = p_j (dout_j - sum_i dout_i p_i)
    dot = np.vecdot(dout, cache)[..., None]
    dx = np.subtract(dout, dot, out=dx)
    dx *= cache
    return dx


def masked_softmax(
    scores_BNTS: Array, *, allow_BNTS: Array | None = None, sinks_N: Array | None = None
) -> Array:
    """Softmax in place over what `allow` (1 = may attend, 0 = not) lets through.

    `sinks_N` are scores of one more column, which takes its share and is not returned.

    A row that may attend to nothing becomes zeros, and `softmax_backward` of it gives zeros.
    Moderate scores are not shifted: softmax ignores a constant, and finding each row's maximum is
    the most expensive part. Shifted and unshifted results differ by rounding only.
    """
    x = scores_BNTS
    sink_BNT1 = None if sinks_N is None else sinks_N[:, None, None]
    if not (x.min() > -CALM and x.max() < CALM) or (
        sink_BNT1 is not None and np.abs(sink_BNT1).max() >= CALM
    ):
        if allow_BNTS is not None:
            x -= (1.0 - allow_BNTS) * (np.finfo(x.dtype).max / 8)
        most_BNT1 = x.max(axis=-1, keepdims=True)
        if sink_BNT1 is not None:
            most_BNT1 = np.maximum(most_BNT1, sink_BNT1)
            sink_BNT1 = sink_BNT1 - most_BNT1
        x -= most_BNT1
    np.exp(x, out=x)
    if allow_BNTS is not None:
        x *= allow_BNTS
    total_BNT = dot_rows(x, np.ones(x.shape[-1], x.dtype))
    if sink_BNT1 is not None:
        total_BNT += np.exp(sink_BNT1)[..., 0]
    if allow_BNTS is not None:
        total_BNT += total_BNT == 0  # an empty row: 0 / 1
    np.reciprocal(total_BNT, out=total_BNT)
    x *= total_BNT[..., None]
    return x


# B batch, T query length, S key length, N query heads, K key-value heads, H d_head, M = N/K x T

#: Queries of a group below which keys are read transposed, and not copied.
FEW_ROWS = 8


class AttendCache(NamedTuple):
    """Folded queries, keys, values, weights before dropout, dropout mask, tap prefix.

    Then the factor of the scores, the slope of their cap, and whether there is a sink.
    """

    q_BKMH: Array
    k_BKSH: Array
    v_BKSH: Array
    weights_BNTS: Array
    keep_BNTS: Array | None
    at: str
    scale: float
    slope_BNTS: Array | None
    sunk: bool


def attend_forward(
    q_BNTH: Array,
    *,
    k_BKSH: Array,
    v_BKSH: Array,
    pass_context: PassContext,
    allow: Array | None = None,
    bias: Array | None = None,
    dropout: float = 0.0,
    at: str = "",
    scale: float | None = None,
    softcap: float | None = None,
    sinks_N: Array | None = None,
) -> tuple[Array, AttendCache]:
    """Return heads_BTNH, in the order in which the output projection reads them.

    allow: 1 = may attend, 0 = not, broadcasting to (B, N, T, S), in the model's dtype. bias: added
    to the scores, broadcasting likewise. scale: in place of 1 / sqrt(H). softcap c: a score s
    becomes c tanh(s / c). sinks_N: scores that take part in the softmax and have no value.
    """
    B, N, T, H = q_BNTH.shape
    K, S = k_BKSH.shape[1:3]
    ws, M = pass_context.ws, N // K * T
    q_BKMH = _fold(q_BNTH, K, ws)
    scores = ws.take((B, N, T, S))
    scale = 1.0 / math.sqrt(H) if scale is None else scale
    _product_with_transposed(q_BKMH, k_BKSH, scores.reshape(B, K, M, S), ws, scale=scale)
    slope = None
    if softcap is not None:
        # out = c tanh(s / c)   =>   slope = 1 - tanh^2(s / c)
        scores /= softcap
        np.tanh(scores, out=scores)
        slope = np.multiply(scores, scores, out=ws.take(scores.shape))
        np.subtract(1.0, slope, out=slope)
        scores *= softcap
    if bias is not None:
        scores += bias
    pass_context.tap(f"{at}scores", scores)
    weights = masked_softmax(scores, allow_BNTS=allow, sinks_N=sinks_N)
    pass_context.tap(f"{at}weights", weights)
    keep = pass_context.keep(weights.shape, dropout)
    used = weights if keep is None else np.multiply(weights, keep, out=ws.take(weights.shape))
    heads_BTNH = ws.take((B, T, N, v_BKSH.shape[-1]))
    _unfold_product(used.reshape(B, K, M, S), v_BKSH, heads_BTNH.transpose(0, 2, 1, 3), ws)
    pass_context.tap(f"{at}heads", heads_BTNH.transpose(0, 2, 1, 3))
    sunk = sinks_N is not None
    return heads_BTNH, AttendCache(q_BKMH, k_BKSH, v_BKSH, weights, keep, at, scale, slope, sunk)


def attend_backward(
    dheads_BNTH: Array,
    cache: AttendCache,
    *,
    pass_context: PassContext,
    dq_BNTH: Array | None = None,
    dk_BKSH: Array | None = None,
    dv_BKSH: Array | None = None,
    dsinks_N: Array | None = None,
    dbias: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Return dq, dk, dv, written into the given arrays; fill dsinks, if there are sinks.

    `dbias` is filled with the gradient of a bias that is learned, and has the bias's shape.
    """
    q_BKMH, k_BKSH, v_BKSH, weights, keep, at, scale, slope, sunk = cache
    B, N, T, S = weights.shape
    K, M, H = q_BKMH.shape[1:]
    ws = pass_context.ws
    mark = ws.mark()
    pass_context.tap_grad(f"{at}heads", dheads_BNTH)
    dq_BNTH = np.empty((B, N, T, H), weights.dtype) if dq_BNTH is None else dq_BNTH
    dheads_BKMH = _fold(dheads_BNTH, K, ws)
    # forward: heads = (weights * keep) @ v
    #   =>   dweights = (dheads @ v.T) * keep,  dv = (weights * keep).T @ dheads
    dweights = ws.take(weights.shape)
    _product_with_transposed(dheads_BKMH, v_BKSH, dweights.reshape(B, K, M, S), ws)
    used = weights
    if keep is not None:
        dweights *= keep
        used = np.multiply(weights, keep, out=ws.take(weights.shape))
    dv_BKSH = np.matmul(used.reshape(B, K, M, S).swapaxes(-1, -2), dheads_BKMH, out=dv_BKSH)
    if pass_context.tap_grads is not None:  # a row that may attend to nothing hands nothing back
        pass_context.tap_grad(f"{at}weights", dweights * weights.any(axis=-1, keepdims=True))
    if sunk:
        # forward: the sink's weight w' is what the others leave of 1, and it has no value
        #   =>   dsink = -w' sum_j dw_j w_j, as in a softmax whose last column gets no gradient
        assert dsinks_N is not None
        left_BNT = 1.0 - weights.sum(axis=-1)
        np.sum(-left_BNT * np.vecdot(dweights, weights), axis=(0, 2), out=dsinks_N)
    # forward: weights = softmax(scores) where allowed, 0 elsewhere; a weight of 0 passes nothing on
    dscores = softmax_backward(dweights, weights, dx=dweights)
    pass_context.tap_grad(f"{at}scores", dscores)
    if dbias is not None:
        # forward: scores = cap(q @ k.T / sqrt(H)) + bias   =>   dbias = dscores
        np.copyto(dbias, dscores.sum(axis=0, keepdims=True) if len(dbias) == 1 else dscores)
    if slope is not None:
        dscores *= slope
    # forward: scores = q @ k.T / sqrt(H) + bias
    #   =>   dq = dscores @ k / sqrt(H),  dk = dscores.T @ q / sqrt(H)
    dscores *= scale
    dscores_BKMS = dscores.reshape(B, K, M, S)
    _unfold_product(dscores_BKMS, k_BKSH, dq_BNTH, ws)
    dk_BKSH = np.matmul(dscores_BKMS.swapaxes(-1, -2), q_BKMH, out=dk_BKSH)
    ws.release(mark)
    return dq_BNTH, dk_BKSH, dv_BKSH


def _fold(x_BNTH: Array, kv_heads: int, ws: Workspace) -> Array:
    """Stack the rows of a group: (B, K, M, H); a view where each group is one head."""
    B, N, T, H = x_BNTH.shape
    if kv_heads == N:
        return x_BNTH
    folded = ws.take((B, kv_heads, N // kv_heads * T, H))
    np.copyto(folded.reshape(B, N, T, H), x_BNTH)
    return folded


def _product_with_transposed(
    a_BKMH: Array, b_BKSH: Array, out_BKMS: Array, ws: Workspace, *, scale: float = 1.0
) -> None:
    """scale * a @ b.T.

    OpenBLAS is slower at small products with a transposed right side than at copying it first; the
    copy applies the scale on the way. For a few rows (decoding) the copy would cost more.
    """
    if a_BKMH.shape[2] < FEW_ROWS:
        np.matmul(a_BKMH, b_BKSH.swapaxes(-1, -2), out=out_BKMS)
        out_BKMS *= scale
        return
    mark = ws.mark()
    B, K, S, H = b_BKSH.shape
    b_BKHS = np.multiply(b_BKSH.swapaxes(-1, -2), scale, out=ws.take((B, K, H, S)))
    np.matmul(a_BKMH, b_BKHS, out=out_BKMS)
    ws.release(mark)


def _unfold_product(a_BKMS: Array, b_BKSH: Array, out_BNTH: Array, ws: Workspace) -> None:
    """Write a @ b to each head's own rows."""
    B, K, M, _ = a_BKMS.shape
    if out_BNTH.shape[1] == K:
        np.matmul(a_BKMS, b_BKSH, out=out_BNTH)
        return
    mark = ws.mark()
    folded = np.matmul(a_BKMS, b_BKSH, out=ws.take((B, K, M, b_BKSH.shape[-1])))
    np.copyto(out_BNTH, folded.reshape(out_BNTH.shape))
    ws.release(mark)
