"""Which layers get 8 bits, where a model may have some number of bits between 4 and 8 on average.

Rounding a layer's weights by dW moves its output y by dy = dW x. To second order the divergence of
a sequence's predictions is half of E (g . dy)^2, where g is the gradient, at all of y, of the
negative log likelihood of tokens that the model itself samples (its Fisher information). A backward
pass gives a sample of that for every layer and sequence. Layers then get 8 bits in the order of
what a weight of them is worth: the divergence over the number of weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.nn.linear import Linear
from glassformer.quant.convert import Select, plan
from glassformer.quant.layers import real_rows
from glassformer.quant.schemes import QuantizedTensor, dequantize, quantize_tensor
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import count_parameters
from glassformer.spec.model import ModelSpec
from glassformer.spec.quantization import QuantSpec, layer_of, targets
from glassformer.spec.schemes import Int4, Int8, Scheme, scheme_bytes

# B batch, M rows, O outputs, I inputs, V vocab

#: Samples of (g . dy)^2, of which a sequence has several where there are fewer sequences.
SAMPLES = 32
#: Tokens of a sequence that are read together: longer ones are cut, which gives more samples.
LENGTH = 128


#: The share of float32's bytes that 4 bits should come to, and the share of weights from which a
#: table decides a model's bytes.
AIM, DOMINATES = 0.17, 0.5


def small_enough(model: ModelSpec, spec: QuantSpec) -> QuantSpec:
    """Return the spec, with 4 bits for a table that makes a model of 4 bits too large with 8.

    Only for a table that holds most of the weights, and where no scheme is given for it. The bytes
    that this leaves go to the layers that lose most: a mean number of bits, as many as fit.
    """
    if not isinstance(spec.scheme, Int4) or spec.head is not None or spec.mean_bits is not None:
        return spec
    every = targets(model, spec.tied)
    weights = sum(math.prod(p.shape) for p in every)
    tables = [p for p in every if p.role in ("head", "embedding")]
    narrow = replace(spec, head=spec.scheme)
    small = sum(math.prod(p.shape) for p in tables) < DOMINATES * weights
    if small or any(spec.scheme.lacks(p.shape[-1]) for p in tables):
        return spec
    aim = AIM * 4 * count_parameters(model)
    if stored_bytes(model, spec) <= aim or stored_bytes(model, narrow) > aim:
        return spec
    bits = bits_within(model, narrow, aim)
    return replace(narrow, mean_bits=bits if Int4.bits < bits < Int8.bits else None)


def stored_bytes(model: ModelSpec, spec: QuantSpec) -> int:
    """Return the bytes of all tensors of a quantized model; what is not quantized is float32."""
    size = 4 * count_parameters(model)
    for target in targets(model, spec.tied):
        scheme = spec.scheme_of(target)
        if scheme is not None:
            size += scheme_bytes(scheme, target.shape) - 4 * math.prod(target.shape)
    return size


def bits_within(model: ModelSpec, spec: QuantSpec, size: float) -> float:
    """Return the mean bits of layers with which a model has at most these bytes, to a hundredth."""
    inner = tuple(
        layer_of(p.name) for p in targets(model, spec.tied) if p.role not in ("head", "embedding")
    )
    least, most = (stored_bytes(model, replace(spec, wider=wide)) for wide in ((), inner))
    share = (size - least) / (most - least)
    return math.floor(100 * (Int4.bits + (Int8.bits - Int4.bits) * share)) / 100


@dataclass(frozen=True, slots=True)
class Harm:
    """What rounding one layer alone does to the predictions, in nats each; its weights."""

    nats: float
    weights: int


def wider_layers(
    model: Model, batches: Sequence[Any], spec: QuantSpec, *, select: Select | None = None
) -> tuple[str, ...]:
    """Return the layers that get 8 bits, so that the mean of all stays within `spec.mean_bits`."""
    assert spec.mean_bits is not None
    roles = {layer_of(target.name): target.role for target in targets(model.spec, spec.tied)}
    inner = {
        path: (module.weight.numel(), scheme)
        for path, (module, scheme) in plan(model, spec, select=select).items()
        if roles[path] not in ("head", "embedding")
    }
    total = sum(weights for weights, _ in inner.values())
    least = sum(scheme.bits * weights for weights, scheme in inner.values()) / max(1, total)
    if least > spec.mean_bits:  # the group does not divide the inputs of some, which have 8
        raise InputError(
            f"a mean of {spec.mean_bits:g} bits is less than the {least:.2f} of this model, where "
            "layers whose inputs the group does not divide have 8",
            hint=f"{math.ceil(10 * least) / 10:g} bits or more, or 4",
        )
    narrow = {path: scheme for path, (_, scheme) in inner.items() if scheme.bits < Int8.bits}
    left = sum((spec.mean_bits - scheme.bits) * weights for weights, scheme in inner.values())
    wider = within(harms(model, batches, narrow), left, more=Int8.bits - spec.scheme.bits)
    if not wider:
        other = "layer" if len(narrow) == len(inner) else "other layer"
        raise InputError(
            f"a mean of {spec.mean_bits:g} bits leaves no {other} of this model 8 bits",
            hint="a larger mean, or 4 bits",
        )
    return wider


def within(found: Mapping[str, Harm], left: float, *, more: int) -> tuple[str, ...]:
    """Return the layers most worth `more` bits per weight, as long as these fit what is left."""
    wider = []
    for path, harm in sorted(found.items(), key=lambda item: -item[1].nats / item[1].weights):
        if more * harm.weights <= left:
            wider.append(path)
            left -= more * harm.weights
    return tuple(wider)


def harms(model: Model, batches: Sequence[Any], schemes: Mapping[str, Scheme]) -> dict[str, Harm]:
    """Return what rounding each of these layers alone does to the predictions on the batches.

    Rounding is to the grid over the full range: it tells layers apart as a searched one does.
    """
    layers = {path: model.get_submodule(path) for path in schemes}
    squares = dict.fromkeys(layers, 0.0)

    def count(path: str, square: float) -> None:
        squares[path] += square

    hooks, sizes = [], {}
    for path, layer in layers.items():
        assert isinstance(layer, Linear)
        sizes[path] = layer.weight.numel()
        tensor = quantize_tensor(layer.weight, schemes[path])
        hooks.append(layer.register_forward_hook(_watcher(path, tensor, count)))
    trained = [p for p in model.parameters() if p.requires_grad]
    model.eval().requires_grad_(False)  # gradients at outputs, none of weights
    few = _few(model, batches)
    draws = -(-SAMPLES // sum(len(inputs.tokens_BT) for inputs in few))
    generator = torch.Generator().manual_seed(0)
    try:
        predictions = sum(_backward(model, inputs, draws, generator) for inputs in few)
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in trained:
            parameter.requires_grad_(True)
    return {path: Harm(0.5 * squares[path] / predictions, sizes[path]) for path in layers}


def _few(model: Model, batches: Sequence[Any]) -> list[Inputs]:
    """Return batches at even distances, as many as have the samples wanted."""
    if not batches:
        raise InputError("nothing to calibrate on", hint="give at least one batch")
    rows = len(_cut(model, batches[0]).tokens_BT)
    count = min(len(batches), -(-SAMPLES // rows))
    edges = [len(batches) * i // count for i in range(count + 1)]
    return [_cut(model, batches[start]) for start, _ in pairwise(edges)]


def _cut(model: Model, batch: Any) -> Inputs:
    """Return a batch's sequences, long ones cut where each position has a prediction of its own."""
    inputs = model.inputs(batch)
    pieces = inputs.tokens_BT.shape[1] // LENGTH
    if pieces < 2 or model.spec.encoder is not None or model.spec.head_names() != ("next",):
        return inputs
    parts = (inputs.tokens_BT, inputs.valid_BT, inputs.segments_BT)
    cut = [None if part is None else part[:, : pieces * LENGTH] for part in parts]
    tokens, valid, segments = (None if part is None else part.reshape(-1, LENGTH) for part in cut)
    assert tokens is not None
    if valid is not None:  # pieces that are padding alone have nothing to predict
        some = valid.any(1)
        tokens, valid = tokens[some], valid[some]
        segments = None if segments is None else segments[some]
    return Inputs(tokens, valid, segments)


