"""The paired standard error, against its definition; which step is timed."""

import numpy as np
import pytest

import glassformer as gf
from glassformer.generation.native.stepper import NativeStepper
from glassformer.kernels import c_library
from glassformer.lab.measure.precision import _paired, speeds


def test_equal_weights_give_the_standard_error_of_a_mean():
    worse = np.random.default_rng(0).normal(0.01, 0.1, 37)
    change, error = _paired(5.0 * worse, np.full(37, 5.0))
    assert change == pytest.approx(np.expm1(worse.mean()))
    assert error == pytest.approx(np.exp(worse.mean()) * worse.std(ddof=1) / 37**0.5)


def test_the_error_is_what_other_examples_would_show():
    rng = np.random.default_rng(1)
    found = []
    for _ in range(2000):
        weight = rng.integers(1, 9, 60).astype(float)
        found.append(_paired(rng.normal(0.02, 0.05, 60) * weight, weight))
    changes, errors = np.array(found).T
    assert errors.mean() == pytest.approx(changes.std(), rel=0.1)


def test_one_example_has_no_error():
    assert _paired(np.array([0.0]), np.array([3.0])) == (0.0, None)


@pytest.mark.skipif(not c_library.available(), reason="the native step needs C")
def test_what_is_timed_is_the_step_that_generating_takes(monkeypatch):
    """`glass quantize` once printed the speeds of another step, which was slower in 4 bits."""
    full = gf.build(gf.preset("qwen", d_model=32, d_ff=64, n_layers=1), seed=0).model
    small = gf.quantize(full, bits=4)
    started, start = [], NativeStepper.start

    def seen(self, prompts, *, room):
        started.append(self.model)
        return start(self, prompts, room=room)

    monkeypatch.setattr(NativeStepper, "start", seen)
    prefill, decode = speeds(full, small)
    assert min(*prefill.tokens_per_second, *decode.tokens_per_second) > 0
    assert {id(model) for model in started} == {id(full), id(small)}
