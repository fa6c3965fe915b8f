"""Source 003's training by its own names: data, an epoch, an evaluation."""

import numpy as np
import pytest

from glassformer.byhand.model import Model
from glassformer.lab.measure import evaluate as measure
from glassformer.named import by_hand
from glassformer.named.by_hand import (
    REVERSE_VOCABULARY,
    SGD,
    VOCABULARY,
    Adam,
    CrossEntropyLoss,
    Transformer,
    create_batches,
    evaluate,
    generate_dataset,
    split_dataset,
    train_one_epoch,
)
from glassformer.spec.errors import InputError
from glassformer.spec.train import AdamW, ConstantSchedule, TrainSpec
from glassformer.training.numpy_engine import NumpyEngine


def rng():
    return np.random.default_rng(7)


def small() -> Transformer:
    return Transformer(20, 16, 2, 24, 1, rng=rng())


EXAMPLES = generate_dataset(60, rng())


def test_the_vocabulary_and_the_data():
    assert len(VOCABULARY) == len(REVERSE_VOCABULARY) == 20
    assert all(VOCABULARY[name] == i for i, name in REVERSE_VOCABULARY.items())
    assert len(set(EXAMPLES)) == 60
    assert generate_dataset(60, rng()) == EXAMPLES
    parts = split_dataset(generate_dataset(10_000, rng()))
    assert [len(part) for part in parts] == [8_000, 1_000, 1_000]
    assert not set(parts[0]) & set(parts[1]) | set(parts[1]) & set(parts[2])


def test_batches_hold_every_example_once():
    batches = create_batches(EXAMPLES, 9, rng())
    assert [len(batch.tokens) for batch in batches] == [9] * 6 + [6]
    answers = np.concatenate([batch.targets["answer"] for batch in batches])
    assert sorted(answers.tolist()) == sorted(example.answer for example in EXAMPLES)
    assert answers.tolist() != [example.answer for example in EXAMPLES]
    plain = create_batches(EXAMPLES, 9)
    assert plain[0].targets["answer"].tolist() == [e.answer for e in EXAMPLES[:9]]


def test_an_epoch_is_the_steps_of_the_engine():
    """The same batches through the common engine: the same losses and weights."""
    model, batches = small(), create_batches(EXAMPLES, 9)
    copy = Model(model.spec, params=model.params)
    train = TrainSpec(
        steps=7,
        lr=3e-3,
        clip=0.0,
        precision="float64",
        schedule=ConstantSchedule(),
        optimizer=AdamW(weight_decay=0.0, beta2=0.999, eps=1e-8),
    )
    engine = NumpyEngine(copy, train)
    losses = [engine.step([batch], lr=3e-3, seed=0).loss for batch in batches]
    found = train_one_epoch(model, batches, CrossEntropyLoss(), Adam(model, lr=3e-3), log_every=0)
    sizes = [len(batch.tokens) for batch in batches]
    assert found == pytest.approx(np.average(losses, weights=sizes), rel=1e-12)
    for name, array in copy.params.items():
        np.testing.assert_allclose(model.params[name], array, rtol=0, atol=1e-12, err_msg=name)


def test_losses_fall_and_accuracy_rises(capsys):
    model, batches = small(), create_batches(EXAMPLES, 10)
    adam, loss = Adam(model, lr=0.01), CrossEntropyLoss()
    before = evaluate(model, batches)
    losses = [train_one_epoch(model, batches, loss, adam, log_every=3) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    assert evaluate(model, batches) > max(before, 0.5)
    assert capsys.readouterr().out.startswith("batch    3  loss ")
    sgd = train_one_epoch(small(), batches, loss, SGD(small(), lr=0.1), log_every=0)
    assert np.isfinite(sgd)


def test_evaluate_is_the_engines_accuracy_and_changes_nothing():
    from glassformer.data.build_task import build_task
    from glassformer.spec.tasks import DigitsTask

    task = build_task(DigitsTask(examples=200))
    model = small()
    weights = {name: array.copy() for name, array in model.params.items()}
    rows = np.arange(task.sizes()["train"])
    found = evaluate(model, [task.batch("train", rows)])
    assert found > 0
    engine = NumpyEngine(model.model, TrainSpec(precision="float64"))
    assert found == measure.evaluate(engine, task, split="train").accuracy
    assert all(np.array_equal(weights[name], array) for name, array in model.params.items())


def test_nothing_to_do_is_an_error():
    model = small()
    with pytest.raises(InputError, match="an epoch without a batch"):
        train_one_epoch(model, [], CrossEntropyLoss(), Adam(model))
    with pytest.raises(InputError, match="nothing to evaluate on"):
        evaluate(model, [])
    with pytest.raises(InputError, match="batch_size 0"):
        create_batches(EXAMPLES, 0)


def test_the_sources_names_are_all_there():
    for name in by_hand.__all__:
        assert hasattr(by_hand, name), name
