"""A run as the report sees it, and the sections that say what it is: settings, sizes, hashes."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.load import checkpoint_of, load
from glassformer.costs.parameter_table import parameter_table
from glassformer.data.task import Task
from glassformer.lab.api import opened
from glassformer.lab.plots.curves import alerts_text, panels, smoothing_text
from glassformer.lab.runs.curves import Curves, read_curves
from glassformer.lab.runs.record import load_run_spec, spec_hash
from glassformer.lab.runs.samples import read_samples
from glassformer.lens.show.html import escape_line
from glassformer.spec.errors import InputError
from glassformer.spec.train import RunSpec
from glassformer.spec.units import format_bytes
from glassformer.store.checkpoint import verify_folder
from glassformer.store.run_ref import RunRef
from glassformer.store.rundir import RunDirectory
from glassformer.training.engine import Engine
from glassformer.web.pages.run_listing import number, settings
from glassformer.web.report.curves import panels_svg
from glassformer.web.report.page import Text, facts, folded, missing, say, scrolled, table

#: Alerts that are listed one by one.
LISTED = 20


@dataclass(frozen=True)
class Subject:
    """One checkpoint of one run; what costs time is opened when it is asked for, once."""

    path: str
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
        """An object within run.json; empty where there is none."""
        found = self.record.get(name)
        return found if isinstance(found, dict) else {}

    @cached_property
    def spec(self) -> RunSpec:
        """What was asked of the run."""
        return load_run_spec(self.directory)

    @cached_property
    def checkpoint(self) -> Path:
        """The folder of the checkpoint that is reported."""
        if not self.directory.steps():
            raise InputError(
                f"the run {self.name} has no checkpoint: it is too young, or ended before one",
                hint=f"glass report {self.name} --curves draws what it measured",
            )
        return checkpoint_of(self.path)

    @cached_property
    def step(self) -> int:
        """Its step."""
        return int(self.checkpoint.name.removeprefix("step-"))

    @cached_property
    def curves(self) -> Curves:
        """Everything that was measured on the way."""
        return read_curves(self.directory.folder)

    @cached_property
    def adapter(self) -> BaseAdapter:
        """The model, ready to be asked."""
        return load(str(RunRef(str(self.directory.folder), str(self.step)))).eval()

    @cached_property
    def measured(self) -> tuple[Engine, Task]:
        """The checkpoint as an evaluation wants it, and its task."""
        return opened(str(RunRef(str(self.directory.folder), str(self.step))))

    @property
    def task(self) -> Task:
        """The task that was trained on."""
        return self.measured[1]


def lead(run: Subject) -> str:
    """Two sentences at the top."""
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
    return say(f"{text} Last validation: {scores or 'none'}. {shown}", kind="lead")


def _score(name: str, value: Any) -> str:
    return f"{float(value):.4f}" if name == "loss" else f"{float(value):.2%}"


def trained(run: Subject) -> Iterator[str]:
    """What was trained: the model, the task, the way, on what versions."""
    spec, record = run.spec, run.record
    model, train = spec.model, spec.train
    made = run.part("fingerprint")
    folder = run.directory.folder.resolve()  # no more of the path than a command beside it needs
    config = shlex.quote(f"{folder.parent.name}/{folder.name}/config.json")
    yield facts(
        [
            ("task", record.get("task")),
            ("model", _model_text(run)),
            ("vocabulary", f"{model.vocab_size:,} tokens, sequences up to {model.max_seq_len:,}"),
            ("answers by", ", ".join(model.head_names())),
            (
                "training",
                f"{train.steps:,} steps of {train.batch_size * train.accumulate} examples",
            ),
            ("learning rate", f"{train.lr:g}, {type(train.schedule).__name__}"),
            ("optimizer", type(train.optimizer).__name__),
            ("seed, precision", f"{train.seed}, {train.precision}"),
            ("engine", f"{spec.engine} on {made.get('device', 'unknown')}"),
            ("versions", ", ".join(f"{k} {v}" for k, v in made.items() if v and k != "device")),
            ("again", f"glass train {config} --name again"),
        ]
    )
    if spec.tuning is not None:
        yield say(f"Fine-tuned from {spec.tuning.base}; the base is not part of this run.")
    rows = [[row.component, row.parameters, f"{row.share:.2%}"] for row in parameter_table(model)]
    yield table(["component", "parameters", "share"], rows, caption="where the parameters are")
    every = sorted(settings(run.directory.folder).items())
    lines = [[name, Text("" if value is None else str(value))] for name, value in every]
    yield folded("every setting", table(["setting", "value"], lines, caption="config.json"))


def _model_text(run: Subject) -> str:
    model = run.spec.model
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    parts = []
    for name, stack in stacks.items():
        if stack is not None:
            block = next(iter(stack.blocks()))
            heads = block.attention.n_heads
            parts.append(f"{name} {stack.n_layers} layers x {heads} heads")
    return f"{', '.join(parts)}, d_model {model.d_model}"


def curves(run: Subject) -> Iterator[str]:
    """Training and validation over the steps, with the alerts."""
    made = panels([run.curves])
    for panel, svg in zip(made, panels_svg(made, [run.curves]), strict=True):
        yield f"<h3>{panel.title}</h3>"
        yield scrolled(svg, label=f"curve of {panel.title}")
    if text := smoothing_text(made):
        yield say(f"The faint line is every step as it was; {text}.", kind="note")
    if len(run.spec.model.head_names()) > 1:
        yield say(
            "The losses are the first head's; all heads together are `objective`.", kind="note"
        )
    alerts = run.curves.alerts
    if not alerts:
        yield say("No alert: no spike, no step that could not be applied.")
        return
    yield say(f"Alerts, the triangles on the curve: {alerts_text([run.curves])}.")
    rows = [[alert.step, Text(alert.kind), Text(alert.message)] for alert in alerts[:LISTED]]
    more = f" (the first {LISTED} of {len(alerts)})" if len(alerts) > LISTED else ""
    yield table(["step", "kind", "what"], rows, caption=f"alerts{more}")


def written(run: Subject) -> Iterator[str]:
    """The last continuations of a language model; nothing for other runs."""
    files = sorted((run.directory.folder / "samples").glob("step-*.jsonl"))
    if not files:
        return
    yield say(f"Held-out openings and how the model went on, at {files[-1].stem}.")
    for sample in read_samples(files[-1]):
        yield f"<pre>{_kept(sample.opening)}<strong>{_kept(sample.text)}</strong></pre>"


def _kept(text: str) -> str:
    """Inert, with its line breaks; other control characters are blanks."""
    return "\n".join(escape_line(line) for line in str(text).split("\n"))


def files(run: Subject) -> Iterator[str]:
    """Sizes and hashes: of the checkpoint, checked now, and of what the run says of its data."""
    manifest = verify_folder(run.checkpoint)["files"]
    rows = [
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
        yield missing("The run says no hash of its data.")
