"""A whole look on one sheet: as lines of text, as static HTML, as one JSON record."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from glassformer.lens.seen import Seen
from glassformer.lens.show import html, svg
from glassformer.lens.show.displayable import plain
from glassformer.lens.show.token_text import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Lines of a long sequence that the text shows: the last ones.
LINES = 24


def text(seen: Seen) -> str:
    """A line a position, and the likeliest answers at the end."""
    lines = [seen.summary()]
    if seen.source_words is not None:
        lines.append(f"  source: {' '.join(map(shown, seen.source_words))}")
    for row in seen.rows()[-LINES:]:
        asked = "" if row["target"] is None else f"  loss {row['loss']:.3f}"
        word, top = shown(row["word"], most=16), shown(row["top"], most=16)
        lines.append(
            f"  {row['position']:4} {word:>16} -> {top:16} {row['probability']:.3f}{asked}"
        )
    return "\n".join(lines)


def parts(seen: Seen) -> Iterator[str]:
    """Answers, lens, attention, norms."""
    yield html.heading(seen.summary())
    if seen.source_words is not None:
        words = " ".join(map(shown, seen.source_words))
        yield f"<p>source: {html.escape_line(words)}</p>"
    best = seen.next(None, 8)
    label = f"likeliest answers at position {seen.reading.place}"
    yield html.captioned(
        svg.bars_svg([word for _, word, _ in best], [p for *_, p in best], label=label),
        label,
    )
    rows = seen.rows()
    lines = ([row[name] for name in rows[0]] for row in rows)
    yield html.folded("by position", html.table(list(rows[0]), lines, caption="answers"))
    yield from seen.lens.parts()
    yield from seen.attention.parts()
    yield from seen.norms.parts()


def record(seen: Seen) -> dict[str, Any]:
    """All sub-values for JSON, the attention maps' cells among them."""
    maps = {
        kind: [layer.tolist() for layer in seen.attention.of(kind).weights] for kind in seen.kinds
    }
    return plain(
        {
            "title": seen.summary(),
            "words": seen.words,
            "source_words": seen.source_words,
            "head": seen.reading.head,
            "ablated": [str(head) for head in seen.ablated],
            "loss": seen.loss,
            "rows": seen.rows(),
            "lens": seen.lens.rows(),
            "norms": seen.norms.rows(),
            "attention": maps,
        }
    )


def figure(seen: Seen) -> "Figure":
    """Each layer's mean attention, and the lens below it."""
    from matplotlib.figure import Figure

    from glassformer.lens.show.mpl import draw_heat, draw_lens

    kinds = [seen.attention.of(kind) for kind in seen.kinds]
    heats = [maps.mean(layer) for maps in kinds for layer in range(maps.shape[0])]
    sheet = Figure(figsize=(max(7.0, 2.6 * len(heats)), 7.0), layout="constrained")
    above, below = sheet.subfigures(2, 1)
    for axis, heat in zip(above.subplots(1, len(heats), squeeze=False).flat, heats, strict=True):
        draw_heat(axis, heat, words=len(heats) <= 4)
    draw_lens(below.subplots(), seen.lens)
    return sheet
