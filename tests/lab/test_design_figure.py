"""The picture of a design: a PNG whose landscape is the solver's own answers."""

from dataclasses import replace

from glassformer.budget.design import EXPANSIONS, RATIOS, drift, landscape
from glassformer.budget.question import Budget
from glassformer.lab.budget_report import design
from glassformer.lab.plots.figures import design_chart
from glassformer.lens.show.chart_figure import figure_bytes


def test_the_figure_is_a_png():
    picture = figure_bytes(design_chart(design("300k", 2000, length=64, heads=4)), "png")
    assert picture.startswith(b"\x89PNG")
    assert 10_000 < len(picture) < 200_000


def test_the_landscape_is_the_solvers():
    budget = design("1M", 4000, length=64, heads=4).budget
    cells = landscape(budget)
    assert len(cells) == len(EXPANSIONS)
    for row, glu in zip(cells, EXPANSIONS, strict=True):
        for found, ratio in zip(row, RATIOS, strict=True):
            asked = design("1M", 4000, length=64, heads=4, embedding_ratio=ratio, glu_expansion=glu)
            assert found == replace(asked.best, portability=None)
            assert drift(found) >= 0
        break


def test_what_no_limit_admits_is_left_open():
    cells = landscape(Budget(params=100_000, vocab=16_000))
    assert all(found is None for row in cells for found in row)
