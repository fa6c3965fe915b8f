"""The run that is reported, and the sections about it: settings, curves, samples, files."""

import math
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.folder.paths import checkpoint_of
from glassformer.adapters.load import load
from glassformer.costs.parameter_table import parameter_table
from glassformer.data.task import Task
from glassformer.lab.api import opened
from glassformer.lab.plots.curves import (
    X_TITLES,
    Drawn,
    Panel,
    alerts_text,
    apart,
    panels,
    smoothing_text,
)
from glassformer.lab.runs.artifacts import read_samples
from glassformer.lab.runs.curves import Curves, read_curves
from glassformer.lab.runs.metrics_file import Floats
from glassformer.lab.runs.record import load_run_spec, spec_hash
from glassformer.lab.runs.table import duration, number, settings
from glassformer.lens.show.html import escape_line
from glassformer.lens.show.outline import counted
from glassformer.lens.show.report_page import (
    Cell,
    Text,
    beside,
    facts,
    folded,
    missing,
    say,
    scrolled,
    table,
)
from glassformer.spec.errors import InputError
from glassformer.spec.train import RunSpec, optimizer_name
from glassformer.spec.units import format_bytes
from glassformer.store.checkpoint import verify_folder
from glassformer.store.rundir import RunDirectory, RunRef
from glassformer.training.engine import Engine

#: Alerts that are listed one by one.
LISTED = 20
#: The size and margins of a curve in pixels.
WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 100, 14, 40
DASHES = ("", "7 3", "2 3", "9 3 2 3")
#: Points of a drawn line; an SVG keeps them all.
POINTS = 600


