"""The range test drawn: the curve, the range and the choice are where the finder says."""

import numpy as np

from glassformer.lab.plots.figures import CEILING, lr_chart, lr_text
from glassformer.lens.show.chart_figure import chart_figure, figure_bytes
from glassformer.training.fit import RateRange

CURVE = tuple((10.0**p, 3.0 - p - 6 if p < -2 else 50.0) for p in np.linspace(-6, 0, 60))
FOUND = RateRange(1e-4, 1e-5, 1e-3, CURVE)


def test_the_figure_marks_the_range_and_the_choice():
    figure = chart_figure(lr_chart(FOUND))
    (axes,) = figure.axes
    curve, choice = axes.get_lines()
    assert list(curve.get_xdata()) == [rate for rate, _ in CURVE]
    assert list(choice.get_xdata()) == [1e-4, 1e-4]
    assert axes.get_ylim()[1] <= CEILING * CURVE[0][1]  # the end that diverges hides nothing
    assert any("1.0e-05 to 1.0e-03" in text.get_text() for text in axes.texts)
    assert figure_bytes(figure, "svg") == figure_bytes(lr_chart(FOUND), "svg")


def test_the_terminal_leaves_the_divergence_out():
    text = lr_text(FOUND, width=60, unicode=False)
    assert text.isascii()
    assert "50" not in text.split("\n")[0]
    assert text.count("!") == 2  # the mark, and what it means
