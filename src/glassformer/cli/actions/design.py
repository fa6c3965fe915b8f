"""Run `glass design`: solve, print the answer or why there is none, save a config, draw."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from glassformer.budget.answer import Answer
from glassformer.budget.infeasible import InfeasibleBudget, Undecided
from glassformer.budget.question import Budget
from glassformer.cli.shell.output import ending_of, write_file
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.terminal import tell
from glassformer.lab.budget_report import design, design_text, run_of_design, step_time_text
from glassformer.spec.checks import at_least
from glassformer.spec.errors import InputError


def run(
    options: dict[str, Any],
    *,
    thorough: bool,
    batch: int,
    device: str,
    timed: bool,
    save: str | None,
    png: str | None,
    out: Sequence[str],
    as_json: bool,
) -> None:
    """Print the answer; exit 1 if there is none, 5 if that is not known."""
    at_least("batch", batch)
    targets = {path: ending_of(Path(path), ("toml", "png")) for path in out}
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
        if timed:
            typer.echo(step_time_text(answer.spec, batch=batch, device=device))
    configs = [path for path, ending in targets.items() if ending == "toml"]
    figures = [path for path, ending in targets.items() if ending == "png"]
    for path in [*configs, *([] if save is None else [save])]:
        save_config(answer, Path(path), batch=batch)
    for path in [*figures, *([] if png is None else [png])]:
        draw(answer, Path(path))


def save_config(answer: Answer, path: Path, *, batch: int) -> None:
    """Write a config that `glass train` takes."""
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


def draw(answer: Answer, path: Path) -> None:
    """Write a PNG of the allocation and the landscape of ratio and expansion."""
    if path.suffix != ".png":
        raise InputError(f"--png {path} is not a .png", hint=f"--png {path.with_suffix('.png')}")
    from glassformer.lab.plots.figures import design_figure

    write_file(path, design_figure(answer))
