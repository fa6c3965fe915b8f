"""A notebook for each chapter of docs/learn, made from its Markdown: `python -m pages notebooks`.

Blocks that run become cells of code, everything else cells of text; answers stay folded. A cell
that ends by printing a picture's list shows the picture as well. A test compares every notebook
with its chapter, so nothing is edited in a notebook.
"""

import json
import re
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
