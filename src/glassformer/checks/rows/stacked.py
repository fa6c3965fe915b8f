"""Checks of models that are trained as one: each is what it would be alone.

Three models of one shape differ in all that they may: seed, rate, decay, clipping, label smoothing,
dropout, batches of other lengths. A fourth has weights that are not finite, and must disturb none.
"""

import inspect
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from glassformer.checks.measure import TOLERANCE, Measure
from glassformer.data.batch import Batch, Source
from glassformer.spec import presets
from glassformer.spec.model import Dropout, ModelSpec
from glassformer.spec.tasks import NAMED_TASKS
from glassformer.spec.train import AdamW, RunSpec, TrainSpec
from glassformer.training.fit import step_seed
from glassformer.training.stacked import StackedEngine
from glassformer.training.stacked_step import Work
from glassformer.training.torch_engine import TorchEngine

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
    return _compared(("core", "seq2seq"), STEPS, TOLERANCE[dtype])


def every_preset_together_is_alone(dtype: torch.dtype) -> Measure:
    """Every preset, 50 steps."""
    return _compared(presets.PRESETS, DEEP_STEPS, DEEP_TOLERANCE)


def _compared(names: Iterable[str], steps: int, tolerance: float) -> Measure:
    worst, note = 0.0, ""
    for name in names:
        found = _apart(_runs(name), steps)
        if found > worst:
            worst, note = found, name
    return Measure(worst, tolerance, f"{len(SETTINGS)} models, {steps} steps", note)


def _runs(name: str) -> list[RunSpec]:
    known = inspect.signature(presets.PRESETS[name]).parameters
    model = presets.preset(name, **{key: size for key, size in SIZES.items() if key in known})
    runs = []
    for seed, (train, rates) in enumerate(zip(SETTINGS, RATES, strict=True)):
        encoder = None if model.encoder is None else replace(model.encoder, dropout=rates)
        own = replace(model, encoder=encoder, decoder=replace(model.decoder, dropout=rates))
        train = replace(train, seed=seed, batch_size=3, precision="float64")
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
        batch = _batch(runs[number].model, np.random.default_rng(83))
        together = stack.logits(number, batch)
        for head, logits in engine.logits(batch).items():
            worst = float(np.max([worst, np.abs(logits - together[head]).max()]))
    return worst if np.isfinite(worst) else float("inf")


def _work(run: RunSpec, step: int) -> Work:
    rng = np.random.default_rng([84, run.train.seed, step])
    seed = step_seed(run.train.seed, step)
    return Work([_batch(run.model, rng)], run.train.learning_rate(step), seed)


def _batch(spec: ModelSpec, rng: np.random.Generator) -> Batch:
    """Return two or three sequences of uneven lengths, with targets for every head."""
    rows = int(rng.integers(2, 4))

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
