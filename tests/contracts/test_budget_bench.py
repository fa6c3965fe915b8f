"""The budget's figures, each in a small real case: the whole grids are `python -m bench budget`."""

from dataclasses import replace

import pytest
from bench.budget import (
    grid_rows,
    is_near,
    naive_depth,
    recount,
    row,
    sane_grid,
    source_grid,
)
from bench.budget_stress import EACH, KINDS, MIXED, outcome, stress_set

from glassformer.budget.design import solve
from glassformer.budget.question import Budget
from tests.contracts.test_bench import FIELDS

GRID = list(sane_grid())


def test_the_grid_is_large_and_sane():
    assert len(GRID) >= 2_800
    assert len({(b.vocab, b.params) for b in GRID}) > 40
    assert naive_depth(Budget(shape="classic"), 0.35, 2.66) == 11


@pytest.mark.parametrize("tolerance", [0.005, 0.001])
def test_a_part_of_the_grid_is_within_tolerance_and_counted_again(tolerance):
    for budget in GRID[::90]:
        answer = solve(replace(budget, tolerance=tolerance), alternatives=False)
        assert abs(answer.best.params - budget.params) <= tolerance * budget.params
        assert recount(answer) == answer.best.params


def test_the_sources_grid_is_near_its_wishes():
    bound = [solve(b, alternatives=False) for b in source_grid(free_head_width=False)]
    free = [solve(b, alternatives=False) for b in source_grid(free_head_width=True)]
    assert sum(map(is_near, bound)) >= 18
    assert sum(map(is_near, free)) == 24


def test_rows_have_the_promised_form():
    rows = list(grid_rows(GRID[:2], "a case"))
    assert all(set(made) == FIELDS for made in (*rows, row("a", "b", 1.0)))
    assert "2 of 2 within tolerance" in rows[0]["name"]


def test_the_stress_set_is_the_same_every_time_and_has_every_kind():
    drawn = list(stress_set())
    assert drawn == list(stress_set())
    names = [name for name, _ in drawn]
    assert {name: names.count(name) for name in KINDS} == {
        name: MIXED if name == "mixed" else EACH for name in KINDS
    }
    assert len({budget for _, budget in drawn}) > 0.99 * len(drawn)
    ends = {outcome(budget)[0] for _, budget in drawn[:12]}
    assert ends <= {"proven", "answered", "refused", "left open"}
