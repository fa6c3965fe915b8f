"""A finite-state machine as a drawing (SVG, without a library) and in Graphviz's language.

A machine whose edges lead to the next state, back or to the state itself is drawn on a line, others
on a circle. Text is `currentColor`, so that the drawing follows the page around it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from glassformer.data.automata.machine import Machine
from glassformer.lens.show.html import escape, escape_line
from glassformer.lens.show.svg import SERIES

RADIUS, SPACE, LOOP, LINE = 33.0, 196.0, 46.0, 15.0
#: An edge bends by this much for each state that it spans.
BEND = 34.0
Point = tuple[float, float]


class Edge(NamedTuple):
    """A transition and its probability."""

    source: int
    target: int
    symbol: str
    probability: float


def dot_text(machine: Machine, edges: Sequence[Edge]) -> str:
    """Return the machine in Graphviz's language, for `dot -Tsvg` and its relatives."""
    lines = ["digraph machine {", "  rankdir=LR;", "  start [shape=point];"]
    for state in range(machine.n_states):
        shape = "doublecircle" if machine.ends[state] else "circle"
        name = machine.class_names[machine.classes[state]]
        lines.append(f"  {state} [shape={shape}, label={_quoted(f'{state} {name}')}];")
    lines.append(f"  start -> {machine.start};")
    for edge in edges:
        label = _quoted(f"{edge.symbol}  {edge.probability:.3f}")
        lines.append(f"  {edge.source} -> {edge.target} [label={label}];")
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    backslash, quote = "\\", '"'
    text = text.replace(backslash, backslash * 2).replace(quote, backslash + quote)
    return f'"{text}"'


def machine_svg(
    machine: Machine, edges: Sequence[Edge], ends: Sequence[float], *, label: str
) -> str:
    """Return a drawing: an arrow to the start, a double circle where a string may end.

    `ends` are the probabilities to end in each state.
    """
    drawing = _Drawing(machine)
    joined: dict[tuple[int, int], list[Edge]] = {}
    for edge in edges:
        joined.setdefault((edge.source, edge.target), []).append(edge)
    for (source, target), together in joined.items():
        drawing.edge(source, target, together, back=(target, source) in joined)
    drawing.start(machine.start)
    for state in range(machine.n_states):
        drawing.node(state, ends[state])
    return drawing.svg(label)


