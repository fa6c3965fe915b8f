"""`glass evaluate`: a run on its own task's held-out examples, or any model on a suite."""

from pathlib import Path
from typing import Annotated

import typer

from glassformer.cli.shell import resolve
from glassformer.cli.shell.options import AsJson, Device, Runs, Threads, complete_runs, out_file
from glassformer.kernels.threads import one_blas_thread
from glassformer.spec.errors import InputError


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
        out_file("Write the confusion matrix, as .png, .svg or .csv."),
    ] = None,
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
        path = resolve.find_run(run, place)
        one_blas_thread()
        from glassformer.cli.actions import evaluate as evaluating

        evaluating.evaluate_run(
            path, split=split, out=out, device=device, threads=threads, as_json=as_json
        )
        return
    if split is not None or out is not None:
        raise InputError("--split and -o are of a run's own task", hint="leave out --suite")
    path = resolve.find_model(run, runs=place)
    from glassformer.cli.actions import evaluate as evaluating

    asked = evaluating.Asked(
        tasks=tuple(filter(None, (tasks or "").split(","))),
        tasks_dir=None if tasks_dir is None else Path(tasks_dir),
        limit=limit,
        items=items,
        seed=seed,
        device=device,
        threads=threads,
    )
    evaluating.run_suite(suite, path, asked, as_json=as_json)
