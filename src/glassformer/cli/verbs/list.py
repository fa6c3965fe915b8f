"""`glass list`: everything that has a name; `lab.show` collects it, without torch."""

import json

import typer

from glassformer.cli.shell.options import AsJson, Runs


def list_all(runs: Runs = "runs", as_json: AsJson = False) -> None:
    """List tasks, presets, suites and your runs.

    Examples:

      glass list

      glass list --json
    """
    from glassformer.cli.shell import terminal
    from glassformer.lab.show import catalogue

    found = catalogue(runs)
    typer.echo(json.dumps(found.to_dict()) if as_json else found.text(width=terminal.columns()))
