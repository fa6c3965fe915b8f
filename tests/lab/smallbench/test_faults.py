"""Tests are tested: one planted mistake in SmallBench, and the named check turns red."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from glassformer.data.tokenizers.vocab import Bytes
from glassformer.lab.smallbench.suite import encode_length, interval
from tests.lab.smallbench import test_scorer
from tests.lab.smallbench.readers import uniform
from tests.planting import Binary, Fault, Name, mutate, planted


def accents_are_two_bytes() -> None:
    code = encode_length(uniform(Bytes()), "naïve café\n" * 9)
    assert code.bits_per_byte == pytest.approx(8.0)


def few_groups_are_uncertain() -> None:
    """Half the width is what Student's t says of the same numbers."""
    points = np.random.default_rng(0).normal(size=10)
    low, high = interval(points, np.ones(10), seed=0, confidence=0.95)
    expected = 2.262 * points.std(ddof=1) / math.sqrt(10)
    assert (high - low) / 2 == pytest.approx(expected, rel=0.05)


CHECKS: dict[str, Callable[[], None]] = {
    "whole choices": test_scorer.whole_choices_count,
    "uniform bits": lambda: test_scorer.uniform_costs_what_is_stated(Bytes(), None),
    "accents": accents_are_two_bytes,
    "intervals of a few": few_groups_are_uncertain,
}

FAULTS = (
    Fault("mean instead of sum", mutate("lab.smallbench.question:_asked", Name("sum"), to="{value}.mean"), "whole choices"),
    Fault("nats called bits", mutate("lab.smallbench.suite:encode_length", Binary("/"), to="{left}"), "uniform bits"),
)  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_passes_without_a_fault(name):
    CHECKS[name]()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault):
    with planted(fault), pytest.raises((AssertionError, IndexError, ValueError)):
        CHECKS[fault.caught_by]()
