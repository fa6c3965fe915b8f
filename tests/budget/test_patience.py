"""A search gives up when its caller would not wait, and only then."""

import pytest

from glassformer.budget.effort import OutOfPatience, patience
from glassformer.budget.question import Budget
from glassformer.budget.search import Search

LONG = Budget(vocab_size=256, total=10**9, n_heads=None, rank="any")


def test_a_search_is_given_up_when_the_time_is_over() -> None:
    with patience(0.0), pytest.raises(OutOfPatience):
        Search(LONG).best()
    with patience(0.0), pytest.raises(OutOfPatience):
        Search(LONG).feasible()
    with patience(0.0), pytest.raises(OutOfPatience):
        Search(LONG).closest(10**9)


def test_the_shorter_of_two_patiences_holds_and_both_end() -> None:
    with patience(0.0), patience(1000.0), pytest.raises(OutOfPatience):
        Search(LONG).best()
    assert Search(Budget()).best() is not None  # no clock runs on


def test_a_short_search_is_the_same_with_patience() -> None:
    with patience(60.0):
        found = Search(Budget()).best()
    assert found == Search(Budget()).best()
