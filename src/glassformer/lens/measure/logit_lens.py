"""The logit lens: what the model would say if it stopped after each half-layer.

A row's residual goes the way that the end of the stack goes: through the final norm if the model
has one, then through the head. In a pre-norm model that is the usual lens. In a post-norm model
every half-layer ends in its own norm and there is mostly no final one: the residual is read as it
stands, which is what a model cut off there would have said; only the row `embed` was normed by
nobody.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from glassformer.lens.measure.capture import Capture, at_rest, residual_rows
from glassformer.lens.measure.predictions import Measured, Reading, final_norm, likeliest, measure
from glassformer.lens.show import html, svg
from glassformer.lens.show.displayable import Face, Row
from glassformer.lens.show.token_text import shown
from glassformer.spec.errors import InputError, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# R rows (embed, each half-layer, final), T positions, K likeliest answers


@dataclass(frozen=True, eq=False, repr=False)
class LogitLens(Face):
    """`top` and `kl` by row and position; the row `final` is the model's own distribution."""

    row_names: tuple[str, ...]
    words: tuple[str, ...]
    measured: Measured
    reading: Reading
    title: str = "logit lens"

    @property
    def tensor(self) -> Tensor:
        """The divergences (R, T)."""
        return self.kl

    @property
    def kl(self) -> Tensor:
        """KL(final || row) in nats, (R, T)."""
        return self.measured.kl

    @property
    def entropy(self) -> Tensor:
        """Of each row's distribution, in nats, (R, T)."""
        return self.measured.entropy

    @property
    def losses(self) -> Tensor:
        """-log p(target) by row, (R, T); NaN where nothing was asked for."""
        return self.measured.losses

    def top(
        self, position: int | None = None, k: int = 5, *, row: str = "final"
    ) -> list[tuple[str, float]]:
        """The k likeliest words of a row at a position, with their probabilities."""
        return [(word, share) for _, word, share in self.choices(position, k, row=row)]

    def choices(
        self, position: int | None = None, k: int = 5, *, row: str = "final"
    ) -> list[tuple[int, str, float]]:
        """`top` with the ids."""
        return likeliest(self.reading, self.measured, self._row(row), self.position(position), k)

    def at(self, position: int | None = None, k: int = 5) -> dict[str, list[tuple[str, float]]]:
        """`top` of every row."""
        return {name: self.top(position, k, row=name) for name in self.row_names}

    def position(self, position: int | None) -> int:
        """A position from either end, checked; None is the one that matters most."""
        if position is None:
            return self.reading.place
        T = len(self.words)
        if not -T <= position < T:
            raise InputError(f"no position {position} among {T}", hint=f"0 to {T - 1}")
        return position % T

    def _firsts(self) -> Iterator[tuple[str, list[int], list[float]]]:
        """Each row's likeliest answers, and their probabilities."""
        ids, shares = self.measured.ids[..., 0], self.measured.probabilities[..., 0]
        yield from zip(self.row_names, ids.tolist(), shares.tolist(), strict=True)

    def _row(self, name: str) -> int:
        if name not in self.row_names:
            raise InputError(f"no row '{name}'", hint=nearest(name, self.row_names))
        return self.row_names.index(name)

    def rows(self) -> list[Row]:
        """A line a row and position: its likeliest word, and how far it is from the end."""
        ids, shares = self.measured.ids[..., 0].tolist(), self.measured.probabilities[..., 0]
        kl, entropy, losses = self.kl.tolist(), self.entropy.tolist(), self.losses.tolist()
        return [
            {
                "row": name,
                "position": t,
                "word": word,
                "top": self.reading.word(ids[r][t]),
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
        """At the position that matters most: each row's three likeliest words, and its KL."""
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
                [name, *zip(map(self.reading.word, ids), shares, strict=True)]
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


def read_lens(reading: Reading, seen: Capture, *, words: tuple[str, ...]) -> LogitLens:
    """The lens over a capture's residual."""
    named = residual_rows(reading.model.spec)
    norm = final_norm(reading.model)
    with at_rest(reading.model):
        rows = [seen.seen[tap] for _, tap in named]
        rows = [*(row if norm is None else norm(row) for row in rows), seen.hidden_TD]
        measured = measure(reading, [reading.rows_of(row) for row in rows])
    names = (*(name for name, _ in named), "final")
    return LogitLens(names, words, measured, reading)
