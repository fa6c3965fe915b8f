"""Two precisions of one model, compared: what was saved, what it cost, where it hurts.

Everything is measured, on the same inputs and in turn. Divergence is of the next-token (or first)
head's distributions, in nats a position, both ways; perplexity needs targets. The worst layers are
those whose own output, on the float model's inputs, is furthest off.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.generation.fast.stepper import FastStepper
from glassformer.generation.prompts import Prompts
from glassformer.generation.streaming import generate_batch
from glassformer.lens.measure.predictions import divergence
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.nn.linear import Linear
from glassformer.quant.convert import quantized_layers
from glassformer.quant.status import is_model_quantized, resident_bytes
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import InputError
from glassformer.training.engine import loss_weights

# B batch, T length, V logits

PREFILL, NEW = 64, 32
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Divergence:
    """From one distribution to the other: the mean a position, the worst, and where that is."""

    mean: float
    worst: float
    example: int
    position: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two models are apart on some batches; `perplexity` is of (full, small).

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
    """Tokens a second of (full, small), and the median ratio of their times, small over full."""

    tokens_per_second: tuple[float, float]
    ratio: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that `glass quantize` prints. Bytes on disk are None before it is written."""

    resident: tuple[int, int]
    agreement: Agreement
    prefill: Speed
    decode: Speed | None
    layers: tuple[tuple[str, float], ...]
    backends: tuple[str, ...]
    material: str
    disk: tuple[int, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def compare(
    full: Model, small: Model, batches: Sequence[Batch], *, material: str, worst: int = 5
) -> Comparison:
    """Measure both, now."""
    if not batches:
        raise InputError("nothing to compare on", hint="give a text, or a run with its task")
    errors = sorted(layer_errors(full, small, batches[0]), key=lambda error: -error[1])
    agreement = agree(full, small, batches)
    prefill, decode = speeds(full, small)
    return Comparison(
        resident=(resident_bytes(full), resident_bytes(small)),
        agreement=agreement,
        prefill=prefill,
        decode=decode,
        layers=tuple(errors[:worst]),
        backends=is_model_quantized(small).backends,
        material=material,
    )


@torch.no_grad()
def agree(full: Model, small: Model, batches: Sequence[Batch]) -> Agreement:
    """Perplexities, divergences both ways, and how often the likeliest answer is the same."""
    nll, same, count, weight, examples = np.zeros(2), 0, 0, 0.0, 0
    tallies, worse, weighed = [_Tally(), _Tally()], [], []
    for batch in batches:
        head = next(name for name in full.spec.head_names() if name in batch.targets)
        p, q = (model(batch)[head].double().log_softmax(-1).cpu() for model in (full, small))
        weights = torch.from_numpy(loss_weights(batch, head)).double()
        counted = weights > 0
        targets = torch.from_numpy(np.where(counted.numpy(), batch.targets[head], 0)).long()
        lost = [-logp.gather(-1, targets[..., None])[..., 0] * weights for logp in (p, q)]
        for side, one in enumerate(lost):
            nll[side] += float(one.sum())
        worse.append((lost[1] - lost[0]).reshape(len(p), -1).sum(1).numpy())
        weighed.append(weights.reshape(len(p), -1).sum(1).numpy())
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
    """The relative change of the perplexity, and its standard error, as of a ratio of sums."""
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
        """(B, T), or (B,) for an answer."""
        flat = far.reshape(len(far), -1)
        self.total += float(flat.sum())
        if float(flat.max()) > self.worst:
            row, column = divmod(int(flat.argmax()), flat.shape[1])
            self.worst, self.place = float(flat.max()), (first + row, column)

    def divergence(self, count: int) -> Divergence:
        return Divergence(self.total / count, self.worst, *self.place)


@torch.no_grad()
def layer_errors(full: Model, small: Model, batch: Batch) -> Iterator[tuple[str, float]]:
    """Relative error of each quantized layer's output on the float model's own inputs."""
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
    """Of reading a sequence, and of continuing one; None for a model that continues nothing."""
    decodes = "next" in full.spec.head_names()
    return speed(full, small, _prefill), speed(full, small, _decode) if decodes else None


def speed(
    full: Model, small: Model, make: Callable[[Model], tuple[Callable[[], Any], int]]
) -> Speed:
    """Both in turn; medians, and the median of the ratios."""
    sides = [make(model) for model in (full, small)]
    for call, _ in sides:
        call()
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for taken, (call, _) in zip(times, sides, strict=True):
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    rates = [
        tokens / statistics.median(taken) for taken, (_, tokens) in zip(times, sides, strict=True)
    ]
    return Speed((rates[0], rates[1]), ratio)


def _tokens(model: Model, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(model.spec.vocab_size, (1, length), generator=generator)


def _prefill(model: Model) -> tuple[Callable[[], Any], int]:
    """One sequence read, its last position answered."""
    length = min(PREFILL, model.spec.max_seq_len)
    tokens = _tokens(model, length)
    source = None
    if model.spec.encoder is not None:
        source = torch.zeros(1, length, dtype=torch.long)

    @torch.inference_mode()
    def call() -> float:
        hidden_BTD = model.hidden(model.inputs(Inputs(tokens, source_BS=source)))
        head = next(iter(model.heads))
        out = model.project(hidden_BTD[:, -1], head)
        return float(out[0, 0])  # which waits for a GPU to finish

    return call, length


def _decode(model: Model) -> tuple[Callable[[], Any], int]:
    """Greedy, batch 1, from one token."""
    new = min(NEW, model.spec.max_seq_len - 1)
    stepper = FastStepper(model)
    sources = None if model.spec.encoder is None else [[0]]
    prompts = Prompts.of([[0]], sources=sources)
    spec = DecodeSpec(max_new_tokens=new)
    return lambda: generate_batch(stepper, prompts, spec=spec, logprobs=False), new
