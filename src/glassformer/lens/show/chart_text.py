"""Lines of a chart drawn with characters, for a terminal.

A line is dots of Braille, or plain characters where there is no Unicode. Lines differ without
colour: each has its own dashes (or its own character) and its name where it ends. Values that are
not finite leave a gap; marks are `!` below the axis.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from glassformer.lens.show.chart import Floats, Lines, Scale
from glassformer.lens.show.text import cut
from glassformer.spec.errors import InputError

#: (text, number of the line) -> text with or without colour
Paint = Callable[[str, int], str]

#: The dots along a line that are drawn, for the first line, the second, and so on.
BRAILLE_DASHES = ((1,), (1, 1, 1, 0, 0), (1, 0, 0), (1, 1, 1, 1, 1, 0, 1, 0))
SIGNS = "*o+x#@%&"
#: Bits of a Braille character: two columns of four dots, from above.
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800
LONGEST_LABEL = 18


def plain(text: str, line: int) -> str:
    """Return the text without colour."""
    return text


def chart_text(
    chart: Lines,
    *,
    width: int = 80,
    height: int = 12,
    unicode: bool = True,
    paint: Paint = plain,
) -> str:
    """Return the lines in a box with its numbers, no line of text wider than `width`."""
    scales = chart.x_scale, chart.y_scale
    # shares (n, 2) of the box from its lower left corner; NaN breaks the line
    lines = [
        np.stack([scales[0].share(line.x), scales[1].share(line.y)], axis=1) for line in chart.lines
    ]
    if not any(np.isfinite(points).all(axis=1).any() for points in lines):
        above = " above 0" if chart.log_x or chart.log_y else ""
        return f"nothing to draw: no finite point{above}"
    mark = "…" if unicode else "~"
    names = [cut(line.label, LONGEST_LABEL, mark=mark) for line in chart.lines]
    numbers = [_number(scales[1].value(share), share=chart.share) for share in (1.0, 0.5, 0.0)]
    margin = max(map(len, numbers))
    right = max(map(len, names)) + 1 if any(names) else 0
    columns = width - margin - 2 - right
    if columns < 10:
        raise InputError(
            f"a plot of {width} characters has no room", hint=f"{width - columns + 10}"
        )
    canvas = _Canvas(columns, height, unicode=unicode)
    for number, points in enumerate(lines):
        canvas.draw(points, number)
    rows = canvas.rows(paint)
    ends = _ends(lines, names, height)
    texts = dict(zip((0, height // 2, height - 1), numbers, strict=True))
    tick, side = ("┤", "│") if unicode else ("+", "|")
    drawn = []
    for row, cells in enumerate(rows):
        label = paint(names[ends[row]], ends[row]) if row in ends else ""
        edge = tick if row in texts else side
        drawn.append(f"{texts.get(row, ''):>{margin}} {edge}{cells} {label}".rstrip())
    corner, floor = ("└", "─") if unicode else ("+", "-")
    drawn.append(f"{'':{margin}} {corner}{floor * columns}")
    marks = [mark.x for line in chart.lines for mark in line.marks]
    marks += [] if chart.rule is None else [chart.rule[0]]
    if marks:
        drawn.append(" " * (margin + 2) + _marks(scales[0], marks, columns))
    drawn.append(" " * (margin + 2) + _x_labels(scales[0], columns))
    return "\n".join(line.rstrip() for line in drawn)


class _Canvas:
    """A grid of characters, each of 2 x 4 dots (1 x 1 without Unicode)."""

    def __init__(self, columns: int, rows: int, *, unicode: bool) -> None:
        self.unicode = unicode
        self.size = (columns * 2, rows * 4) if unicode else (columns, rows)
        self.bits = np.zeros((rows, columns), dtype=np.int64)
        self.owner = np.full((rows, columns), -1, dtype=np.int64)

    def draw(self, shares: Floats, number: int) -> None:
        wide, high = self.size
        dashes = BRAILLE_DASHES[number % len(BRAILLE_DASHES)] if self.unicode else (1,)
        before: tuple[int, int] | None = None
        for x, y in shares.tolist():
            if not (math.isfinite(x) and math.isfinite(y)):
                before = None
                continue
            here = (round(x * (wide - 1)), round((1 - y) * (high - 1)))
            for column, row in _way(before or here, here):
                if dashes[column % len(dashes)]:
                    self._dot(column, row, number)
            before = here

    def _dot(self, column: int, row: int, number: int) -> None:
        if self.unicode:
            cell = (row // 4, column // 2)
            self.bits[cell] |= _BITS[column % 2][row % 4]
        else:
            cell = (row, column)
        if self.owner[cell] < 0:
            self.owner[cell] = number

    def rows(self, paint: Paint) -> list[str]:
        made = []
        for bits, owners in zip(self.bits.tolist(), self.owner.tolist(), strict=True):
            cells = []
            for bit, owner in zip(bits, owners, strict=True):
                sign = chr(_BLANK + bit) if self.unicode else SIGNS[owner % len(SIGNS)]
                cells.append(" " if owner < 0 else paint(sign, owner))
            made.append("".join(cells))
        return made


def _way(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots of a straight line."""
    count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (
            round(start[0] + (end[0] - start[0]) * i / count),
            round(start[1] + (end[1] - start[1]) * i / count),
        )
        for i in range(count + 1)
    ]


def _ends(lines: Sequence[Floats], names: Sequence[str], height: int) -> dict[int, int]:
    """Return the row of each name: the one where its line ends, or the nearest free one."""
    places: dict[int, int] = {}
    for number, shares in enumerate(lines):
        good = shares[np.isfinite(shares).all(axis=1)]
        if not len(good) or not names[number]:
            continue
        wish = round((1 - float(good[-1, 1])) * (height - 1))
        free = [row for row in range(height) if row not in places]
        if free:
            places[min(free, key=lambda row: (abs(row - wish), row))] = number
    return places


def _marks(scale: Scale, marks: Sequence[float], columns: int) -> str:
    cells = [" "] * columns
    for share in scale.share(np.array(marks)).tolist():
        if 0 <= share <= 1:
            cells[round(share * (columns - 1))] = "!"
    return "".join(cells)


def _x_labels(scale: Scale, columns: int) -> str:
    low, middle, high = (_number(scale.value(share), share=False) for share in (0.0, 0.5, 1.0))
    text = low.ljust(max(0, columns // 2 - len(middle) // 2)) + middle
    if len(low) >= columns // 2 - len(middle) // 2:
        text = low
    return text.ljust(columns - len(high)) + high


def _number(value: float, *, share: bool) -> str:
    if share:
        return f"{value:.0%}"
    return f"{value:,.0f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"
