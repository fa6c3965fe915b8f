"""Words of tokens made visible: blanks at the ends are marked, control characters escaped.

A heat map of weights as characters, for a terminal, a log or a text file.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from glassformer.spec.errors import InputError

if TYPE_CHECKING:  # the page is up before torch is loaded
    from torch import Tensor

#: A function from an id to its word.
Names = Callable[[int], str]

BLANK = "\u2423"
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def shown(word: str, *, most: int = 0) -> str:
    """Return a word for a label: blanks at its ends as marks, control characters as escapes."""
    inner = word.strip(" ")
    before = len(word) - len(word.lstrip(" "))
    after = len(word) - before - len(inner)
    text = BLANK * before + "".join(map(_visible, inner)) + BLANK * after
    if not text:
        return "''"
    return text if not most or len(text) <= most else text[: most - 1] + "…"


def cut(text: str, width: int, *, mark: str = "...") -> str:
    """Return a text no longer than `width`, a mark at its end where it was longer."""
    return text if len(text) <= width else text[: width - len(mark)].rstrip() + mark


def _visible(sign: str) -> str:
    if sign in _ESCAPES:
        return _ESCAPES[sign]
    # Escaped: what a terminal would act on, and what reverses the direction of a line.
    return sign if sign.isprintable() else f"\\u{ord(sign):04x}"


def naming(names: Names | Sequence[str] | None) -> Names:
    """Return a function from ids to words; without words, ids are shown as numbers."""
    if names is None:
        return str
    if callable(names):
        return names
    listed = list(names)
    return lambda i: listed[i] if 0 <= i < len(listed) else str(i)


def checked_words(
    words: Sequence[str] | None, ids: Sequence[int], names: Names | None, *, what: str = "words"
) -> tuple[str, ...]:
    """Return one word per token, after checking that there are as many."""
    if words is None:
        return tuple(str((names or str)(i)) for i in ids)
    if len(words) != len(ids):
        raise InputError(f"{len(words)} {what} for {len(ids)} tokens", hint="one for each token")
    return tuple(map(str, words))


# T queries (rows), S keys (columns)

#: Characters from 0 to 1 in equal steps; the second set for terminals without Unicode.
SHADES = " ░▒▓█"
ASCII_SHADES = " .:*#"


def heatmap_text(
    weights_TS: "Tensor", *, rows: Sequence[str], columns: Sequence[str], shades: str = SHADES
) -> str:
    """Draw one cell per weight; the scale is fixed, 0 to 1, so that maps can be compared."""
    if weights_TS.shape != (len(rows), len(columns)):
        raise InputError(
            f"weights of shape {tuple(weights_TS.shape)} for {len(rows)} rows and {len(columns)} "
            "columns",
            hint="a name for each row and each column",
        )
    values = weights_TS.detach().double().cpu()
    # Half a percent beyond is rounding; anything else, NaN included, is no attention weight.
    if not bool(((values >= -0.005) & (values <= 1.005)).all()):
        raise InputError("a weight is not between 0 and 1", hint="attention weights are")
    margin = max(map(len, rows), default=0)
    widths = [max(2, len(name)) for name in columns]
    heading = " ".join(name.rjust(width) for name, width in zip(columns, widths, strict=True))
    lines = [f"{'':{margin}}  {heading}"]
    for name, row in zip(rows, values.tolist(), strict=True):
        cells = (shade(value, shades) * width for value, width in zip(row, widths, strict=True))
        lines.append(f"{name:>{margin}}  {' '.join(cells)}".rstrip())
    return "\n".join(lines)


def shade(value: float, shades: str = SHADES) -> str:
    """Return the character of a weight: the first below 1/n, the last from (n - 1)/n on."""
    return shades[min(len(shades) - 1, max(0, int(value * len(shades))))]


def legend(shades: str = SHADES) -> str:
    """Return what the characters mean: `░ from 20 %  ▒ from 40 %  ...`."""
    steps = (round(100 * number / len(shades)) for number in range(1, len(shades)))
    return "  ".join(f"{sign} from {step} %" for sign, step in zip(shades[1:], steps, strict=True))
