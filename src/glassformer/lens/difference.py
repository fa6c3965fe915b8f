"""`Difference`: one attention map less another, with its words; signed, hatched where masked."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from glassformer.lens import markup, picture
from glassformer.lens.face import Face, Row
from glassformer.lens.words import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# T queries (rows), S keys (columns)

#: Maps up to this many rows and columns are written out; of larger ones the largest cells.
WRITTEN, PEAKS = 12, 12


@dataclass(frozen=True, eq=False, repr=False)
class Difference(Face):
    """One map less another: `heat - other` makes it. NaN where either of them may not look."""

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
        """True where both may look."""
        return ~self.tensor.isnan()

    def rows(self) -> list[Row]:
        """Every cell where both may look: query, key, difference."""
        return [
            {"query": t, "query_word": q, "key": s, "key_word": k, "difference": value}
            for t, (q, values) in enumerate(zip(self.rows_words, self.tensor.tolist(), strict=True))
            for s, (k, value) in enumerate(zip(self.columns_words, values, strict=True))
            if value == value
        ]

    def peaks(self, most: int = PEAKS) -> list[tuple[int, int, float]]:
        """The cells that differ most: query, key, difference."""
        found = [(row["query"], row["key"], row["difference"]) for row in self.rows()]
        return sorted(found, key=lambda cell: -abs(cell[2]))[:most]

    def summary(self) -> str:
        """One line."""
        if not (peaks := self.peaks(1)):
            return f"{self.title}: there is no cell at which both may look"
        t, s, value = peaks[0]
        words = f"'{shown(self.rows_words[t])}' to '{shown(self.columns_words[s])}'"
        return f"{self.title}: the largest {value:+.3f}, from {words}"

    def text(self) -> str:
        """Its numbers, or the cells of a large one that differ most."""
        T, S = self.tensor.shape
        if max(T, S) > WRITTEN:
            lines = (
                f"  {value:+.3f}  {t}:{shown(self.rows_words[t])} -> "
                f"{s}:{shown(self.columns_words[s])}"
                for t, s, value in self.peaks()
            )
            return "\n".join([f"{self.title}: {T} x {S}, what differs most:", *lines])
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
        """The map, blue where the first looks more, then its cells as a table."""
        drawn = picture.heat_svg(
            self.tensor.numpy(),
            rows=self.rows_words,
            columns=self.columns_words,
            label=self.summary(),
        )
        yield markup.captioned(drawn, self.summary())
        lines = ([*row.values()] for row in self.rows())
        names = ["query", "", "key", "", "difference"]
        yield markup.folded("as a table", markup.table(names, lines, caption=self.title))

    def figure(self) -> "Figure":
        """On a scale from -1 to 1."""
        from glassformer.lens.figure import difference_figure

        return difference_figure(self)
