"""A chart as SVG elements, for pages, reports and notebooks.

Colours are the page's variables, with a colour for either ground where a page has none.
"""

import base64
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import TypeVar, assert_never

import numpy as np
from numpy.typing import NDArray

from glassformer.lens.show import palette
from glassformer.lens.show.chart import Bars, Chart, Floats, Grid, Line, Lines, Scale, ends
from glassformer.lens.show.element import Element, el, picture
from glassformer.lens.show.text import shown

# T rows, S columns

Scalar = TypeVar("Scalar", bound=np.generic)

#: Colours of positive values, of negative values, and of the hatching of masked cells.
ACCENT, OPPOSITE, HATCH = (
    palette.rgb(palette.COLOURS[name].either) for name in ("heat-high", "heat-minus", "hatch")
)
#: Dashes of lines, so that they differ without colour.
DASHES = ("", "7 3", "2 3", "9 3 2 3")
#: Words of tokens are set in letters of one width, in pixels.
MONO, LETTER = "ui-monospace, monospace", 6.8


def series_colour(number: int) -> str:
    """Return the colour of a line or a bar: the page's own, or one for either ground."""
    at = number % len(palette.SERIES_ON_EITHER)
    return f"var(--series-{at + 1},{palette.SERIES_ON_EITHER[at]})"


def chart_svg(chart: Chart, *, label: str = "", width: float = 560, height: float = 250) -> Element:
    """Return a chart as a picture; a grid is about `width` wide, bars are as high as they are many.

    `label` is read aloud; without one the chart's title is.
    """
    label = label or chart.title
    match chart:
        case Lines():
            return _lines(chart, label, width, height)
        case Bars():
            return _bars(chart, label)
        case Grid():
            return _cells(chart, label, width) if chart.cells else _heatmap(chart, label, width)
        case _ as unreachable:
            assert_never(unreachable)


def words(x: float, y: float, said: str, *, anchor: str = "start", **props: object) -> Element:
    """Return words at a baseline."""
    return el(
        "text", said, x=x, y=y, **({} if anchor == "start" else {"text_anchor": anchor}), **props
    )


def line(x1: float, y1: float, x2: float, y2: float, **props: object) -> Element:
    """Return a straight line."""
    return el("line", **{"stroke": "currentColor", "x1": x1, "y1": y1, "x2": x2, "y2": y2, **props})


# --- lines ----------------------------------------------------------------------------------------


def _lines(chart: Lines, label: str, width: float, height: float) -> Element:
    """Draw faint raw points, the lines, marks as triangles, and names where the lines end."""
    named = [one for one in chart.lines if one.label]
    longest = max((len(shown(one.label, most=40)) for one in named), default=0)
    right = 12.0 if chart.legend else min(220.0, 18 + 6.2 * longest)
    x_scale, y_scale = chart.x_scale, chart.roomy
    labels = [_number(value, share=chart.share) for value in y_scale.ticks(6)]
    left = 14 + 6.4 * max(map(len, labels), default=4)
    low, high = height - (24 if not chart.x_title else 40), 14.0
    across, up = _Span(left, width - right), _Span(low, high)
    parts = list(_frame(chart, across, up, x_scale, y_scale))
    for number, one in enumerate(chart.lines):
        parts += _line(chart, number, one, across, up)
    if chart.rule is not None:
        x = across.at(x_scale.at(chart.rule[0]))
        style = {"stroke": series_colour(1), "stroke_dasharray": "5 3", "stroke_width": 1.4}
        parts.append(line(x, low, x, high, **style))
        parts.append(words(x + 5, high + 10, chart.rule[1], fill=series_colour(1)))
    if chart.legend:
        for number, one in enumerate(chart.lines):
            y = height + 8 + 16 * number
            parts.append(_stroke(f"M{left:.1f} {y - 4:.1f}h26", chart.style(number)))
            parts.append(words(left + 32, y, shown(one.label, most=90)))
        height += 16 * len(chart.lines)
    else:
        for share, number in ends(chart, y_scale):
            colour = series_colour(chart.style(number))
            name = shown(chart.lines[number].label, most=40)
            parts.append(words(width - right + 8, up.at(share) + 4, name, fill=colour))
    return picture(width, height, label, *parts)


