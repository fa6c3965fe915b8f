"""Figures: confusion tables of an evaluation, a learning-rate range test, a design.

A design is drawn with its parameters by component, and with the designs of neighbouring wishes.
"""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from glassformer.budget.answer import Answer
from glassformer.budget.design import EXPANSIONS, RATIOS, drift, landscape
from glassformer.budget.question import Budget
from glassformer.costs.parameter_table import allocate
from glassformer.lab.measure.evaluate import READINGS, ROWS, Table, order, shares
from glassformer.lab.plots.terminal import Line, plot
from glassformer.lens.show.palette import COLOURS, SERIES, heat_colours
from glassformer.spec.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from glassformer.training.lr_find import RateRange


def confusion_figure(confusion: Mapping[str, Table], *, title: str) -> "Figure":
    """Draw confusion tables side by side: rows are targets, columns predictions, in per cent."""
    if not confusion:
        raise InputError(
            f"nothing can be confused in {title}",
            hint="digits has operations that one can take for another",
        )
    from glassformer.lens.show.mpl import Picture

    widths = [max(4, len(order(table)[1])) for table in confusion.values()]
    height = max(len(table) for table in confusion.values())
    size = (1.6 * len(widths) + 0.56 * sum(widths), 1.9 + 0.5 * height)
    figure = Picture(figsize=size, layout="constrained")
    grids = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    for axes, (group, table) in zip(grids, confusion.items(), strict=True):
        _draw(axes, group, table)
    head = figure.suptitle(f"{title}: per cent of each row; n examples at its right")
    head.set(fontsize=10, parse_math=False)
    return figure


def _draw(axes: Any, group: str, table: Table) -> None:
    rows, columns = order(table)
    cells = shares(table)
    axes.imshow(cells, cmap=heat_colours(), vmin=0.0, vmax=1.0, aspect="auto")
    for y, (name, line) in enumerate(zip(rows, cells, strict=True)):
        for x, share in enumerate(line):
            colour = "white" if share > 0.3 else "black" if share else "0.6"
            text = f"{100 * share:.1f}" if share else "·"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
        count = sum(table[name].values())
        axes.text(len(columns) - 0.4, y, f"{count:,}", va="center", fontsize=8, color="0.35")
    axes.set_xticks(range(len(columns)), columns, fontsize=8, parse_math=False)
    axes.set_yticks(range(len(rows)), rows, fontsize=8, parse_math=False)
    if max(map(len, columns)) > 3:
        axes.tick_params(axis="x", labelrotation=35)
    axes.set_ylabel(ROWS.get(group, f"{group} asked"), parse_math=False)
    axes.set_xlabel(f"answered as\n({READINGS.get(group, group)})", fontsize=8, parse_math=False)
    axes.spines[:].set_visible(False)


#: The drawn losses end this far above the first one: a diverging end would hide the rest.
CEILING = 1.5


def lr_text(found: "RateRange", *, width: int = 80, unicode: bool = True) -> str:
    """Return the curve as text, with `!` under the suggested rate."""
    rates, losses = _clipped(found.curve)
    line = Line("loss", np.array(rates), np.array(losses))
    picture = plot(
        [line], width=width, height=10, log_x=True, alerts=[found.suggestion], unicode=unicode
    )
    return f"{picture}\n(loss over the learning rate, on a logarithmic axis; ! is the suggestion)"


