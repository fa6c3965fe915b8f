"""`glass report`: the options of a run's report and of curves. `reporting` does the work."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="A run, or RUN@120; several for curves.")
    ],
    curves: Annotated[
        bool, typer.Option("--curves", help="Curves in the terminal instead of a report.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", help="A report .html, or curves as .png, .svg or .csv."),
    ] = None,
    series: Annotated[
        list[str] | None, typer.Option(help="Of curves: lr, val.by.operation.MAX; repeatable.")
    ] = None,
    x: Annotated[str | None, typer.Option(help="Of curves: step, tokens or time.")] = None,
    smooth: Annotated[
        float | None, typer.Option(help="Of curves: points of the mean; 1 is none.")
    ] = None,
    log: Annotated[
        bool | None, typer.Option("--log/--linear", help="Of curves: the scale.")
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Of a report: without the certificate.")
    ] = False,
    runs: Annotated[str, typer.Option(help="The folder that holds the runs.")] = "runs",
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON on stdout, nothing else there.")
    ] = False,
) -> None:
    """One self-contained HTML file about a run; or the curves of one or several runs.

    The report lies in the run's folder as report.html unless -o says otherwise. Examples:

      glass report digits

      glass report digits --curves

      glass report first second -o curves.png --x tokens
    """
    from glassformer.cli import reporting

    asked = reporting.Asked(
        curves=curves,
        series=tuple(series or ()),
        axis=x,
        span=smooth,
        log=log,
        verify=not no_verify,
    )
    reporting.run(run, asked, output=output, runs=Path(runs), as_json=as_json, said=typer.echo)
