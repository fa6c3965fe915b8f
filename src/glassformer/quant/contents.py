"""What a quantized model contains: a report of its layers, and plain NumPy arrays by name.

`is_model_quantized` reports the layers with their schemes and bytes; `quantized_arrays` and
`restored_model` are the way to a file and back.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from glassformer.models.model import Model, build
from glassformer.models.weights import array_of, dtype_of, tensor_of
from glassformer.quant.convert import quantized_layer, quantized_layers, replace_module
from glassformer.quant.layers import QuantizedLinear, QuantizedWeight
from glassformer.quant.schemes import STORED, QuantizedTensor
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.quantization import (
    Quantization,
    QuantizedLayer,
    logit_layers,
    stored_tensors,
)
from glassformer.spec.schemes import RecordedMethod, Scheme
from glassformer.store.tensors import explain_difference


@dataclass(frozen=True, slots=True)
class LayerReport:
    """The scheme, method, backend and size of one quantized layer."""

    scheme: Scheme
    method: RecordedMethod
    backend: str
    shape: tuple[int, int]
    nbytes: int

    @property
    def bits(self) -> int:
        """The bits of a weight: 8 or 4."""
        return self.scheme.bits


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """The quantized layers of a model by path; true if there are any."""

    layers: dict[str, LayerReport]

    def __bool__(self) -> bool:
        return bool(self.layers)

    def __repr__(self) -> str:
        if not self.layers:
            return "<QuantizationReport: no quantized layer>"
        held = sum(layer.nbytes for layer in self.layers.values())
        return (
            f"<QuantizationReport: {len(self.layers)} layers, mostly {self.bits} bits, "
            f"{self.mode}, {held:,} bytes, on {', '.join(self.backends)}>"
        )

    @property
    def bits(self) -> int | None:
        """The number of bits that most weights have."""
        weights: dict[int, int] = {}
        for layer in self.layers.values():
            weights[layer.bits] = weights.get(layer.bits, 0) + layer.shape[0] * layer.shape[1]
        return max(weights, key=lambda bits: weights[bits], default=None)

    @property
    def mode(self) -> Literal["ptq", "qat"] | None:
        """`ptq` if rounded after training, `qat` if trained with rounded weights."""
        if not self.layers:
            return None
        return "qat" if any(layer.method == "qat" for layer in self.layers.values()) else "ptq"

    def schemes(self) -> dict[str, int]:
        """Return the number of layers of each scheme, by its description."""
        return dict(Counter(layer.scheme.describe() for layer in self.layers.values()))

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends in use."""
        return tuple(sorted({layer.backend for layer in self.layers.values()}))


def is_model_quantized(model: nn.Module) -> bool:
    """Return True if any layer is quantized; `quantization_report` has the bits and the mode."""
    return any(isinstance(module, QuantizedWeight) for module in model.modules())


def quantization_report(model: nn.Module) -> QuantizationReport:
    """Return the quantized layers by path with bits, method, backend and bytes."""
    return QuantizationReport(
        {path: _layer_report(layer) for path, layer in quantized_layers(model)}
    )


def _layer_report(layer: QuantizedWeight) -> LayerReport:
    return LayerReport(layer.scheme, layer.method, layer.backend, layer.shape, layer.nbytes)


def quantization_of(model: nn.Module) -> Quantization | None:
    """Return a checkpoint's description of the quantized layers; None if there are none."""
    layers = tuple(
        QuantizedLayer(name=path, scheme=layer.scheme, method=layer.method)
        for path, layer in quantized_layers(model)
    )
    return Quantization(layers=layers) if layers else None


def quantized_numbers(model: nn.Module) -> int:
    """Return the number of parameters in quantized layers, which torch does not count as such."""
    return sum(layer.numbers for _, layer in quantized_layers(model))


def resident_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters, buffers and backends' forms; shared storage counts once."""
    held = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    forms = sum(layer.nbytes for _, layer in quantized_layers(model) if layer.form is not None)
    return sum(held.values()) + forms


def quantized_arrays(model: Model) -> tuple[Quantization, dict[str, np.ndarray]]:
    """Return the description of what is quantized, and copies of every stored tensor by name."""
    quantization = quantization_of(model)
    if quantization is None:
        raise InputError(
            "the model is not quantized", hint="{glass quantize|gf.quantize} makes one that is"
        )
    arrays = {name: array_of(p.detach()) for name, p in model.named_parameters()}
    for path, layer in quantized_layers(model):
        parts = layer.stored().parts()
        if isinstance(layer, QuantizedLinear) and layer.bias is not None:
            parts["bias"] = layer.bias
        arrays |= {f"{path}.{leaf}": array_of(t) for leaf, t in parts.items()}
    wanted = stored_tensors(model.spec, quantization)
    return quantization, {name: arrays[name] for name in wanted}


@torch.no_grad()
def restored_model(
    spec: ModelSpec,
    quantization: Quantization,
    arrays: Mapping[str, np.ndarray],
    *,
    backend: str = "auto",
) -> Model:
    """Build the model of `quantized_arrays`, in eval mode, with the backends of this machine."""
    wanted = stored_tensors(spec, quantization)
    problems = explain_difference(wanted, {name: a.shape for name, a in arrays.items()})
    if problems:
        raise InputError(f"the weights do not fit the model: {problems}")
    quantized = {f"{layer.name}." for layer in quantization.layers}
    plain = {n: a for n, a in arrays.items() if not n.startswith(tuple(quantized))}
    dtype, heads = dtype_of(plain), logit_layers(spec)
    model = build(spec, device="meta").to_empty(device="cpu").to(dtype)
    for layer in quantization.layers:
        part = model.get_submodule(layer.name)
        leaves = {
            leaf: tensor_of(arrays[f"{layer.name}.{leaf}"])
            for leaf in (*STORED, "bias")
            if f"{layer.name}.{leaf}" in arrays
        }
        tensor = QuantizedTensor.of(leaves, layer.scheme)
        made = quantized_layer(
            part,
            tensor,
            layer.method,
            backend,
            bias=leaves.get("bias"),
            dtype=dtype,
            head=layer.name in heads,
        )
        replace_module(model, part, made)
    own = dict(model.named_parameters())
    for name, array in plain.items():
        own[name].copy_(tensor_of(array))
    return model.eval()
