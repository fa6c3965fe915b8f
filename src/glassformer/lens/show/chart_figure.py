"""A chart as a figure of matplotlib, and a figure as the bytes of a PNG, SVG or PDF file.

The bytes are the same for the same drawing.
"""

import io
from collections.abc import Sequence
from typing import Any, assert_never

import numpy as np
from matplotlib.figure import Figure

from glassformer.lens.show.chart import READABLE, Bars, Chart, Drawing, Grid, Lines, Panels, ends
from glassformer.lens.show.palette import COLOURS, SERIES, heat_colours, signed_colours
from glassformer.lens.show.text import shown
from glassformer.spec.errors import InputError

KINDS = ("png", "svg", "pdf")
#: What a file would tell of the software and the moment, by kind.
LEFT_OUT = {
    "png": ("Software",),
    "svg": ("Date", "Creator"),
    "pdf": ("CreationDate", "Creator", "Producer"),
}
#: Lines differ by colour, and by dashes on paper.
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
#: Keep words as they are: matplotlib would read formulas between dollars.
PLAIN: dict[str, Any] = {"parse_math": False}


def figure_bytes(drawn: Drawing | Figure, kind: str, *, dpi: int = 110) -> bytes:
    """Return a chart or a figure as a PNG, SVG or PDF: text stays text, and there is no date,
    version or random id.
    """
    if kind not in KINDS:
        raise InputError(f"a figure cannot be written as .{kind}", hint=f"one of {KINDS}")
    import matplotlib

    figure = drawn if isinstance(drawn, Figure) else chart_figure(drawn)
    metadata: dict[str, None] = dict.fromkeys(LEFT_OUT[kind])
    made = io.BytesIO()
    with matplotlib.rc_context(
        {"svg.hashsalt": "glassformer", "svg.fonttype": "none", "pdf.fonttype": 42}
    ):
        figure.savefig(made, format=kind, dpi=dpi, metadata=metadata)
    return made.getvalue()


class Picture(Figure):
    """A figure that a notebook draws; matplotlib's own needs the inline backend of pyplot."""

    def _repr_png_(self) -> bytes:
        return figure_bytes(self, "png")


def chart_figure(drawing: Drawing) -> Picture:
    """Return a figure of a chart, or of several under one title."""
    figure = Picture(figsize=_size(drawing), layout="constrained")
    _place(figure, drawing)
    return figure


# --- where charts are -----------------------------------------------------------------------------


def _size(drawing: Drawing) -> tuple[float, float]:
    """Return width and height in inches."""
    match drawing:
        case Panels():
            widths, heights = _sizes(drawing)
            return min(17.0, sum(widths)), sum(heights) + (0.5 if drawing.title else 0.0)
        case Lines():
            named = 2.5 + 0.4 * len(drawing.x_words)
            return (min(14.0, max(5.0, named)) if drawing.x_words else 8.2), 3.0
        case Bars():
            return 6.0, 0.9 + 0.22 * len(drawing.names)
        case Grid(square=True):
            side = min(9.0, max(3.2, 0.34 * max(drawing.values.shape)))
            return (side + 0.3, side - 0.2) if drawing.rows else (1.7, 1.9)
        case Grid():
            R, S = drawing.values.shape
            longest = max((len(word) for line in drawing.cells for word in line), default=0)
            wide = 0.56 if longest <= 5 else 0.75
            if drawing.cells:
                tall = 1.6 + 0.4 * R if drawing.notes else 1.2 + 0.3 * R
                return min(17.0, 1.6 + wide * max(4, S)), tall
            return min(14.0, 2.2 + 0.5 * S), 1.4 + 0.32 * R
        case _ as unreachable:
            assert_never(unreachable)


def _sizes(panels: Panels) -> tuple[list[float], list[float]]:
    """Return the widths of the columns and the heights of the rows."""
    sizes = [_size(each) for each in panels.charts]
    columns = min(panels.columns, len(sizes))
    widths = [max(w for w, _ in sizes[i::columns]) for i in range(columns)]
    rows = range(0, len(sizes), columns)
    heights = [max(h for _, h in sizes[i : i + columns]) for i in rows]
    return widths, heights


