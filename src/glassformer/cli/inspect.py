"""`glass inspect`: the options of one look inside. `inspecting` does the work."""

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A run, RUN@120, a checkpoint, a Hugging Face folder, org/name."
        ),
    ],
    text: Annotated[str, typer.Argument(help="What the model reads; of a translator, the source.")],
    layer: Annotated[int | None, typer.Option(help="Of the map to show, from 0.")] = None,
    head: Annotated[
        str | None, typer.Option(help="A number, mean, or a name such as L1H3 or cross.L0H2.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="self, or of an encoder-decoder encoder or cross.")
    ] = None,
    pos: Annotated[
        int | None, typer.Option(help="The position that is read; -1 is the last.")
    ] = None,
    top: Annotated[int, typer.Option(help="How many answers to list.")] = 5,
    ablate: Annotated[
        list[str] | None, typer.Option(help="Silence a head, L1H3; repeatable.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="What should follow: losses are of this.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="A .png, .svg, .html or .json to write.")
    ] = None,
    runs: Annotated[str, typer.Option(help="The folder that holds the runs.")] = "runs",
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON on stdout, nothing else there.")
    ] = False,
) -> None:
    """Look inside a model while it reads a text: attention, lens, norms, what each head does.

    Without --layer and --head the map is of the head whose silence changes most. Examples:

      glass inspect digits "SECOND 7 3 9"

      glass inspect digits "SECOND 7 3 9" --target 3 --ablate L1H3

      glass inspect reverse "3 1 4 15 9" --kind cross --layer 1 -o cross.png
    """
    from glassformer.cli import inspecting

    asked = inspecting.Asked(
        layer=layer,
        head=head,
        kind=kind,
        position=pos,
        top=top,
        ablate=tuple(ablate or ()),
        target=target,
    )
    inspecting.run(
        model, text, asked, runs=Path(runs), output=output, as_json=as_json, said=typer.echo
    )
