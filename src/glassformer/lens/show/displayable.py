"""The base of every result of the lens: printed, listed, drawn, saved, and shown in a notebook.

A notebook's picture is static HTML without script, so that it survives viewers, exports and mail;
it is cut at 2 MB, with a line that names what was left out.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from glassformer.lens.show.chart import Drawing
from glassformer.lens.show.html import capped, folded, page
from glassformer.lens.show.html import table as html_table
from glassformer.spec.csv_text import csv_text
from glassformer.spec.errors import InputError
from glassformer.spec.serialize import json_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The most bytes that one value writes into a notebook.
CELL_BYTES = 2_000_000
ENDINGS = ("png", "svg", "pdf", "html", "json", "csv")
Row = dict[str, Any]


class Displayable(ABC):
    """A result that can be printed, listed, drawn and saved."""

    if TYPE_CHECKING:

        @property
        def title(self) -> str:
            """A short name; subclasses make it a field or a property."""

    @property
    @abstractmethod
    def tensor(self) -> Tensor:
        """The numbers themselves."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """The same as a table: one dict per row."""

    @abstractmethod
    def text(self) -> str:
        """Text for a terminal; also `repr`."""

    @abstractmethod
    def parts(self) -> Iterator[str]:
        """Yield static HTML, most important first; each part is complete by itself."""

    @abstractmethod
    def chart(self) -> Drawing:
        """What is drawn, as a value: `chart_svg` and `chart_figure` draw it."""

    def table(self, *, heading: str = "as a table") -> str:
        """Return the rows as an HTML table that unfolds."""
        rows = self.rows()
        lines = (list(row.values()) for row in rows)
        return folded(heading, html_table(list(rows[0]), lines, caption=self.title))

    def figure(self) -> "Figure":
        """The chart as a figure of matplotlib."""
        from glassformer.lens.show.chart_figure import chart_figure

        return chart_figure(self.chart())

    def __repr__(self) -> str:
        return self.text()

    def html(self, *, most: int = CELL_BYTES) -> str:
        """Return the parts that fit into `most` bytes, and a line that counts the others."""
        return capped(self.parts(), most=most)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": self.text(), "text/html": self.html()}

    def save(self, path: str | Path) -> Path:
        """Write a file in the format of its ending: png, svg, html, json or csv."""
        target = Path(path)
        ending = target.suffix.lower().removeprefix(".")
        if ending not in ENDINGS:
            raise InputError(
                f"cannot save as '.{ending}'", where=str(path), hint=f"one of {', '.join(ENDINGS)}"
            )
        try:
            target.write_bytes(self.encoded(ending))
        except OSError as error:
            raise InputError(f"cannot write: {error.strerror}", where=str(path)) from error
        return target

    def encoded(self, ending: str) -> bytes:
        """Return the bytes of a file with that ending."""
        match ending:
            case "json":
                return (json.dumps(self.record(), ensure_ascii=False, indent=1) + "\n").encode()
            case "csv":
                return _csv(self.rows()).encode()
            case "html":
                return page(self.title, "".join(self.parts())).encode()
            case _:
                from glassformer.lens.show.chart_figure import figure_bytes

                return figure_bytes(self.figure(), ending)

    def record(self) -> Any:
        """The rows for JSON; numbers that are not finite are null."""
        return {"title": self.title, "rows": json_numbers(self.rows(), not_finite="null")}


def _csv(rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))

    def cell(value: Any) -> Any:
        return json.dumps(value) if isinstance(value, (list, dict)) else value

    return csv_text(names, [[cell(row.get(name)) for name in names] for row in rows])
