"""Weights between a model and plain arrays, checked against the manifest."""

from collections.abc import Mapping

import numpy as np
import torch

from glassformer.models.model import Model
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import stored
from glassformer.store.tensors import BFLOAT16, explain_misfit


def weights_of(model: Model) -> dict[str, np.ndarray]:
    """Every parameter that owns its storage, by manifest name, as NumPy arrays (copies)."""
    own = dict(model.named_parameters())
    return {name: _array(own[name].detach()) for name in stored(model.spec)}


@torch.no_grad()
def load_weights(model: Model, arrays: Mapping[str, np.ndarray], *, where: str = "") -> None:
    """Put arrays into the model; a missing, unexpected or misshapen one is named in an error."""
    problems = explain_misfit(model.spec, {name: a.shape for name, a in arrays.items()})
    if problems:
        raise InputError(f"the weights do not fit the model: {problems}", where=where)
    own = dict(model.named_parameters())
    for name, array in arrays.items():
        own[name].copy_(_tensor(array))


def dtype_of(arrays: Mapping[str, np.ndarray]) -> torch.dtype:
    """The precision that a model of these arrays has: the widest of them."""
    found = {_tensor(array[:0] if array.ndim else array).dtype for array in arrays.values()}
    return max(found, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().copy().view(BFLOAT16)
    return tensor.numpy().copy()


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))
