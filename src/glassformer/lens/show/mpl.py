"""Matplotlib figures of maps, rows and bars; and a figure as the bytes of a file.

The bytes are the same for the same drawing.
"""

import io
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

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


def figure_bytes(figure: Figure, kind: str) -> bytes:
    """Return a PNG, SVG or PDF without date, version or random ids; text in it stays text."""
    if kind not in KINDS:
        raise InputError(f"a figure cannot be written as .{kind}", hint=f"one of {KINDS}")
    import matplotlib

    metadata: dict[str, None] = dict.fromkeys(LEFT_OUT[kind])
    made = io.BytesIO()
    with matplotlib.rc_context(
        {"svg.hashsalt": "glassformer", "svg.fonttype": "none", "pdf.fonttype": 42}
    ):
        figure.savefig(made, format=kind, dpi=110, metadata=metadata)
    return made.getvalue()


class Picture(Figure):
    """A figure that a notebook draws; matplotlib's own needs the inline backend of pyplot."""

    def _repr_png_(self) -> bytes:
        return figure_bytes(self, "png")


#: The most words on one axis.
READABLE = 40
#: The ground of a map: the colour of nothing.
LOW = COLOURS["heat-low"].light
#: Maps in one row of an inspection, and how many of its layers are drawn: the first and the last.
ACROSS, LAYERS = 6, 12
#: Keep words as they are: matplotlib would read formulas between dollars.
PLAIN: dict[str, Any] = {"parse_math": False}


class Mapped(Protocol):
    """An `AttentionMap` or a `Difference`."""

    @property
    def tensor(self) -> Tensor:
        """The weights (T, S)."""

    @property
    def allowed(self) -> Tensor:
        """True where a query may attend to a key."""

    @property
    def rows_words(self) -> tuple[str, ...]:
        """Words of the queries."""

    @property
    def columns_words(self) -> tuple[str, ...]:
        """Words of the keys."""

    @property
    def title(self) -> str:
        """The heading."""


class Lensed(Protocol):
    """A `LogitLens`."""

    @property
    def row_names(self) -> tuple[str, ...]:
        """Names of the rows."""

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the tokens."""

    @property
    def kl(self) -> Tensor:
        """The divergences (R, T)."""

    def top(self, position: int, k: int, *, row: str) -> list[tuple[str, float]]:
        """Return the k likeliest words."""


class Normed(Protocol):
    """`Norms` by row and position."""

    @property
    def row_names(self) -> tuple[str, ...]:
        """Names of the rows."""

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the tokens."""

    @property
    def residual(self) -> Tensor:
        """The norms of the residual (R, T)."""

    def parts_by_name(self) -> dict[str, Tensor]:
        """Return the norms of what the layers add."""


