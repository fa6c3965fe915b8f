"""`glass inspect`: its options; `actions.inspect` does the work."""

from pathlib import Path
from typing import Annotated

import typer

from glassformer.cli.shell import resolve
from glassformer.cli.shell.options import AnyModel, AsJson, Device, Runs, out_file


def inspect(
    model: AnyModel,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the model reads.")],
    layer: Annotated[
        int | None, typer.Option(help="The layer whose attention is shown, from 0.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="A number, mean, or a name such as L1H3 or cross.L0H2.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="self, or of an encoder-decoder encoder or cross.")
    ] = None,
    pos: Annotated[
        int | None, typer.Option(help="The position whose predictions are shown; -1 is the last.")
    ] = None,
    top: Annotated[int, typer.Option(help="How many predictions to list.")] = 5,
    ablate: Annotated[
        list[str] | None,
        typer.Option(metavar="HEAD", help="Ablate a head, such as L1H3; repeatable."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="What should follow; losses are then of this.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Another model at the same text: what differs."),
    ] = None,
    out: Annotated[
        str | None,
        out_file("Write a .png, .svg, .html or .json."),
    ] = None,
    device: Device = "cpu",
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Look inside a model while it reads a text.

    Attention, the logit lens, norms, and what ablating each head changes. Without --layer and
    --head the map is of the head whose ablation changes most. Examples:

      glass inspect digits "SECOND 7 3 9"

      glass inspect digits "SECOND 7 3 9" --target 3 --ablate L1H3

      glass inspect digits "SECOND 7 3 9" --head L1H3 --against digits@80

      glass inspect reverse "3 1 4 15 9" --kind cross --layer 1 -o cross.png
    """
    place = resolve.find_model(model, runs=Path(runs))
    other = None if against is None else resolve.find_model(against, runs=Path(runs))
    from glassformer.cli.actions import inspect as action

    options = action.Options(
        layer=layer,
        head=head,
        kind=kind,
        position=pos,
        top=top,
        ablate=tuple(ablate or ()),
        target=target,
        against=against,
    )
    action.run(place, text, options, other=other, device=device, out=out, as_json=as_json)
