"""`glass lr-find`: the range test of a learning rate, its curve and the command that follows."""

import json
from typing import Annotated

import typer

from glassformer.cli.shell.options import AsJson, Device, Overrides, Threads, Trainable, out_file
from glassformer.kernels.threads import one_blas_thread
from glassformer.spec.tasks import check_task_name


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
    from glassformer.cli.actions import lr_find as rate_finding
    from glassformer.cli.shell import figures
    from glassformer.cli.shell import output as output_file

    target = output_file.target_of(out, figures.LR_ENDINGS)
    tested = rate_finding.find(what, list(overrides or []), device=device, threads=threads)
    found = rate_finding.lr_json(tested, what, list(overrides or []))
    if target is not None:
        figures.save_lr(tested, target, title=what)
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(figures.lr_text(tested))
    typer.echo(
        f"lr {found['lr']:.1e}  (falls steadily from {found['low']:.1e} to {found['high']:.1e})"
    )
    typer.echo(str(found["command"]))