def _place(figure: Any, drawing: Drawing) -> None:
    """Draw into a figure or a part of one."""
    if not isinstance(drawing, Panels):
        axes = figure.subplots()
        _with_key(figure, drawing, _draw(axes, drawing), [axes])
        return
    widths, heights = _sizes(drawing)
    charts = [each for each in drawing.charts if not isinstance(each, Panels)]
    if len(charts) < len(drawing.charts):
        parts = figure.subfigures(len(heights), len(widths), squeeze=False, height_ratios=heights)
        for part, each in zip(parts.flat, drawing.charts, strict=False):
            _place(part, each)
    else:
        grid = {"squeeze": False, "width_ratios": widths, "height_ratios": heights}
        shared = len(widths) == 1 and all(isinstance(each, Lines) for each in charts)
        axes = figure.subplots(len(heights), len(widths), sharex=shared, **grid)
        for axis in axes.flat[len(charts) :]:
            axis.set_visible(False)
        drawn = [_draw(axis, each) for axis, each in zip(axes.flat, charts, strict=False)]
        if len({_key_of(each) for each in charts}) == 1 and _key_of(charts[0]):
            _with_key(figure, charts[0], drawn[0], axes)
            for axis in axes[:, 1:].flat:
                axis.set_ylabel("")
        else:
            for axis, each, image in zip(axes.flat, charts, drawn, strict=False):
                _with_key(figure, each, image, [axis])
        if shared:
            for axis in axes[:-1, 0]:
                axis.set_xlabel("")
    if drawing.title:
        head = figure.suptitle(drawing.title, fontsize=9)
        head.set(**PLAIN, wrap=True)


def _key_of(chart: Chart) -> tuple[object, ...]:
    """Return what a chart's colours mean; () where they are no scale."""
    if not isinstance(chart, Grid) or not chart.key:
        return ()
    return chart.key, chart.low, chart.high, chart.signed


def _with_key(figure: Any, chart: Chart, image: Any, axes: Sequence[Any]) -> None:
    """Draw the scale of colours beside these axes."""
    if _key_of(chart):
        assert isinstance(chart, Grid)
        over = bool((chart.values[np.isfinite(chart.values)] > chart.high).any())
        shrink = 0.7 if chart.square else 1.0
        extend = "max" if over else "neither"
        bar = figure.colorbar(image, ax=axes, shrink=shrink, extend=extend)
        bar.set_label(chart.key, fontsize=8, **PLAIN)
        bar.ax.tick_params(labelsize=8)


# --- what charts are ------------------------------------------------------------------------------


def _draw(axes: Any, chart: Chart) -> Any:
    """Draw one chart into a pair of axes; return the image of a grid."""
    match chart:
        case Lines():
            return _draw_lines(axes, chart)
        case Bars():
            return _draw_bars(axes, chart)
        case Grid():
            return _draw_grid(axes, chart)
        case _ as unreachable:
            assert_never(unreachable)


def _draw_lines(axes: Any, chart: Lines) -> None:
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log")
    for number, line in enumerate(chart.lines):
        style = chart.style(number)
        colour, dash = SERIES[style % len(SERIES)], DASHES[style % len(DASHES)]
        if line.raw is not None:
            axes.plot(*line.raw, color=colour, alpha=0.3, linewidth=0.7)
        dots = "o" if line.dotted else None
        looks = {"linestyle": dash, "linewidth": 1.6, "marker": dots, "markersize": 3.5}
        axes.plot(line.x, line.y, color=colour, label=line.label, **looks)
        for mark in line.marks:
            known = np.isfinite(mark.y)
            across = axes.transData if known else axes.get_xaxis_transform()
            looks = {"transform": across, "color": colour, "markeredgecolor": "black"}
            axes.plot([mark.x], [mark.y if known else 0.97], "v", **looks)
    _limit(axes, chart)
    if chart.share:
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    if chart.x_words:
        _name(axes, chart.x_words, ())
    elif not chart.log_x:
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.6g}" if x < 1e5 else f"{x:,.0f}")
    _mark_x(axes, chart)
    axes.set_xlabel(chart.x_title)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if chart.legend:
        axes.set_title(chart.title, fontsize=9, **PLAIN)
        axes.legend(fontsize=8)
        return
    axes.set_ylabel(chart.title, **PLAIN)
    for share, number in ends(chart, chart.roomy):
        colour = SERIES[chart.style(number) % len(SERIES)]
        where = {"transform": axes.transAxes, "va": "center", "fontsize": 8}
        axes.text(1.01, share, chart.lines[number].label, color=colour, **where, **PLAIN)


