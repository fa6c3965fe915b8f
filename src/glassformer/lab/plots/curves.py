"""Curves of runs as a picture: raw points below the smoothed line, alerts on it, names at its end.

Which series share a panel, and when an axis is logarithmic, is decided here for every drawing of
curves: terminal, PNG, SVG and report.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from glassformer.lab.runs.curves import Curves, Series
from glassformer.lab.runs.metrics_file import default_span
from glassformer.lens.show.palette import SERIES
from glassformer.spec.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Lines differ by colour, and by dashes on paper.
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
#: A curve is drawn on a logarithmic axis if it is positive and spans this factor.
DECADES = 10.0
#: The default series, as far as they exist: (title of the panel, its series); for
#: several runs one series per panel, so that the lines of a panel are the runs.
PANELS = (("loss", ("loss", "val.loss")), ("accuracy", ("val.accuracy", "val.exact_match")))
PANELS_OF_SEVERAL = tuple((name, (name,)) for name in ("loss", "val.loss", "val.accuracy"))
#: The least distance of two names at the edge of a panel, as a share of its height.
GAP = 0.075
X_TITLES = {"step": "step", "tokens": "tokens trained on", "time": "seconds of training"}


@dataclass(frozen=True, slots=True)
class Drawn:
    """One line of a panel: the raw points, and the smoothed ones where there are many."""

    run: int
    label: str
    raw: Series
    smooth: Series | None


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over one axis; `share`: fractions, drawn from 0 to 100 %."""

    title: str
    lines: tuple[Drawn, ...]
    log: bool
    share: bool


def panels(
    curves: Sequence[Curves],
    *,
    names: Sequence[str] = (),
    span: float | None = None,
    log: bool | None = None,
) -> list[Panel]:
    """Return the panels of these runs; a series that none of them has is an error."""
    if not curves:
        raise InputError("no run to draw", hint="name one")
    own = PANELS if len(curves) == 1 else PANELS_OF_SEVERAL
    wished = [(name, (name,)) for name in names] or own
    made = []
    for title, members in wished:
        lines = [
            _drawn(number, one, name, span, label=one.run if len(curves) > 1 else name)
            for number, one in enumerate(curves)
            for name in members
            if name in one.series
        ]
        if lines:
            share = all(_is_share(line.raw.name) for line in lines)
            auto = not share and _is_log(lines)
            made.append(Panel(title, tuple(lines), log=auto if log is None else log, share=share))
        elif names:
            curves[0][title]  # lists the series that exist
    if not made:
        raise InputError(
            f"nothing was measured yet in {', '.join(one.run for one in curves)}",
            hint="glass train writes metrics.jsonl as it goes",
        )
    return made


def smoothing_text(made: Sequence[Panel], span: float | None = None) -> str:
    """Return a sentence on how lines were smoothed; empty if none is drawn."""
    counts = [len(line.raw) for panel in made for line in panel.lines if line.smooth is not None]
    if not counts:
        return ""
    spans = {round(default_span(count) if span is None else span, 1) for count in counts}
    points = " to ".join(f"{covered:g}" for covered in sorted({min(spans), max(spans)}))
    return f"smoothed: centred mean over {points} points"


def alerts_text(curves: Sequence[Curves]) -> str:
    """Return the number of alerts of each kind; empty if there is none."""
    kinds = Counter(alert.kind for one in curves for alert in one.alerts)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def curve_figure(
    curves: Sequence[Curves],
    *,
    names: Sequence[str] = (),
    axis: str = "step",
    span: float | None = None,
    log: bool | None = None,
) -> "Figure":
    """Return a matplotlib figure, one panel above the other."""
    from glassformer.lens.show.mpl import Picture

    made = panels(curves, names=names, span=span, log=log)
    figure = Picture(figsize=(8.2, 0.7 + 2.9 * len(made)), layout="constrained")
    rows = figure.subplots(len(made), 1, sharex=True, squeeze=False)[:, 0]
    for panel, axes in zip(made, rows, strict=True):
        _draw_panel(axes, panel, curves, axis)
    rows[-1].set_xlabel(X_TITLES[axis])
    rows[-1].xaxis.set_major_formatter(lambda x, _: f"{x:,.6g}" if x < 1e5 else f"{x:,.0f}")
    title = ", ".join(one.run for one in curves)
    notes = [smoothing_text(made, span), alerts_text(curves)]
    notes[1] = notes[1] and f"alerts (▼): {notes[1]}"
    head = figure.suptitle("\n".join(filter(None, [title, "   ".join(filter(None, notes))])))
    head.set(fontsize=9, parse_math=False, wrap=True)
    return figure


