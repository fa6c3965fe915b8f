"""`glass extract`: the finite-state machine that a trained model computes; `lab.extract` works."""

import json
from pathlib import Path
from typing import Annotated

import typer

from glassformer.cli.shell.options import AsJson, Device, Runs, Threads
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.resolve import find_run
from glassformer.cli.shell.terminal import columns, end, ending_of, printable, target_of, write_file
from glassformer.kernels.threads import one_blas_thread
from glassformer.spec.checks import at_least, one_of

#: Formats of the machine.
ENDINGS = ("svg", "json", "dot")


def extract(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run on a machine's strings; RUN@last, RUN@120.")
    ],
    by: Annotated[
        str | None,
        typer.Option(
            metavar="HEAD",
            help="What a state shows: class (the default where there is that head) or next, the "
            "distribution of the next symbol.",
        ),
    ] = None,
    most_states: Annotated[
        int, typer.Option(metavar="N", help="Give up before a machine of more states.")
    ] = 16,
    threshold: Annotated[
        float, typer.Option(metavar="P", help="A symbol may follow if its probability is P.")
    ] = 0.01,
    length: Annotated[
        int | None,
        typer.Option(metavar="N", help="Ask strings of up to N symbols; as in training."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("-o", "--out", metavar="FILE", help="The machine, as .svg, .json or .dot."),
    ] = None,
    device: Device = "cpu",
    threads: Threads = None,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Extract the finite-state machine that a model computes.

    The model is asked what may follow a string and which class it has, until a machine explains the
    answers; the machine is compared with the model on held-out strings, and with the true one.
    Examples:

      glass extract parity

      glass extract brackets -o machine.svg

      glass extract mod-3 --by next --json
    """
    one_blas_thread()
    path, target = find_run(run, Path(runs)), target_of(out, ENDINGS)
    device = check_device(device)
    at_least("--most-states", most_states)
    if by is not None:
        one_of("--by", by, ("class", "next"))
    from glassformer.lab.extract import By  # imports torch
    from glassformer.lab.extract import extract as extract_from

    chosen: By | None = None if by is None else "class" if by == "class" else "next"
    found = extract_from(
        path,
        by=chosen,
        most_states=most_states,
        threshold=threshold,
        length=length,
        device=device,
        threads=threads,
    )
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
    else:
        typer.echo(printable(found.text(width=columns())))
    if target is not None:
        kind = ending_of(target, ENDINGS)
        write_file(target, found.encoded(kind))
        if kind == "json" and not as_json and found.can_be_trained_on():
            end("", [(f"glass train fsm task.machine={target}", "train a model on this machine")])
