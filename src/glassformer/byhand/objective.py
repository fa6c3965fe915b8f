"""What a training step makes small: each head's cross-entropy, and the spec's penalty."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from glassformer.byhand.embed import l1_penalty
from glassformer.byhand.loss import LossCache, cross_entropy_forward
from glassformer.byhand.workspace import Array, Workspace
from glassformer.spec import model as spec
from glassformer.spec.errors import InputError

# B batch, T length


class Losses(NamedTuple):
    """What was differentiated, each head's part of it and plain loss, the penalty, the logits."""

    total: float
    by_head: dict[str, float]
    nll: dict[str, float]
    penalty: float
    logits: dict[str, Array]


def head_losses(
    logits: Mapping[str, Array],
    *,
    targets: Mapping[str, Array],
    model: spec.ModelSpec,
    weights: Array | Mapping[str, Array] | None,
    valid_BT: Array | None,
    label_smoothing: float,
    ws: Workspace | None = None,
) -> dict[str, tuple[float, LossCache]]:
    """The cross-entropy of each head that has targets, and what its backward needs."""
    found = {}
    for name, given in targets.items():
        target = np.asarray(given)
        counted = counted_rows(name, target, model=model, weights=weights, valid_BT=valid_BT)
        found[name] = cross_entropy_forward(
            logits[name], targets=target, weights=counted, label_smoothing=label_smoothing, ws=ws
        )
    return found


def total_loss(
    losses: Mapping[str, tuple[float, LossCache]],
    *,
    head_weights: Mapping[str, float],
    penalty: float,
    logits: dict[str, Array],
) -> Losses:
    """Weighted sum over heads (1 where no weight is given) and the penalty."""
    by_head = {name: loss for name, (loss, _) in losses.items()}
    nll = {name: cache.nll for name, (_, cache) in losses.items()}
    total = penalty + sum(head_weights.get(name, 1.0) * loss for name, loss in by_head.items())
    return Losses(total, by_head, nll, penalty, logits)


def counted_rows(
    head: str,
    target: Array,
    *,
    model: spec.ModelSpec,
    weights: Array | Mapping[str, Array] | None,
    valid_BT: Array | None,
) -> Array | None:
    """Weights of this head's rows: as given, else 1 wherever a token is real; None means all 1."""
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
    """The L1 term of each factorized table; its slope, times `scale`, is added to grads."""
    embedding = model.embedding
    if not isinstance(embedding, spec.FactorizedEmbedding) or embedding.l1 == 0.0:
        return 0.0
    total = 0.0
    for name, u_VR in params.items():
        if name.endswith("embed.u"):
            total += l1_penalty(u_VR, l1=embedding.l1)
            if grads is not None:
                l1_penalty(u_VR, l1=embedding.l1 * scale, du_VR=grads[name])
    return total