class _Drawing:
    """The parts of a drawing, and the rectangle that holds them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.parts: list[str] = []
        self.seen: list[Point] = []
        count = machine.n_states
        self.on_line = count <= 2 or all(
            target <= state + 1 for state, row in enumerate(machine.transitions) for target in row
        )
        if self.on_line:
            self.centres = [(SPACE * state, 0.0) for state in range(count)]
        else:
            round_ = max(150.0, count * SPACE / (2 * math.pi))
            turns = [math.pi + 2 * math.pi * state / count for state in range(count)]
            self.centres = [(round_ * math.cos(t), round_ * math.sin(t)) for t in turns]

    def node(self, state: int, end: float) -> None:
        """Draw a circle with the state's number, its class and the probability of the end."""
        x, y = self.centres[state]
        inner = RADIUS - 4
        self._holds(x - RADIUS, y - RADIUS)
        self._holds(x + RADIUS, y + RADIUS)
        colour = SERIES[self.machine.classes[state] % len(SERIES)]
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS:g}" fill="{colour}" fill-opacity=".14" '
            'stroke="currentColor" stroke-width="1.4"/>'
        )
        if self.machine.ends[state]:
            self.parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{inner:g}" fill="none" '
                'stroke="currentColor" stroke-width="1"/>'
            )
        name = self.machine.class_names[self.machine.classes[state]]
        lines = [f'<tspan font-size="14" font-weight="600">{state}</tspan>']
        if name != str(state):
            lines.append(f'<tspan font-size="9">{escape(name, most=9)}</tspan>')
        if self.machine.ends[state]:
            lines.append(f'<tspan font-size="9" fill-opacity=".7">end {end:.2f}</tspan>')
        for number, line in enumerate(lines):
            below = y + 4 + 12 * (number - (len(lines) - 1) / 2)
            self.parts.append(
                f'<text x="{x:.1f}" y="{below:.1f}" text-anchor="middle">{line}</text>'
            )

    def start(self, state: int) -> None:
        """Draw the arrow that leads to the start."""
        x, y = self.centres[state]
        self._curve((x - RADIUS - 44, y), (x - RADIUS - 22, y), (x - RADIUS, y))
        self._holds(x - RADIUS - 46, y)

    def edge(self, source: int, target: int, together: Sequence[Edge], *, back: bool) -> None:
        """Draw one arrow for all symbols between two states, with their probabilities."""
        if source == target:
            self._loop(source, together)
            return
        a, b = self.centres[source], self.centres[target]
        along = math.dist(a, b)
        ux, uy = (b[0] - a[0]) / along, (b[1] - a[1]) / along
        nx, ny = uy, -ux  # to the left of the direction as it is drawn: y grows downwards
        bend = BEND * abs(target - source) if self.on_line else BEND
        if self.on_line and not back and abs(target - source) == 1:
            bend = 0.0
        middle = ((a[0] + b[0]) / 2 + nx * bend * 2, (a[1] + b[1]) / 2 + ny * bend * 2)
        top = self._curve(_towards(a, middle), middle, _towards(b, middle))
        self._label(top, (nx, ny), together)

    def _loop(self, state: int, together: Sequence[Edge]) -> None:
        x, y = self.centres[state]
        if self.on_line:
            out = (0.0, -1.0)
        else:
            size = math.hypot(x, y) or 1.0
            out = (x / size, y / size)
        side = (-out[1], out[0])

        def at(away: float, across: float) -> Point:
            return (
                x + out[0] * away + side[0] * across,
                y + out[1] * away + side[1] * across,
            )

        begin, end = (at(RADIUS * 0.9, across) for across in (-RADIUS * 0.44, RADIUS * 0.44))
        one, two = (at(RADIUS + LOOP, across) for across in (-RADIUS * 0.95, RADIUS * 0.95))
        self.parts.append(
            f'<path d="M{_pair(begin)} C{_pair(one)} {_pair(two)} {_pair(end)}" fill="none" '
            'stroke="currentColor" stroke-width="1.3" stroke-opacity=".75"/>'
        )
        self._head(two, end)
        top = at(RADIUS + LOOP * 0.75, 0)
        self._holds(*top)
        self._label(top, out, together)

    def _label(self, at: Point, out: Point, together: Sequence[Edge]) -> None:
        """Write the symbols beside a point, on the side to which `out` points."""
        longest = max(len(edge.symbol) for edge in together) + 5
        width, height = 6.8 * longest, LINE * len(together)
        x = at[0] + out[0] * (width / 2 + 5)
        y = at[1] + out[1] * (height / 2 + 5) - height / 2 + 11
        for number, edge in enumerate(together):
            self.parts.append(
                f'<text x="{x:.1f}" y="{y + LINE * number:.1f}" text-anchor="middle">'
                f'<tspan font-weight="700">{escape(edge.symbol, most=12)}</tspan>'
                f'<tspan fill-opacity=".7" dx="6">{edge.probability:.2f}</tspan></text>'
            )
        self._holds(x - width / 2, y - 12)
        self._holds(x + width / 2, y - 12 + height)

    def _curve(self, a: Point, middle: Point, b: Point) -> Point:
        """Draw an arrow, and return the point half-way along it."""
        self.parts.append(
            f'<path d="M{_pair(a)} Q{_pair(middle)} {_pair(b)}" fill="none" '
            'stroke="currentColor" stroke-width="1.3" stroke-opacity=".75"/>'
        )
        self._head(middle, b)
        top = (a[0] + 2 * middle[0] + b[0]) / 4, (a[1] + 2 * middle[1] + b[1]) / 4
        self._holds(*top)
        return top

    def _head(self, before: Point, tip: Point) -> None:
        """Draw an arrow's head."""
        turn = math.atan2(tip[1] - before[1], tip[0] - before[0])
        sides = [
            (tip[0] - 9 * math.cos(turn + open_), tip[1] - 9 * math.sin(turn + open_))
            for open_ in (0.4, -0.4)
        ]
        points = " ".join(map(_pair, (tip, *sides)))
        self.parts.append(f'<polygon points="{points}" fill="currentColor"/>')

    def _holds(self, x: float, y: float) -> None:
        self.seen.append((x, y))

    def svg(self, label: str) -> str:
        """Return the drawing with a margin around everything that was drawn."""
        xs, ys = [x for x, _ in self.seen], [y for _, y in self.seen]
        left, top = min(xs) - 8, min(ys) - 8
        width, height = max(xs) + 8 - left, max(ys) + 8 - top
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape_line(label)}" '
            f'class="machine" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="{left:.0f} {top:.0f} {width:.0f} {height:.0f}" '
            'font-family="ui-monospace, monospace" font-size="12" fill="currentColor">'
            f"<title>{escape_line(label)}</title>{''.join(self.parts)}</svg>"
        )


def _towards(centre: Point, other: Point) -> Point:
    """Return the point of a state's circle that faces another point."""
    away = math.dist(centre, other)
    return (
        centre[0] + (other[0] - centre[0]) * RADIUS / away,
        centre[1] + (other[1] - centre[1]) * RADIUS / away,
    )


def _pair(point: Point) -> str:
    return f"{point[0]:.1f},{point[1]:.1f}"
