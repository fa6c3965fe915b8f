"""The torch engine and the by-hand one: the same steps, the same logits, the same state."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from glassformer.data.build_task import build_task
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import stored
from glassformer.training.fit import fit
from tests.planting import Constant, catches
from tests.training.samples import (
    ENGINES,
    RUNS,
    SINGLE,
    digits,
    engine_of,
    machine,
    reverse,
    uneven,
    worst_absolute,
)

#: Worst seen over 12 steps in float64: losses 2e-15, weights 3e-11.
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-10, 1e-9
EXACT = ("train.precision=float64", "train.steps=12", "train.lr=0.01")
DECAY = ("train.optimizer.weight_decay=0.3",)
MOMENTUM = ('train.optimizer={"kind": "SGD", "momentum": 0.9}',)
CASES = {
    "AdamW with decay": (machine, DECAY),
    "momentum": (digits, MOMENTUM),
    "plain SGD": (reverse, ("train.optimizer=SGD", "train.clip=0")),
    "clipping": (reverse, ("train.clip=0.05", *MOMENTUM)),
    "smoothing": (reverse, ("train.label_smoothing=0.1", *DECAY)),
    "accumulation": (machine, ("train.accumulate=3", *DECAY)),
    "L1": (machine, ("model.embedding.l1=0.5", "train.accumulate=2", *MOMENTUM)),
    "answers": (digits, ("train.accumulate=2", "train.label_smoothing=0.1", *DECAY)),
}


def engine_gap(name: str) -> tuple[float, float]:
    """The largest difference of a loss or norm over the run, and of a weight at its end."""
    make, changes = CASES[name]
    run = make(*EXACT, *changes)
    task = build_task(run.task)
    one, other = engine_of(run, "torch"), engine_of(run, "numpy")
    worst = 0.0
    for ours, theirs in zip(fit(one, task, run.train), fit(other, task, run.train), strict=True):
        assert ours.applied
        assert (ours.step, ours.lr, ours.tokens) == (theirs.step, theirs.lr, theirs.tokens)
        assert ours.nll.keys() == theirs.nll.keys()
        pairs = [(ours.loss, theirs.loss), (ours.grad_norm, theirs.grad_norm)]
        pairs += [(ours.nll[head], theirs.nll[head]) for head in ours.nll]
        worst = max(worst, *(abs(a - b) for a, b in pairs))
    return worst, worst_absolute(one.weights(), other.weights())


def engines_agree(name: str) -> None:
    losses, weights = engine_gap(name)
    assert losses <= LOSS_TOLERANCE
    assert weights <= WEIGHT_TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_engines_agree(name):
    engines_agree(name)


@pytest.mark.parametrize("kind", ENGINES)
def test_clipping_bounds_what_is_applied_and_tells_what_was(kind):
    run = digits("train.precision=float64", "train.clip=0.125", "train.optimizer=SGD")
    engine = engine_of(run, kind)
    before = engine.weights()
    found = engine.step([uneven(run, 8)], lr=1.0, seed=0)
    moved = np.concatenate([(before[n] - a).ravel() for n, a in engine.weights().items()])
    assert found.grad_norm > 0.125
    assert np.linalg.norm(moved) == pytest.approx(0.125, rel=1e-4)


@catches(
    "decay on biases",
    "training.torch_engine:_adamw",
    Constant(0.0),
    to="adam.weight_decay",
    case="torch",
)
@pytest.mark.parametrize("kind", ENGINES)
def test_decay_touches_what_the_manifest_says(kind: str) -> None:
    """Only decay moves a weight when there is nothing to learn: biases, gains and norms stay."""
    run = digits("train.optimizer.weight_decay=0.5", "train.precision=float64")
    engine, batch = engine_of(run, kind), uneven(run, 8)
    engine.load_weights({name: array + 0.5 for name, array in engine.weights().items()})
    before = engine.weights()
    object.__setattr__(batch, "weights", np.zeros(8, np.float32))
    engine.step([batch], lr=0.1, seed=0)
    rules = stored(run.model)
    assert {rule.decay for rule in rules.values()} == {True, False}
    for name, after in engine.weights().items():
        want = before[name] * (1 - 0.1 * 0.5) if rules[name].decay else before[name]
        np.testing.assert_allclose(after, want, rtol=1e-12, atol=0, err_msg=name)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_weights_of_one_engine_give_the_same_logits_in_the_other(name, precision):
    """After some training, so that no bias is 0 any more; both ways."""
    run = RUNS[name](f"train.precision={precision}", "train.steps=3")
    task, batch = build_task(run.task), uneven(run, 16)
    for one, other in (("torch", "numpy"), ("numpy", "torch")):
        trained, reader = engine_of(run, one), ENGINES[other].fresh(run.model, run.train)
        for _ in fit(trained, task, run.train):
            pass
        reader.load_weights(trained.weights())
        want, found = trained.logits(batch), reader.logits(batch)
        assert want.keys() == found.keys()
        for head in want:
            assert want[head].dtype == found[head].dtype == np.dtype(precision)
            counted = batch.valid if want[head].ndim == 3 else slice(None)
            limit = 1e-5 if precision == "float32" else 1e-13
            assert np.abs(want[head] - found[head])[counted].max() <= limit


#: Worst seen: a loss 2e-6, a weight 3e-5, where its gradient is rounding alone.
CURVE, END = 2e-5, 1e-3


@pytest.mark.parametrize("name", CASES)
def test_the_native_engine_follows_numpy_in_float64(name):
    """Loss by loss and weight by weight, as far as float32 can."""
    make, changes = CASES[name]
    run = make(*EXACT, *changes, "train.lr=0.001")
    single = replace(run, train=replace(run.train, precision="float32"))
    task = build_task(run.task)
    exact, native = engine_of(run, "numpy"), engine_of(single, "native")
    for want, found in zip(
        fit(exact, task, run.train), fit(native, task, single.train), strict=True
    ):
        assert found.applied and found.tokens == want.tokens
        assert found.loss == pytest.approx(want.loss, rel=CURVE)
        assert found.grad_norm == pytest.approx(want.grad_norm, rel=1e-3)
        assert found.nll == pytest.approx(want.nll, rel=CURVE)
    assert worst_absolute(exact.weights(), native.weights()) <= END


STATEFUL = {"AdamW": DECAY, "momentum": MOMENTUM, "Muon": ("train.optimizer=Muon",)}


@pytest.mark.parametrize("kind", SINGLE)
@pytest.mark.parametrize("optimizer", STATEFUL)
def test_weights_and_state_are_all_there_is(kind, optimizer):
    """An engine that gets both back goes on with the same bits, dropout included."""
    run = digits("model.decoder.dropout=0.2", "train.steps=9", *STATEFUL[optimizer])
    task = build_task(run.task)
    engine = engine_of(run, kind)
    records = []
    for record in fit(engine, task, run.train):
        records.append(record)
        if record.step == 4:
            weights, state = engine.weights(), engine.state()
    again = SINGLE[kind].fresh(run.model, run.train)
    again.load_weights(weights)
    again.load_state(state)
    resumed = list(fit(again, task, run.train, start=4))
    assert [r.loss for r in resumed] == [r.loss for r in records[4:]]
    for name, array in engine.weights().items():
        assert np.array_equal(array, again.weights()[name]), name
    for key, array in engine.state().items():
        assert np.array_equal(array, again.state()[key]), key


@pytest.mark.parametrize("kind", ENGINES)
def test_what_an_engine_hands_out_is_a_copy(kind):
    run = digits()
    engine = engine_of(run, kind)
    engine.step([uneven(run, 8)], lr=0.1, seed=0)
    for read in (engine.weights, engine.state):
        for array in read().values():
            array[...] = 7
        assert not any((array == 7).all() for array in read().values())


@pytest.mark.parametrize("kind", ENGINES)
def test_dropout_is_drawn_from_the_seed_alone(kind: str) -> None:
    """The same seed gives the same step, another one another; torch's own generator is not read."""
    run = digits("model.decoder.dropout=0.5")
    batch, losses = uneven(run, 16), {}
    for seed in (3, 4, 3):
        torch.manual_seed(seed * 100 + len(losses))
        state = torch.get_rng_state()
        found = engine_of(run, kind).step([batch, batch], lr=0.1, seed=seed).loss
        assert losses.setdefault(seed, found) == found
        assert torch.equal(torch.get_rng_state(), state)
    assert losses[3] != losses[4]


