"""Moving the outliers of activations into the weights, before a model is quantized.

A few channels of a trained model's activations are tens of times larger than the others (`outliers`
names them). Rounding the weights that meet them, or the activations beside them, is what costs a
real model its quality. `smooth` divides such channels by a power of two where they are made, and
multiplies the weights that read them by it:

    norm -> the layers that read it        norm.weight / s,  norm.bias / s,  W[:, j] * s_j
    values -> output projection            v_proj rows / s,  o_proj[:, j] * s_j
    up -> down, of a gated feed-forward    up_proj rows / s, down_proj[:, j] * s_j

Powers of two make that exact: the smoothed float model computes the same bits, and each link is
tried on real activations before it is used, so that a block of another kind is left as it is. How
much of its size a channel loses (s = size ** exponent) is chosen for each link by the error of the
rounded products on calibration rows; 0, nothing, is one of the choices.
(SmoothQuant, Xiao et al., 2022; AWQ, Lin et al., 2023.)
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.models.inputs import Inputs
from glassformer.models.model import Holder, Model, model_of
from glassformer.nn.block import TransformerBlock
from glassformer.nn.heads import TiedHead
from glassformer.nn.linear import Linear
from glassformer.quant.convert import (
    M,
    Progress,
    Select,
    plan,
    quantize_in_turn,
    quantize_model,
    seen_inputs,
    untie,
)
from glassformer.quant.layers import QuantizedWeight, real_rows
from glassformer.quant.mixed import small_enough, wider_layers
from glassformer.quant.schemes import codec, dequantize, quantize_tensor
from glassformer.spec import program as kinds
from glassformer.spec.errors import InputError
from glassformer.spec.program import program
from glassformer.spec.quantization import QuantSpec
from glassformer.spec.schemes import Scheme, Search

# B batch, T length, M rows, O outputs, I inputs, D d_model, G groups, K key-value heads, H d_head

#: How much of its size a channel may lose.
EXPONENTS = (0.0, 0.2, 0.35, 0.5, 0.65, 0.8)
#: A channel changes by no more than this factor, either way.
MOST = 2.0**10
#: Rows of each layer's inputs that are kept to choose by.
KEPT = 192
#: Outputs of each layer that its rounding is tried on.
OUTPUTS = 128
#: A channel is an outlier if its root mean square is this many times the median channel's.
OUTLIER = 8.0
#: A link is scaled if the error falls below this share of what it was.
WORTH = 0.97
#: Batches that smoothing looks at, at most.
SMOOTHING = 4
#: Tokens that a link is tried on.
TRIED = 16
#: Activations of 8 bits have this many steps on each side of 0.
STEPS = 127


@dataclass(frozen=True, slots=True)
class Sample:
    """What a layer was given: root mean square of each channel, and some of the rows."""

    rms_I: Tensor
    rows_MI: Tensor


@dataclass(frozen=True, slots=True)
class Link:
    """Where channels are made, and the layers that read them.

    `made` are vectors and rows of matrices, one entry per channel; a reader's column j has channel
    `channel[j]`, which is j itself unless heads share values.
    """

    source: str
    readers: tuple[str, ...]
    made: tuple[nn.Parameter, ...]
    channel_I: Tensor


@dataclass(frozen=True, slots=True)
class Smoothed:
    """One link that was smoothed: the exponent, and the error of its products before and after."""

    source: str
    readers: tuple[str, ...]
    exponent: float
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Outlier:
    """A channel of a layer's input that is far larger than the median channel."""

    layer: str
    channel: int
    times: float


# --- what layers are given ------------------------------------------------------------------------