class _Span:
    """Shares from 0 to 1 onto pixels."""

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, end

    def at(self, share: float) -> float:
        return self.start + share * (self.end - self.start)


def _frame(
    chart: Lines, across: _Span, up: _Span, x_scale: Scale, y_scale: Scale
) -> Iterator[Element]:
    """Yield the grid, the numbers of both axes and their titles."""
    if chart.band is not None:
        first, last, said = chart.band
        x, end = across.at(x_scale.at(first)), across.at(x_scale.at(last))
        tall = up.start - up.end
        yield el(
            "rect",
            x=x,
            y=up.end,
            width=end - x,
            height=tall,
            fill=series_colour(2),
            fill_opacity=0.15,
        )
        yield words(x + 4, up.start - 6, said)
    for value in y_scale.ticks(6):
        y = up.at(y_scale.at(value))
        yield line(across.start, y, across.end, y, stroke_opacity="0.14")
        said = _number(value, share=chart.share)
        yield words(across.start - 6, y + 4, said, anchor="end")
    yield line(across.start, up.start, across.end, up.start, stroke_opacity="0.6")
    if chart.x_words:
        last = len(chart.x_words) - 1
        for place, anchor in ((0, "start"), (last, "end"))[: 1 + bool(last)]:
            x = across.at(x_scale.at(place))
            yield words(x, up.start + 16, shown(chart.x_words[place], most=20), anchor=anchor)
    else:
        for value in x_scale.ticks(7):
            said = f"{value:.0e}" if chart.log_x else f"{value:,.6g}"
            yield words(across.at(x_scale.at(value)), up.start + 16, said, anchor="middle")
    if chart.x_title:
        middle = (across.start + across.end) / 2
        yield words(middle, up.start + 34, chart.x_title, anchor="middle")


def _number(value: float, *, share: bool) -> str:
    return f"{value:.0%}" if share else f"{value:.4g}"


def _line(chart: Lines, number: int, one: Line, across: _Span, up: _Span) -> Iterator[Element]:
    style = chart.style(number)
    x_scale, y_scale = chart.x_scale, chart.roomy

    def placed(x: Floats, y: Floats) -> Iterator[tuple[float, float]]:
        for a, b in zip(x_scale.share(x).tolist(), y_scale.share(y).tolist(), strict=True):
            yield across.at(a), up.at(b)

    if one.raw is not None:
        faint = {"stroke_width": 1, "stroke_opacity": "0.35", "stroke_dasharray": ""}
        yield _stroke(_path(placed(*one.raw)), style, **faint)
    yield _stroke(_path(placed(one.x, one.y)), style)
    if one.dotted:
        for x, y in placed(one.x, one.y):
            if x == x and y == y:
                yield el("circle", cx=x, cy=y, r="2.4", fill=series_colour(style))
    for mark in one.marks:
        x, y = next(placed(np.array([mark.x]), np.array([mark.y])))
        y = y if y == y else up.end + 8
        tip = el("title", mark.words)
        where = f"M{x - 5:.1f} {y - 9:.1f}h10l-5 8z"
        yield el("path", tip, d=where, fill=f"var(--bad,{palette.COLOURS['bad'].light})")


def _stroke(d: str, style: int, **props: object) -> Element:
    own = {
        "fill": "none",
        "stroke": series_colour(style),
        "stroke_width": "1.8",
        "stroke_dasharray": DASHES[style % len(DASHES)],
    } | props
    return el("path", d=d, **{name: value for name, value in own.items() if value != ""})


