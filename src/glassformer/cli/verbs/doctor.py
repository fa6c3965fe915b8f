"""`glass doctor`: its options; `actions.doctor` does the work."""

from typing import Annotated

import typer

from glassformer.cli.shell.options import AsJson, Device, Overrides, complete_tasks, out_file
from glassformer.kernels.threads import one_blas_thread
from glassformer.spec.tasks import check_task_name


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
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out what trains some steps.")
    ] = False,
    seconds: Annotated[
        float, typer.Option("--time", metavar="SECONDS", help="Begin nothing after this time.")
    ] = 60.0,
    only: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="One kind, or data, optimizer, loss, model, training."),
    ] = None,
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
    one_blas_thread()
    from glassformer.cli.actions import doctor as examining
    from glassformer.cli.shell import output as output_file

    target = output_file.target_of(out, examining.ENDINGS)
    found = examining.examined(
        what, list(overrides or []), quick=quick, seconds=seconds, only=only, device=device
    )
    examining.show(found, as_json=as_json, target=target)
    if found.failed:
        raise typer.Exit(1)
