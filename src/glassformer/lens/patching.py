"""Activation patching: put a piece of a clean run into a corrupt one, and see how much comes back.

Two sequences of one length differ in what matters. Each site in turn (the residual before a layer
at one position, a sublayer's output there, or a head) is replaced by what it was in the clean run,
and a metric of the answer is read: 0 means as corrupt as before, 1 as good as the clean run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glassformer.lens import markup, picture
from glassformer.lens.experiment import Experiment, Metric, Sites, experiment, site_grid
from glassformer.lens.face import Face, Row
from glassformer.lens.look import Look
from glassformer.lens.reading import Reading
from glassformer.lens.words import shown
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.spec.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# L layers, T positions, N heads


@dataclass(frozen=True, eq=False, repr=False)
class Patched(Face):
    """Share of the clean answer that each site brings back, by layer and position or head.

    NaN where there is no such site: a layer with fewer heads than another.
    """

    share: Tensor  # (L, T) or (L, N)
    metric: str
    clean: float
    corrupt: float
    columns_words: tuple[str, ...]
    title: str

    @property
    def tensor(self) -> Tensor:
        """The shares: 0 = the corrupt run, 1 = the clean one; outside where a site overshoots."""
        return self.share

    @property
    def values(self) -> Tensor:
        """The metric itself at each site."""
        return self.corrupt + self.share * (self.clean - self.corrupt)

    def rows(self) -> list[Row]:
        """A line a site."""
        values = self.values.tolist()
        return [
            {"layer": i, "column": j, "word": word, "share": share, "metric": values[i][j]}
            for i, line in enumerate(self.share.tolist())
            for j, (word, share) in enumerate(zip(self.columns_words, line, strict=True))
            if share == share
        ]

    def summary(self) -> str:
        """One line: what the two runs give, and the strongest site."""
        best = max(self.rows(), key=lambda row: row["share"])
        where = f"L{best['layer']} {shown(best['word'], most=20)}"
        runs = f"{self.metric} {self.clean:.4f} clean, {self.corrupt:.4f} corrupt"
        return f"{self.title}: {runs}; most comes back at {where}: {best['share']:.3f}"

    def text(self) -> str:
        """A line a layer."""
        names = [shown(word, most=8) for word in self.columns_words]
        width = max(6, *map(len, names))
        lines = [self.summary(), "     " + " ".join(name.rjust(width) for name in names)]
        for layer, line in enumerate(self.share.tolist()):
            lines.append(f"L{layer:<3} " + " ".join(f"{share:{width}.2f}" for share in line))
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """The grid, then the table."""
        yield markup.captioned(
            picture.heat_svg(
                self.share.numpy(),
                rows=[f"L{layer}" for layer in range(len(self.share))],
                columns=self.columns_words,
                label=self.summary(),
            ),
            self.summary(),
        )
        rows = self.rows()
        lines = (list(row.values()) for row in rows)
        yield markup.folded("as a table", markup.table(list(rows[0]), lines, caption=self.title))

    def figure(self) -> "Figure":
        """The grid on paper."""
        from glassformer.lens.figure import grid_figure

        return grid_figure(
            self.share.numpy(),
            rows=[f"L{layer}" for layer in range(len(self.share))],
            columns=self.columns_words,
            title=self.title,
            label="share of the clean answer",
        )


def patch(
    model: Model,
    clean: "Look | Inputs | Tensor | Sequence[int]",
    corrupt: "Look | Inputs | Tensor | Sequence[int]",
    *,
    sites: Sites = "residual",
    kind: str = "self",
    metric: Metric = "logit_difference",
    answers: tuple[int, int] | None = None,
    position: int | None = None,
    head: str | None = None,
) -> Patched:
    """Make every site clean in turn. `answers`: ids of the right and the wrong one.

    Without them: what the clean and the corrupt run find likeliest at `position` (the last). `kind`
    chooses the stack, or `cross` for what a decoder reads from its source.
    """
    made = experiment(
        model, clean, corrupt, metric=metric, answers=answers, position=position, head=head
    )
    grid = site_grid(model.spec, made.corrupt.inputs, sites=sites, kind=kind)
    base, best = made.measured([[]])[0], made.clean_metric()
    if abs(best - base) < 1e-6 * max(1.0, abs(best)):
        raise InputError(
            f"both runs give the same {metric}, {best:.6g}: there is nothing to bring back",
            hint="choose prompts, or answers, that differ",
        )
    every = [[site] for line in grid for site in line]
    values = iter(made.measured(every))
    columns = max(map(len, grid))
    share = torch.full((len(grid), columns), torch.nan, dtype=torch.float64)
    for layer, line in enumerate(grid):
        for place in range(len(line)):
            share[layer, place] = (next(values) - base) / (best - base)
    words = _columns(clean, corrupt, made, sites, kind, columns)
    title = f"{sites} made clean" if kind == "self" else f"{kind} {sites} made clean"
    return Patched(share, metric, best, base, words, title)


def _columns(
    clean: object, corrupt: object, made: Experiment, sites: str, kind: str, count: int
) -> tuple[str, ...]:
    if sites == "heads":
        return tuple(f"H{head}" for head in range(count))
    sides = [
        _words(given, run, kind) for given, run in ((clean, made.clean), (corrupt, made.corrupt))
    ]
    return tuple(a if a == b else f"{a}/{b}" for a, b in zip(*sides, strict=True))


def _words(given: object, reading: Reading, kind: str) -> tuple[str, ...]:
    if isinstance(given, Look):
        return (given.source_words or ()) if kind == "encoder" else given.words
    side = reading.inputs.source_BS if kind == "encoder" else reading.inputs.tokens_BT
    assert side is not None
    return tuple(str(i) for i in side[0].tolist())
