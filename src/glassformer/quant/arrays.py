"""Turn a quantized model into plain NumPy arrays by name, and such arrays into a model."""

from collections.abc import Mapping

import numpy as np
import torch

from glassformer.models.model import Model, build
from glassformer.models.state import array_of, dtype_of, tensor_of
from glassformer.nn.embedding import TokenEmbedding
from glassformer.quant.convert import quantized_layers, replace_module
from glassformer.quant.layers import QuantizedEmbedding, QuantizedLinear, QuantizedWeight
from glassformer.quant.schemes import QuantizedTensor
from glassformer.quant.status import quantization_of
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.quantization import Quantization, QuantizedLayer, stored_tensors
from glassformer.store.tensors import explain_difference


def quantized_arrays(model: Model) -> tuple[Quantization, dict[str, np.ndarray]]:
    """Return the description of what is quantized, and copies of every stored tensor by name."""
    quantization = quantization_of(model)
    if quantization is None:
        raise InputError("the model is not quantized", hint="quantize_model makes one that is")
    arrays = {name: array_of(p.detach()) for name, p in model.named_parameters()}
    for path, layer in quantized_layers(model):
        tensor = layer.stored()
        parts = {"qweight": tensor.qweight, "scale": tensor.scale, "zero": tensor.zero}
        if isinstance(layer, QuantizedLinear):
            parts["bias"] = layer.bias
        arrays |= {f"{path}.{leaf}": array_of(t) for leaf, t in parts.items() if t is not None}
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
    dtype = dtype_of(plain)
    model = build(spec, device="meta").to_empty(device="cpu").to(dtype)
    for layer in quantization.layers:
        part = model.get_submodule(layer.name)
        leaves = {
            leaf: tensor_of(arrays[f"{layer.name}.{leaf}"])
            for leaf in ("qweight", "scale", "zero", "bias")
            if f"{layer.name}.{leaf}" in arrays
        }
        replace_module(model, part, _layer(part, layer, leaves, dtype, backend))
    own = dict(model.named_parameters())
    for name, array in plain.items():
        own[name].copy_(tensor_of(array))
    return model.eval()


def _layer(
    part: torch.nn.Module,
    layer: QuantizedLayer,
    leaves: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    backend: str,
) -> QuantizedWeight:
    tensor = QuantizedTensor(leaves["qweight"], leaves["scale"], leaves.get("zero"), layer.scheme)
    if isinstance(part, TokenEmbedding):
        return QuantizedEmbedding(
            tensor, multiplier=part.scale, dtype=dtype, method=layer.method, backend=backend
        )
    return QuantizedLinear(tensor, leaves.get("bias"), method=layer.method, backend=backend)