def maps_figure(maps: Sequence[Mapped], *, columns: int, words: bool = True) -> Figure:
    """Draw maps on one scale from 0 to 1, masked cells hatched."""
    lines = -(-len(maps) // columns)
    T, S = maps[0].tensor.shape
    side = min(9.0, max(3.2, 0.34 * max(T, S))) if words else 1.7
    figure = Picture(figsize=(side * columns + 0.8, side * lines + 0.4), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    image: Any = None
    for number, axis in enumerate(axes.flat):
        if number >= len(maps):
            axis.set_visible(False)
            continue
        image = draw_map(axis, maps[number], words=words)
    figure.colorbar(image, ax=axes, shrink=0.7, label="attention weight")
    return figure


def difference_figure(difference: Mapped) -> Figure:
    """Draw one map on a scale from -1 to 1, masked cells hatched."""
    side = min(9.0, max(3.2, 0.34 * max(difference.tensor.shape)))
    figure = Picture(figsize=(side + 0.8, side + 0.4), layout="constrained")
    axis = figure.subplots()
    image = draw_map(axis, difference, signed=True)
    figure.colorbar(image, ax=axis, shrink=0.7, label="difference of the weights")
    return figure


def draw_map(axis: Any, each: Mapped, *, words: bool = True, signed: bool = False) -> Any:
    """Draw one map into one pair of axes: weights from 0 to 1, or differences from -1 to 1."""
    values = np.ma.masked_array(each.tensor.numpy(), ~each.allowed.numpy())
    axis.patch.set(hatch="////", edgecolor=COLOURS["hatch"].light, facecolor=LOW, linewidth=0)
    colours, low = (signed_colours(), -1.0) if signed else (heat_colours(), 0.0)
    image = axis.imshow(values, cmap=colours, vmin=low, vmax=1.0, aspect="equal")
    axis.set_title(each.title, fontsize=8, **PLAIN)
    if words:
        _name(axis, each.columns_words, each.rows_words)
        axis.set_xlabel("attended to (keys)", fontsize=8)
        axis.set_ylabel("attending (queries)", fontsize=8)
    else:
        axis.set_xticks([])
        axis.set_yticks([])
    return image


def lens_figure(lens: Lensed) -> Figure:
    """Draw KL(final || row) by row and position, the likeliest words written in."""
    R, T = lens.kl.shape
    figure = Picture(figsize=(min(16.0, 2.0 + 0.75 * T), 1.2 + 0.3 * R), layout="constrained")
    axis = figure.subplots()
    image = draw_lens(axis, lens)
    figure.colorbar(image, ax=axis, label="KL(final || row), nats")
    return figure


def draw_lens(axis: Any, lens: Lensed) -> Any:
    """Draw the lens into one pair of axes, the first layer at the bottom; light is near the end."""
    most = max(1e-6, float(np.nanmax(lens.kl.numpy())))
    image = axis.imshow(
        lens.kl.numpy(), cmap=heat_colours(), origin="lower", aspect="auto", vmin=0.0, vmax=most
    )
    R, T = lens.kl.shape
    if T <= READABLE:
        for r in range(R):
            for t in range(T):
                word = lens.top(t, 1, row=lens.row_names[r])[0][0]
                colour = "white" if float(lens.kl[r, t]) > most / 4 else "black"
                text = shown(word, most=8)
                axis.text(t, r, text, ha="center", va="center", fontsize=8, color=colour, **PLAIN)
    _name(axis, lens.words, lens.row_names)
    axis.set_xlabel("token at each position", fontsize=8)
    axis.set_ylabel("after", fontsize=8)
    axis.set_title("logit lens: the likeliest next token after each sublayer", fontsize=9)
    return image


def inspection_figure(means: Sequence[Mapped], lens: Lensed, *, title: str) -> Figure:
    """Draw each layer's mean attention and the logit lens below it, each with its colour key."""
    half = LAYERS // 2
    kept = [*means] if len(means) <= LAYERS else [*means[:half], *means[-half:]]
    lines, columns = -(-len(kept) // ACROSS), min(ACROSS, len(kept))
    R, T = lens.kl.shape
    heights = (2.9 * lines + 0.6, 0.9 + 0.26 * R)
    width = min(17.0, max(7.5, 2.6 * columns + 1.4, 2.0 + 0.36 * T))
    figure = Picture(figsize=(width, sum(heights) + 0.4), layout="constrained")
    subfigures: Any = figure.subfigures(2, 1, height_ratios=heights)
    above, below = subfigures
    axes = above.subplots(lines, columns, squeeze=False)
    image: Any = None
    for number, axis in enumerate(axes.flat):
        if number >= len(kept):
            axis.set_visible(False)
            continue
        image = draw_map(axis, kept[number])
        if number % columns:
            axis.set_ylabel("")
    left_out = len(means) - len(kept)
    more = f"; the first and last {half} of {len(means)} layers" if left_out else ""
    above.suptitle(f"attention, mean of each layer's heads{more}", fontsize=9)
    above.colorbar(image, ax=axes, shrink=0.8, label="attention weight")
    axis = below.subplots()
    below.colorbar(draw_lens(axis, lens), ax=axis, label="KL(final || row), nats")
    figure.suptitle(title, fontsize=10, **PLAIN)
    return figure


def norms_figure(norms: Normed) -> Figure:
    """Draw the residual by depth and position; what the layers add, by layer."""
    figure = Picture(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    image = left.imshow(
        norms.residual.numpy(), cmap=heat_colours(), origin="lower", aspect="auto", vmin=0.0
    )
    _name(left, norms.words, norms.row_names)
    left.set_title("norm of the residual stream", fontsize=8)
    left.set_xlabel("token at each position", fontsize=8)
    left.set_ylabel("after", fontsize=8)
    figure.colorbar(image, ax=left, label="norm")
    right.set_prop_cycle(color=SERIES)
    for name, values_LT in norms.parts_by_name().items():
        right.plot(values_LT.mean(1).numpy(), marker="o", label=name)
    right.set_xlabel("layer", fontsize=8)
    right.set_ylabel("norm", fontsize=8)
    right.set_title("norm of what each layer adds, mean over positions", fontsize=8)
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend(fontsize=8)
    return figure


def series_figure(series: dict[str, list[float]], words: Sequence[str], *, title: str) -> Figure:
    """Draw values by position."""
    figure = Picture(figsize=(min(14.0, 2.5 + 0.4 * len(words)), 3.2), layout="constrained")
    axis = figure.subplots()
    axis.set_prop_cycle(color=SERIES)
    for name, values in series.items():
        axis.plot(values, marker=".", label=name)
    _name(axis, words, ())
    axis.legend(fontsize=8)
    axis.set_title(title, fontsize=9, **PLAIN)
    return figure


def bars_figure(names: Sequence[str], values: Sequence[float], *, title: str) -> Figure:
    """Draw horizontal bars, the first at the top."""
    figure = Picture(figsize=(6.0, 0.9 + 0.22 * len(names)), layout="constrained")
    axis = figure.subplots()
    axis.barh(range(len(names)), values, color=[SERIES[0 if v >= 0 else 1] for v in values])
    axis.set_yticks(range(len(names)), list(names), fontsize=7, **PLAIN)
    axis.invert_yaxis()
    axis.set_title(title, fontsize=9, **PLAIN)
    return figure


def grid_figure(
    values: Any, *, rows: Sequence[str], columns: Sequence[str], title: str, label: str
) -> Figure:
    """Draw a matrix of signed values around 0."""
    figure = Picture(
        figsize=(min(14.0, 2.2 + 0.5 * len(columns)), 1.4 + 0.32 * len(rows)), layout="constrained"
    )
    axis = figure.subplots()
    largest = max(1.0, float(np.nanmax(np.abs(values))))
    image = axis.imshow(values, cmap=signed_colours(), aspect="auto", vmin=-largest, vmax=largest)
    _name(axis, columns, rows)
    axis.set_title(title, fontsize=9, **PLAIN)
    figure.colorbar(image, ax=axis, label=label)
    return figure


def _name(axis: Any, columns: Sequence[str], rows: Sequence[str]) -> None:
    for count, put, turn in ((columns, axis.set_xticks, 90), (rows, axis.set_yticks, 0)):
        every = max(1, -(-len(count) // READABLE))
        labelled = range(0, len(count), every)
        put(
            list(labelled),
            [shown(count[i], most=14) for i in labelled],
            rotation=turn,
            fontsize=7,
            **PLAIN,
        )
