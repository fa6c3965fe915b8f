"""Plots of characters: the line is where its values are, and no row is wider than was said."""

import numpy as np
import pytest

from glassformer.lens.show.chart import Line, Lines, Mark
from glassformer.lens.show.chart_text import SIGNS, chart_text
from glassformer.spec.errors import InputError

X = np.arange(1.0, 101.0)


def plot(lines, *, log_x=False, log_y=False, alerts=(), **how):
    """Lines given as (name, x, y), the alerts on the first."""
    marks = tuple(Mark(x, x, "alert") for x in alerts)
    drawn = tuple(
        Line(label=name, x=x, y=y, marks=() if number else marks)
        for number, (name, x, y) in enumerate(lines)
    )
    chart = Lines(title="", lines=drawn, log_x=log_x, log_y=log_y)
    return chart_text(chart, **how)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("unicode", [True, False])
def test_no_row_is_wider_than_the_terminal(width, unicode):
    lines = [("a run with quite a long name of its own", X, X**2), ("b", X, 1 / X)]
    text = plot(lines, width=width, unicode=unicode, alerts=[1.0, 50.0, 100.0])
    assert max(map(len, text.split("\n"))) <= width
    assert text.isascii() != unicode


def test_a_line_that_falls_begins_above_and_ends_below():
    rows = plot([("", X, -X)], width=60, height=10, unicode=False).split("\n")
    body = [row.partition("|")[2] or row.partition("+")[2] for row in rows[:10]]
    places = [row.index("*") for row in body]
    assert places == sorted(places)
    assert places[0] == 0
    assert rows[0].startswith("   -1 +")
    assert rows[9].startswith(" -100 +")


def test_lines_are_told_apart_without_colour():
    text = plot([("one", X, X), ("two", X, -X)], unicode=False)
    assert SIGNS[0] in text
    assert SIGNS[1] in text
    assert "one" in text
    assert "two" in text
    straight = [("one", X, X), ("two", X, X + 30)]
    dots = plot(straight, width=70)
    bits = [sum(bin(ord(c) - 0x2800).count("1") for c in dots if "⠀" <= c <= "⣿")]
    assert 0 < bits[0] < 2 * 2 * 70  # the second line is dashed


def test_a_logarithmic_axis_makes_a_power_straight():
    rows = plot([("", X, X**3)], width=60, log_x=True, log_y=True, unicode=False).split("\n")
    places = [row.index("*") for row in rows[:12] if "*" in row]
    straight = np.polyval(np.polyfit(range(12), places, 1), range(12))
    assert np.abs(straight - places).max() <= 3


def test_what_is_not_finite_is_a_gap_and_nothing_at_all_is_said():
    y = X.copy()
    y[:90] = np.nan
    assert "*" in plot([("", X, y)], unicode=False)
    assert "no finite point" in plot([("", X, np.full(100, np.inf))])
    assert "above 0" in plot([("", X, -X)], log_y=True)
    assert "*" in plot([("", X[:1], X[:1])], unicode=False)  # a single point has a place too


def test_alerts_stand_below_their_step():
    rows = plot([("", X, X)], width=60, alerts=[1.0, 100.0, 900.0], unicode=False).split("\n")
    marks = rows[-2]
    assert marks.count("!") == 2
    assert marks.rstrip().endswith("!")


def test_too_narrow_is_refused():
    with pytest.raises(InputError, match="no room"):
        plot([("name", X, X)], width=15)
