"""Tests are tested: one planted mistake in SmallBench, and the named check turns red."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from glassformer.data.tokenizers.vocab import Bytes
from glassformer.lab.smallbench.suite import EXAMS, encode_length, interval
from tests.checks.faults import planted
from tests.lab.smallbench import test_questions, test_scorer, test_suite
from tests.lab.smallbench.faults import FAULTS
from tests.lab.smallbench.readers import uniform


def with_patches(check: Callable[[pytest.MonkeyPatch], None]) -> Callable[[], None]:
    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            check(patch)

    return run


def every_exam(check: Callable[[str], None]) -> Callable[[], None]:
    return lambda: [check(name) for name in EXAMS] and None


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
    "slow, bytes": lambda: test_scorer.scores_are_the_slow_ones("brackets", Bytes()),
    "whole choices": test_scorer.whole_choices_count,
    "oracle": lambda: test_questions.oracle_reaches_its_level("recall"),
    "ties": test_scorer.ties_share_the_point,
    "said": test_scorer.said_means_the_whole_answer,
    "slow bits": test_scorer.bits_are_the_slow_ones,
    "uniform bits": lambda: test_scorer.uniform_costs_what_is_stated(Bytes(), None),
    "accents": accents_are_two_bytes,
    "sizes": test_suite.sizes_weigh,
    "intervals": with_patches(test_suite.intervals_hold),
    "intervals of a few": few_groups_are_uncertain,
    "student": test_suite.students_quantiles,
    "solved": every_exam(test_questions.solved),
    "habits": lambda: test_questions.habits_are_at_chance("arithmetic", "the most recent"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_passes_without_a_fault(name):
    CHECKS[name]()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault):
    with planted(fault), pytest.raises((AssertionError, IndexError, ValueError)):
        CHECKS[fault.caught_by]()


def test_faults_have_names_of_their_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25
    assert {fault.caught_by for fault in FAULTS} == set(CHECKS)
