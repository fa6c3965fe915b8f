"""Tables looked up by token or position: repeated rows accumulate their gradients.

Positions: the sinusoidal table, rotations of queries and keys, biases of scores by distance.
"""

from typing import Any

import numpy as np

from glassformer.byhand.pass_context import Array, Workspace, room
from glassformer.spec import model as spec
from glassformer.spec.model import Rotary
from glassformer.spec.position import rotary_frequencies

# B batch, T length, D d_model, V rows of the table, M = B x T positions

#: Up to this many rows a table's gradient is one product with a matrix of zeros and ones.
FEW_ROWS = 128


def embedding_forward(
    tokens_BT: Array, *, table_VD: Array, scale: float = 1.0, ws: Workspace | None = None
) -> tuple[Array, tuple[Array, float]]:
    """scale * table[token]."""
    out_BTD = room(ws, (*tokens_BT.shape, table_VD.shape[1]), table_VD.dtype)
    np.take(table_VD, tokens_BT, axis=0, out=out_BTD, mode="clip")
    if scale != 1.0:
        out_BTD *= scale
    return out_BTD, (tokens_BT, scale)


def embedding_backward(dout_BTD: Array, cache: tuple[Array, float], *, dtable_VD: Array) -> Array:
    """Add to dtable: a token that occurs twice gets both gradients."""
    tokens_BT, scale = cache
    # forward: out[m] = scale * table[token[m]]
    #   =>   dtable[v] += scale * sum of dout[m] over all m with token[m] = v
    tokens_M = tokens_BT.reshape(-1)
    dout_MD = dout_BTD.reshape(-1, dout_BTD.shape[-1])
    if len(dtable_VD) <= FEW_ROWS:
        chosen_VM = np.zeros((len(dtable_VD), len(tokens_M)), dout_MD.dtype)
        chosen_VM[tokens_M, np.arange(len(tokens_M))] = scale
        dtable_VD += np.matmul(chosen_VM, dout_MD)
    else:
        order_M = np.argsort(tokens_M, kind="stable")
        rows, starts = np.unique(tokens_M[order_M], return_index=True)
        sums = np.add.reduceat(dout_MD[order_M], starts, axis=0)
        dtable_VD[rows] += sums if scale == 1.0 else sums * scale
    return dtable_VD


def l1_penalty(u_VR: Array, *, l1: float, du_VR: Array | None = None) -> float:
    """l1 * sum |U|; its gradient l1 * sign(U) is added to du."""
    # forward: penalty = l1 * sum |u|   =>   du += l1 * sign(u), 0 at 0
    if du_VR is not None:
        du_VR += l1 * np.sign(u_VR)
    return float(l1 * np.abs(u_VR).sum(dtype=np.float64))


# B batch, T query length, S key length, D d_model, N heads, H d_head


def sinusoids(length: int, *, d_model: int, kind: spec.Sinusoidal | None = None) -> Array:
    """Return (length, d_model) in float64: sin in even columns, cos in odd ones.

    Other forms have the sines first, then the cosines.
    """
    kind = spec.Sinusoidal() if kind is None else kind
    powers = np.array(kind.exponents(d_model))
    angle = (np.arange(length)[:, None] + kind.offset) * kind.base**-powers
    if kind.form != "interleaved":
        return np.concatenate((np.sin(angle), np.cos(angle)), axis=1)
    table = np.empty((length, d_model))
    table[:, 0::2] = np.sin(angle)
    table[:, 1::2] = np.cos(angle)[:, : d_model // 2]
    return table


def rotations(
    rotary: Rotary, *, length: int, d_head: int, dtype: "np.dtype[Any]"
) -> tuple[Array, Array]:
    """Return cos and sin (length, rotated pairs), each times the scaling's attention factor."""
    frequencies, factor = rotary_frequencies(rotary, d_head)
    angle = np.arange(length, dtype=dtype)[:, None] * np.asarray(frequencies, dtype)
    return (np.cos(angle) * factor).astype(dtype), (np.sin(angle) * factor).astype(dtype)


def rotate_forward(
    x_BNTH: Array, *, cos: Array, sin: Array, ws: Workspace | None = None
) -> tuple[Array, tuple[Array, Array]]:
    """Rotate each pair (x[i], x[i + H/2]) in place; cos and sin (T, H/2) or (B, 1, T, H/2).

    Where these are narrower, H is the part of a head that is rotated: its first entries.
    """
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


def relative_buckets_of(buckets_R: Array, *, positions_BS: Array, queries: int) -> Array:
    """Return the bucket of every query and key, (B, T, S); the queries are the last positions.

    `buckets_R` has those of key - query from -(R - 1) / 2 on; both ends stand for what is farther.
    """
    most = len(buckets_R) // 2
    apart_BTS = positions_BS[:, None, :] - positions_BS[:, -queries:, None]
    found_BTS: Array = buckets_R[np.clip(apart_BTS, -most, most) + most]
    return found_BTS


def relative_forward(buckets_BTS: Array, *, table_RN: Array) -> Array:
    """Return the bias table[bucket] of each head, (B, N, T, S)."""
    return np.ascontiguousarray(table_RN[buckets_BTS].transpose(0, 3, 1, 2))


def relative_backward(dbias_BNTS: Array, buckets_BTS: Array, *, dtable_RN: Array) -> Array:
    """Add the gradient of each bias to that of its bucket."""
    # forward: bias[b, n, t, s] = table[bucket[b, t, s], n]
    #   =>   dtable[r, n] = sum of dbias[., n, ., .] wherever the bucket is r
    rows_MN = dbias_BNTS.transpose(0, 2, 3, 1).reshape(-1, dbias_BNTS.shape[1])
    for head in range(rows_MN.shape[1]):
        dtable_RN[:, head] += np.bincount(
            buckets_BTS.reshape(-1), weights=rows_MN[:, head], minlength=len(dtable_RN)
        )
    return dtable_RN


def _turn(x_BNTH: Array, cos: Array, sin: Array, ws: Workspace | None) -> None:
    half = cos.shape[-1]
    first, second = x_BNTH[..., :half], x_BNTH[..., half : 2 * half]
    mark = 0 if ws is None else ws.mark()
    from_first = np.multiply(first, sin, out=room(ws, first.shape, first.dtype))
    from_second = np.multiply(second, sin, out=room(ws, first.shape, first.dtype))
    first *= cos
    first -= from_second
    second *= cos
    second += from_first
    if ws is not None:
        ws.release(mark)
