"""`glass evaluate`: a run on its own task's held-out examples, or any model on a suite.

The result on a run's own task is kept in the run's eval folder; so is SmallBench's. Options that
only another suite takes are refused.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glassformer.cli.shell import resolve
from glassformer.cli.shell.options import (
    AsJson,
    Backend,
    Device,
    Runs,
    Threads,
    complete_runs,
    out_file,
)
from glassformer.cli.shell.process import check_device, load_by
from glassformer.cli.shell.terminal import columns, end, ending_of, target_of, write_file
from glassformer.kernels.threads import (
    check_threads,
    one_blas_thread,
    taking,
    threads_of_decoding,
)
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.options import option

if TYPE_CHECKING:
    from glassformer.adapters.base import BaseAdapter
    from glassformer.lab.measure.evaluate import Evaluation
    from glassformer.store.rundir import RunRef

#: Splits that nearly every task has: a task is built to find out about others.
USUAL_SPLITS = ("train", "val", "test")
#: Formats of the confusion table.
ENDINGS = ("png", "svg", "pdf", "csv")


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteOptions:
    """What a suite may take, and how the model is computed."""

    tasks: str | None = option(None, metavar="A,B", help="Some of the suite's tasks, with commas.")
    tasks_dir: str | None = option(None, metavar="FOLDER", help="A folder of lm-eval's YAML tasks.")
    limit: int | None = option(None, help="lm-eval: maximum number of examples of a task.")
    items: int | None = option(None, help="smallbench: questions of each exam, in whole groups.")
    seed: int | None = option(None, help="smallbench: the seed that draws the questions.")
    backend: Backend = "native"
    device: Device = "cpu"
    threads: Threads = None

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks by name."""
        return tuple(filter(None, (self.tasks or "").split(",")))

    def refuse(self, suite: str, *options: str) -> None:
        """Refuse options that only another suite takes, instead of ignoring them."""
        for each in options:
            if getattr(self, each) is not None:
                spelled = f"--{each.replace('_', '-')}"
                raise InputError(f"{spelled} is no option of {suite}", hint=f"leave out {spelled}")


def evaluate(
    run: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run, RUN@last, RUN@120; with a suite any model.",
            autocompletion=complete_runs,
        ),
    ],
    split: str | None = option(
        None, help="test (the default), val, train, or another of the task's."
    ),
    suite: str | None = option(None, metavar="NAME", help="smallbench or lm-eval."),
    *,
    options: SuiteOptions,
    out: Annotated[
        str | None, out_file("Write the confusion matrix, as .png, .svg, .pdf or .csv.")
    ] = None,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Measure a run on held-out examples, or any model on a suite.

    By group, and against the truth where it is known. Examples:

      glass evaluate reverse

      glass evaluate digits -o confusion.png

      glass evaluate lm --suite smallbench

      glass evaluate Qwen/Qwen3-0.6B --suite lm-eval --tasks-dir my_tasks --tasks my_task
    """
    place = Path(runs)
    if suite is None:
        of_suites = ("tasks", "tasks_dir", "limit", "items", "seed")
        if any(getattr(options, each) is not None for each in of_suites):
            raise InputError(
                "--tasks, --tasks-dir, --limit, --items and --seed are a suite's",
                hint="--suite smallbench, or --suite lm-eval",
            )
        if options.backend != "native":
            raise InputError("--backend is a suite's", hint="--suite smallbench, or lm-eval")
        path = resolve.find_run(run, place)
        one_blas_thread()
        _evaluate_run(path, options, split=split, out=out, as_json=as_json)
        return
    if split is not None or out is not None:
        raise InputError("--split and -o are of a run's own task", hint="leave out --suite")
    path = resolve.find_model(run, runs=place)
    if suite not in SUITES:
        raise InputError(f"no suite '{suite}'", hint=nearest(suite, SUITES))
    check_threads(options.threads)
    data, text = SUITES[suite](path, replace(options, device=check_device(options.device)))
    print(json.dumps(data) if as_json else text)


def _evaluate_run(
    path: str, options: SuiteOptions, *, split: str | None, out: str | None, as_json: bool
) -> None:
    """Measure a run's checkpoint, print the result, and write it and the requested figure."""
    from glassformer.store.rundir import RunRef

    device, target = check_device(options.device), target_of(out, ENDINGS)
    if split is not None:
        _check_split(split, RunRef.parse(path))
    from glassformer.lab import api  # imports torch
    from glassformer.lab.next_steps import after_evaluation

    result = api.evaluate(path, split=split, device=device, threads=options.threads, write=True)
    print(result.to_json() if as_json else result.text(width=columns()))
    if target is not None:
        _save_confusion(result, target, title=f"{path}, {result.split}")
    if not as_json:
        ref = RunRef.parse(path)
        end(f"{ref.folder}/eval/{result.split}.json", after_evaluation(path))


