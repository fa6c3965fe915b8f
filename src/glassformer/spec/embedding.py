"""How a token becomes d_model numbers."""

from glassformer.spec.base import at_least, spec
from glassformer.spec.errors import InputError


@spec
class PlainEmbedding:
    """One row of d_model numbers for each token."""


@spec
class ScaledEmbedding:
    """The row times sqrt(d_model), as in the 2017 paper: keeps it level with the sinusoids.

    Historical and optional: it changes the embedding's effective learning rate, and most models
    since GPT-2 leave it out.
    """


@spec
class FactorizedEmbedding:
    """U[token] @ V, U (vocab, rank), V (rank, d_model); `l1` weighs the sum of |U| in the loss."""

    rank: int
    l1: float = 0.0

    def __post_init__(self) -> None:
        at_least("rank", self.rank)
        if not 0.0 <= self.l1 < float("inf"):
            raise InputError(f"l1 {self.l1} is negative", hint="0 turns the penalty off")


Embedding = PlainEmbedding | ScaledEmbedding | FactorizedEmbedding
