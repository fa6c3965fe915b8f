"""Two runs to compare, clean and corrupt, with sites of the one put into the other.

Sites are the residual before a layer at one position, a sublayer's output there, or a head.

Activation patching: put a piece of a clean run into a corrupt one, and see how much comes back.

Two sequences of one length differ in what matters. Each site in turn (the residual before a layer
at one position, a sublayer's output there, or a head) is replaced by what it was in the clean run,
and a metric of the answer is read: 0 means as corrupt as before, 1 as good as the clean run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from glassformer.lens.look import Look
from glassformer.lens.measure.ablation import CHUNK
from glassformer.lens.measure.capture import at_rest, one_row, repeated
from glassformer.lens.measure.head_names import attentions, part_of, prefix_of
from glassformer.lens.measure.predictions import Reading, chosen_head, no_targets, reading_place
from glassformer.lens.show import html, svg
from glassformer.lens.show.displayable import Face, Row
from glassformer.lens.show.token_text import shown
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.nn.taps import Edit, Taps
from glassformer.spec.checks import one_of
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# B sites tried at once, T positions, N heads, D d_model

Sites = Literal["residual", "attention", "mlp", "heads"]
Metric = Literal["logit_difference", "loss"]


@dataclass(frozen=True, slots=True)
class Site:
    """A place of a tap: a position of (B, T, D), or a head of (B, N, T, H)."""

    tap: str
    index: int


@dataclass(frozen=True, eq=False)
class Experiment:
    """A clean and a corrupt sequence, and the number that is read off the answer.

    `right` and `wrong` are answers of the head at `place`: the metric is their logit difference,
    or the loss of `right`.
    """

    model: Model
    clean: Reading
    corrupt: Reading
    metric: Metric
    place: int
    right: int
    wrong: int

    def measured(self, groups: Sequence[Sequence[Site]]) -> list[float]:
        """The metric of the corrupt run with each group of sites made clean, all at once.

        An empty group is the corrupt run itself.
        """
        wanted = sorted({site.tap for group in groups for site in group})
        found: list[float] = []
        with at_rest(self.model):
            kept: dict[str, Tensor] = {}
            if wanted:
                taps = Taps(read=wanted)
                self.model.hidden(self.clean.inputs, taps=taps)
                kept = {name: x[0] for name, x in taps.seen.items()}
            step = max(1, CHUNK // self.corrupt.inputs.tokens_BT.shape[1])
            for start in range(0, len(groups), step):
                tried = groups[start : start + step]
                taps = Taps(edit=_cleaned(tried, kept))
                inputs = repeated(self.corrupt.inputs, len(tried))
                found += self.read(self.model.hidden(inputs, taps=taps))
        return found

    def read(self, hidden_BTD: Tensor) -> list[float]:
        """The metric of each row."""
        rows_BD = torch.stack([self.corrupt.rows_of(hidden)[self.place] for hidden in hidden_BTD])
        values = []
        for at in self.corrupt.pieces(len(rows_BD)):
            logp_BV = self.corrupt.log_probabilities(rows_BD[at])
            right_B = logp_BV[:, self.right]
            values.append(-right_B if self.metric == "loss" else right_B - logp_BV[:, self.wrong])
        return torch.cat(values).tolist()

    def clean_metric(self) -> float:
        """The metric of the clean run."""
        with at_rest(self.model):
            return self.read(self.model.hidden(self.clean.inputs))[0]


def experiment(
    model: Model,
    clean: "Look | Inputs | Tensor | Sequence[int]",
    corrupt: "Look | Inputs | Tensor | Sequence[int]",
    *,
    metric: Metric = "logit_difference",
    answers: tuple[int, int] | None = None,
    position: int | None = None,
    head: str | None = None,
) -> Experiment:
    """The two runs, checked to be comparable, and what is read off them."""
    one_of("metric", metric, get_args(Metric))
    head = chosen_head(model, head)
    first, second = (_reading(model, head, given) for given in (clean, corrupt))
    _check_alike(first.inputs, second.inputs)
    T = first.inputs.tokens_BT.shape[1]
    place = first.place if position is None else position
    if not -T <= place < T:
        raise InputError(f"no position {position} among {T}", hint=f"0 to {T - 1}")
    place %= T
    right, wrong = _two(answers) or (_likeliest(first, place), _likeliest(second, place))
    size = model.spec.head_size(head)
    if not (0 <= right < size and 0 <= wrong < size):
        raise InputError(f"answers {right} and {wrong}", hint=f"ids run from 0 to {size - 1}")
    if metric == "logit_difference" and right == wrong:
        raise InputError(
            f"both runs find {right} likeliest, so there is no difference to read",
            hint='give answers=(right, wrong), or metric="loss"',
        )
    return Experiment(model, first, second, metric, place, right, wrong)


def site_grid(spec: ModelSpec, inputs: Inputs, *, sites: str, kind: str) -> list[list[Site]]:
    """The sites of each layer: positions of its stack, or its heads."""
    one_of("sites", sites, get_args(Sites))
    layers = attentions(spec, kind)
    if kind == "cross" and sites in ("residual", "mlp"):
        raise InputError(f"no '{sites}' of cross-attention", hint='kind="self" has it')
    leaf = {
        "residual": "resid_pre",
        "attention": f"{part_of(kind)}.out",
        "mlp": "ffn.out",
        "heads": f"{part_of(kind)}.heads",
    }[sites]
    side = inputs.source_BS if kind == "encoder" else inputs.tokens_BT
    assert side is not None
    return [
        [
            Site(f"{prefix_of(spec, kind)}blocks.{layer}.{leaf}", place)
            for place in range(attention.n_heads if sites == "heads" else side.shape[1])
        ]
        for layer, attention in enumerate(layers)
    ]


def _cleaned(groups: Sequence[Sequence[Site]], kept: dict[str, Tensor]) -> dict[str, Edit]:
    """Edits for a batch in which row b has the sites of group b from the clean run."""
    by_tap: dict[str, list[tuple[int, int]]] = {}
    for row, group in enumerate(groups):
        for site in group:
            by_tap.setdefault(site.tap, []).append((row, site.index))

    def replaced(clean: Tensor, places: list[tuple[int, int]]) -> Edit:
        def edit(x: Tensor) -> Tensor:
            x = x.clone()
            for row, index in places:
                x[row, index] = clean[index]
            return x

        return edit

    return {tap: replaced(kept[tap], places) for tap, places in by_tap.items()}


def _reading(model: Model, head: str, given: object) -> Reading:
    if isinstance(given, Look) and given.ablated:
        raise InputError(
            f"a look without {' '.join(map(str, given.ablated))} cannot be patched",
            hint="patching is between whole runs: look again with every head",
        )
    inputs = one_row(model, given.inputs if isinstance(given, Look) else given)  # type: ignore
    place = reading_place(model, head, inputs)
    names = given.reading.names if isinstance(given, Look) else str
    return Reading(model, head, inputs, place, no_targets(inputs), names)


def _two(answers: "Sequence[int] | None") -> tuple[int, int] | None:
    if answers is None:
        return None
    if len(answers) != 2 or not all(isinstance(i, int | np.integer) for i in answers):
        raise InputError(f"answers {answers!r}", hint="give the ids of the right and the wrong one")
    return int(answers[0]), int(answers[1])


def _likeliest(reading: Reading, place: int) -> int:
    with at_rest(reading.model):
        hidden_TD = reading.model.hidden(reading.inputs)[0]
        row_1D = reading.rows_of(hidden_TD)[place : place + 1]
        return int(reading.log_probabilities(row_1D).argmax())


def _check_alike(clean: Inputs, corrupt: Inputs) -> None:
    for name in ("tokens_BT", "source_BS"):
        a, b = getattr(clean, name), getattr(corrupt, name)
        if a is not None and a.shape != b.shape:
            raise InputError(
                f"a clean sequence of {a.shape[1]} tokens and a corrupt one of {b.shape[1]}",
                hint="positions must correspond: use prompts of the same number of tokens",
            )
    for name in ("valid_BT", "source_valid_BS", "segments_BT"):
        a, b = getattr(clean, name), getattr(corrupt, name)
        if (a is None) != (b is None) or (a is not None and not torch.equal(a, b)):
            raise InputError("the two sequences are padded differently")


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
        yield html.captioned(
            svg.heat_svg(
                self.share.numpy(),
                rows=[f"L{layer}" for layer in range(len(self.share))],
                columns=self.columns_words,
                label=self.summary(),
            ),
            self.summary(),
        )
        rows = self.rows()
        lines = (list(row.values()) for row in rows)
        yield html.folded("as a table", html.table(list(rows[0]), lines, caption=self.title))

    def figure(self) -> "Figure":
        """The grid on paper."""
        from glassformer.lens.show.mpl import grid_figure

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
