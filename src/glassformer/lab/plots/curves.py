"""Curves of runs: raw points below the smoothed line, alerts on it, names at its end.

Which series share a panel, and when an axis is logarithmic, is decided here for every drawing of
curves: terminal, PNG, SVG and report. A terminal's lines are dots of Braille, or plain characters
where there is no Unicode, and are told apart without colour: each has its own dashes (or its own
character) and its name where it ends. Values that are not finite leave a gap; alerts are `!` below
the axis.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from glassformer.lab.runs.curves import Curves, Series
from glassformer.lab.runs.metrics_file import Floats, default_span
from glassformer.lens.show.palette import SERIES
from glassformer.spec.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Lines differ by colour, and by dashes on paper.
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
#: A curve is drawn on a logarithmic axis if it is positive and spans this factor.
DECADES = 10.0
#: The default series, as far as they exist: (title of the panel, its series); for
#: several runs one series per panel, so that the lines of a panel are the runs.
PANELS = (("loss", ("loss", "val.loss")), ("accuracy", ("val.accuracy", "val.exact_match")))
PANELS_OF_SEVERAL = tuple((name, (name,)) for name in ("loss", "val.loss", "val.accuracy"))
#: The least distance of two names at the edge of a panel, as a share of its height.
GAP = 0.075
X_TITLES = {"step": "step", "tokens": "tokens trained on", "time": "seconds of training"}


@dataclass(frozen=True, slots=True)
class Drawn:
    """One line of a panel: the raw points, and the smoothed ones where there are many."""

    run: int
    label: str
    raw: Series
    smooth: Series | None


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over one axis; `share`: fractions, drawn from 0 to 100 %."""

    title: str
    lines: tuple[Drawn, ...]
    log: bool
    share: bool


def panels(
    curves: Sequence[Curves],
    *,
    names: Sequence[str] = (),
    span: float | None = None,
    log: bool | None = None,
) -> list[Panel]:
    """Return the panels of these runs; a series that none of them has is an error."""
    if not curves:
        raise InputError("no run to draw", hint="name one")
    own = PANELS if len(curves) == 1 else PANELS_OF_SEVERAL
    wished = [(name, (name,)) for name in names] or own
    made = []
    for title, members in wished:
        lines = [
            _drawn(number, one, name, span, label=one.run if len(curves) > 1 else name)
            for number, one in enumerate(curves)
            for name in members
            if name in one.series
        ]
        if lines:
            share = all(_is_share(line.raw.name) for line in lines)
            auto = not share and _is_log(lines)
            made.append(Panel(title, tuple(lines), log=auto if log is None else log, share=share))
        elif names:
            curves[0][title]  # lists the series that exist
    if not made:
        raise InputError(
            f"nothing was measured yet in {', '.join(one.run for one in curves)}",
            hint="glass train writes metrics.jsonl as it goes",
        )
    return made


def smoothing_text(made: Sequence[Panel], span: float | None = None) -> str:
    """Return a sentence on how lines were smoothed; empty if none is drawn."""
    counts = [len(line.raw) for panel in made for line in panel.lines if line.smooth is not None]
    if not counts:
        return ""
    spans = {round(default_span(count) if span is None else span, 1) for count in counts}
    points = " to ".join(f"{covered:g}" for covered in sorted({min(spans), max(spans)}))
    return f"smoothed: centred mean over {points} points"


def alerts_text(curves: Sequence[Curves]) -> str:
    """Return the number of alerts of each kind; empty if there is none."""
    kinds = Counter(alert.kind for one in curves for alert in one.alerts)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def curve_figure(
    curves: Sequence[Curves],
    *,
    names: Sequence[str] = (),
    axis: str = "step",
    span: float | None = None,
    log: bool | None = None,
) -> "Figure":
    """Return a matplotlib figure, one panel above the other."""
    from glassformer.lens.show.mpl import Picture

    made = panels(curves, names=names, span=span, log=log)
    figure = Picture(figsize=(8.2, 0.7 + 2.9 * len(made)), layout="constrained")
    rows = figure.subplots(len(made), 1, sharex=True, squeeze=False)[:, 0]
    for panel, axes in zip(made, rows, strict=True):
        _draw_panel(axes, panel, curves, axis)
    rows[-1].set_xlabel(X_TITLES[axis])
    rows[-1].xaxis.set_major_formatter(lambda x, _: f"{x:,.6g}" if x < 1e5 else f"{x:,.0f}")
    title = ", ".join(one.run for one in curves)
    notes = [smoothing_text(made, span), alerts_text(curves)]
    notes[1] = notes[1] and f"alerts (▼): {notes[1]}"
    head = figure.suptitle("\n".join(filter(None, [title, "   ".join(filter(None, notes))])))
    head.set(fontsize=9, parse_math=False, wrap=True)
    return figure


