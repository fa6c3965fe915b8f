"""`AttentionMap`: one attention map with its words, and which of its cells may be attended to.

`Difference`: one map minus another, signed, masked where either is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glassformer.lens.heads import HeadName
from glassformer.lens.show import html
from glassformer.lens.show.chart import Grid, Panels
from glassformer.lens.show.chart_svg import chart_svg, data_uri, heatmap_png, pooled
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.lens.show.text import heatmap_text, shown
from glassformer.spec.errors import InputError

# T queries (rows), S keys (columns)

#: Maps of at most this many rows and columns are written out cell by cell, of larger ones the
#: strongest cells.
WRITTEN, DIFFERENCES_WRITTEN, PEAKS = 32, 12, 12
#: Pixels of a map's side.
SIDE = 384
#: Rows and columns of a thumbnail, at most.
THUMBNAIL = 64


@dataclass(frozen=True, eq=False, repr=False)
class Difference(Displayable):
    """One map minus another, made by `map - other`. NaN where either of them is masked."""

    weights_TS: Tensor
    rows_words: tuple[str, ...]
    columns_words: tuple[str, ...]
    title: str

    @property
    def tensor(self) -> Tensor:
        """The differences (T, S), from -1 to 1."""
        return self.weights_TS

    @property
    def allowed(self) -> Tensor:
        """True where both may attend."""
        return ~self.tensor.isnan()

    def rows(self) -> list[Row]:
        """One row per cell that both may attend to: query, key, difference."""
        return [
            {"query": t, "query_word": q, "key": s, "key_word": k, "difference": value}
            for t, (q, values) in enumerate(zip(self.rows_words, self.tensor.tolist(), strict=True))
            for s, (k, value) in enumerate(zip(self.columns_words, values, strict=True))
            if value == value
        ]

    def peaks(self, most: int = PEAKS) -> list[tuple[int, int, float]]:
        """Return the cells that differ most: query, key, difference."""
        cells = [(row["query"], row["key"], row["difference"]) for row in self.rows()]
        return sorted(cells, key=lambda cell: -abs(cell[2]))[:most]

    def summary(self) -> str:
        """One line."""
        if not (peaks := self.peaks(1)):
            return f"{self.title}: there is no cell that both may attend to"
        t, s, value = peaks[0]
        words = f"'{shown(self.rows_words[t])}' to '{shown(self.columns_words[s])}'"
        return f"{self.title}: largest difference {value:+.3f}, from {words}"

    def text(self) -> str:
        """The numbers of a small map; the cells of a large one that differ most."""
        T, S = self.tensor.shape
        if max(T, S) > DIFFERENCES_WRITTEN:
            peaks = (
                f"  {value:+.3f}  {t}:{shown(self.rows_words[t])} -> "
                f"{s}:{shown(self.columns_words[s])}"
                for t, s, value in self.peaks()
            )
            return "\n".join([f"{self.title}: {T} x {S}, the cells that differ most:", *peaks])
        rows = [shown(word, most=12) for word in self.rows_words]
        columns = [shown(word, most=12) for word in self.columns_words]
        left, widths = max(map(len, rows)), [max(6, len(name)) for name in columns]
        named = " ".join(name.rjust(width) for name, width in zip(columns, widths, strict=True))
        lines = [self.title, f"{'':{left}}  {named}"]
        for name, values in zip(rows, self.tensor.tolist(), strict=True):
            cells = (
                (f"{value:+.3f}" if value == value else "").rjust(width)
                for value, width in zip(values, widths, strict=True)
            )
            lines.append(f"{name:>{left}}  {' '.join(cells)}".rstrip())
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """The map, blue where the first attends more, then its cells as a table."""
        drawn = chart_svg(self.chart(), label=self.summary(), width=SIDE).svg()
        yield html.captioned(drawn, self.summary())
        yield self.table()

    def chart(self) -> Grid:
        """The map on a scale from -1 to 1."""
        return _grid(self, low=-1.0, signed=True, key="difference of the weights")


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMap(Displayable):
    """One map: row t is what position t attends to. `allowed` is False where it may not attend.

    `head` is the head whose map it is; None for a mean over heads.
    """

    weights_TS: Tensor
    allowed: Tensor
    rows_words: tuple[str, ...]
    columns_words: tuple[str, ...]
    title: str
    head: HeadName | None = None

    @property
    def tensor(self) -> Tensor:
        """The weights (T, S); each row sums to 1, or to 0 where nothing may be attended to."""
        return self.weights_TS

    def __sub__(self, other: "AttentionMap") -> Difference:
        """Subtract the map of another model, or of another head, at the same tokens."""
        words = self.rows_words, self.columns_words
        if words != (other.rows_words, other.columns_words):
            raise InputError(
                "the two maps are of different tokens, so they cannot be subtracted",
                hint="compare models that split the text into the same tokens",
            )
        weights_TS = (self.tensor - other.tensor).masked_fill(
            ~(self.allowed & other.allowed), torch.nan
        )
        return Difference(weights_TS, *words, title=f"{self.title} minus {other.title}")

    def rows(self) -> list[Row]:
        """One row per allowed cell: query, key, weight."""
        weights, allowed = self.tensor.tolist(), self.allowed.tolist()
        return [
            {"query": t, "query_word": q, "key": s, "key_word": k, "weight": weights[t][s]}
            for t, q in enumerate(self.rows_words)
            for s, k in enumerate(self.columns_words)
            if allowed[t][s]
        ]

    def peaks(self, most: int = 10) -> list[tuple[int, int, float]]:
        """Return the strongest allowed cells: query, key, weight."""
        weights_TS = self.tensor.masked_fill(~self.allowed, -1.0)
        best = weights_TS.flatten().topk(min(most, int(self.allowed.sum())))
        S = self.tensor.shape[1]
        return [
            (i // S, i % S, value)
            for value, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]

    def text(self) -> str:
        """The map as characters, or the strongest cells of a large one."""
        T, S = self.tensor.shape
        top = f"{self.title}: {T} queries x {S} keys"
        if max(T, S) <= WRITTEN:
            rows = [shown(word, most=12) for word in self.rows_words]
            columns = [shown(word, most=12) for word in self.columns_words]
            return f"{top}\n{heatmap_text(self.tensor, rows=rows, columns=columns)}"
        lines = [
            f"  {weight:.3f}  {t} {shown(self.rows_words[t])} -> {s} {shown(self.columns_words[s])}"
            for t, s, weight in self.peaks()
        ]
        return "\n".join([f"{top}; the strongest:", *lines])

    def svg(self, *, side: int = SIDE) -> str:
        """Return the labelled map as SVG, masked cells hatched."""
        return chart_svg(self.chart(), label=self.summary(), width=side).svg()

    def thumbnail(self) -> str:
        """Return a small image without words; a large map keeps its peaks."""
        small = pooled(self.tensor.numpy(), most=THUMBNAIL)
        allowed = pooled(self.allowed.numpy(), most=THUMBNAIL)
        scale = max(1, 96 // max(small.shape))
        uri = data_uri(heatmap_png(small, allowed=allowed, scale=scale))
        T, S = small.shape
        return (
            f'<img src="{uri}" width="{96 * S // max(T, S)}" height="{96 * T // max(T, S)}" '
            f'style="outline:1px solid #8888" alt="{html.escape_line(self.summary())}">'
        )

    def summary(self) -> str:
        """One line, for those who cannot see the picture."""
        if not bool(self.allowed.any()):
            return f"attention {self.title}: nothing may be attended to"
        t, s, weight = self.peaks(1)[0]
        words = f"'{shown(self.rows_words[t])}' to '{shown(self.columns_words[s])}'"
        return f"attention {self.title}: strongest {weight:.3f}, from {words}"

    def parts(self) -> Iterator[str]:
        """The map, then its cells as a table."""
        yield html.captioned(self.svg(), self.summary())
        T, S = self.tensor.shape
        if max(T, S) <= WRITTEN:
            cells = zip(self.rows_words, self.tensor.tolist(), self.allowed.tolist(), strict=True)
            lines = (
                [word, *(f"{v:.3f}" if ok else None for v, ok in zip(values, may, strict=True))]
                for word, values, may in cells
            )
            inside = html.table(["", *self.columns_words], lines, caption=self.title)
        else:
            peaks = (
                [t, self.rows_words[t], s, self.columns_words[s], weight]
                for t, s, weight in self.peaks(200)
            )
            caption = f"{self.title}: the 200 strongest of {int(self.allowed.sum()):,} cells"
            inside = html.table(["query", "", "key", "", "weight"], peaks, caption=caption)
        yield html.folded("as a table", inside)

    def chart(self) -> Grid:
        """The map on a scale from 0 to 1, its words at the axes."""
        return _grid(self, key="attention weight")


def _grid(
    each: AttentionMap | Difference, *, key: str, low: float = 0.0, signed: bool = False
) -> Grid:
    """Return a map as a grid: queries are rows, keys columns."""
    return Grid(
        title=each.title,
        values=each.tensor.double().numpy(),
        allowed=each.allowed.numpy(),
        rows=each.rows_words,
        columns=each.columns_words,
        low=low,
        signed=signed,
        key=key,
        x_title="attended to (keys)",
        y_title="attending (queries)",
        square=True,
    )


def maps_chart(maps: Sequence[AttentionMap], *, columns: int) -> Panels:
    """Return small maps on one scale, without words."""
    bare = (replace(each.chart(), rows=(), columns=()) for each in maps)
    return Panels(charts=tuple(bare), columns=columns)
