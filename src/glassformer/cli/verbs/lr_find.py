"""`glass lr-find`: the range test of a learning rate, its curve and the command that follows."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glassformer.cli.shell.options import AsJson, Device, Overrides, Threads, Trainable, out_file
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.terminal import columns, ending_of, is_unicode, target_of, write_file
from glassformer.kernels.threads import one_blas_thread
from glassformer.spec.tasks import check_task_name

if TYPE_CHECKING:
    from glassformer.training.fit import RateRange

ENDINGS = ("png", "svg", "csv")


def lr_find(
    what: Trainable,
    overrides: Overrides = None,
    out: Annotated[
        str | None,
        out_file("Write the curve, as .png, .svg or .csv."),
    ] = None,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Find a learning rate: a curve, a stable range, a command.

    Examples:

      glass lr-find reverse

      glass lr-find digits train.batch_size=128 -o rates.png
    """
    check_task_name(what)  # before torch is imported
    one_blas_thread()
    from glassformer.lab import api
    from glassformer.lab.plots.figures import lr_text

    target, given = target_of(out, ENDINGS), list(overrides or [])
    device = check_device(device)
    tested = api.lr_find(what, overrides=given, device=device, threads=threads)
    found = _as_json(tested, what, given)
    if target is not None:
        _save(tested, target, title=what)
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(lr_text(tested, width=columns(), unicode=is_unicode()))
    typer.echo(
        f"lr {found['lr']:.1e}  (falls steadily from {found['low']:.1e} to {found['high']:.1e})"
    )
    typer.echo(str(found["command"]))


def _as_json(found: "RateRange", what: str, overrides: list[str]) -> dict[str, Any]:
    """Return the rate, its range, the command to paste, and the curve."""
    rate = float(f"{found.suggestion:.1e}")
    return {
        "lr": rate,
        "low": found.low,
        "high": found.high,
        "command": f"glass train {what} {' '.join([*overrides, f'train.lr={rate}'])}",
        "curve": [list(point) for point in found.curve],
    }


def _save(found: "RateRange", path: Path, *, title: str) -> None:
    """Write the range test as a figure, or its points as CSV."""
    from glassformer.lab.measure.evaluate import csv_text
    from glassformer.lab.plots.figures import lr_figure
    from glassformer.lens.show.mpl import figure_bytes

    ending = ending_of(path, ENDINGS)
    if ending == "csv":
        lines = [[rate, loss] for rate, loss in found.curve]
        write_file(path, csv_text(["lr", "loss"], lines).encode())
    else:
        write_file(path, figure_bytes(lr_figure(found, title=title), ending))
