"""Lines drawn with characters: dots of Braille, or plain signs where the terminal has no Unicode.

Lines are told apart without colour: each has its own dashes (or its own sign) and its name where
it ends. Not finite values leave a gap; alerts are `!` below the axis.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from glassformer.lab.runs.metrics_file import Floats
from glassformer.spec.errors import InputError

#: (text, number of the line) -> text with or without colour
Paint = Callable[[str, int], str]

#: The dots along a line that are drawn, for the first line, the second, and so on.
DASHES = ((1,), (1, 1, 1, 0, 0), (1, 0, 0), (1, 1, 1, 1, 1, 0, 1, 0))
SIGNS = "*o+x#@%&"
#: Bits of a Braille character: two columns of four dots, from above.
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800
LONGEST_LABEL = 18


@dataclass(frozen=True, slots=True)
class Line:
    """Points, and the name that is written where they end."""

    label: str
    x: Floats
    y: Floats


def plain(text: str, line: int) -> str:
    """Return the text without colour."""
    return text


def plot(
    lines: Sequence[Line],
    *,
    width: int = 80,
    height: int = 12,
    log_x: bool = False,
    log_y: bool = False,
    alerts: Sequence[float] = (),
    unicode: bool = True,
    paint: Paint = plain,
) -> str:
    """Return the lines in a box with its numbers, no line of text wider than `width`."""
    frame = _Frame.around(lines, log_x=log_x, log_y=log_y)
    if frame is None:
        return "nothing to draw: no finite point" + (" above 0" if log_x or log_y else "")
    cut = "…" if unicode else "~"
    names = [_shortened(line.label, cut) for line in lines]
    margin = max(len(text) for text in frame.y_labels())
    right = max(map(len, names)) + 1 if any(names) else 0
    columns = width - margin - 2 - right
    if columns < 10:
        raise InputError(
            f"a plot of {width} characters has no room", hint=f"{width - columns + 10}"
        )
    canvas = _Canvas(columns, height, unicode=unicode)
    for number, line in enumerate(lines):
        canvas.draw(frame.points(line), number)
    rows = canvas.rows(paint)
    ends = _ends(frame, lines, height)
    texts = dict(zip((0, height // 2, height - 1), frame.y_labels(), strict=True))
    tick, side = ("┤", "│") if unicode else ("+", "|")
    drawn = []
    for row, cells in enumerate(rows):
        label = paint(names[ends[row]], ends[row]) if row in ends else ""
        edge = tick if row in texts else side
        drawn.append(f"{texts.get(row, ''):>{margin}} {edge}{cells} {label}".rstrip())
    corner, floor = ("└", "─") if unicode else ("+", "-")
    drawn.append(f"{'':{margin}} {corner}{floor * columns}")
    if alerts:
        drawn.append(" " * (margin + 2) + _marks(frame, alerts, columns))
    drawn.append(" " * (margin + 2) + _x_labels(frame, columns))
    return "\n".join(line.rstrip() for line in drawn)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The range of both axes, in the scale that is drawn (logarithms if requested)."""

    x: tuple[float, float]
    y: tuple[float, float]
    log_x: bool
    log_y: bool

    @staticmethod
    def around(lines: Sequence[Line], *, log_x: bool, log_y: bool) -> "_Frame | None":
        xs, ys = [], []
        for line in lines:
            x, y = _scaled(line.x, log_x), _scaled(line.y, log_y)
            good = np.isfinite(x) & np.isfinite(y)
            xs.append(x[good])
            ys.append(y[good])
        x, y = np.concatenate([*xs, []]), np.concatenate([*ys, []])
        if not len(x):
            return None
        return _Frame(_range(x), _range(y), log_x, log_y)

    def points(self, line: Line) -> Floats:
        """Return (n, 2) shares of the box from its lower left corner; NaN breaks the line."""
        x = (_scaled(line.x, self.log_x) - self.x[0]) / (self.x[1] - self.x[0])
        y = (_scaled(line.y, self.log_y) - self.y[0]) / (self.y[1] - self.y[0])
        return np.stack([x, y], axis=1)

    def y_labels(self) -> tuple[str, str, str]:
        """Return labels from the top: highest, middle, lowest."""
        low, high = self.y
        middle = (low + high) / 2
        return _text(high, self.log_y), _text(middle, self.log_y), _text(low, self.log_y)

    def x_labels(self) -> tuple[str, str, str]:
        low, high = self.x
        middle = (low + high) / 2
        return _text(low, self.log_x), _text(middle, self.log_x), _text(high, self.log_x)

    def place(self, x: float) -> float:
        """Return the position of a value on the x axis, as a share."""
        value = _scaled(np.array([x], dtype=np.float64), self.log_x)[0]
        return float((value - self.x[0]) / (self.x[1] - self.x[0]))


class _Canvas:
    """A grid of characters, each of 2 x 4 dots (1 x 1 without Unicode)."""

    def __init__(self, columns: int, rows: int, *, unicode: bool) -> None:
        self.unicode = unicode
        self.size = (columns * 2, rows * 4) if unicode else (columns, rows)
        self.bits = np.zeros((rows, columns), dtype=np.int64)
        self.owner = np.full((rows, columns), -1, dtype=np.int64)

    def draw(self, shares: Floats, number: int) -> None:
        wide, high = self.size
        dashes = DASHES[number % len(DASHES)] if self.unicode else (1,)
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


def _ends(frame: _Frame, lines: Sequence[Line], height: int) -> dict[int, int]:
    """Return the row of each name: the one where its line ends, or the nearest free one."""
    places: dict[int, int] = {}
    for number, line in enumerate(lines):
        shares = frame.points(line)
        good = shares[np.isfinite(shares).all(axis=1)]
        if not len(good) or not line.label:
            continue
        wish = round((1 - float(good[-1, 1])) * (height - 1))
        free = [row for row in range(height) if row not in places]
        if free:
            places[min(free, key=lambda row: (abs(row - wish), row))] = number
    return places


def _marks(frame: _Frame, alerts: Sequence[float], columns: int) -> str:
    cells = [" "] * columns
    for value in alerts:
        share = frame.place(value)
        if 0 <= share <= 1:
            cells[round(share * (columns - 1))] = "!"
    return "".join(cells)


def _x_labels(frame: _Frame, columns: int) -> str:
    low, middle, high = frame.x_labels()
    text = low.ljust(max(0, columns // 2 - len(middle) // 2)) + middle
    if len(low) >= columns // 2 - len(middle) // 2:
        text = low
    return text.ljust(columns - len(high)) + high


def _scaled(values: Floats, log: bool) -> Floats:
    if not log:
        return values
    return np.log10(values, out=np.full(len(values), np.nan), where=values > 0)


def _range(values: Floats) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _text(value: float, log: bool) -> str:
    value = 10**value if log else value
    return f"{value:,.0f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"


def _shortened(name: str, cut: str) -> str:
    return name if len(name) <= LONGEST_LABEL else name[: LONGEST_LABEL - 1] + cut