def _path(points: Iterator[tuple[float, float]]) -> str:
    parts, pen = [], "M"
    for x, y in points:
        if x != x or y != y:
            pen = "M"
            continue
        parts.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
    return "".join(parts)


# --- bars -----------------------------------------------------------------------------------------


def _bars(chart: Bars, label: str) -> Element:
    """Draw bars scaled to the longest; negative ones in the other colour."""
    left = 8 + LETTER * max((len(shown(name, most=24)) for name in chart.names), default=0)
    largest = max((abs(v) for v in chart.values if np.isfinite(v)), default=0.0) or 1.0
    parts = []
    for number, (name, value) in enumerate(zip(chart.names, chart.values, strict=True)):
        y = 18.0 * number + 2
        known = value if np.isfinite(value) else 0.0
        long = 190 * abs(known) / largest
        colour = series_colour(0 if known >= 0 else 1)
        bar = {"width": long, "height": 14, "fill": colour, "fill_opacity": "0.75"}
        parts.append(words(left - 4, y + 12, shown(name, most=24), anchor="end"))
        parts.append(el("rect", x=left, y=y, **bar))
        parts.append(words(left + long + 4, y + 12, format(value, chart.form)))
    return picture(left + 260, 18 * len(chart.names) + 4, label, *parts, font_family=MONO)


# --- grids ----------------------------------------------------------------------------------------


def _heatmap(chart: Grid, label: str, side: float) -> Element:
    """Draw cells as pixels of an image; words stand where there is room."""
    T, S = chart.values.shape
    cell = min(26.0, max(1.0, side / max(T, S)))
    scale = max(1, round(cell / 2) if T < 256 else 1)
    largest = max(abs(chart.low), abs(chart.high)) or 1.0
    image = heatmap_png(chart.values / largest, allowed=chart.allowed, scale=scale)
    left, long = (8 + LETTER * _longest(named) for named in (chart.rows, chart.columns))
    flat = long <= 30 and cell >= 14  # short words are horizontal, long ones vertical
    top = 18.0 if flat else long
    size = {"x": left, "y": top, "width": S * cell, "height": T * cell}
    frame = {"fill": "none", "stroke": "currentColor", "stroke_opacity": "0.35"}
    parts = [
        el(
            "image",
            **size,
            preserveAspectRatio="none",
            image_rendering="pixelated",
            href=data_uri(image),
        ),
        el("rect", **size, **frame),
    ]
    every = max(1, round(11 / cell))
    for t in range(0, len(chart.rows), every):
        y = top + (t + 0.5) * cell + 4
        parts.append(words(left - 4, y, shown(chart.rows[t], most=12), anchor="end"))
    for s in range(0, len(chart.columns), every):
        x, said = left + (s + 0.5) * cell, shown(chart.columns[s], most=12)
        if flat:
            parts.append(words(x, top - 5, said, anchor="middle"))
        else:
            turn = f"rotate(-90 {x + 4:g} {top - 4:g})"
            parts.append(words(x + 4, top - 4, said, transform=turn))
    right, bottom = left + S * cell, top + T * cell
    return picture(right + 2, bottom + 2, label, *parts, font_family=MONO)


def _cells(chart: Grid, label: str, width: float) -> Element:
    """Draw cells with words in them, the stronger the colour the higher the value."""
    left = 20 + 7.2 * max(map(len, chart.rows))
    wide, tall, top = min(120.0, (width - left - 8) / len(chart.columns)), 30.0, 30.0
    fill = palette.COLOURS["heat-high"].either
    parts = [
        words(left + (i + 0.5) * wide, 20, name, anchor="middle")
        for i, name in enumerate(chart.columns)
    ]
    span = (chart.high - chart.low) or 1.0
    for r, name in enumerate(chart.rows):
        y = top + tall * r
        parts.append(words(left - 8, y + 19, name, anchor="end"))
        for c, said in enumerate(chart.cells[r]):
            if not np.isfinite(chart.values[r, c]):
                continue
            share = (float(chart.values[r, c]) - chart.low) / span
            box = {"x": left + c * wide, "y": y, "width": wide - 2, "height": tall - 2, "rx": 3}
            parts.append(el("rect", **box, fill=fill, fill_opacity=f"{0.08 + 0.5 * share:.3f}"))
            parts.append(words(left + (c + 0.5) * wide, y + 19, said, anchor="middle"))
    return picture(
        left + wide * len(chart.columns) + 8, top + tall * len(chart.rows) + 4, label, *parts
    )


