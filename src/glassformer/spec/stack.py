"""Blocks on top of each other: runs of equal ones, so that layers may differ."""

from collections.abc import Iterator

from glassformer.spec.base import at_least, probability, spec
from glassformer.spec.block import Block, Norm
from glassformer.spec.errors import InputError


@spec
class Layers:
    """A run of `count` equal blocks."""

    count: int
    block: Block

    def __post_init__(self) -> None:
        at_least("count", self.count)


@spec
class Dropout:
    """Rates by place: after the embedding, on attention weights, after a sublayer, in the ffn."""

    embedding: float = 0.0
    attention: float = 0.0
    residual: float = 0.0
    ffn: float = 0.0

    def __post_init__(self) -> None:
        for place in ("embedding", "attention", "residual", "ffn"):
            probability(f"dropout.{place}", getattr(self, place))

    @classmethod
    def from_number(cls, rate: float) -> "Dropout":
        """The same rate in every place."""
        return cls(embedding=rate, attention=rate, residual=rate, ffn=rate)


@spec
class Stack:
    """Runs of blocks from first to last, then a final norm or none."""

    layers: tuple[Layers, ...]
    final_norm: Norm | None = None
    dropout: Dropout = Dropout()

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError("a stack has no layers", hint="give at least one run of blocks")

    @property
    def n_layers(self) -> int:
        """Blocks in all runs together."""
        return sum(run.count for run in self.layers)

    def blocks(self) -> Iterator[Block]:
        """Each block once, from the first layer to the last."""
        for run in self.layers:
            for _ in range(run.count):
                yield run.block
