"""The torch engine's step beside one that is written out: loss, every gradient, the update.

The same batches go through the modules in float64, with a loss and an update written out a second
time. How far apart the two may be is what plain torch in float32 is apart, tensor by tensor.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glasscheck.measure import Measure, NotOffered
from glasscheck.subject import Subject
from glassformer.byhand.c_table import C
from glassformer.byhand.model import Model as Arrays
from glassformer.checks.rows.own_models import shortened, size_with
from glassformer.data.batch import Batch, Source
from glassformer.models.model import Model, build
from glassformer.models.weights import load_weights, weights_of
from glassformer.nn.experts import BalanceLosses
from glassformer.spec.block import Dropout
from glassformer.spec.manifest import Parameter, stored
from glassformer.spec.model import ModelSpec, VectorHead
from glassformer.spec.program import program
from glassformer.spec.train import AdamW, LoRA, Muon, TrainSpec, lora_manifest, lora_targets
from glassformer.training.engine import balance_shares, loss_weights, totals
from glassformer.training.numpy_engine import NumpyEngine
from glassformer.training.torch_engine import TorchEngine

#: How many times plain float32's own distance from float64 a step may be away, and what is allowed
#: a tensor whatever its own rounding is, relative to its largest entry.
UNITS, LEAST = 16.0, 1e-5
#: Below this share of the model's largest gradient a tensor is compared absolutely.
FLOOR = 1e-4
#: Updates that follow each other: the second has moments of the first.
STEPS = 3
RATE, CLIP, SMOOTHING = 3e-3, 0.7, 0.1
#: The least share of a step by which an update may be off: rounding of a float32 weight.
UPDATE = 1e-3
#: Numbers at either end of a parameter whose updates are followed.
FOLLOWED = 20_000
#: The shorter side of a matrix whose singular values are found, and the share of its update by
#: which it may be off: the polynomial makes rounding beside small singular values 500 times larger.
DECOMPOSED, ORTHOGONAL = 256, 1e-3
#: Rank of the corrections, where the projections are that wide.
LOW_RANK = 3
#: Tokens of the longest sequence, where the model has room for them.
LONGEST = 70
#: Tokens of a vocabulary at most: all of them would take gigabytes in float64.
MOST_TOKENS = 8192
#: Logits of a step at most, about, and the tokens that are left of a sequence even so.
LOGITS, SHORTEST = 1 << 24, 10
#: Logits of the full rows, about: many classes, and few of them.
MANY = 1 << 18
#: Full rows at most: few classes take no time.
MOST_ROWS = 24


def step_is_plain(subject: Subject) -> Measure:
    """Loss and gradients of padded, packed and full batches together, and three updates."""
    own = with_fewer_tokens(shortened(subject.ours()))
    spec = own.spec
    if subject.quantized is not None:
        raise NotOffered("quantized weights are not trained")
    if any(isinstance(head, VectorHead) for head in spec.heads):
        raise NotOffered("a vector has no loss")
    train = TrainSpec(
        lr=RATE, clip=CLIP, label_smoothing=SMOOTHING, optimizer=AdamW(weight_decay=0.1)
    )
    batches = step_batches(spec, seed=101)
    # One copy of the model at a time: a table of many tokens takes gigabytes.
    wide = _plain(_copy(own, torch.float64), batches, train)
    narrow = _plain(_copy(own, torch.float32), batches, train)
    engine = TorchEngine(_copy(own, torch.float32), train)
    counts = totals(batches, spec)
    shares = balance_shares(batches, spec) if engine.routed else []
    sums = engine.gradients(batches, counts, shares=shares, seed=0)
    found = {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}
    worst = _compared({"loss": sums[0] + sums[2]}, {"loss": narrow.loss}, {"loss": wide.loss})
    # A parameter that nothing reads has no gradient in one way and zeros in the other.
    mine = {name: found.get(name, torch.zeros_like(g)) for name, g in wide.gradients.items()}
    worst = max(worst, _compared(mine, narrow.gradients, wide.gradients))
    worst = max(worst, _updates(_ModuleWeights(engine), batches, train))
    size = f"{size_with(subject, own)}, {len(wide.gradients)} tensors, {STEPS} updates"
    return Measure(worst.apart, worst.allowed, size, f"worst: {worst.name}", "float32")


def native_step_is_plain(subject: Subject) -> Measure:
    """The same of the native engine, whose model is arrays and whose gradients are derived."""
    own = with_fewer_tokens(shortened(subject.ours()))
    spec = own.spec
    if subject.quantized is not None:
        raise NotOffered("quantized weights are not trained")
    if any(isinstance(head, VectorHead) for head in spec.heads):
        raise NotOffered("a vector has no loss")
    train = TrainSpec(
        lr=RATE, clip=CLIP, label_smoothing=SMOOTHING, optimizer=AdamW(weight_decay=0.1)
    )
    run_lacks = C.lacking(program(spec, training=True))
    if run_lacks:
        raise NotOffered(f"the native engine has no {run_lacks[0]}")
    batches = step_batches(spec, seed=101)
    wide = _plain(_copy(own, torch.float64), batches, train)
    narrow = _plain(_copy(own, torch.float32), batches, train)
    engine = NumpyEngine(_arrays(own), train)
    sums = engine.gradients(batches, seed=0)
    total = torch.tensor(sums.loss + sums.balance_term, dtype=torch.float64)
    worst = _compared({"loss": total}, {"loss": narrow.loss}, {"loss": wide.loss})
    found = {name: torch.from_numpy(grad.copy()) for name, grad in engine.model.grads.items()}
    worst = max(worst, _compared(found, narrow.gradients, wide.gradients))
    worst = max(worst, _updates(_ArrayWeights(engine), batches, train))
    size = f"{size_with(subject, own)}, {len(wide.gradients)} tensors, {STEPS} updates"
    return Measure(worst.apart, worst.allowed, size, f"worst: {worst.name}", "float32")


def native_lora_is_plain(subject: Subject) -> Measure:
    """Low-rank corrections of every projection: plain torch has them in its weights, summed.

    There, d loss / d W gives those of the factors of W + s B A by the chain rule: of B it is
    s dW A^T, of A it is s B^T dW. Everything else is frozen: it moves by no bit.
    """
    own = with_fewer_tokens(shortened(subject.ours()))
    spec = own.spec
    if subject.quantized is not None:
        raise NotOffered("the native engine corrects no quantized weights")
    if any(isinstance(head, VectorHead) for head in spec.heads):
        raise NotOffered("a vector has no loss")
    found = [p for p in stored(spec).values() if p.kind == "matrix" and p.layer is not None]
    rank = min(LOW_RANK, *(min(p.shape) for p in found))
    lora = LoRA(rank=rank, alpha=2.5 * rank, targets=tuple(sorted({p.role for p in found})))
    train = TrainSpec(
        lr=RATE, clip=CLIP, label_smoothing=SMOOTHING, optimizer=AdamW(weight_decay=0.1)
    )
    if lacks := C.lacking(program(spec, training=True, lora=lora)):
        raise NotOffered(f"the native engine has no {lacks[0]}")
    rng, rules = np.random.default_rng(103), lora_manifest(spec, lora)
    factors = {
        name: rng.uniform(-1, 1, p.shape).astype(np.float32) / math.sqrt(p.shape[1])
        for name, p in rules.items()
    }
    batches = step_batches(spec, seed=101)
    wide, narrow = (
        _factored(_copy(own, dtype), factors, lora, batches, train)
        for dtype in (torch.float64, torch.float32)
    )
    engine = NumpyEngine(_arrays(own, factors, lora), train)
    sums = engine.gradients(batches, seed=0)
    total = torch.tensor(sums.loss + sums.balance_term, dtype=torch.float64)
    worst = _compared({"loss": total}, {"loss": narrow.loss}, {"loss": wide.loss})
    slopes = {name: torch.from_numpy(grad.copy()) for name, grad in engine.model.grads.items()}
    worst = max(worst, _compared(slopes, narrow.gradients, wide.gradients))
    trained = _ArrayWeights(engine)
    frozen = {name: own.clone() for name, own in trained.own().items() if name not in rules}
    worst = max(worst, _updates(trained, batches, train, rules=stored(spec) | rules))
    for name, array in trained.own().items():
        if name in frozen and not torch.equal(array, frozen[name]):
            worst = max(worst, _Gap(float("inf"), float("inf"), 0.0, f"{name}, frozen, moved"))
    size = f"{size_with(subject, own)}, {len(factors)} factors, {STEPS} updates"
    return Measure(worst.apart, worst.allowed, size, f"worst: {worst.name}", "float32")


def native_muon_is_plain(subject: Subject) -> Measure:
    """One update by Muon: each singular value of a mean goes through the polynomial by itself."""
    own = with_fewer_tokens(shortened(subject.ours()))
    spec, muon = own.spec, Muon(lr_matrix=RATE, weight_decay=0.1)
    if subject.quantized is not None:
        raise NotOffered("quantized weights are not trained")
    if any(isinstance(head, VectorHead) for head in spec.heads):
        raise NotOffered("a vector has no loss")
    train = TrainSpec(lr=RATE, clip=CLIP, optimizer=muon)
    if lacks := C.lacking(program(spec, training=True)):
        raise NotOffered(f"the native engine has no {lacks[0]}")
    trained = _ArrayWeights(NumpyEngine(_arrays(own), train))
    before = {name: w.double().clone() for name, w in trained.own().items()}
    trained.step(step_batches(spec, seed=101), lr=RATE, seed=0)
    rules, slopes, worst, count = stored(spec), trained.slopes(), _Gap(allowed=ORTHOGONAL), 0
    for name, weight in trained.own().items():
        rule = rules[name]
        if rule.kind != "matrix" or rule.layer is None or min(weight.shape) > DECOMPOSED:
            continue
        # m = (1 - momentum) g after one step, and what moves the weight g + momentum (m - g)
        slope = slopes[name] * trained.clipped * (1 - muon.momentum**2)
        left, values, right = torch.linalg.svd(slope, full_matrices=False)
        values = values / values.norm().clamp(min=1e-7)
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        rate = RATE * math.sqrt(max(1.0, weight.shape[0] / weight.shape[1]))
        wanted = -rate * (left * values) @ right - RATE * muon.weight_decay * before[name]
        moved = weight.double() - before[name]
        apart = float((moved - wanted).norm() / wanted.norm())
        count += 1
        worst = max(worst, _Gap(apart / ORTHOGONAL, apart, ORTHOGONAL, name))
    if not count:
        raise NotOffered(f"no matrix of its blocks is {DECOMPOSED} or less to one side")
    size = f"{size_with(subject, own)}, {count} matrices"
    return Measure(worst.apart, worst.allowed, size, f"worst: {worst.name}", "float32")


def _factored(
    model: Model,
    factors: Mapping[str, np.ndarray],
    lora: LoRA,
    batches: Sequence[Batch],
    train: TrainSpec,
) -> "_Plain":
    """Return the loss of a model with its corrections summed in, and the factors' gradients."""
    named = dict(model.named_parameters())
    pairs = {
        f"{at}.weight": (torch.from_numpy(a), torch.from_numpy(factors[f"{at}.lora_B.weight"]))
        for at, a in ((n.removesuffix(".lora_A.weight"), a) for n, a in factors.items())
        if at in lora_targets(model.spec, lora)
    }
    with torch.no_grad():
        for name, (a, b) in pairs.items():
            named[name].copy_(named[name].double() + lora.scale * b.double() @ a.double())
    plain = _plain(model, batches, train)
    gradients = {}
    for name, (a, b) in pairs.items():
        slope, at = plain.gradients[name] * lora.scale, name.removesuffix(".weight")
        gradients[f"{at}.lora_A.weight"] = b.to(slope.dtype).T @ slope
        gradients[f"{at}.lora_B.weight"] = slope @ a.to(slope.dtype).T
    return _Plain(plain.loss, gradients)


def _arrays(
    own: Model, factors: Mapping[str, np.ndarray] | None = None, lora: LoRA | None = None
) -> Arrays:
    """Return the model as arrays, with the table in C, nothing dropped."""
    weights = {name: array.astype(np.float32) for name, array in weights_of(own).items()}
    weights |= factors or {}
    spec = replace(own.spec, decoder=replace(own.spec.decoder, dropout=Dropout()))
    if spec.encoder is not None:
        spec = replace(spec, encoder=replace(spec.encoder, dropout=Dropout()))
    return Arrays(spec, params=weights, dtype=np.float32, table=C, lora=lora)


class _Trained(Protocol):
    """An engine whose weights and gradients are followed over its updates."""

    spec: ModelSpec

    def step(self, batches: Sequence[Batch], *, lr: float, seed: int) -> object: ...

    def own(self) -> dict[str, Tensor]:
        """Return the weights themselves."""

    def slopes(self) -> dict[str, Tensor]:
        """Return the gradients that the last step was given, before they were clipped."""


class _ArrayWeights:
    """The native engine so: its step clips the gradients in place, which is undone."""

    def __init__(self, engine: NumpyEngine) -> None:
        self.engine, self.spec, self.clipped = engine, engine.spec, 1.0

    def step(self, batches: Sequence[Batch], *, lr: float, seed: int) -> None:
        norm = self.engine.step(batches, lr=lr, seed=seed).grad_norm
        self.clipped = min(1.0, CLIP / norm)

    def own(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array) for name, array in self.engine.model.params.items()}

    def slopes(self) -> dict[str, Tensor]:
        grads = self.engine.model.grads.items()
        return {name: torch.from_numpy(grad).double() / self.clipped for name, grad in grads}