def _drawn(number: int, one: Curves, name: str, span: float | None, *, label: str) -> Drawn:
    raw = one[name]
    covered = default_span(len(raw)) if span is None else span
    # An evaluation is a mean over many examples already, and there are few of them.
    as_it_is = name.startswith("val.") or covered == 1
    return Drawn(number, label, raw, None if as_it_is else raw.smoothed(covered))


def _is_share(name: str) -> bool:
    """Return True for a series of shares, such as accuracy, which lie between 0 and 1."""
    return name.endswith((".accuracy", ".exact_match", ".legal")) or name.startswith("val.by.")


def _is_log(lines: Sequence[Drawn]) -> bool:
    values = np.concatenate([line.raw.value for line in lines])
    values = values[np.isfinite(values)]
    return bool(len(values)) and values.min() > 0 and values.max() >= DECADES * values.min()


def _draw_panel(axes: Any, panel: Panel, curves: Sequence[Curves], axis: str) -> None:
    single = len(curves) == 1
    ends: list[tuple[float, str, str]] = []
    if panel.log:
        axes.set_yscale("log")
    for place, line in enumerate(panel.lines):
        number = place if single else line.run
        colour, dash = SERIES[number % len(SERIES)], DASHES[number % len(DASHES)]
        raw = line.raw.thinned()
        few = len(raw) <= 60
        if line.smooth is not None:
            axes.plot(raw.x(axis), raw.value, color=colour, alpha=0.3, linewidth=0.7)
        shown = raw if line.smooth is None else line.smooth.thinned()
        axes.plot(
            shown.x(axis),
            shown.value,
            color=colour,
            linestyle=dash,
            linewidth=1.6,
            marker="o" if few and line.smooth is None else None,
            markersize=3.5,
        )
        finite = shown.value[np.isfinite(shown.value)]
        if len(finite):
            ends.append((float(finite[-1]), line.label, colour))
        if line.raw.name == "loss":
            _draw_alerts(axes, line, curves[line.run], axis, colour)
    if panel.share and not panel.log:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_ylabel(panel.title, parse_math=False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    _label_ends(axes, ends)


def _draw_alerts(axes: Any, line: Drawn, one: Curves, axis: str, colour: str) -> None:
    """Draw a triangle on the raw curve, or at the panel's top if the value is not finite."""
    x, step, value = line.raw.x(axis), line.raw.step, line.raw.value
    for alert in one.alerts:
        place = int(np.searchsorted(step, alert.step))
        if place >= len(step) or step[place] != alert.step:
            continue
        if np.isfinite(value[place]):
            where, transform = value[place], axes.transData
        else:
            where, transform = 0.97, axes.get_xaxis_transform()
        axes.plot(
            [x[place]], [where], "v", transform=transform, color=colour, markeredgecolor="black"
        )


def _label_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write names at the right edge, where their lines end, moved apart if they touch."""
    axes.autoscale_view()
    shares = []
    for value, label, colour in ends:
        point = axes.transData.transform((0.0 if axes.get_xscale() == "linear" else 1.0, value))
        shares.append((float(axes.transAxes.inverted().transform(point)[1]), label, colour))
    for share, label, colour in apart(shares):
        axes.text(
            1.01,
            share,
            label,
            color=colour,
            fontsize=8,
            va="center",
            transform=axes.transAxes,
            parse_math=False,
        )


def apart(labels: Sequence[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """Move labels at heights from 0 to 1 until no two are nearer than a line of text."""
    made: list[tuple[float, str, str]] = []
    low = -GAP
    for share, label, colour in sorted(labels):
        low = max(share, low + GAP)
        made.append((low, label, colour))
    high = 1.0 + GAP
    for i in reversed(range(len(made))):
        high = min(made[i][0], high - GAP)
        made[i] = (high, *made[i][1:])
    return made


# --- drawn with characters ------------------------------------------------------------------------


#: (text, number of the line) -> text with or without colour
Paint = Callable[[str, int], str]

#: The dots along a line that are drawn, for the first line, the second, and so on.
BRAILLE_DASHES = ((1,), (1, 1, 1, 0, 0), (1, 0, 0), (1, 1, 1, 1, 1, 0, 1, 0))
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
