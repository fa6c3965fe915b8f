"""`glass evaluate`: a run on its own task's held-out examples, or any model on a suite."""

import json
from pathlib import Path
from typing import Annotated

import typer

from glassformer.cli.shell.options import AsJson, Device, Runs, Threads
from glassformer.kernels.threads import one_blas_thread
from glassformer.spec.errors import InputError


def evaluate(
    run: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A run, RUN@last, RUN@120; with a suite any model."),
    ],
    split: Annotated[
        str | None, typer.Option(help="test (the default), val, train, or another of the task's.")
    ] = None,
    suite: Annotated[str | None, typer.Option(help="smallbench or lm-eval.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Some of the suite's: names, with commas.")
    ] = None,
    tasks_dir: Annotated[str | None, typer.Option(help="A folder of lm-eval's YAML tasks.")] = None,
    limit: Annotated[
        int | None, typer.Option(help="lm-eval: at most so many examples of a task.")
    ] = None,
    items: Annotated[
        int | None, typer.Option(help="smallbench: questions of each exam, in whole groups.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="smallbench: the seed that draws the questions.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", help="The table of confusions, as .png, .svg or .csv."),
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
    if suite is None:
        if any(given is not None for given in (tasks, tasks_dir, limit, items, seed)):
            raise InputError(
                "--tasks, --tasks-dir, --limit, --items and --seed are a suite's",
                hint="--suite smallbench, or --suite lm-eval",
            )
        _on_its_task(
            run,
            split=split,
            output=output,
            device=device,
            threads=threads,
            runs=Path(runs),
            as_json=as_json,
        )
        return
    from glassformer.cli.actions import evaluate as suites
    from glassformer.cli.shell import resolve
    from glassformer.cli.shell.process import check_device

    check_device(device)
    if split is not None or output is not None:
        raise InputError("--split and -o are of a run's own task", hint="leave out --suite")
    asked = suites.Asked(
        tasks=tuple(filter(None, (tasks or "").split(","))),
        tasks_dir=None if tasks_dir is None else Path(tasks_dir),
        limit=limit,
        items=items,
        seed=seed,
        device=device,
        threads=threads,
    )
    outcome = suites.run_suite(suite, resolve.find_model(run, runs=Path(runs)), asked)
    typer.echo(json.dumps(outcome.data) if as_json else outcome.text)


def _on_its_task(
    run: str,
    *,
    split: str | None,
    output: str | None,
    device: str,
    threads: int | None,
    runs: Path,
    as_json: bool,
) -> None:
    """Measure, print, and write the requested figure."""
    one_blas_thread()
    from glassformer.cli.actions import evaluate as evaluating
    from glassformer.cli.shell import figures, terminal
    from glassformer.cli.shell import output as output_file

    target = output_file.target_of(output, figures.CONFUSION_ENDINGS)
    result = evaluating.evaluate_run(run, runs=runs, split=split, device=device, threads=threads)
    if as_json:
        typer.echo(result.to_json())
    else:
        typer.echo(result.text(width=terminal.columns()))
    if target is not None:
        figures.save_confusion(result, target, title=f"{run}, {result.split}")
