"""The loop: a record a step, and every step a function of its number and the seed."""

import numpy as np
import pytest

from glassformer.data.build_task import build_task
from glassformer.training.engine import AtOnce, StepResult
from glassformer.training.fit import fit, step_seed
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


def a_step_is_a_function_of_its_number() -> None:
    """Batches, rate and seed of the steps after any start are those of a run from the beginning."""
    run = digits("train.accumulate=2")
    whole, _ = asked_of(run)
    for start in (1, 7, 29, 30):
        assert asked_of(run, start)[0] == whole[start:]


def test_a_step_is_a_function_of_its_number():
    a_step_is_a_function_of_its_number()


def every_step_has_chance_of_its_own() -> None:
    asked, _ = asked_of(digits())
    assert len({seed for _, _, seed in asked}) == len(asked)
    other, _ = asked_of(digits("train.seed=1"))
    assert {seed for _, _, seed in asked}.isdisjoint(seed for _, _, seed in other)


def test_every_step_has_chance_of_its_own():
    every_step_has_chance_of_its_own()


def an_epoch_shows_every_example_once() -> None:
    run = digits("train.accumulate=2", "train.steps=3")
    asked, _ = asked_of(run)
    shown = [part for parts, _, _ in asked for part in parts]
    task = build_task(run.task)
    whole = task.batch("train", np.arange(task.sizes()["train"]))
    assert len(shown) == 6
    assert sum(len(part) // 8 for part in shown) == whole.valid.sum()


def test_an_epoch_shows_every_example_once():
    an_epoch_shows_every_example_once()


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
