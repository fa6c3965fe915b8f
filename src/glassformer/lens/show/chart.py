"""A chart as a value: lines, bars or a grid of cells, and panels of them.

Three renderers draw the same value: `chart_text` with characters for a terminal, `chart_svg` as
elements for pages, reports and notebooks, and `chart_figure` as a figure of matplotlib, which
writes PNG, SVG and PDF files. What is drawn, and on which scale, is decided here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: A line of at most this many points, not smoothed, shows each of them.
FEW = 60
#: The most words on one axis, and the most columns of cells with words in them.
READABLE = 40
#: The least distance of two names at the edge of a chart, as a share of its height.
GAP = 0.075


@dataclass(frozen=True, slots=True)
class Mark:
    """An event on a line; without a finite value it stands at the top of the chart."""

    x: float
    y: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points in order; what is not finite is a gap. `raw`: what was smoothed, drawn faintly.

    `style` is the number of its colour and dashes; None: its number in the chart.
    """

    label: str
    x: Floats
    y: Floats
    raw: tuple[Floats, Floats] | None = None
    marks: tuple[Mark, ...] = ()
    style: int | None = None

    @property
    def dotted(self) -> bool:
        """True if each point is drawn."""
        return self.raw is None and len(self.x) <= FEW

    @property
    def last(self) -> float | None:
        """The last finite value."""
        finite = self.y[np.isfinite(self.y)]
        return float(finite[-1]) if len(finite) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Lines over one axis. `x_words` name the places 0, 1, 2, …

    `share`: fractions, drawn from 0 to 100 %. `band` is a marked range of x, `rule` a marked x with
    words. `legend`: names stand below the chart, not where the lines end.
    """

    title: str
    lines: tuple[Line, ...]
    x_title: str = ""
    x_words: tuple[str, ...] = ()
    log_x: bool = False
    log_y: bool = False
    share: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    band: tuple[float, float, str] | None = None
    rule: tuple[float, str] | None = None
    legend: bool = False

    def style(self, number: int) -> int:
        """Return the number of a line's colour and dashes."""
        own = self.lines[number].style
        return number if own is None else own

    @property
    def roomy(self) -> "Scale":
        """The scale of the y axis in a picture: with room at both ends, but for a given range."""
        return self.y_scale.padded() if self.y_range is None else self.y_scale

    @property
    def x_scale(self) -> "Scale":
        """The scale of the x axis."""
        return _scale([line.x for line in self.lines], self.x_range, log=self.log_x)

    @property
    def y_scale(self) -> "Scale":
        """The scale of the y axis; a share that is not logarithmic goes from 0 to 1."""
        wanted = (0.0, 1.0) if self.share and not self.log_y else self.y_range
        every = [
            v for one in self.lines for v in (one.y, *(() if one.raw is None else one.raw[1:]))
        ]
        return _scale(every, wanted, log=self.log_y)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars, the first at the top; `form` formats their values."""

    title: str
    names: tuple[str, ...]
    values: tuple[float, ...]
    form: str = ".3f"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Cells in rows and columns, coloured from `low` to `high`; `signed`: 0 has no colour.

    Cells that are not allowed, or not finite, are hatched. `cells` are words written in them,
    `notes` words to the right of each row. `key` says what a colour is. A square grid has square
    cells; one that begins at the bottom has its first row there.
    """

    title: str
    values: Floats
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 1.0
    signed: bool = False
    allowed: NDArray[np.bool_] | None = None
    cells: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    key: str = ""
    x_title: str = ""
    y_title: str = ""
    square: bool = False
    from_bottom: bool = False


Chart = Lines | Bars | Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """Charts in rows of `columns`, under one title; panels may hold panels."""

    charts: "tuple[Chart | Panels, ...]"
    columns: int = 1
    title: str = ""


Drawing = Chart | Panels


