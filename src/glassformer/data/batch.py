"""`Batch`: the arrays that tasks make and engines read, in NumPy, with one mask convention.

`valid` is True where a token is real. Padding may be on either side; the contents of a padded
position are never read. `segments` keeps examples that share a row apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from glassformer.spec.errors import InputError

# B batch, T target length, S source length

Ints = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The encoder's side of a batch."""

    tokens: Ints
    valid: Bools

    def __post_init__(self) -> None:
        _check_pair("source.tokens", self.tokens, "source.valid", self.valid)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A batch: tokens_BT, valid_BT, segments_BT; targets by head (B, T) or (B,), weights alike.

    A weight of 0 keeps a position out of the loss; no weights means 1 wherever `valid`.
    """

    tokens: Ints
    valid: Bools
    targets: Mapping[str, Ints] = field(default_factory=dict)
    weights: Floats | None = None
    segments: Ints | None = None
    source: Source | None = None

    def __post_init__(self) -> None:
        _check_pair("tokens", self.tokens, "valid", self.valid)
        if self.segments is not None:
            _check_shape("segments", self.segments, self.tokens.shape)
        for head, target in self.targets.items():
            if target.shape not in (self.tokens.shape, self.tokens.shape[:1]):
                raise InputError(
                    f"targets['{head}'] has shape {target.shape}",
                    hint=f"use {self.tokens.shape}, or {self.tokens.shape[:1]} for one a sequence",
                )
        if self.weights is not None:
            self._check_weights(self.weights)
        if self.source is not None and len(self.source.tokens) != len(self.tokens):
            raise InputError(
                f"{len(self.source.tokens)} source sequences for {len(self.tokens)} target ones"
            )

    def _check_weights(self, weights: Floats) -> None:
        shapes = {target.shape for target in self.targets.values()} or {
            self.tokens.shape,
            self.tokens.shape[:1],
        }
        if weights.shape not in shapes:
            raise InputError(
                f"weights has shape {weights.shape}",
                hint=f"use that of the targets: {' or '.join(map(str, sorted(shapes)))}",
            )
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise InputError(
                "weights holds a number below 0, or one that is not finite",
                hint="0 keeps a position out of the loss",
            )

    @classmethod
    def of(
        cls, sequences: Sequence[Sequence[int]], *, side: Literal["right", "left"] = "right"
    ) -> "Batch":
        """Return a batch of sequences of ids, padded on one side to the longest."""
        tokens, valid = pad(sequences, side=side)
        return cls(tokens=tokens, valid=valid)


def pad(
    sequences: Sequence[Sequence[int]], *, side: Literal["right", "left"] = "right", filler: int = 0
) -> tuple[Ints, Bools]:
    """Return tokens_BT and valid_BT of sequences of different lengths."""
    if side not in ("right", "left"):
        raise InputError(f"side '{side}' is not one of right, left")
    if not sequences:
        raise InputError("an empty batch", hint="give at least one sequence")
    lengths = [len(sequence) for sequence in sequences]
    if min(lengths) == 0:
        raise InputError(f"sequence {lengths.index(0)} of the batch has no tokens")
    tokens = np.full((len(sequences), max(lengths)), filler, dtype=np.int64)
    valid = np.zeros(tokens.shape, dtype=np.bool_)
    for row, sequence in enumerate(sequences):
        if np.asarray(sequence).dtype.kind not in "iu":
            raise InputError(f"sequence {row} of the batch holds more than whole numbers")
        place = slice(None, len(sequence)) if side == "right" else slice(-len(sequence), None)
        tokens[row, place] = sequence
        valid[row, place] = True
    return tokens, valid


def _check_pair(tokens_name: str, tokens: Ints, valid_name: str, valid: Bools) -> None:
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise InputError(
            f"{tokens_name} has shape {tokens.shape} and dtype {tokens.dtype}",
            hint="whole numbers of shape (batch, length)",
        )
    if 0 in tokens.shape:
        raise InputError(f"{tokens_name} is empty: shape {tokens.shape}")
    _check_shape(valid_name, valid, tokens.shape)
    if valid.dtype != np.bool_:
        raise InputError(f"{valid_name} has dtype {valid.dtype}", hint="bool, True = real token")


def _check_shape(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise InputError(f"{name} has shape {array.shape}, the tokens {shape}")
