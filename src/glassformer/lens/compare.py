"""Two looks at the same tokens in two models: how far their answers lie apart at a position."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from glassformer.lens.measure.capture import at_rest
from glassformer.lens.measure.predictions import divergence
from glassformer.lens.seen import Seen
from glassformer.spec.errors import InputError

# T positions, D d_model, V answers


@dataclass(frozen=True, slots=True)
class Beside:
    """What another model says at one position: `shares` of the answers asked about, its loss there
    (NaN without a target) and over all positions, its likeliest answer, KL(its || ours) in nats."""

    shares: tuple[float, ...]
    loss: float
    mean_loss: float | None
    top: tuple[int, str, float]
    kl: float


def comparable(here: Seen, there: Seen) -> bool:
    """Whether both read the same tokens and answer out of as many."""
    ours, theirs = here.reading, there.reading
    return ours.inputs.tokens_BT.tolist() == theirs.inputs.tokens_BT.tolist() and (
        ours.model.spec.head_size(ours.head) == theirs.model.spec.head_size(theirs.head)
    )


def beside(here: Seen, there: Seen, position: int | None, ids: Sequence[int]) -> Beside:
    """`there` at a position of `here`; `ids` are answers."""
    if not comparable(here, there):
        raise InputError(
            "the two models do not read the same tokens, or do not answer out of as many",
            hint="compare models with one vocabulary; name a target where they write their own",
        )
    at = here.lens.position(position)
    ours_1V, theirs_1V = _distribution(here, at), _distribution(there, at)
    return Beside(
        shares=tuple(theirs_1V[0, list(ids)].exp().tolist()),
        loss=float(there.lens.losses[-1, at]),
        mean_loss=there.loss,
        top=there.lens.choices(at, 1)[0],
        kl=float(divergence(theirs_1V, ours_1V)[0]),
    )


def _distribution(seen: Seen, at: int) -> Tensor:
    reading = seen.reading
    with at_rest(reading.model):
        rows_TD = reading.rows_of(seen.hidden_TD)
        return reading.log_probabilities(rows_TD[at : at + 1]).cpu()
