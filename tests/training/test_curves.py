"""Losses of the native engine beside torch's and float64's, over 200 steps of tiny runs."""

import dataclasses
from dataclasses import replace

import pytest
from bench.engines import curves, verdict

from glassformer.spec.block import MLP
from glassformer.spec.serialize import override
from tests.training.samples import RUNS


def smooth(spec):
    """The model with GELU in its feed-forwards."""
    if dataclasses.is_dataclass(spec):
        every = {one.name: smooth(getattr(spec, one.name)) for one in dataclasses.fields(spec)}
        gelu = {"activation": "gelu"} if isinstance(spec, MLP) else {}
        return replace(spec, **{**every, **gelu})
    return tuple(map(smooth, spec)) if isinstance(spec, tuple) else spec


@pytest.mark.parametrize("name", RUNS)
def test_two_hundred_losses_are_within_rounding(name):
    """Of models without ReLU: where a unit that was dead turns on by a rounding, Adam moves its
    weights by a complete step at once, and curves part by 1e-4.
    """
    run = override(RUNS[name](), ["train.steps=200", "train.lr=0.003"])
    run = replace(run, model=smooth(run.model))
    losses = curves(run, steps=200)
    found = verdict(losses)
    assert found.passed, found.sentence
    assert losses["float64"][-1] < losses["float64"][0]


def test_a_curve_that_is_further_apart_than_rounding_fails():
    run = override(RUNS["digits"](), ["train.lr=0.003"])
    losses = curves(run, steps=40)
    apart = [loss + (1e-3 if step > 20 else 0.0) for step, loss in enumerate(losses["native"])]
    assert verdict(losses).passed
    assert not verdict({**losses, "native": apart}).passed
