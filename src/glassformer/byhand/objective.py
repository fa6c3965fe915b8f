"""What a training step makes small: each head's cross-entropy, and the spec's penalty."""

from collections.abc import Mapping
from typing import NamedTuple

from glassformer.byhand.embed import l1_penalty
from glassformer.byhand.workspace import Array
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


def total_loss(
    by_head: Mapping[str, float],
    *,
    nll: Mapping[str, float],
    head_weights: Mapping[str, float] | None,
    penalty: float,
    logits: dict[str, Array],
) -> Losses:
    """Weighted sum over heads (1 where no weight is given) and the penalty."""
    factors = head_weights or {}
    total = penalty + sum(factors.get(name, 1.0) * loss for name, loss in by_head.items())
    return Losses(total, dict(by_head), dict(nll), penalty, logits)


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
