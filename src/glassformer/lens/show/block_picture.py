"""The style of a diagram, and the insides of a block: attention and feed-forward.

Colours are CSS variables, light and dark.
"""

from collections.abc import Sequence
from typing import assert_never, get_args

from glassformer.lens.show.element import Element, down_tip, path, rect, short, text
from glassformer.lens.show.outline import (
    Attending,
    Dense,
    Kind,
    Mixture,
    Part,
    dense_words,
    format_count,
    norm_name,
)
from glassformer.lens.show.palette import COLOURS
from glassformer.spec.errors import InputError
from glassformer.spec.program import Attend, Norm

#: The page's colours: of grounds and lines, then of each kind of part, the same everywhere.
_COLOURS = {
    "paper": "panel",
    "ink": "ink",
    "muted": "muted",
    "line": "edge",
    "embed": "series-6",
    "position": "series-5",
    "norm": "series-8",
    "attn": "series-1",
    "cross": "series-4",
    "ffn": "series-3",
    "head": "series-2",
}


def _style() -> str:
    chosen = {name: COLOURS[colour] for name, colour in _COLOURS.items()}
    light = "".join(f"--gd-{name}:{colour.light};" for name, colour in chosen.items())
    dark = "".join(f"--gd-{name}:{colour.dark};" for name, colour in chosen.items())
    kinds = "".join(
        f".glass-diagram .{kind}{{--gd-own:var(--gd-{kind})}}" for kind in get_args(Kind)
    )
    return (
        f".glass-diagram{{{light}}}"
        f"@media(prefers-color-scheme:dark){{.glass-diagram{{{dark}}}}}"
        ".glass-diagram text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',"
        "sans-serif;font-size:11.5px;fill:var(--gd-muted);stroke:none}"
        ".glass-diagram .paper{fill:var(--gd-paper);stroke:none}"
        ".glass-diagram .name{font-size:13px;font-weight:600;fill:var(--gd-ink)}"
        ".glass-diagram .big{font-size:15px;font-weight:650;fill:var(--gd-ink)}"
        ".glass-diagram .number{font-size:12px;fill:var(--gd-ink)}"
        f"{kinds}"
        ".glass-diagram .box{fill:var(--gd-own);fill-opacity:.11;stroke:var(--gd-own);"
        "stroke-opacity:.75;stroke-width:1.25}"
        ".glass-diagram .solid{fill:var(--gd-own);fill-opacity:.8;stroke:none}"
        ".glass-diagram .faint{fill:var(--gd-own);fill-opacity:.16;stroke:none}"
        ".glass-diagram .frame{fill:none;stroke:var(--gd-line);stroke-opacity:.6;stroke-width:1}"
        ".glass-diagram .back{fill:none;stroke:var(--gd-line);stroke-opacity:.35}"
        ".glass-diagram .stream{fill:none;stroke:var(--gd-ink);stroke-width:2.5}"
        ".glass-diagram .plus{fill:none;stroke:var(--gd-ink);stroke-width:1.5}"
        ".glass-diagram .wire{fill:none;stroke:var(--gd-line);stroke-width:1.4}"
        ".glass-diagram .wire.cross{stroke:var(--gd-cross)}"
        ".glass-diagram .tie{fill:none;stroke:var(--gd-head);stroke-width:1.4;"
        "stroke-dasharray:4 4}"
        ".glass-diagram .tip{fill:var(--gd-line);stroke:none}"
        ".glass-diagram .tip.cross{fill:var(--gd-cross)}"
        ".glass-diagram .tip.stream{fill:var(--gd-ink)}"
        ".glass-diagram .sum{fill:var(--gd-paper);stroke:var(--gd-ink);stroke-width:1.5}"
    )


#: The rules of every picture; in a file it is part of the picture, on a page a style sheet.
STYLE = _style()


# --- inside a block -------------------------------------------------------------------------------

TALL = 46  # height of a box with a note
INSIDE = 420  # width of a panel


def _title(words: str, count: int) -> list[Element]:
    number = text(INSIDE, 14, format_count(count), kind="number", anchor="end")
    return [text(0, 14, words, kind="big"), number]