def _check_split(split: str, ref: "RunRef") -> None:
    """Refuse a split that the run's task does not have, where that is known without its base."""
    from glassformer.data.task import check_split
    from glassformer.lab.corpus import built
    from glassformer.lab.runs.record import load_run_spec
    from glassformer.store.rundir import cache_folder

    spec = load_run_spec(ref.directory)
    if split in USUAL_SPLITS or spec.tuning is not None:
        return
    cache = cache_folder(ref.folder.parent)
    check_split(split, built(spec.task, cache=cache if cache.is_dir() else None).sizes())


def _save_confusion(evaluation: "Evaluation", path: Path, *, title: str) -> None:
    """Write the tables of an evaluation as a figure, or every cell as CSV."""
    from glassformer.lab.measure.evaluate import confusion_rows, rows_csv
    from glassformer.lab.plots.figures import confusion_chart
    from glassformer.lens.show.chart_figure import figure_bytes

    ending = ending_of(path, ENDINGS)
    drawn = confusion_chart(evaluation.confusion, title=title)  # refuses where there is none
    if ending == "csv":
        write_file(path, rows_csv(confusion_rows(evaluation.confusion)).encode())
    else:
        write_file(path, figure_bytes(drawn, ending))


#: A suite's result, for scripts and for people.
Outcome = tuple[Mapping[str, Any], str]


def _harness(path: str, options: SuiteOptions) -> Outcome:
    """Run lm-evaluation-harness offline: data sets come from files or from the local cache."""
    options.refuse("lm-eval", "items", "seed")
    # Its libraries read these when they are imported.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")
    from glassformer.lab.measure.scores import run_harness

    adapter = load_by(path, options.backend, device=options.device)
    with _threads(adapter, options):
        folder = None if options.tasks_dir is None else Path(options.tasks_dir)
        data = run_harness(adapter, options.names, tasks_dir=folder, limit=options.limit)
    lines = []
    for task, metrics in data["tasks"].items():
        lines.append(f"{task}: {data['examples'].get(task, '?')} examples")
        lines += [f"  {name:<24}{value:.4f}" for name, value in metrics.items()]
    return data, "\n".join(lines)


def _small(path: str, options: SuiteOptions) -> Outcome:
    """Run SmallBench; the result on a run is kept in its eval folder."""
    from glassformer.lab.smallbench.question import examinee_of
    from glassformer.lab.smallbench.suite import ITEMS, smallbench
    from glassformer.store.rundir import RunDirectory, RunRef

    options.refuse("smallbench", "tasks_dir", "limit")
    adapter = load_by(path, options.backend, device=options.device)
    folder = RunRef.parse(path).folder
    examinee = examinee_of(adapter, adapter.tokenizer, name=folder.name)
    with _threads(adapter, options):
        result = smallbench(
            examinee,
            items=ITEMS if options.items is None else options.items,
            seed=options.seed or 0,
            only=options.names or None,
        )
    if (folder / "run.json").is_file():
        RunDirectory(folder).write_json("eval/smallbench.json", result.to_dict())
    return result.to_dict(), result.table()


def _threads(
    adapter: "BaseAdapter", options: SuiteOptions
) -> contextlib.AbstractContextManager[None]:
    return taking(threads_of_decoding(adapter.spec, asked=options.threads, device=options.device))


SUITES: dict[str, Callable[[str, SuiteOptions], Outcome]] = {
    "smallbench": _small,
    "lm-eval": _harness,
}
