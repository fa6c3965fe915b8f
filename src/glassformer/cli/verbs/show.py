"""`glass show`: the settings of a task, preset, run or model; `lab.show` does the work."""

from pathlib import Path
from typing import Annotated

import typer

from glassformer.cli.shell.options import AsJson, Overrides, Runs


def show(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="A task or preset of `glass list`, a run, a config file, or a model on disk.",
        ),
    ],
    overrides: Overrides = None,
    out: Annotated[
        str | None, typer.Option("-o", "--out", metavar="FILE", help="Write a .toml or .json.")
    ] = None,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Show a model and its settings, without training it.

    The settings are TOML; of a task or a run, `glass train` reads them. Examples:

      glass show reverse

      glass show digits train.lr=3e-4 -o digits.toml

      glass show runs/digits
    """
    from glassformer.cli.shell import resolve
    from glassformer.cli.shell.output import target_of, write_file
    from glassformer.cli.shell.terminal import tell
    from glassformer.lab.show import show as shown

    target = target_of(out, ("toml", "json"))
    if resolve.hub.is_name(what.partition("@")[0]):  # a path of two parts, or org/name
        what = resolve.find_model(what, runs=Path(runs))
    found = shown(what, overrides=list(overrides or ()), runs=runs)
    if target is not None:
        as_file = found.to_json() if target.suffix.lower() == ".json" else found.text()
        write_file(target, (as_file + "\n").encode())
        if found.run is not None:
            tell(f"train it: glass train {target}")
    if as_json:
        typer.echo(found.to_json())
    elif target is None:
        typer.echo(found.text())
