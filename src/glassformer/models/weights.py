"""Weights between a model and plain arrays, checked against the manifest, and their conversion."""

import hashlib
import itertools
from collections.abc import Mapping

import numpy as np
import torch

from glassformer.models.model import Model
from glassformer.nn.linear import PackedWeight
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import Parameter, stored
from glassformer.spec.serialize import to_json
from glassformer.store.states import FORMAT
from glassformer.store.tensors import CODES, OPAQUE, explain_difference

Rules = Mapping[str, Parameter]


#: How torch holds the bytes of a number that NumPy lacks.
_RAW = {1: torch.uint8, 2: torch.uint16}


def weights_of(model: Model, *, rules: Rules | None = None) -> dict[str, np.ndarray]:
    """Return every parameter that owns its storage, by manifest name, as NumPy arrays (copies).

    With `rules`, the parameters that they name. Without, a model with LoRA layers is refused: its
    weights alone are not the model.
    """
    own = dict(model.named_parameters())
    names = stored(model.spec) if rules is None else rules
    added = sorted(set(own) - set(names))
    if rules is None and added:
        raise InputError(
            f"the model has parameters that its spec does not name: {added[0]} and "
            f"{len(added) - 1} more",
            hint="merge LoRA into the weights first: glassformer.nn.lora.merge(model)",
        )
    lacking = sorted(set(names) - set(own))
    if lacking:
        raise InputError(
            f"the model has no plain weights for {lacking[0]} and {len(lacking) - 1} more",
            hint="a quantized model: quant.dequantize_model first",
        )
    return arrays_of({name: own[name] for name in names})


def weights_hash(model: Model) -> str:
    """Return the SHA-256 of all weights as they are stored: names, types, shapes and values."""
    own: dict[str, torch.Tensor] = dict(model.named_parameters())
    names, total = set(stored(model.spec)) & set(own), hashlib.sha256()
    for path, part in model.named_modules():
        if isinstance(part, PackedWeight):
            packed = part.state_dict(prefix=f"{path}.")
            own |= packed
            names |= set(packed)
    for name in sorted(names):
        array = array_of(own[name].detach())
        total.update(f"{name} {CODES[array.dtype]} {array.shape}".encode())
        total.update(array.tobytes())
    return total.hexdigest()


def model_digest(model: Model, *, kind: str) -> str:
    """Return a digest of everything that a state of this model depends on, of a kind of stepper."""
    made = hashlib.sha256(f"{FORMAT} {kind} {to_json(model.spec)}".encode())
    for name, part in model.named_modules():
        made.update(f"{name} {type(part).__qualname__}\n".encode())
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        made.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()[:32]


@torch.no_grad()
def load_weights(
    model: Model,
    arrays: Mapping[str, np.ndarray],
    *,
    where: str = "",
    rules: Rules | None = None,
) -> None:
    """Put arrays into the model; a missing, unexpected or misshapen one is named in an error."""
    wanted = stored(model.spec) if rules is None else rules
    problems = explain_difference(wanted, {name: a.shape for name, a in arrays.items()})
    if problems:
        raise InputError(f"the weights do not fit the model: {problems}", where=where)
    own = dict(model.named_parameters())
    for name, array in arrays.items():
        own[name].copy_(tensor_of(array))


def dtype_of(arrays: Mapping[str, np.ndarray]) -> torch.dtype:
    """Return the precision of a model with these arrays: the widest of them."""
    found = {tensor_of(array[:0] if array.ndim else array).dtype for array in arrays.values()}
    return max(found, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)


def arrays_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Copy tensors to NumPy; from a GPU through pinned memory, waiting once for all of them."""
    here = {}
    for name, tensor in tensors.items():
        given = tensor.detach().contiguous()
        here[name] = torch.empty_like(given, device="cpu", pin_memory=given.is_cuda)
        here[name].copy_(given, non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()
    return {name: numpy_view(tensor) for name, tensor in here.items()}


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Copy a tensor to NumPy."""
    return arrays_of({"": tensor})[""]


def numpy_view(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor on the CPU as an array over the same memory."""
    here, dtype = tensor.detach(), numpy_dtype(tensor.dtype)
    if dtype.names is not None:
        return here.view(_RAW[here.itemsize]).numpy().view(dtype)
    return here.numpy()


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return NumPy's type, or what stands for it where NumPy lacks it."""
    name = str(dtype).removeprefix("torch.")
    return OPAQUE.get(name) or np.dtype(name)


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Copy an array to torch."""
    return tensor_view(np.array(array))


def tensor_view(array: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor over the same memory."""
    if array.dtype.names is not None:
        raw = torch.from_numpy(array.view(f"u{array.dtype.itemsize}"))
        return raw.view(torch_dtype(array.dtype))
    return torch.from_numpy(array)


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """Return torch's name of a type, also of those that NumPy lacks."""
    found = getattr(torch, dtype.name if dtype.names is None else dtype.names[0])
    assert isinstance(found, torch.dtype)
    return found
