"""A design as a picture: where its parameters are, and what neighbouring wishes would give."""

import io
from dataclasses import replace

from glassformer.spec.allocation import allocate
from glassformer.spec.budget import Answer, Budget, Design, Target
from glassformer.spec.patience import Effort, OutOfPatience
from glassformer.spec.preference import GLU_UNIT, RATIO_UNIT
from glassformer.spec.search import Search
from glassformer.spec.solve import design_of

RATIOS = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6)
EXPANSIONS = (1.5, 2.0, 2.66, 3.0, 3.5, 4.0, 5.0)
#: Drift is coloured up to here: 5 points of the ratio, or a quarter of the expansion.
MOST = 5.0
#: Looks for one cell.
LOOKS = 12_000


def landscape(budget: Budget) -> list[list[Design | None]]:
    """The best design for each pair of wishes: a row for each expansion, a column for each ratio.

    None where a hard limit leaves none, or where none was found soon enough.
    """
    return [[_found(budget, ratio, glu) for ratio in RATIOS] for glu in EXPANSIONS]


def _found(budget: Budget, ratio: float, glu: float) -> Design | None:
    try:
        return neighbour(budget, ratio, glu)
    except OutOfPatience:
        return None


def neighbour(budget: Budget, ratio: float, glu: float) -> Design | None:
    """The best design of the same budget with other wishes; `OutOfPatience` where none was found
    in the looks that a cell has, and none ruled out.
    """
    asked = replace(budget, embedding_ratio=Target(value=ratio), glu_expansion=Target(value=glu))
    search = Search(asked, effort=Effort(LOOKS))
    found = search.best()
    if found is None and not search.is_proven:
        raise OutOfPatience("this cell takes longer than anybody here would wait")
    return None if found is None else design_of("best", asked, found)


def drift(design: Design) -> float:
    """How far both wishes were missed: a point of the ratio counts as 5 % of the expansion."""
    return abs(design.ratio_drift or 0.0) / RATIO_UNIT + abs(design.glu_drift or 0.0) / GLU_UNIT


def design_figure(answer: Answer) -> bytes:
    """A PNG: the allocation as a bar, the landscape as a grid of depth x width."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 5.2), layout="constrained")
    bar, grid = figure.subplots(1, 2, width_ratios=(1, 4))
    _draw_allocation(bar, answer)
    _draw_landscape(figure, grid, answer.budget)
    figure.suptitle(str(answer.best), fontsize=9)
    picture = io.BytesIO()
    # Without the software's name and version the bytes depend on the drawing alone.
    figure.savefig(picture, format="png", dpi=90, metadata={"Software": None})
    return picture.getvalue()


def _draw_allocation(axes, answer: Answer) -> None:  # type: ignore[no-untyped-def]
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
        axes.bar(0, count, bottom=low, width=0.6, color=f"C{number}")
        if count / found.total >= 0.03:
            text = f"{name}\n{count / found.total:.1%}"
            axes.text(0, low + count / 2, text, ha="center", va="center", fontsize=7.5)
        low += count
    axes.axhline(answer.best.target, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks([])
    axes.yaxis.set_major_formatter(lambda count, _: f"{count / 1e6:g}M")
    axes.set_ylabel("parameters (dashed: the target)")
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _draw_landscape(figure, axes, budget: Budget) -> None:  # type: ignore[no-untyped-def]
    cells = landscape(budget)
    values = [[MOST if d is None else min(MOST, drift(d)) for d in row] for row in cells]
    image = axes.imshow(values, origin="lower", aspect="auto", cmap="viridis_r", vmin=0, vmax=MOST)
    for y, row in enumerate(cells):
        for x, found in enumerate(row):
            text = "-" if found is None else f"{found.sizes.n_layers}x{found.sizes.d_model}"
            dark = values[y][x] > MOST / 2
            axes.text(
                x, y, text, ha="center", va="center", fontsize=7, color="white" if dark else "black"
            )
    axes.set_xticks(range(len(RATIOS)), [f"{ratio:.0%}" for ratio in RATIOS])
    axes.set_yticks(range(len(EXPANSIONS)), [f"{glu:g}" for glu in EXPANSIONS])
    axes.set_xlabel("asked embedding ratio")
    axes.set_ylabel("asked GLU expansion")
    axes.set_title("layers x d_model of the best design for each pair of wishes", fontsize=9)
    label = "drift: points of the ratio, or steps of 5% of the expansion"
    figure.colorbar(image, ax=axes, label=label, extend="max")
