"""Batches of a stack: one for each model, filled up to one shape.

Rows and positions that fill up do not count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.models.inputs import Inputs, as_inputs
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec
from glassformer.training.engine import Array, loss_weights
from glassformer.training.recorded import SHARE

# M models, B rows of one model, R rows that count

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Work:
    """One model's share of a step: its batches, its rate, the seed of its dropout.

    One that is not `live` computes with the others, so that their shapes are what they would be,
    and stays as it is.
    """

    batches: Sequence[Batch]
    lr: float
    seed: int
    live: bool = True


@dataclass(frozen=True, slots=True)
class Extent:
    """The rows and lengths of a batch."""

    rows: int
    target: int
    source: int = 0


def rows_of(batch: Batch, start: int, stop: int) -> Batch:
    """Return some rows of a batch."""
    at, source = slice(start, stop), batch.source
    return replace(
        batch,
        tokens=batch.tokens[at],
        valid=batch.valid[at],
        targets={head: target[at] for head, target in batch.targets.items()},
        weights=None if batch.weights is None else batch.weights[at],
        segments=None if batch.segments is None else batch.segments[at],
        source=None
        if source is None
        else replace(source, tokens=source.tokens[at], valid=source.valid[at]),
    )


def extent_of(batch: Batch) -> Extent:
    """Return the rows and lengths of a batch."""
    source = 0 if batch.source is None else batch.source.tokens.shape[1]
    rows, length = batch.tokens.shape
    return Extent(rows, length, source)


def stack_batches(
    batches: Sequence[Batch],
    spec: ModelSpec,
    counts: Mapping[str, Array],
    *,
    rows: int,
    fixed: bool,
) -> dict[str, Array]:
    """Return (M, B, ...) arrays of one batch for each model, checked, filled up to one shape.

    With `fixed` the lengths and the numbers of rows that count take one of a few values, so that
    recorded shapes repeat.
    """
    M, most = len(batches), max(rows if fixed else 0, *(len(batch.tokens) for batch in batches))

    def length(lengths: Sequence[int]) -> int:
        piece = -(-spec.max_seq_len // SHARE) if fixed else 1
        return min(spec.max_seq_len, -(-max(lengths) // piece) * piece)

    def stacked(arrays: Sequence[Array], width: int | None = None) -> Array:
        grown = []
        for array in arrays:
            if width is not None and array.ndim == 2 and array.shape[1] < width:
                array = np.pad(array, ((0, 0), (0, width - array.shape[1])))
            grown.append(array if len(array) == most else array[np.arange(most) % len(array)])
        return np.stack(grown)

    T = length([batch.tokens.shape[1] for batch in batches])
    arrays: dict[str, Array] = {
        "tokens": stacked([b.tokens for b in batches], T).astype(np.int64, copy=False)
    }
    valid = stacked([b.valid for b in batches], T)
    if not valid.all():
        arrays["valid"] = valid
    if batches[0].segments is not None:
        arrays["segments"] = stacked([_given(b.segments) for b in batches], T)
    if batches[0].source is not None:
        sources = [_given(b.source) for b in batches]
        S = length([source.tokens.shape[1] for source in sources])
        arrays["source"] = stacked([s.tokens for s in sources], S).astype(np.int64, copy=False)
        arrays["source_valid"] = stacked([s.valid for s in sources], S)
        if not fixed and arrays["source_valid"].all():
            del arrays["source_valid"]
    _check_inputs(arrays, spec)
    for head, count_M in counts.items():
        weights, targets = [], []
        for batch in batches:
            own = np.zeros((most, *loss_weights(batch, head).shape[1:]), dtype=np.float32)
            own[: len(batch.tokens)] = loss_weights(batch, head)
            weights.append(own)
            targets.append(batch.targets[head])
        width = T if targets[0].ndim == 2 else None
        weights_MR = stacked(weights, width).reshape(M, -1)
        targets_MR = np.where(weights_MR > 0, stacked(targets, width).reshape(M, -1), 0)
        counted = int(np.count_nonzero(weights_MR, axis=1).max())
        share = -(-SHARE * counted // weights_MR.shape[1])
        if counted and (share < SHARE if fixed else counted < weights_MR.shape[1]):
            size = -(-weights_MR.shape[1] * max(1, share) // SHARE) if fixed else counted
            # Rows that count come first; a stable sort keeps their order.
            index_MR = np.argsort(weights_MR == 0, axis=1, kind="stable")[:, :size]
            arrays[f"rows.{head}"] = index_MR
            weights_MR = np.take_along_axis(weights_MR, index_MR, 1)
            targets_MR = np.take_along_axis(targets_MR, index_MR, 1)
        arrays[f"targets.{head}"] = targets_MR.astype(np.int64, copy=False)
        arrays[f"weights.{head}"] = weights_MR
        arrays[f"scale.{head}"] = 1.0 / np.where(count_M > 0, count_M, 1.0)
    return arrays


def _given(value: _Value | None) -> _Value:
    if value is None:
        raise InputError("a batch of the stack lacks what the first one has")
    return value


def _check_inputs(arrays: Mapping[str, Array], spec: ModelSpec) -> None:
    """Refuse ids outside the vocabulary, and sequences that are too long."""
    sides = {"tokens": spec.vocab_size, "source": spec.source_vocab}
    if all(
        arrays[side].shape[2] <= spec.max_seq_len
        and arrays[side].min() >= 0
        and arrays[side].max() < vocab
        for side, vocab in sides.items()
        if side in arrays
    ):
        return

    def tensor(name: str) -> Tensor | None:
        found = arrays.get(name)
        return None if found is None else torch.from_numpy(found).flatten(0, 1)

    tokens = tensor("tokens")
    assert tokens is not None
    given = Inputs(tokens, tensor("valid"), tensor("segments"), tensor("source"))
    as_inputs(given, spec, device=torch.device("cpu"))  # it names what is wrong, and where
