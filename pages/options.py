"""Tables of options in the docs, written from the specs that declare them.

A page marks a table with a comment; `python -m pages options` writes the table under it, and a test
compares every table with its spec:

    <!-- options: glassformer/spec/decoding.py DecodeSpec -->
"""

import importlib
import re
from pathlib import Path

from glassformer.spec.options import Option, options_of
from pages.quotes import PAGES

MARK = re.compile(
    r"^(?P<mark><!-- options: (?P<file>\S+)\.py (?P<name>\w+) -->)\n(?:\n(?:\|.*\n)+)?", re.M
)


def table_of(file: str, name: str) -> str:
    """The options of a spec as a Markdown table."""
    cls = getattr(importlib.import_module(file.replace("/", ".")), name)
    rows = ["| field | command | default | allowed | |", "|---|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, options_of(cls))]) + "\n"


def _row(option: Option) -> str:
    repeated = ", repeatable" if option.repeated else ""
    allowed = option.limits.replace("|", "\\|")
    cells = (
        f"`{option.name}`",
        f"`{option.flag}`{repeated}",
        f"{option.default_text}",
        f"`{allowed}`" if allowed else "",
        option.help,
    )
    return f"| {' | '.join(cells)} |"


def refreshed(page: str) -> str:
    """The page with every table as its spec is now."""
    return MARK.sub(lambda m: f"{m['mark']}\n\n{table_of(m['file'], m['name'])}", page)


def refresh(folder: Path = PAGES) -> list[Path]:
    """Rewrite the pages whose tables have changed, and return their paths."""
    changed = []
    for path in sorted(folder.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        new = refreshed(text)
        if new != text:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed
