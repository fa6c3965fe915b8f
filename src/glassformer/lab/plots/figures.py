"""Figures: confusion tables of an evaluation, a learning-rate range test, a design, a machine.

A design is drawn with its parameters by component, and with the designs of neighbouring wishes.

A finite-state machine is drawn as SVG, without a library, or written in Graphviz's language. A
machine whose edges lead to the next state, back or to the state itself is drawn on a line, others
on a circle. Text is `currentColor`, so that the drawing follows the page around it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from glassformer.budget.answer import Answer
from glassformer.budget.design import EXPANSIONS, RATIOS, drift, landscape
from glassformer.budget.question import Budget
from glassformer.costs.parameter_table import parameter_table
from glassformer.data.automata.machine import Machine
from glassformer.lab.measure.evaluate import READINGS, ROWS, Table, order, shares
from glassformer.lens.show.chart import Bars, Grid, Line, Lines, Panels
from glassformer.lens.show.chart_text import chart_text
from glassformer.lens.show.element import Element, el, picture
from glassformer.lens.show.palette import SERIES_ON_EITHER
from glassformer.lens.show.text import shown
from glassformer.spec.errors import InputError

if TYPE_CHECKING:
    from glassformer.training.fit import RateRange


def confusion_chart(confusion: Mapping[str, Table], *, title: str) -> Panels:
    """Return confusion tables side by side: rows are targets, columns predictions, in per cent."""
    if not confusion:
        raise InputError(
            f"nothing can be confused in {title}",
            hint="digits has operations that one can take for another",
        )
    grids = tuple(_confusion(group, table) for group, table in confusion.items())
    head = f"{title}: per cent of each row; n examples at its right"
    return Panels(charts=grids, columns=len(grids), title=head)


def _confusion(group: str, table: Table) -> Grid:
    rows, columns = order(table)
    cells = shares(table)
    return Grid(
        title="",
        values=np.array(cells),
        rows=tuple(rows),
        columns=tuple(columns),
        cells=tuple(tuple(f"{100 * v:.1f}" if v else "·" for v in line) for line in cells),
        notes=tuple(f"{sum(table[name].values()):,}" for name in rows),
        x_title=f"answered as\n({READINGS.get(group, group)})",
        y_title=ROWS.get(group, f"{group} asked"),
    )


#: The drawn losses end this far above the first one: a diverging end would hide the rest.
CEILING = 1.5


def lr_chart(found: "RateRange") -> Lines:
    """Return the smoothed loss over the rate, with the stable range and the suggestion marked."""
    rates, losses = (np.array(each) for each in zip(*found.curve, strict=True))
    below = 0.05 * (losses[0] - losses.min())
    return Lines(
        title="training loss, smoothed",
        lines=(Line(label="", x=rates, y=losses),),
        x_title="learning rate",
        log_x=True,
        y_range=(losses.min() - below, min(1.05 * losses.max(), CEILING * losses[0])),
        band=(found.low, found.high, f"falls from {found.low:.1e} to {found.high:.1e}"),
        rule=(found.suggestion, f"{found.suggestion:.1e}"),
    )


def lr_text(found: "RateRange", *, width: int = 80, unicode: bool = True) -> str:
    """Return the curve as text, with `!` under the suggested rate."""
    chart = lr_chart(found)
    (line,) = chart.lines
    kept = line.y <= CEILING * line.y[0]  # a diverging end would flatten the rest
    drawn = Line(label="loss", x=line.x[kept], y=line.y[kept])
    picture = chart_text(
        replace(chart, lines=(drawn,), y_range=None), width=width, height=10, unicode=unicode
    )
    return f"{picture}\n(loss over the learning rate, on a logarithmic axis; ! is the suggestion)"


#: Colours end at this drift: 5 points of the ratio, or a quarter of the expansion.
MOST_DRIFT = 5.0


def design_chart(answer: Answer) -> Panels:
    """Return the allocation as bars, and the landscape as a grid of layers x d_model."""
    *parts, total = parameter_table(answer.spec)
    bars = Bars(
        title=f"{total.parameters:,} parameters; the target is {answer.best.target:,}",
        names=tuple(f"{part.component} {part.share:.1%}" for part in parts),
        values=tuple(float(part.parameters) for part in parts),
        form=",.0f",
    )
    charts = (bars, landscape_chart(answer.budget))
    return Panels(charts=charts, columns=2, title=str(answer.best))


def landscape_chart(budget: Budget) -> Grid:
    """Return layers x d_model of the best design for each pair of targets, coloured by drift."""
    found = landscape(budget)
    return Grid(
        title="layers x d_model of the best design for each pair of targets",
        values=np.array([[MOST_DRIFT if d is None else drift(d) for d in row] for row in found]),
        rows=tuple(f"{glu:g}" for glu in EXPANSIONS),
        columns=tuple(f"{ratio:.0%}" for ratio in RATIOS),
        high=MOST_DRIFT,
        cells=tuple(
            tuple("-" if d is None else f"{d.sizes.n_layers}x{d.sizes.d_model}" for d in row)
            for row in found
        ),
        key="drift: points of the ratio, or steps of 5% of the expansion",
        x_title="target embedding ratio",
        y_title="target GLU expansion",
        from_bottom=True,
    )


# --- finite-state machines ------------------------------------------------------------------------


RADIUS, SPACE, LOOP, LINE = 33.0, 196.0, 46.0, 15.0
#: An edge bends by this much for each state that it spans.
BEND = 34.0
Point = tuple[float, float]
#: How an edge is drawn.
STROKE: dict[str, object] = {
    "fill": "none",
    "stroke": "currentColor",
    "stroke_width": 1.3,
    "stroke_opacity": ".75",
}


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


def machine_picture(
    machine: Machine, edges: Sequence[Edge], ends: Sequence[float], *, label: str
) -> Element:
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
    return drawing.picture(label)


class _Drawing:
    """The parts of a drawing, and the rectangle that holds them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.parts: list[Element] = []
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
        colour = SERIES_ON_EITHER[self.machine.classes[state] % len(SERIES_ON_EITHER)]
        ring = {"cx": x, "cy": y, "stroke": "currentColor"}
        filled = {"fill": colour, "fill_opacity": ".14", "stroke_width": 1.4}
        self.parts.append(el("circle", r=RADIUS, **ring, **filled))
        if self.machine.ends[state]:
            self.parts.append(el("circle", r=inner, fill="none", stroke_width=1, **ring))
        name = self.machine.class_names[self.machine.classes[state]]
        lines = [el("tspan", str(state), font_size=14, font_weight=600)]
        if name != str(state):
            lines.append(el("tspan", shown(name, most=9), font_size=9))
        if self.machine.ends[state]:
            lines.append(el("tspan", f"end {end:.2f}", font_size=9, fill_opacity=".7"))
        for number, line in enumerate(lines):
            below = y + 4 + 12 * (number - (len(lines) - 1) / 2)
            self.parts.append(el("text", line, x=x, y=below, text_anchor="middle"))

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
            el("path", d=f"M{_pair(begin)} C{_pair(one)} {_pair(two)} {_pair(end)}", **STROKE)
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
            symbol = el("tspan", shown(edge.symbol, most=12), font_weight=700)
            share = el("tspan", f"{edge.probability:.2f}", fill_opacity=".7", dx=6)
            at_y = y + LINE * number
            self.parts.append(el("text", symbol, share, x=x, y=at_y, text_anchor="middle"))
        self._holds(x - width / 2, y - 12)
        self._holds(x + width / 2, y - 12 + height)

    def _curve(self, a: Point, middle: Point, b: Point) -> Point:
        """Draw an arrow, and return the point half-way along it."""
        self.parts.append(el("path", d=f"M{_pair(a)} Q{_pair(middle)} {_pair(b)}", **STROKE))
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
        self.parts.append(el("polygon", points=points, fill="currentColor"))

    def _holds(self, x: float, y: float) -> None:
        self.seen.append((x, y))

    def picture(self, label: str) -> Element:
        """Return the drawing with a margin around everything that was drawn."""
        xs, ys = [x for x, _ in self.seen], [y for _, y in self.seen]
        left, top = min(xs) - 8, min(ys) - 8
        width, height = max(xs) + 8 - left, max(ys) + 8 - top
        look = {"font_family": "ui-monospace, monospace", "font_size": 12, "class_": "machine"}
        made = picture(width, height, label, *self.parts, **look)
        made.props["viewBox"] = f"{left:.0f} {top:.0f} {width:.0f} {height:.0f}"
        return made


def _towards(centre: Point, other: Point) -> Point:
    """Return the point of a state's circle that faces another point."""
    away = math.dist(centre, other)
    return (
        centre[0] + (other[0] - centre[0]) * RADIUS / away,
        centre[1] + (other[1] - centre[1]) * RADIUS / away,
    )


def _pair(point: Point) -> str:
    return f"{point[0]:.1f},{point[1]:.1f}"
