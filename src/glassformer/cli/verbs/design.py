"""`glass design`: the options of a parameter budget, which `Budget` declares, and of the report."""

from typing import Annotated, Any

import typer

from glassformer.budget.question import Budget
from glassformer.cli.shell.options import AsJson, Device, takes


@takes(Budget, into="options")
def design(
    options: dict[str, Any],
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Search to the end, however long it takes.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Batch size, for memory and time.")] = 8,
    device: Device = "cpu",
    no_time: Annotated[
        bool, typer.Option("--no-time", help="Do not measure this machine: no step time.")
    ] = False,
    out: Annotated[
        list[str] | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="Write a config for `glass train` (.toml), or a figure (.png); repeatable.",
        ),
    ] = None,
    save: Annotated[str | None, typer.Option(hidden=True)] = None,
    png: Annotated[str | None, typer.Option(hidden=True)] = None,
    as_json: AsJson = False,
) -> None:
    """Find the dimensions that meet a parameter budget.

    The total is met, every wish that gave way is named, and so is whether the model exports as a
    Llama and cuts to int4. Exit 1 if no design exists: the reason
    and the nearest changes that work are printed. A search ends after about half a second: what is
    not proven by then is listed, and exit 5 if nothing was found. Examples:

      glass design --params 10M --vocab 16000

      glass design --params 600k --vocab 2000 --length 128 --heads 4 -o small.toml

      glass design --params 10M --vocab 16000 --shape classic

      glass design --params 10M --vocab 256 --embedding-ratio free --multiple 64
    """
    from glassformer.cli.actions.design import run

    run(
        options,
        thorough=thorough,
        batch=batch,
        device=device,
        timed=not no_time,
        save=save,
        png=png,
        out=out or (),
        as_json=as_json,
    )
