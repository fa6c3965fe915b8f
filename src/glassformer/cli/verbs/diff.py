"""`glass diff`: its options; `actions.diff` does the work."""

from typing import Annotated

import typer

from glassformer.cli.shell.options import AsJson, Device
from glassformer.kernels.threads import one_blas_thread

MODEL = "A run, a Hugging Face folder, a GGUF file, a preset, or package.module:factory."


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help=MODEL)],
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="B",
            help="What it is compared with. Without it: transformers' own implementation of A.",
        ),
    ] = None,
    backward: Annotated[
        bool,
        typer.Option(
            "--backward/--no-backward", help="If the forwards agree, compare the gradients too."
        ),
    ] = True,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Find where two implementations of one model first differ.

    Modules are paired by what they compute, not by name. Exit 1 if there is a difference.
    Examples:

      glass diff my_port:model original:model

      glass diff runs/lm@200 runs/lm@400

      glass diff my_qwen_folder
    """
    one_blas_thread()
    from glassformer.cli.actions.diff import compared, show

    found = compared(first, second, backward=backward, device=device)
    show(found, as_json=as_json)
    if not found.same:
        raise typer.Exit(1)
