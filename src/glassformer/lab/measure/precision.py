"""Comparisons of one model in several precisions: savings, costs, the worst layers.

Everything is measured, on the same inputs and in turn. Divergence is of the next-token (or first)
head's distributions, in nats per position, in both directions; perplexity needs targets. The worst
layers are those whose own output, on the float model's inputs, is furthest off. A prompt is
compared at each position that is read: all of a continuation, the one position of an answer.
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from glassformer.adapters.any_model import quantize
from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.executors import fastest_stepper
from glassformer.costs.estimates import cache_bytes
from glassformer.data.batch import Batch
from glassformer.generation.streaming import generate_batch
from glassformer.kernels.threads import taking, threads_of_decoding
from glassformer.lens.capture import eval_mode
from glassformer.lens.inspection import Inspection
from glassformer.lens.measure.predictions import Readout, divergence
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.models.prompts import Prompts
from glassformer.models.weights import weights_of
from glassformer.nn.cache import GrowingCache
from glassformer.nn.linear import Linear
from glassformer.quant.backends.choose import FLOAT
from glassformer.quant.contents import (
    is_model_quantized,
    quantization_report,
    quantized_arrays,
    resident_bytes,
)
from glassformer.quant.convert import Progress, quantized_layers
from glassformer.quant.smooth import smoothed_alike
from glassformer.spec.decoding import DecodeSpec, KVCache
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.quantization import coverage
from glassformer.spec.schemes import NAMES, scheme_class
from glassformer.store.tensors import CODES, Arrays, tensor_chunks
from glassformer.training.engine import loss_weights

# B batch, T length, V logits

PREFILL, NEW = 64, 32
ROUNDS = 5
#: Positions that are paired with themselves as one: a long example has several such pieces.
PAIRED = 128
#: One batch in so many shows what an 8-bit cache would cost.
CACHED = 4


@dataclass(frozen=True, slots=True)
class Divergence:
    """A divergence between distributions: mean per position, the worst, and its position."""

    mean: float
    worst: float
    example: int
    position: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """The distance of two models on some batches; `perplexity` is of (full, small).

    `change` is small / full - 1, and `change_error` its standard error: examples are taken as
    independent, and each is compared with itself. None where there is one example only.
    """

    positions: int
    examples: int
    perplexity: tuple[float, float]
    change: float
    change_error: float | None
    full_to_small: Divergence
    small_to_full: Divergence
    top1: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of (full, small), and the median ratio of times, small over full."""

    tokens_per_second: tuple[float, float]
    ratio: float


@dataclass(frozen=True, slots=True)
class Operands:
    """Where the divergence comes from, in nats per position, on the first batch.

    `weights`: rounded weights with activations as they are. `activations`: what rounding those adds
    to it. `head`: the rounded head on the full model's own vectors. They do not add up.
    """

    weights: float
    activations: float
    head: float


