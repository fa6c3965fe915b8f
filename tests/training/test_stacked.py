"""Many models trained as one: each is what it would be alone, whatever the others do."""

import inspect
from dataclasses import replace

import numpy as np
import pytest

from glassformer.checks.rows.own_models import uneven_batch
from glassformer.spec import presets
from glassformer.spec.model import Dropout, ModelSpec
from glassformer.spec.serialize import override
from glassformer.spec.tasks import DigitsTask
from glassformer.spec.train import SGD, RunSpec, TrainSpec
from glassformer.training.fit import step_seed
from glassformer.training.stacked import StackedEngine
from glassformer.training.stacked_batches import Work
from glassformer.training.torch_engine import TorchEngine

SIZES = {
    "vocab_size": 23,
    "d_model": 16,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_head": 6,
    "d_ff": 17,
    "shared_d_ff": 17,
    "n_experts": 3,
    "n_layers": 1,
    "max_seq_len": 11,
}
SETTINGS = (
    ("train.lr=0.01", "train.optimizer.weight_decay=0.1", "train.clip=0.5"),
    ("train.lr=0.003", "train.label_smoothing=0.1", "train.clip=0"),
    ("train.lr=0.001", "train.optimizer.beta2=0.95", "train.steps=70"),
)
DROPOUTS = (Dropout.from_number(0.2), Dropout(), Dropout(attention=0.3, ffn=0.1))


def small(name: str) -> ModelSpec:
    """A preset in few numbers."""
    known = inspect.signature(presets.PRESETS[name]).parameters
    return presets.preset(name, **{key: size for key, size in SIZES.items() if key in known})


def runs_of(model: ModelSpec, *changes: str) -> list[RunSpec]:
    """Three runs that differ in all that they may, in float64."""
    runs = []
    for seed, (settings, rates) in enumerate(zip(SETTINGS, DROPOUTS, strict=True)):
        encoder = None if model.encoder is None else replace(model.encoder, dropout=rates)
        own = replace(model, encoder=encoder, decoder=replace(model.decoder, dropout=rates))
        train = TrainSpec(steps=60, batch_size=3, seed=seed, precision="float64")
        run = RunSpec(model=own, task=DigitsTask(), train=train)
        runs.append(override(run, [*settings, *changes]))
    return runs


def work_of(run: RunSpec, step: int) -> Work:
    """A run's share of a step: a function of its seed and the step."""
    rng = np.random.default_rng([run.train.seed, step])
    batches = [uneven_batch(run.model, rng) for _ in range(run.train.accumulate)]
    return Work(batches, run.train.learning_rate(step), step_seed(run.train.seed, step))


def alone(run: RunSpec, steps: int) -> tuple[TorchEngine, list[float]]:
    """The same run in an engine of its own: its losses, then the engine."""
    engine, losses = TorchEngine.fresh(run.model, run.train), []
    for step in range(steps):
        work = work_of(run, step)
        result = engine.step(work.batches, lr=work.lr, seed=work.seed)
        losses += [result.loss, result.grad_norm, *result.nll.values(), result.balance or 0.0]
    return engine, losses


def stacked(stack: StackedEngine, first: int, last: int) -> dict[int, list[float]]:
    """Steps of all live members: their losses."""
    losses: dict[int, list[float]] = {member: [] for member in stack.live}
    for step in range(first, last):
        work = {member: work_of(stack.runs[member], step) for member in stack.live}
        for member, result in stack.submit(work)().items():
            numbers = [result.loss, result.grad_norm, *result.nll.values(), result.balance or 0.0]
            losses[member] += numbers
    return losses


def gap(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The largest difference of two sets of arrays, which have the same names and types."""
    assert [*a] == [*b] and [x.dtype for x in a.values()] == [x.dtype for x in b.values()]
    return max(float(np.abs(x - b[name]).max()) for name, x in a.items())


STACKED = [name for name in presets.PRESETS if not presets.preset(name).mixtures()]


@pytest.mark.parametrize("name", STACKED)
def test_together_is_alone(name):
    runs = runs_of(small(name), "train.accumulate=2")
    stack = StackedEngine(runs)
    together = stacked(stack, 0, 4)
    for member, run in zip(stack.members, runs, strict=True):
        engine, losses = alone(run, 4)
        assert np.allclose(losses, together[member.number], rtol=0, atol=1e-11)
        assert gap(engine.weights(), member.weights()) < 1e-10
        assert gap(engine.state(), member.state()) < 1e-10
        batch = uneven_batch(run.model, np.random.default_rng(7))
        assert gap(engine.logits(batch), member.logits(batch)) < 1e-10
        for head, judged in member.judge(batch).items():
            assert np.allclose(judged.nll, engine.judge(batch)[head].nll, rtol=0, atol=1e-10)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_together_is_alone(momentum):
    runs = [
        replace(run, train=replace(run.train, optimizer=SGD(momentum=momentum * (i > 0))))
        for i, run in enumerate(runs_of(small("core")))
    ]
    stack = StackedEngine(runs)
    together = stacked(stack, 0, 4)
    for member, run in zip(stack.members, runs, strict=True):
        engine, losses = alone(run, 4)
        assert np.allclose(losses, together[member.number], rtol=0, atol=1e-11)
        assert gap(engine.state(), member.state()) < 1e-10
