"""CSV that a spreadsheet opens: texts stay texts, numbers stay numbers."""

import csv
import io

import pytest

from glassformer.spec.csv_text import csv_text

FORMULAS = (
    "=1+1", "+1+1", "-1+1", "@SUM(1)", "=HYPERLINK(\"http://evil\",\"x\")", "=cmd|' /C calc'!A0",
    "\t=1", "\r=1", "\n=1", "-", "--x", "+-1", "-0.5x", "=", "@",
)  # fmt: skip
PLAIN = ("-0.5", "+3", "-1e-3", "-.5", "-inf", "1=2", "a-b", "", " x", -0.5, 3, None)


def back(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline="")))


@pytest.mark.parametrize("value", FORMULAS)
def test_a_text_that_begins_like_a_formula_is_marked_as_text(value):
    assert back(csv_text([value], [["x"], [value]])) == [[f"'{value}"], ["x"], [f"'{value}"]]


@pytest.mark.parametrize("value", PLAIN)
def test_numbers_and_other_texts_stay_as_they_are(value):
    ((_, cell),) = back(csv_text(["", value], []))
    assert cell == ("" if value is None else str(value))
