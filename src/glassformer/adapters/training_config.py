"""`TrainingConfig`: settings that a training brings to a model when it is loaded."""

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch

from glassformer.models.model import Model
from glassformer.spec.checks import at_least, one_of, probability, spec
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import stored
from glassformer.spec.model import Dropout, ModelSpec

Precision = Literal["float32", "float64", "bfloat16", "float16"]


@spec
class TrainingConfig:
    """Settings of a training; None keeps what the files say.

    architecture_type: the adapter that is expected. dropout: one rate everywhere. precision: of the
    weights. frozen: patterns of parameters without gradients (`embed.*`). overrides and seed: for
    a preset's name, which means a new model: `decoder.layers.count=2`.
    """

    architecture_type: str | None = None
    dropout: float | None = None
    precision: Precision | None = None
    frozen: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        if self.dropout is not None:
            probability("dropout", self.dropout)
        if self.precision is not None:
            one_of("precision", self.precision, get_args(Precision))

    @property
    def dtype(self) -> torch.dtype | None:
        """The precision as a torch dtype."""
        return None if self.precision is None else getattr(torch, self.precision)

    def adjusted(self, model: ModelSpec) -> ModelSpec:
        """Return the spec with this training's dropout."""
        if self.dropout is None:
            return model
        rates = Dropout.from_number(self.dropout)
        encoder = model.encoder
        return replace(
            model,
            decoder=replace(model.decoder, dropout=rates),
            encoder=None if encoder is None else replace(encoder, dropout=rates),
        )

    def freeze(self, model: Model) -> None:
        """Freeze the parameters that match; a pattern that matches none is refused."""
        names = stored(model.spec)
        own = dict(model.named_parameters())
        for pattern in self.frozen:
            found = [name for name in names if fnmatchcase(name, pattern)]
            if not found:
                raise InputError(
                    f"no parameter is named '{pattern}'",
                    hint=f"names look like {next(iter(names))}",
                )
            for name in found:
                own[name].requires_grad_(False)
