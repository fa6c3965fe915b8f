"""The confusion of an evaluation as a picture: a grid a table, the number in every cell."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from glassformer.lab.confusion import READINGS, ROWS, Table, order, shares
from glassformer.spec.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def confusion_figure(confusion: Mapping[str, Table], *, title: str) -> "Figure":
    """One grid beside the other: rows what was asked, columns what was answered, per cent."""
    if not confusion:
        raise InputError(
            f"nothing can be confused in {title}",
            hint="digits has operations that one can take for another",
        )
    from matplotlib.figure import Figure

    widths = [max(4, len(order(table)[1])) for table in confusion.values()]
    height = max(len(table) for table in confusion.values())
    size = (1.6 * len(widths) + 0.56 * sum(widths), 1.9 + 0.5 * height)
    figure = Figure(figsize=size, layout="constrained")
    grids = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    for axes, (group, table) in zip(grids, confusion.items(), strict=True):
        _draw(axes, group, table)
    head = figure.suptitle(f"{title}: per cent of each row; n examples at its right")
    head.set(fontsize=10, parse_math=False)
    return figure


def _draw(axes: Any, group: str, table: Table) -> None:
    rows, columns = order(table)
    cells = shares(table)
    axes.imshow(cells, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    for y, (name, line) in enumerate(zip(rows, cells, strict=True)):
        for x, share in enumerate(line):
            colour = "white" if share > 0.55 else "black" if share else "0.6"
            text = f"{100 * share:.1f}" if share else "0"
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