def _drawn(number: int, one: Curves, name: str, span: float | None, *, label: str) -> Drawn:
    raw = one[name]
    covered = default_span(len(raw)) if span is None else span
    # An evaluation is a mean over many examples already, and there are few of them.
    as_it_is = name.startswith("val.") or covered == 1
    return Drawn(number, label, raw, None if as_it_is else raw.smoothed(covered))


def _is_share(name: str) -> bool:
    """Return True for a series of shares, such as accuracy, which lie between 0 and 1."""
    return name.endswith((".accuracy", ".exact_match", ".legal")) or name.startswith("val.by.")


def _is_log(lines: Sequence[Drawn]) -> bool:
    values = np.concatenate([line.raw.value for line in lines])
    values = values[np.isfinite(values)]
    return bool(len(values)) and values.min() > 0 and values.max() >= DECADES * values.min()


def _draw_panel(axes: Any, panel: Panel, curves: Sequence[Curves], axis: str) -> None:
    single = len(curves) == 1
    ends: list[tuple[float, str, str]] = []
    if panel.log:
        axes.set_yscale("log")
    for place, line in enumerate(panel.lines):
        number = place if single else line.run
        colour, dash = SERIES[number % len(SERIES)], DASHES[number % len(DASHES)]
        raw = line.raw.thinned()
        few = len(raw) <= 60
        if line.smooth is not None:
            axes.plot(raw.x(axis), raw.value, color=colour, alpha=0.3, linewidth=0.7)
        shown = raw if line.smooth is None else line.smooth.thinned()
        axes.plot(
            shown.x(axis),
            shown.value,
            color=colour,
            linestyle=dash,
            linewidth=1.6,
            marker="o" if few and line.smooth is None else None,
            markersize=3.5,
        )
        finite = shown.value[np.isfinite(shown.value)]
        if len(finite):
            ends.append((float(finite[-1]), line.label, colour))
        if line.raw.name == "loss":
            _draw_alerts(axes, line, curves[line.run], axis, colour)
    if panel.share and not panel.log:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_ylabel(panel.title, parse_math=False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    _label_ends(axes, ends)


def _draw_alerts(axes: Any, line: Drawn, one: Curves, axis: str, colour: str) -> None:
    """Draw a triangle on the raw curve, or at the panel's top if the value is not finite."""
    x, step, value = line.raw.x(axis), line.raw.step, line.raw.value
    for alert in one.alerts:
        place = int(np.searchsorted(step, alert.step))
        if place >= len(step) or step[place] != alert.step:
            continue
        if np.isfinite(value[place]):
            where, transform = value[place], axes.transData
        else:
            where, transform = 0.97, axes.get_xaxis_transform()
        axes.plot(
            [x[place]], [where], "v", transform=transform, color=colour, markeredgecolor="black"
        )


def _label_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write names at the right edge, where their lines end, moved apart if they touch."""
    axes.autoscale_view()
    shares = []
    for value, label, colour in ends:
        point = axes.transData.transform((0.0 if axes.get_xscale() == "linear" else 1.0, value))
        shares.append((float(axes.transAxes.inverted().transform(point)[1]), label, colour))
    for share, label, colour in apart(shares):
        axes.text(
            1.01,
            share,
            label,
            color=colour,
            fontsize=8,
            va="center",
            transform=axes.transAxes,
            parse_math=False,
        )


def apart(labels: Sequence[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """Move labels at heights from 0 to 1 until no two are nearer than a line of text."""
    made: list[tuple[float, str, str]] = []
    low = -GAP
    for share, label, colour in sorted(labels):
        low = max(share, low + GAP)
        made.append((low, label, colour))
    high = 1.0 + GAP
    for i in reversed(range(len(made))):
        high = min(made[i][0], high - GAP)
        made[i] = (high, *made[i][1:])
    return made
