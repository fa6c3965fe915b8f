"""`prepare_model_for_quantization`, `quantize_model`, `dequantize_model`, `quantize_in_turn`.

Every matrix of the manifest is quantized and, by default, the table that a tied head shares; a
`(path, module)` predicate selects among them. All change the model they are given, bare or in an
adapter, and return it. There is nothing to fuse beforehand: these models have no layer that a
neighbour absorbs.

In turn, a layer is calibrated on the inputs that it will actually get: after the quantized layers
before it. Its weights are first moved so that their products come nearest to the float model, which
compensates for earlier errors. Layers that share an input (queries, keys and values) are quantized
together.
"""

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from glassformer.models.model import Holder, Model, model_of
from glassformer.nn.block import TransformerBlock
from glassformer.nn.embedding import TokenEmbedding
from glassformer.nn.heads import TiedHead
from glassformer.nn.linear import Linear
from glassformer.quant.layers import (
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedWeight,
    RoundedEmbedding,
    RoundedLinear,
    Watch,
    WatchedEmbedding,
    WatchedLinear,
    become,
    real_rows,
)
from glassformer.quant.schemes import (
    QuantizedTensor,
    dequantize,
    making_up,
    quantize_tensor,
    quantize_with_inputs,
)
from glassformer.spec.errors import InputError
from glassformer.spec.quantization import QuantSpec, layer_of, targets, untied
from glassformer.spec.schemes import Method, RecordedMethod, Scheme, Search

Select = Callable[[str, nn.Module], bool]
#: A layer that can be quantized.
Plain: TypeAlias = Linear | TokenEmbedding
M = TypeVar("M", bound=Model | Holder)
#: What is reported of long work: what begins, how much is done, how much there is.
Progress = Callable[[str, int, int], None]

WATCHED = (WatchedLinear, WatchedEmbedding)
ROUNDED = (RoundedLinear, RoundedEmbedding)
PREPARED = (*WATCHED, *ROUNDED)
#: By mode: the class of a prepared linear layer, and of a prepared table.
PREPARED_CLASSES = {"ptq": WATCHED, "qat": ROUNDED}


def plan(
    model: Model, spec: QuantSpec, *, select: Select | None = None
) -> dict[str, tuple[Plain, Scheme]]:
    """Return layers by path with the scheme each will have; the model is not changed.

    With a mean number of bits, layers that are not named as wider have the fewest.
    """
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
    bare = model_of(model)
    _check_plain(bare)
    spec = spec or QuantSpec(method="gptq" if mode == "ptq" else "qat")
    _check_chosen(spec)
    if (spec.resolved_method == "qat") != (mode == "qat") and spec.method is not None:
        raise InputError(f"the method '{spec.method}' does not go with the mode '{mode}'")
    if spec.tied == "untie":
        untie(bare)
    for module, scheme in plan(bare, spec, select=select).values():
        become(module, PREPARED_CLASSES[mode][isinstance(module, TokenEmbedding)])
        assert isinstance(module, PREPARED)
        if mode == "ptq":
            assert isinstance(module, WATCHED)
            module.watch = Watch(module.weight.shape[1], module.weight.device)
            module.method = spec.resolved_method
        module.scheme = scheme
    if mode == "ptq":
        bare.register_forward_pre_hook(_tell_watches)
    return model


def _tell_watches(model: nn.Module, given: tuple[Any, ...]) -> None:
    """Tell the watches what the model is being given, so that padding is not counted."""
    assert isinstance(model, Model)
    reading = model.inputs(given[0]) if given else None
    for module in model.modules():
        if isinstance(module, WATCHED):
            module.watch.reading = reading


def _forget_watches(model: Model) -> None:
    for number, hook in list(model._forward_pre_hooks.items()):
        if hook is _tell_watches:
            del model._forward_pre_hooks[number]


