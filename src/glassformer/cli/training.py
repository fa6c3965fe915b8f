"""What `glass train`, `evaluate`, `list` and `lr-find` do: find the run, go, tell what happens."""

import contextlib
import csv
import io
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from glassformer.data.build import build_task
from glassformer.lab import session
from glassformer.lab.evaluate import Evaluation
from glassformer.lab.recipes import RECIPES, named_task, read_config, recipe
from glassformer.lab.record import load_run_spec, spec_hash
from glassformer.lab.run import Alert, Evaluated, Event, Saved, TrainingRun, build_engine
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.presets import PRESETS
from glassformer.spec.train import RunSpec
from glassformer.spec.tree import override
from glassformer.store.rundir import RunDirectory, plain_numbers, run_folder
from glassformer.train.fit import StepRecord
from glassformer.train.lr_find import find_rate

#: Seconds between lines when nobody watches a terminal.
QUIET_SECONDS = 10.0


def run_spec(what: str, overrides: list[str]) -> RunSpec:
    """A recipe by name, or a TOML file, with overrides."""
    if what.endswith((".toml", ".json")):
        return read_config(Path(what), overrides)
    return recipe(what, overrides)


def check_device(device: str) -> None:
    """Refuse a device that is not here."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise MachineError("no CUDA device on this machine", hint="--device cpu")
    if not device.startswith(("cpu", "cuda")):
        raise InputError(f"unknown device '{device}'", hint="cpu or cuda")


def train(
    what: str,
    overrides: list[str],
    *,
    name: str | None,
    runs: Path,
    device: str,
    resume: bool,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Train, watch the signals, print the result; the exit code."""
    check_device(device)
    folder = run_folder(runs, name or Path(what).stem)
    if resume and (folder / "config.json").is_file():
        spec = resumed_spec(folder, what, overrides)
    else:
        spec = run_spec(what, overrides)
    run = TrainingRun(spec, folder, device=device)
    began, code = time.perf_counter(), 0
    with run.directory.locked(), stopping(run) as caught:
        if resume and (folder / "config.json").is_file():
            for note in run.resume():
                tell(note)
        else:
            if resume:
                tell("there is no such run yet: starting at step 0")
            run.prepare(overwrite=overwrite)
        narrator = Narrator(spec.train.steps, start=run.progress.step)
        for event in run.events():
            narrator.see(event)
        narrator.finish()
    if run.stopped:
        tell(f"stopped at step {run.progress.step}, state saved; go on with --resume")
        code = 128 + (caught[0] if caught else signal.SIGINT)
    result = session.result_of(run)
    result["seconds"] = round(time.perf_counter() - began, 2)
    show_result(result, as_json=as_json)
    return code


def resumed_spec(folder: Path, what: str, overrides: list[str]) -> RunSpec:
    """The spec that the run has; only the number of steps may be changed when it goes on."""
    spec = load_run_spec(RunDirectory(folder))
    if what.endswith((".toml", ".json")):
        same = spec_hash(read_config(Path(what))) == spec_hash(spec)
    else:
        same = type(named_task(what)) is type(spec.task)
    if not same:
        raise InputError(
            f"the run {folder.name} is not one of {what}",
            hint="resume it by its own task or config, or start a run of another --name",
        )
    other = [text for text in overrides if not text.startswith("train.steps=")]
    if override(spec, other) != spec:
        changes = [text for text in other if override(spec, [text]) != spec]
        raise InputError(
            f"a resumed run keeps its spec, and {', '.join(changes)} changes it",
            hint="leave it out, or start a run of another --name",
        )
    return override(spec, [text for text in overrides if text.startswith("train.steps=")])


@contextlib.contextmanager
def stopping(run: TrainingRun) -> Iterator[list[int]]:
    """The first signal asks for a stop after the step; the second one ends at once."""
    caught: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        run.stop_requested = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Narrator:
    """Tells a run on stderr: one live line on a terminal, a line now and then elsewhere."""

    def __init__(self, steps: int, *, start: int) -> None:
        self.steps, self.start = steps, start
        self.live = sys.stderr.isatty()
        self.began = self.told = time.perf_counter()
        self.tokens = 0
        self.loss = self.val = float("nan")
        self.rate = 0.0

    def see(self, event: Event) -> None:
        """Take note of what happened, and tell it when it is time."""
        match event:
            case StepRecord():
                self.tokens += event.tokens
                self.loss, self.rate = event.loss, event.lr
                self._tell(event.step)
            case Evaluated():
                self.val = event.evaluation.loss
                if not self.live:
                    self._tell(event.step, now=True)
            case Alert():
                self.clear()
                tell(f"alert at step {event.step}: {event.kind}: {event.message}")
            case Saved():
                pass

    def _tell(self, step: int, *, now: bool = False) -> None:
        moment = time.perf_counter()
        pause = 0.1 if self.live else QUIET_SECONDS
        if not now and moment - self.told < pause and step != self.steps:
            return
        self.told = moment
        passed = max(1e-9, moment - self.began)
        left = passed / max(1, step - self.start) * (self.steps - step)
        line = (
            f"step={step}/{self.steps} loss={self.loss:.4f} val={self.val:.4f} "
            f"lr={self.rate:.2e} tokens/s={self.tokens / passed:,.0f} left={left:.0f}s"
        )
        print(
            f"\r\x1b[2K{line}" if self.live else line,
            end="" if self.live else "\n",
            file=sys.stderr,
            flush=True,
        )

    def clear(self) -> None:
        """Leave the live line before something else is told."""
        if self.live:
            print("\r\x1b[2K", end="", file=sys.stderr)

    def finish(self) -> None:
        """End the live line."""
        if self.live:
            print(file=sys.stderr)