def lr_figure(found: "RateRange", *, title: str) -> "Figure":
    """Draw the smoothed loss over the rate, with the stable range and the suggestion marked."""
    from glassformer.lens.show.mpl import Picture

    figure = Picture(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    rates, losses = zip(*found.curve, strict=True)
    axes.plot(rates, losses, color=SERIES[0], linewidth=1.6)
    axes.set_xscale("log")
    axes.set_ylim(
        min(losses) - 0.05 * (losses[0] - min(losses)), min(1.05 * max(losses), CEILING * losses[0])
    )
    axes.axvspan(found.low, found.high, color=SERIES[2], alpha=0.15)
    axes.axvline(found.suggestion, color=SERIES[1], linestyle="--", linewidth=1.4)
    top = axes.get_xaxis_transform()
    axes.text(
        found.suggestion, 0.97, f" {found.suggestion:.1e}", color=SERIES[1], transform=top, va="top"
    )
    axes.text(
        found.low,
        0.03,
        f" falls from {found.low:.1e} to {found.high:.1e}",
        transform=top,
        fontsize=8,
    )
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss, smoothed")
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _clipped(curve: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the points below the ceiling, so that a diverging end does not flatten the rest."""
    ceiling = CEILING * curve[0][1]
    kept = [(rate, loss) for rate, loss in curve if loss <= ceiling]
    return [rate for rate, _ in kept], [loss for _, loss in kept]


#: Colours end at this drift: 5 points of the ratio, or a quarter of the expansion.
MOST_DRIFT = 5.0


def design_figure(answer: Answer) -> bytes:
    """Return a PNG: the allocation as a bar, the landscape as a grid of layers x d_model."""
    from glassformer.lens.show.mpl import Picture

    figure = Picture(figsize=(10.5, 5.2), layout="constrained")
    bar, grid = figure.subplots(1, 2, width_ratios=(1, 4))
    _draw_allocation(bar, answer)
    _draw_landscape(figure, grid, answer.budget)
    figure.suptitle(str(answer.best), fontsize=9)
    picture = io.BytesIO()
    # Without the software's name and version the bytes depend on the drawing alone.
    figure.savefig(picture, format="png", dpi=90, metadata={"Software": None})
    return picture.getvalue()


#: The colours of the parts, as on the page Design: token, position, head, attention, FFN, norms.
PARTS = (0, 1, 2, 4, 6, 7)


def _draw_allocation(axes: Any, answer: Answer) -> None:
    found = allocate(answer.spec)
    layers = {
        name: found.n_layers * count
        for name, count in (
            ("attention", found.per_layer["attention"]),
            ("feed-forward", found.per_layer["ffn"]),
        )
    }
    rest = found.n_layers * found.per_layer["norm"] + found.final_norm
    parts = {"token embedding": found.token, "position": found.position, "head": found.head}
    parts |= {**layers, "norms": rest}
    low = 0
    for number, (name, count) in enumerate(parts.items()):
        axes.bar(0, count, bottom=low, width=0.6, color=SERIES[PARTS[number]])
        share, middle = count / found.total, low + count / 2
        if share >= 0.03:
            text = f"{name}\n{share:.1%}"
            axes.text(0, middle, text, ha="center", va="center", fontsize=7.5, color="white")
        elif share >= 0.001:  # too thin for a label inside
            text = f"{name}\n{share:.1%}"
            axes.text(0.33, middle, text, va="center", fontsize=7, color=SERIES[PARTS[number]])
        low += count
    axes.axhline(answer.best.target, color=COLOURS["ink"].light, linewidth=0.8, linestyle="--")
    axes.set_xlim(-0.35, 0.62)
    axes.set_xticks([])
    axes.yaxis.set_major_formatter(lambda count, _: f"{count / 1e6:g}M")
    axes.set_ylabel("parameters (dashed: the target)")
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _draw_landscape(figure: "Figure", axes: Any, budget: Budget) -> None:
    cells = landscape(budget)
    values = [
        [MOST_DRIFT if d is None else min(MOST_DRIFT, drift(d)) for d in row] for row in cells
    ]
    image = axes.imshow(
        values, origin="lower", aspect="auto", cmap=heat_colours(), vmin=0, vmax=MOST_DRIFT
    )
    for y, row in enumerate(cells):
        for x, found in enumerate(row):
            text = "-" if found is None else f"{found.sizes.n_layers}x{found.sizes.d_model}"
            dark = values[y][x] > MOST_DRIFT / 4
            axes.text(
                x, y, text, ha="center", va="center", fontsize=7, color="white" if dark else "black"
            )
    axes.set_xticks(range(len(RATIOS)), [f"{ratio:.0%}" for ratio in RATIOS])
    axes.set_yticks(range(len(EXPANSIONS)), [f"{glu:g}" for glu in EXPANSIONS])
    axes.set_xlabel("wished embedding ratio")
    axes.set_ylabel("wished GLU expansion")
    axes.set_title("layers x d_model of the best design for each pair of wishes", fontsize=9)
    label = "drift: points of the ratio, or steps of 5% of the expansion"
    figure.colorbar(image, ax=axes, label=label, extend="max")
