"""What every value of the lens can do: be read, listed, drawn, saved, and shown in a notebook.

A notebook's picture is static HTML without script, so that it survives viewers, exports and mail;
it is cut at 2 MB, and then says what was left out.
"""

import csv
import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from glassformer.lens.show.html import capped, page
from glassformer.lens.show.mpl import figure_bytes
from glassformer.spec.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The most that one value writes into a notebook.
CELL_BYTES = 2_000_000
ENDINGS = ("png", "svg", "html", "json", "csv")
Row = dict[str, Any]


class Face(ABC):
    """A value that shows itself. Subclasses say what it holds; this class, in which forms."""

    title: str

    @property
    @abstractmethod
    def tensor(self) -> Tensor:
        """The numbers themselves."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """The same as a table: one dict a row."""

    @abstractmethod
    def text(self) -> str:
        """For a terminal; also `repr`."""

    @abstractmethod
    def parts(self) -> Iterator[str]:
        """Static HTML, what matters most first; each part stands for itself."""

    @abstractmethod
    def figure(self) -> "Figure":
        """For paper: a matplotlib figure."""

    def __repr__(self) -> str:
        return self.text()

    def html(self, *, most: int = CELL_BYTES) -> str:
        """The parts that fit into so many bytes, and a line that counts the others."""
        return capped(self.parts(), most=most)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": self.text(), "text/html": self.html()}

    def save(self, path: str | Path) -> Path:
        """Write it as the ending says: png, svg, html, json or csv."""
        target = Path(path)
        ending = target.suffix.lower().removeprefix(".")
        if ending not in ENDINGS:
            raise InputError(
                f"nothing is saved as '.{ending}'", where=str(path), hint=f"use {_either(ENDINGS)}"
            )
        try:
            target.write_bytes(self.encoded(ending))
        except OSError as error:
            raise InputError(f"cannot write: {error.strerror}", where=str(path)) from error
        return target

    def encoded(self, ending: str) -> bytes:
        """The bytes of a file of that ending."""
        match ending:
            case "json":
                return (json.dumps(self.record(), ensure_ascii=False, indent=1) + "\n").encode()
            case "csv":
                return _csv(self.rows()).encode()
            case "html":
                whole = "".join(self.parts())
                return page(self.title, whole).encode()
            case _:
                return figure_bytes(self.figure(), ending)

    def record(self) -> Any:
        """As JSON has it: what is not finite is null."""
        return {"title": self.title, "rows": plain(self.rows())}


def plain(thing: Any) -> Any:
    """Data without numbers that JSON does not have."""
    match thing:
        case dict():
            return {str(key): plain(value) for key, value in thing.items()}
        case list() | tuple():
            return [plain(value) for value in thing]
        case float() if not math.isfinite(thing):
            return None
        case _:
            return thing


def _csv(rows: list[Row]) -> str:
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        flat = {k: json.dumps(v) if isinstance(v, (list, dict)) else v for k, v in row.items()}
        writer.writerow({key: "" if value is None else value for key, value in flat.items()})
    return out.getvalue()


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