@torch.no_grad()
def quantize_model(
    model: M,
    spec: QuantSpec | None = None,
    *,
    select: Select | None = None,
    backend: str = "auto",
    inputs: Mapping[str, Tensor] | None = None,
) -> M:
    """Replace layers by quantized ones; a prepared model has its schemes already.

    `inputs`: the root mean square of each input of a layer, by path. Grids of least squared error
    weigh errors by them.
    """
    bare = model_of(model)
    if any(isinstance(module, QuantizedWeight) for module in bare.modules()):
        raise InputError("the model is quantized already", hint="dequantize_model goes back")
    prepared = [module for module in bare.modules() if isinstance(module, PREPARED)]
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
        _check_chosen(spec)
        if spec.tied == "untie":
            untie(bare)
        chosen = list(plan(bare, spec, select=select).values())
    paths = {module: path for path, module in bare.named_modules()}
    for module, scheme in chosen:
        method: Method = spec.resolved_method if spec is not None else _method_of(module)
        inputs_I = None if inputs is None else inputs.get(paths[module])
        tensor = _quantized(module, scheme, method, inputs_I)
        layer = quantized_layer(module, tensor, method, backend, head=_is_head(bare, module))
        replace_module(bare, module, layer)
    _forget_watches(bare)
    bare.eval()
    return model


def _quantized(
    module: Plain, scheme: Scheme, method: Method, inputs_I: Tensor | None
) -> QuantizedTensor:
    if method == "gptq":
        assert isinstance(module, WATCHED)
        moment_II = module.watch.moment_II
        return quantize_with_inputs(module.weight, scheme, moment_II=moment_II)
    # Training with rounded weights has rounded them over their full range.
    search: Search = "absmax" if method == "qat" else method
    return quantize_tensor(module.weight, scheme, method=search, inputs_I=inputs_I)


def _is_head(model: Model, module: nn.Module) -> bool:
    return any(module is head for head in model.heads.values())


def quantized_layer(
    module: nn.Module,
    tensor: QuantizedTensor,
    method: RecordedMethod,
    backend: str,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    head: bool = False,
) -> QuantizedWeight:
    """Return the quantized layer that replaces a linear one, a head or a table.

    `bias` and `dtype`, a table's precision, are the module's own where they are not given.
    """
    if isinstance(module, TokenEmbedding):
        return QuantizedEmbedding(
            tensor,
            multiplier=module.scale,
            dtype=dtype or module.weight.dtype,
            method=method,
            backend=backend,
        )
    assert isinstance(module, Linear)
    if bias is None and module.bias is not None:
        bias = module.bias.detach()
    return QuantizedLinear(tensor, bias, method=method, backend=backend, head=head)


def _method_of(module: Plain) -> Method:
    if isinstance(module, ROUNDED):
        return "qat"
    assert isinstance(module, WATCHED)
    return module.method


@torch.no_grad()
def dequantize_model(model: M) -> M:
    """Replace quantized layers by float32 ones with exactly the same weights."""
    bare = model_of(model)
    layers = list(quantized_layers(bare))
    if not layers:
        raise InputError(
            "the model is not quantized", hint="{glass quantize|gf.quantize} makes one that is"
        )
    for _, layer in layers:
        weights = layer.weights()
        if isinstance(layer, QuantizedEmbedding):
            plain: nn.Module = TokenEmbedding(*layer.shape, scale=layer.multiplier)
        else:
            assert isinstance(layer, QuantizedLinear)
            plain = Linear(layer.d_in, layer.d_out, bias=layer.bias is not None)
            if layer.bias is not None:
                plain.bias = nn.Parameter(layer.bias)
        plain.weight = nn.Parameter(weights)
        replace_module(bare, layer, plain.eval())
    bare.float()
    return model


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield the quantized layers by path; a shared one is listed once."""
    for path, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            yield path, module


def use_backend(model: M, backend: str) -> M:
    """Run every quantized layer on this backend ("auto": the first that can)."""
    for _, layer in quantized_layers(model_of(model)):
        layer.use(backend)
    return model


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace every reference to `old` by `new`: a shared table has two."""
    waiting, seen = [model], {model}
    while waiting:  # by hand: model.modules() takes many times as long, once for every layer
        holder = waiting.pop()
        for name, held in holder._modules.items():
            if held is old:
                holder._modules[name] = new
            elif held is not None and held not in seen:
                seen.add(held)
                waiting.append(held)


