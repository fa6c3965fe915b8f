"""The frame of the one-file report: its style, and the elements that its sections are made of.

No script, nothing fetched: the file's own policy forbids both. Every string is escaped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

from glassformer.lens.show.html import escape_line
from glassformer.lens.show.palette import css_variables

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the report: its anchor, its heading and its body."""

    key: str
    title: str
    body: str


def page(title: str, lead: str, sections: Sequence[Section], foot: str) -> str:
    """Return the complete file."""
    style = (resources.files("glassformer.lens.show") / "report.css").read_text(encoding="utf-8")
    jumps = "".join(
        f'<li><a href="#{one.key}">{escape_line(one.title)}</a></li>' for one in sections
    )
    bodies = "".join(
        f'<section aria-labelledby="{one.key}"><h2 id="{one.key}">{escape_line(one.title)}</h2>'
        f"{one.body}</section>"
        for one in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape_line(title)}</title><style>{css_variables()}{style}</style></head>"
        f"<body><header><h1>{escape_line(title)}</h1>{lead}"
        f'<nav aria-label="Sections"><ul>{jumps}</ul></nav></header>'
        f"<main>{bodies}</main><footer>{foot}</footer></body></html>\n"
    )


def say(text: str, *, kind: str = "") -> str:
    """Return a paragraph."""
    named = f' class="{kind}"' if kind else ""
    return f"<p{named}>{escape_line(text)}</p>"


def missing(text: str) -> str:
    """Return a paragraph about something that the run does not have."""
    return say(text, kind="missing")


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Return a list of names and values."""
    lines = "".join(
        f"<dt>{escape_line(name)}</dt><dd>{escape_line(str(value))}</dd>" for name, value in pairs
    )
    return f"<dl>{lines}</dl>"


def table(heading: Sequence[str], rows: Iterable[Sequence["Cell"]], *, caption: str) -> str:
    """Return a table under its caption, which scrolls if the page is narrower.

    The first cell of a row is its name; words are aligned left, numbers right.
    """
    lines = list(rows)
    wordy = {0} | {i for line in lines[:1] for i, cell in enumerate(line) if isinstance(cell, Text)}
    left = ' class="left"'
    head = "".join(
        f'<th scope="col"{left if number in wordy else ""}>{escape_line(name)}</th>'
        if name
        else "<td></td>"
        for number, name in enumerate(heading)
    )
    body = "".join(
        f'<tr><th scope="row">{escape_line(str(line[0]))}</th>'
        f"{''.join(_cell(cell) for cell in line[1:])}</tr>"
        for line in lines
    )
    inside = (
        f'<table aria-label="{escape_line(caption)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )
    name = f'<p class="caption">{escape_line(caption)}</p>'
    return f'<div class="table">{name}{scrolled(inside, label=caption)}</div>'


def beside(parts: Iterable[str]) -> str:
    """Put parts in a row where there is room."""
    return f'<div class="beside">{"".join(parts)}</div>'


@dataclass(frozen=True, slots=True)
class Shaded:
    """A number and the share by which its cell is shaded."""

    text: str
    share: float


@dataclass(frozen=True, slots=True)
class Text:
    """Words, which are aligned left and may wrap."""

    text: str
    kind: str = ""


Cell = str | int | float | Shaded | Text | None


def _cell(cell: Cell) -> str:
    match cell:
        case None:
            return "<td></td>"
        case Shaded():
            style = f' class="shade" style="--s:{cell.share:.3f}"' if cell.share > 0 else ""
            return f"<td{style}>{escape_line(cell.text)}</td>"
        case Text():
            return f'<td class="text {cell.kind}">{escape_line(cell.text)}</td>'
        case float():
            return f"<td>{cell:.4g}</td>"
        case int():
            return f"<td>{cell:,}</td>"
    return f"<td>{escape_line(cell)}</td>"


def scrolled(inside: str, *, label: str) -> str:
    """Return a part that scrolls by itself, also by keyboard."""
    return (
        f'<div class="scroll" role="group" tabindex="0" aria-label="{escape_line(label)}">'
        f"{inside}</div>"
    )
