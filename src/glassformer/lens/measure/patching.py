"""Activation patching: copy one activation of a clean run into a corrupt run, and measure.

The two sequences have one length and differ in what matters. Each site in turn (the residual before
a layer at one position, a sublayer's output there, or a head) is replaced by its value in the clean
run, and a metric of the prediction is read: 0 = the corrupt run, 1 = the clean run restored.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from glassformer.lens.capture import (
    Assignment,
    edits_by_tap,
    eval_mode,
    one_row,
    repeated,
    tapped_model,
)
from glassformer.lens.heads import attentions, part_of, prefix_of
from glassformer.lens.inspection import Inspection
from glassformer.lens.measure.ablation import CHUNK
from glassformer.lens.measure.predictions import Readout, chosen_head, no_targets, readout_position
from glassformer.lens.show import html
from glassformer.lens.show.chart import Grid
from glassformer.lens.show.chart_svg import chart_svg
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.lens.show.text import shown
from glassformer.models.inputs import Inputs
from glassformer.models.model import Holder, Model
from glassformer.nn.taps import Taps
from glassformer.spec.checks import one_of
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

# B sites tried at once, T positions, N heads, D d_model

Sites = Literal["residual", "attention", "mlp", "heads"]
Metric = Literal["logit_difference", "loss"]
Run = Inspection | Inputs | Tensor | Sequence[int]


@dataclass(frozen=True, slots=True)
class Site:
    """An index of a tap: a position of (B, T, D), or a head of (B, N, T, H)."""

    tap: str
    index: int


@dataclass(frozen=True, eq=False)
class Experiment:
    """A clean and a corrupt sequence, and the metric that is read off the predictions.

    `right` and `wrong` are ids that the head may predict at `position`: the metric is their logit
    difference, or the loss of `right`.
    """

    model: Model
    clean: Readout
    corrupt: Readout
    metric: Metric
    position: int
    right: int
    wrong: int

    def measure(self, groups: Sequence[Sequence[Site]]) -> list[float]:
        """Return the metric of the corrupt run with each group of sites patched, one by one.

        An empty group is the corrupt run itself.
        """
        wanted = sorted({site.tap for group in groups for site in group})
        values: list[float] = []
        with eval_mode(self.model):
            kept: dict[str, Tensor] = {}
            if wanted:
                taps = Taps(read=wanted)
                self.model.hidden(self.clean.inputs, taps=taps)
                kept = {name: x[0] for name, x in taps.seen.items()}
            step = max(1, CHUNK // self.corrupt.inputs.tokens_BT.shape[1])
            for start in range(0, len(groups), step):
                tried = groups[start : start + step]
                taps = Taps(edit=edits_by_tap(_patches(tried, kept)))
                inputs = repeated(self.corrupt.inputs, len(tried))
                values += self.read(self.model.hidden(inputs, taps=taps))
        return values

    def read(self, hidden_BTD: Tensor) -> list[float]:
        """Return the metric of each row."""
        rows = [self.corrupt.rows_of(hidden_TD)[self.position] for hidden_TD in hidden_BTD]
        rows_BD = torch.stack(rows)
        metrics = []
        for at in self.corrupt.pieces(len(rows_BD)):
            logp_BV = self.corrupt.log_probabilities(rows_BD[at])
            right_B = logp_BV[:, self.right]
            metrics.append(-right_B if self.metric == "loss" else right_B - logp_BV[:, self.wrong])
        values: list[float] = torch.cat(metrics).tolist()
        return values

    def clean_metric(self) -> float:
        """Return the metric of the clean run."""
        with eval_mode(self.model):
            return self.read(self.model.hidden(self.clean.inputs))[0]


def experiment(
    model: Model,
    clean: Run,
    corrupt: Run,
    *,
    metric: Metric = "logit_difference",
    answers: tuple[int, int] | None = None,
    position: int | None = None,
    head: str | None = None,
) -> Experiment:
    """Check that the two runs are comparable, and choose what is read off them."""
    one_of("metric", metric, get_args(Metric))
    head = chosen_head(model, head)
    first, second = (_readout(model, head, given) for given in (clean, corrupt))
    _check_alike(first.inputs, second.inputs)
    T = first.inputs.tokens_BT.shape[1]
    at = first.position if position is None else position
    if not -T <= at < T:
        raise InputError(f"no position {position} among {T}", hint=f"0 to {T - 1}")
    at %= T
    right, wrong = _two(answers) or (_likeliest(first, at), _likeliest(second, at))
    size = model.spec.head_size(head)
    if not (0 <= right < size and 0 <= wrong < size):
        raise InputError(f"answers {right} and {wrong}", hint=f"ids run from 0 to {size - 1}")
    if metric == "logit_difference" and right == wrong:
        raise InputError(
            f"both runs predict {right}, so there is no difference to read",
            hint='give answers=(right, wrong), or metric="loss"',
        )
    return Experiment(model, first, second, metric, at, right, wrong)


def site_grid(spec: ModelSpec, inputs: Inputs, *, sites: str, kind: str) -> list[list[Site]]:
    """Return the sites of each layer: positions of its stack, or its heads."""
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
            Site(f"{prefix_of(spec, kind)}blocks.{layer}.{leaf}", index)
            for index in range(attention.n_heads if sites == "heads" else side.shape[1])
        ]
        for layer, attention in enumerate(layers)
    ]


def _patches(groups: Sequence[Sequence[Site]], kept: Mapping[str, Tensor]) -> Iterator[Assignment]:
    """Yield, for a batch in which row b is patched at the sites of group b, the clean values."""
    for row, group in enumerate(groups):
        for site in group:
            yield Assignment(site.tap, row, site.index, kept[site.tap][site.index])


def _readout(model: Model, head: str, given: Run) -> Readout:
    if isinstance(given, Inspection) and given.ablated:
        raise InputError(
            f"an inspection without {' '.join(map(str, given.ablated))} cannot be patched",
            hint="patching compares complete runs: inspect again with every head",
        )
    inputs = one_row(model, given.inputs if isinstance(given, Inspection) else given)
    position = readout_position(model, head, inputs)
    names = given.readout.names if isinstance(given, Inspection) else str
    return Readout(model, head, inputs, position, no_targets(inputs), names)


def _two(answers: "Sequence[int] | None") -> tuple[int, int] | None:
    if answers is None:
        return None
    if len(answers) != 2 or not all(isinstance(i, int | np.integer) for i in answers):
        raise InputError(f"answers {answers!r}", hint="give the ids of the right and the wrong one")
    return int(answers[0]), int(answers[1])


def _likeliest(readout: Readout, position: int) -> int:
    with eval_mode(readout.model):
        hidden_TD = readout.model.hidden(readout.inputs)[0]
        row_1D = readout.rows_of(hidden_TD)[position : position + 1]
        return int(readout.log_probabilities(row_1D).argmax())


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
class Patching(Displayable):
    """The share of the clean metric that each site restores, by layer and position or head.

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
        """One row per site."""
        values = self.values.tolist()
        return [
            {"layer": i, "column": j, "word": word, "share": share, "metric": values[i][j]}
            for i, line in enumerate(self.share.tolist())
            for j, (word, share) in enumerate(zip(self.columns_words, line, strict=True))
            if share == share
        ]

    def summary(self) -> str:
        """One line: the metric of both runs, and the strongest site."""
        best = max(self.rows(), key=lambda row: row["share"])
        where = f"L{best['layer']} {shown(best['word'], most=20)}"
        runs = f"{self.metric} {self.clean:.4f} clean, {self.corrupt:.4f} corrupt"
        return f"{self.title}: {runs}; most is restored at {where}: {best['share']:.3f}"

    def text(self) -> str:
        """One line per layer."""
        names = [shown(word, most=8) for word in self.columns_words]
        width = max(6, *map(len, names))
        lines = [self.summary(), "     " + " ".join(name.rjust(width) for name in names)]
        for layer, line in enumerate(self.share.tolist()):
            lines.append(f"L{layer:<3} " + " ".join(f"{share:{width}.2f}" for share in line))
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """The grid, then the table."""
        yield html.captioned(
            chart_svg(self.chart(), label=self.summary(), width=384).svg(),
            self.summary(),
        )
        yield self.table()

    def chart(self) -> Grid:
        """The grid of layers and positions."""
        values = self.share.double().numpy()
        largest = max(1.0, float(np.nanmax(np.abs(values))))
        return Grid(
            title=self.title,
            values=values,
            rows=tuple(f"L{layer}" for layer in range(len(self.share))),
            columns=self.columns_words,
            low=-largest,
            high=largest,
            signed=True,
            key="share of the clean metric",
        )


