"""Batches of a stack: one for each model, or one whose rows are all of theirs, made one batch.

`fold_batches` fills them up to one shape; rows and positions that fill up do not count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.models.inputs import Inputs, as_inputs
from glassformer.nn.stacked import Extent
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec
from glassformer.training.engine import Array, balance_shares, loss_weights, totals
from glassformer.training.recorded import (
    SHARE,
)

# M models, R rows that count

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
class Joint:
    """The work of members that read one task and draw nothing: their rows in one batch each time.

    Each slot has a full batch of rows, in the order of the slots; those that are not among `live`
    only fill up.
    """

    batches: Sequence[Batch]
    rates: Sequence[float]
    live: Sequence[int]


def rates_of(
    work: Mapping[int, Work] | Joint, slots: Sequence[int]
) -> tuple[Sequence[float], Sequence[int], Sequence[int]]:
    """Return the rate and the seed of each slot, and the members that are updated."""
    if isinstance(work, Joint):
        return work.rates, (), work.live
    some = next(iter(work.values()))
    every = [work.get(member, some) for member in slots]
    live = [member for member, one in work.items() if one.live]
    return [one.lr for one in every], [one.seed for one in every], live


def batches_in_turn(work: Mapping[int, Work] | Joint, slots: Sequence[int]) -> list[list[Batch]]:
    """Return the batches of every slot, turn by turn; an idle slot reads another's."""
    if isinstance(work, Joint):
        return [[batch] for batch in work.batches]
    some = next(iter(work.values()))
    every = [work.get(member, some).batches for member in slots]
    return [list(batches) for batches in zip(*every, strict=True)]


def counts_of(batches: Sequence[Batch], spec: ModelSpec, models: int) -> dict[str, Array]:
    """Return the weight of each head's targets, by model; the targets are checked."""
    if len(batches) == models:
        every = [totals([batch], spec) for batch in batches]
        return {head: np.array([count[head] for count in every]) for head in every[0]}
    (joint,) = batches
    return {
        head: loss_weights(joint, head).reshape(models, -1).sum(1, dtype=np.float64)
        for head in totals([joint], spec)
    }


def tokens_of(batches: Sequence[Batch], models: int) -> list[int]:
    """Return the number of real tokens, by model."""
    if len(batches) == models:
        return [int(batch.valid.sum()) for batch in batches]
    (joint,) = batches
    counts: list[int] = joint.valid.reshape(models, -1).sum(1).tolist()
    return counts


def balance_shares_of(
    by_batch: Sequence[Sequence[Batch]], spec: ModelSpec
) -> list[dict[str, Array]]:
    """Return the weights of the load-balancing losses, by turn and layer, (M,) each."""
    if not spec.mixtures():
        return [{} for _ in by_batch]
    every = [balance_shares(own, spec) for own in zip(*by_batch, strict=True)]
    return [
        {f"share.{layer}": np.array([own[i][layer] for own in every]) for layer in spec.mixtures()}
        for i in range(len(by_batch))
    ]


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


def fold_batches(
    batches: Sequence[Batch],
    spec: ModelSpec,
    counts: Mapping[str, Array],
    *,
    rows: int,
    fixed: bool,
    models: int,
) -> dict[str, Array]:
    """Return the arrays of one batch for each model, checked, filled up to one shape.

    A single batch may have the rows of all models side by side. Rows and positions that fill up do
    not count. With `fixed` the lengths and the numbers of rows that count take one of a few values,
    so that recorded shapes repeat.
    """
    filled = rows if fixed and len(batches) == models else 0
    most = max(filled, *(len(batch.tokens) for batch in batches))

    def length(lengths: Sequence[int]) -> int:
        piece = -(-spec.max_seq_len // SHARE) if fixed else 1
        return min(spec.max_seq_len, -(-max(lengths) // piece) * piece)

    def folded(arrays: Sequence[Array], width: int | None = None) -> Array:
        first = arrays[0]
        same = all(array.shape == first.shape for array in arrays)
        if same and len(first) == most and width in (None, first.shape[-1]):
            return np.concatenate(arrays)
        grown = []
        for array in arrays:
            if width is not None and array.ndim == 2:
                array = np.pad(array, ((0, 0), (0, width - array.shape[1])))
            grown.append(array[np.arange(most) % len(array)])
        return np.concatenate(grown)

    T = length([batch.tokens.shape[1] for batch in batches])
    arrays: dict[str, Array] = {
        "tokens": folded([b.tokens for b in batches], T).astype(np.int64, copy=False)
    }
    valid = folded([b.valid for b in batches], T)
    if not fixed:  # what fills up is no token of a model with experts
        sizes = np.array([len(batch.tokens) for batch in batches])
        valid &= (np.arange(most) < sizes[:, None]).reshape(-1, 1)
    if not valid.all():
        arrays["valid"] = valid
    if batches[0].segments is not None:
        arrays["segments"] = folded([_given(b.segments) for b in batches], T)
    if batches[0].source is not None:
        sources = [_given(b.source) for b in batches]
        S = length([source.tokens.shape[1] for source in sources])
        arrays["source"] = folded([s.tokens for s in sources], S).astype(np.int64, copy=False)
        arrays["source_valid"] = folded([s.valid for s in sources], S)
        if not fixed and arrays["source_valid"].all():
            del arrays["source_valid"]
    _check_inputs(arrays, spec)
    M = models
    for head, count_M in counts.items():
        weights, targets = [], []
        for batch in batches:
            own = np.zeros((most, *loss_weights(batch, head).shape[1:]), dtype=np.float32)
            own[: len(batch.tokens)] = loss_weights(batch, head)
            weights.append(own)
            targets.append(batch.targets[head])
        width = T if targets[0].ndim == 2 else None
        weights_MR = folded(weights, width).reshape(M, -1)
        targets_MR = np.where(weights_MR > 0, folded(targets, width).reshape(M, -1), 0)
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
        arrays[side].shape[1] <= spec.max_seq_len
        and arrays[side].min() >= 0
        and arrays[side].max() < vocab
        for side, vocab in sides.items()
        if side in arrays
    ):
        return

    def tensor(name: str) -> Tensor | None:
        return torch.from_numpy(arrays[name]) if name in arrays else None

    tokens = torch.from_numpy(arrays["tokens"])
    given = Inputs(tokens, tensor("valid"), tensor("segments"), tensor("source"))
    as_inputs(given, spec, device=torch.device("cpu"))  # it names what is wrong, and where
