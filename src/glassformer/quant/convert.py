"""`prepare_model_for_quantization`, `quantize_model`, `dequantize_model`.

Every matrix of the manifest is quantized and, by default, the table that a tied head shares; a
`(path, module)` predicate selects among them. All three change the model they are given and return
it. There is nothing to fuse beforehand: these models have no layer that a neighbour absorbs.
"""

from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import nn

from glassformer.models.model import Model
from glassformer.nn.embedding import TiedHead, TokenEmbedding
from glassformer.nn.linear import Linear
from glassformer.quant.gptq import quantize_with_inputs
from glassformer.quant.layers import QuantizedEmbedding, QuantizedLinear, QuantizedWeight
from glassformer.quant.qat import (
    RoundedEmbedding,
    RoundedLinear,
    Watch,
    WatchedEmbedding,
    WatchedLinear,
    become,
)
from glassformer.quant.schemes import QuantizedTensor, quantize_tensor
from glassformer.spec.errors import InputError
from glassformer.spec.quantization import QuantSpec, layer_of, targets, untied
from glassformer.spec.schemes import Method, Scheme

Select = Callable[[str, nn.Module], bool]
#: A layer that can be quantized.
Plain: TypeAlias = Linear | TokenEmbedding
M = TypeVar("M", bound=Model)

WATCHED = (WatchedLinear, WatchedEmbedding)
ROUNDED = (RoundedLinear, RoundedEmbedding)
PREPARED = (*WATCHED, *ROUNDED)
#: By mode: the class of a prepared linear layer, and of a prepared table.
PREPARED_CLASSES = {"ptq": WATCHED, "qat": ROUNDED}


def plan(
    model: Model, spec: QuantSpec, *, select: Select | None = None
) -> dict[str, tuple[Plain, Scheme]]:
    """Return layers by path with the scheme each will have; the model is not changed."""
    found: dict[str, tuple[Plain, Scheme]] = {}
    for target in targets(model.spec, spec.tied):
        path = layer_of(target.name)
        module = model.get_submodule(path)
        if select is not None and not select(path, module):
            continue
        if type(module) not in (Linear, TokenEmbedding):
            raise InputError(
                f"a {type(module).__name__} cannot be quantized",
                where=path,
                hint="merge LoRA into the weights first",
            )
        assert isinstance(module, (Linear, TokenEmbedding))
        scheme = spec.scheme_of(target)
        if scheme is not None:
            found[path] = (module, scheme)
    if not found:
        raise InputError("no layer is left to quantize", hint="a predicate that says yes to some")
    return found


def prepare_model_for_quantization(
    model: M,
    spec: QuantSpec | None = None,
    *,
    mode: Literal["ptq", "qat"] = "ptq",
    select: Select | None = None,
) -> M:
    """Make layers watch their inputs (ptq) or compute with rounded weights (qat).

    After ptq, run batches through the model; after qat, train it. Then `quantize_model(model)`.
    """
    if mode not in ("ptq", "qat"):
        raise InputError(f"no mode '{mode}'", hint="ptq or qat")
    _check_plain(model)
    spec = spec or QuantSpec(method="gptq" if mode == "ptq" else "qat")
    if (spec.resolved_method == "qat") != (mode == "qat") and spec.method is not None:
        raise InputError(f"the method '{spec.method}' does not go with the mode '{mode}'")
    _untie(model, spec)
    for module, scheme in plan(model, spec, select=select).values():
        become(module, PREPARED_CLASSES[mode][isinstance(module, TokenEmbedding)])
        assert isinstance(module, PREPARED)
        if mode == "ptq":
            assert isinstance(module, WATCHED)
            module.watch = Watch(module.weight.shape[1], module.weight.device)
            module.method = spec.resolved_method
        module.scheme = scheme
    return model


