"""`glass diff`: open two models, compare them, print where they first differ."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glassformer.cli.shell.options import AsJson, Device
from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.resolve import find_model
from glassformer.kernels.threads import one_blas_thread
from glassformer.spec.presets import PRESETS, preset
from glassformer.spec.serialize import json_numbers

if TYPE_CHECKING:
    from glassformer.checks.diff import Difference

MODEL = (
    "A run, a Hugging Face folder, a GGUF file, a preset, package.module:factory or "
    "my_model.py:factory."
)


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
    found = _compared(first, second, backward=backward, device=check_device(device))
    if as_json:
        data = {**dataclasses.asdict(found), "module": "" if found.same else found.module}
        typer.echo(json.dumps(json_numbers(data), allow_nan=False))
    else:
        typer.echo(found)
    if not found.same:
        raise typer.Exit(1)


def _compared(first: str, second: str | None, *, backward: bool, device: str) -> "Difference":
    """Compare two models, or a model with transformers' implementation of the same folder."""
    from glassformer.adapters.folder.paths import folder_of
    from glassformer.adapters.load import load
    from glassformer.adapters.wrapped import open_with_transformers, opener_of
    from glassformer.checks.diff import diff as compare

    if second is not None:
        one = _opened(first, device)
        return compare(one, _opened(second, device), names=(first, second), backward=backward)
    place = find_model(first, runs=Path("runs"))
    one = load(place, device=device)
    other: object
    if one.spec.head_names() == ("next",):
        other = load(place, backend="transformers", device=device)
    else:  # an encoder continues no text, and is no model behind our contract
        folder = folder_of(place)
        other = open_with_transformers(folder, opener=opener_of(folder)).to(device)
    return compare(one, other, names=("ours", "transformers"), backward=backward)


def _opened(model: str, device: str) -> object:
    """Return the model of a preset, a factory, or a name on disk."""
    from torch import nn

    from glassformer.adapters.load import build, load
    from glassformer.checks.subject import called

    if model in PRESETS:
        return build(preset(model), seed=0).to(device)
    if ":" in model:
        made = called(model)[0]
        return made.to(device) if isinstance(made, nn.Module) else made
    return load(find_model(model, runs=Path("runs"), also=PRESETS), device=device)