@dataclass(frozen=True)
class Subject:
    """One checkpoint of one run; what takes time is loaded on first use."""

    path: str
    device: str = "cpu"
    memory: dict[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def directory(self) -> RunDirectory:
        """The files of the run."""
        return RunRef.parse(self.path).directory

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.directory.folder.resolve().name

    @cached_property
    def record(self) -> dict[str, Any]:
        """run.json."""
        return self.directory.read_json("run.json")

    def part(self, name: str) -> dict[str, Any]:
        """Return an object within run.json; empty if there is none."""
        found = self.record.get(name)
        return found if isinstance(found, dict) else {}

    @cached_property
    def spec(self) -> RunSpec:
        """The run's spec."""
        return load_run_spec(self.directory)

    @cached_property
    def checkpoint(self) -> Path:
        """The folder of the reported checkpoint."""
        if not self.directory.steps():
            raise InputError(
                f"the run {self.name} has no checkpoint: it has not saved one yet, or ended before",
                hint=f"glass report {self.name} --curves draws its metrics",
            )
        return checkpoint_of(self.path)

    @cached_property
    def step(self) -> int:
        """The checkpoint's step."""
        return int(self.checkpoint.name.removeprefix("step-"))

    @cached_property
    def curves(self) -> Curves:
        """Everything that was measured during training."""
        return read_curves(self.directory.folder)

    @cached_property
    def adapter(self) -> BaseAdapter:
        """The model, in eval mode."""
        ref = RunRef(str(self.directory.folder), str(self.step))
        return load(str(ref), device=self.device).eval()

    @cached_property
    def measured(self) -> tuple[Engine, Task]:
        """The checkpoint as an engine for evaluation, and its task."""
        ref = RunRef(str(self.directory.folder), str(self.step))
        return opened(str(ref), device=self.device)

    @property
    def task(self) -> Task:
        """The task that was trained on."""
        return self.measured[1]


def lead(run: Subject) -> str:
    """Return the two sentences at the top."""
    record, val = run.record, run.part("val")
    model = run.spec.model
    layers = "" if model.encoder is None else f"{model.encoder.n_layers} + "
    size = f"{layers}{model.n_layers} layers, {parameter_table(model)[-1].parameters:,} parameters"
    text = f"{record.get('task')}, {size}; {record.get('status')} at step {record.get('step')}."
    scores = ", ".join(
        f"{name.replace('_', ' ')} {_score(name, val[name])}"
        for name in ("loss", "accuracy", "exact_match")
        if number(val.get(name)) is not None
    )
    shown = f"This report is of the checkpoint of step {run.step}."
    return say(f"{text} Last validation: {scores or 'none'}. {shown} {_when(run)}", kind="lead")


def _when(run: Subject) -> str:
    """Return how long it trained and when it ended; an older run's time is that of its steps."""
    clock = run.part("clock")
    seconds, at = number(clock.get("seconds")), number(clock.get("at"))
    spent = run.curves.spent.seconds if seconds is None else seconds
    moment = (run.directory.folder / "run.json").stat().st_mtime if at is None else at
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
    return f"It trained for {duration(spent)}, until {day}."


def _score(name: str, value: Any) -> str:
    return f"{float(value):.4f}" if name == "loss" else f"{float(value):.2%}"


def trained(run: Subject) -> Iterator[str]:
    """Describe what was trained: the model, the task, the settings, the versions."""
    spec, record = run.spec, run.record
    model, train = spec.model, spec.train
    made = run.part("fingerprint")
    folder = run.directory.folder.resolve()  # only as much of the path as a command needs
    config = shlex.quote(f"{folder.parent.name}/{folder.name}/config.json")
    told = facts(
        [
            ("task", record.get("task")),
            ("model", _model_text(run)),
            ("vocabulary", f"{model.vocab_size:,} tokens, sequences up to {model.max_seq_len:,}"),
            ("output heads", ", ".join(model.head_names())),
            (
                "training",
                f"{train.steps:,} steps of {train.batch_size * train.accumulate} examples",
            ),
            ("learning rate", f"{train.lr:g}, {type(train.schedule).__name__}"),
            ("optimizer", optimizer_name(train.optimizer)),
            ("seed, precision", f"{train.seed}, {train.precision}"),
            ("engine", f"{spec.engine} on {made.get('device', 'unknown')}"),
            ("versions", ", ".join(f"{k} {v}" for k, v in made.items() if v and k != "device")),
            ("repeat with", f"glass train {config} --name again"),
        ]
    )
    rows: list[list[Cell]] = [
        [row.component, row.parameters, f"{row.share:.2%}"] for row in parameter_table(model)
    ]
    heading = ["component", "parameters", "share"]
    yield beside([told, table(heading, rows, caption="where the parameters are")])
    if spec.tuning is not None:
        yield say(f"Fine-tuned from {spec.tuning.base}; the base is not part of this run.")
    every = sorted(settings(run.directory.folder).items())
    lines: list[list[Cell]] = [
        [name, Text("" if value is None else str(value))] for name, value in every
    ]
    yield folded("every setting", table(["setting", "value"], lines, caption="config.json"))


def _model_text(run: Subject) -> str:
    model = run.spec.model
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    parts = []
    for name, stack in stacks.items():
        if stack is not None:
            block = next(iter(stack.blocks()))
            heads = block.attention.n_heads
            parts.append(f"{name} {counted(stack.n_layers, 'layer')} x {heads} heads")
    return f"{', '.join(parts)}, d_model {model.d_model}"


def curves(run: Subject) -> Iterator[str]:
    """Training and validation over the steps, with the alerts."""
    made = panels([run.curves])
    yield beside(
        f"<div><h3>{panel.title}</h3>{scrolled(svg, label=f'curve of {panel.title}')}</div>"
        for panel, svg in zip(made, panels_svg(made, [run.curves]), strict=True)
    )
    if text := smoothing_text(made):
        yield say(f"The faint line is every step, not smoothed; {text}.", kind="note")
    if len(run.spec.model.head_names()) > 1:
        yield say(
            "The losses are the first output head's; all heads together are `objective`.",
            kind="note",
        )
    alerts = run.curves.alerts
    if not alerts:
        yield say("No alert: no spike, no step that could not be applied.")
        return
    yield say(f"Alerts, the triangles on the curve: {alerts_text([run.curves])}.")
    rows: list[list[Cell]] = [
        [alert.step, Text(alert.kind), Text(alert.message)] for alert in alerts[:LISTED]
    ]
    more = f" (the first {LISTED} of {len(alerts)})" if len(alerts) > LISTED else ""
    yield table(["step", "kind", "what"], rows, caption=f"alerts{more}")


def written(run: Subject) -> Iterator[str]:
    """The last samples of a language model; nothing for other runs."""
    files = sorted((run.directory.folder / "samples").glob("step-*.jsonl"))
    if not files:
        return
    yield say(f"Held-out prompts and how the model continued them, at {files[-1].stem}.")
    for sample in read_samples(files[-1]):
        yield f"<pre>{_kept(sample.opening)}<strong>{_kept(sample.text)}</strong></pre>"


def _kept(text: str) -> str:
    """Escape a text and keep its line breaks; other control characters become blanks."""
    return "\n".join(escape_line(line) for line in str(text).split("\n"))


def files(run: Subject) -> Iterator[str]:
    """Sizes and hashes: of the checkpoint, checked now, and of the data as recorded by the run."""
    manifest = verify_folder(run.checkpoint)["files"]
    rows: list[list[Cell]] = [
        [name, Text(format_bytes(entry["bytes"])), Text(entry["sha256"], kind="mono")]
        for name, entry in sorted(manifest.items())
    ]
    total = format_bytes(sum(entry["bytes"] for entry in manifest.values()))
    yield table(
        ["file", "size", "SHA-256"],
        rows,
        caption=f"{run.checkpoint.name}: {len(rows)} files, {total}, every hash checked",
    )
    data = run.part("data")
    pairs = [("spec", spec_hash(run.spec))]
    pairs += [("data", str(data["sha256"]))] if "sha256" in data else []
    pairs.append(("report by", f"glassformer {version('glassformer')}"))
    yield facts(pairs)
    if "sha256" not in data:
        yield missing("The run records no hash of its data.")


# --- curves as SVG, coloured by the page: light, dark and on paper --------------------------------


def panels_svg(made: Sequence[Panel], curves: Sequence[Curves], *, axis: str = "step") -> list[str]:
    """Return one SVG per panel, all with the same x range."""
    xs = [line.raw.x(axis) for panel in made for line in panel.lines]
    x_range = _range(np.concatenate(xs))
    return [_panel_svg(panel, curves, axis, x_range) for panel in made]


def _panel_svg(
    panel: Panel, curves: Sequence[Curves], axis: str, x_range: tuple[float, float]
) -> str:
    """Return faint raw points, the smoothed line, alerts as triangles, names at the ends."""
    frame = Frame(panel, x_range)
    label = f"{panel.title} over {X_TITLES[axis]}: " + "; ".join(map(_ended, panel.lines))
    out = [
        f'<svg role="img" aria-label="{escape_line(label)}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-size="11" fill="currentColor">'
    ]
    out += _grid(frame, panel, axis)
    ends = []
    for index, line in enumerate(panel.lines):
        out += _line(frame, line, index, axis)
        shown = line.smooth or line.raw
        placed = [value for value in shown.value.tolist() if frame.drawable(value)]
        if placed:
            y = frame.y(placed[-1])
            share = 1 - (y - TOP) / (HEIGHT - TOP - BOTTOM)
            ends.append((share, line.label, f"var(--series-{index % 4 + 1})"))
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
    """The mapping from values to pixels."""

    def __init__(self, panel: Panel, x_range: tuple[float, float]) -> None:
        self.log = panel.log
        ys = np.concatenate([line.raw.value for line in panel.lines])
        ys = ys[np.isfinite(ys) & ((ys > 0) | (not panel.log))]
        self.x_range = x_range
        self.y_range = (0.0, 1.0) if panel.share and not panel.log else _range(self._scaled(ys))

    def x(self, value: float) -> float:
        """Return pixels from the left."""
        low, high = self.x_range
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return pixels from the top."""
        low, high = self.y_range
        scaled = math.log10(value) if self.log else value
        return TOP + (1 - (scaled - low) / (high - low)) * (HEIGHT - TOP - BOTTOM)

    def drawable(self, value: float) -> bool:
        """Return True if a value can be drawn on this axis."""
        return math.isfinite(value) and (value > 0 or not self.log)

    def y_ticks(self) -> list[float]:
        """Return the values of the horizontal grid lines."""
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
    """Return round values inside the range: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _range(values: Floats) -> tuple[float, float]:
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    around = max(0.5, 1e-9 * abs(low))  # at 2^62 a half is lost to rounding
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


def _line(frame: Frame, line: Drawn, index: int, axis: str) -> list[str]:
    colour = f"stroke:var(--series-{index % 4 + 1})"
    out, raw = [], line.raw.thinned(POINTS)
    if line.smooth is not None:
        path = _path(frame, raw.x(axis).tolist(), raw.value.tolist())
        out.append(f'<path d="{path}" fill="none" style="{colour}" stroke-opacity=".35"/>')
    shown = raw if line.smooth is None else line.smooth.thinned(POINTS)
    dash = DASHES[index % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    path = _path(frame, shown.x(axis).tolist(), shown.value.tolist())
    out.append(f'<path d="{path}" fill="none" style="{colour}" stroke-width="1.8"{dashed}/>')
    if line.smooth is None and len(raw) <= 60:
        for x, y in zip(raw.x(axis).tolist(), raw.value.tolist(), strict=True):
            if frame.drawable(y):
                place = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}"'
                out.append(f'<circle {place} r="2.4" style="fill:var(--series-{index % 4 + 1})"/>')
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
