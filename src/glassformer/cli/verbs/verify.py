"""`glass verify`: its options; `actions.verify` does the work."""

from typing import Annotated

import typer

from glassformer.kernels.threads import one_blas_thread


def verify(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A run, a checkpoint, a Hugging Face folder, a preset, or "
            "package.module:factory. Without it: our own parts and every preset.",
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
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Run the certificate: compare two ways of computing the same thing.

    Each row is the worst disagreement seen, beside what is allowed. Exit 1 if any check fails;
    rounding, and limits that the report names, are warnings.
    Examples:

      glass verify

      glass verify qwen --only cache

      glass verify my_package.models:tiny_model --json
    """
    one_blas_thread()
    from glassformer.cli.actions.verify import certificate, show

    report = certificate(model, only=only, deep=deep, causal=False if bidirectional else None)
    show(report, as_json=as_json)
    if report.failed:
        raise typer.Exit(1)
