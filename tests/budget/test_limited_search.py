"""A search with a limit: it ends at the same place every time and claims no more than it knows."""

import dataclasses
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from glassformer.budget.design import EVALUATIONS, solve
from glassformer.budget.infeasible import InfeasibleBudget, Undecided, certificate
from glassformer.budget.search import LEVEL, Effort, Search, level, most_drift
from glassformer.spec.errors import InputError
from tests.budget import brute
from tests.budget.test_budget import (
    _changed,
    answer_is_there_and_best,
    classic,
    design,
    sizes_of,
    small_budgets,
)

#: Any rank, a tiny ratio: millions of ranks and widths drift alike.
LONG = classic(
    params=9_095_283_794,
    vocab=500,
    tolerance=1e-4,
    heads=3,
    embedding_ratio=0.001,
    ffn_multiple=11,
    rank="any",
    max_aspect=40.0,
)
#: One count, and ten thousand widths with as many ranks each.
OPEN = classic(
    params=9_000_000_007,
    vocab=3,
    tolerance=1e-10,
    heads=7,
    length=11_131,
    bias="all",
    norm="rmsnorm",
    glu_expansion=2.7,
    glu_within=1e-4,
    rank="any",
)
limits = st.sampled_from([0, 1, 5, 20, 80, 300])


@given(small_budgets(), limits)
@settings(max_examples=200)
def test_a_limited_search_claims_no_more_than_it_knows(budget, most):
    limited_is_honest(budget, most)


def limited_is_honest(budget, most):
    whole, few = Search(budget).best(), Search(budget, effort=Effort(most))
    found = few.best()
    if few.is_proven:
        assert found == whole
    elif whole is not None:
        assert few.least <= whole.drift
        assert found is None or whole.key <= found.key
    quick = Search(budget, effort=Effort(most))
    one = quick.first()
    if one is not None:
        low, high = budget.bounds
        assert low <= one.count <= high
        assert whole is not None
        assert whole.key <= one.key
    elif quick.is_proven:
        assert whole is None


@given(small_budgets(), limits, st.integers(100, 1500))
@settings(max_examples=100)
def test_a_limited_search_for_a_count_knows_how_near_another_may_be(budget, most, target):
    limited_is_near(budget, most, target)


def _count(found):
    return None if found is None else found.count


def limited_is_near(budget, most, target):
    low, high = 1, 2 * budget.params
    whole = _count(Search(budget, low=low, high=high).nearest(target))
    few = Search(budget, low=low, high=high, effort=Effort(most))
    found = _count(few.nearest(target))
    if few.is_proven:
        assert (found is None) == (whole is None)
        assert found is None or abs(found - target) == abs(whole - target)
    else:
        assert whole is None or few.least <= abs(whole - target)
        assert found is None or abs(whole - target) <= abs(found - target)


def test_most_drift_is_the_upper_edge_of_its_level():
    for units in (0.0, 0.1, 0.25, 0.26, 0.9, 1.0, 1.05, 1.2, 7.0, 60.0):
        assert most_drift(level(units)) >= units
        assert most_drift(level(units) - 1) <= units + 1e-6 or level(units) == 1
    assert LEVEL == 1


@given(small_budgets())
@settings(max_examples=60)
def test_runs_are_every_design_once(budget):
    runs_are_every_design(budget)


def runs_are_every_design(budget):
    """Return without an error if the grid has each design that keeps the limits, and no other."""
    low, high = budget.bounds
    searched, found = Search(budget), []
    for frame, depths, d_ffs in searched._runs(searched._limits()):
        assert min(len(depths), len(d_ffs)) == 1
        found += [frame.sizes(n_layers, d_ff) for n_layers in depths for d_ff in d_ffs]
    one_choice = budget.heads == "any" and budget.kv_heads is None  # all have the same count
    every = [sizes_of(made) for made in brute.candidates(budget, low=low, high=high)]
    if one_choice:
        every, found = ([replace_heads(each) for each in some] for some in (every, found))
    assert len(found) == len(set(found))
    assert set(found) == set(every)


def replace_heads(sizes):
    return dataclasses.replace(sizes, n_heads=1, d_head=1)


@given(small_budgets(), st.sampled_from([50, 300, 2000]))
@settings(max_examples=40)
def test_a_limited_certificate_says_which_changes_are_not_proven(budget, most):
    assume(not Search(budget).is_feasible())
    limited_certificate_is_true(budget, most)


def limited_certificate_is_true(budget, most):
    whole, told = certificate(budget, Effort()), certificate(budget, Effort(most))
    assert whole.unproven == ()
    assert set(told.unproven) <= set(told.nearest) == set(whole.nearest)
    for name, value in told.nearest.items():
        if name not in told.unproven:
            assert value == whole.nearest[name], name
        elif value is not None:
            assert Search(_changed(budget, name, value)).is_feasible(), name
    again = certificate(budget, Effort(most))
    assert again == told


# --- what is said -------------------------------------------------------------------------------