def _watcher(
    path: str, tensor: QuantizedTensor, count: Callable[[str, float], None]
) -> Callable[..., Tensor]:
    """Return a hook that counts (g . dW x)^2, summed over a sequence before it is squared.

    Rows that have no sequences any more, such as an expert's, are squared one by one.
    """

    def see(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        assert isinstance(layer, Linear)
        x, weight_OI = given[0].detach(), layer.weight

        def add(gradient: Tensor) -> None:
            moved_OI = dequantize(tensor) - weight_OI
            product_B = ((gradient @ moved_OI) * x).flatten(1).sum(-1)
            count(path, float(product_B.double().square().sum()))

        out = out if out.requires_grad else out.requires_grad_()
        out.register_hook(add)
        return out

    return see


def _backward(model: Model, inputs: Inputs, draws: int, generator: torch.Generator) -> int:
    """Send gradients of sampled predictions back; return how many predictions were sampled."""
    count = 0
    with torch.enable_grad():
        every = [
            real_rows(logits, inputs).float().log_softmax(-1) for logits in model(inputs).values()
        ]
        for draw in range(draws):
            losses = []
            for logp_MV in every:
                chances_MV = logp_MV.detach().exp().cpu()
                picked_M1 = torch.multinomial(chances_MV, 1, generator=generator)
                losses.append(-logp_MV.gather(-1, picked_M1.to(logp_MV.device)).sum())
                count += len(logp_MV)
            torch.stack(losses).sum().backward(retain_graph=draw + 1 < draws)
    return count
