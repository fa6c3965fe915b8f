"""The colours of everything that is drawn: explorer, report, notebook, matplotlib, PNG and SVG.

A colour has a form for a light ground and one for a dark ground. A picture that does not know its
ground (a notebook's) takes the third form, which has a contrast of 4 on both. The explorer's
`app.css` repeats the first two; a test compares them.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.colors import Colormap


@dataclass(frozen=True, slots=True)
class Colour:
    """One colour on a light ground, on a dark one, and on either."""

    light: str
    dark: str
    either: str = ""


#: By the name of the CSS variable. Grounds and lines first, then what carries a meaning.
COLOURS = {
    "paper": Colour("#f7f7f5", "#101214"),
    "panel": Colour("#ffffff", "#181b1f"),
    "sunken": Colour("#f1f2f3", "#121518"),
    "ink": Colour("#15181c", "#e8eaed"),
    "muted": Colour("#59616b", "#9ba5b0"),
    "line": Colour("#e1e3e6", "#2a2f36"),
    "edge": Colour("#878e97", "#6d7681"),
    "accent": Colour("#2b50d6", "#8fb0ff", "#5275e6"),
    "on-accent": Colour("#ffffff", "#0d1428"),
    "tint": Colour("#eaeefc", "#1e2740"),
    "good": Colour("#0b6b40", "#72d6a4"),
    "warn": Colour("#8a4a00", "#f2b866"),
    "bad": Colour("#b3261e", "#ff9a90"),
    "bad-tint": Colour("#fdeeec", "#33191a"),
    "heat-low": Colour("#ffffff", "#181b1f"),
    "heat-high": Colour("#14257a", "#a9c1ff", "#5275e6"),
    "heat-minus": Colour("#9a3412", "#ffa366", "#c65f24"),
    "hatch": Colour("#c9ced5", "#434b55", "#808080"),
    "series-1": Colour("#2b50d6", "#8fb0ff", "#5275e6"),
    "series-2": Colour("#b4490f", "#ffa366", "#c65f24"),
    "series-3": Colour("#0f7a4d", "#6fd6a3", "#238d5f"),
    "series-4": Colour("#a12a7d", "#f090cf", "#c1549f"),
    "series-5": Colour("#6b4fc4", "#b9adff", "#826bd6"),
    "series-6": Colour("#806300", "#e3c257", "#977914"),
    "series-7": Colour("#0b7285", "#62cfe0", "#20889b"),
    "series-8": Colour("#5b636d", "#a9b3be", "#757d88"),
}
_SERIES = tuple(colour for name, colour in COLOURS.items() if name.startswith("series-"))
#: Colours of lines and bars, in their order: on a light ground, and on either.
SERIES = tuple(colour.light for colour in _SERIES)
SERIES_ON_EITHER = tuple(colour.either for colour in _SERIES)
#: Steps of a ramp in a picture.
STEPS = 256


def css_variables() -> str:
    """Return a rule that defines every colour as a CSS variable, in both themes."""
    lines = "".join(
        f"--{name}:light-dark({colour.light},{colour.dark});" for name, colour in COLOURS.items()
    )
    return f":root{{color-scheme:light dark;{lines}}}"


def rgb(colour: str) -> tuple[int, int, int]:
    """Return red, green and blue of `#rrggbb`."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def strength(weight: float) -> float:
    """Return the strength of a weight's colour: the root, so that small weights can be seen."""
    return math.sqrt(min(1.0, abs(weight)))


def heat_colours() -> "Colormap":
    """Return matplotlib's map for weights from 0 to 1: the explorer's ramp on a light ground."""
    return _ramp("heat", [step / (STEPS - 1) for step in range(STEPS)])


def signed_colours() -> "Colormap":
    """Return matplotlib's map for differences from -1 to 1."""
    return _ramp("signed", [2 * step / (STEPS - 1) - 1 for step in range(STEPS)])


def _ramp(name: str, values: list[float]) -> "Colormap":
    from matplotlib.colors import ListedColormap

    low = rgb(COLOURS["heat-low"].light)

    def mixed(value: float) -> tuple[float, float, float]:
        high = rgb(COLOURS["heat-minus" if value < 0 else "heat-high"].light)
        share = strength(value)
        red, green, blue = ((a + (b - a) * share) / 255 for a, b in zip(low, high, strict=True))
        return red, green, blue

    return ListedColormap([mixed(value) for value in values], name=f"glass-{name}")
