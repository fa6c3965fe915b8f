"""A matplotlib figure as the bytes of a file: the same bytes for the same drawing.

The lens on paper: matplotlib figures of maps, rows and bars. Imported when one is drawn.
"""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from glassformer.lens.show.token_text import shown
from glassformer.spec.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("png", "svg")


def figure_bytes(figure: "Figure", kind: str) -> bytes:
    """PNG or SVG without date, version or random ids; text of an SVG stays text."""
    if kind not in KINDS:
        raise InputError(f"a figure cannot be written as .{kind}", hint=f"one of {KINDS}")
    import matplotlib

    metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    made = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "glassformer", "svg.fonttype": "none"}):
        figure.savefig(made, format=kind, dpi=110, metadata=metadata)
    return made.getvalue()


#: Words stand on an axis of at most so many places.
READABLE = 40
#: Words are words: matplotlib would read formulas between dollars.
PLAIN = {"parse_math": False}


class Mapped(Protocol):
    """A map: `Heat` is one, and `Difference`."""

    @property
    def tensor(self) -> Tensor:
        """The weights (T, S)."""

    @property
    def allowed(self) -> Tensor:
        """True where they may be."""

    rows_words: tuple[str, ...]
    columns_words: tuple[str, ...]
    title: str


class Lensed(Protocol):
    """Rows of distributions: `LogitLens` is one."""

    row_names: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def kl(self) -> Tensor:
        """The divergences (R, T)."""

    def top(self, position: int, k: int, *, row: str) -> list[tuple[str, float]]:
        """The likeliest words."""


class Normed(Protocol):
    """Norms by row and position: `Norms` is one."""

    row_names: tuple[str, ...]
    words: tuple[str, ...]
    residual: Tensor

    def parts_by_name(self) -> dict[str, Tensor]:
        """What the layers add."""


