"""Heads: projections of hidden states, the tied table, the answer's readout; and their backward."""

from typing import NamedTuple

import numpy as np

from glassformer.byhand.embedding import tied_forward
from glassformer.byhand.linear import LinearCache, linear_forward, linear_products, sum_rows
from glassformer.byhand.pass_context import Array, Workspace, room
from glassformer.spec import model as spec

# B batch, T length, D d_model, V logits, R rank


def readout_forward(
    hidden_BTD: Array, *, valid_BT: Array | None, readout: str
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
        case _:
            share_BT[...] = valid / np.maximum(valid.sum(axis=1, keepdims=True), 1)
    return np.matmul(share_BT[:, None, :], hidden_BTD)[:, 0], share_BT


def readout_backward(dout_BD: Array, cache: Array, *, dhidden_BTD: Array) -> Array:
    """Add to dhidden."""
    # forward: out_b = sum_t share_bt hidden_bt   =>   dhidden_bt += share_bt dout_b
    dhidden_BTD += cache[:, :, None] * dout_BD[:, None, :]
    return dhidden_BTD


class HeadCache(NamedTuple):
    """A head's input, an answer's shares of each position, and x V^T of a tied factorized head."""

    x: Array
    share_BT: Array | None
    middle: Array | None


def head_forward(
    hidden_BTD: Array,
    *,
    head: spec.Head,
    params: dict[str, Array],
    valid_BT: Array | None = None,
    ws: Workspace | None = None,
) -> tuple[Array, HeadCache]:
    """Return logits. `params`: weight (own or tied table), or the tied factors u and v; bias."""
    x, share, middle = hidden_BTD, None, None
    if head.readout is not None:
        x, share = readout_forward(hidden_BTD, valid_BT=valid_BT, readout=head.readout)
    if "u" in params:
        # tied to a factorized table: logits = (x @ V.T) @ U.T
        middle, _ = tied_forward(x, table_VD=params["v"], ws=ws)
        logits, _ = tied_forward(middle, table_VD=params["u"], ws=ws)
    else:
        logits, _ = linear_forward(x, weight_OI=params["weight"], ws=ws)
    if "bias" in params:
        logits += params["bias"]
    return logits, HeadCache(x, share, middle)


def head_backward(
    dlogits: Array,
    cache: HeadCache,
    *,
    params: dict[str, Array],
    grads: dict[str, Array],
    dhidden_BTD: Array,
    ws: Workspace | None = None,
) -> None:
    """Add to dhidden, and to every gradient in `grads`: a tied table is also the embedding's."""
    x_RD = cache.x.reshape(-1, cache.x.shape[-1])
    dlogits_RV = dlogits.reshape(-1, dlogits.shape[-1])
    if "bias" in params:
        grads["bias"] += sum_rows(dlogits_RV)
    dx_RD = room(ws, x_RD.shape, x_RD.dtype)
    if cache.middle is not None:
        middle_RR = cache.middle.reshape(-1, cache.middle.shape[-1])
        # forward: logits = middle @ U.T, middle = x @ V.T
        #   =>   dmiddle = dlogits @ U,  dU += dlogits.T @ middle
        #        dx = dmiddle @ V,  dV += dmiddle.T @ x
        dmiddle, du = linear_products(dlogits_RV, LinearCache(middle_RR, params["u"]), ws=ws)
        _, dv = linear_products(dmiddle, LinearCache(x_RD, params["v"]), dx=dx_RD, ws=ws)
        grads["u"] += du
        grads["v"] += dv
    else:
        weight_VD = params["weight"]
        dweight = room(ws, weight_VD.shape, weight_VD.dtype)
        linear_products(dlogits_RV, LinearCache(x_RD, weight_VD), dx=dx_RD, dweight_OI=dweight)
        grads["weight"] += dweight
    if cache.share_BT is not None:
        readout_backward(dx_RD, cache.share_BT, dhidden_BTD=dhidden_BTD)
    else:
        dhidden_BTD += dx_RD.reshape(dhidden_BTD.shape)
