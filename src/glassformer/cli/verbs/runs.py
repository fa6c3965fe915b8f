"""`glass runs` and `glass compare`: list, rename, tag, delete; compare side by side. No torch."""

import json
from typing import Annotated, Any

import typer

from glassformer.cli.shell.help import SETTINGS, Verb, VerbGroup
from glassformer.cli.shell.options import AsJson, RunName, Runs, complete_runs, out_file

EXAMPLES = """List your runs, sort and filter them; rename, tag, delete.

Examples:

  glass runs

  glass runs --sort val_loss --where task=digits

  glass runs --where 'val_loss<0.5' --where tags=paper -o runs.csv

  glass runs rename digits baseline

  glass runs tag baseline paper

  glass runs delete tmp-1 tmp-2
"""

runs = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    cls=VerbGroup,
    context_settings=SETTINGS,
    help=EXAMPLES,
)


@runs.callback()
def list_runs(
    context: typer.Context,
    sort: Annotated[
        str, typer.Option(metavar="COLUMN", help="A column, or a setting such as train.lr.")
    ] = "written",
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION", help="task=digits, 'val_loss<0.5', 'run=big-*'; repeatable."
        ),
    ] = None,
    out: Annotated[str | None, out_file("Write the table, as .csv or .json.")] = None,
    folder: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """List your runs, sort and filter them; rename, tag, delete."""
    context.obj = folder
    if context.invoked_subcommand is not None:
        return
    from glassformer.cli.shell import terminal
    from glassformer.cli.shell.terminal import target_of, write_file
    from glassformer.lab.runs import table

    target = target_of(out, ("csv", "json"))
    found = table.runs(folder, sort=sort, reverse=reverse, where=where or ())
    data = json.dumps({"runs": [dict(row) for row in found]})
    if target is not None:
        is_csv = target.suffix.lower() == ".csv"
        write_file(target, (found.csv() if is_csv else data + "\n").encode())
    if as_json:
        typer.echo(data)
    elif target is None:
        none = "no run fits" if where else f"no runs in {folder}: glass train reverse makes one"
        typer.echo(found.text(width=terminal.columns()) if found else none)


@runs.command(cls=Verb, context_settings=SETTINGS)
def rename(context: typer.Context, run: RunName, name: RunName) -> None:
    """Give a run another name."""
    from glassformer.lab.runs import table

    typer.echo(f"{run} is now {table.rename_run(run, name, folder=context.obj)}")


@runs.command(cls=Verb, context_settings=SETTINGS)
def tag(
    context: typer.Context,
    run: RunName,
    tags: Annotated[list[str], typer.Argument(metavar="TAG", help="Words to find it by.")],
    remove: Annotated[bool, typer.Option("--remove", help="Take these tags off.")] = False,
) -> None:
    """Add tags to a run, or take them off."""
    from glassformer.lab.runs import table

    change: dict[str, Any] = {"remove" if remove else "add": tags}
    has = table.tag_run(run, folder=context.obj, **change)
    typer.echo(f"{run}: {' '.join(has) or 'no tags'}")


@runs.command(cls=Verb, context_settings=SETTINGS)
def delete(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="RUN", help="Names of runs.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete runs, with everything in their folders."""
    from glassformer.cli.shell.resolve import agreed
    from glassformer.lab.runs import table
    from glassformer.spec.errors import InputError

    if not yes and not agreed(f"delete {', '.join(names)} for good?", instead="add --yes"):
        raise InputError("nothing was deleted")
    for place in table.delete_runs(names, folder=context.obj):
        typer.echo(f"deleted {place}")


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
    from glassformer.cli.shell.terminal import target_of, write_file
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
