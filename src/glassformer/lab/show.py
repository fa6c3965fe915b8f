"""`gf.show`: what a task, a preset, a run or a model is, without training or loading weights.

The settings are TOML that `glass train` reads; the lines of words above them are comments, so that
all of it can be pasted into a config file. A preset and a run need no torch.
"""

import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from glassformer.lab.runs.table import RunTable
from glassformer.lab.runs.table import runs as list_runs
from glassformer.lens.show.outline import counted, model_lines
from glassformer.lens.show.text import cut
from glassformer.spec.disk import small_text
from glassformer.spec.errors import FileError, InputError, nearest
from glassformer.spec.manifest import count_parameters
from glassformer.spec.model import ModelSpec
from glassformer.spec.own import installed_parts, is_source
from glassformer.spec.presets import PRESET_SUMMARIES, PRESETS, preset
from glassformer.spec.program import listing, program
from glassformer.spec.serialize import from_json, override, to_dict
from glassformer.spec.tasks import TASK_SUMMARIES
from glassformer.spec.train import RunSpec, lora_manifest, part_name
from glassformer.store.rundir import RunRef

#: Suites that `glass evaluate --suite NAME` knows, in a line each.
SUITE_SUMMARIES = {
    "smallbench": "eight exams for small language models, with chance",
    "lm-eval": "tasks of lm-evaluation-harness, offline",
}

Kind = Literal["task", "preset", "run", "model"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A model's spec, and of a task or a run the whole run's; it prints as comments and TOML."""

    name: str
    kind: Kind
    about: str
    model: ModelSpec
    run: RunSpec | None = None
    sizes: Mapping[str, int] | None = None

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return count_parameters(self.model)

    def settings(self) -> dict[str, Any]:
        """Return the spec as nested values: of a run, or `{"model": ...}`."""
        return {"model": to_dict(self.model)} if self.run is None else to_dict(self.run)

    def summary(self) -> list[str]:
        """Return a few lines of words: what it is, the model, the data, the training."""
        lines = [f"{self.name}: {self.about}", *model_lines(self.model)]
        if self.sizes is not None:
            splits = ", ".join(f"{count:,} {split}" for split, count in self.sizes.items())
            lines.append(f"data: {splits}")
        if self.run is not None:
            lines += training_lines(self.run)
        return lines

    def toml(self) -> str:
        """Return the settings as TOML; `glass train FILE` reads that of a task or a run."""
        return toml_text(self.settings())

    def text(self) -> str:
        """Return the summary as comments, then the settings."""
        return "\n".join([*(f"# {line}" for line in self.summary()), "", self.toml().rstrip()])

    def operations(self, *, every_block: bool = False) -> str:
        """Return what the model computes, operation by operation; of equal blocks the first."""
        return listing(program(self.model), every_block=every_block)

    def operations_json(self) -> str:
        """Return the same as one JSON object: the operations in order, complete."""
        made = program(self.model)
        ops = [
            {"kind": type(op.kind).__name__, "settings": to_dict(op.kind)}
            | {one.name: getattr(op, one.name) for one in fields(op) if one.name != "kind"}
            for op in made.ops
        ]
        values = {name: {"width": v.width, "rows": v.rows} for name, v in made.values.items()}
        return json.dumps(
            {"name": self.name, "operations": ops, "values": values, "outputs": made.outputs}
        )

    def to_json(self) -> str:
        """Return one JSON object: name, kind, parameters and settings."""
        found = {
            "name": self.name,
            "kind": self.kind,
            "about": self.about,
            "parameters": self.parameters,
            **({} if self.sizes is None else {"data": dict(self.sizes)}),
            "settings": self.settings(),
        }
        return json.dumps(found)

    def __repr__(self) -> str:
        return "\n".join(self.summary())


def show(what: str | Path, *, overrides: Iterable[str] = (), runs: str | Path = "runs") -> Shown:
    """Describe a task, a preset, a run or a model on disk; overrides change its settings.

    A name is looked up as a run or a path first, then as a task, then as a preset.
    """
    name, given = str(what), list(overrides)
    folder = _place(name, Path(runs))
    if folder is not None:
        return _show_folder(name, folder, given)
    if name in TASK_SUMMARIES or name in installed_parts() or is_source(name):
        return _show_task(name, given)
    if name.endswith((".toml", ".json")):
        return _show_task(name, given)
    if name in PRESETS:
        spec = override(preset(name), [text.removeprefix("model.") for text in given])
        return Shown(name=name, kind="preset", about=PRESET_SUMMARIES[name], model=spec)
    known = [*TASK_SUMMARIES, *installed_parts(), *PRESETS]
    raise InputError(
        f"there is no task, preset, run or model '{name[:80]}'",
        hint=nearest(name, known) if name else "glass list names them",
    )


def _place(name: str, runs: Path) -> Path | None:
    """Return the folder or file that a name means, here or among the runs."""
    path = RunRef.parse(name).path
    if not path or path.endswith((".toml", ".json", ".py")):
        return None
    for place in (Path(path), runs / path):
        is_model = place.is_dir() or place.suffix.lower() == ".gguf"
        if is_model and place.exists() and (place != Path(path) or _is_path(path)):
            return place
    return None


def _is_path(path: str) -> bool:
    """True unless a folder only happens to have a task's name, and holds no model."""
    marks = ("run.json", "config.json", "MANIFEST.json")
    known = path in TASK_SUMMARIES or path in PRESETS
    return not known or any((Path(path) / mark).is_file() for mark in marks)


def _show_folder(name: str, folder: Path, overrides: list[str]) -> Shown:
    if (folder / "run.json").is_file() and (folder / "config.json").is_file():
        spec = override(_run_spec(folder), overrides)
        return Shown(name=name, kind="run", about=_run_about(folder), model=spec.model, run=spec)
    if overrides:
        raise InputError("a trained model keeps its settings", hint="leave out the overrides")
    from glassformer.adapters.load import read_model_spec  # imports torch

    model, about = read_model_spec(folder)
    return Shown(name=name, kind="model", about=about, model=model)


def _run_spec(folder: Path) -> RunSpec:
    try:
        return from_json(RunSpec, small_text(folder / "config.json"))
    except (OSError, UnicodeDecodeError, InputError) as error:
        raise FileError(f"config.json is no run's: {error}", where=str(folder)) from error


def _run_about(folder: Path) -> str:
    try:
        record = json.loads(small_text(folder / "run.json"))
        return f"a run of {record['task']}, {record['status']} at step {record['step']:,}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError, FileError):
        return "a run whose record cannot be read"


def _show_task(name: str, overrides: list[str]) -> Shown:
    from glassformer.lab.recipes import planned_run

    plan = planned_run(name, overrides)
    about = TASK_SUMMARIES.get(name) or f"a task of your own, {name}"
    if name.endswith((".toml", ".json")):
        about = "a config of a run"
    sizes = None if plan.task is None else dict(plan.task.sizes())
    return Shown(
        name=name, kind="task", about=about, model=plan.spec.model, run=plan.spec, sizes=sizes
    )


# --- the catalogue --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Everything that has a name here: tasks, presets, suites, and the runs of a folder."""

    tasks: Mapping[str, str]
    presets: Mapping[str, str]
    suites: Mapping[str, str]
    runs: RunTable

    def text(self, *, width: int = 100) -> str:
        """Return a line for each, by group, the newest runs first."""
        groups = {
            "tasks to train (glass train NAME)": self.tasks,
            "presets of models (glass show NAME, glass verify NAME)": self.presets,
            "suites to measure with (glass evaluate MODEL --suite NAME)": self.suites,
        }
        longest = max(len(name) for names in groups.values() for name in names)
        parts = []
        for title, names in groups.items():
            room = max(20, width - longest - 4)
            lines = (f"  {name:<{longest}}  {cut(text, room)}" for name, text in names.items())
            parts.append("\n".join([title, *lines]))
        if self.runs:
            table = "\n".join(f"  {row}" for row in self.runs.text(width=width - 2).split("\n"))
            parts.append(f"runs, the newest first\n{table}")
        else:
            parts.append("no runs yet: glass train reverse makes one, in a minute")
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: names, and the rows of the runs."""
        return {
            "tasks": list(self.tasks),
            "presets": list(self.presets),
            "suites": list(self.suites),
            "about": {k: dict(getattr(self, k)) for k in ("tasks", "presets", "suites")},
            "runs": [{"run": row["id"], **row} for row in self.runs],
        }


def catalogue(runs: str | Path = "runs") -> Catalogue:
    """Collect tasks, presets, suites and runs, without torch."""
    own = {name: f"a part of yours: {source}" for name, source in installed_parts().items()}
    return Catalogue(
        tasks={**TASK_SUMMARIES, **own},
        presets=PRESET_SUMMARIES,
        suites=SUITE_SUMMARIES,
        runs=list_runs(runs),
    )


# --- words ----------------------------------------------------------------------------------------


def training_lines(run: RunSpec) -> list[str]:
    """Return a run's training in a line of words, and what it starts from."""
    train, lines = run.train, []
    batches = "" if train.accumulate == 1 else f" x {train.accumulate}"
    precision = "" if train.precision == "float32" else f", {train.precision}"
    lines.append(
        f"training: {counted(train.steps, 'step')} of {train.batch_size}{batches} examples, "
        f"{part_name(train.optimizer)}, learning rate {train.lr:g}, seed {train.seed}"
        f"{precision}"
    )
    if run.tuning is not None:
        lora = run.tuning.lora
        which = "all of its parameters"
        if lora is not None:
            count = sum(p.size for p in lora_manifest(run.model, lora).values())
            which = f"{count:,} parameters (LoRA of rank {lora.rank})"
        lines.append(f"starts from: {run.tuning.base}; trains {which}")
    return lines


def toml_text(settings: Mapping[str, Any]) -> str:
    """Return nested settings as TOML, without values of None, which TOML cannot say."""
    if importlib.util.find_spec("tomli_w") is None:
        raise InputError("writing TOML needs the library tomli_w", hint="pip install tomli-w")
    import tomli_w

    return tomli_w.dumps(_without_none(settings))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value
