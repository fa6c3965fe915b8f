"""A range test as a picture and in a terminal: the loss over the rate, the range, the choice."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from glassformer.lab.terminal_plot import Line, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from glassformer.train.lr_find import RateRange

#: The drawn losses end this far above the first one: a diverging end would hide the rest.
CEILING = 1.5


def lr_text(found: "RateRange", *, width: int = 80, unicode: bool = True) -> str:
    """The curve, with `!` under the suggested rate."""
    rates, losses = _clipped(found.curve)
    line = Line("loss", np.array(rates), np.array(losses))
    picture = plot(
        [line], width=width, height=10, log_x=True, alerts=[found.suggestion], unicode=unicode
    )
    return f"{picture}\n(loss over the learning rate, on a logarithmic axis; ! is the suggestion)"


def lr_figure(found: "RateRange", *, title: str) -> "Figure":
    """The smoothed loss over the rate; the stable range shaded, the suggestion marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    rates, losses = zip(*found.curve, strict=True)
    axes.plot(rates, losses, color="#0072B2", linewidth=1.6)
    axes.set_xscale("log")
    axes.set_ylim(
        min(losses) - 0.05 * (losses[0] - min(losses)), min(1.05 * max(losses), CEILING * losses[0])
    )
    axes.axvspan(found.low, found.high, color="#009E73", alpha=0.15)
    axes.axvline(found.suggestion, color="#D55E00", linestyle="--", linewidth=1.4)
    top = axes.get_xaxis_transform()
    axes.text(
        found.suggestion, 0.97, f" {found.suggestion:.1e}", color="#B34700", transform=top, va="top"
    )
    axes.text(
        found.low,
        0.03,
        f" falls from {found.low:.1e} to {found.high:.1e}",
        transform=top,
        fontsize=8,
    )
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss, smoothed")
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _clipped(curve: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The points below the ceiling, so that a diverging end does not flatten the rest."""
    ceiling = CEILING * curve[0][1]
    kept = [(rate, loss) for rate, loss in curve if loss <= ceiling]
    return [rate for rate, _ in kept], [loss for _, loss in kept]
