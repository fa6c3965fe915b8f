"""Tables of what was taken for what: the numbers of an evaluation, in every form the same."""

import csv
import io

import pytest

from glassformer.lab.measure.evaluate import (
    confusion_csv,
    confusion_rows,
    confusion_text,
    order,
    shares,
)
from glassformer.lab.plots.figures import confusion_chart
from glassformer.lens.show.chart_figure import chart_figure, figure_bytes
from glassformer.spec.errors import InputError

TABLE = {"SUM": {"SUM": 1, "none": 2, "MAX": 1}, "MAX": {"MAX": 5}}
DIGITS = {str(d): {str(d): 9, str((d + 1) % 10): 1} for d in reversed(range(10))}


def test_what_is_right_lies_on_the_diagonal():
    rows, columns = order(TABLE)
    assert (rows, columns) == (["MAX", "SUM"], ["MAX", "SUM", "none"])
    assert shares(TABLE) == [[1.0, 0.0, 0.0], [0.25, 0.25, 0.5]]
    assert order(DIGITS)[0] == [str(d) for d in range(10)]


def test_every_number_is_printed():
    text = confusion_text("operation", TABLE)
    lines = [line.split() for line in text.split("\n")]
    assert ["MAX", "100.0", "0.0", "0.0", "5"] in lines
    assert ["SUM", "25.0", "25.0", "50.0", "4"] in lines


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_gets_the_columns_below(width):
    text = confusion_text("answer", DIGITS, width=width)
    rows = text.split("\n")[2:]
    assert max(map(len, rows)) <= width
    assert sum(line.split().count("90.0") for line in rows) == 10


def test_csv_and_rows_hold_the_same_counts():
    (head, *lines) = csv.reader(io.StringIO(confusion_csv(TABLE)))
    assert head == ["", "MAX", "SUM", "none"]
    assert lines == [["MAX", "5", "0", "0"], ["SUM", "1", "1", "2"]]
    rows = confusion_rows({"operation": TABLE})
    assert len(rows) == 6
    assert sum(row["count"] for row in rows) == 9
    assert rows[-1] == {
        "group": "operation", "asked": "SUM", "answered": "none", "count": 2, "share": 0.5,
    }  # fmt: skip


def test_the_figure_prints_each_cell():
    figure = chart_figure(
        confusion_chart({"operation": TABLE, "answer": DIGITS}, title="a run, test")
    )
    left, right = figure.axes
    assert [t.get_text() for t in left.texts] == [
        "100.0",
        "·",
        "·",
        "5",
        "25.0",
        "25.0",
        "50.0",
        "4",
    ]
    assert len(right.texts) == 10 * 11
    assert figure_bytes(figure, "png") == figure_bytes(
        confusion_chart({"operation": TABLE, "answer": DIGITS}, title="a run, test"), "png"
    )
    with pytest.raises(InputError, match="nothing can be confused"):
        confusion_chart({}, title="fsm")


def test_labels_that_only_look_like_numbers_are_words():
    labels = ["10", "²", "4", "9" * 5000, "٣"]
    table = {label: {label: 1} for label in labels}
    assert order(table)[0] == ["4", "10", "9" * 5000, "²", "٣"]