def heat_figure(heats: Sequence[Mapped], *, columns: int, words: bool = True) -> Figure:
    """Maps on one scale from 0 to 1, masked cells hatched."""
    lines = -(-len(heats) // columns)
    T, S = heats[0].tensor.shape
    side = min(9.0, max(3.2, 0.34 * max(T, S))) if words else 1.7
    figure = Figure(figsize=(side * columns + 0.8, side * lines + 0.4), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    image = None
    for place, axis in enumerate(axes.flat):
        if place >= len(heats):
            axis.set_visible(False)
            continue
        image = draw_heat(axis, heats[place], words=words)
    figure.colorbar(image, ax=axes, shrink=0.7, label="attention weight")
    return figure


def difference_figure(difference: Mapped) -> Figure:
    """One map on a scale from -1 to 1, masked cells hatched."""
    side = min(9.0, max(3.2, 0.34 * max(difference.tensor.shape)))
    figure = Figure(figsize=(side + 0.8, side + 0.4), layout="constrained")
    axis = figure.subplots()
    image = draw_heat(axis, difference, low=-1.0, colours="RdBu")
    figure.colorbar(image, ax=axis, shrink=0.7, label="difference of the weights")
    return figure


def draw_heat(
    axis: Any, heat: Mapped, *, words: bool = True, low: float = 0.0, colours: str = "Blues"
) -> Any:
    """One map into one pair of axes."""
    values = np.ma.masked_array(heat.tensor.numpy(), ~heat.allowed.numpy())
    axis.patch.set(hatch="////", edgecolor="#bbbbbb", facecolor="white", linewidth=0)
    image = axis.imshow(values, cmap=colours, vmin=low, vmax=1.0, aspect="equal")
    axis.set_title(heat.title, fontsize=8, **PLAIN)
    if words:
        _name(axis, heat.columns_words, heat.rows_words)
        axis.set_xlabel("looked at (keys)", fontsize=8)
        axis.set_ylabel("looking (queries)", fontsize=8)
    else:
        axis.set_xticks([])
        axis.set_yticks([])
    return image


def lens_figure(lens: Lensed) -> Figure:
    """KL to the end by row and position, the likeliest words written in."""
    R, T = lens.kl.shape
    figure = Figure(figsize=(min(16.0, 2.0 + 0.75 * T), 1.2 + 0.3 * R), layout="constrained")
    axis = figure.subplots()
    image = draw_lens(axis, lens)
    figure.colorbar(image, ax=axis, label="KL(final || row), nats")
    return figure


def draw_lens(axis: Any, lens: Lensed) -> Any:
    """The lens into one pair of axes, the first layer at the bottom."""
    image = axis.imshow(lens.kl.numpy(), cmap="Blues_r", origin="lower", aspect="auto", vmin=0.0)
    R, T = lens.kl.shape
    if T <= READABLE:
        middle = float(np.nanmax(lens.kl.numpy())) / 2
        for r in range(R):
            for t in range(T):
                word = lens.top(t, 1, row=lens.row_names[r])[0][0]
                colour = "white" if float(lens.kl[r, t]) < middle else "black"
                text = shown(word, most=8)
                axis.text(t, r, text, ha="center", va="center", fontsize=8, color=colour, **PLAIN)
    _name(axis, lens.words, lens.row_names)
    axis.set_title("logit lens: likeliest word after each half-layer", fontsize=8)
    return image


def norms_figure(norms: Normed) -> Figure:
    """The residual by depth and position; what the layers add, by layer."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    image = left.imshow(norms.residual.numpy(), cmap="Blues", origin="lower", aspect="auto")
    _name(left, norms.words, norms.row_names)
    left.set_title("norm of the residual", fontsize=8)
    figure.colorbar(image, ax=left)
    for name, values_LT in norms.parts_by_name().items():
        right.plot(values_LT.mean(1).numpy(), marker="o", label=name)
    right.set_xlabel("layer", fontsize=8)
    right.set_title("norm of what each layer adds, mean over positions", fontsize=8)
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend(fontsize=8)
    return figure


def series_figure(series: dict[str, list[float]], words: Sequence[str], *, title: str) -> Figure:
    """Values by position."""
    figure = Figure(figsize=(min(14.0, 2.5 + 0.4 * len(words)), 3.2), layout="constrained")
    axis = figure.subplots()
    for name, values in series.items():
        axis.plot(values, marker=".", label=name)
    _name(axis, words, ())
    axis.legend(fontsize=8)
    axis.set_title(title, fontsize=9, **PLAIN)
    return figure


def bars_figure(names: Sequence[str], values: Sequence[float], *, title: str) -> Figure:
    """Lying bars, the first at the top."""
    figure = Figure(figsize=(6.0, 0.9 + 0.22 * len(names)), layout="constrained")
    axis = figure.subplots()
    axis.barh(range(len(names)), values, color=["C0" if v >= 0 else "C1" for v in values])
    axis.set_yticks(range(len(names)), list(names), fontsize=7, **PLAIN)
    axis.invert_yaxis()
    axis.set_title(title, fontsize=9, **PLAIN)
    return figure


def grid_figure(
    values: Any, *, rows: Sequence[str], columns: Sequence[str], title: str, label: str
) -> Figure:
    """A matrix of signed values around 0."""
    figure = Figure(
        figsize=(min(14.0, 2.2 + 0.5 * len(columns)), 1.4 + 0.32 * len(rows)), layout="constrained"
    )
    axis = figure.subplots()
    largest = max(1.0, float(np.nanmax(np.abs(values))))
    image = axis.imshow(values, cmap="RdBu", aspect="auto", vmin=-largest, vmax=largest)
    _name(axis, columns, rows)
    axis.set_title(title, fontsize=9, **PLAIN)
    figure.colorbar(image, ax=axis, label=label)
    return figure


def _name(axis: Any, columns: Sequence[str], rows: Sequence[str]) -> None:
    for count, put, turn in ((columns, axis.set_xticks, 90), (rows, axis.set_yticks, 0)):
        every = max(1, -(-len(count) // READABLE))
        places = range(0, len(count), every)
        put(
            list(places),
            [shown(count[i], most=14) for i in places],
            rotation=turn,
            fontsize=7,
            **PLAIN,
        )
