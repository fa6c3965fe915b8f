"""A model that is ready to decode, and prompts as what it reads."""

import numpy as np
import torch
from torch import Tensor

from glassformer.models.inputs import Inputs
from glassformer.models.model import Holder, Model, model_of
from glassformer.models.prompts import Prompts, padded
from glassformer.spec.errors import InputError


def decodable(model: Model | Holder) -> Model:
    """Return the model itself, in eval mode: dropout would make every step another model."""
    model = model_of(model)
    if model.training:
        raise InputError("the model is in training mode", hint="call model.eval() first")
    return model


def read_prompts(model: Model, prompts: Prompts) -> Inputs:
    """Return checked tensors on the model's device, padded on the left."""
    tokens_BT, valid_BT = padded(prompts.tokens)
    source_BS = source_valid_BS = None
    if prompts.sources is not None:
        source_BS, source_valid_BS = map(_tensor, padded(prompts.sources))
    given = Inputs(
        torch.from_numpy(tokens_BT),
        _tensor(valid_BT),
        source_BS=source_BS,
        source_valid_BS=source_valid_BS,
    )
    return model.inputs(given)


def _tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)