@torch.no_grad()
def inputs_of_layers(
    model: Model | Holder, batches: Iterable[Any], *, kept: int = KEPT
) -> dict[str, Sample]:
    """Return what each linear layer of the blocks is given, on real tokens of the batches.

    Also what the next-token head is given, under the name of its layer or of the table it shares.
    """
    bare = model_of(model)
    batches = list(batches)
    if not batches:
        raise InputError("nothing to calibrate on", hint="give at least one batch")
    squares: dict[str, Tensor] = {}
    rows: dict[str, int] = {}
    samples: dict[str, list[Tensor]] = {}
    share = -(-kept // len(batches))

    def see(path: str, x: Tensor) -> None:
        x_MI = real_rows(x, inputs).float()
        if not len(x_MI):
            return
        squares[path] = squares.get(path, 0) + x_MI.double().square().sum(0)
        rows[path] = rows.get(path, 0) + len(x_MI)
        step = max(1, len(x_MI) // share)
        samples.setdefault(path, []).append(x_MI[step // 2 :: step][:share].clone())

    linears = {
        path: part
        for path, part in bare.named_modules()
        if isinstance(part, Linear) and ".blocks." in f".{path}"
    }
    head = _head_path(bare)
    bare.eval()
    for batch in batches:
        inputs = bare.inputs(batch)
        with seen_inputs(linears, see):
            hidden_BTD = bare.hidden(inputs)
        if head is not None:
            see(head, hidden_BTD)
    return {
        path: Sample((squares[path] / rows[path]).sqrt().float(), torch.cat(samples[path]))
        for path in squares
    }


def _head_path(model: Model) -> str | None:
    """Return the name of the layer that the next-token head multiplies by; None without one."""
    if "next" not in model.heads:
        return None
    head = model.heads["next"]
    layer = model.output_embedding() if isinstance(head, TiedHead) else head
    paths: dict[nn.Module, str] = {part: path for path, part in model.named_modules()}
    return paths[layer]


def outliers(samples: Mapping[str, Sample], *, times: float = OUTLIER) -> list[Outlier]:
    """Return the outlier channels of each distinct input, the largest first."""
    found: list[Outlier] = []
    seen: list[Tensor] = []
    for path, sample in samples.items():
        if any(torch.equal(sample.rms_I, other) for other in seen):
            continue  # queries, keys and values read the same
        seen.append(sample.rms_I)
        share_I = sample.rms_I / sample.rms_I.median().clamp(min=1e-30)
        for channel in (share_I > times).nonzero().flatten().tolist():
            found.append(Outlier(path, channel, float(share_I[channel])))
    return sorted(found, key=lambda one: -one.times)


# --- links ----------------------------------------------------------------------------------------


@torch.no_grad()
def links(model: Model, batch: Any) -> list[Link]:
    """Return the links of a model's blocks that may be scaled: those that change no bit."""
    found, candidates = [], _candidates(model)
    for path, call in _block_calls(model, _few_tokens(model.inputs(batch))):
        before = call()
        for name, _ in model.get_submodule(path).named_modules():
            link = candidates.get(f"{path}.{name}")
            if link is not None and _changes_nothing(model, link, call, before):
                found.append(link)
    return found


def _few_tokens(inputs: Inputs) -> Inputs:
    """Return the beginning of the first sequence: enough to see whether a bit changes."""
    pair = (inputs.source_BS, inputs.source_valid_BS)
    rows = [None if part is None else part[:1] for part in pair]
    parts = (inputs.tokens_BT, inputs.valid_BT, inputs.segments_BT)
    few = [None if part is None else part[:1, :TRIED] for part in parts]
    assert few[0] is not None
    return Inputs(few[0], few[1], few[2], rows[0], rows[1])


def _block_calls(model: Model, inputs: Inputs) -> list[tuple[str, Callable[[], Tensor]]]:
    """Return for each block a way to repeat its call."""
    found: list[tuple[str, Callable[[], Tensor]]] = []

    def enter(path: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda part, given, options: found.append((path, lambda: part(*given, **options)))

    blocks = {
        path: part for path, part in model.named_modules() if isinstance(part, TransformerBlock)
    }
    hooks = [
        part.register_forward_pre_hook(enter(path), with_kwargs=True)
        for path, part in blocks.items()
    ]
    try:
        model.hidden(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _candidates(model: Model) -> dict[str, Link]:
    """Return by their source the links that the program of a model shows.

    The channels of a norm, of an attention's values and of a gate's factor may be scaled where only
    linear layers read what becomes of them.
    """
    made = program(model.spec)
    writers = {op.writes: op for op in made.ops}
    memories = {op.memory: op.reads for op in made.ops if isinstance(op.kind, kinds.Remember)}
    readers: dict[str, list[kinds.Op]] = {}
    for op in made.ops:
        for value in op.reads:
            readers.setdefault(value, []).append(op)
    found: dict[str, Link] = {}
    for op in made.ops:
        channel_I = torch.arange(made.values[op.writes].width) if op.writes else torch.empty(0)
        match op.kind:
            case kinds.Norm():
                source = op
            case kinds.Attend(heads=heads, kv_heads=kv_heads):
                source = writers[memories[op.memory][1]]
                own_KH = torch.arange(made.values[f"{source.writes}"].width).view(kv_heads, -1)
                channel_I = own_KH.repeat_interleave(heads // kv_heads, 0).flatten()
            case kinds.Gate(limit=None) if isinstance(writers[op.reads[1]].kind, kinds.Linear):
                source = writers[op.reads[1]]
            case _:
                continue
        after = readers.get(f"{op.writes}", [])
        if op.layer is None or not all(isinstance(one.kind, kinds.Linear) for one in after):
            continue
        name = _layer_of(source)
        layer = model.get_submodule(name)
        if source is op or type(layer) is Linear:
            entries = tuple(layer.get_parameter(each.rpartition(".")[2]) for each in source.weights)
            found[name] = Link(name, tuple(map(_layer_of, after)), entries, channel_I)
    return found


def _layer_of(op: kinds.Op) -> str:
    """Return the path of the module that has an operation's weights."""
    return op.weights[0].rpartition(".")[0]


def _changes_nothing(model: Model, link: Link, call: Callable[[], Tensor], before: Tensor) -> bool:
    """Return True if scaling the link by powers of two leaves the block's output as it is."""
    if any(type(model.get_submodule(reader)) is not Linear for reader in link.readers):
        return False  # one with a low-rank adapter, say, reads its input twice
    generator = torch.Generator().manual_seed(3)
    scale = 2.0 ** torch.randint(-2, 3, (len(link.made[0]),), generator=generator).float()
    scale = scale.to(before)
    apply(model, link, scale)
    after = call()
    apply(model, link, 1 / scale)
    return torch.equal(before, after)


def apply(model: Model, link: Link, scale_C: Tensor) -> None:
    """Divide channels by the scale where they are made, and multiply the columns that read them."""
    for made in link.made:
        made.div_(scale_C if made.ndim == 1 else scale_C[:, None])
    for reader in link.readers:
        layer = model.get_submodule(reader)
        assert isinstance(layer, Linear)
        layer.weight.mul_(scale_C[link.channel_I.to(scale_C.device)])


# --- smoothing ------------------------------------------------------------------------------------


@torch.no_grad()
def smooth(
    model: Model | Holder,
    batches: Sequence[Any],
    schemes: Mapping[str, Scheme],
    *,
    samples: dict[str, Sample] | None = None,
    method: Search = "absmax",
    progress: Progress | None = None,
) -> list[Smoothed]:
    """Move outliers of activations into weights; return what was done, link by link.

    `schemes` has the scheme of each layer that is going to be quantized, by path; `method`
    says how their grids will be found. Samples that are given are those of the smoothed
    model afterwards.
    """
    bare = model_of(model)
    samples = inputs_of_layers(bare, batches) if samples is None else samples
    done = []
    found = links(bare, batches[0])
    for number, link in enumerate(found):
        if progress is not None:
            progress(f"smoothing: {link.source}", number, len(found))
        readers = [path for path in link.readers if path in schemes and path in samples]
        if not readers:
            continue
        sample = samples[readers[0]]
        size_C = _by_channel(sample.rms_I, link.channel_I)
        best: tuple[float, float, Tensor] | None = None
        first = 0.0
        for exponent in EXPONENTS:
            scale_C = _powers_of_two(size_C, exponent)
            scale_I = scale_C[link.channel_I.to(scale_C.device)]
            error = sum(
                _error(bare.get_submodule(path), schemes[path], sample, scale_I, method)
                for path in readers
            ) / len(readers)
            if best is None:
                first, best = error, (error, exponent, scale_C)
            elif error < best[0]:
                best = (error, exponent, scale_C)
        assert best is not None
        error, exponent, scale_C = best
        if error < WORTH * first:
            apply(bare, link, scale_C)
            done.append(Smoothed(link.source, link.readers, exponent, first, error))
            scale_I = scale_C[link.channel_I.to(scale_C.device)]
            for path in readers:
                one = samples[path]
                samples[path] = Sample(one.rms_I / scale_I, one.rows_MI / scale_I)
    return done


def quantize_on(
    model: M,
    batches: Sequence[Any],
    spec: QuantSpec,
    *,
    select: Select | None = None,
    backend: str = "auto",
    smoothing: bool = True,
    samples: dict[str, Sample] | None = None,
    progress: Progress | None = None,
) -> tuple[M, list[Smoothed]]:
    """Smooth and quantize a model by what its layers are given on these batches.

    Grids are chosen by the errors of products (`mse`), or GPTQ is run on all the batches. Where the
    spec has a mean number of bits, layers that get 8 are chosen here; a table that is most of a
    model of 4 bits has 4 bits too (`mixed.small_enough`).
    """
    bare = model_of(model)
    if spec.tied == "untie" and any(isinstance(head, TiedHead) for head in bare.heads.values()):
        untie(bare)
        samples = None  # the head has become a layer of its own
    samples = inputs_of_layers(bare, batches[:SMOOTHING]) if samples is None else samples
    spec = small_enough(bare.spec, spec)
    done: list[Smoothed] = []
    if smoothing:
        schemes = {path: scheme for path, (_, scheme) in plan(bare, spec, select=select).items()}
        search: Search = "absmax" if spec.resolved_method == "absmax" else "mse"
        few = batches[:SMOOTHING]
        done = smooth(bare, few, schemes, samples=samples, method=search, progress=progress)
    if spec.mean_bits is not None:
        if progress is not None:
            progress("choosing the layers of 8 bits", 0, 1)
        spec = replace(spec, wider=wider_layers(bare, batches, spec, select=select))
    if spec.resolved_method == "gptq":
        quantize_in_turn(bare, batches, spec, select=select, backend=backend, progress=progress)
    else:
        if progress is not None:
            progress("searching grids", 0, 1)
        sizes = {path: sample.rms_I for path, sample in samples.items()}
        quantize_model(bare, spec, select=select, backend=backend, inputs=sizes)
    return model, done


@torch.no_grad()
def smoothed_alike(full: Model, small: Model, batch: Any) -> Model:
    """Return the float model with its channels scaled as those of a quantized copy of it.

    The same function, whose layers are given what the quantized ones are given. Scales are powers
    of two, so the sizes of columns tell them, rounded as they are.
    """
    scaled: Model | None = None
    for link in links(full, batch):
        layer, rounded = (model.get_submodule(link.readers[0]) for model in (full, small))
        if not isinstance(rounded, QuantizedWeight):
            continue
        assert isinstance(layer, Linear)
        before_I, after_I = layer.weight.norm(dim=0), rounded.weights().norm(dim=0)
        there_I = (before_I > 0) & (after_I > 0)
        times_I = torch.where(there_I, (after_I / before_I).log2().round(), 0.0)
        scale_C = torch.ones(len(link.made[0])).to(times_I)
        scale_C[link.channel_I.to(times_I.device)] = torch.exp2(times_I)
        if bool((scale_C != 1).any()):
            scaled = copy.deepcopy(full) if scaled is None else scaled
            own = dict(scaled.named_parameters())
            names = {id(p): name for name, p in full.named_parameters()}
            made = tuple(own[names[id(p)]] for p in link.made)
            apply(scaled, Link(link.source, link.readers, made, link.channel_I), scale_C)
    return full if scaled is None else scaled


def _by_channel(rms_I: Tensor, channel_I: Tensor) -> Tensor:
    """Return the root mean square of each channel; heads that share a channel count alike."""
    channels = int(channel_I.max()) + 1
    index = channel_I.to(rms_I.device)
    total_C = rms_I.new_zeros(channels).index_add_(0, index, rms_I.square())
    count_C = rms_I.new_zeros(channels).index_add_(0, index, torch.ones_like(rms_I))
    return (total_C / count_C).sqrt()


def _powers_of_two(size_C: Tensor, exponent: float) -> Tensor:
    """Return size ** exponent around the typical channel, at the nearest power of two."""
    typical = size_C.median()
    if float(typical) == 0.0:
        return torch.ones_like(size_C)
    share_C = torch.where(size_C > 0, size_C / typical, torch.ones_like(size_C))
    return torch.exp2((share_C**exponent).clamp(1 / MOST, MOST).log2().round())


def _error(
    layer: nn.Module, scheme: Scheme, sample: Sample, scale_I: Tensor, method: Search
) -> float:
    """Return the relative error of some rounded products, activations rounded too."""
    assert isinstance(layer, Linear)
    weight_OI = layer.weight[:: -(-layer.d_out // OUTPUTS)].float()
    rows_MI = sample.rows_MI
    wanted_MO = rows_MI @ weight_OI.T
    sizes_I = sample.rms_I / scale_I
    tensor = quantize_tensor(weight_OI * scale_I, scheme, method=method, inputs_I=sizes_I)
    rounded_OI = dequantize(tensor)
    found_MO = rounded_inputs(rows_MI / scale_I, scheme) @ rounded_OI.T
    off = (found_MO - wanted_MO).square().sum() / wanted_MO.square().sum().clamp(min=1e-30)
    return float(off.sqrt())


def rounded_inputs(x_MI: Tensor, scheme: Scheme) -> Tensor:
    """Return activations as integer kernels round them: 8 bits, the weights' groups."""
    groups = codec(scheme).groups(x_MI.shape[-1])
    x_MGi = x_MI.unflatten(-1, (groups, -1))
    step = x_MGi.abs().amax(-1, keepdim=True) / STEPS
    step = torch.where(step > 0, step, torch.ones_like(step))
    return (torch.round(x_MGi / step) * step).flatten(-2)
