"""The text of a CSV file: plain line ends, and no cell that a spreadsheet would compute.

Names of runs, settings and tokens may come from a stranger. A text that begins like a formula gets
an apostrophe in front, which a spreadsheet reads as "this is text"; a number stays a number.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

#: What a spreadsheet takes for the beginning of a formula, or skips before one.
_FORMULA = tuple("=+-@\t\r\n")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)


def csv_text(heading: Sequence[Any], lines: Iterable[Sequence[Any]]) -> str:
    """Return CSV; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for line in (heading, *lines):
        writer.writerow([_cell(value) for value in line])
    return text.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(_FORMULA) or _NUMBER.fullmatch(value):
        return value
    return f"'{value}"