# --- scales ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """The range of an axis as it is drawn: of logarithms where `log`."""

    low: float
    high: float
    log: bool = False

    def share(self, values: Floats) -> Floats:
        """Return places along the axis from 0 to 1; NaN for what cannot be drawn."""
        values = np.asarray(values, dtype=np.float64)
        known = np.isfinite(values) & ((values > 0) | (not self.log))
        drawn = np.full(values.shape, np.nan)
        drawn[known] = np.log10(values[known]) if self.log else values[known]
        return (drawn - self.low) / (self.high - self.low)

    def at(self, value: float) -> float:
        """Return the place of one value."""
        return float(self.share(np.array([value]))[0])

    def padded(self, share: float = 0.03) -> "Scale":
        """Return the scale with room at both ends."""
        room = share * (self.high - self.low)
        return Scale(self.low - room, self.high + room, self.log)

    def value(self, share: float) -> float:
        """Return the value at a place."""
        drawn = self.low + share * (self.high - self.low)
        return float(10.0**drawn) if self.log else drawn

    def ticks(self, most: int) -> list[float]:
        """Return round values inside the range."""
        if not self.log:
            return ticks(self.low, self.high, most=most)
        steps = (1,) if self.high - self.low > 3 else (1, 2, 5)
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        every = [k * 10.0**power for power in powers for k in steps]
        return [v for v in every if self.low - 1e-9 <= math.log10(v) <= self.high + 1e-9]


def _scale(values: Sequence[Floats], wanted: tuple[float, float] | None, *, log: bool) -> Scale:
    if wanted is not None:
        low, high = wanted
        return Scale(math.log10(low), math.log10(high), log=True) if log else Scale(low, high)
    every = np.concatenate([*values, np.empty(0)])
    every = every[np.isfinite(every) & ((every > 0) | (not log))]
    return scale_of(np.log10(every) if log else every, log=log)


def scale_of(values: Floats, *, log: bool = False, pad: float = 0.0) -> Scale:
    """Return the range of finite values as they are drawn, widened by a share of itself."""
    if not len(values):
        return Scale(0.0, 1.0, log)
    low, high = float(values.min()), float(values.max())
    if high > low:
        return Scale(low - pad * (high - low), high + pad * (high - low), log)
    around = max(0.5, 1e-9 * abs(low))  # at 2^62 a half is lost to rounding
    return Scale(low - around, high + around, log)


def ticks(low: float, high: float, *, most: int) -> list[float]:
    """Return round values inside the range: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def apart(labels: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Move labels at heights from 0 to 1 until no two are nearer than a line of text."""
    made: list[tuple[float, int]] = []
    low = -GAP
    for share, number in sorted(labels):
        low = max(share, low + GAP)
        made.append((low, number))
    high = 1.0 + GAP
    for i in reversed(range(len(made))):
        high = min(made[i][0], high - GAP)
        made[i] = (high, made[i][1])
    return made


def ends(chart: Lines, scale: Scale) -> list[tuple[float, int]]:
    """Return the heights at which lines are named, where they end, and the lines' numbers."""
    last = [(line.last, number) for number, line in enumerate(chart.lines) if line.label]
    places = [(scale.at(value), number) for value, number in last if value is not None]
    return apart([(place, number) for place, number in places if math.isfinite(place)])


def series(
    values: Mapping[str, Sequence[float]],
    *,
    title: str = "",
    words: Sequence[str] = (),
    x_title: str = "",
) -> Lines:
    """Return lines over equal steps, with 0 on the axis."""
    lines = tuple(
        Line(label=name, x=np.arange(len(one), dtype=np.float64), y=np.array(one, np.float64))
        for name, one in values.items()
    )
    every = np.concatenate([*(line.y for line in lines), np.zeros(1)])
    scale = scale_of(every[np.isfinite(every)])
    return Lines(
        title=title,
        lines=lines,
        x_words=tuple(words),
        x_title=x_title,
        y_range=(min(0.0, scale.low), scale.high + 0.04 * (scale.high - min(0.0, scale.low))),
        legend=True,
    )