def patch_activations(
    model: Model | Holder,
    clean: Run,
    corrupt: Run,
    *,
    sites: Sites = "residual",
    kind: str = "self",
    metric: Metric = "logit_difference",
    answers: tuple[int, int] | None = None,
    position: int | None = None,
    head: str | None = None,
) -> Patching:
    """Patch every site of the corrupt run in turn. `answers`: ids of the right and the wrong one.

    Without them: what the clean and the corrupt run predict at `position` (the last). `kind`
    chooses the stack, or `cross` for what a decoder reads from its source.
    """
    model = tapped_model(model)
    runs = experiment(
        model, clean, corrupt, metric=metric, answers=answers, position=position, head=head
    )
    grid = site_grid(model.spec, runs.corrupt.inputs, sites=sites, kind=kind)
    base, best = runs.measure([[]])[0], runs.clean_metric()
    if abs(best - base) < 1e-6 * max(1.0, abs(best)):
        raise InputError(
            f"both runs give the same {metric}, {best:.6g}: there is nothing to restore",
            hint="choose prompts, or answers, that differ",
        )
    every = [[site] for line in grid for site in line]
    values = iter(runs.measure(every))
    columns = max(map(len, grid))
    share = torch.full((len(grid), columns), torch.nan, dtype=torch.float64)
    for layer, line in enumerate(grid):
        for index in range(len(line)):
            share[layer, index] = (next(values) - base) / (best - base)
    words = _columns(clean, corrupt, runs, sites, kind, columns)
    title = f"{sites} patched" if kind == "self" else f"{kind} {sites} patched"
    return Patching(share, metric, best, base, words, title)


def _columns(
    clean: Run, corrupt: Run, runs: Experiment, sites: str, kind: str, count: int
) -> tuple[str, ...]:
    if sites == "heads":
        return tuple(f"H{head}" for head in range(count))
    sides = [
        _words(given, run, kind) for given, run in ((clean, runs.clean), (corrupt, runs.corrupt))
    ]
    return tuple(a if a == b else f"{a}/{b}" for a, b in zip(*sides, strict=True))


def _words(given: Run, readout: Readout, kind: str) -> tuple[str, ...]:
    if isinstance(given, Inspection):
        return (given.source_words or ()) if kind == "encoder" else given.words
    side = readout.inputs.source_BS if kind == "encoder" else readout.inputs.tokens_BT
    assert side is not None
    return tuple(str(i) for i in side[0].tolist())
