"""The text of a CSV file: plain line ends, and no cell that a spreadsheet would compute.

Names of runs, settings and tokens may come from a stranger. A text that begins like a formula gets
an apostrophe in front, which a spreadsheet reads as "this is text"; a number stays a number.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from typing import Any

#: What a spreadsheet takes for the beginning of a formula, or skips before one.
_FORMULA = tuple("=+-@\t\r\n")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)


class _Lines:
    """A file that returns what is written to it."""

    def write(self, text: str) -> str:
        return text


def csv_text(heading: Sequence[Any], lines: Iterable[Sequence[Any]]) -> str:
    """Return CSV; None is an empty cell."""
    # of this line end both signs are quoted in a cell, where either would begin another row
    writer = csv.writer(_Lines(), lineterminator="\r\n")
    rows = (writer.writerow([_cell(value) for value in line]) for line in (heading, *lines))
    return "".join(f"{str(row)[:-2]}\n" for row in rows)


def _cell(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(_FORMULA) or _NUMBER.fullmatch(value):
        return value
    return f"'{value}"
