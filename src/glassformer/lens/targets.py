"""What the model should have said at each position: given, from a batch, or the text's own next."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.lens.reading import NONE
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.spec.errors import InputError
from glassformer.spec.model import AnswerHead

# T positions


def read_targets(
    model: Model,
    head: str,
    given: "Batch | object",
    inputs: Inputs,
    place: int,
    targets: "int | Sequence[int | None] | np.ndarray | Tensor | None",
) -> Tensor:
    """(T,) of ids, -1 where nothing is asked for. One number is the answer at `place`."""
    T = inputs.tokens_BT.shape[1]
    if targets is None and isinstance(given, Batch) and head in given.targets:
        return _checked(model, head, _of_batch(given, head, place, T))
    if targets is None:
        return _next_tokens(inputs) if head == "next" else no_targets(inputs)
    if isinstance(targets, Tensor | np.ndarray | np.generic):
        targets = targets.tolist()
    listed = targets if isinstance(targets, Sequence) else [targets]
    values = [NONE if value is None else value for value in listed]
    if not all(type(value) is int and abs(value) < 1 << 62 for value in values):
        raise InputError("targets hold more than whole numbers", hint="ids, or None for no target")
    alone = listed is not targets or isinstance(model.spec.head(head), AnswerHead)
    if alone and len(values) == 1:
        return _checked(model, head, _at(place, values[0], T))
    if len(values) != T:
        raise InputError(f"{len(values)} targets for {T} tokens", hint="one for each token")
    return _checked(model, head, torch.tensor(values))


def no_targets(inputs: Inputs) -> Tensor:
    """Nothing asked for, anywhere."""
    return torch.full((inputs.tokens_BT.shape[1],), NONE)


def _at(place: int, target: int, length: int) -> Tensor:
    found_T = torch.full((length,), NONE)
    found_T[place] = target
    return found_T


def _of_batch(batch: Batch, head: str, place: int, length: int) -> Tensor:
    target = batch.targets[head]
    if target.ndim == 1:
        return _at(place, int(target[0]), length)
    counted = batch.valid[0] if batch.weights is None else batch.weights[0] > 0
    return torch.as_tensor(np.where(counted, target[0], NONE))


def _next_tokens(inputs: Inputs) -> Tensor:
    """Each token's successor, where it is real and of the same segment."""
    tokens_T = inputs.tokens_BT[0].cpu()
    found_T = torch.full_like(tokens_T, NONE)
    follows_T = torch.ones(len(tokens_T) - 1, dtype=torch.bool)
    if inputs.valid_BT is not None:
        valid_T = inputs.valid_BT[0].cpu()
        follows_T &= valid_T[1:] & valid_T[:-1]
    if inputs.segments_BT is not None:
        segments_T = inputs.segments_BT[0].cpu()
        follows_T &= segments_T[1:] == segments_T[:-1]
    found_T[:-1] = torch.where(follows_T, tokens_T[1:], NONE)
    return found_T


def _checked(model: Model, head: str, targets_T: Tensor) -> Tensor:
    size = model.spec.head_size(head)
    bad = (targets_T < NONE) | (targets_T >= size)
    if bool(bad.any()):
        place = int(bad.nonzero()[0])
        raise InputError(
            f"target {int(targets_T[place])} of head '{head}'",
            where=f"position {place}",
            hint=f"ids run from 0 to {size - 1}; -1 or None means no target",
        )
    return targets_T.long()