def _inside_attention(part: Part, inside: Attending) -> tuple[Element, float]:
    """Draw projections, heads, mask and output of one attention; also return its height."""
    D, H = inside.d_model, inside.d_head
    N, K = inside.op.heads, inside.op.kv_heads
    drawn = _title(f"Inside {part.title.lower()}", part.count)
    third = (INSIDE - 24) / 3
    columns = (
        ("queries", "q", N, "what it looks for"),
        ("keys", "k", K, "what it offers"),
        ("values", "v", K, "what it passes on"),
    )
    y = 30.0
    for number, (name, letter, heads, why) in enumerate(columns):
        x = number * (third + 12)
        drawn.append(text(x, y + 10, short(why, third)))
        drawn.append(rect(x, y + 18, third, TALL, "box"))
        drawn.append(text(x + 10, y + 36, f"{letter.upper()}: {name}", kind="name"))
        drawn.append(text(x + 10, y + 54, f"{D} → {heads} × {H}"))
        drawn += _squares(x, y + 74, heads, third)
        drawn.append(path(f"M{x + 6:g} {y + 90:g}v20"))
        drawn.append(down_tip(x + 6, y + 114))
        treated = (norm_name(op) if isinstance(op, Norm) else "rotated" for op in inside.treated)
        drawn.append(text(x + 16, y + 104, "" if letter == "v" else ", ".join(treated)))
    y += 114
    drawn.append(rect(0, y, INSIDE, 104, "box"))
    drawn += _mask(inside.op, 12, y + 12, 80)
    for number, (words, kind) in enumerate(_score_words(inside)):
        drawn.append(text(108, y + 24 + 20 * number, short(words, INSIDE - 116), kind=kind))
    y += 104
    drawn.append(path(f"M6 {y:g}v12"))
    drawn.append(down_tip(6, y + 16))
    y += 16
    drawn.append(rect(0, y, INSIDE, TALL, "box"))
    drawn.append(text(12, y + 19, "Output projection", kind="name"))
    drawn.append(text(12, y + 36, f"all heads side by side, {N} × {H} → {D}, added to the stream"))
    return Element("g", {"class": part.kind}, tuple(drawn)), y + TALL


