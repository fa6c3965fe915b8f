"""`AttentionMap`: one attention map with its words, and which of its cells may be attended to.

`Difference`: one map minus another, signed, masked where either is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from glassformer.lens.heads import HeadName
from glassformer.lens.show import html
from glassformer.lens.show.chart import Grid, Panels
from glassformer.lens.show.chart_svg import chart_svg, data_uri, heatmap_png, pooled
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.lens.show.text import SHADES, heatmap_text, shown
from glassformer.spec.errors import InputError

# T queries (rows), S keys (columns)

#: Maps of at most this many rows and columns are written out cell by cell, of larger ones the
#: strongest cells.
WRITTEN, DIFFERENCES_WRITTEN, PEAKS = 32, 12, 12
#: Letters of a column's name, from wide to narrow.
COLUMN_WIDTHS = (12, 8, 6, 5, 4, 3, 2)
#: Pixels of a map's side.
SIDE = 384
#: Rows and columns of a thumbnail, at most.
THUMBNAIL = 64


@dataclass(frozen=True, eq=False, repr=False)
class Cells(Displayable):
    """A value for each query (row) and key (column), of which those that are allowed count."""

    weights_TS: Tensor
    allowed: Tensor
    rows_words: tuple[str, ...]
    columns_words: tuple[str, ...]
    title: str
    #: What a value is called.
    value: ClassVar[str] = "weight"

    @property
    def tensor(self) -> Tensor:
        """The values (T, S); rows of attention sum to 1, or to 0 where nothing is allowed."""
        return self.weights_TS

    def rows(self) -> list[Row]:
        """One row per allowed cell: query, key, value."""
        values, allowed = self.tensor.tolist(), self.allowed.tolist()
        return [
            {"query": t, "query_word": q, "key": s, "key_word": k, self.value: values[t][s]}
            for t, q in enumerate(self.rows_words)
            for s, k in enumerate(self.columns_words)
            if allowed[t][s]
        ]

    def peaks(self, most: int = PEAKS) -> list[tuple[int, int, float]]:
        """Return the allowed cells of the largest size: query, key, value."""
        sizes_TS = self.tensor.abs().masked_fill(~self.allowed, -1.0)
        best = sizes_TS.flatten().topk(min(most, int(self.allowed.sum()))).indices.tolist()
        S, values = self.tensor.shape[1], self.tensor.flatten().tolist()
        return [(i // S, i % S, values[i]) for i in best]

    def strongest(self, form: str, *, most: int = PEAKS) -> list[str]:
        """Return a line for each of the peaks."""
        rows, columns = self.rows_words, self.columns_words
        return [
            f"  {value:{form}}  {t}:{shown(rows[t])} -> {s}:{shown(columns[s])}"
            for t, s, value in self.peaks(most)
        ]

    def grid(self, *, key: str, low: float = 0.0, signed: bool = False) -> Grid:
        """Return the cells as a chart: queries are rows, keys columns."""
        return Grid(
            title=self.title,
            values=self.tensor.double().numpy(),
            allowed=self.allowed.numpy(),
            rows=self.rows_words,
            columns=self.columns_words,
            low=low,
            signed=signed,
            key=key,
            x_title="attended to (keys)",
            y_title="attending (queries)",
            square=True,
        )


@dataclass(frozen=True, eq=False, repr=False)
class Difference(Cells):
    """One map minus another, made by `map - other`. NaN where either of them is masked."""

    value: ClassVar[str] = "difference"

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
            head = f"{self.title}: {T} x {S}, the cells that differ most:"
            return "\n".join([head, *self.strongest("+.3f")])
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
        return self.grid(low=-1.0, signed=True, key="difference of the weights")


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMap(Cells):
    """One map: row t is what position t attends to. `allowed` is False where it may not attend.

    `head` is the head whose map it is; None for a mean over heads.
    """

    head: HeadName | None = None

    def __sub__(self, other: "AttentionMap") -> Difference:
        """Subtract the map of another model, or of another head, at the same tokens."""
        words = self.rows_words, self.columns_words
        if words != (other.rows_words, other.columns_words):
            raise InputError(
                "the two maps are of different tokens, so they cannot be subtracted",
                hint="compare models that split the text into the same tokens",
            )
        allowed = self.allowed & other.allowed
        weights_TS = (self.tensor - other.tensor).masked_fill(~allowed, torch.nan)
        return Difference(weights_TS, allowed, *words, title=f"{self.title} minus {other.title}")

    def text(self) -> str:
        """The map as characters, or the strongest cells of a large one."""
        T, S = self.tensor.shape
        top = f"{self.title}: {T} queries x {S} keys"
        if max(T, S) > WRITTEN:
            return "\n".join([f"{top}; the strongest:", *self.strongest(".3f")])
        return f"{top}\n{self.drawn()}"

    def drawn(self, *, width: int | None = None, shades: str = SHADES) -> str:
        """Return the map as characters, its words as long as `width` allows.

        A map that does not fit is its strongest cells.
        """
        rows = [shown(word, most=12) for word in self.rows_words]
        for most in COLUMN_WIDTHS:
            columns = [shown(word, most=most) for word in self.columns_words]
            made = heatmap_text(self.tensor, rows=rows, columns=columns, shades=shades)
            if width is None or max(map(len, made.split("\n"))) <= width:
                return made
        size = " x ".join(map(str, self.tensor.shape))
        head = f"the map of {size} does not fit {width} columns; its strongest:"
        return "\n".join([head, *self.strongest("6.3f")])

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
        return self.grid(key="attention weight")


def maps_chart(maps: Sequence[AttentionMap], *, columns: int) -> Panels:
    """Return small maps on one scale, without words."""
    bare = (replace(each.chart(), rows=(), columns=()) for each in maps)
    return Panels(charts=tuple(bare), columns=columns)
