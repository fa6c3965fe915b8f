"""Options that several verbs share, each spelled once."""

from typing import Annotated

import typer

AnyModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run, RUN@120, a checkpoint, a Hugging Face folder, a .gguf, org/name.",
    ),
]
Trainable = Annotated[
    str,
    typer.Argument(metavar="TASK|CONFIG", help="A task of `glass list`, or a config file."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="train.lr=1e-3, task.max_length=8, ..."),
]
Runs = Annotated[str, typer.Option(help="The folder that holds the runs.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads; as many as the work is worth unless said.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]
