"""The stepper that a model gets where nobody chooses: native on a CPU, recorded on a GPU.

Both read the weights past the model's modules, so a model with a hook, or with a part that they do
not know, keeps the plain cached step, which runs the model itself.
"""

import torch

from glassformer.generation.fast import block, from_model
from glassformer.generation.fast.native_stepper import NativeStepper
from glassformer.generation.fast.stepper import FastStepper
from glassformer.generation.stepper import TorchStepper, decodable
from glassformer.generation.stepping import RewindingStepper, Stepper
from glassformer.models.model import Holder, Model
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import InputError


def fastest_stepper(model: Model | Holder, *, kv_cache: KVCache = "float") -> Stepper:
    """Return the native step, the recorded one on a GPU, or the cached one where neither runs.

    A recorded step is one decoding at a time; its graphs are recorded in the first one. It keeps
    keys and values as computed: those of 8 bits are kept by the two others.
    """
    own = decodable(model)
    device = next(own.parameters()).device
    recorded = not why_not_recorded(own, device=device, spare_bytes=_spare_bytes(device))
    if recorded and kv_cache == "float":
        return FastStepper(own)
    return rewinding_stepper(own, kv_cache=kv_cache)


def rewinding_stepper(model: Model | Holder, *, kv_cache: KVCache = "float") -> RewindingStepper:
    """Return the fastest step whose decodings are independent and can take tokens back."""
    own = decodable(model)
    if from_model.why_not(own, kv_cache=kv_cache):
        return TorchStepper(own, kv_cache=kv_cache)
    return NativeStepper(own, kv_cache=kv_cache)


def check_own_cache(kv_cache: KVCache) -> None:
    """Refuse another form of keys and values for a model whose cache is not ours."""
    if kv_cache != "float":
        raise InputError(
            f"{{--kv-cache|kv_cache}} {kv_cache} is for our own models; this one is another "
            "library's",
            hint='leave it out, or load the folder with backend="native"',
        )


def why_not_recorded(model: Model, *, device: torch.device, spare_bytes: int) -> str:
    """Return the reason why a model on this device has no recorded step; empty if it has one.

    `spare_bytes` is the device's memory that nobody uses: a recorded step has weights of its own.
    """
    if device.type != "cuda":
        return f"the model is on {device}, and steps are recorded on a GPU"
    if reason := block.why_not(model.spec):
        return f"the fast step does not compute {reason}"
    if reason := from_model.unknown_module(model):
        return reason
    kinds = sorted({str(parameter.dtype) for parameter in model.parameters()})
    if len(kinds) > 1:
        return f"its weights are {' and '.join(kinds)}, and the fast step reads one kind"
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if spare_bytes < weights:
        return (
            f"{spare_bytes:,} bytes of memory are free on {device}, and its weights are {weights:,}"
        )
    return ""


def _spare_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that are free, or held by torch for nobody."""
    if device.type != "cuda":
        return 0
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held
