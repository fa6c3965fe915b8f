"""Choose the backend that runs a quantized matrix, unless the user names one.

A backend replaces the stored form in memory by its own, and can restore it without loss. It is
compared with the float product once: a backend that exceeds its error bound, or loses something
when unpacked, is not used, and the reason is reported. Nothing is timed here, so the same model on
the same machine always gives the same results.
"""

import functools
import warnings
from typing import Protocol

import torch
from torch import Tensor

from glassformer.quant.backends.routines import Aten, Native, float_product
from glassformer.quant.schemes import QuantizedTensor, dequantize, quantize_tensor
from glassformer.spec.errors import InputError, MachineError, nearest
from glassformer.spec.lacking import Runs, lacks
from glassformer.spec.schemes import Scheme, check_scheme

# M rows, N looked-up rows, O outputs, I inputs


class Form(Protocol):
    """A matrix as a backend holds it."""

    @property
    def nbytes(self) -> int:
        """The number of resident bytes."""

    def product(self, x_MI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + b."""

    def unpack(self) -> QuantizedTensor:
        """Return the stored form, without loss."""


class LookupForm(Form, Protocol):
    """A form that also returns rows, for an embedding table."""

    def rows(self, index_N: Tensor) -> Tensor:
        """Return dequantized rows (N, I)."""


class Backend(Protocol):
    """A family of routines for some schemes, which makes a `Form` of a stored matrix."""

    @property
    def name(self) -> str:
        """The name that `backend=` takes."""

    @property
    def device(self) -> str:
        """The type of device that it runs on."""

    @property
    def runs(self) -> Runs:
        """The schemes that it has routines for, with the options that they take."""

    def lacks(self, scheme: Scheme, shape: tuple[int, int]) -> str:
        """Return what else it lacks for a matrix of this shape; empty if nothing."""

    def pack(self, tensor: QuantizedTensor, *, lookup: bool, head: bool = False) -> Form:
        """Return the form that replaces the stored one; for `lookup` a `LookupForm`.

        `head`: its products are logits, which may be computed with more care.
        """

    def bound(self, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
        """Return the error bound (M, O) against the product with activations as they are."""


#: They run everything everywhere: the arithmetic of `c` in plain torch, bit for bit; and rounded
#: weights with activations as they are, which is what training with rounded weights computes.
REFERENCE, FLOAT = "reference", "float"
EVERYWHERE = (REFERENCE, FLOAT)
#: Our routines on a CPU, torch's weight-only ops on a GPU.
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Native(), Aten())}
NAMES = (*BACKENDS, *EVERYWHERE)

#: Allowance for rounding on top of a backend's bound, relative to the largest result.
ROUNDING = 1e-5
#: (O, I) of the matrix that a backend is probed with.
PROBED = (64, 256)


class SlowQuantization(UserWarning):
    """A quantized model has no fast routine on this machine: correct and small, but slow."""


def choose(
    scheme: Scheme, shape: tuple[int, int], device: torch.device, *, lookup: bool = False
) -> str:
    """Return the name of the first backend that can run this matrix; the reference if none can."""
    for name in BACKENDS:
        if not lacking(name, scheme, shape, device, lookup=lookup):
            return name
    if device.type == "cpu" and any(type(scheme) in b.runs for b in BACKENDS.values()):
        _warn_once(type(scheme))  # type: ignore[arg-type]  # mypy reads its instances' __hash__
    return REFERENCE


def check_backend(
    name: str,
    scheme: Scheme,
    shape: tuple[int, int],
    device: torch.device,
    *,
    lookup: bool = False,
) -> None:
    """Refuse a backend that was requested by name and cannot run this matrix."""
    if name not in (*NAMES, "auto"):
        raise InputError(f"no backend '{name}'", hint=nearest(name, (*NAMES, "auto")))
    if name not in (*EVERYWHERE, "auto"):
        reason = lacking(name, scheme, shape, device, lookup=lookup)
        if reason:
            raise MachineError(
                f"the backend '{name}' cannot run {scheme.describe()} here: {reason}",
                hint="{--backend auto|backend='auto'} takes one that can",
            )


def lacking(
    name: str,
    scheme: Scheme,
    shape: tuple[int, int],
    device: torch.device,
    *,
    lookup: bool = False,
) -> str:
    """Return what a backend lacks to run this matrix here; empty if nothing."""
    backend = BACKENDS[name]
    for lack in lacks(check_scheme(scheme), backend.runs):
        return f"it has no {lack}"
    if device.type != backend.device:
        return f"it runs on {backend.device.upper()} only"
    return backend.lacks(scheme, shape) or _probed(name, scheme, device.type, lookup)


@functools.cache
def _probed(name: str, scheme: Scheme, device: str, lookup: bool) -> str:
    """Probe a backend once per scheme and device; an exception is a reason too."""
    try:
        return probe(BACKENDS[name], scheme, torch.device(device), lookup=lookup)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"it fails: {str(error).splitlines()[0]}"


def probe(backend: Backend, scheme: Scheme, device: torch.device, *, lookup: bool) -> str:
    """Compare a backend with the float product on a small matrix; return what is wrong, or empty.

    The inputs are ordinary rows, rows at the ends of the range, and a row of zeros.
    """
    generator = torch.Generator().manual_seed(7)
    weight_OI = torch.randn(PROBED, generator=generator)
    x_MI = torch.randn(6, PROBED[1], generator=generator)
    x_MI[1] *= 20.0
    x_MI[2], x_MI[3], x_MI[4] = 1.0, weight_OI[0].sign(), 0.0
    tensor = quantize_tensor(weight_OI, scheme).to(device)
    x_MI = x_MI.to(device)
    form, dense_OI = backend.pack(tensor, lookup=lookup), dequantize(tensor)
    expected_MO, found_MO = float_product(x_MI, tensor), form.product(x_MI, None)
    room_MO = backend.bound(x_MI, dense_OI) + ROUNDING * expected_MO.abs().max()
    if not bool(((found_MO - expected_MO).abs() <= room_MO).all()):
        return "its answers leave their bound"
    if not same(form.unpack(), tensor):
        return "its way back loses something"
    return ""


def same(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    """Return True if two tensors are equal in every bit."""
    ours, theirs = one.parts(), other.parts()
    return (
        one.scheme == other.scheme
        and ours.keys() == theirs.keys()
        and all(torch.equal(part, theirs[leaf]) for leaf, part in ours.items())
    )


@functools.cache
def _warn_once(kind: type[Scheme]) -> None:
    scheme = kind().resolve(PROBED[1])
    cpu = torch.device("cpu")
    reasons = "; ".join(
        f"{name}: {lacking(name, scheme, PROBED, cpu, lookup=True) or 'not for this layer'}"
        for name in BACKENDS
    )
    warnings.warn(
        f"no fast routine for {scheme.name} on this machine: the reference is right and small, not "
        f"fast ({reasons})",
        SlowQuantization,
        stacklevel=2,
    )
