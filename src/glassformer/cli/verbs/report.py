"""`glass report`: its options; `actions.report` does the work."""

from pathlib import Path
from typing import Annotated

import typer

from glassformer.cli.shell.options import AsJson, Device, Runs, complete_runs, out_file
from glassformer.cli.shell.resolve import find_run


def report(
    run: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="A run, or RUN@120; several give their curves.",
            autocompletion=complete_runs,
        ),
    ],
    curves: Annotated[
        bool, typer.Option("--curves", help="Curves in the terminal instead of a report.")
    ] = False,
    out: Annotated[
        str | None,
        out_file("Write the report to this .html, or curves as .png, .svg or .csv."),
    ] = None,
    series: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Curves: lr, val.by.operation.MAX, ...; repeatable."),
    ] = None,
    x: Annotated[
        str | None, typer.Option(metavar="AXIS", help="Curves: step (the default), tokens or time.")
    ] = None,
    smooth: Annotated[
        float | None, typer.Option(help="Curves: points that the mean covers; 1 is no mean.")
    ] = None,
    log: Annotated[
        bool | None,
        typer.Option("--log/--linear", help="Curves: the scale; by default what suits them."),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Report: leave out the certificate.")
    ] = False,
    device: Device = "cpu",
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Write one HTML file about a run, or curves of several.

    The report needs no script and no network. It is in the run's folder as report.html unless
    -o says otherwise. Examples:

      glass report digits

      glass report digits --curves

      glass report first second -o curves.png --x tokens
    """
    for name in run:
        find_run(name, Path(runs))  # before torch is imported
    from glassformer.cli.actions import report as reporting

    asked = reporting.Asked(
        curves=curves,
        series=tuple(series or ()),
        axis=x,
        span=smooth,
        log=log,
        verify=not no_verify,
        device=device,
    )
    reporting.run(run, asked, output=out, runs=Path(runs), as_json=as_json, said=typer.echo)
