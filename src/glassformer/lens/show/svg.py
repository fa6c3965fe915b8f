"""Pictures without a library or a script: heat maps as PNG in SVG, bars and lines as SVG.

Pure functions from numbers and words to text. Colour is an accent with an alpha ramp and text is
`currentColor`, so that a picture follows the page around it, light or dark. Every function escapes
the words it is given.
"""

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from glassformer.lens.show import palette
from glassformer.lens.show.html import escape, escape_line
from glassformer.lens.show.text import shown

# T rows, S columns

Scalar = TypeVar("Scalar", bound=np.generic)

#: Colours of positive values, of negative values, and of the hatching of masked cells.
ACCENT, OPPOSITE, HATCH = (
    palette.rgb(palette.COLOURS[name].either) for name in ("heat-high", "heat-minus", "hatch")
)
SERIES = palette.SERIES_ON_EITHER
_STEPS = 126  # levels of each sign in the palette
_LINE, _GAP = 254, 255  # indices of the palette for the hatching


# --- heat maps ------------------------------------------------------------------------------------


def heatmap_png(
    values_TS: NDArray[np.floating], *, allowed: NDArray[np.bool_] | None = None, scale: int = 1
) -> bytes:
    """Return a palette PNG, `scale` pixels per cell: -1 to 1 as two ramps of alpha, 0 transparent.

    The alpha is the root of the value (`palette.strength`). Cells that are not allowed, or not
    finite, are hatched.
    """
    masked_TS = ~np.isfinite(values_TS)
    if allowed is not None:
        masked_TS |= ~allowed
    clipped_TS = np.clip(np.nan_to_num(values_TS), -1.0, 1.0)
    size_TS = np.sign(clipped_TS) * np.sqrt(np.abs(clipped_TS)) * _STEPS
    index_TS = np.where(size_TS >= 0, np.rint(size_TS), _STEPS + np.rint(-size_TS))
    index_TS = np.where(np.rint(size_TS) == 0, 0, index_TS).astype(np.uint8)
    pixels = index_TS.repeat(scale, 0).repeat(scale, 1)
    masked = masked_TS.repeat(scale, 0).repeat(scale, 1)
    y, x = np.ogrid[: pixels.shape[0], : pixels.shape[1]]
    pixels[masked] = np.where((x + y) % 4 == 0, _LINE, _GAP)[masked]
    return _palette_png(pixels)


