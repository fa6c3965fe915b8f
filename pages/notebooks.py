"""A notebook for each chapter of docs/learn, made from its Markdown: `python -m pages notebooks`.

Blocks that run become cells of code, everything else cells of text; answers stay folded. A cell
that ends by printing a picture's list shows the picture as well. A test compares every notebook
with its chapter, so nothing is edited in a notebook. `--execute` runs every cell as a kernel would,
all cells of a notebook in one namespace, and reports those that fail.
"""

import contextlib
import io
import json
import re
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pages.quotes import PAGES

FOLDER = PAGES / "notebooks"
BLOCK = re.compile(r"^```python\n(.*?)^```\n?", re.M | re.S)
#: Links and pictures of a chapter are relative to docs/learn.
LINK = re.compile(r"(\]\()(?!https?:|#)([^)]+\))")
DRAWN = re.compile(r"^print\((gf\.diagram\(.*?\)|seen\.token_path\(.*?\))\)(.*)$", re.M)
HEAD = (
    "*Made from `docs/learn/{name}` by `python -m pages notebooks`: edit the chapter, not this. "
    "Every cell runs by itself in the repository's environment (`make demo`, then "
    "`. .venv/bin/activate`).*"
)


def chapters() -> list[Path]:
    """The pages that become notebooks: the first day and the chapters."""
    return [PAGES / "learn" / "first-day.md", *sorted((PAGES / "learn").glob("0*.md"))]


def notebook(page: Path) -> str:
    """Return a chapter as notebook JSON."""
    text = page.read_text(encoding="utf-8")
    cells: list[dict[str, Any]] = [_words(HEAD.format(name=page.name))]
    at = 0
    for block in BLOCK.finditer(text):
        cells += _text_cells(text[at : block.start()])
        cells.append(_code(block[1]))
        at = block.end()
    cells += _text_cells(text[at:])
    for number, cell in enumerate(cells):
        cell["id"] = f"{page.stem}-{number}"
    found = {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _text_cells(text: str) -> list[dict[str, Any]]:
    """A cell of text; a fold that a block would cut in two becomes a heading."""
    text = re.sub(r"<!--.*?-->\n", "", text, flags=re.S)
    text = re.sub(r"<details[^>]*><summary>(.*?)</summary>", r"*\1:*", text)
    text = text.replace("</details>", "")
    text = LINK.sub(r"\1../learn/\2", text).strip()
    return [_words(text)] if text else []


def _words(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}


def _code(block: str) -> dict[str, Any]:
    """A cell of code, in which a picture that is printed is also drawn."""
    shown = DRAWN.sub(r"display(\1)\2", block).rstrip("\n")
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": shown.splitlines(keepends=True),
    }


def refresh(folder: Path = FOLDER) -> list[Path]:
    """Write the notebooks that have changed, and return their paths."""
    folder.mkdir(exist_ok=True)
    changed = []
    for page in chapters():
        path = folder / f"{page.stem}.ipynb"
        new = notebook(page)
        if not path.is_file() or path.read_text(encoding="utf-8") != new:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed


# --- running them ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Executed:
    """A notebook that was run: its cells of code, the seconds, and the failure that ended it."""

    path: Path
    cells: int
    shown: int
    seconds: float
    failure: str = ""

    def __str__(self) -> str:
        found = f"{self.path.name:<22}{self.cells:>3} cells, {self.shown} pictures, "
        return f"{found}{self.seconds:.0f} s" + (f"\n{self.failure}" if self.failure else "")


def execute(path: Path) -> Executed:
    """Run the cells of a notebook in one namespace, in an empty folder, up to the first failure."""
    cells = [
        "".join(cell["source"])
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    shown: list[Any] = []
    names: dict[str, Any] = {"__name__": "__main__", "display": shown.append}
    began, failure = time.perf_counter(), ""
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        for number, cell in enumerate(cells, 1):
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(cell, f"{path.name}, cell {number}", "exec"), names)
            except Exception:
                failure = f"cell {number} of {len(cells)}\n{traceback.format_exc()}"
                break
    dull = [one for one in shown if not _draws(one)]
    failure = failure or (f"{type(dull[0]).__name__} draws nothing in a notebook" if dull else "")
    return Executed(path, len(cells), len(shown), time.perf_counter() - began, failure)


def execute_all(folder: Path = FOLDER) -> Iterator[Executed]:
    """Run every notebook."""
    for page in chapters():
        yield execute(folder / f"{page.stem}.ipynb")


def _draws(value: Any) -> bool:
    return any(hasattr(value, f"_repr_{kind}_") for kind in ("svg", "html", "png", "mimebundle"))
