"""`glass verify`: its options; `actions.verify` does the work."""

from pathlib import Path
from typing import Annotated

import typer

from glassformer.cli.shell.options import AsJson, Device, Runs, complete_names
from glassformer.cli.shell.resolve import find_model
from glassformer.kernels.threads import one_blas_thread
from glassformer.spec.errors import InputError
from glassformer.spec.presets import PRESETS


def verify(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A run, a checkpoint, a Hugging Face folder, a preset, or "
            "package.module:factory. Without it: our own parts and every preset.",
            autocompletion=complete_names,
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="GROUP", help="One group: cache, padding, decoding, ...")
    ] = None,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also what takes longer: compiled, brute force, full widths."),
    ] = False,
    bidirectional: Annotated[
        bool,
        typer.Option(
            "--bidirectional", help="The model is meant to look ahead: no check of causality."
        ),
    ] = False,
    device: Device = "cpu",
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Check a model: two ways of computing the same thing must agree.

    Each row is the worst disagreement seen, beside what is allowed. Exit 1 if any check fails;
    rounding, and limits that the report names, are warnings.
    Examples:

      glass verify

      glass verify qwen --only cache

      glass verify my_package.models:tiny_model --json
    """
    place = model
    if model is not None and model not in PRESETS and ":" not in model:
        place = find_model(model, runs=Path(runs), also=PRESETS)
    elif device != "cpu":
        raise InputError(
            f"--device {device} is for a model on disk", hint="name a run or a model folder"
        )
    one_blas_thread()
    from glassformer.cli.actions.verify import certificate, show

    report = certificate(
        place,
        name=model or "",
        only=only,
        deep=deep,
        causal=False if bidirectional else None,
        device=device,
    )
    show(report, as_json=as_json)
    if report.failed:
        raise typer.Exit(1)
