"""Code that a page shows is the code that runs: quotes name their source and are written from it.

A page marks a quote with a comment and a fence under it; `python -m pages quotes` fills the fence,
and a test compares every fence with its source:

    <!-- source: glassformer/nn/attention.py split_heads -->
    <!-- source: glassformer/nn/block.py TransformerBlock.forward from "if self.pre" to "return" -->

The fence is ```py, not ```python: blocks of the second kind are run as tests.
"""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs"
SOURCES, BESIDE = ROOT / "src", ROOT / "glasscheck" / "src"

MARK = re.compile(r"^<!-- source: .*-->$", re.M)
QUOTE = re.compile(
    r"^(?P<mark><!-- source: (?P<file>\S+) (?P<name>[\w.]+)"
    r'(?: from "(?P<first>[^"]+)" to "(?P<last>[^"]+)")? -->)\n'
    r"```py\n(?P<code>.*?)^```$",
    re.M | re.S,
)


class BadQuote(Exception):
    """A quote that names nothing, or more than one thing."""


def source_of(file: str, name: str) -> str:
    """The text of a function, a class, a method or a constant of a file of a package."""
    path = next((folder / file for folder in (SOURCES, BESIDE) if (folder / file).is_file()), None)
    if path is None:
        raise BadQuote(f"there is no {file} under src/")
    text = path.read_text(encoding="utf-8")
    body: list[ast.stmt] = ast.parse(text).body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next((found for found in body if part in _names(found)), None)
        if node is None:
            raise BadQuote(f"{file} has no {name}")
        body = getattr(node, "body", [])
    assert node is not None and node.end_lineno is not None
    decorators = getattr(node, "decorator_list", [])
    first = min((node.lineno, *(d.lineno for d in decorators)))
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno])) + "\n"


def _names(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Assign():
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def excerpt(code: str, first: str, last: str) -> str:
    """The lines from the one that holds `first` to the next that holds `last`."""
    lines = code.splitlines()
    begins = [number for number, line in enumerate(lines) if first in line]
    if len(begins) != 1:
        raise BadQuote(f"{len(begins)} lines hold {first!r}")
    ends = [number for number, line in enumerate(lines) if last in line and number >= begins[0]]
    if not ends:
        raise BadQuote(f"no line from there on holds {last!r}")
    return textwrap.dedent("\n".join(lines[begins[0] : ends[0] + 1])) + "\n"


def refreshed(page: str) -> str:
    """The page with every quote as its source is now."""

    def fill(found: re.Match[str]) -> str:
        code = source_of(found["file"], found["name"])
        if found["first"] is not None:
            code = excerpt(code, found["first"], found["last"])
        return f"{found['mark']}\n```py\n# {found['file']}\n{code}```"

    marks, quotes = MARK.findall(page), [found["mark"] for found in QUOTE.finditer(page)]
    if marks != quotes:
        odd = next(mark for mark in marks if mark not in quotes)
        raise BadQuote(f"not a quote with a ```py fence under it: {odd}")
    return QUOTE.sub(fill, page)


def refresh(folder: Path = PAGES) -> list[Path]:
    """Write every page anew whose quotes have changed, and tell which."""
    changed = []
    for path in sorted(folder.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        new = refreshed(text)
        if new != text:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed
