"""Checks of our own models: parameter names, ties, taps, caches, compilation, dropout.

Dropout is observed at the taps before and after each point where the spec puts it.

Models that are trained as one are compared with each of them trained alone.
"""

import copy
import inspect
import math
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from glasscheck.measure import (
    EXACT,
    TOLERANCE,
    Measure,
    NotOffered,
    gap,
    relative_gap,
    seeded,
)
from glasscheck.rows.invariants import LENGTH, tokens_of, tolerance_of
from glasscheck.subject import Subject
from glassformer.checks.subject import size_of, with_source
from glassformer.data.batch import Batch, Source
from glassformer.models.inputs import Inputs
from glassformer.models.model import EncoderDecoder, Model, build
from glassformer.nn.block import TransformerBlock
from glassformer.nn.cache import GrowingCache
from glassformer.nn.embedding import FactorizedTokenEmbedding
from glassformer.nn.heads import TiedHead
from glassformer.nn.taps import Taps
from glassformer.spec import presets
from glassformer.spec.manifest import count_parameters, stored
from glassformer.spec.model import (
    Attention,
    Dropout,
    ModelSpec,
    NextHead,
    tap_shapes,
)
from glassformer.spec.tasks import NAMED_TASKS
from glassformer.spec.train import AdamW, RunSpec, TrainSpec
from glassformer.training.fit import step_seed
from glassformer.training.stacked import StackedEngine
from glassformer.training.stacked_batches import Work
from glassformer.training.torch_engine import TorchEngine

#: Taps that are edited in one forward, each in a sequence of its own of this many tokens.
EDITS, EDITED_LENGTH = 8, 3
#: Blocks of a deeper stack whose taps are edited: the first, the last and some between them. The
#: names of all are compared, and every block runs the same code.
EDITED_BLOCKS = 6


def _inputs(subject: Subject) -> Inputs:
    return with_source(subject.ours().spec, tokens_of(subject, 2, LENGTH, seed=81), None)


#: A model of more weights than this is cut to so many blocks of each kind by rows that would take
#: minutes and many gigabytes with all of them, and find the same.
LARGE, KEPT = 50_000_000, 2


def shortened(model: Model) -> Model:
    """Return a large model with its first blocks of each kind; a smaller one as it is."""
    if sum(p.numel() for p in model.parameters()) <= LARGE:
        return model
    state, kept, stacks = model.state_dict(), {}, {}
    for prefix, stack in model.spec.stacks().items():
        runs = tuple(replace(run, count=min(run.count, KEPT)) for run in stack.layers)
        stacks[prefix or "decoder."] = replace(stack, layers=runs)
        first = new = 0
        for run, short in zip(stack.layers, runs, strict=True):
            for old in range(first, first + short.count):
                kept[f"{prefix}blocks.{old}."] = f"{prefix}blocks.{new}."
                new += 1
            first += run.count
    spec = replace(model.spec, decoder=stacks["decoder."], encoder=stacks.get("encoder."))
    weights = {}
    for name, tensor in state.items():
        block = re.match(r"(.*?blocks\.\d+\.)(.*)", name)
        if block is None:
            weights[name] = tensor
        elif block[1] in kept:
            weights[kept[block[1]] + block[2]] = tensor
    twin = type(model)(spec).to(next(model.parameters()))
    twin.load_state_dict(weights)
    return twin.eval()


def size_with(subject: Subject, model: Model) -> str:
    """Return the subject's size, and how many of its blocks a shortened copy has."""
    cut = model.spec.n_layers != subject.ours().spec.n_layers
    return f"{subject.size}, {model.spec.n_layers} blocks of it" if cut else subject.size


def conforms_to_manifest(subject: Subject) -> Measure:
    """Names and shapes of parameters are the manifest's, and nothing else is in the state."""
    model = subject.ours()
    wanted = {name: p.shape for name, p in stored(model.spec).items()}
    have = {name: tuple(p.shape) for name, p in model.named_parameters()}
    saved = set(model.state_dict(keep_vars=True))
    aliases = {p for p in saved if p not in wanted and not _is_alias(model, p)}
    wrong = set(wanted.items()) ^ set(have.items())
    numbers = sum(p.numel() for p in model.parameters())
    mistakes = len(wrong) + len(aliases) + (numbers != count_parameters(model.spec))
    note = ", ".join(sorted({name for name, _ in wrong} | aliases))[:200]
    return Measure(float(mistakes), EXACT, f"{subject.size}, {numbers:,} parameters", note)


def _is_alias(model: Model, key: str) -> bool:
    """Return True if a key is a second name of a parameter, as of a shared embedding."""
    tensor = model.state_dict(keep_vars=True)[key]
    return any(tensor is p for p in model.parameters())


def tied(subject: Subject) -> Measure:
    """The tied head reads the embedding's own storage: change that, and the logits follow."""
    model = copy.deepcopy(subject.ours())
    if "next" not in model.heads or not isinstance(model.heads["next"], TiedHead):
        raise NotOffered("its head has weights of its own")
    embed = model.output_embedding()
    hidden = torch.randn(2, 3, model.spec.d_model, generator=seeded(82)).to(
        next(model.parameters())
    )
    with torch.no_grad():
        for parameter in embed.parameters():
            noise = torch.randn(parameter.shape, generator=seeded(83)).to(parameter)
            parameter.add_(noise / math.sqrt(parameter.shape[-1]))
        logits = model.logits(hidden, "next")
        if isinstance(embed, FactorizedTokenEmbedding):
            expected = hidden @ (embed.u @ embed.v).T
        else:
            expected = hidden @ embed.weight.T
        bias = model.heads["next"].bias
        expected = expected if bias is None else expected + bias
        head = next(head for head in model.spec.heads if isinstance(head, NextHead))
        expected = expected * head.scale
        if head.softcap is not None:
            expected = head.softcap * torch.tanh(expected / head.softcap)
    names = [name for name, _ in model.named_parameters() if name.startswith("heads.next.")]
    worst = math.inf if set(names) - {"heads.next.bias"} else relative_gap(logits, expected)
    return Measure(worst, tolerance_of(logits, subject), subject.size)


@torch.no_grad()
def explicit_is_fused(subject: Subject) -> Measure:
    """Reading attention's weights or scores takes the explicit path; the logits stay the same."""
    model, inputs = subject.ours(), _inputs(subject)
    plain, worst = model(inputs), 0.0
    for read in ("*.weights", "*.scores", "*"):
        taps = Taps(read=read)
        for head, logits in model(inputs, taps=taps).items():
            worst = max(worst, relative_gap(logits, plain[head]))
            bar = tolerance_of(logits, subject)
        if not taps.seen:
            worst = math.inf
    return Measure(worst, bar, subject.size)


