"""`glass extract`: the finite-state machine that a trained model computes; `lab.extract` works."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from glassformer.cli.shell.options import AsJson, Device, Runs, Threads
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.resolve import find_run
from glassformer.cli.shell.terminal import columns, end, ending_of, printable, target_of, write_file
from glassformer.kernels.threads import one_blas_thread
from glassformer.spec.checks import one_of
from glassformer.spec.options import check_options, option

#: Formats of the machine.
ENDINGS = ("svg", "json", "dot")


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What is asked of the model, and when the search ends: arguments of `lab.extract`."""

    by: str | None = option(
        None,
        metavar="HEAD",
        help="What a state shows: class (the default where there is that head) or next, the "
        "distribution of the next symbol.",
    )
    most_states: int = option(
        16, at_least=1, metavar="N", help="Give up before a machine of more states."
    )
    threshold: float = option(
        0.01, metavar="P", help="A symbol may follow if its probability is P."
    )
    length: int | None = option(
        None, metavar="N", help="Ask strings of up to N symbols; as in training."
    )
    threads: Threads = None

    def __post_init__(self) -> None:
        check_options(self, has_flags=True)
        if self.by is not None:
            one_of("--by", self.by, ("class", "next"))


def extract(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run on a machine's strings; RUN@last, RUN@120.")
    ],
    search: Search,
    out: Annotated[
        str | None,
        typer.Option("-o", "--out", metavar="FILE", help="The machine, as .svg, .json or .dot."),
    ] = None,
    device: Device = "cpu",
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
    from glassformer.lab.extract import extract as extract_from  # imports torch

    chosen: dict[str, Any] = asdict(search)
    found = extract_from(path, **chosen, device=device)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
    else:
        typer.echo(printable(found.text(width=columns())))
    if target is not None:
        kind = ending_of(target, ENDINGS)
        write_file(target, found.encoded(kind))
        if kind == "json" and not as_json and found.can_be_trained_on():
            end("", [(f"glass train fsm task.machine={target}", "train a model on this machine")])