class _ModuleWeights:
    """The torch engine so."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine, self.spec = engine, engine.spec

    def step(self, batches: Sequence[Batch], *, lr: float, seed: int) -> None:
        self.engine.step(batches, lr=lr, seed=seed)

    def own(self) -> dict[str, Tensor]:
        return dict(self.engine.model.named_parameters())

    def slopes(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.own().items() if p.grad is not None}


def with_fewer_tokens(model: Model) -> Model:
    """Return a model of a large vocabulary with its first tokens alone: the same code runs."""
    spec = model.spec
    source = spec.source_vocab_size
    cut = replace(
        spec,
        vocab_size=min(spec.vocab_size, MOST_TOKENS),
        source_vocab_size=None if source is None else min(source, MOST_TOKENS),
    )
    if cut == spec:
        return model
    made, own = build(cut), dict(model.named_parameters())
    arrays = {
        name: own[name].detach()[tuple(slice(size) for size in rule.shape)].float().numpy()
        for name, rule in stored(cut).items()
    }
    load_weights(made, arrays)
    return made


@dataclass(frozen=True, slots=True, order=True)
class _Gap:
    """A distance as a share of what is allowed, then both of them and the tensor's name."""

    share: float = 0.0
    apart: float = 0.0
    allowed: float = LEAST
    name: str = ""


def _copy(model: Model, dtype: torch.dtype) -> Model:
    """Return the model in this format on a CPU, nothing dropped, every parameter trained."""
    made = copy.deepcopy(model).to(device="cpu", dtype=dtype)
    for part in made.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return made.requires_grad_(True)


def step_batches(spec: ModelSpec, *, seed: int) -> list[Batch]:
    """Return the batches of a step: uneven lengths, packed where the model can be, and full rows.

    Of full rows there are as many as it takes for this many logits, if they are few.
    """
    classes = max(spec.head_size(name) for name in spec.head_names())
    length = min(LONGEST, spec.max_seq_len, max(SHORTEST, LOGITS // (6 * classes)))
    rows = -(-MANY // (classes * length))
    uneven = (length, max(1, length - 3), max(1, length // 3))
    packed = spec.encoder is None and all(head.readout is None for head in spec.heads)
    rng = np.random.default_rng(seed)
    return [
        _batch(spec, rng, uneven),
        _batch(spec, rng, (length, length), packed=packed),
        _batch(spec, rng, (length,) * (max(2, rows) if rows <= MOST_ROWS else 2)),
    ]


def _batch(
    spec: ModelSpec, rng: np.random.Generator, lengths: Sequence[int], *, packed: bool = False
) -> Batch:
    """Return random sequences of these lengths with targets for every head."""

    def side(vocab: int, lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        valid = np.arange(max(lengths)) < np.array(lengths)[:, None]
        return np.where(valid, rng.integers(0, vocab, size=valid.shape), 0), valid

    tokens, valid = side(spec.vocab_size, lengths)
    source, segments = None, None
    if spec.encoder is not None:
        ids, real = side(spec.source_vocab, [max(1, one - 2) for one in lengths])
        source = Source(tokens=ids, valid=real)
    if packed:
        segments = np.zeros(tokens.shape, dtype=np.int64)
        segments[:, tokens.shape[1] // 2 :] = 1
    targets = {
        head: rng.integers(
            0,
            spec.head_size(head),
            size=tokens.shape[:1] if spec.head(head).readout else tokens.shape,
        )
        for head in spec.head_names()
    }
    return Batch(tokens=tokens, valid=valid, targets=targets, source=source, segments=segments)


@dataclass(frozen=True, slots=True)
class _Plain:
    """What plain torch finds: the objective and every gradient."""

    loss: Tensor
    gradients: dict[str, Tensor]


def _plain(model: Model, batches: Sequence[Batch], train: TrainSpec) -> _Plain:
    """Differentiate a step's objective: mean cross-entropies, penalty and balance."""
    counts, routed = totals(batches, model.spec), bool(model.spec.mixtures())
    shares = balance_shares(batches, model.spec) if routed else [None] * len(batches)
    total = model.penalty()
    for batch, share in zip(batches, shares, strict=True):
        inputs, balance = model.inputs(batch), BalanceLosses() if routed else None
        hidden_BTD = model.hidden(inputs, balance=balance)
        for head, count in counts.items():
            logits = model.logits(hidden_BTD, head, valid_BT=inputs.valid_BT).flatten(0, -2)
            targets = torch.from_numpy(batch.targets[head]).long().flatten()
            weights = torch.from_numpy(loss_weights(batch, head)).flatten().to(logits.dtype)
            each = F.cross_entropy(
                logits, targets, reduction="none", label_smoothing=train.label_smoothing
            )
            total = total + (each * weights).sum() / (count or 1.0)
        if balance is not None:
            total = total + balance.weighted(share)[1]
    parameters = dict(model.named_parameters())
    slopes = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(p) if slope is None else slope
        for (name, p), slope in zip(parameters.items(), slopes, strict=True)
    }
    return _Plain(total.detach(), gradients)


def _compared(
    found: Mapping[str, Tensor], narrow: Mapping[str, Tensor], wide: Mapping[str, Tensor]
) -> _Gap:
    """Return the worst distance from float64 beside plain float32's own."""
    largest = max(float(one.abs().max()) for one in wide.values())
    worst = _Gap()
    for name, exact in wide.items():
        scale = max(float(exact.abs().max()), FLOOR * largest) or 1.0
        apart = float((found[name].double() - exact).abs().max()) / scale
        rounding = float((narrow[name].double() - exact).abs().max()) / scale
        allowed = max(LEAST, UNITS * rounding)
        apart = apart if np.isfinite(apart) else float("inf")
        worst = max(worst, _Gap(apart / allowed, apart, allowed, name))
    return worst


def _updates(
    engine: _Trained,
    batches: Sequence[Batch],
    train: TrainSpec,
    *,
    rules: Mapping[str, Parameter] | None = None,
) -> _Gap:
    """Return how far some steps take weights from the update's formula on the same gradients.

    Both ends of each parameter are followed: the formula is of each number alone.
    """
    optimizer, rules = train.optimizer, rules or stored(engine.spec)
    assert isinstance(optimizer, AdamW)
    own = engine.own()
    weights = {name: _ends(p.detach()) for name, p in own.items()}
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in range(1, STEPS + 1):
        engine.step(batches, lr=RATE, seed=0)
        slopes = engine.slopes()
        norm = math.sqrt(sum(float(slope.double().square().sum()) for slope in slopes.values()))
        for name, gradient in slopes.items():
            slope = _ends(gradient) * min(1.0, CLIP / norm)
            first[name] = optimizer.beta1 * first[name] + (1 - optimizer.beta1) * slope
            second[name] = optimizer.beta2 * second[name] + (1 - optimizer.beta2) * slope**2
            mean = first[name] / (1 - optimizer.beta1**step)
            size = (second[name] / (1 - optimizer.beta2**step)).sqrt() + optimizer.eps
            decay = optimizer.weight_decay if rules[name].decay else 0.0
            weights[name] = weights[name] * (1 - RATE * decay) - RATE * mean / size
    worst = _Gap()
    for name, parameter in own.items():
        scale = max(1.0, float(weights[name].abs().max()))
        apart = float((_ends(parameter.detach()) - weights[name]).abs().max()) / scale
        allowed = UPDATE * RATE * STEPS
        worst = max(worst, _Gap(apart / allowed, apart, allowed, f"update of {name}"))
    return worst


def _ends(x: Tensor) -> Tensor:
    """Return the first and the last numbers of a tensor in float64, all of a small one."""
    flat = x.reshape(-1)
    if len(flat) <= 2 * FOLLOWED:
        return flat.double()
    return torch.cat((flat[:FOLLOWED], flat[-FOLLOWED:])).double()
