"""Static HTML: tables, folded parts, captions, pages, and the cap on their size.

No script and nothing fetched. Every function escapes the text it is given, except the HTML parts
that it joins.
"""

import html
from collections.abc import Iterable, Sequence

from glassformer.lens.show import palette
from glassformer.lens.show.text import shown

#: The accent of shaded cells, as red, green and blue.
SHADE = palette.rgb(palette.COLOURS["accent"].either)


def escape(text: object, *, most: int = 0) -> str:
    """Escape any text for HTML, SVG and attributes."""
    return html.escape(shown(str(text), most=most), quote=True)


def table(
    heading: Sequence[str], lines: Iterable[Sequence[object]], *, caption: str, most: int = 400
) -> str:
    """Return a table; of more than `most` lines only the first, and the caption says so."""
    head = "".join(f'<th scope="col">{escape(name) if name else ""}</th>' for name in heading)
    body, left_out = [], 0
    for number, line in enumerate(lines):
        if number >= most:
            left_out += 1
            continue
        cells = "".join(f"<td>{escape(cell_text(cell))}</td>" for cell in line)
        body.append(f"<tr>{cells}</tr>")
    more = f" (the first {most} lines; {left_out} left out)" if left_out else ""
    return (
        f"<table><caption>{escape_line(caption)}{more}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def shaded_table(
    heading: Sequence[str],
    lines: Iterable[tuple[str, Sequence[tuple[str, float]]]],
    *,
    caption: str,
    most: int = 40,
) -> str:
    """Return a table of (word, share) shaded by the share; a wide one keeps the last columns.

    A line is its name and its cells.
    """
    first = max(1, len(heading) - most)
    head = "".join(
        f'<th scope="col">{escape(name, most=14) if name else ""}</th>'
        for name in (heading[0], *heading[first:])
    )
    body = []
    for name, words in lines:
        cells = [f'<th scope="row">{escape_line(name)}</th>']
        for word, share in words[first - 1 :]:
            r, g, b = SHADE
            shade = f"background-color:rgba({r},{g},{b},{0.6 * float(share):.3f})"
            text = escape(word, most=14)
            cells.append(f'<td style="{shade}" title="{float(share):.4f}">{text}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    more = f" (the last {most} of {len(heading) - 1} positions)" if first > 1 else ""
    return (
        f"<table><caption>{escape_line(caption)}{more}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def cell_text(value: object) -> str:
    """Format a number to four digits; a dash for None and NaN."""
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def escape_line(text: str) -> str:
    """Escape a sentence; its blanks stay blanks, other control characters become blanks."""
    return html.escape("".join(c if c.isprintable() else " " for c in text), quote=True)


def folded(summary: str, inside: str) -> str:
    """Return a part that unfolds on a click, without a script."""
    return f"<details><summary>{escape_line(summary)}</summary>{inside}</details>"


def captioned(picture: str, caption: str) -> str:
    """Return a picture with its caption, to be placed in a row with others."""
    return (
        '<figure style="display:inline-block;margin:4px 10px 4px 0;vertical-align:top">'
        f"{picture}<figcaption>{escape_line(caption)}</figcaption></figure>"
    )


def heading(text: str) -> str:
    """Return a heading of a part."""
    return f"<p><strong>{escape_line(text)}</strong></p>"


def capped(parts: Iterable[str], *, most: int) -> str:
    """Join the first parts that fit into `most` bytes; a line counts the others."""
    kept, size, left_out = [], 0, 0
    for part in parts:
        weight = len(part.encode())
        if left_out or size + weight > most:
            left_out += 1
            continue
        kept.append(part)
        size += weight
    if left_out:
        kept.append(
            f"<p>{left_out} more parts were left out to keep this under {most / 1e6:g} MB; "
            '<code>.save("inspection.html")</code> writes all of them.</p>'
        )
    return f'<div class="glass">{"".join(kept)}</div>'


def page(title: str, body: str) -> str:
    """Return a complete HTML page, light or dark as the reader's system, without script."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape_line(title)}</title>"
        "<style>:root{color-scheme:light dark}body{font:14px system-ui,sans-serif;margin:1.5rem}"
        "table{border-collapse:collapse;font:12px ui-monospace,monospace}"
        "td,th{padding:1px 8px;text-align:right;border-bottom:1px solid #8884;white-space:nowrap}"
        "caption{text-align:left;padding:4px 0}svg{max-width:100%;height:auto}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )
