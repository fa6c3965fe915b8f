"""`glass doctor`: examine a training, print the diagnosis, write it to a file."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glassformer.cli.shell.options import AsJson, Device, Overrides, complete_tasks, out_file
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.terminal import ending_of, in_colour, target_of, write_file
from glassformer.kernels.threads import one_blas_thread
from glassformer.spec.options import option
from glassformer.spec.own import is_source
from glassformer.spec.tasks import check_task_name
from glassformer.spec.train import check_settings

if TYPE_CHECKING:
    from glassformer.checks.doctor import Diagnosis

ENDINGS = ("json", "md", "xml")


def doctor(
    what: Annotated[
        str,
        typer.Argument(
            metavar="TASK|CONFIG|FACTORY",
            help="A task, a config file, my_task.py:MyTask, or package.module:factory that "
            "returns a training set-up of any library.",
            autocompletion=complete_tasks,
        ),
    ],
    overrides: Overrides = None,
    quick: bool = option(False, help="Leave out what trains some steps."),
    seconds: float = option(
        60.0, flag="--time", metavar="SECONDS", help="Begin nothing after this time."
    ),
    only: str | None = option(
        None, metavar="KIND", help="One kind, or data, optimizer, loss, model, training."
    ),
    out: Annotated[
        str | None, out_file("Write the diagnosis, as .json, .md or .xml (JUnit).")
    ] = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Find mistakes before you train, each with evidence and a fix.

    Twenty kinds, measured on the set-up itself. Exit 1 if there is a mistake; warnings may be
    meant. Examples:

      glass doctor digits train.lr=0.5

      glass doctor my_task.py:MyTask --quick

      glass doctor my_package.train:setup -o diagnosis.md
    """
    check_task_name(what)  # before torch is imported
    check_settings(overrides or ())
    one_blas_thread()
    from glassformer.lab.recipes import planned_run

    target, given = target_of(out, ENDINGS), list(overrides or [])
    device = check_device(device)
    plan = None if is_source(what) else planned_run(what, given)
    from glassformer.checks.doctor import doctor as examine  # imports torch

    found = examine(
        what if plan is None else plan,
        overrides=given if plan is None else [],
        quick=quick,
        seconds=seconds,
        only=only,
        device=device,
        name=what if plan is not None else "",
    )
    _show(found, as_json=as_json, target=target)
    if found.failed:
        raise typer.Exit(1)


def _show(found: "Diagnosis", *, as_json: bool, target: Path | None) -> None:
    """Print JSON for scripts, else the diagnosis in words; write the file of `-o`."""
    if as_json:
        print(json.dumps(found.to_dict(), allow_nan=False))
    else:
        print(found.text(in_colour) if sys.stdout.isatty() else found.text())
    if target is not None:
        match ending_of(target, ENDINGS):
            case "md":
                content = found.markdown()
            case "xml":
                content = found.junit()
            case _:
                content = json.dumps(found.to_dict(), indent=1)
        write_file(target, content.encode())
