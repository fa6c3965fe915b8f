"""Quantization: integer arithmetic equals rounded weights, on disk, in any batch and backend.

A model that comes quantized is examined as it is; any other one of ours is quantized for the
occasion, to every scheme that fits some of its layers.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from glasscheck.measure import (
    EXACT,
    TOLERANCE,
    Measure,
    NotOffered,
    gap,
    relative_gap,
    seeded,
)
from glasscheck.rows.invariants import LENGTH, tokens_of, tolerance_of
from glasscheck.subject import Subject
from glassformer.checks.subject import with_source
from glassformer.models.model import Model
from glassformer.quant.backends.choose import BACKENDS, FLOAT, ROUNDING, lacking
from glassformer.quant.backends.routines import float_product, reference_product
from glassformer.quant.contents import quantized_arrays, restored_model
from glassformer.quant.convert import (
    dequantize_model,
    prepare_model_for_quantization,
    quantize_model,
    quantized_layers,
    use_backend,
)
from glassformer.quant.layers import QuantizedWeight
from glassformer.quant.schemes import dequantize
from glassformer.spec.manifest import stored
from glassformer.spec.quantization import QuantSpec, targets
from glassformer.spec.schemes import SCHEMES
from glassformer.store.checkpoint import load_quantized, save_quantized

SPECS = tuple(QuantSpec(scheme=scheme(), method="absmax", indivisible="keep") for scheme in SCHEMES)
#: Backends whose result for a row has the same bits in any batch.
INVARIANT = ("c",)
NEIGHBOURS = 16


def _plain(subject: Subject) -> Model:
    model: Model = subject.ours()
    if next(model.parameters()).device.type != "cpu":
        raise NotOffered("quantization is examined on the CPU")
    return model


def _quantized(subject: Subject, *, backend: str) -> Iterator[Model]:
    """Yield the subject itself, or a copy of it in each scheme that fits some of its layers."""
    model = _plain(subject)
    if subject.quantized is not None:
        yield use_backend(copy.deepcopy(subject.quantized), backend)
        return
    for spec in _fitting(model):
        yield quantize_model(copy.deepcopy(model), spec, backend=backend)


def _fitting(model: Model) -> list[QuantSpec]:
    """Return the schemes that some layer of the model can have."""
    matrices = targets(model.spec)
    return [spec for spec in SPECS if any(spec.scheme_of(p) is not None for p in matrices)]


@torch.no_grad()
def _logits(model: Model, subject: Subject) -> Tensor:
    inputs = with_source(model.spec, tokens_of(subject, 3, LENGTH, seed=71), None)
    return torch.cat(list(model(inputs).values()), -1)


def equals_rounded(subject: Subject) -> Measure:
    """Quantized weights compute, activations as they are, what training with rounded ones did."""
    model, worst, bar = _plain(subject), 0.0, EXACT
    if subject.quantized is not None:
        (small,) = _quantized(subject, backend=FLOAT)
        expected = _logits(model, subject)
        return Measure(
            relative_gap(_logits(small, subject), expected),
            tolerance_of(expected, subject),
            subject.size,
        )
    pairs = zip(_quantized(subject, backend=FLOAT), _fitting(model), strict=True)
    for small, spec in pairs:
        rounded = prepare_model_for_quantization(
            copy.deepcopy(model), replace(spec, method="qat"), mode="qat"
        )
        worst = max(worst, gap(_logits(small, subject), _logits(rounded, subject)))
    return Measure(worst, bar, subject.size)


def dequantizes_exactly(subject: Subject) -> Measure:
    """Dequantized, it is a plain model with the manifest's names that computes the same bits."""
    worst = 0.0
    for small in _quantized(subject, backend=FLOAT):
        expected = _logits(small, subject)
        back = dequantize_model(copy.deepcopy(small))
        names = {name for name, _ in back.named_parameters()} ^ set(stored(back.spec))
        if names or any(True for _ in quantized_layers(back)):
            return Measure(float("inf"), EXACT, subject.size, f"left over: {sorted(names)[:3]}")
        worst = max(worst, gap(_logits(back, subject), expected))
    return Measure(worst, EXACT, subject.size)


def rows_stand_alone(subject: Subject) -> Measure:
    """A row's result is the same alone and in a batch with rows twenty times as large."""
    worst, bar, names = 0.0, EXACT, set()
    for small in _quantized(subject, backend="auto"):
        for _, layer in _distinct(small):
            x = torch.randn(NEIGHBOURS + 1, layer.shape[1], generator=seeded(72))
            x[1:] *= 20.0
            alone, beside = layer.times(x[:1], None), layer.times(x, None)[:1]
            apart = relative_gap(beside, alone)
            names.add(layer.backend)
            if layer.backend not in INVARIANT:
                bar = max(bar, TOLERANCE[alone.dtype])
            elif apart > 0:  # these promise the same bits, whatever the others may do
                apart = float("inf")
            worst = max(worst, apart)
    return Measure(worst, bar, f"{subject.size}, {', '.join(sorted(names))}")


def saves_and_loads(subject: Subject) -> Measure:
    """A quantized model comes back from the disk with every bit, and computes the same."""
    worst = 0.0
    for small in _quantized(subject, backend="auto"):
        quantization, arrays = quantized_arrays(small)
        with TemporaryDirectory() as place:
            folder = Path(place) / "quantized"
            save_quantized(folder, small.spec, quantization, arrays)
            again = restored_model(*load_quantized(folder))
        worst = max(worst, gap(_logits(again, subject), _logits(small, subject)))
        for name, array in quantized_arrays(again)[1].items():
            worst = worst if array.tobytes() == arrays[name].tobytes() else float("inf")
    return Measure(worst, EXACT, subject.size)


def backends_agree(subject: Subject) -> Measure:
    """Every backend of this machine is within its bound; ours in C has the reference's bits."""
    worst, names = 0.0, set()
    for small in _quantized(subject, backend=FLOAT):
        for _, layer in _distinct(small):
            tensor, device = layer.stored(), torch.device("cpu")
            x = torch.randn(5, layer.shape[1], generator=seeded(73))
            x[1] = x[1].sign() * 3.0  # every activation at its end
            x[2] *= 20.0
            expected = float_product(x, tensor)
            for name, backend in BACKENDS.items():
                lookup = layer.lookup
                if lacking(name, layer.scheme, layer.shape, device, lookup=lookup):
                    continue
                found = backend.pack(tensor, lookup=lookup).product(x, None)
                room = backend.bound(x, dequantize(tensor)) + ROUNDING * expected.abs().max()
                worst = max(worst, float(((found - expected).abs() / room).max()))
                if name == "c" and not torch.equal(found, reference_product(x, tensor)):
                    worst = float("inf")
                names.add(name)
    if not names:
        raise NotOffered("no backend but the two that run everywhere, on this machine")
    return Measure(worst, 1.0, f"{subject.size}, {', '.join(sorted(names))}")


def _distinct(model: Model) -> Iterator[tuple[str, QuantizedWeight]]:
    """Return one layer of each shape and scheme."""
    seen = set()
    for path, layer in quantized_layers(model):
        key = (layer.shape, layer.scheme, layer.lookup)
        if key not in seen:
            seen.add(key)
            yield path, layer