def _limit(axes: Any, chart: Lines) -> None:
    """Let the y axis be that of the chart, so that names stand where lines end."""
    scale = chart.roomy
    low, high = scale.value(0.0), scale.value(1.0)
    if np.isfinite([low, high]).all() and low < high:
        axes.set_ylim(low, high)


def _mark_x(axes: Any, chart: Lines) -> None:
    """Draw the band and the rule."""
    top = axes.get_xaxis_transform()
    if chart.band is not None:
        low, high, said = chart.band
        axes.axvspan(low, high, color=SERIES[2], alpha=0.15)
        axes.text(low, 0.03, f" {said}", transform=top, fontsize=8)
    if chart.rule is not None:
        x, said = chart.rule
        axes.axvline(x, color=SERIES[1], linestyle="--", linewidth=1.4)
        axes.text(x, 0.97, f" {said}", color=SERIES[1], transform=top, va="top")


def _draw_bars(axes: Any, chart: Bars) -> None:
    places = range(len(chart.names))
    axes.barh(places, chart.values, color=[SERIES[0 if v >= 0 else 1] for v in chart.values])
    axes.set_yticks(places, [shown(name, most=24) for name in chart.names], fontsize=7, **PLAIN)
    axes.invert_yaxis()
    axes.set_title(chart.title, fontsize=9, **PLAIN)


def _draw_grid(axes: Any, chart: Grid) -> Any:
    values = np.ma.masked_invalid(chart.values)
    if chart.allowed is not None:
        values = np.ma.masked_array(values, ~chart.allowed)
    ground = {"edgecolor": COLOURS["hatch"].light, "facecolor": COLOURS["heat-low"].light}
    axes.patch.set(hatch="////", linewidth=0, **ground)
    image = axes.imshow(
        values,
        cmap=signed_colours() if chart.signed else heat_colours(),
        vmin=chart.low,
        vmax=chart.high,
        aspect="equal" if chart.square else "auto",
        origin="lower" if chart.from_bottom else "upper",
    )
    span = (chart.high - chart.low) or 1.0
    for r, line in enumerate(chart.cells):
        for c, said in enumerate(line):
            dark = float(chart.values[r, c]) - chart.low > 0.28 * span
            colour = "white" if dark else "black" if said != "·" else "0.6"
            axes.text(c, r, said, ha="center", va="center", fontsize=8, color=colour, **PLAIN)
        if chart.notes:
            at = len(chart.columns) - 0.4
            axes.text(at, r, chart.notes[r], va="center", fontsize=8, color="0.35", **PLAIN)
    if chart.rows:
        _name(axes, chart.columns, chart.rows, upright=bool(chart.cells))
        axes.set_xlabel(chart.x_title, fontsize=8, **PLAIN)
        axes.set_ylabel(chart.y_title, fontsize=8, **PLAIN)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    if chart.notes:
        axes.spines[:].set_visible(False)
    axes.set_title(chart.title, fontsize=8, **PLAIN)
    return image


def _name(axes: Any, columns: Sequence[str], rows: Sequence[str], *, upright: bool = False) -> None:
    """Write words at the cells of both axes; columns are vertical unless `upright` and short."""
    flat = upright and max(map(len, columns), default=0) <= 8
    for count, put, turn in (
        (columns, axes.set_xticks, 0 if flat else 90),
        (rows, axes.set_yticks, 0),
    ):
        if not count:
            continue
        every = max(1, -(-len(count) // READABLE))
        labelled = range(0, len(count), every)
        names = [shown(count[i], most=14) for i in labelled]
        put(list(labelled), names, rotation=turn, fontsize=7, **PLAIN)
