"""A search is stopped by its caller's signal, and only by that."""

import pytest

from glassformer.budget.design import neighbour, solve
from glassformer.budget.question import Budget
from glassformer.budget.search import Effort, Search, SearchStopped

LONG = Budget(shape="classic", vocab=256, params=10**9, heads="any", rank="any")


def after(calls):
    """A signal that says stop after this many calls."""
    left = iter(range(calls))
    return lambda: next(left, None) is None


def test_a_search_is_stopped_by_its_signal() -> None:
    for kind in ("best", "is_feasible", "deepest"):
        with pytest.raises(SearchStopped):
            getattr(Search(LONG, effort=Effort(stop=after(0))), kind)()
    with pytest.raises(SearchStopped):
        Search(LONG, effort=Effort(stop=after(5))).closest(10**9)
    with pytest.raises(SearchStopped):
        solve(LONG, stop=after(20))
    with pytest.raises(SearchStopped):
        neighbour(Budget(shape="classic"), 0.3, 2.0, stop=after(3))


def test_a_share_of_an_effort_has_the_same_signal() -> None:
    effort = Effort(1000, stop=after(2))
    effort.share(2).spend(1)
    effort.share(3).share(1).spend(1)
    with pytest.raises(SearchStopped):
        effort.share(2).spend(1)


def test_a_search_that_is_not_stopped_is_the_same_with_a_signal() -> None:
    assert solve(Budget(shape="classic"), stop=lambda: False) == solve(Budget(shape="classic"))