@dataclass(frozen=True, slots=True)
class CacheCost:
    """What decoding with keys and values in 8 bits costs a model, beside those as computed.

    Bytes are of one position: float32, then 8 bits. The predictions are those of complete windows
    whose keys and values are all rounded, as decoding would have rounded them.
    """

    bytes_per_position: tuple[int, int]
    agreement: Agreement

    def __str__(self) -> str:
        (before, after), found = self.bytes_per_position, self.agreement
        error = "" if found.change_error is None else f" ± {found.change_error:.3%}"
        return (
            f"{after:,} bytes a position, {before:,} in float32 ({after / before:.3f}x); "
            f"perplexity {found.change:+.3%}{error}, divergence {found.full_to_small.mean:.6f}, "
            f"same likeliest answer {found.top1:.2%}, {found.positions:,} positions"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that `glass quantize` prints, as text when printed.

    Pairs are of (full, small). Bytes on disk are None for models in memory; `note` says what those
    before are of, where that is not plain. `kv_cache` is what an 8-bit cache would cost the small
    model on top, on some of the batches; None where it continues no sequence.
    """

    resident: tuple[int, int]
    agreement: Agreement
    prefill: Speed
    decode: Speed | None
    layers: tuple[tuple[str, float], ...]
    backends: tuple[str, ...]
    material: str
    operands: Operands | None = None
    kv_cache: CacheCost | None = None
    disk: tuple[int, int] | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        agreement = self.agreement
        before, after = agreement.perplexity
        error = "" if agreement.change_error is None else f" ± {agreement.change_error:.2%}"
        lines = [f"{'':<22}{'before':>14}{'after':>14}{'':>10}"]
        if self.disk is not None:
            lines.append(_bytes_line("bytes on disk", self.disk))
            lines += [f"  {self.note}"] if self.note else []
        lines += [
            _bytes_line("bytes resident", self.resident),
            f"{'perplexity':<22}{before:>14.4f}{after:>14.4f}{agreement.change:>+10.2%}{error}",
            *self._speed_lines(),
            "",
            f"measured on {self.material}, {agreement.examples:,} examples, "
            f"{agreement.positions:,} positions",
            f"same likeliest answer  {agreement.top1:.2%}",
        ]
        ways = {
            "before to after": agreement.full_to_small,
            "after to before": agreement.small_to_full,
        }
        for name, one in ways.items():
            lines.append(
                f"divergence, {name}  mean {one.mean:.5f}, worst {one.worst:.4f} "
                f"(example {one.example}, position {one.position})"
            )
        if self.operands is not None:
            parts = asdict(self.operands).items()
            alone = ", ".join(f"{name} {value:.5f}" for name, value in parts)
            lines.append(f"divergence, by cause   {alone}")
        if self.kv_cache is not None:
            lines.append(f"with --kv-cache int8   {self.kv_cache}")
        worst = "; ".join(f"{path} {error:.2%}" for path, error in self.layers)
        return "\n".join([*lines, f"worst layers           {worst}"])

    def _speed_lines(self) -> list[str]:
        lines = []
        for name, speed in (("prefill", self.prefill), ("decode", self.decode)):
            if speed is None:
                continue
            before, after = speed.tokens_per_second
            said = "" if speed.ratio < 1 else "  slower than before"
            name = f"{name} tokens/s"
            lines.append(f"{name:<22}{before:>14,.0f}{after:>14,.0f}{1 / speed.ratio:>9.2f}x{said}")
        return lines


def _bytes_line(name: str, pair: tuple[int, int]) -> str:
    return f"{name:<22}{pair[0]:>14,}{pair[1]:>14,}{pair[1] / pair[0]:>9.3f}x"


#: The parts of a comparison, in the order they are measured.
MEASURED = ("layers", "perplexity", "speed", "weights, activations and head", "8-bit cache")


def compare(
    full: Model,
    small: Model,
    batches: Sequence[Batch],
    *,
    material: str,
    worst: int = 5,
    untied: Model | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Measure both models, now.

    `untied`: the full model with the layers of the small one, where its head was untied.
    """
    if not batches:
        raise InputError("nothing to compare on", hint="give a text, or a run with its task")

    def begin(number: int) -> None:
        if progress is not None:
            progress(f"measuring: {MEASURED[number]}", number, len(MEASURED))

    begin(0)
    alike = full if untied is None else untied
    twin = smoothed_alike(alike, small, batches[0])
    errors = sorted(layer_errors(twin, small, batches[0]), key=lambda error: -error[1])
    begin(1)
    agreement = agree(full, small, batches)
    begin(2)
    prefill, decode = speeds(full, small)
    begin(3)
    operands = _operands(alike, small, batches[0])
    begin(4)
    return Comparison(
        resident=(resident_bytes(full), resident_bytes(small)),
        agreement=agreement,
        prefill=prefill,
        decode=decode,
        layers=tuple(errors[:worst]),
        backends=quantization_report(small).backends,
        material=material,
        operands=operands,
        kv_cache=cache_cost(small, batches[: -(-len(batches) // CACHED)]),
    )


class Rounding:
    """A model whose forwards round all keys and values, as decoding with such a cache does."""

    def __init__(self, model: Model, kv_cache: KVCache) -> None:
        self.model, self.spec, self.kv_cache = model, model.spec, kv_cache

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        logits: dict[str, Tensor] = self.model(batch, cache=GrowingCache(kv_cache=self.kv_cache))
        return logits


def cache_cost(model: Model, batches: Sequence[Batch]) -> CacheCost | None:
    """Measure what an 8-bit cache costs a model; None if it predicts no next token."""
    if "next" not in model.spec.head_names() or "next" not in batches[0].targets:
        return None
    float32, int8 = (
        cache_bytes(model.spec, batch=1, length=1, itemsize=4, kv_cache=kv_cache)
        for kv_cache in ("float", "int8")
    )
    return CacheCost((float32, int8), agree(model, Rounding(model, "int8"), batches))


@torch.no_grad()
def _operands(full: Model, small: Model, batch: Batch) -> Operands:
    """Return the divergence that rounding weights, activations and the head causes, each alone."""
    head = next(name for name in full.spec.head_names() if name in batch.targets)
    counted = torch.from_numpy(loss_weights(batch, head)) > 0

    def predicted(model: Model) -> Tensor:
        logits: Tensor = model(batch)[head]
        return logits.float().log_softmax(-1).cpu()

    def far(one: Tensor, other: Tensor) -> float:
        return max(0.0, float((divergence(one, other) * counted).sum() / counted.sum()))

    p, q = predicted(full), predicted(small)
    wanted = {layer: layer.wanted for _, layer in quantized_layers(small)}
    try:
        for layer in wanted:
            layer.use(FLOAT)
        plain = predicted(small)
    finally:
        for layer, backend in wanted.items():
            layer.use(backend)
    inputs = full.inputs(batch)
    logits = small.logits(full.hidden(inputs), head, valid_BT=inputs.valid_BT)
    return Operands(
        weights=far(p, plain),
        activations=far(plain, q),
        head=far(p, logits.float().log_softmax(-1).cpu()),
    )


class Predicts(Protocol):
    """What is compared: logits of every head, for a batch."""

    spec: ModelSpec

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Return logits by the name of the head."""


@torch.no_grad()
def agree(full: Predicts, small: Predicts, batches: Sequence[Batch]) -> Agreement:
    """Return perplexities, divergences both ways, and how often the top prediction agrees."""
    nll, same, count, weight, examples = np.zeros(2), 0, 0, 0.0, 0
    tallies = [_Tally(), _Tally()]
    worse: list[np.ndarray] = []
    weighed: list[np.ndarray] = []
    for batch in batches:
        head = next(name for name in full.spec.head_names() if name in batch.targets)
        p, q = (model(batch)[head].double().log_softmax(-1).cpu() for model in (full, small))
        weights = torch.from_numpy(loss_weights(batch, head)).double()
        counted = weights > 0
        targets = torch.from_numpy(np.where(counted.numpy(), batch.targets[head], 0)).long()
        lost = [-logp.gather(-1, targets[..., None])[..., 0] * weights for logp in (p, q)]
        for side, one in enumerate(lost):
            nll[side] += float(one.sum())
        for pieces, values in ((worse, lost[1] - lost[0]), (weighed, weights)):
            long = values.reshape(len(p), -1).split(PAIRED, 1)
            pieces.append(torch.stack([piece.sum(1) for piece in long], 1).flatten().numpy())
        weight += float(weights.sum())
        same += int(((p.argmax(-1) == q.argmax(-1)) & counted).sum())
        count += int(counted.sum())
        for tally, (one, other) in zip(tallies, ((p, q), (q, p)), strict=True):
            tally.add(divergence(one, other) * counted, first=examples)
        examples += len(batch.tokens)
    if count == 0:
        raise InputError("nothing counts in these examples", hint="take others, or more")
    ppl = np.exp(np.minimum(nll / weight, 700.0))
    there, back = (tally.divergence(count) for tally in tallies)
    change, error = _paired(np.concatenate(worse), np.concatenate(weighed))
    pair = (float(ppl[0]), float(ppl[1]))
    return Agreement(count, examples, pair, change, error, there, back, same / count)


def _paired(worse_N: np.ndarray, weight_N: np.ndarray) -> tuple[float, float | None]:
    """Return the relative change of perplexity and its standard error, as a ratio of sums."""
    mean = float(worse_N.sum() / weight_N.sum())
    ratio = float(np.exp(min(mean, 700.0)))
    if len(worse_N) < 2:
        return ratio - 1.0, None
    spread = np.square(worse_N - mean * weight_N).sum() * len(worse_N) / (len(worse_N) - 1)
    return ratio - 1.0, ratio * float(np.sqrt(spread) / weight_N.sum())


class _Tally:
    def __init__(self) -> None:
        self.total, self.worst, self.place = 0.0, -1.0, (0, 0)

    def add(self, far: Tensor, *, first: int) -> None:
        """Add divergences (B, T), or (B,) for an answer."""
        flat = far.reshape(len(far), -1)
        self.total += float(flat.sum())
        if float(flat.max()) > self.worst:
            row, column = divmod(int(flat.argmax()), flat.shape[1])
            self.worst, self.place = float(flat.max()), (first + row, column)

    def divergence(self, count: int) -> Divergence:
        return Divergence(self.total / count, self.worst, *self.place)


@torch.no_grad()
def layer_errors(full: Model, small: Model, batch: Batch | Inputs) -> Iterator[tuple[str, float]]:
    """Yield each quantized layer's relative error on the float model's own inputs."""
    layers, errors, hooks = dict(quantized_layers(small)), {}, []

    def watcher(path: str) -> Callable[..., None]:
        def see(module: torch.nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
            errors[path] = _relative(layers[path](given[0]), out)

        return see

    own = dict(full.named_modules())
    plain = [path for path in layers if isinstance(own.get(path), Linear)]
    for path in plain:
        hooks.append(own[path].register_forward_hook(watcher(path)))
    try:
        inputs = full.inputs(batch)
        hidden_BTD = full.hidden(inputs)
        for head in full.heads:
            full.logits(hidden_BTD, head, valid_BT=inputs.valid_BT)
    finally:
        for hook in hooks:
            hook.remove()
    for path in layers:
        if path not in plain:  # a table, or a head that was tied to one
            expected = full.project(hidden_BTD, "next")
            errors[path] = _relative(small.project(hidden_BTD, "next"), expected)
    yield from errors.items()


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def speeds(full: Model, small: Model) -> tuple[Speed, Speed | None]:
    """Return the speed of prefill, and of decoding; None for a model without a `next` head.

    Both by the step, and on the threads, that `glass generate` takes for the full model.
    """
    device = str(next(full.parameters()).device)
    with taking(threads_of_decoding(full.spec, device=device)):
        if "next" not in full.spec.head_names():
            return speed(full, small, _reading), None
        return speed(full, small, _prefill), speed(full, small, _decode)


def speed(
    full: Model, small: Model, make: Callable[[Model], tuple[Callable[[], Any], int]]
) -> Speed:
    """Time both in turn; return medians, and the median of the ratios."""
    sides = [make(model) for model in (full, small)]
    for call, _ in sides:
        call()
    before, after = interleaved([call for call, _ in sides], rounds=ROUNDS)
    ratio = statistics.median(b / a for a, b in zip(before, after, strict=True))
    full_rate, small_rate = (
        tokens / statistics.median(taken)
        for taken, (_, tokens) in zip((before, after), sides, strict=True)
    )
    return Speed((full_rate, small_rate), ratio)


def interleaved(calls: Sequence[Callable[[], Any]], *, rounds: int) -> list[list[float]]:
    """Return the seconds that each call took, every round one after the other."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for taken, call in zip(times, calls, strict=True):
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
    return times


def _tokens(model: Model, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(model.spec.vocab_size, (1, length), generator=generator)


def _reading(model: Model) -> tuple[Callable[[], Any], int]:
    """Return a call that reads one sequence and predicts from its last position, by the model."""
    length = min(PREFILL, model.spec.max_seq_len)
    tokens = _tokens(model, length)
    source = None
    if model.spec.encoder is not None:
        source = torch.zeros(1, length, dtype=torch.long)

    @torch.inference_mode()
    def call() -> float:
        hidden_BTD = model.hidden(model.inputs(Inputs(tokens, source_BS=source)))
        head = model.spec.head_names()[0]
        out = model.project(hidden_BTD[:, -1], head)
        return float(out[0, 0])  # which waits for a GPU to finish

    return call, length


def _prefill(model: Model) -> tuple[Callable[[], Any], int]:
    """Return a call that reads one prompt; an encoder-decoder's source is as long."""
    length = min(PREFILL, model.spec.max_seq_len - 1)
    row = _tokens(model, length)[0].tolist()
    sources = None if model.spec.encoder is None else [[0] * length]
    stepper, prompts = fastest_stepper(model), Prompts.of([row], sources=sources)
    return lambda: float(stepper.start(prompts, room=1)[0][0, 0]), length


def _decode(model: Model) -> tuple[Callable[[], Any], int]:
    """Return a call that decodes greedily, batch size 1, from one token."""
    new = min(NEW, model.spec.max_seq_len - 1)
    stepper = fastest_stepper(model)
    sources = None if model.spec.encoder is None else [[0]]
    prompts = Prompts.of([[0]], sources=sources)
    spec = DecodeSpec(max_new_tokens=new)
    return lambda: generate_batch(stepper, prompts, spec=spec, logprobs=False), new


# T positions, D d_model, V answers

#: The number of likeliest tokens of each precision that are shown.
TOP = 6


@dataclass(frozen=True, slots=True)
class Precision:
    """A copy of a model; `name` says what its layers are, `schemes` how many are of each.

    `scheme` is the one requested: with int4, a copy is named "int4 and int8" where layers that int4
    does not fit are int8.
    """

    name: str
    scheme: str
    model: Model
    schemes: dict[str, int]
    backends: tuple[str, ...]
    file_bytes: int
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Spoken:
    """Two precisions on one text: divergences (positions,) and the error of each layer."""

    there: tuple[float, ...]
    back: tuple[float, ...]
    same: tuple[bool, ...]
    layers: dict[str, float]


@dataclass(frozen=True, slots=True)
class Prompted:
    """The predictions of every precision on one text.

    `positions`: those that are read. `answers[i]`: at the i-th of them, the likeliest tokens of
    any precision by id, and the probability that each precision gives them.
    """

    look: Inspection
    precisions: tuple[Precision, ...]
    positions: tuple[int, ...]
    answers: tuple[dict[int, tuple[float, ...]], ...]
    against: dict[str, Spoken]

    def __repr__(self) -> str:
        lines = [f"{len(self.positions)} positions in {len(self.precisions)} precisions"]
        for one in self.precisions:
            line = f"  {one.name:<8} {one.file_bytes:>12,} bytes on disk"
            if one.name in self.against:
                far = self.against[one.name].there
                line += f", KL mean {sum(far) / len(far):.5f}, worst {max(far):.4f} nats"
            lines.append(line)
        return "\n".join(lines)


def in_precisions(adapter: BaseAdapter) -> tuple[Precision, ...]:
    """Return the model in float32, and a copy in each scheme that fits some layer of it.

    Layers that a scheme does not fit get int8, which the copy's name says.
    """
    model = adapter.model
    if not isinstance(model, Model):
        raise InputError("only a model of our own parts can be quantized")
    if is_model_quantized(model):
        raise InputError(
            "the model is quantized already", hint="choose the float model that it was made of"
        )
    full = model
    if next(model.parameters()).dtype != torch.float32:
        full = copy.deepcopy(model).float()
    made = [_measured("float32", "float32", full)]
    for scheme in NAMES:
        name = coverage(full.spec, scheme_class(scheme)()).name
        if name:
            small = quantize(full, scheme=scheme, indivisible="int8")
            made.append(_measured(name, scheme, small))
    return tuple(made)


def _measured(name: str, scheme: str, model: Model) -> Precision:
    report = quantization_report(model)
    arrays: Arrays = quantized_arrays(model)[1] if report else weights_of(model)
    described = {name: (CODES[a.dtype], a.shape) for name, a in sorted(arrays.items())}
    return Precision(
        name=name,
        scheme=scheme,
        model=model,
        schemes=report.schemes(),
        backends=report.backends,
        file_bytes=sum(map(len, tensor_chunks(described, arrays.__getitem__))),
        resident_bytes=resident_bytes(model),
    )


@torch.no_grad()
def prompted(adapter: BaseAdapter, precisions: Sequence[Precision], text: str) -> Prompted:
    """Run the same tokens through each; the others are compared with the first precision."""
    look = adapter.inspect(text)
    readings = [replace(look.readout, model=one.model) for one in precisions]
    positions = _read(look.readout)
    rows = [_rows(reading)[list(positions)] for reading in readings]
    answers: list[dict[int, tuple[float, ...]]] = []
    there: list[list[float]] = [[] for _ in readings]
    back: list[list[float]] = [[] for _ in readings]
    same: list[list[bool]] = [[] for _ in readings]
    for at in look.readout.pieces(len(positions)):
        # in float64: int8's divergences are near float32's rounding
        logps = [
            one.model.project(row[at], one.head).double().log_softmax(-1).cpu()
            for one, row in zip(readings, rows, strict=True)
        ]
        for number, logp_TV in enumerate(logps):
            there[number] += divergence(logps[0], logp_TV).tolist()
            back[number] += divergence(logp_TV, logps[0]).tolist()
            same[number] += (logp_TV.argmax(-1) == logps[0].argmax(-1)).tolist()
        answers += _answers(logps)
    full, *others = precisions
    against = {}
    for number, one in enumerate(others, start=1):
        errors = dict(layer_errors(full.model, one.model, look.inputs))
        against[one.name] = Spoken(
            tuple(there[number]), tuple(back[number]), tuple(same[number]), errors
        )
    return Prompted(look, tuple(precisions), positions, tuple(answers), against)


def _read(reading: Readout) -> tuple[int, ...]:
    """Return the positions whose distributions mean something: an answer has one."""
    if reading.model.spec.head(reading.head).readout is not None:
        return (reading.position,)
    return tuple(reading.real().nonzero().flatten().tolist())


def _rows(reading: Readout) -> Tensor:
    with eval_mode(reading.model):
        return reading.rows_of(reading.model.hidden(reading.inputs)[0])


def _answers(logps: Sequence[Tensor]) -> list[dict[int, tuple[float, ...]]]:
    """Return the likeliest tokens of any precision at each position, as the first ranks them."""
    made = []
    most = min(TOP, logps[0].shape[-1])
    for t in range(len(logps[0])):
        rows = [logp_TV[t].exp() for logp_TV in logps]
        ids = {i for row_V in rows for i in row_V.topk(most).indices.tolist()}
        ranked = [i for _, i in sorted((-float(rows[0][i]), i) for i in ids)]
        made.append({i: tuple(float(row_V[i]) for row_V in rows) for i in ranked})
    return made


def precision_speeds(precisions: Sequence[Precision]) -> dict[str, tuple[Speed, Speed | None]]:
    """Return the speeds of each against the first, measured now and in turn."""
    full, *others = precisions
    return {one.name: speeds(full.model, one.model) for one in others}
