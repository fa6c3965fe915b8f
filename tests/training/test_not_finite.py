"""A loss or a gradient that is not finite changes nothing: no weight, no moment, no count."""

import math

import numpy as np
import pytest

from tests.training.samples import ENGINES, digits, engine_of, uneven

MOMENTUM = 'train.optimizer={"kind": "SGD", "momentum": 0.9}'


def poisoned(engine, how: str):
    """Weights with which the loss, or only the gradient, leaves the finite numbers."""
    weights = engine.weights()
    match how:
        case "NaN in a weight":
            weights["blocks.0.ffn.up_proj.weight"][0, 0] = math.nan
        case "infinity in a weight":
            weights["heads.answer.weight"][3, 0] = math.inf
        case "a gradient too large for its norm":
            for name in weights:
                if name.startswith("heads.answer"):
                    weights[name] *= 1e30
    return weights


def nothing_is_changed(kind: str, how: str, *changes: str) -> None:
    run = digits(*changes)
    engine, batch = engine_of(run, kind), uneven(run, 8)
    for _ in range(2):  # so that there are moments to protect
        assert engine.step([batch], lr=0.01, seed=0).applied
    engine.load_weights(poisoned(engine, how))
    before = engine.weights() | {f"state.{k}": a for k, a in engine.state().items()}
    with np.errstate(all="ignore"):
        found = engine.step([batch], lr=0.01, seed=0)
    assert not found.applied
    assert not (math.isfinite(found.loss) and math.isfinite(found.grad_norm))
    after = engine.weights() | {f"state.{k}": a for k, a in engine.state().items()}
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert array.tobytes() == after[name].tobytes(), name


HOW = ("NaN in a weight", "infinity in a weight", "a gradient too large for its norm")


@pytest.mark.parametrize("clip", ["1.0", "0"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ENGINES)
def test_nothing_is_changed(kind, how, clip):
    nothing_is_changed(kind, how, f"train.clip={clip}")


@pytest.mark.parametrize("kind", ENGINES)
def test_momentum_is_not_changed_either(kind):
    nothing_is_changed(kind, "NaN in a weight", MOMENTUM)


@pytest.mark.parametrize("kind", ENGINES)
def test_one_bad_batch_among_several_spoils_the_step_not_the_model(kind):
    run = digits()
    engine, batch = engine_of(run, kind), uneven(run, 8)
    bad = uneven(run, 8)
    object.__setattr__(bad, "weights", np.full(8, np.inf, np.float32))
    before = engine.weights()
    with np.errstate(all="ignore"):
        assert not engine.step([batch, bad, batch], lr=0.1, seed=0).applied
    assert all(np.array_equal(before[n], a) for n, a in engine.weights().items())
    assert engine.step([batch], lr=0.1, seed=0).applied
