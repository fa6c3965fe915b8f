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
    out: Annotated[
        str | None,
        typer.Option("-o", "--out", metavar="FILE", help="Keep the certificate, as JSON."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Compare with a kept certificate: new failures count."),
    ] = None,
    junit: Annotated[
        str | None, typer.Option(metavar="FILE", help="JUnit XML for a CI server.")
    ] = None,
    markdown: Annotated[
        str | None, typer.Option(metavar="FILE", help="A table for a pull request.")
    ] = None,
    badge: Annotated[str | None, typer.Option(metavar="FILE", help="A badge, as SVG.")] = None,
    device: Device = "cpu",
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Check a model: two ways of computing the same thing must agree.

    Each row is the worst disagreement seen, beside what is allowed. Exit 1 if any check fails;
    rounding, and limits that the report names, are warnings. With --against, exit 1 only if a
    check fails that did not fail before.
    Examples:

      glass verify

      glass verify qwen --only cache

      glass verify my_package.models:tiny_model --json

      glass verify my_package.models:tiny_model --out new.json --against old.json
    """
    place = model
    if model is not None and model not in PRESETS and ":" not in model:
        place = find_model(model, runs=Path(runs), also=PRESETS)
    elif device != "cpu":
        raise InputError(
            f"--device {device} is for a model on disk", hint="name a run or a model folder"
        )
    one_blas_thread()
    from glassformer.cli.actions.verify import certificate, older_of, show

    older = older_of(against)  # a bad file is refused before the checks run
    report = certificate(
        place,
        name=model or "",
        only=only,
        deep=deep,
        causal=False if bidirectional else None,
        device=device,
    )
    files = {"out": out, "junit": junit, "markdown": markdown, "badge": badge}
    show(report, as_json=as_json, files=files, older=older)
    if report.failed if older is None else report.new_failures(older):
        raise typer.Exit(1)
