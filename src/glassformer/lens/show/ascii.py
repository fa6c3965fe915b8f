"""A matrix of shares as a picture of characters, for a terminal, a log, or a file of text."""

from collections.abc import Sequence

from torch import Tensor

from glassformer.spec.errors import InputError

# T queries (rows), S keys (columns)

#: From nothing to everything, in equal parts of 0 to 1; the second for places without Unicode.
SHADES = " ░▒▓█"
ASCII_SHADES = " .:*#"


def heat_text(
    weights_TS: Tensor, *, rows: Sequence[str], columns: Sequence[str], shades: str = SHADES
) -> str:
    """One cell a weight between 0 and 1; the scale is fixed, so that pictures can be compared."""
    if weights_TS.shape != (len(rows), len(columns)):
        raise InputError(
            f"weights of shape {tuple(weights_TS.shape)} for {len(rows)} rows and {len(columns)} "
            "columns",
            hint="a name for each row and each column",
        )
    values = weights_TS.detach().double().cpu()
    # Half a percent beyond is rounding; a weight that is not a share is a mistake, NaN included.
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
    """The character of a share: the first below 1/n, the last from (n - 1)/n on."""
    return shades[min(len(shades) - 1, max(0, int(value * len(shades))))]


def legend(shades: str = SHADES) -> str:
    """What the characters mean: `░ from 20 %  ▒ from 40 %  ...`."""
    steps = (round(100 * place / len(shades)) for place in range(1, len(shades)))
    return "  ".join(f"{sign} from {step} %" for sign, step in zip(shades[1:], steps, strict=True))
