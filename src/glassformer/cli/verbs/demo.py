"""`glass demo`: its options; `actions.demo` does the work."""

from pathlib import Path
from typing import Annotated

import typer

from glassformer.cli.shell.options import AsJson, Device, Runs
from glassformer.kernels.threads import one_blas_thread


def demo(
    name: Annotated[
        str | None, typer.Option(help="Name of the run; by default demo, demo-2, ...")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Fewer than the recipe's, if you are in a hurry.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Draws the first weights and the order of the data.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run of this name and start anew.")
    ] = False,
    device: Device = "cpu",
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Train a model, verify it, decode with it, look inside.

    Half a minute on one core, nothing to prepare.
    """
    one_blas_thread()
    from glassformer.cli.actions import demo as demonstration

    code = demonstration.demo(
        runs=Path(runs),
        name=name,
        steps=steps,
        seed=seed,
        overwrite=overwrite,
        device=device,
        as_json=as_json,
    )
    if code:
        raise typer.Exit(code)
