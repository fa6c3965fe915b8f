"""The run that is reported, and the sections about it: settings, curves, samples, files."""

import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.folder.paths import checkpoint_of
from glassformer.adapters.load import load
from glassformer.costs.parameter_table import parameter_table
from glassformer.data.task import Task
from glassformer.lab.api import opened
from glassformer.lab.plots.curves import alerts_text, panels, smoothing_text
from glassformer.lab.runs.artifacts import read_samples
from glassformer.lab.runs.curves import Curves, read_curves
from glassformer.lab.runs.record import load_run_spec, spec_hash
from glassformer.lab.runs.table import duration, number, settings
from glassformer.lens.show.chart import Lines
from glassformer.lens.show.chart_svg import chart_svg
from glassformer.lens.show.html import escape_line, folded
from glassformer.lens.show.outline import model_lines
from glassformer.lens.show.report_page import (
    Cell,
    Text,
    beside,
    facts,
    missing,
    say,
    scrolled,
    table,
)
from glassformer.spec.errors import InputError
from glassformer.spec.train import RunSpec, part_name
from glassformer.spec.units import format_bytes
from glassformer.store.checkpoint import verify_folder
from glassformer.store.rundir import RunDirectory, RunRef
from glassformer.training.engine import Engine

#: Alerts that are listed one by one.
LISTED = 20
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
            ("model", model_lines(model)[0].removeprefix("model: ")),
            ("vocabulary", f"{model.vocab_size:,} tokens, sequences up to {model.max_seq_len:,}"),
            ("output heads", ", ".join(model.head_names())),
            (
                "training",
                f"{train.steps:,} steps of {train.batch_size * train.accumulate} examples",
            ),
            ("learning rate", f"{train.lr:g}, {part_name(train.schedule)}"),
            ("optimizer", part_name(train.optimizer)),
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


def curves(run: Subject) -> Iterator[str]:
    """Training and validation over the steps, with the alerts."""
    made = panels([run.curves], points=POINTS)
    yield beside(_panel(chart) for chart in made)
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


def _panel(chart: Lines) -> str:
    ended = ((line.label, line.last) for line in chart.lines)
    values = (
        f"{name} has no value" if last is None else f"{name} ends at {last:.4g}"
        for name, last in ended
    )
    label = f"{chart.title} over {chart.x_title}: {'; '.join(values)}"
    drawn = chart_svg(chart, label=label).svg()
    return f"<div><h3>{chart.title}</h3>{scrolled(drawn, label=f'curve of {chart.title}')}</div>"


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