def _longest(named: Sequence[str]) -> int:
    return max((len(shown(word, most=12)) for word in named), default=0)


def colour_key(label: str) -> Element:
    """Return the ramp of the maps with its ends: no colour is 0, the strongest 1."""
    ramp = data_uri(heatmap_png(np.linspace(0.0, 1.0, 64)[None, :]))
    size = {"x": 14, "y": 2, "width": 120, "height": 12}
    frame = {"fill": "none", "stroke": "currentColor", "stroke_opacity": "0.35"}
    return picture(
        170 + 7 * len(label),
        16,
        f"{label}: no colour is 0, the strongest 1",
        words(0, 12, "0"),
        el("image", **size, preserveAspectRatio="none", href=ramp),
        el("rect", **size, **frame),
        words(140, 12, f"1 {label}"),
        font_family=MONO,
    )


# --- heat maps as images --------------------------------------------------------------------------

_STEPS = 126  # levels of each sign in the palette
_LINE, _GAP = 254, 255  # indices of the palette for the hatching


def heatmap_png(
    values_TS: NDArray[np.floating], *, allowed: NDArray[np.bool_] | None = None, scale: int = 1
) -> bytes:
    """Return a palette PNG, `scale` pixels per cell: -1 to 1 as two ramps of alpha, 0 transparent.

    The alpha is the root of the value (`palette.strength`). Cells that are not allowed, or not
    finite, are hatched.
    """
    masked_TS = ~np.isfinite(values_TS)
    if allowed is not None:
        masked_TS |= ~allowed
    clipped_TS = np.clip(np.nan_to_num(values_TS), -1.0, 1.0)
    size_TS = np.sign(clipped_TS) * np.sqrt(np.abs(clipped_TS)) * _STEPS
    index_TS = np.where(size_TS >= 0, np.rint(size_TS), _STEPS + np.rint(-size_TS))
    index_TS = np.where(np.rint(size_TS) == 0, 0, index_TS).astype(np.uint8)
    pixels = index_TS.repeat(scale, 0).repeat(scale, 1)
    masked = masked_TS.repeat(scale, 0).repeat(scale, 1)
    y, x = np.ogrid[: pixels.shape[0], : pixels.shape[1]]
    pixels[masked] = np.where((x + y) % 4 == 0, _LINE, _GAP)[masked]
    return _palette_png(pixels)


def _palette_png(pixels: NDArray[np.uint8]) -> bytes:
    ramp = [round(255 * step / _STEPS) for step in range(_STEPS + 1)]
    colours = [ACCENT] * (_STEPS + 1) + [OPPOSITE] * _STEPS + [HATCH] * 3
    alphas = ramp + ramp[1:] + [0, 120, 0]
    height, width = pixels.shape
    lines = np.zeros((height, width + 1), np.uint8)  # each begins with 0: no filter
    lines[:, 1:] = pixels
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(np.array(colours, np.uint8))),
        (b"tRNS", bytes(alphas)),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def data_uri(png: bytes) -> str:
    """Return an image as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def pooled(values_TS: NDArray[Scalar], *, most: int) -> NDArray[Scalar]:
    """Max-pool to at most `most` rows and columns."""
    for axis in (0, 1):
        step = -(-values_TS.shape[axis] // most)
        if step > 1:
            starts = np.arange(0, values_TS.shape[axis], step)
            values_TS = np.maximum.reduceat(values_TS, starts, axis=axis)
    return values_TS
