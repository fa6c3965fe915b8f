"""`glass train`: its options; `actions.train` does the work."""

from pathlib import Path
from typing import Annotated

import typer

from glassformer.cli.shell.options import (
    AsJson,
    Device,
    Fsdp,
    Nproc,
    Overrides,
    Runs,
    Threads,
    Trainable,
)
from glassformer.kernels.threads import one_blas_thread
from glassformer.spec.options import settings_text
from glassformer.spec.tasks import check_task_name
from glassformer.spec.train import TrainSpec


def _list_settings(wanted: bool) -> None:
    """Print the settings of training, with defaults and limits, and end."""
    if wanted:
        typer.echo(settings_text(TrainSpec, prefix="train."))
        raise typer.Exit()


def train(
    what: Trainable,
    overrides: Overrides = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run; by default the task's.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Short for train.steps=N.")] = None,
    seed: Annotated[int | None, typer.Option(help="Short for train.seed=N.")] = None,
    engine: Annotated[str | None, typer.Option(help="torch or numpy.")] = None,
    device: Device = "cpu",
    threads: Threads = None,
    nproc: Nproc = None,
    fsdp: Fsdp = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was stopped.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run of this name and start anew.")
    ] = False,
    settings: Annotated[
        bool,
        typer.Option(
            "--settings", is_eager=True, callback=_list_settings, help="List every train.KEY."
        ),
    ] = False,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Train a model on a task, or repeat a run from its config.

    It can be killed at any moment, and --resume goes on to the same bits. Examples:

      glass train reverse

      glass train digits --engine numpy --name by-hand train.steps=500

      glass train runs/reverse/config.toml --name again

      glass train digits --nproc 2
    """
    check_task_name(what)  # before torch is imported
    one_blas_thread()
    if nproc is not None:
        from glassformer.cli.shell.ranks import launch

        raise typer.Exit(launch(nproc))
    from glassformer.cli.actions import train as training

    given = list(overrides or [])
    shorts = {"train.steps": steps, "train.seed": seed, "engine": engine}
    given += [f"{key}={value}" for key, value in shorts.items() if value is not None]
    code = training.train(
        what,
        given,
        name=name,
        runs=Path(runs),
        device=device,
        threads=threads,
        fsdp=fsdp,
        resume=resume,
        overwrite=overwrite,
        as_json=as_json,
    )
    if code:
        raise typer.Exit(code)
