"""`is_model_quantized`: report the quantized layers of a model, their schemes and bytes."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from glassformer.quant.convert import quantized_layers
from glassformer.quant.layers import QuantizedWeight
from glassformer.spec.quantization import Quantization, QuantizedLayer
from glassformer.spec.schemes import Method, Scheme


@dataclass(frozen=True, slots=True)
class LayerReport:
    """The scheme, method, backend and size of one quantized layer."""

    scheme: Scheme
    method: Method
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

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends in use."""
        return tuple(sorted({layer.backend for layer in self.layers.values()}))


def is_model_quantized(model: nn.Module) -> QuantizationReport:
    """Return a report, true if any layer is quantized, with its bits, method, backend and bytes."""
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
