"""A search gives up when its caller would not wait, and only then."""

import pytest

from glassformer.spec.budget import Budget, Target
from glassformer.spec.patience import OutOfPatience, patience
from glassformer.spec.search import Search

ENDLESS = Budget(
    vocab_size=256, total=10**9, n_heads=1, embedding_ratio=Target(value=0.001), max_seq_len=512
)


def test_an_endless_search_is_given_up() -> None:
    with patience(0.05), pytest.raises(OutOfPatience):
        Search(ENDLESS).best()


def test_the_shorter_of_two_patiences_holds_and_both_end() -> None:
    with patience(0.05), patience(1000.0), pytest.raises(OutOfPatience):
        Search(ENDLESS).best()
    assert Search(Budget()).best() is not None  # no clock runs on


def test_a_short_search_is_the_same_with_patience() -> None:
    with patience(60.0):
        found = Search(Budget()).best()
    assert found == Search(Budget()).best()
