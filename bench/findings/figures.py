"""Every setting as a dot with its interval, beside the line of what it is held against."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.findings.cells import CELLS, TASKS, Cell, compared
from bench.findings.results import split_score, verdict

Found = dict[str, Any]
COLOURS = {"better": "tab:blue", "worse": "tab:red", "no difference seen": "0.45"}


def draw(found: Found, cells: Sequence[Cell], path: Path) -> None:
    """A panel a task, a line a cell; the band is the recipe's own interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 0.28 * len(cells)), layout="constrained")
    for place, (axes, task) in enumerate(
        zip(figure.subplots(1, len(TASKS), sharey=True), TASKS, strict=True)
    ):
        level = split_score(found, task, CELLS[0], "test")
        assert level is not None
        axes.axvspan(100 * (level.mean - level.half), 100 * (level.mean + level.half), color="0.9")
        axes.axvline(100 * level.mean, color="0.6", linewidth=1)
        for height, cell in enumerate(cells):
            ours, other = split_score(found, task, cell, "test"), compared(cell)
            assert ours is not None and other is not None
            said = verdict(ours, split_score(found, task, other, "test"))
            axes.errorbar(
                100 * ours.mean,
                height,
                xerr=100 * ours.half,
                fmt="o",
                markersize=4,
                capsize=2,
                color=COLOURS.get(said, "0.45"),
            )
        axes.set_title(f"{task}: exact match, %")
        axes.set_xlim(-2, 102)
        if place == 0:
            axes.set_yticks(range(len(cells)), [f"{c.group}: {c.name}" for c in cells])
            axes.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
