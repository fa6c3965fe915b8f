"""What `glass train`, `evaluate`, `list` and `lr-find` do: find the run, go, tell what happens."""

import contextlib
import json
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from glassformer.cli.heap import keep_freed_memory
from glassformer.cli.narrator import Narrator, tell
from glassformer.cli.suites import SUITES
from glassformer.lab import session
from glassformer.lab.assemble import assemble
from glassformer.lab.confusion import confusion_csv, confusion_text
from glassformer.lab.evaluate import Evaluation
from glassformer.lab.finetune import NAME as FINETUNE
from glassformer.lab.finetune import spelled_out
from glassformer.lab.recipes import RECIPES, kind_of, read_config, recipe
from glassformer.lab.record import load_run_spec, spec_hash
from glassformer.lab.run import TrainingRun
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.presets import PRESETS
from glassformer.spec.train import RunSpec
from glassformer.spec.tree import override
from glassformer.store.rundir import RunDirectory, cache_folder, plain_numbers, run_folder
from glassformer.train.lr_find import RateRange, find_rate


def run_spec(what: str, overrides: list[str], *, cache: Path | None = None) -> RunSpec:
    """A recipe by name, or a TOML file, with overrides."""
    if what.endswith((".toml", ".json")):
        return read_config(Path(what), overrides)
    return recipe(what, overrides, cache=cache)


def found_base(overrides: list[str], runs: Path) -> list[str]:
    """`base=NAME` means a folder, else the run of that name."""
    made = []
    for text in overrides:
        key, _, value = text.partition("=")
        name = value.partition("@")[0]
        named = key == "base" and name and not Path(name).exists() and (runs / name).exists()
        made.append(f"base={runs / value}" if named else text)
    return made


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
    keep_freed_memory()
    overrides = found_base(overrides, runs) if what == FINETUNE else overrides
    folder = run_folder(runs, name or Path(what).stem)
    if resume and (folder / "config.json").is_file():
        spec = resumed_spec(folder, what, overrides)
    else:
        spec = run_spec(what, overrides, cache=cache_folder(runs))
    run = TrainingRun(spec, folder, device=device)
    for note in run.notes:
        tell(note)
    began, code = time.perf_counter(), 0
    with run.directory.locked(), stopping(run) as caught:
        if resume and (folder / "config.json").is_file():
            for note in run.resume():
                tell(note)
        else:
            if resume:
                tell("there is no such run yet: starting at step 0")
            run.prepare(overwrite=overwrite)
        follow(run)
    if run.stopped:
        tell(f"stopped at step {run.progress.step}, state saved; go on with --resume")
        code = 128 + (caught[0] if caught else signal.SIGINT)
    result = session.result_of(run)
    result["seconds"] = round(time.perf_counter() - began, 2)
    show_result(result, as_json=as_json)
    return code


def follow(run: TrainingRun) -> None:
    """Train to the end or to a stop, telling how it goes."""
    title, steps = run.directory.folder.name, run.spec.train.steps
    with Narrator(title, steps=steps, start=run.progress.step) as narrator:
        for event in run.events():
            narrator.see(event)


def resumed_spec(folder: Path, what: str, overrides: list[str]) -> RunSpec:
    """The spec that the run has; only the number of steps may be changed when it goes on."""
    spec = load_run_spec(RunDirectory(folder))
    if what.endswith((".toml", ".json")):
        same = spec_hash(read_config(Path(what))) == spec_hash(spec)
    else:
        same = kind_of(what) is type(spec.task)
        overrides = spelled_out(overrides) if what == FINETUNE else overrides
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


def evaluation_json(evaluation: Evaluation) -> str:
    """The result for scripts; a number that is not finite is a text."""
    return json.dumps(plain_numbers(evaluation.to_dict()), allow_nan=False)


def evaluation_text(evaluation: Evaluation, *, width: int = 80) -> str:
    """The result for people, no wider than their terminal."""
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
    lines += decoded_lines(evaluation.decoded)
    for group, table in evaluation.confusion.items():
        lines += ["", confusion_text(group, table, width=width)]
    return "\n".join(lines)


def decoded_lines(decoded: Mapping[str, Any]) -> list[str]:
    """The answers that the model gave on its own; nothing where it was not asked."""
    if not decoded:
        return []
    scores = {"chrf": "chrF", "bleu": "BLEU"}
    told = "".join(f"  {scores[key]} {decoded[key]:.2f}" for key in scores if key in decoded)
    lines = ["decoded, from the source alone", f"  exact match {decoded['exact_match']:.2%}{told}"]
    for group, labels in decoded["by"].items():
        shares = ", ".join(f"{label} {share:.1%}" for label, share in labels.items())
        lines.append(f"  by {group}: {shares}")
    return lines


def listing(runs: Path) -> dict[str, Any]:
    """Tasks, presets, suites and runs."""
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
    tasks = [*RECIPES, FINETUNE]
    return {"tasks": tasks, "presets": list(PRESETS), "suites": list(SUITES), "runs": found}


def listing_text(found: dict[str, Any]) -> str:
    """The listing for people."""
    lines = [f"{kind:<9}{', '.join(found[kind])}" for kind in ("tasks", "presets", "suites")]
    for run in found["runs"]:
        loss = run["val_loss"]
        score = ""
        if loss is not None:
            score = f"  val loss {float(loss):.4f}, accuracy {float(run['val_accuracy']):.2%}"
        lines.append(f"run      {run['run']:<20}{run['status']:<10}step {run['step']}{score}")
    return "\n".join(lines)


def lr_find(what: str, overrides: list[str], *, device: str) -> RateRange:
    """The range test on a model of its own."""
    check_device(device)
    spec = run_spec(what, overrides)
    parts = assemble(spec, device=device)
    return find_rate(parts.engine, parts.task, spec.train)


def lr_json(found: RateRange, what: str, overrides: list[str]) -> dict[str, Any]:
    """The rate, its range, the command to paste, and the curve."""
    rate = float(f"{found.suggestion:.1e}")
    return {
        "lr": rate,
        "low": found.low,
        "high": found.high,
        "command": f"glass train {what} {' '.join([*overrides, f'train.lr={rate}'])}",
        "curve": [list(point) for point in found.curve],
    }
