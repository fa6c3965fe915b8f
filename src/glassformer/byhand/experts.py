"""A mixture of experts, forward and back: the router's choice, its balance, and rows put together.

A router's weights choose some experts for each row; an expert sees the rows that chose it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from glassformer.byhand.attention import softmax_backward, softmax_forward
from glassformer.byhand.pass_context import Array

# D d_model, E experts, A experts of a token, M rows (batch x length), J rows of one expert


class RouteCache(NamedTuple):
    """Probabilities, the choice, its weights, and what they were divided by.

    Then each expert's share of the real rows, and which rows are real.
    """

    p_ME: Array
    chosen_MA: Array
    weights_MA: Array
    total_M1: Array | None
    share_E: Array
    real_M: Array


def route_forward(
    logits_ME: Array, *, chosen: int, normalize: bool = True, real_M: Array | None = None
) -> tuple[Array, float, RouteCache]:
    """Return the weight of each expert, 0 where it is not chosen, and the load-balancing loss."""
    p_ME, _ = softmax_forward(logits_ME)
    # stable: of equal logits the lowest index is chosen
    chosen_MA = np.argsort(-logits_ME, axis=-1, kind="stable")[:, :chosen]
    weights_MA = np.take_along_axis(p_ME, chosen_MA, -1)
    total_M1 = None
    if normalize:
        total_M1 = weights_MA.sum(-1, keepdims=True)
        weights_MA = weights_MA / total_M1
    real_M = np.ones(len(p_ME), bool) if real_M is None else real_M
    share_E, loss = balance_loss(p_ME, chosen_MA, real_M=real_M)
    routing_ME = _scattered(weights_MA, chosen_MA, p_ME)
    return routing_ME, loss, RouteCache(p_ME, chosen_MA, weights_MA, total_M1, share_E, real_M)


def route_backward(drouting_ME: Array, cache: RouteCache, *, dloss: float = 0.0) -> Array:
    """Return dlogits; `dloss` is the slope of the objective in the load-balancing loss."""
    dp_MA = np.take_along_axis(drouting_ME, cache.chosen_MA, -1)
    if cache.total_M1 is not None:
        # forward: w_a = p_a / s,  s = sum over the chosen of p
        #   =>   dp_a = (dw_a - sum_b dw_b w_b) / s
        dp_MA = dp_MA - (dp_MA * cache.weights_MA).sum(-1, keepdims=True)
        dp_MA /= cache.total_M1
    dp_ME = _scattered(dp_MA, cache.chosen_MA, cache.p_ME)
    # forward: loss = E sum_e f_e P_e,  P_e = mean of p_e over real rows; f_e counts, and is flat
    #   =>   dp_e = E f_e / (number of real rows) at every real row
    tokens = max(1, int(cache.real_M.sum()))
    dp_ME[cache.real_M] += dloss * cache.p_ME.shape[1] / tokens * cache.share_E
    return softmax_backward(dp_ME, cache.p_ME)


def balance_loss(p_ME: Array, chosen_MA: Array, *, real_M: Array) -> tuple[Array, float]:
    """Return f_E, the share of real rows that choose each expert, and E sum_e f_e P_e."""
    E, tokens = p_ME.shape[1], max(1, int(real_M.sum()))
    f_E = np.bincount(chosen_MA[real_M].reshape(-1), minlength=E) / tokens
    P_E = p_ME[real_M].sum(0) / tokens
    return f_E.astype(p_ME.dtype), float(E * np.dot(f_E, P_E))


def rows_of_experts(routing_ME: Array) -> list[Array]:
    """Return the rows that chose each expert, in order."""
    expert_C, row_C = np.nonzero(routing_ME.T)
    return np.split(row_C, np.searchsorted(expert_C, np.arange(1, routing_ME.shape[1])))


def scatter_forward(
    routing_ME: Array, outs: Sequence[Array], rows: Sequence[Array], *, out_MD: Array
) -> Array:
    """sum_e w_e expert_e(x), where an expert's rows are those that chose it; filled into out."""
    out_MD.fill(0.0)
    for expert, (rows_J, out_JD) in enumerate(zip(rows, outs, strict=True)):
        out_MD[rows_J] += routing_ME[rows_J, expert, None] * out_JD
    return out_MD


def scatter_backward(
    dout_MD: Array,
    routing_ME: Array,
    outs: Sequence[Array],
    rows: Sequence[Array],
    *,
    drouting_ME: Array,
    douts: Sequence[Array],
) -> None:
    """Fill the gradients of the weights, and of each expert's rows."""
    drouting_ME.fill(0.0)
    for expert, (rows_J, out_JD, dexpert_JD) in enumerate(zip(rows, outs, douts, strict=True)):
        np.take(dout_MD, rows_J, axis=0, out=dexpert_JD, mode="clip")
        # forward: out[rows] += w * expert(x[rows])
        #   =>   dw = dout[rows] . expert(x[rows]),  dexpert = w * dout[rows]
        drouting_ME[rows_J, expert] = np.einsum("jd,jd->j", dexpert_JD, out_JD)
        dexpert_JD *= routing_ME[rows_J, expert, None]


def _scattered(values_MA: Array, chosen_MA: Array, like_ME: Array) -> Array:
    """Put the values in the columns of their experts, 0 elsewhere."""
    out_ME = np.zeros_like(like_ME)
    np.put_along_axis(out_ME, chosen_MA, values_MA, -1)
    return out_ME
