"""Confusion tables of an evaluation, as text, rows and CSV.

A row is a target and adds up to 100 %; a column is the label that the prediction looks like. The
count is printed beside each row, since a share of three examples means little.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from glassformer.spec.units import plain_digits

#: {target: {prediction: count}}
Table = Mapping[str, Mapping[str, int]]

#: The caption of each group's table.
READINGS = {
    "operation": "the operation whose answer was given; none: no operation gives it",
    "answer": "the token that was answered",
}
#: The heading of the rows.
ROWS = {"operation": "operation asked", "answer": "right answer"}


def order(table: Table) -> tuple[list[str], list[str]]:
    """Return rows and columns in one order, so that right predictions lie on the diagonal."""
    rows = sorted(table, key=_natural)
    others = {column for row in table.values() for column in row} - set(rows)
    return rows, [*rows, *sorted(others, key=_natural)]


def shares(table: Table) -> list[list[float]]:
    """Return the cells in that order, each as a share of its row."""
    rows, columns = order(table)
    return [
        [table[row].get(column, 0) / max(1, sum(table[row].values())) for column in columns]
        for row in rows
    ]


def confusion_text(group: str, table: Table, *, width: int = 80) -> str:
    """Return a table of per cents for a terminal; columns beyond its width go below, under the same
    rows.
    """
    rows, columns = order(table)
    cells = [[f"{100 * share:.1f}" for share in row] for row in shares(table)]
    counts = [f"{sum(table[row].values()):,}" for row in rows]
    margin = max(len(name) for name in ("", *rows))
    size = max(5, *(len(name) for name in columns)) + 1
    last = max(map(len, (*counts, "n"))) + 2
    room = max(1, (width - margin - last) // size)
    lines = [f"{ROWS.get(group, group)} (rows), answered as (columns), per cent of the row"]
    if group in READINGS:
        lines.append(f"({READINGS[group]})")
    for start in range(0, len(columns), room):
        shown = columns[start : start + room]
        heading = "".join(f"{name:>{size}}" for name in shown)
        lines.append(f"{'':{margin}}{heading}{'n':>{last}}")
        for name, row, count in zip(rows, cells, counts, strict=True):
            values = "".join(f"{cell:>{size}}" for cell in row[start : start + room])
            lines.append(f"{name:<{margin}}{values}{count:>{last}}")
    return "\n".join(lines)


def confusion_rows(confusion: Mapping[str, Table]) -> list[dict[str, Any]]:
    """Return every cell, the empty ones too: group, target, prediction, count, share."""
    made = []
    for group, table in confusion.items():
        rows, columns = order(table)
        for row, line in zip(rows, shares(table), strict=True):
            for column, share in zip(columns, line, strict=True):
                count = table[row].get(column, 0)
                cell = {"group": group, "asked": row, "answered": column}
                made.append(cell | {"count": count, "share": share})
    return made


def confusion_csv(table: Table) -> str:
    """Return one table of counts: rows are targets, columns predictions."""
    rows, columns = order(table)
    lines = [[row, *(table[row].get(column, 0) for column in columns)] for row in rows]
    return csv_text(["", *columns], lines)


def csv_text(heading: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Return CSV with plain line ends; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    writer.writerows(lines)
    return text.getvalue()


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return CSV of dicts that share their keys."""
    heading = list(rows[0]) if rows else []
    return csv_text(heading, [[row[name] for name in heading] for row in rows])


def _natural(name: str) -> tuple[int, str]:
    number = plain_digits(name)
    return (1 << 62, name) if number is None else (number, name)
