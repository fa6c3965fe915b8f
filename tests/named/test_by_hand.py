"""Source 003's training by its own names: faces over the one loop, and nothing of their own."""

import numpy as np
import pytest

from glassformer.byhand.model import Model
from glassformer.data.build_task import build_task
from glassformer.lab.measure import evaluate as measure
from glassformer.named import by_hand
from glassformer.named.by_hand import Trainer, evaluate, train_one_epoch
from glassformer.training.fit import fit
from tests.training.samples import digits, engine_of


def trainer_of(run) -> Trainer:
    weights = engine_of(run, "numpy").weights()
    model = Model(run.model, params=weights, dtype=np.float32)
    return Trainer(model, build_task(run.task), run.train)


@pytest.mark.parametrize("steps", [12, 30])
def test_epochs_are_the_one_loop(steps):
    """Two epochs, weight for weight; the schedule does not start anew with an epoch."""
    run = digits(f"train.steps={steps}")
    trainer, engine = trainer_of(run), engine_of(run, "numpy")
    records = fit(engine, trainer.task, run.train)
    for _ in range(2):
        losses = [next(records).loss for _ in range(6)]
        assert train_one_epoch(trainer) == pytest.approx(sum(losses) / 6, rel=1e-15)
    assert trainer.epochs == 2
    for name, array in trainer.engine.weights().items():
        assert np.array_equal(array, engine.weights()[name]), name


def test_an_epoch_is_every_example_once_even_with_a_short_batch():
    run = digits("train.batch_size=9")
    trainer = trainer_of(run)
    train_one_epoch(trainer)
    assert trainer.engine.optimizer.steps == 6  # 48 examples: five batches of 9 and one of 3


def test_losses_fall_and_accuracy_rises():
    run = digits("train.steps=180", "train.lr=0.02", 'train.schedule={"kind": "ConstantSchedule"}')
    trainer = trainer_of(run)
    before = evaluate(trainer, split="train")
    losses = [train_one_epoch(trainer) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    assert evaluate(trainer, split="train") > max(before, 0.5)


def test_evaluate_is_the_houses_accuracy_and_changes_nothing():
    trainer = trainer_of(digits())
    train_one_epoch(trainer)
    weights = trainer.engine.weights()
    want = measure.evaluate(trainer.engine, trainer.task, split="val").accuracy
    assert evaluate(trainer) == want
    assert all(np.array_equal(weights[n], a) for n, a in trainer.engine.weights().items())


def test_the_sources_names_are_all_there():
    for name in by_hand.__all__:
        assert callable(getattr(by_hand, name)), name
