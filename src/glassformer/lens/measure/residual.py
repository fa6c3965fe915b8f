"""The logit lens: what the model would predict if it stopped after each half-layer.

Each row of the residual stream goes through the final norm, if the model has one, then through the
output head. In a pre-norm model that is the usual logit lens. In a post-norm model every half-layer
ends in its own norm and there is mostly no final one, so the residual is projected as it is, which
is what a model cut off there would predict; only the row `embed` has passed no norm.

L2 norms of the residual stream, and of what each sublayer adds to it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glassformer.lens.capture import Capture, eval_mode, residual_rows
from glassformer.lens.heads import prefix_of
from glassformer.lens.measure.predictions import (
    Predictions,
    Readout,
    final_norm,
    read_predictions,
    top_predictions,
)
from glassformer.lens.show import html, svg
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.lens.show.text import shown
from glassformer.nn.precision import as_float
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.model import ModelSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# R rows (embed, each half-layer, final), T positions, K likeliest ids


@dataclass(frozen=True, eq=False, repr=False)
class LogitLens(Displayable):
    """`top` and `kl` by row and position; the row `final` is the model's own distribution."""

    row_names: tuple[str, ...]
    words: tuple[str, ...]
    predictions: Predictions
    readout: Readout
    title: str = "logit lens"

    @property
    def tensor(self) -> Tensor:
        """The divergences (R, T)."""
        return self.kl

    @property
    def kl(self) -> Tensor:
        """KL(final || row) in nats, (R, T)."""
        return self.predictions.kl

    @property
    def entropy(self) -> Tensor:
        """Entropy of each row's distribution, in nats, (R, T)."""
        return self.predictions.entropy

    @property
    def losses(self) -> Tensor:
        """-log p(target) by row, (R, T); NaN where there is no target."""
        return self.predictions.losses

    def top(
        self, position: int | None = None, k: int = 5, *, row: str = "final"
    ) -> list[tuple[str, float]]:
        """Return the k likeliest words of a row at a position, with their probabilities."""
        return [(word, share) for _, word, share in self.choices(position, k, row=row)]

    def choices(
        self, position: int | None = None, k: int = 5, *, row: str = "final"
    ) -> list[tuple[int, str, float]]:
        """Return the k likeliest of a row at a position: id, word, probability."""
        return top_predictions(
            self.readout, self.predictions, self._row(row), self.position(position), k
        )

    def at(self, position: int | None = None, k: int = 5) -> dict[str, list[tuple[str, float]]]:
        """Return `top` of every row, by its name."""
        return {name: self.top(position, k, row=name) for name in self.row_names}

    def position(self, position: int | None) -> int:
        """Check a position; negative ones count from the end, None is the readout position."""
        if position is None:
            return self.readout.position
        T = len(self.words)
        if not -T <= position < T:
            raise InputError(f"no position {position} among {T}", hint=f"0 to {T - 1}")
        return position % T

    def _firsts(self) -> Iterator[tuple[str, list[int], list[float]]]:
        """Yield each row's name, likeliest ids and their probabilities."""
        ids, shares = self.predictions.ids[..., 0], self.predictions.probabilities[..., 0]
        yield from zip(self.row_names, ids.tolist(), shares.tolist(), strict=True)

    def _row(self, name: str) -> int:
        if name not in self.row_names:
            raise InputError(f"no row '{name}'", hint=nearest(name, self.row_names))
        return self.row_names.index(name)

    def rows(self) -> list[Row]:
        """One row per depth and position: the likeliest word, and its KL to the final one."""
        ids, shares = self.predictions.ids[..., 0].tolist(), self.predictions.probabilities[..., 0]
        kl, entropy, losses = self.kl.tolist(), self.entropy.tolist(), self.losses.tolist()
        return [
            {
                "row": name,
                "position": t,
                "word": word,
                "top": self.readout.word(ids[r][t]),
                "top_id": ids[r][t],
                "probability": float(shares[r, t]),
                "kl": kl[r][t],
                "entropy": entropy[r][t],
                "loss": losses[r][t],
            }
            for r, name in enumerate(self.row_names)
            for t, word in enumerate(self.words)
        ]

    def text(self) -> str:
        """At the readout position: each row's three likeliest words, and its KL."""
        t = self.position(None)
        lines = [f"logit lens at position {t} ({shown(self.words[t])})"]
        for r, name in enumerate(self.row_names):
            best = self.top(t, 3, row=name)
            words = "  ".join(f"{shown(word, most=16)} {share:.3f}" for word, share in best)
            lines.append(f"  {name:9} KL {float(self.kl[r, t]):8.4f}  {words}")
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """Words by row and position, shaded by probability; then the divergence by depth."""
        t = self.position(None)
        yield html.heading("logit lens: the likeliest word after each half-layer")
        yield html.shaded_table(
            ["", *self.words],
            [
                (name, list(zip(map(self.readout.word, ids), shares, strict=True)))
                for name, ids, shares in reversed(list(self._firsts()))
            ],
            caption="read from the bottom up; shade: probability",
        )
        label = f"KL(final || row) in nats at position {t}"
        series = {label: self.kl[:, t].tolist()}
        yield svg.lines_svg(series, label=label, words=self.row_names)

    def figure(self) -> "Figure":
        """Divergence by row and position, the likeliest words written in."""
        from glassformer.lens.show.mpl import lens_figure

        return lens_figure(self)


def read_lens(readout: Readout, captured: Capture, *, words: tuple[str, ...]) -> LogitLens:
    """Project the captured residual stream, row by row."""
    named = residual_rows(readout.model.spec)
    norm = final_norm(readout.model)
    with eval_mode(readout.model):
        rows = [captured.taps[tap] for _, tap in named]
        rows = [*(row if norm is None else norm(row) for row in rows), captured.hidden_TD]
        predictions = read_predictions(readout, [readout.rows_of(row) for row in rows])
    names = (*(name for name, _ in named), "final")
    return LogitLens(names, words, predictions, readout)


# L layers, R rows of the residual, T positions, D d_model


@dataclass(frozen=True, eq=False, repr=False)
class Norms(Displayable):
    """`residual` (R, T) after each half-layer; `attention`, `cross`, `mlp` (L, T): what was added.

    In a post-norm model the parts are measured before the norm, the residual after it.
    """

    row_names: tuple[str, ...]
    residual: Tensor
    attention: Tensor
    mlp: Tensor
    cross: Tensor | None
    words: tuple[str, ...]
    title: str = "norms"

    @property
    def tensor(self) -> Tensor:
        """The norms of the residual (R, T)."""
        return self.residual

    def parts_by_name(self) -> dict[str, Tensor]:
        """Return what the layers add: attention, cross where there is one, mlp."""
        added = {"attention": self.attention}
        if self.cross is not None:
            added["cross"] = self.cross
        return added | {"mlp": self.mlp}

    def rows(self) -> list[Row]:
        """One row per depth and position: the residual first, then what each layer added."""
        named = [(name, "residual", values) for name, values in self._residual()]
        for part, values_LT in self.parts_by_name().items():
            named += [(f"L{i}", part, values) for i, values in enumerate(values_LT.tolist())]
        return [
            {"row": name, "part": part, "position": t, "word": word, "norm": value}
            for name, part, values in named
            for t, (word, value) in enumerate(zip(self.words, values, strict=True))
        ]

    def _residual(self) -> Iterator[tuple[str, list[float]]]:
        yield from zip(self.row_names, self.residual.tolist(), strict=True)

    def text(self) -> str:
        """Means over positions."""
        lines = ["norms, mean over positions"]
        for name, values in self._residual():
            lines.append(f"  {name:10} residual {sum(values) / len(values):10.3f}")
        for part, values_LT in self.parts_by_name().items():
            for layer, value in enumerate(values_LT.mean(1).tolist()):
                lines.append(f"  {f'L{layer} {part}':20} {value:.3f}")
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """Lines over depth, then the table of the residual."""
        yield html.heading("norms after each half-layer, mean over positions")
        series = {"residual": self.residual.mean(1).tolist()}
        label = "residual norm by depth"
        yield svg.lines_svg(series, label=label, words=self.row_names)
        added = {name: values.mean(1).tolist() for name, values in self.parts_by_name().items()}
        yield svg.lines_svg(added, label="norm of what each layer adds, by layer")
        lines = ([name, *values] for name, values in self._residual())
        words = [shown(word, most=12) for word in self.words]
        inside = html.table(["", *words], lines, caption="residual norm by position")
        yield html.folded("as a table", inside)

    def figure(self) -> "Figure":
        """The residual by depth and position, and what each layer adds."""
        from glassformer.lens.show.mpl import norms_figure

        return norms_figure(self)


def read_norms(spec: ModelSpec, captured: Capture, *, words: tuple[str, ...]) -> Norms:
    """Measure a captured pass; of an encoder-decoder, its decoder."""
    rows = residual_rows(spec)
    at = prefix_of(spec, "self")

    def layers(leaf: str) -> Tensor:
        return torch.stack(
            [_norm(captured.taps[f"{at}blocks.{i}.{leaf}"]) for i in range(spec.n_layers)]
        )

    return Norms(
        row_names=tuple(name for name, _ in rows),
        residual=torch.stack([_norm(captured.taps[tap]) for _, tap in rows]),
        attention=layers("attn.out"),
        mlp=layers("ffn.out"),
        cross=None if spec.encoder is None else layers("cross.out"),
        words=words,
    )


def _norm(x_TD: Tensor) -> Tensor:
    norm_T: Tensor = as_float(x_TD).norm(dim=-1)
    return norm_T.cpu()
