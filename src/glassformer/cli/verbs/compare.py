"""`glass compare`: runs side by side; `lab.compare` does the work, without torch."""

from typing import Annotated

import typer

from glassformer.cli.shell.options import AsJson, Runs, complete_runs, out_file


def compare(
    names: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Two runs or more.", autocompletion=complete_runs),
    ],
    out: Annotated[str | None, out_file("Write a .html, .csv or .json.")] = None,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Compare runs: settings that differ, results, differences.

    Runs that differ in their seed alone are one group; groups are compared seed by seed, and a
    difference has an interval where two seeds or more allow one. -o writes .html, .csv or .json.
    Examples:

      glass compare digits digits-2

      glass compare wide-0 wide-1 wide-2 deep-0 deep-1 deep-2 -o wide-or-deep.html
    """
    from glassformer.cli.shell import terminal
    from glassformer.cli.shell.output import target_of, write_file
    from glassformer.lab.compare import compare as compared

    target = target_of(out, ("html", "csv", "json"))
    found = compared(*names, runs=runs)
    if target is not None:
        ending = target.suffix.lower().removeprefix(".")
        made = {"html": found.html, "csv": found.csv, "json": found.to_json}[ending]()
        write_file(target, made.encode())
    if as_json:
        typer.echo(found.to_json())
    elif target is None:
        typer.echo(found.text(width=terminal.columns()))
