"""`quantize_in_turn`: GPTQ layer by layer, each calibrated after the quantized layers before it.

A layer is calibrated on the inputs that it will actually get. Its weights are first moved so that
their products come nearest to the float model's, which compensates for earlier errors. Layers that
share an input (queries, keys and values) are quantized together.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from glassformer.models.model import Model
from glassformer.nn.block import TransformerBlock
from glassformer.nn.embedding import TokenEmbedding
from glassformer.nn.linear import Linear
from glassformer.quant.convert import (
    WATCHED,
    Plain,
    Select,
    prepare_model_for_quantization,
    quantized_layer,
    replace_module,
)
from glassformer.quant.gptq import making_up, quantize_with_inputs
from glassformer.quant.qat import Watch, WatchedEmbedding, WatchedLinear, become
from glassformer.quant.schemes import QuantizedTensor, dequantize
from glassformer.spec.errors import InputError
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Scheme

# M rows, O outputs, I inputs

M = TypeVar("M", bound=Model)
Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Reached(Exception):
    """Raised to end a forward pass early."""


@torch.no_grad()
def quantize_in_turn(
    model: M,
    batches: Iterable[Any],
    spec: QuantSpec | None = None,
    *,
    select: Select | None = None,
    backend: str = "auto",
) -> M:
    """Replace layers by quantized ones that change the logits on batches like these least."""
    batches = list(batches)
    if not batches:
        raise InputError("nothing to calibrate on", hint="give at least one batch")
    spec = spec or QuantSpec(method="gptq")
    if spec.resolved_method != "gptq":
        raise InputError(
            f"the method '{spec.resolved_method}' does not calibrate", hint="gptq does"
        )
    full = copy.deepcopy(model).eval()
    prepare_model_for_quantization(model, spec, select=select).eval()
    watched = (module for module in model.modules() if isinstance(module, WATCHED))
    schemes: dict[Plain, Scheme] = {module: module.scheme for module in watched}
    found: dict[Plain, QuantizedTensor] = {}

    def settle(module: Plain, weight_OI: Tensor, moment_II: Tensor) -> None:
        found[module] = quantize_with_inputs(weight_OI, schemes[module], moment_II=moment_II)
        module.weight.copy_(dequantize(found[module]))

    for batch in batches:
        model(batch)
    blocks = [path for path, part in full.named_modules() if isinstance(part, TransformerBlock)]
    inside = {part for path in blocks for part in model.get_submodule(path).modules()}
    inner, outer = set(), []
    for module in list(model.modules()):
        if isinstance(module, WatchedEmbedding):  # before the rest, which it feeds
            settle(module, module.weight, module.watch.moment_II)
            become(module, TokenEmbedding)
        elif isinstance(module, WatchedLinear) and module in inside:
            become(module, Linear)
            inner.add(module)
        elif isinstance(module, WatchedLinear):
            outer.append(module)
    for path in blocks:
        sides = (model.get_submodule(path), full.get_submodule(path))
        layers = [name for name, part in sides[0].named_modules() if part in inner]
        if layers:
            _settle_block((model, full), sides, layers, batches, settle)
    for module in outer:
        module.watch = Watch(module.d_in, module.weight.device)
    for batch in batches if outer else ():
        model(batch)
    for module in outer:
        settle(module, module.weight, module.watch.moment_II)
    for module, tensor in found.items():
        replace_module(model, module, quantized_layer(module, tensor, "gptq", backend))
    return model.eval()


def _settle_block(
    models: tuple[Model, Model],
    sides: tuple[nn.Module, nn.Module],
    layers: Sequence[str],
    batches: Sequence[Any],
    settle: Callable[[Plain, Tensor, Tensor], None],
) -> None:
    """Quantize the layers of one block in turn; `sides`: the block being rounded, the float one."""
    calls = [
        [_reached(model, block, batch) for batch in batches]
        for model, block in zip(models, sides, strict=True)
    ]
    for names in _stages(sides[0], layers, calls[0][0]):
        first = sides[0].get_submodule(names[0])
        assert isinstance(first, Linear)
        width = first.d_in
        moment_II = torch.zeros(width, width, device=first.weight.device)
        cross_II = torch.zeros_like(moment_II)
        for pair in zip(*calls, strict=True):
            rows = []
            for block, (args, settings) in zip(sides, pair, strict=True):
                with _inputs_of(block, names[:1]) as seen:
                    block(*args, **settings)
                rows.append(seen[0][1].reshape(-1, width).float())
            got_MI, due_MI = rows
            moment_II.addmm_(got_MI.T, got_MI)
            cross_II.addmm_(due_MI.T, got_MI)
        for name in names:
            layer = sides[0].get_submodule(name)
            assert isinstance(layer, Linear)
            weight_OI = making_up(layer.weight, moment_II=moment_II, cross_II=cross_II)
            settle(layer, weight_OI, moment_II)


def _stages(block: nn.Module, layers: Sequence[str], call: Call) -> list[list[str]]:
    """Group layers that share an input, in the order they are called."""
    with _inputs_of(block, layers) as seen:
        block(*call[0], **call[1])
    stages: list[list[str]] = []
    last: Tensor | None = None
    for name, x in seen:
        if x is not last:
            stages.append([])
        stages[-1].append(name)
        last = x
    return stages


@contextmanager
def _inputs_of(block: nn.Module, layers: Sequence[str]) -> Iterator[list[tuple[str, Tensor]]]:
    """Collect the inputs of these layers, in the order they are called."""
    seen: list[tuple[str, Tensor]] = []

    def watcher(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, given: seen.append((name, given[0]))

    hooks = [block.get_submodule(n).register_forward_pre_hook(watcher(n)) for n in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _reached(model: Model, block: nn.Module, batch: Any) -> Call:
    """Return the arguments of the block's call; the forward pass stops there."""
    calls: list[Call] = []

    def stop(_: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]) -> None:
        calls.append((args, settings))
        raise _Reached

    hook = block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(batch)
    except _Reached:
        pass
    finally:
        hook.remove()
    return calls[0]