def untie(model: Model) -> None:
    """Give a tied head its own copy of the table, and untie the spec."""
    model.spec = untied(model.spec)
    for name, head in list(model.heads.items()):
        embed = model.output_embedding()
        if isinstance(head, TiedHead) and isinstance(embed, TokenEmbedding):
            vocab, width = embed.weight.shape
            own = Linear(width, vocab, bias=head.bias is not None).to(embed.weight)
            own.weight = nn.Parameter(embed.weight.detach().clone())
            own.bias = head.bias
            model.heads[name] = own.eval()


def _check_chosen(spec: QuantSpec) -> None:
    """Refuse a mean number of bits for which no layers have been chosen."""
    if spec.mean_bits is not None and not spec.wider:
        raise InputError(
            f"a mean of {spec.mean_bits:g} bits is shared out by what layers do to a text",
            hint="calibrate on some batches (quant.smooth.quantize_on), or use 4 or 8 bits",
        )


def _check_plain(model: Model) -> None:
    for module in model.modules():
        if isinstance(module, QuantizedWeight):
            raise InputError(
                "the model is quantized already", hint="dequantize_model first, then prepare"
            )
        if isinstance(module, PREPARED):
            raise InputError("the model is prepared already", hint="quantize_model comes next")


# --- GPTQ layer by layer, each calibrated after the quantized layers before it -------------------

# M rows, O outputs, I inputs

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
    progress: Progress | None = None,
) -> M:
    """Replace layers by quantized ones that change the logits on batches like these least."""
    report = progress or _report_nothing
    batches = list(batches)
    if not batches:
        raise InputError("nothing to calibrate on", hint="give at least one batch")
    spec = spec or QuantSpec(method="gptq")
    if spec.resolved_method != "gptq":
        raise InputError(
            f"the method '{spec.resolved_method}' does not calibrate", hint="gptq does"
        )
    bare = model_of(model)
    full = copy.deepcopy(bare).eval()
    prepare_model_for_quantization(bare, spec, select=select).eval()
    watched = (module for module in bare.modules() if isinstance(module, WATCHED))
    schemes: dict[Plain, Scheme] = {module: module.scheme for module in watched}
    found: dict[Plain, QuantizedTensor] = {}

    def settle(module: Plain, weight_OI: Tensor, moment_II: Tensor) -> None:
        found[module] = quantize_with_inputs(weight_OI, schemes[module], moment_II=moment_II)
        module.weight.copy_(dequantize(found[module]))

    blocks = [path for path, part in full.named_modules() if isinstance(part, TransformerBlock)]
    inside = {part for path in blocks for part in bare.get_submodule(path).modules()}
    inner = {part for part in bare.modules() if isinstance(part, WatchedLinear) and part in inside}
    for watched_later in inner:  # when their turn comes
        become(watched_later, Linear)
    beside = _given_beside(bare, blocks, batches)
    outer = []
    for module in list(bare.modules()):
        if isinstance(module, WatchedEmbedding):  # before the rest, which it feeds
            report("GPTQ: the table", 0, len(blocks))
            settle(module, module.weight, module.watch.moment_II)
            become(module, TokenEmbedding)
        elif isinstance(module, WatchedLinear):
            outer.append(module)
    calls: Calls | None = None
    for number, path in enumerate(blocks):
        sides = (bare.get_submodule(path), full.get_submodule(path))
        layers = [name for name, part in sides[0].named_modules() if part in inner]
        report(f"GPTQ: {path}", number, len(blocks))
        if calls is None:
            calls = _calls((bare, full), sides, batches)
        outputs = _settle_block(bare, sides, layers, batches, calls, settle)
        after = None if number + 1 == len(blocks) else beside.get(blocks[number + 1])
        calls = None if after is None else _next_calls(sides[0], calls[0], outputs, after)
    if outer:
        report("GPTQ: heads", len(blocks), len(blocks))
    for module in outer:
        module.watch = Watch(module.d_in, module.weight.device)
    for batch in batches if outer else ():
        bare(batch)
    for module in outer:
        settle(module, module.weight, module.watch.moment_II)
    for module, tensor in found.items():
        layer = quantized_layer(module, tensor, "gptq", backend, head=_is_head(bare, module))
        replace_module(bare, module, layer)
    _forget_watches(bare)
    bare.eval()
    return model


