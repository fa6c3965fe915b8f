"""`glass convert`: its options; `actions.convert` does the work."""

from pathlib import Path
from typing import Annotated

import typer

from glassformer.cli.shell.options import AnyModel, AsJson, Runs
from glassformer.cli.shell.resolve import find_model
from glassformer.spec.errors import InputError


def convert(
    model: AnyModel,
    folder: Annotated[
        str | None,
        typer.Argument(metavar="OUT", help="The same as -o.", hidden=True),
    ] = None,
    to: Annotated[str, typer.Option(metavar="FORMAT", help="hf, native or gguf.")] = "hf",
    out: Annotated[
        str | None,
        typer.Option(
            "-o", "--out", metavar="OUT", help="The folder, or .gguf file; it must not exist."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="gguf: f32 (the default), f16 or q8_0.")
    ] = None,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Write a model as Hugging Face's, GGUF or our own format.

    What was imported goes back byte for byte. Examples:

      glass convert runs/text --to hf -o exported

      glass convert runs/text --to gguf --dtype q8_0 -o text.gguf

      glass convert path/to/Qwen3-0.6B --to native -o mine
    """
    target = out or folder
    if target is None or (out is not None and folder is not None):
        raise InputError(
            "where to?" if target is None else "two folders to write to",
            hint=f"glass convert {model} --to {to} -o FOLDER",
        )
    path = find_model(model, runs=Path(runs))
    from glassformer.cli.actions import convert as converting

    converting.convert(path, Path(target), to=to, dtype=dtype, as_json=as_json)
