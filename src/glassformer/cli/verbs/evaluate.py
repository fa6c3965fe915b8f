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
from glassformer.kernels.threads import one_blas_thread, taking
from glassformer.spec.errors import InputError, nearest

if TYPE_CHECKING:
    from glassformer.adapters.base import BaseAdapter
    from glassformer.lab.measure.evaluate import Evaluation
    from glassformer.store.rundir import RunRef

#: Splits that nearly every task has: a task is built to find out about others.
USUAL_SPLITS = ("train", "val", "test")
#: Formats of the confusion table.
ENDINGS = ("png", "svg", "pdf", "csv")


def evaluate(
    run: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run, RUN@last, RUN@120; with a suite any model.",
            autocompletion=complete_runs,
        ),
    ],
    split: Annotated[
        str | None, typer.Option(help="test (the default), val, train, or another of the task's.")
    ] = None,
    suite: Annotated[
        str | None, typer.Option(metavar="NAME", help="smallbench or lm-eval.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", help="Some of the suite's tasks, with commas.")
    ] = None,
    tasks_dir: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="A folder of lm-eval's YAML tasks.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="lm-eval: maximum number of examples of a task.")
    ] = None,
    items: Annotated[
        int | None, typer.Option(help="smallbench: questions of each exam, in whole groups.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="smallbench: the seed that draws the questions.")
    ] = None,
    out: Annotated[
        str | None,
        out_file("Write the confusion matrix, as .png, .svg, .pdf or .csv."),
    ] = None,
    backend: Backend = "native",
    device: Device = "cpu",
    threads: Threads = None,
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
        if any(given is not None for given in (tasks, tasks_dir, limit, items, seed)):
            raise InputError(
                "--tasks, --tasks-dir, --limit, --items and --seed are a suite's",
                hint="--suite smallbench, or --suite lm-eval",
            )
        if backend != "native":
            raise InputError("--backend is a suite's", hint="--suite smallbench, or lm-eval")
        path = resolve.find_run(run, place)
        one_blas_thread()
        _evaluate_run(path, split=split, out=out, device=device, threads=threads, as_json=as_json)
        return
    if split is not None or out is not None:
        raise InputError("--split and -o are of a run's own task", hint="leave out --suite")
    path = resolve.find_model(run, runs=place)
    asked = _Asked(
        tasks=tuple(filter(None, (tasks or "").split(","))),
        tasks_dir=None if tasks_dir is None else Path(tasks_dir),
        limit=limit,
        items=items,
        seed=seed,
        backend=backend,
        device=device,
        threads=threads,
    )
    _run_suite(suite, path, asked, as_json=as_json)


def _evaluate_run(
    path: str,
    *,
    split: str | None,
    out: str | None,
    device: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure a run's checkpoint, print the result, and write it and the requested figure."""
    from glassformer.store.rundir import RunRef

    device = check_device(device)
    target = target_of(out, ENDINGS)
    if split is not None:
        _check_split(split, RunRef.parse(path))
    from glassformer.lab import api  # imports torch
    from glassformer.lab.next_steps import after_evaluation

    result = api.evaluate(path, split=split, device=device, threads=threads, write=True)
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
    from glassformer.lab.plots.figures import confusion_figure
    from glassformer.lens.show.chart_figure import figure_bytes

    ending = ending_of(path, ENDINGS)
    figure = confusion_figure(evaluation.confusion, title=title)  # refuses where there is none
    if ending == "csv":
        write_file(path, rows_csv(confusion_rows(evaluation.confusion)).encode())
    else:
        write_file(path, figure_bytes(figure, ending))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The options of the command that a suite may take."""

    tasks: tuple[str, ...] = ()
    tasks_dir: Path | None = None
    limit: int | None = None
    items: int | None = None
    seed: int | None = None
    backend: str = "native"
    device: str = "cpu"
    threads: int | None = None

    def refuse(self, suite: str, *options: str) -> None:
        """Refuse options that only another suite takes, instead of ignoring them."""
        for option in options:
            if getattr(self, option) is not None:
                spelled = f"--{option.replace('_', '-')}"
                raise InputError(f"{spelled} is no option of {suite}", hint=f"leave out {spelled}")


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A suite's result, for scripts and for people."""

    data: Mapping[str, Any]
    text: str


def _run_suite(name: str, path: str, asked: _Asked, *, as_json: bool) -> None:
    """Run the suite of that name on the model at a path, and print its result."""
    from glassformer.kernels.threads import check_threads

    if name not in SUITES:
        raise InputError(f"no suite '{name}'", hint=nearest(name, SUITES))
    check_threads(asked.threads)
    outcome = SUITES[name](path, replace(asked, device=check_device(asked.device)))
    print(json.dumps(outcome.data) if as_json else outcome.text)


def _harness(path: str, asked: _Asked) -> _Outcome:
    """Run lm-evaluation-harness offline: data sets come from files or from the local cache."""
    asked.refuse("lm-eval", "items", "seed")
    # Its libraries read these when they are imported.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")
    from glassformer.lab.measure.scores import run_harness

    adapter = load_by(path, asked.backend, device=asked.device)
    with _threads(adapter, asked):
        data = run_harness(adapter, asked.tasks, tasks_dir=asked.tasks_dir, limit=asked.limit)
    lines = []
    for task, metrics in data["tasks"].items():
        lines.append(f"{task}: {data['examples'].get(task, '?')} examples")
        lines += [f"  {name:<24}{value:.4f}" for name, value in metrics.items()]
    return _Outcome(data, "\n".join(lines))


def _small(path: str, asked: _Asked) -> _Outcome:
    """Run SmallBench; the result on a run is kept in its eval folder."""
    from glassformer.lab.smallbench.question import examinee_of
    from glassformer.lab.smallbench.suite import ITEMS, smallbench
    from glassformer.store.rundir import RunDirectory, RunRef

    asked.refuse("smallbench", "tasks_dir", "limit")
    adapter = load_by(path, asked.backend, device=asked.device)
    folder = RunRef.parse(path).folder
    examinee = examinee_of(adapter, adapter.tokenizer, name=folder.name)
    with _threads(adapter, asked):
        result = smallbench(
            examinee,
            items=ITEMS if asked.items is None else asked.items,
            seed=asked.seed or 0,
            only=asked.tasks or None,
        )
    if (folder / "run.json").is_file():
        RunDirectory(folder).write_json("eval/smallbench.json", result.to_dict())
    return _Outcome(result.to_dict(), result.table())


def _threads(adapter: "BaseAdapter", asked: _Asked) -> contextlib.AbstractContextManager[None]:
    from glassformer.kernels.threads import threads_of_decoding

    return taking(threads_of_decoding(adapter.spec, asked=asked.threads, device=asked.device))


SUITES: dict[str, Callable[[str, _Asked], _Outcome]] = {"smallbench": _small, "lm-eval": _harness}
