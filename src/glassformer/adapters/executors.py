"""Choose a model's default stepper: the native step on a CPU, a recorded one on a GPU.

Both read the weights past the model's modules, so a model with a hook, or with a part that they do
not know, keeps the plain cached step, which runs the model itself.
"""

from collections.abc import Callable

import torch

from glassformer.generation.native import stepper as native
from glassformer.generation.native.stepper import NativeStepper
from glassformer.generation.slots import NativeSlots, OneByOneSlots
from glassformer.generation.stepper import TorchStepper
from glassformer.gpu import derived_step
from glassformer.gpu.recorded_slots import RecordedSlots
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.models.decodable import decodable
from glassformer.models.model import Holder, Model
from glassformer.models.stepping import Slots, Stepper
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec


def fastest_stepper(model: Model | Holder, *, kv_cache: KVCache = "float") -> Stepper:
    """Return the native step, the recorded one on a GPU, or the cached one where neither runs.

    A recorded step is one decoding at a time; its graphs are recorded in the first one. It keeps
    keys and values as computed: those of 8 bits are kept by the two others.
    """
    own = decodable(model)
    device = next(own.parameters()).device
    recorded = not not_recorded(own, device=device, spare_bytes=_spare_bytes(device))
    if recorded and kv_cache == "float":
        return RecordedStepper(own)
    return rewinding_stepper(own, kv_cache=kv_cache)


def rewinding_stepper(model: Model | Holder, *, kv_cache: KVCache = "float") -> Stepper:
    """Return the fastest step whose decodings are independent and can be taken back."""
    own = decodable(model)
    if native.unavailable(own, kv_cache=kv_cache):
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


def not_recorded(model: Model, *, device: torch.device, spare_bytes: int) -> str:
    """Return the reason why a model on this device has no recorded step; empty if it has one.

    `spare_bytes` is the device's memory that nobody uses: a recorded step has weights of its own.
    """
    if device.type != "cuda":
        return f"the model is on {device}, and steps are recorded on a GPU"
    if reason := derived_step.lacks(model.spec):
        return f"the recorded step has no {reason}"
    if reason := native.foreign_module(model):
        return reason
    kinds = sorted({str(parameter.dtype) for parameter in model.parameters()})
    if len(kinds) > 1:
        return f"its weights are {' and '.join(kinds)}, and the recorded step reads one kind"
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


def make_slots(
    model: Model | None,
    stepper: Callable[[], Stepper],
    spec: ModelSpec,
    *,
    slots: int,
    context: int | None = None,
    invariant: bool | None = None,
    kv_cache: KVCache = "float",
) -> Slots:
    """Return the native or the recorded step over slots, or else one sequence at a time.

    `model` is None for another library's module; `stepper` makes what that one decodes with.
    """
    if model is None:
        check_own_cache(kv_cache)
    elif kv_cache != "float" and next(model.parameters()).is_cuda:
        raise InputError(
            f"{{--kv-cache|kv_cache}} {kv_cache} is served on a CPU: on a GPU slots hold keys and "
            "values as computed",
            hint="leave it out, or serve on the CPU",
        )
    if (
        model is not None
        and spec.encoder is None
        and not native.unavailable(model, kv_cache=kv_cache)
    ):
        spare = 1 if slots > 1 else 0  # a sequence that is put back for a while is not read again
        return NativeSlots(model, slots=slots, spare=spare, context=context, kv_cache=kv_cache)
    on_gpu = model is not None and next(model.parameters()).is_cuda
    if model is not None and spec.encoder is None and on_gpu and not invariant:
        try:
            return RecordedSlots(model, slots=slots, context=context)
        except InputError:
            if context is not None and not 1 < context <= spec.max_seq_len:
                raise
    # Slots are decoded in turn, so their decodings must be independent of each other.
    one = stepper() if model is None else rewinding_stepper(model, kv_cache=kv_cache)
    return OneByOneSlots(
        one, spec, slots=slots, context=context or spec.max_seq_len, kv_cache=kv_cache
    )
