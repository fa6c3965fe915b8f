"""`glass list`: its options; `actions.list` does the work."""

import json
from pathlib import Path

import typer

from glassformer.cli.shell.options import AsJson, Runs


def list_all(runs: Runs = "runs", as_json: AsJson = False) -> None:
    """List tasks, presets, suites and your runs."""
    from glassformer.cli.actions import list

    found = list.listing(Path(runs))
    typer.echo(json.dumps(found) if as_json else list.listing_text(found))