@pytest.mark.parametrize("kind", ENGINES)
def test_logits_have_no_dropout_and_change_nothing(kind):
    run = digits("model.decoder.dropout=0.5")
    engine, batch = engine_of(run, kind), uneven(run, 8)
    engine.step([batch], lr=0.1, seed=0)
    weights, state, rng = engine.weights(), engine.state(), torch.get_rng_state()
    first, second = engine.logits(batch), engine.logits(batch)
    assert np.array_equal(first["answer"], second["answer"])
    assert all(np.array_equal(weights[n], a) for n, a in engine.weights().items())
    assert all(np.array_equal(state[n], a) for n, a in engine.state().items())
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_half_precision_trains_on_float32_weights(precision):
    run = digits(f"train.precision={precision}", "train.steps=40", "train.lr=0.02")
    engine = engine_of(run, "torch")
    losses = [record.loss for record in fit(engine, build_task(run.task), run.train)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert {array.dtype for array in engine.weights().values()} == {np.dtype("float32")}


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("target", [-100, -1, 20])
def test_a_target_that_is_no_answer_is_refused_not_passed_over(kind, target):
    run = digits()
    engine, batch = engine_of(run, kind), uneven(run, 8)
    batch.targets["answer"][5] = target
    with pytest.raises(InputError, match=f"target {target} is not one of 20 classes"):
        engine.step([batch], lr=0.1, seed=0)
    batch.weights[5] = 0.0
    assert engine.step([batch], lr=0.1, seed=0).applied


@pytest.mark.parametrize("kind", ENGINES)
def test_steps_without_targets_are_refused(kind):
    run = digits()
    engine, batch = engine_of(run, kind), uneven(run, 8)
    with pytest.raises(InputError, match="without a batch"):
        engine.step([], lr=0.1, seed=0)
    bare = replace(batch, targets={}, weights=None)
    for batches in ([bare], [batch, bare]):
        with pytest.raises(InputError, match="no targets for"):
            engine.step(batches, lr=0.1, seed=0)