#: Widths and outputs of the matrices that GPTQ is timed on.
TIMED_INPUTS, TIMED_OUTPUTS = 512, (32, 160)
#: Passes over a block: the float one, and those of the rounded one that stop at its layers.
PASSES = 3


@torch.no_grad()
def gptq_seconds(
    model: Model | Holder,
    batches: Sequence[Any],
    spec: QuantSpec,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return about how long `quantize_in_turn` will take here, from what small pieces take.

    GPTQ of a matrix of I inputs and O outputs takes a I^3 + b O I^2; a and b are timed on random
    matrices of its scheme. One pass over one batch is timed too.
    """
    bare = model_of(model)
    total = PASSES * len(batches) * _least(partial(bare, batches[0]), 2, clock)
    rates: dict[tuple[Scheme, int], tuple[float, float]] = {}
    alike = replace(spec, tied="share") if spec.tied == "untie" else spec
    for module, scheme in plan(bare, alike).values():
        outputs, inputs = module.weight.shape
        width = min(inputs, TIMED_INPUTS)
        if (scheme, width) not in rates:
            rates[scheme, width] = _gptq_rates(scheme, width, module.weight.device, clock)
        cubic, square = rates[scheme, width]
        total += cubic * inputs**3 + square * outputs * inputs**2
    return total


def _least(run: Callable[[], object], times: int, clock: Callable[[], float]) -> float:
    """Return the least seconds of several runs: what else the machine does counts least there."""
    taken = []
    for _ in range(times):
        begun = clock()
        run()
        taken.append(clock() - begun)
    return min(taken)


def _gptq_rates(
    scheme: Scheme, inputs: int, device: torch.device, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return a and b of `gptq_seconds`, timed on two matrices."""
    draw = torch.Generator().manual_seed(0)
    x_MI = torch.randn(2 * inputs, inputs, generator=draw).to(device)
    moment_II = x_MI.T @ x_MI
    taken = []
    for outputs in TIMED_OUTPUTS:
        weight_OI = torch.randn(outputs, inputs, generator=draw).to(device)

        def solve(weight_OI: Tensor = weight_OI) -> None:
            moved_OI = making_up(weight_OI, moment_II=moment_II, cross_II=moment_II)
            quantize_with_inputs(moved_OI, scheme.resolve(inputs), moment_II=moment_II)

        taken.append(_least(solve, 3, clock))
    few, many = TIMED_OUTPUTS
    slope = max(taken[1] - taken[0], 0.0) / (many - few)
    fixed = max(taken[0] - slope * few, 0.0)
    return fixed / inputs**3, slope / inputs**2


def _report_nothing(what: str, done: int, total: int) -> None:
    """Take a report of progress that nobody reads."""


Calls = list[list[Call]]  # by side (being rounded, float), by batch
Pair = tuple[Model, Model]
Parts = tuple[nn.Module, nn.Module]


def _calls(models: Pair, sides: Parts, batches: Sequence[Any]) -> Calls:
    """Return the arguments of each side's calls of a block, one per batch, from the beginning."""
    return [
        [_reached(model, block, batch) for batch in batches]
        for model, block in zip(models, sides, strict=True)
    ]


def _given_beside(
    model: Model, blocks: Sequence[str], batches: Sequence[Any]
) -> dict[str, list[Call]]:
    """Run the model on all batches; return what blocks are given beside the residual stream.

    Only blocks that read nothing but the output of the block before are listed, in a model where
    the rest does not depend on weights: one without an encoder.
    """
    found: dict[str, list[Call]] = {path: [] for path in blocks}
    last: list[Tensor] = []

    def enter(path: str) -> Callable[..., None]:
        def see(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            if last and args[0] is last[0]:
                found[path].append((args[1:], options))

        return see

    def leave(_: nn.Module, given: Any, out: Tensor) -> None:
        last[:] = [out]

    hooks = []
    for path in blocks:
        block = model.get_submodule(path)
        hooks.append(block.register_forward_pre_hook(enter(path), with_kwargs=True))
        hooks.append(block.register_forward_hook(leave))
    try:
        for batch in batches:
            last.clear()
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    if model.spec.encoder is not None:
        return {}
    return {path: calls for path, calls in found.items() if len(calls) == len(batches)}


def _next_calls(
    rounded: nn.Module, calls: Sequence[Call], outputs: Sequence[Tensor], beside: Sequence[Call]
) -> Calls:
    """Return each side's calls of the block after this one; `outputs`: those of the float side."""
    made = [rounded(*args, **settings) for args, settings in calls]
    return [
        [((x, *more), options) for x, (more, options) in zip(side, beside, strict=True)]
        for side in (made, outputs)
    ]


def _settle_block(
    model: Model,
    sides: Parts,
    layers: Sequence[str],
    batches: Sequence[Any],
    calls: Calls,
    settle: Callable[[Plain, Tensor, Tensor], None],
) -> list[Tensor]:
    """Quantize the layers of one block in turn; `sides`: the block being rounded, the float one.

    Return what the float block makes of each batch.
    """
    rounded, plain = sides
    stages = _stages(rounded, layers, calls[0][0])
    due: list[list[Tensor]] = []  # what the float block's layers are given, by batch and stage
    outputs = []
    for call in calls[1]:
        seen, output = _inputs_of(plain, [names[0] for names in stages], call)
        outputs.append(output)
        due.append([x for _, x in seen])
    for number, names in enumerate(stages):
        first = rounded.get_submodule(names[0])
        assert isinstance(first, Linear)
        width = first.d_in
        moment_II = torch.zeros(width, width, device=first.weight.device)
        cross_II = torch.zeros_like(moment_II)
        for batch, call, wanted in zip(batches, calls[0], due, strict=True):
            reading = model.inputs(batch)
            got_MI = real_rows(_given(rounded, names[0], call), reading).float()
            due_MI = real_rows(wanted[number], reading).float()
            moment_II.addmm_(got_MI.T, got_MI)
            cross_II.addmm_(due_MI.T, got_MI)
        for name in names:
            layer = rounded.get_submodule(name)
            assert isinstance(layer, Linear)
            weight_OI = making_up(layer.weight, moment_II=moment_II, cross_II=cross_II)
            settle(layer, weight_OI, moment_II)
    return outputs


def _given(block: nn.Module, layer: str, call: Call) -> Tensor:
    """Return what a layer of the block is given; the block's forward pass stops there."""
    found: list[Tensor] = []

    def stop(_: str, x: Tensor) -> None:
        found.append(x)
        raise _Reached

    with contextlib.suppress(_Reached), seen_inputs({layer: block.get_submodule(layer)}, stop):
        block(*call[0], **call[1])
    return found[0]


def _stages(block: nn.Module, layers: Sequence[str], call: Call) -> list[list[str]]:
    """Group layers that share an input, in the order they are called."""
    stages: list[list[str]] = []
    last: Tensor | None = None
    for name, x in _inputs_of(block, layers, call)[0]:
        if x is not last:
            stages.append([])
        stages[-1].append(name)
        last = x
    return stages


def _inputs_of(
    block: nn.Module, layers: Sequence[str], call: Call
) -> tuple[list[tuple[str, Tensor]], Tensor]:
    """Return the inputs of these layers, in the order they are called, and the block's output."""
    seen: list[tuple[str, Tensor]] = []
    with seen_inputs({n: block.get_submodule(n) for n in layers}, lambda *one: seen.append(one)):
        return seen, block(*call[0], **call[1])


@contextlib.contextmanager
def seen_inputs(
    layers: Mapping[str, nn.Module], see: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call `see` with the path and the input of each of these layers, whenever one is called."""

    def watcher(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, given: see(path, given[0])

    hooks = [part.register_forward_pre_hook(watcher(path)) for path, part in layers.items()]
    try:
        yield
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
    with contextlib.suppress(_Reached), hook:
        model(batch)
    return calls[0]