def _squares(x: float, y: float, heads: int, width: float) -> list[Element]:
    """Draw a square for each head; of many the first ones and how many there are."""
    most = int((width + 4) // 16)
    if heads <= most:
        return [rect(x + 16 * i, y, 12, 12, "solid", round_=2.5) for i in range(heads)]
    drawn = [rect(x + 16 * i, y, 12, 12, "solid", round_=2.5) for i in range(most - 3)]
    return [*drawn, text(x + 16 * (most - 3) + 2, y + 10, f"… {heads}")]


def _score_words(inside: Attending) -> list[tuple[str, str]]:
    op, H = inside.op, inside.d_head
    scores = f"Q · K / √{H}" if op.scale == H**-0.5 else f"{op.scale:g} Q · K"
    if op.softcap is not None:
        scores = f"{op.softcap:g} tanh({scores} / {op.softcap:g})"
    if inside.bias is not None:
        scores += f" {inside.bias.term}"
    if inside.crossing:
        sees = "every position sees the whole source"
    elif op.before is not None:
        sides = "itself and those before it" if op.after == 0 else "on each side"
        sees = f"a position sees {op.before + 1:,} tokens: {sides}"
    elif op.after == 0:
        sees = "a position sees itself and those before it"
    else:
        sees = "every position sees every other"
    sink = ", with a sink" if inside.sinks else ""
    return [
        (f"scores = {scores}", "name"),
        (sees, ""),
        (f"weights = softmax of each row of scores{sink}", "name"),
        ("each head: weights · V", "name"),
    ]


def _mask(op: Attend, x: float, y: float, side: float) -> list[Element]:
    """Draw who may attend to whom: rows attend to columns."""
    cells = 7
    step = side / cells
    window = cells if op.before is None else 3  # a window of any width is drawn as 3
    drawn = []
    for row in range(cells):
        for column in range(cells):
            behind = row - column
            allowed = (op.after != 0 or behind >= 0) and abs(behind) < window
            kind = "solid" if allowed else "faint"
            drawn.append(
                rect(x + column * step, y + row * step, step - 1.5, step - 1.5, kind, round_=1.5)
            )
    return drawn


def _funnel(inside: Dense, y: float) -> tuple[list[Element], float]:
    """Draw D, d_ff and D numbers as bars to one scale, and the matrices between them."""
    D, F = inside.d_model, inside.d_ff
    unit = INSIDE / max(D, F)
    narrow, wide, middle = max(36.0, D * unit), max(36.0, F * unit), INSIDE / 2
    words = inside.words()
    up = f"up: {D} → {F:,}" if words.matrices == 1 else f"gate and up: {D} → {F:,} each"

    def bar(width: float, at: float) -> Element:
        return rect(middle - width / 2, at, width, 10, "solid", round_=3)

    def matrix(above: float, below: float, at: float) -> Element:
        return path(
            f"M{middle - above / 2:g} {at:g}h{above:g}L{middle + below / 2:g} {at + 34:g}"
            f"h{-below:g}z",
            "faint",
        )

    def label(words: str, at: float, kind: str = "") -> Element:
        return text(middle, at, words, kind=kind, anchor="middle")

    drawn = [bar(narrow, y), matrix(narrow, wide, y + 12), label(up, y + 33, "name")]
    drawn += [bar(wide, y + 48), label(words.formula, y + 76)]
    drawn += [bar(wide, y + 86), matrix(wide, narrow, y + 98)]
    drawn += [label(f"down: {F:,} → {D}", y + 119, "name"), bar(narrow, y + 134)]
    return drawn, y + 146


def _experts(inside: Mixture, part: Part, y: float) -> tuple[list[Element], float]:
    """Draw the router, a square for each expert, and those that one token goes to."""
    k, E, D = inside.route.chosen, inside.n_experts, inside.d_model
    drawn = [
        rect(0, y, INSIDE, TALL, "box"),
        text(12, y + 19, "Router", kind="name"),
        text(12, y + 36, f"{D} → {E}: a score for each expert; the {k} largest are taken"),
    ]
    y += TALL + 14
    shown = min(E, 32)
    per_row = min(shown, 16)
    side = min(40.0, (INSIDE + 6) / per_row - 6)
    chosen = {(3 * i + 1) % shown for i in range(k)} if k < shown else set(range(shown))
    fill = iter(range(shown))
    while len(chosen) < min(k, shown):
        chosen.add(next(fill))
    for i in range(shown):
        at_x, at_y = (i % per_row) * (side + 6), y + (i // per_row) * (side + 6)
        drawn.append(rect(at_x, at_y, side, side, "solid" if i in chosen else "faint", round_=4))
    y += -(-shown // per_row) * (side + 6) + 8
    more = f" ({shown} of {E} are drawn)" if shown < E else ""
    drawn.append(text(0, y + 4, f"one token's {k} of {E} experts, for example{more}"))
    y += 16
    if inside.shared is not None:
        gate = ", times a gate" if inside.shared_gate else ""
        words = f"and the shared one, {dense_words(inside.shared)}{gate}"
        drawn.append(text(0, y + 4, words))
        y += 16
    each = sum(p.size for p in part.parameters if p.expert == 0)
    drawn.append(text(0, y + 8, "Each expert", kind="name"))
    drawn.append(text(INSIDE, y + 8, format_count(each), kind="number", anchor="end"))
    funnel, bottom = _funnel(inside.expert, 0)
    drawn.append(Element("g", {"transform": f"translate(0 {y + 18:g})"}, tuple(funnel)))
    return drawn, y + 18 + bottom


def inside_of(part: Part) -> tuple[Element, float]:
    """Draw the inside of an attention or a feed-forward; also return its height."""
    match part.inside:
        case Attending() as inside:
            return _inside_attention(part, inside)
        case Dense() as inside:
            drawn, bottom = _funnel(inside, 28.0)
        case Mixture() as inside:
            drawn, bottom = _experts(inside, part, 28.0)
        case None:
            raise InputError(f"nothing is drawn inside a part of the kind '{part.kind}'")
        case _ as unreachable:
            assert_never(unreachable)
    title = _title(f"Inside the {part.title.lower()}", part.count)
    return Element("g", {"class": "ffn"}, (*title, *drawn)), bottom


def inside_picture(part: Part, *, style: bool = False) -> Element:
    """Return the inside of an attention or a feed-forward as a picture of its own."""
    drawn, height = inside_of(part)
    pad = 14 if style else 2
    top = pad if style else 0
    box = -pad, -top, INSIDE + 2 * pad, height + 6 + 2 * top
    label = f"inside the {part.title.lower()}"
    return sheet([drawn], box, label=label, style=style, paper=style)


Box = tuple[float, float, float, float]


def sheet(
    drawn: Sequence[Element], box: Box, *, label: str, style: bool, paper: bool, role: str = "img"
) -> Element:
    """Return a picture: its elements in a box (x, y, width, height) of the viewer's units.

    `style`: with its own style sheet inside, for a file; `paper`: with a ground.
    """
    x, y, width, height = box
    props = {
        "xmlns": "http://www.w3.org/2000/svg",
        "class": "glass-diagram",
        "role": role,
        "aria-label": label,
        "viewBox": f"{x:g} {y:g} {width:g} {height:g}",
        "width": f"{width:g}",
        "height": f"{height:g}",
    }
    rules = (Element("style", {}, (STYLE,)),) if style else ()
    ground = (rect(x, y, width, height, "paper", round_=10),) if paper else ()
    return Element("svg", props, (*rules, *ground, *drawn))