def tell(text: str) -> None:
    """Narration goes to stderr."""
    print(text, file=sys.stderr)


def show_result(result: Mapping[str, Any], *, as_json: bool) -> None:
    """The last line: what was trained, and how well."""
    if as_json:
        print(json.dumps(plain_numbers(result), allow_nan=False))
    else:
        print(" ".join(f"{key}={value}" for key, value in result.items() if value is not None))


# --- evaluate, list, lr-find --------------------------------------------------------------------


def find_run(text: str, runs: Path) -> str:
    """A folder as given, or a name under the runs folder."""
    name = text.partition("@")[0]
    return text if Path(name).exists() else str(runs / text)


def evaluate_run(text: str, *, runs: Path, split: str | None, device: str) -> Evaluation:
    """Measure a run's checkpoint on a split, and leave the result in its eval folder."""
    check_device(device)
    path = find_run(text, runs)
    result = session.evaluate(path, split=split, device=device)
    directory = RunDirectory(Path(path.partition("@")[0]))
    split = result.split
    directory.write_json(f"eval/{split}.json", result.to_dict())
    lines = (json.dumps(error) for error in result.errors)
    directory.write(f"eval/{split}-errors.jsonl", "".join(f"{line}\n" for line in lines))
    for group, table in result.confusion.items():
        directory.write(f"eval/{split}-confusion-{group}.csv", confusion_csv(table))
    return result


def confusion_csv(table: Mapping[str, Mapping[str, int]]) -> str:
    """Rows: what was asked; columns: what was answered."""
    columns = sorted({column for row in table.values() for column in row})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["", *columns])
    for name, row in table.items():
        writer.writerow([name, *(row.get(column, 0) for column in columns)])
    return text.getvalue()


def evaluation_json(evaluation: Evaluation) -> str:
    """The result for scripts; a number that is not finite is a text."""
    return json.dumps(plain_numbers(evaluation.to_dict()), allow_nan=False)


def evaluation_text(evaluation: Evaluation) -> str:
    """The result for people."""
    lines = [
        f"{evaluation.split}: {evaluation.examples:,} examples",
        f"  loss {evaluation.loss:.4f}  accuracy {evaluation.accuracy:.2%}  "
        f"exact match {evaluation.exact_match:.2%}",
    ]
    for head, values in evaluation.heads.items():
        lines.append(f"  {head}: loss {values['loss']:.4f}, accuracy {values['accuracy']:.2%}")
    for name, value in evaluation.oracle.items():
        lines.append(f"  {name} {value:.4f}")
    for group, labels in evaluation.by.items():
        lines.append(f"by {group}")
        for label, share in labels.items():
            count = evaluation.counts[group][label]
            lines.append(f"  {label:<12}{share:>9.2%}  of {count:,}")
    return "\n".join(lines)


def listing(runs: Path) -> dict[str, Any]:
    """Tasks, presets and runs."""
    found = []
    for path in sorted(runs.glob("*/run.json")) if runs.is_dir() else ():
        record = RunDirectory(path.parent).read_json("run.json")
        val = record.get("val") or {}
        found.append(
            {
                "run": path.parent.name,
                "status": record.get("status"),
                "step": record.get("step"),
                "task": record.get("task"),
                "val_loss": val.get("loss"),
                "val_accuracy": val.get("accuracy"),
            }
        )
    return {"tasks": list(RECIPES), "presets": list(PRESETS), "runs": found}


def listing_text(found: dict[str, Any]) -> str:
    """The listing for people."""
    lines = [f"tasks    {', '.join(found['tasks'])}", f"presets  {', '.join(found['presets'])}"]
    for run in found["runs"]:
        loss = run["val_loss"]
        score = ""
        if loss is not None:
            score = f"  val loss {float(loss):.4f}, accuracy {float(run['val_accuracy']):.2%}"
        lines.append(f"run      {run['run']:<20}{run['status']:<10}step {run['step']}{score}")
    return "\n".join(lines)


def lr_find(what: str, overrides: list[str], *, device: str) -> dict[str, Any]:
    """The range test on a model of its own."""
    check_device(device)
    spec = run_spec(what, overrides)
    found = find_rate(build_engine(spec, device=device), build_task(spec.task), spec.train)
    rate = float(f"{found.suggestion:.1e}")
    return {
        "lr": rate,
        "low": found.low,
        "high": found.high,
        "command": f"glass train {what} {' '.join([*overrides, f'train.lr={rate}'])}",
        "curve": [list(point) for point in found.curve],
    }