@torch.no_grad()
def attention_pattern(subject: Subject) -> Measure:
    """Attention is non-zero exactly where the spec allows, pair by pair: order, window, padding."""
    model, mistakes = subject.ours(), 0
    tokens = tokens_of(subject, 2, LENGTH, seed=87)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[0, : LENGTH // 3] = False
    valid[1, LENGTH // 2 :] = False
    inputs = with_source(model.spec, tokens, valid)
    taps = Taps(read="*.weights")
    model(inputs, taps=taps)
    for prefix, stack in model.spec.stacks().items():
        side = inputs.source_valid_BS if prefix == "encoder." else valid
        assert side is not None
        for layer, block in enumerate(stack.blocks()):
            at = f"{prefix}blocks.{layer}."
            seen = {f"{at}attn.weights": (side, side, block.attention)}
            if block.cross is not None:
                assert inputs.source_valid_BS is not None
                seen[f"{at}cross.weights"] = (side, inputs.source_valid_BS, block.cross)
            for name, (queries, keys, attention) in seen.items():
                expected = _allowed(queries.tolist(), keys.tolist(), attention)
                mistakes += int(((taps.seen[name] > 0).all(1) != expected).sum())
    return Measure(float(mistakes), EXACT, subject.size)


def _allowed(queries: list[list[bool]], keys: list[list[bool]], attention: Attention) -> Tensor:
    """Return the allowed pairs of query and key positions, for every head."""
    width = attention.window or math.inf
    rows = [
        [
            [
                q and k and (s <= t or not attention.causal) and abs(t - s) < width
                for s, k in enumerate(row_keys)
            ]
            for t, q in enumerate(row_queries)
        ]
        for row_queries, row_keys in zip(queries, keys, strict=True)
    ]
    return torch.tensor(rows)


@torch.no_grad()
def taps_are_named(subject: Subject) -> Measure:
    """Exactly the taps of the spec are recorded; an edit reaches the logits; no hook remains."""
    model, row = subject.ours(), tokens_of(subject, 1, EDITED_LENGTH, seed=81)
    inputs = with_source(model.spec, row.expand(EDITS, -1), None)
    taps = Taps(read="*")
    plain = model(inputs, taps=taps)
    wanted = tap_shapes(model.spec)
    mistakes = len(set(taps.seen) ^ set(wanted))
    mistakes += sum(taps.seen[name].ndim != len(shape) for name, shape in wanted.items())
    edited = _edited_taps(model.spec)
    for start in range(0, len(edited), EDITS):
        # Everything is read again, so that the same path is taken and equal bits mean no effect.
        names = edited[start : start + EDITS]
        edits = {name: partial(_moved, place=place) for place, name in enumerate(names)}
        changed = model(inputs, taps=Taps(read="*", edit=edits))
        felt = [(changed[head] != plain[head]).flatten(1).any(1) for head in plain]
        mistakes += int((~torch.stack(felt).any(0)[: len(names)]).sum())
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return Measure(float(mistakes + hooks), EXACT, f"{subject.size}, {len(wanted)} taps")


def _edited_taps(spec: ModelSpec) -> list[str]:
    """Return the taps outside the blocks, and those of some blocks of each stack."""
    left_out = set()
    for prefix, stack in spec.stacks().items():
        ends = stack.n_layers - 1
        kept = {round(i * ends / (EDITED_BLOCKS - 1)) for i in range(EDITED_BLOCKS)}
        left_out |= {f"{prefix}blocks.{i}." for i in range(stack.n_layers) if i not in kept}
    return [name for name in tap_shapes(spec) if not name.startswith(tuple(left_out))]


def _moved(x: Tensor, *, place: int) -> Tensor:
    """Change two entries of one sequence: a common shift of scores, or padding, has no effect."""
    x = x.clone()
    for end in (0, -1):
        x[(place, *(end,) * (x.ndim - 1))] += 1.0
    return x


@torch.no_grad()
def growing_is_fixed(subject: Subject) -> Measure:
    """A prompt, single tokens, then reordered rows, against the complete sequence."""
    model = subject.ours()
    if subject.step is None:
        raise NotOffered("no step by step forward")
    whole = _inputs(subject)
    expected = torch.cat(list(model(whole).values()), -1)
    cache, parts, start = GrowingCache(), [], 0
    for width in (4, 1, 2, whole.tokens_BT.shape[1] - 7):
        piece = replace(whole, tokens_BT=whole.tokens_BT[:, start : start + width])
        if start == 7:
            cache.reorder([1, 0])
            piece = replace(piece, tokens_BT=piece.tokens_BT.flip(0))
        parts.append(torch.cat(list(model(piece, cache=cache).values()), -1))
        start += width
    parts[-1] = parts[-1].flip(0)
    result = torch.cat(parts, 1)
    return Measure(relative_gap(result, expected), tolerance_of(expected, subject), subject.size)


@torch.no_grad()
def cross_reads_encoder(subject: Subject) -> Measure:
    """In every decoder layer cross keys and values are projections of the encoder's output."""
    model = subject.ours()
    if not isinstance(model, EncoderDecoder):
        raise NotOffered("no encoder")
    inputs = _inputs(subject)
    taps = Taps(read=["decoder.blocks.*", "encoder.final"])
    model(inputs, taps=taps)
    other = Taps(read="decoder.blocks.*.cross.out")
    assert inputs.source_BS is not None
    changed = replace(inputs, source_BS=(inputs.source_BS + 1) % model.spec.source_vocab)
    # The decoder's own residual stream is kept fixed, so that a change can only come through
    # cross-attention.
    held = {
        f"decoder.blocks.{i}.resid_mid": taps.seen[f"decoder.blocks.{i}.resid_mid"]
        for i in range(model.spec.n_layers)
    }
    other.edits.update(held)
    model(changed, taps=other)
    worst, memory = 0.0, taps.seen["encoder.final"]
    for i, block in enumerate(model.decoder.blocks):
        assert isinstance(block, TransformerBlock) and block.cross is not None
        for leaf, projection in (("k", block.cross.k_proj), ("v", block.cross.v_proj)):
            seen = taps.seen[f"decoder.blocks.{i}.cross.{leaf}"]
            worst = max(worst, relative_gap(seen.transpose(1, 2).flatten(2), projection(memory)))
        out = f"decoder.blocks.{i}.cross.out"
        if gap(other.seen[out], taps.seen[out]) == 0.0:
            worst = math.inf
    return Measure(worst, tolerance_of(memory, subject), subject.size)


def same_seed_same_weights(subject: Subject) -> Measure:
    """Two builds from one seed agree in every bit; another seed gives other weights."""
    spec = subject.ours().spec
    first, again, other = (build(spec, generator=seeded(seed)) for seed in (84, 84, 85))
    pairs = zip(first.parameters(), again.parameters(), strict=True)
    worst = max(gap(a, b) for a, b in pairs)
    others = zip(first.parameters(), other.parameters(), strict=True)
    if all(torch.equal(a, b) for a, b in others):
        worst = math.inf
    return Measure(worst, EXACT, size_of(spec))


def check_compiler() -> None:
    """On a CPU torch.compile writes C++: without a compiler there is nothing to compare."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise NotOffered("no C++ compiler on this machine")


def compiled_is_eager(subject: Subject) -> Measure:
    """torch.compile of the body, forward and backward, against the same body run eagerly."""
    model, inputs = copy.deepcopy(subject.ours()), _inputs(subject)
    check_compiler()
    compiled = torch.compile(model.hidden)
    results = []
    for body in (compiled, model.hidden):
        model.zero_grad()
        hidden = body(inputs)
        # Not the squares: behind a norm their sum hardly moves, and its gradient is rounding.
        push = torch.randn(hidden.shape, generator=seeded(88)).to(hidden)
        (hidden * push).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append((hidden, gradients))
    (fast, fast_gradients), (slow, slow_gradients) = results
    worst = relative_gap(fast, slow)
    for ours, theirs in zip(fast_gradients, slow_gradients, strict=True):
        worst = max(worst, relative_gap(ours, theirs))
    return Measure(worst, tolerance_of(slow, subject), subject.size)


#: For each dropout: the tap that is still the same, and the one that first differs.
PLACES = {
    "embedding": (None, "embed"),
    "attention": ("attn.weights", "attn.heads"),
    "residual": ("attn.out", "resid_mid"),
    "ffn": ("ffn.hidden", "ffn.out"),
}


def dropout_places(subject: Subject) -> Measure:
    """Each rate acts where its name says and nowhere before, in training only."""
    model, mistakes = shortened(subject.ours()), 0
    inputs = with_source(model.spec, tokens_of(subject, 2, LENGTH, seed=81), None)
    for place, (same, differs) in PLACES.items():
        for prefix in model.spec.stacks():
            if place == "ffn" and f"{prefix}blocks.0" in model.spec.mixtures():
                same = "ffn.routing"
            twin = _with_dropout(model, prefix, place)
            block = f"{prefix}blocks.0."
            after = f"{prefix}embed" if differs == "embed" else f"{block}{differs}"
            before = f"{block}{same}" if same else None
            names = [after, before] if before else [after]
            first, second = (_one_run(twin, inputs, names, seed=seed) for seed in (1, 2))
            mistakes += torch.equal(first[after], second[after])
            if before:
                mistakes += not torch.equal(first[before], second[before])
            twin.eval()
            first, second = (_one_run(twin, inputs, [], seed=seed) for seed in (1, 2))
            mistakes += any(not torch.equal(first[key], second[key]) for key in first)
    return Measure(float(mistakes), EXACT, size_with(subject, model))


def _with_dropout(model: Model, prefix: str, place: str) -> Model:
    """Return a copy in training mode with a single dropout."""
    rates = {"decoder": Dropout(), "encoder": Dropout()}
    rates[prefix.removesuffix(".") or "decoder"] = Dropout(**{place: 0.5})
    spec = model.spec
    spec = replace(spec, decoder=replace(spec.decoder, dropout=rates["decoder"]))
    if spec.encoder is not None:
        spec = replace(spec, encoder=replace(spec.encoder, dropout=rates["encoder"]))
    twin = type(model)(spec).to(next(model.parameters()))
    twin.load_state_dict(model.state_dict())
    return twin.train()


@torch.no_grad()
def _one_run(model: Model, inputs: Inputs, names: list[str], *, seed: int) -> dict[str, Tensor]:
    taps = Taps(read=names)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        answers = model(inputs, taps=taps)
    return {**taps.seen, **answers}


#: The most that losses, norms and logits may differ in float64 after 50 steps.
DEEP_TOLERANCE = 1e-10
STEPS, DEEP_STEPS = 3, 50
SIZES = {
    "vocab_size": 23,
    "d_model": 16,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_head": 6,
    "d_ff": 17,
    "shared_d_ff": 17,
    "n_experts": 3,
    "n_layers": 2,
    "max_seq_len": 11,
}
SETTINGS = (
    TrainSpec(lr=3e-3, clip=0.5, optimizer=AdamW(weight_decay=0.1), steps=60),
    TrainSpec(lr=1e-3, clip=0.1, label_smoothing=0.1, steps=70),
    TrainSpec(lr=2e-3, clip=0.0, optimizer=AdamW(beta2=0.95), steps=80),
    TrainSpec(lr=1e-3),
)
RATES = (Dropout.from_number(0.2), Dropout(), Dropout(attention=0.3, ffn=0.1), Dropout())
BROKEN = len(SETTINGS) - 1


def together_is_alone(dtype: torch.dtype) -> Measure:
    """A decoder and an encoder-decoder, a few steps."""
    return _compared(("core", "seq2seq"), STEPS, TOLERANCE[dtype], dtype)


def every_preset_together_is_alone(dtype: torch.dtype) -> Measure:
    """Every preset that is stacked, 50 steps."""
    names = [name for name in presets.PRESETS if not presets.preset(name).mixtures()]
    return _compared(names, DEEP_STEPS, DEEP_TOLERANCE, dtype)


def _compared(names: Iterable[str], steps: int, tolerance: float, dtype: torch.dtype) -> Measure:
    worst, note = 0.0, ""
    for name in names:
        found = _apart(_runs(name, dtype), steps)
        if found > worst:
            worst, note = found, name
    return Measure(worst, tolerance, f"{len(SETTINGS)} models, {steps} steps", note)


def _runs(name: str, dtype: torch.dtype) -> list[RunSpec]:
    precision: Literal["float32", "float64"] = "float64" if dtype == torch.float64 else "float32"
    known = inspect.signature(presets.PRESETS[name]).parameters
    model = presets.preset(name, **{key: size for key, size in SIZES.items() if key in known})
    runs = []
    for seed, (train, rates) in enumerate(zip(SETTINGS, RATES, strict=True)):
        encoder = None if model.encoder is None else replace(model.encoder, dropout=rates)
        own = replace(model, encoder=encoder, decoder=replace(model.decoder, dropout=rates))
        train = replace(train, seed=seed, batch_size=3, precision=precision)
        runs.append(RunSpec(model=own, task=NAMED_TASKS["digits"], train=train))
    return runs


def _apart(runs: list[RunSpec], steps: int) -> float:
    """Return the largest difference of losses, norms and last logits between the two ways."""
    stack, worst = StackedEngine(runs), 0.0
    alone = [TorchEngine.fresh(run.model, run.train) for run in runs[:BROKEN]]
    nothing = {name: np.full_like(a, np.nan) for name, a in stack.weights(BROKEN).items()}
    stack.load_weights(BROKEN, nothing)
    for step in range(steps):
        work = {number: _work(run, step) for number, run in enumerate(runs)}
        results = stack.submit(work)()
        if results[BROKEN].applied:
            return float("inf")
        for number, engine in enumerate(alone):
            own, theirs = work[number], results[number]
            ours = engine.step(own.batches, lr=own.lr, seed=own.seed)
            gaps = [ours.loss - theirs.loss, ours.grad_norm - theirs.grad_norm]
            gaps += [ours.nll[head] - theirs.nll[head] for head in ours.nll]
            worst = float(np.abs([worst, *gaps]).max())  # NaN, if there is one
    for number, engine in enumerate(alone):
        batch = uneven_batch(runs[number].model, np.random.default_rng(83))
        together = stack.logits(number, batch)
        for head, logits in engine.logits(batch).items():
            worst = float(np.max([worst, np.abs(logits - together[head]).max()]))
    return worst if np.isfinite(worst) else float("inf")


def preset_run(name: str, dtype: torch.dtype) -> RunSpec:
    """Return a small model of a preset with settings that clip and decay, and no dropout."""
    run = _runs(name, dtype)[0]
    encoder = None if run.model.encoder is None else replace(run.model.encoder, dropout=Dropout())
    decoder = replace(run.model.decoder, dropout=Dropout())
    train = replace(run.train, batch_size=4)
    return replace(run, train=train, model=replace(run.model, encoder=encoder, decoder=decoder))


def _work(run: RunSpec, step: int) -> Work:
    rng = np.random.default_rng([84, run.train.seed, step])
    seed = step_seed(run.train.seed, step)
    return Work([uneven_batch(run.model, rng)], run.train.learning_rate(step), seed)


def uneven_batch(spec: ModelSpec, rng: np.random.Generator, *, rows: int | None = None) -> Batch:
    """Return sequences of uneven lengths, two or three of them, with targets for every head."""
    rows = int(rng.integers(2, 4)) if rows is None else rows

    def side(vocab: int) -> tuple[np.ndarray, np.ndarray]:
        lengths = rng.integers(2, 8, size=rows)
        valid = np.arange(lengths.max()) < lengths[:, None]
        return np.where(valid, rng.integers(0, vocab, size=valid.shape), 0), valid

    tokens, valid = side(spec.vocab_size)
    targets = {
        head: rng.integers(
            0, spec.head_size(head), size=rows if spec.head(head).readout else tokens.shape
        )
        for head in spec.head_names()
    }
    source = None
    if spec.encoder is not None:
        ids, real = side(spec.source_vocab)
        source = Source(tokens=ids, valid=real)
    return Batch(tokens=tokens, valid=valid, targets=targets, source=source)
