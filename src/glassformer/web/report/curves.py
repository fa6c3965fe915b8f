"""Curves as SVG that takes its colours from the page, for light, dark and paper alike."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from glassformer.lab.plots.curves import X_TITLES, Drawn, Panel, apart
from glassformer.lab.runs.curves import Curves
from glassformer.lab.runs.smoothing import Floats
from glassformer.lens.show.html import escape_line

WIDTH, HEIGHT = 740, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 108, 14, 40
DASHES = ("", "7 3", "2 3", "9 3 2 3")
#: Points of a drawn line; an SVG keeps them all.
POINTS = 600


def panels_svg(made: Sequence[Panel], curves: Sequence[Curves], *, axis: str = "step") -> list[str]:
    """A picture for each panel, all over the same stretch of the axis."""
    xs = [line.raw.x(axis) for panel in made for line in panel.lines]
    x_range = _range(np.concatenate(xs))
    return [_panel_svg(panel, curves, axis, x_range) for panel in made]


def _panel_svg(
    panel: Panel, curves: Sequence[Curves], axis: str, x_range: tuple[float, float]
) -> str:
    """Faint raw points, the smoothed line, alerts as triangles, names at the ends."""
    frame = Frame(panel, x_range)
    label = f"{panel.title} over {X_TITLES[axis]}: " + "; ".join(map(_ended, panel.lines))
    out = [
        f'<svg role="img" aria-label="{escape_line(label)}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-size="11" fill="currentColor">'
    ]
    out += _grid(frame, panel, axis)
    ends = []
    for number, line in enumerate(panel.lines):
        out += _line(frame, line, number, axis)
        shown = line.smooth or line.raw
        placed = [value for value in shown.value.tolist() if frame.drawable(value)]
        if placed:
            y = frame.y(placed[-1])
            share = 1 - (y - TOP) / (HEIGHT - TOP - BOTTOM)
            ends.append((share, line.label, f"var(--series-{number % 4 + 1})"))
        if line.raw.name == "loss":
            out += _alerts(frame, line, curves[line.run], axis)
    for share, name, colour in apart(ends):
        y = TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)
        out.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{y + 4:.1f}" style="fill:{colour}">'
            f"{escape_line(name)}</text>"
        )
    return "".join(out) + "</svg>"


class Frame:
    """From values to places in the picture."""

    def __init__(self, panel: Panel, x_range: tuple[float, float]) -> None:
        self.log = panel.log
        ys = np.concatenate([line.raw.value for line in panel.lines])
        ys = ys[np.isfinite(ys) & ((ys > 0) | (not panel.log))]
        self.x_range = x_range
        self.y_range = (0.0, 1.0) if panel.share and not panel.log else _range(self._scaled(ys))

    def x(self, value: float) -> float:
        """Pixels from the left."""
        low, high = self.x_range
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Pixels from above."""
        low, high = self.y_range
        scaled = math.log10(value) if self.log else value
        return TOP + (1 - (scaled - low) / (high - low)) * (HEIGHT - TOP - BOTTOM)

    def drawable(self, value: float) -> bool:
        """Has it a place at all?"""
        return math.isfinite(value) and (value > 0 or not self.log)

    def y_ticks(self) -> list[float]:
        """Values of the lines across."""
        low, high = self.y_range
        if not self.log:
            return ticks(low, high, most=6)
        steps = (1,) if high - low > 3 else (1, 2, 5)
        powers = range(math.floor(low), math.ceil(high) + 1)
        every = [k * 10.0**power for power in powers for k in steps]
        return [value for value in every if low - 1e-9 <= math.log10(value) <= high + 1e-9]

    def _scaled(self, values: Floats) -> Floats:
        return np.log10(values) if self.log else values


def ticks(low: float, high: float, *, most: int) -> list[float]:
    """Round values inside the range: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _range(values: Floats) -> tuple[float, float]:
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    around = max(0.5, 1e-9 * abs(low))  # at 2^62 a half is nothing
    return (low, high) if high > low else (low - around, high + around)


def _grid(frame: Frame, panel: Panel, axis: str) -> list[str]:
    out, right, bottom = [], WIDTH - RIGHT, HEIGHT - BOTTOM
    for value in frame.y_ticks():
        y = frame.y(value)
        text = f"{value:.0%}" if panel.share else f"{value:.3g}"
        out.append(
            f'<path d="M{LEFT} {y:.1f}H{right}" stroke="currentColor" stroke-opacity=".14"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        )
    for value in ticks(*frame.x_range, most=7):
        out.append(
            f'<text x="{frame.x(value):.1f}" y="{bottom + 16}" text-anchor="middle">'
            f"{value:,.0f}</text>"
        )
    out.append(
        f'<path d="M{LEFT} {bottom}H{right}" stroke="currentColor" stroke-opacity=".6"/>'
        f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{X_TITLES[axis]}</text>"
    )
    return out


def _line(frame: Frame, line: Drawn, number: int, axis: str) -> list[str]:
    colour = f"stroke:var(--series-{number % 4 + 1})"
    out, raw = [], line.raw.thinned(POINTS)
    if line.smooth is not None:
        path = _path(frame, raw.x(axis).tolist(), raw.value.tolist())
        out.append(f'<path d="{path}" fill="none" style="{colour}" stroke-opacity=".35"/>')
    shown = raw if line.smooth is None else line.smooth.thinned(POINTS)
    dash = DASHES[number % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    path = _path(frame, shown.x(axis).tolist(), shown.value.tolist())
    out.append(f'<path d="{path}" fill="none" style="{colour}" stroke-width="1.8"{dashed}/>')
    if line.smooth is None and len(raw) <= 60:
        for x, y in zip(raw.x(axis).tolist(), raw.value.tolist(), strict=True):
            if frame.drawable(y):
                place = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}"'
                out.append(f'<circle {place} r="2.4" style="fill:var(--series-{number % 4 + 1})"/>')
    return out


def _path(frame: Frame, xs: list[float], ys: list[float]) -> str:
    parts, pen = [], "M"
    for x, y in zip(xs, ys, strict=True):
        if not frame.drawable(y):
            pen = "M"
            continue
        parts.append(f"{pen}{frame.x(x):.1f} {frame.y(y):.1f}")
        pen = "L"
    return "".join(parts)


def _alerts(frame: Frame, line: Drawn, one: Curves, axis: str) -> list[str]:
    out: list[str] = []
    values: dict[int, Any] = dict(
        zip(line.raw.step.tolist(), zip(line.raw.x(axis), line.raw.value, strict=True), strict=True)
    )
    for alert in one.alerts:
        if alert.step in values:
            x, value = map(float, values[alert.step])
            y = frame.y(value) if frame.drawable(value) else TOP + 8.0
            text = escape_line(f"step {alert.step}: {alert.kind}: {alert.message}")
            out.append(
                f'<path d="M{frame.x(x) - 5:.1f} {y - 9:.1f}h10l-5 8z" style="fill:var(--bad)">'
                f"<title>{text}</title></path>"
            )
    return out


def _ended(line: Drawn) -> str:
    shown = line.smooth or line.raw
    finite = shown.value[np.isfinite(shown.value)]
    return f"{line.label} ends at {finite[-1]:.4g}" if len(finite) else f"{line.label} has no value"
