"""The loop: a record a step, and every step a function of its number and the seed."""

import math

import numpy as np
import pytest
import torch

from glassformer.data.build_task import build_task
from glassformer.spec.errors import InputError
from glassformer.training.engine import AtOnce, StepResult
from glassformer.training.fit import BURN_IN, find_rate, fit, step_seed
from tests.planting import Name, catches
from tests.training.samples import ENGINES, digits, engine_of


class Recorder(AtOnce):
    """An engine that notes what it is asked and learns nothing."""

    def __init__(self, spec):
        self.spec, self.asked = spec, []

    def step(self, batches, *, lr, seed):
        self.asked.append((tuple(batch.tokens.tobytes() for batch in batches), lr, seed))
        return StepResult(1.0, {"answer": 0.5}, 2.0, 3, True)


def asked_of(run, start: int = 0):
    recorder = Recorder(run.model)
    records = list(fit(recorder, build_task(run.task), run.train, start=start))
    return recorder.asked, records


@catches("sampler restarted on resume", "training.fit:fit", Name("step"), to="{it} - start")
def test_a_step_is_a_function_of_its_number() -> None:
    """Batches, rate and seed of the steps after any start are those of a run from the beginning."""
    run = digits("train.accumulate=2")
    whole, _ = asked_of(run)
    for start in (1, 7, 29, 30):
        assert asked_of(run, start)[0] == whole[start:]


def test_every_step_has_chance_of_its_own() -> None:
    asked, _ = asked_of(digits())
    assert len({seed for _, _, seed in asked}) == len(asked)
    other, _ = asked_of(digits("train.seed=1"))
    assert {seed for _, _, seed in asked}.isdisjoint(seed for _, _, seed in other)


def test_an_epoch_shows_every_example_once() -> None:
    run = digits("train.accumulate=2", "train.steps=3")
    asked, _ = asked_of(run)
    shown = [part for parts, _, _ in asked for part in parts]
    task = build_task(run.task)
    whole = task.batch("train", np.arange(task.sizes()["train"]))
    assert len(shown) == 6
    assert sum(len(part) // 8 for part in shown) == whole.valid.sum()


def test_records_tell_what_the_engine_said():
    run = digits()
    _, records = asked_of(run)
    assert [record.step for record in records] == list(range(1, 31))
    assert [record.lr for record in records] == [run.train.learning_rate(i) for i in range(30)]
    first = records[0]
    assert (first.loss, first.nll, first.grad_norm, first.tokens) == (1.0, {"answer": 0.5}, 2.0, 3)
    assert first.applied
    assert first.seconds >= 0


def test_seeds_of_steps_are_the_same_everywhere():
    assert [step_seed(0, 0), step_seed(0, 1), step_seed(1, 0)] == [
        int(np.random.SeedSequence(words).generate_state(1)[0])
        for words in ([0, 0], [0, 1], [1, 0])
    ]


@pytest.mark.parametrize("kind", ENGINES)
def test_the_same_run_twice_is_the_same_bits(kind):
    run = digits("model.decoder.dropout=0.1", "train.steps=8")
    found = []
    for _ in range(2):
        engine = ENGINES[kind].fresh(run.model, run.train)
        losses = [r.loss for r in fit(engine, build_task(run.task), run.train)]
        found.append((losses, engine.weights()))
    (one, first), (other, second) = found
    assert one == other
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", ENGINES)
def test_ten_examples_can_be_learned_by_heart(kind):
    run = digits(
        "task.examples=12",
        "train.steps=80",
        "train.lr=0.02",
        "train.batch_size=10",
        "model.d_model=16",
    )
    engine, task = engine_of(run, kind), build_task(run.task)
    for _ in fit(engine, task, run.train):
        pass
    batch = task.batch("train", np.arange(task.sizes()["train"]))
    assert (engine.logits(batch)["answer"].argmax(-1) == batch.targets["answer"]).all()


# --- the range test -------------------------------------------------------------------------------


class Curve:
    """An engine whose loss is a given function of the logarithm of the rate."""

    def __init__(self, loss, *, breaks: float = math.inf):
        self.loss, self.breaks, self.rates = loss, breaks, []

    def step(self, batches, *, lr, seed):
        self.rates.append(lr)
        return StepResult(self.loss(math.log10(lr)), {}, 1.0, 1, lr < self.breaks)


def found_on(engine, **options):
    run = digits()
    return find_rate(engine, build_task(run.task), run.train, **options)


def valley(x: float) -> float:
    """Flat, falling fastest at 1e-3, lowest near 1e-2, then rising without end."""
    return 3.0 - 2.0 / (1.0 + math.exp(-4 * (x + 3))) + math.exp(3 * (x + 1))


def test_the_rate_lies_where_the_loss_falls() -> None:
    engine = Curve(valley)
    found = found_on(engine)
    tested = engine.rates
    assert tested[0] == pytest.approx(1e-6)
    assert np.allclose(np.diff(np.log(tested)), math.log(1e6) / 149)
    assert min(tested) <= found.low <= found.suggestion <= found.high <= max(tested)
    # smoothing looks back over some ten steps, so everything is seen a little late
    assert 5e-4 < found.suggestion < 1e-2
    assert found.high < 0.1
    assert len(tested) < 150, "it stops when the loss has broken"


def test_the_curve_is_the_smoothed_loss_without_a_bias_to_zero():
    found = found_on(Curve(lambda x: 2.0 - 0.01 * x))
    assert found.curve[0][1] == pytest.approx(2.06)
    assert all(loss == pytest.approx(2.0, abs=0.1) for _, loss in found.curve)


def test_a_step_that_is_not_finite_ends_the_test():
    engine = Curve(lambda x: 2.0 - x, breaks=1e-3)
    found = found_on(engine)
    assert found.curve[-1][0] < 1e-3 <= engine.rates[-1]
    assert found.high < 1e-3


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Curve(valley, breaks=2e-6), "diverged before the range test could begin"),
        (Curve(lambda x: 10 + x), "the loss never fell"),
    ],
)
def test_a_curve_that_says_nothing_is_refused(engine, message):
    with pytest.raises(InputError, match=message):
        found_on(engine)


@pytest.mark.parametrize("options", [{"lowest": 0.0}, {"lowest": 2.0}, {"steps": 2 * BURN_IN}])
def test_a_range_that_is_none_is_refused(options):
    with pytest.raises(InputError, match="a range test from"):
        found_on(Curve(valley), **options)


@pytest.mark.parametrize("kind", ENGINES)
def test_the_suggestion_trains(kind):
    run = digits("model.decoder.dropout=0.1", "train.steps=40")
    task, rng = build_task(run.task), torch.get_rng_state()
    found = find_rate(engine_of(run, kind), task, run.train, steps=80)
    assert torch.equal(rng, torch.get_rng_state())
    assert 1e-6 <= found.low <= found.suggestion <= found.high <= 1.0
    chosen = digits("model.decoder.dropout=0.1", "train.steps=60", f"train.lr={found.suggestion}")
    losses = [r.loss for r in fit(engine_of(chosen, kind), task, chosen.train)]
    assert np.mean(losses[-6:]) < 0.8 * np.mean(losses[:6])


@pytest.mark.parametrize("kind", ENGINES)
def test_the_range_test_is_the_same_twice(kind):
    run = digits()
    task = build_task(run.task)
    first, second = (find_rate(engine_of(run, kind), task, run.train, steps=40) for _ in range(2))
    assert first == second
