"""Losses: weighted, label-smoothed cross-entropy of each head, and the spec's penalty."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from glassformer.byhand.embedding import l1_penalty
from glassformer.byhand.linear import dot_rows
from glassformer.byhand.pass_context import Array, Workspace, room
from glassformer.spec import model as spec
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import penalties

# M rows (positions or sequences), C classes


class LossCache(NamedTuple):
    """Probabilities, targets (0 where the weight is 0), each row's share of the mean, smoothing.

    `nll` is the loss without smoothing.
    """

    probabilities_MC: Array
    targets_M: Array
    share_M: Array
    smoothing: float
    nll: float


def cross_entropy_forward(
    logits: Array,
    *,
    targets: Array,
    weights: Array | None = None,
    label_smoothing: float = 0.0,
    ws: Workspace | None = None,
) -> tuple[float, LossCache]:
    """Mean of -log p[target] over rows, weighted; a row of weight 0 may hold any target.

    log p = x - max - log(sum exp(x - max)): never log(0). Without weights above 0 it is 0.
    """
    classes = logits.shape[-1]
    logits_MC = logits.reshape(-1, classes)
    targets_M, share_M = rows_that_count(targets, weights, logits_MC)
    rows = np.arange(len(targets_M))
    work = room(ws, logits_MC.shape, logits_MC.dtype)
    np.subtract(logits_MC, logits_MC.max(axis=-1, keepdims=True), out=work)
    picked_M = work[rows, targets_M]
    mean_M = work.mean(axis=-1) if label_smoothing else 0.0
    np.exp(work, out=work)
    total_M = dot_rows(work, np.ones(classes, work.dtype))
    work *= (1.0 / total_M)[:, None]
    # -sum_c q_c log p_c with q = (1 - e) onehot + e / C
    expected_M = (1.0 - label_smoothing) * picked_M + label_smoothing * mean_M
    log_total_M = np.log(total_M)
    loss = float(np.dot(log_total_M - expected_M, share_M))
    nll = float(np.dot(log_total_M - picked_M, share_M)) if label_smoothing else loss
    return loss, LossCache(work, targets_M, share_M, label_smoothing, nll)


def cross_entropy_backward(dloss: float, cache: LossCache) -> Array:
    """Return dlogits (M, C), written over the probabilities: the cache cannot be used again."""
    dlogits_MC, targets_M, share_M, smoothing, _ = cache
    # forward: loss = sum_m share_m (log sum_c exp(x_c) - sum_c q_c x_c)
    #   =>   dx = share * (p - q) * dloss
    if smoothing:
        dlogits_MC -= smoothing / dlogits_MC.shape[1]
    dlogits_MC[np.arange(len(targets_M)), targets_M] -= 1.0 - smoothing
    dlogits_MC *= (share_M * dloss)[:, None]
    return dlogits_MC


def rows_that_count(targets: Array, weights: Array | None, logits_MC: Array) -> tuple[Array, Array]:
    """Return targets, 0 where the weight is 0, and each row's share of the mean."""
    targets_M = targets.reshape(-1)
    if len(targets_M) != len(logits_MC):
        raise InputError(
            f"{targets.shape} targets for {len(logits_MC)} rows of logits", hint="one for each row"
        )
    if weights is None:
        weights = np.ones(len(targets_M), logits_MC.dtype)
    weights_M = weights.reshape(-1)
    classes = logits_MC.shape[1]
    outside = (targets_M < 0) | (targets_M >= classes)
    if outside.any():
        wrong = np.flatnonzero(outside & (weights_M != 0))
        if len(wrong):
            raise InputError(
                f"target {targets_M[wrong[0]]} is not one of {classes} classes",
                where=f"row {wrong[0]} of the targets",
                hint="give it weight 0, or a target in the range",
            )
        targets_M = np.where(outside, 0, targets_M)
    total = weights_M.sum(dtype=np.float64)
    share_M = np.zeros_like(weights_M, logits_MC.dtype)
    if total > 0:
        np.divide(weights_M, total, out=share_M, casting="unsafe")
    return targets_M, share_M


# B batch, T length


class Losses(NamedTuple):
    """The total that was differentiated, each head's part and plain loss, the penalty, the logits.

    `balances` are the load-balancing losses of mixtures of experts by layer, and `balance` what
    they add to the total.
    """

    total: float
    by_head: dict[str, float]
    nll: dict[str, float]
    penalty: float
    logits: dict[str, Array]
    balances: Mapping[str, float] = MappingProxyType({})
    balance: float = 0.0


def balance_slopes(
    model: spec.ModelSpec, *, shares: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the factor of each mixture's load-balancing loss: the objective has their mean.

    `shares` are this batch's shares of the tokens of a step, by layer.
    """
    layers = model.mixtures()
    return {
        name: ffn.balance * (1.0 if shares is None else shares[name]) / len(layers)
        for name, ffn in layers.items()
    }


def head_losses(
    logits: Mapping[str, Array],
    *,
    targets: Mapping[str, Array],
    model: spec.ModelSpec,
    weights: Array | Mapping[str, Array] | None,
    valid_BT: Array | None,
    label_smoothing: float,
    cross_entropy: Callable[..., tuple[float, LossCache]] = cross_entropy_forward,
    ws: Workspace | None = None,
) -> dict[str, tuple[float, LossCache]]:
    """Return the cross-entropy of each head that has targets, and its cache."""
    found = {}
    for name, given in targets.items():
        target = np.asarray(given)
        counted = counted_rows(name, target, model=model, weights=weights, valid_BT=valid_BT)
        found[name] = cross_entropy(
            logits[name], targets=target, weights=counted, label_smoothing=label_smoothing, ws=ws
        )
    return found


def total_loss(
    losses: Mapping[str, tuple[float, LossCache]],
    *,
    head_weights: Mapping[str, float],
    penalty: float,
    logits: dict[str, Array],
    balances: Mapping[str, float],
    balance_slopes: Mapping[str, float],
) -> Losses:
    """Return the weighted sum over heads (1 by default), the penalty and load balancing."""
    by_head = {name: loss for name, (loss, _) in losses.items()}
    nll = {name: cache.nll for name, (_, cache) in losses.items()}
    total = penalty + sum(head_weights.get(name, 1.0) * loss for name, loss in by_head.items())
    balance = float(sum(balance_slopes[layer] * loss for layer, loss in balances.items()))
    return Losses(total + balance, by_head, nll, penalty, logits, balances, balance)


def counted_rows(
    head: str,
    target: Array,
    *,
    model: spec.ModelSpec,
    weights: Array | Mapping[str, Array] | None,
    valid_BT: Array | None,
) -> Array | None:
    """Return the weights of a head's rows: as given, else 1 for real tokens; None means all 1."""
    model.head(head)
    given = weights.get(head) if isinstance(weights, Mapping) else weights
    if given is None:
        return valid_BT if target.ndim == 2 else None
    if given.shape != target.shape:
        raise InputError(
            f"weights of shape {given.shape} for targets['{head}'] of shape {target.shape}",
            hint="weights by head, {head: array}, where the heads' targets differ in shape",
        )
    return given


def penalty(
    model: spec.ModelSpec,
    params: Mapping[str, Array],
    *,
    grads: Mapping[str, Array] | None = None,
    scale: float = 1.0,
) -> float:
    """Return the L1 term of each factorized table; add its slope, times `scale`, to grads."""
    total = 0.0
    for name, l1 in penalties(model).items():
        if l1:
            total += l1_penalty(params[name], l1=l1)
            if grads is not None and name in grads:
                l1_penalty(params[name], l1=l1 * scale, du_VR=grads[name])
    return total
