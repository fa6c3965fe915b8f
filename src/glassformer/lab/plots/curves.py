"""Curves of runs as charts: which series share a panel, when an axis is logarithmic.

A smoothed line has its raw points below it, and a run's alerts on it. Terminal, files, the report
and a script draw these charts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from glassformer.lab.runs.curves import MOST, Curves, Series, default_span
from glassformer.lens.show.chart import Line, Lines, Mark, Panels, scale_of
from glassformer.spec.errors import InputError

#: A curve is drawn on a logarithmic axis if it is positive and spans this factor.
DECADES = 10.0
#: The default series, as far as they exist: (title of the panel, its series); for
#: several runs one series per panel, so that the lines of a panel are the runs.
PANELS = (("loss", ("loss", "val.loss")), ("accuracy", ("val.accuracy", "val.exact_match")))
PANELS_OF_SEVERAL = tuple((name, (name,)) for name in ("loss", "val.loss", "val.accuracy"))
X_TITLES = {"step": "step", "tokens": "tokens trained on", "time": "seconds of training"}


def panels(
    curves: Sequence[Curves],
    *,
    names: Sequence[str] = (),
    axis: str = "step",
    span: float | None = None,
    log: bool | None = None,
    points: int = MOST,
) -> list[Lines]:
    """Return a chart for each panel of these runs; a series that none of them has is an error.

    `axis` is what x counts; a line keeps at most so many points. All have one range of x.
    """
    if not curves:
        raise InputError("no run to draw", hint="name one")
    several = len(curves) > 1
    wished = [(name, (name,)) for name in names] or (PANELS_OF_SEVERAL if several else PANELS)
    found = []
    for title, members in wished:
        drawn = [
            (run, one[name])
            for run, one in enumerate(curves)
            for name in members
            if name in one.series
        ]
        if drawn:
            found.append((title, drawn))
        elif names:
            curves[0][title]  # lists the series that exist
    if not found:
        raise InputError(
            f"nothing was measured yet in {', '.join(one.run for one in curves)}",
            hint="glass train writes metrics.jsonl as it goes",
        )
    xs = np.concatenate([raw.x(axis) for _, drawn in found for _, raw in drawn])
    scale = scale_of(xs.astype(np.float64))
    made = []
    for title, drawn in found:
        lines = []
        for run, raw in drawn:
            line = _line(raw, curves[run], axis, span, points)
            label = curves[run].run if several else raw.name
            lines.append(replace(line, label=label, style=run if several else None))
        share = all(_is_share(raw.name) for _, raw in drawn)
        auto = not share and _is_log([raw for _, raw in drawn])
        made.append(
            Lines(
                title=title,
                lines=tuple(lines),
                x_title=X_TITLES[axis],
                log_y=auto if log is None else log,
                share=share,
                x_range=(scale.low, scale.high),
            )
        )
    return made


def _line(raw: Series, run: Curves, axis: str, span: float | None, points: int) -> Line:
    """Return a series as a line: smoothed where it has many points, its alerts as marks."""
    covered = default_span(len(raw)) if span is None else span
    # An evaluation is a mean over many examples already, and there are few of them.
    smooth = not (raw.name.startswith("val.") or covered == 1)
    below, shown = raw.thinned(points), (raw.smoothed(covered) if smooth else raw).thinned(points)
    marks = []
    for alert in run.alerts if raw.name == "loss" else ():
        at = int(np.searchsorted(raw.step, alert.step))
        if at < len(raw) and raw.step[at] == alert.step:
            words = f"step {alert.step}: {alert.kind}: {alert.message}"
            marks.append(Mark(float(raw.x(axis)[at]), float(raw.value[at]), words))
    return Line(
        label=raw.name,
        x=shown.x(axis).astype(np.float64),
        y=shown.value,
        raw=(below.x(axis).astype(np.float64), below.value) if smooth else None,
        marks=tuple(marks),
    )


def smoothing_text(made: Sequence[Lines], span: float | None = None) -> str:
    """Return a sentence on how lines were smoothed; empty if none is drawn."""
    counts = [len(line.raw[0]) for chart in made for line in chart.lines if line.raw is not None]
    if not counts:
        return ""
    spans = {round(default_span(count) if span is None else span, 1) for count in counts}
    points = " to ".join(f"{covered:g}" for covered in sorted({min(spans), max(spans)}))
    return f"smoothed: centred mean over {points} points"


def alerts_text(curves: Sequence[Curves]) -> str:
    """Return the number of alerts of each kind; empty if there is none."""
    kinds = Counter(alert.kind for one in curves for alert in one.alerts)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def curve_chart(
    curves: Sequence[Curves],
    *,
    names: Sequence[str] = (),
    axis: str = "step",
    span: float | None = None,
    log: bool | None = None,
) -> Panels:
    """Return the panels one above the other, under the names of the runs."""
    made = panels(curves, names=names, axis=axis, span=span, log=log)
    title = ", ".join(one.run for one in curves)
    notes = [smoothing_text(made, span), alerts_text(curves)]
    notes[1] = notes[1] and f"alerts (▼): {notes[1]}"
    head = "\n".join(filter(None, [title, "   ".join(filter(None, notes))]))
    return Panels(charts=tuple(made), title=head)


def _is_share(name: str) -> bool:
    """Return True for a series of shares, such as accuracy, which lie between 0 and 1."""
    return name.endswith((".accuracy", ".exact_match", ".legal")) or name.startswith("val.by.")


def _is_log(lines: Sequence[Series]) -> bool:
    values = np.concatenate([line.value for line in lines])
    values = values[np.isfinite(values)]
    return bool(len(values)) and values.min() > 0 and values.max() >= DECADES * values.min()