def test_a_long_search_ends_with_a_design_and_says_what_is_not_proven():
    answer = solve(LONG)
    low, high = LONG.bounds
    assert low <= answer.best.params <= high
    assert abs(answer.best.glu_drift) <= 0.05  # near the wish, though not proven nearest
    first = answer.not_proven[0]
    assert first.startswith("best: nothing left unopened drifts less than ")
    assert "not proven: best" in repr(answer)
    assert solve(LONG) == answer


def test_the_best_of_one_search_may_be_proven_and_others_not():
    near = solve(classic())
    assert near.not_proven == ()
    assert near == solve(classic(), thorough=True)


def test_nothing_found_and_nothing_ruled_out_is_neither_an_answer_nor_a_refusal():
    with pytest.raises(Undecided) as caught:
        solve(OPEN)
    error = caught.value
    assert error.exit_code == 5
    assert not isinstance(error, InfeasibleBudget)
    assert "did not rule one out" in error.what
    assert "thorough" in error.hint
    low, high = dataclasses.replace(OPEN, tolerance=error.tolerance).bounds
    assert any(low <= count <= high for count in error.counts)  # a design of such a count was seen


def test_a_thorough_search_has_no_limit():
    """The limit, made small, leaves open what a thorough search answers."""
    budget = classic(params=3000, vocab=11, length=3, heads=2, tolerance=0.01)
    few = Search(budget, effort=Effort(0))
    assert few.best() is None
    assert not few.is_proven
    assert solve(budget, thorough=True).not_proven == ()
    assert design("10M", 16000, thorough=True) == design("10M", 16000)


def test_a_tolerance_of_nothing_is_told_one_that_works():
    with pytest.raises(InputError) as caught:
        design("9999999967", 7, tolerance=0, heads="any", kv_heads=2, bias="qkv", rank=3)
    assert "works" in caught.value.hint


# --- the effort ----------------------------------------------------------------------------------


def test_a_part_of_an_effort_is_taken_from_the_whole():
    whole = Effort(100)
    part = whole.share(4)
    part.spend(25)
    assert (part.left, part.spent, part.is_spent) == (0, 25, True)
    assert (whole.left, whole.spent, whole.is_spent) == (75, 25, False)
    assert whole.share(1).left == 75
    assert Effort().share(9).left == math.inf


def test_a_search_spends_no_more_than_its_limit_and_a_last_region():
    effort = Effort(EVALUATIONS // 2)
    Search(LONG, effort=effort).best()
    assert effort.is_spent
    assert effort.spent < EVALUATIONS // 2 + 5_000


def test_designs_of_the_nearest_count_are_ordered_too():
    nearest_are_ordered()


def nearest_are_ordered():
    """Return, of all designs as near to the total, one whose drift has the least level."""
    for total in range(300, 900, 37):
        budget = classic(
            params=total, tolerance=0.2, vocab=11, length=3, heads=1,
            embedding_ratio=0.3, glu_expansion=2.0,
        )  # fmt: skip
        low, high = budget.bounds
        every = list(brute.candidates(budget, low=low, high=high))
        away = min(abs(made.count - total) for made in every)
        near = [made for made in every if abs(made.count - total) == away]
        found = Search(budget).closest(total)
        assert abs(found.count - total) == away
        assert found.key[:2] == min(brute.preference(budget, made) for made in near)


# --- what leaves out many designs at once -------------------------------------------------------


def test_widths_without_a_d_ff_are_left_out_and_no_others():
    """An expansion within so little that most widths have no whole d_ff for it."""
    seen = 0
    for total in range(2000, 4000, 500):
        for value, multiple, rank in ((2.66, 1, None), (2.5, 3, None), (1.3, 1, "any")):
            budget = classic(
                params=total, tolerance=0.03, vocab=7, length=2, heads=1, rank=rank,
                ffn_multiple=multiple, embedding_ratio=0.1, max_layers=5,
                glu_expansion=value, glu_within=0.004,
            )  # fmt: skip
            answer_is_there_and_best(budget)
            seen += Search(budget).is_feasible()
    assert seen > 3


def test_what_counts_leave_is_what_designs_have():
    """One count at a time: a search finds it if and only if a design has it."""
    common = {"vocab": 5, "length": 2, "embedding_ratio": "free", "max_layers": 3}
    kinds = (
        {"heads": 2},
        {"heads": 2, "free_head_width": True, "bias": "no_key"},
        {"heads": 2, "free_head_width": True, "position": "rotary", "bias": "all"},
        {"heads": "any", "bias": "qkv", "position": "rotary"},
        {"heads": 1, "bias": "all", "ffn_multiple": 2, "norm": "rmsnorm"},
        {"heads": 1, "free_head_width": True, "bias": "qkv"},
        {"heads": 2, "rank": 3},
        {"heads": 2, "kv_heads": 1, "multiple": 4, "ffn_multiple": 1, "tied": False},
        {"heads": 1, "rank": "any", "embedding_ratio": 0.2, "bias": "qkv"},
    )
    for kind in kinds:
        budget = classic(params=600, **(common | kind))
        every = {made.count for made in brute.candidates(budget, low=580, high=620)}
        assert len(every) < 41 or "bias" in kind
        for count in range(580, 621):
            assert Search(budget, low=count, high=count).is_feasible() == (count in every)
