"""`Seen`: what sheets and ablations read off a look, so that they need not know how it is made."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from glassformer.lens.measure.attention import Attentions
from glassformer.lens.measure.head_names import HeadName, Kind
from glassformer.lens.measure.logit_lens import LogitLens
from glassformer.lens.measure.norms import Norms
from glassformer.lens.measure.predictions import Measured, Reading
from glassformer.lens.show.displayable import Row

# T positions, D d_model


class Seen(Protocol):
    """One sequence in one model: `glassformer.lens.look.Look` is one."""

    @property
    def reading(self) -> Reading:
        """The model, the head, the sequence and its targets."""

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the tokens."""

    @property
    def source_words(self) -> tuple[str, ...] | None:
        """Words of an encoder's tokens."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of attention."""

    @property
    def attention(self) -> Attentions:
        """The maps."""

    @property
    def lens(self) -> LogitLens:
        """The logit lens."""

    @property
    def norms(self) -> Norms:
        """The norms."""

    @property
    def others(self) -> Mapping[str, tuple[Reading, Measured]]:
        """What the other heads say."""

    @property
    def hidden_TD(self) -> Tensor:  # noqa: N802  a tensor's name carries its shape
        """What the heads read."""

    @property
    def ablated(self) -> tuple[HeadName, ...]:
        """Heads that were silent."""

    @property
    def loss(self) -> float | None:
        """The mean loss."""

    def next(self, position: int | None = None, k: int = 5) -> list[tuple[int, str, float]]:
        """The likeliest answers."""

    def rows(self) -> list[Row]:
        """A line a position."""

    def summary(self) -> str:
        """One line."""
