"""`glass convert`: its options; `actions.convert` does the work."""

from pathlib import Path
from typing import Annotated

import typer

from glassformer.cli.shell.options import AsJson, Runs


def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A run, a checkpoint, a Hugging Face folder, a GGUF file."
        ),
    ],
    folder: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="The folder, or the .gguf file, to write; it must not exist."
        ),
    ],
    to: Annotated[str, typer.Option(help="hf, native or gguf.")],
    dtype: Annotated[str | None, typer.Option(help="gguf: f32 (the default), f16 or q8_0.")] = None,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Write a model as Hugging Face's, GGUF or our own format.

    What was imported goes back byte for byte. Examples:

      glass convert path/to/Qwen3-0.6B mine --to native

      glass convert runs/text exported --to hf

      glass convert runs/text text.gguf --to gguf --dtype q8_0
    """
    from glassformer.cli.actions import convert as converting

    converting.convert(model, Path(folder), to=to, dtype=dtype, runs=Path(runs), as_json=as_json)
