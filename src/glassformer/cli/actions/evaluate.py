"""Run `glass evaluate`: measure a run on its own task, or any model on a suite.

The result on a run's own task is kept in the run's eval folder; so is SmallBench's. Options that
only another suite takes are refused.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glassformer.adapters.load import load_native
from glassformer.adapters.native import NativeAdapter
from glassformer.cli.shell import terminal
from glassformer.cli.shell.output import end, ending_of, target_of, write_file
from glassformer.cli.shell.process import check_device
from glassformer.kernels.threads import taking
from glassformer.lab import api
from glassformer.lab.measure.evaluate import Evaluation, confusion_rows, rows_csv
from glassformer.lab.next_steps import after_evaluation
from glassformer.lab.plots.figures import confusion_figure
from glassformer.lab.runs.process import check_threads, threads_of_decoding
from glassformer.lab.smallbench.question import examinee_of
from glassformer.lab.smallbench.suite import ITEMS, smallbench
from glassformer.lens.show.mpl import figure_bytes
from glassformer.spec.errors import InputError, nearest
from glassformer.store.rundir import RunDirectory, RunRef

#: Formats of the confusion table.
ENDINGS = ("png", "svg", "csv")


def evaluate_run(
    path: str,
    *,
    split: str | None,
    out: str | None,
    device: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure a run's checkpoint, print the result, and write it and the requested figure."""
    device = check_device(device)
    target = target_of(out, ENDINGS)
    result = api.evaluate(path, split=split, device=device, threads=threads, write=True)
    print(result.to_json() if as_json else result.text(width=terminal.columns()))
    if target is not None:
        _save_confusion(result, target, title=f"{path}, {result.split}")
    if not as_json:
        ref = RunRef.parse(path)
        end(f"{ref.folder}/eval/{result.split}.json", after_evaluation(path))


def _save_confusion(evaluation: Evaluation, path: Path, *, title: str) -> None:
    """Write the tables of an evaluation as a figure, or every cell as CSV."""
    ending = ending_of(path, ENDINGS)
    figure = confusion_figure(evaluation.confusion, title=title)  # refuses where there is none
    if ending == "csv":
        write_file(path, rows_csv(confusion_rows(evaluation.confusion)).encode())
    else:
        write_file(path, figure_bytes(figure, ending))


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The options of the command that a suite may take."""

    tasks: tuple[str, ...] = ()
    tasks_dir: Path | None = None
    limit: int | None = None
    items: int | None = None
    seed: int | None = None
    device: str = "cpu"
    threads: int | None = None

    def refuse(self, suite: str, *options: str) -> None:
        """Refuse options that only another suite takes, instead of ignoring them."""
        for option in options:
            if getattr(self, option) is not None:
                spelled = f"--{option.replace('_', '-')}"
                raise InputError(f"{spelled} is no option of {suite}", hint=f"leave out {spelled}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A suite's result, for scripts and for people."""

    data: Mapping[str, Any]
    text: str


def run_suite(name: str, path: str, asked: Asked, *, as_json: bool) -> None:
    """Run the suite of that name on the model at a path, and print its result."""
    if name not in SUITES:
        raise InputError(f"no suite '{name}'", hint=nearest(name, SUITES))
    check_threads(asked.threads)
    outcome = SUITES[name](path, replace(asked, device=check_device(asked.device)))
    print(json.dumps(outcome.data) if as_json else outcome.text)


def harness(path: str, asked: Asked) -> Outcome:
    """Run lm-evaluation-harness offline: data sets come from files or from the local cache."""
    asked.refuse("lm-eval", "items", "seed")
    # Its libraries read these when they are imported.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")
    from glassformer.lab.measure.lm_eval import run_harness

    adapter = load_native(path, device=asked.device)
    with _threads(adapter, asked):
        data = run_harness(adapter, asked.tasks, tasks_dir=asked.tasks_dir, limit=asked.limit)
    lines = []
    for task, metrics in data["tasks"].items():
        lines.append(f"{task}: {data['examples'].get(task, '?')} examples")
        lines += [f"  {name:<24}{value:.4f}" for name, value in metrics.items()]
    return Outcome(data, "\n".join(lines))


def small(path: str, asked: Asked) -> Outcome:
    """Run SmallBench; the result on a run is kept in its eval folder."""
    asked.refuse("smallbench", "tasks_dir", "limit")
    adapter = load_native(path, device=asked.device)
    folder = RunRef.parse(path).folder
    examinee = examinee_of(adapter.model, adapter.tokenizer, name=folder.name)
    with _threads(adapter, asked):
        result = smallbench(
            examinee,
            items=ITEMS if asked.items is None else asked.items,
            seed=asked.seed or 0,
            only=asked.tasks or None,
        )
    if (folder / "run.json").is_file():
        RunDirectory(folder).write_json("eval/smallbench.json", result.to_dict())
    return Outcome(result.to_dict(), result.table())


def _threads(adapter: NativeAdapter, asked: Asked) -> contextlib.AbstractContextManager[None]:
    return taking(threads_of_decoding(adapter.spec, asked=asked.threads, device=asked.device))


SUITES: dict[str, Callable[[str, Asked], Outcome]] = {"smallbench": small, "lm-eval": harness}