@torch.no_grad()
def quantize_model(
    model: M,
    spec: QuantSpec | None = None,
    *,
    select: Select | None = None,
    backend: str = "auto",
) -> M:
    """Replace layers by quantized ones; a prepared model has its schemes already."""
    if any(isinstance(module, QuantizedWeight) for module in model.modules()):
        raise InputError("the model is quantized already", hint="dequantize_model goes back")
    prepared = [module for module in model.modules() if isinstance(module, PREPARED)]
    chosen: list[tuple[Plain, Scheme]]
    if prepared:
        if spec is not None or select is not None:
            raise InputError(
                "a prepared model has its schemes already", hint="quantize_model(model) alone"
            )
        chosen = [(module, module.scheme) for module in prepared]
    else:
        spec = spec or QuantSpec()
        if spec.resolved_method in ("gptq", "qat"):
            raise InputError(
                f"{spec.resolved_method} needs a prepared model",
                hint="prepare_model_for_quantization, then batches or training, then this",
            )
        _untie(model, spec)
        chosen = list(plan(model, spec, select=select).values())
    for module, scheme in chosen:
        method: Method = spec.resolved_method if spec is not None else _method_of(module)
        tensor = _quantized(module, scheme, method)
        replace_module(model, module, quantized_layer(module, tensor, method, backend))
    return model.eval()


def _quantized(module: Plain, scheme: Scheme, method: Method) -> QuantizedTensor:
    if method == "gptq":
        assert isinstance(module, WATCHED)
        moment_II = module.watch.moment_II
        return quantize_with_inputs(module.weight, scheme, moment_II=moment_II)
    return quantize_tensor(module.weight, scheme, least_squares=method == "mse")


def quantized_layer(
    module: Plain, tensor: QuantizedTensor, method: Method, backend: str
) -> QuantizedWeight:
    """Return the quantized layer that replaces a linear one or a table."""
    if isinstance(module, TokenEmbedding):
        return QuantizedEmbedding(
            tensor,
            multiplier=module.scale,
            dtype=module.weight.dtype,
            method=method,
            backend=backend,
        )
    assert isinstance(module, Linear)
    bias = None if module.bias is None else module.bias.detach()
    return QuantizedLinear(tensor, bias, method=method, backend=backend)


def _method_of(module: Plain) -> Method:
    if isinstance(module, ROUNDED):
        return "qat"
    assert isinstance(module, WATCHED)
    return module.method


@torch.no_grad()
def dequantize_model(model: M) -> M:
    """Replace quantized layers by float32 ones with exactly the same weights."""
    layers = list(quantized_layers(model))
    if not layers:
        raise InputError("the model is not quantized", hint="quantize_model makes one that is")
    for _, layer in layers:
        weights = layer.weights()
        if isinstance(layer, QuantizedEmbedding):
            plain: nn.Module = TokenEmbedding(*layer.shape, scaled=layer.multiplier is not None)
        else:
            assert isinstance(layer, QuantizedLinear)
            plain = Linear(layer.d_in, layer.d_out, bias=layer.bias is not None)
            if layer.bias is not None:
                plain.bias = nn.Parameter(layer.bias)
        plain.weight = nn.Parameter(weights)
        replace_module(model, layer, plain.eval())
    return model.float()


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield the quantized layers by path; a shared one is listed once."""
    for path, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            yield path, module


def use_backend(model: M, backend: str) -> M:
    """Run every quantized layer on this backend ("auto": the first that can)."""
    for _, layer in quantized_layers(model):
        layer.use(backend)
    return model


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace every reference to `old` by `new`: a shared table has two."""
    for holder in list(model.modules()):
        for name, child in list(holder.named_children()):
            if child is old:
                setattr(holder, name, new)
        for name, held in holder._modules.items():  # named_children lists a shared module once
            if held is old:
                holder._modules[name] = new


def _untie(model: Model, spec: QuantSpec) -> None:
    """Give a tied head its own copy of the table, and untie the spec."""
    if spec.tied != "untie":
        return
    model.spec = untied(model.spec)
    for name, head in list(model.heads.items()):
        embed = model.output_embedding()
        if isinstance(head, TiedHead) and isinstance(embed, TokenEmbedding):
            vocab, width = embed.weight.shape
            own = Linear(width, vocab, bias=head.bias is not None).to(embed.weight)
            own.weight = nn.Parameter(embed.weight.detach().clone())
            own.bias = head.bias
            model.heads[name] = own.eval()


def _check_plain(model: Model) -> None:
    for module in model.modules():
        if isinstance(module, QuantizedWeight):
            raise InputError(
                "the model is quantized already", hint="dequantize_model first, then prepare"
            )
        if isinstance(module, PREPARED):
            raise InputError("the model is prepared already", hint="quantize_model comes next")
