"""Tables looked up by token or position: plain, scaled, factorized; repeated rows accumulate."""

import math
from typing import NamedTuple, assert_never

import numpy as np

from glassformer.byhand.linear import LinearCache, linear_products
from glassformer.byhand.pass_context import Array, Workspace, room
from glassformer.spec import model as spec

# B batch, T length, D d_model, V rows of the table, R rank, M = B x T positions

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


class FactorCache(NamedTuple):
    """Tokens, their rows of U, and V."""

    tokens_BT: Array
    rows_BTR: Array
    v_RD: Array


def factorized_forward(
    tokens_BT: Array, *, u_VR: Array, v_RD: Array, ws: Workspace | None = None
) -> tuple[Array, FactorCache]:
    """U[token] @ V."""
    rows_BTR, _ = embedding_forward(tokens_BT, table_VD=u_VR, ws=ws)
    out_BTD = room(ws, (*tokens_BT.shape, v_RD.shape[1]), v_RD.dtype)
    np.matmul(rows_BTR.reshape(-1, v_RD.shape[0]), v_RD, out=out_BTD.reshape(-1, v_RD.shape[1]))
    return out_BTD, FactorCache(tokens_BT, rows_BTR, v_RD)


def factorized_backward(
    dout_BTD: Array, cache: FactorCache, *, du_VR: Array, dv_RD: Array
) -> tuple[Array, Array]:
    """Add to du and dv."""
    tokens_BT, rows_BTR, v_RD = cache
    rank, width = v_RD.shape
    # forward: out = rows @ V, rows = U[token]
    #   =>   dV += rows.T @ dout,  drows = dout @ V.T,  dU[token] += drows
    drows_MR, dv = linear_products(
        dout_BTD.reshape(-1, width), LinearCache(rows_BTR.reshape(-1, rank), v_RD.T)
    )
    dv_RD += dv.T
    embedding_backward(drows_MR, (tokens_BT, 1.0), dtable_VD=du_VR)
    return du_VR, dv_RD


def tied_forward(x: Array, *, table_VD: Array, ws: Workspace | None = None) -> tuple[Array, Array]:
    """Return logits of a tied head: x @ table^T, the table unscaled; x is the cache."""
    out = room(ws, (*x.shape[:-1], len(table_VD)), x.dtype)
    np.matmul(x.reshape(-1, x.shape[-1]), table_VD.T, out=out.reshape(-1, len(table_VD)))
    return out, x


def l1_penalty(u_VR: Array, *, l1: float, du_VR: Array | None = None) -> float:
    """l1 * sum |U|; its gradient l1 * sign(U) is added to du."""
    # forward: penalty = l1 * sum |u|   =>   du += l1 * sign(u), 0 at 0
    if du_VR is not None:
        du_VR += l1 * np.sign(u_VR)
    return float(l1 * np.abs(u_VR).sum(dtype=np.float64))


def embedding_scale(embedding: spec.Embedding, d_model: int) -> float:
    """Return sqrt(d_model) for the 2017 paper's embedding, else 1."""
    match embedding:
        case spec.ScaledEmbedding():
            return math.sqrt(d_model)
        case spec.PlainEmbedding() | spec.FactorizedEmbedding():
            return 1.0
        case _ as unreachable:
            assert_never(unreachable)