def _palette_png(pixels: NDArray[np.uint8]) -> bytes:
    ramp = [round(255 * step / _STEPS) for step in range(_STEPS + 1)]
    colours = [ACCENT] * (_STEPS + 1) + [OPPOSITE] * _STEPS + [HATCH] * 3
    alphas = ramp + ramp[1:] + [0, 120, 0]
    height, width = pixels.shape
    lines = np.zeros((height, width + 1), np.uint8)  # each begins with 0: no filter
    lines[:, 1:] = pixels
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(np.array(colours, np.uint8))),
        (b"tRNS", bytes(alphas)),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def data_uri(png: bytes) -> str:
    """Return an image as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def heatmap_svg(
    values_TS: NDArray[np.floating],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    label: str,
    allowed: NDArray[np.bool_] | None = None,
    side: int = 384,
) -> str:
    """Return a labelled heat map about `side` pixels wide; words are drawn where there is room."""
    T, S = values_TS.shape
    cell = min(26.0, max(1.0, side / max(T, S)))
    picture = heatmap_png(
        values_TS, allowed=allowed, scale=max(1, round(cell / 2) if T < 256 else 1)
    )
    left, long = (8 + 6.8 * _longest(words) for words in (rows, columns))
    flat = long <= 30 and cell >= 14  # short words are horizontal, long ones vertical
    top = 18.0 if flat else long
    right, bottom = left + S * cell, top + T * cell
    out = [
        _open(right + 2, bottom + 2, label),
        f'<image x="{left:g}" y="{top:g}" width="{S * cell:g}" height="{T * cell:g}" '
        f'preserveAspectRatio="none" image-rendering="pixelated" href="{data_uri(picture)}"/>',
        f'<rect x="{left:g}" y="{top:g}" width="{S * cell:g}" height="{T * cell:g}" '
        'fill="none" stroke="currentColor" stroke-opacity=".35"/>',
    ]
    every = max(1, round(11 / cell))
    for t in range(0, T, every):
        y = top + (t + 0.5) * cell + 4
        out.append(_word(left - 4, y, rows[t], anchor="end"))
    for s in range(0, S, every):
        x = left + (s + 0.5) * cell
        if flat:
            out.append(_word(x, top - 5, columns[s], anchor="middle"))
        else:
            turn = f' transform="rotate(-90 {x + 4:g} {top - 4:g})"'
            out.append(_word(x + 4, top - 4, columns[s], anchor="start", more=turn))
    return "".join(out) + "</svg>"


def colour_key(label: str, *, low: float = 0.0, high: float = 1.0) -> str:
    """Return the ramp of the maps with its ends: the weight of no colour and of the strongest."""
    ramp = data_uri(heatmap_png(np.linspace(0.0, 1.0, 64)[None, :]))
    width = 170 + 7 * len(label)
    return (
        _open(width, 16, f"{label}: no colour is {low:g}, the strongest {high:g}")
        + f'<text x="0" y="12">{low:g}</text><image x="14" y="2" width="120" height="12" '
        f'preserveAspectRatio="none" href="{ramp}"/><rect x="14" y="2" width="120" height="12" '
        'fill="none" stroke="currentColor" stroke-opacity=".35"/>'
        f'<text x="140" y="12">{high:g} {escape_line(label)}</text></svg>'
    )


def _longest(words: Sequence[str]) -> int:
    return max((len(shown(word, most=12)) for word in words), default=0)


def pooled(values_TS: NDArray[Scalar], *, most: int) -> NDArray[Scalar]:
    """Max-pool to at most `most` rows and columns."""
    for axis in (0, 1):
        step = -(-values_TS.shape[axis] // most)
        if step > 1:
            starts = np.arange(0, values_TS.shape[axis], step)
            values_TS = np.maximum.reduceat(values_TS, starts, axis=axis)
    return values_TS


def _open(width: float, height: float, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape_line(label)}" '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'font-family="ui-monospace, monospace" font-size="11" fill="currentColor">'
        f"<title>{escape_line(label)}</title>"
    )


def _word(x: float, y: float, word: str, *, anchor: str, more: str = "") -> str:
    text = escape(word, most=12)
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{more}>{text}</text>'


# --- bars and lines -------------------------------------------------------------------------------


def bars_svg(
    names: Sequence[str], values: Sequence[float], *, label: str, form: str = ".3f"
) -> str:
    """Return horizontal bars, scaled to the longest; negative ones in the other colour."""
    left = 8 + 6.6 * max((len(shown(name, most=24)) for name in names), default=0)
    width, line = left + 260.0, 18
    largest = max((abs(value) for value in values if np.isfinite(value)), default=0.0) or 1.0
    out = [_open(width, line * len(names) + 4, label)]
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        y = line * number + 2
        known = value if np.isfinite(value) else 0.0
        long = 190 * abs(known) / largest
        colour = SERIES[0] if known >= 0 else SERIES[1]
        text = escape(name, most=24)
        out.append(f'<text x="{left - 4:g}" y="{y + 12}" text-anchor="end">{text}</text>')
        out.append(
            f'<rect x="{left:g}" y="{y}" width="{long:.1f}" height="14" fill="{colour}" '
            'fill-opacity=".75"/>'
        )
        out.append(f'<text x="{left + long + 4:.1f}" y="{y + 12}">{format(value, form)}</text>')
    return "".join(out) + "</svg>"


def lines_svg(
    series: Mapping[str, Sequence[float]],
    *,
    label: str,
    words: Sequence[str] = (),
    size: tuple[int, int] = (520, 180),
) -> str:
    """Return lines over equal steps, distinguished by colour and dash, with a legend."""
    width, height, left, top = size[0], size[1], 56, 8
    finite = [v for values in series.values() for v in values if np.isfinite(v)]
    low, high = min([0.0, *finite]), max(finite, default=1.0)
    span = (high - low) or 1.0
    steps = max((len(values) for values in series.values()), default=1)

    def at(step: int, value: float) -> str:
        x = left + (width - left - 8) * (step / max(1, steps - 1))
        return f"{x:.1f},{top + (height - top) * (1 - (value - low) / span):.1f}"

    legend = 16 * (len(series) + bool(words))
    out = [_open(width, height + legend + 12, label)]
    for value in (low, (low + high) / 2, high):
        y = float(at(0, value).partition(",")[2])
        out.append(
            f'<line x1="{left}" x2="{width - 8}" y1="{y:g}" y2="{y:g}" stroke="currentColor" '
            f'stroke-opacity=".2"/><text x="{left - 5}" y="{y + 4:g}" text-anchor="end">'
            f"{value:.3g}</text>"
        )
    below = height + 14
    if words:
        ends = f"{shown(words[0], most=20)} … {shown(words[-1], most=20)}"
        out.append(f'<text x="{left}" y="{below}">{escape(ends)}</text>')
        below += 16
    for number, (name, values) in enumerate(series.items()):
        colour, dash = SERIES[number % len(SERIES)], f"{8 - 2 * (number % 3)} {2 * (number % 3)}"
        points = " ".join(at(i, v) for i, v in enumerate(values) if np.isfinite(v))
        line = f'fill="none" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dash}"'
        y = below + 16 * number
        out.append(f'<polyline points="{points}" {line}/>')
        out.append(f'<path d="M{left} {y - 4}h26" {line}/>')
        out.append(f'<text x="{left + 32}" y="{y}">{escape(name, most=60)}</text>')
    return "".join(out) + "</svg>"
