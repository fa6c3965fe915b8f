"""`glass design`: solve a budget, print the answer or why there is none, save a config, draw.

The options of a budget are declared by `Budget`.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glassformer.budget.question import Budget
from glassformer.cli.shell.options import AsJson, Device, takes
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.terminal import ending_of, tell, write_file
from glassformer.spec.checks import at_least
from glassformer.spec.errors import InputError
from glassformer.spec.options import option

if TYPE_CHECKING:
    from glassformer.budget.answer import Answer


@takes(Budget, into="options")
def design(
    options: dict[str, Any],
    thorough: bool = option(False, help="Search to the end, however long it takes."),
    batch: int = option(8, help="Batch size, for memory and time."),
    device: Device = "cpu",
    no_time: bool = option(False, help="Do not measure this machine: no step time."),
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
    from glassformer.budget.infeasible import InfeasibleBudget, Undecided
    from glassformer.lab.budget_report import design, design_text, step_time_text

    at_least("batch", batch)
    targets = {path: ending_of(Path(path), ("toml", "png")) for path in out or ()}
    if device != "cpu":
        device = check_device(device)
    if "params" not in options:
        raise InputError("the number of parameters is missing", hint="--params 10M")
    try:
        answer = design(thorough=thorough, **{"vocab": Budget().vocab} | options)
    except InfeasibleBudget as error:
        found = error.certificate
        typer.echo(json.dumps(found.to_dict()) if as_json else found.text())
        raise typer.Exit(error.exit_code) from None
    except Undecided as error:
        if not as_json:
            raise
        typer.echo(json.dumps(error.to_dict()))
        raise typer.Exit(error.exit_code) from None
    if as_json:
        typer.echo(json.dumps(answer.to_dict()))
    else:
        typer.echo(design_text(answer, batch=batch, device=device))
        if not no_time:
            typer.echo(step_time_text(answer.spec, batch=batch, device=device))
    configs = [path for path, ending in targets.items() if ending == "toml"]
    figures = [path for path, ending in targets.items() if ending == "png"]
    for path in [*configs, *([] if save is None else [save])]:
        _save_config(answer, Path(path), batch=batch)
    for path in [*figures, *([] if png is None else [png])]:
        _draw(answer, Path(path))


def _save_config(answer: "Answer", path: Path, *, batch: int) -> None:
    """Write a config that `glass train` takes."""
    from glassformer.lab.budget_report import run_of_design

    if path.suffix != ".toml":
        raise InputError(
            f"--save {path} is not a .toml", hint=f"--save {path.with_suffix('.toml')}"
        )
    from glassformer.lab.runs.record import to_toml

    text = to_toml(run_of_design(answer, batch=batch))
    if text is None:
        raise InputError("writing TOML needs the library tomli_w", hint="pip install tomli-w")
    write_file(path, text.encode())
    tell(f"train it: glass train {path}")


def _draw(answer: "Answer", path: Path) -> None:
    """Write a PNG of the allocation and the landscape of ratio and expansion."""
    if path.suffix != ".png":
        raise InputError(f"--png {path} is not a .png", hint=f"--png {path.with_suffix('.png')}")
    from glassformer.lab.plots.figures import design_chart
    from glassformer.lens.show.chart_figure import figure_bytes

    write_file(path, figure_bytes(design_chart(answer), "png", dpi=90))
