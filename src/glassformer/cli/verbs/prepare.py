"""`glass prepare`: its options; `actions.prepare` does the work, without torch."""

from pathlib import Path
from typing import Annotated, Any

import typer

from glassformer.cli.shell.options import AsJson, Runs, takes
from glassformer.spec.corpus import PrepareSpec
from glassformer.spec.errors import InputError


@takes(PrepareSpec, into="given")
def prepare(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="Text, Markdown, .jsonl, these as .gz or .zst, .parquet, .arrow, a dataset saved "
            "to disk, or folders of them.",
        ),
    ],
    given: dict[str, Any],
    out: Annotated[
        str | None, typer.Option("-o", "--out", metavar="FOLDER", help="The folder to write.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the corpus in this folder, make it anew.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Only hash every file of the prepared corpus PATH.")
    ] = False,
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Encode text of any size as token shards to train on.

    The text is streamed, never held in memory. It can be killed at any moment: the same command
    goes on to the same bits. Then: glass train lm task.path=FOLDER. Examples:

      glass prepare docs -o corpora/docs --vocab-size 4000

      glass prepare wiki-*.jsonl.gz books.parquet -o corpora/mixed

      glass prepare code/ -o corpora/code --tokenizer corpora/mixed
    """
    from glassformer.cli.actions import prepare as action

    if verify:
        if out is not None or given or overwrite or len(paths) != 1:
            raise InputError(
                "--verify takes the folder of one prepared corpus, and nothing else",
                hint=f"glass prepare {paths[0]} --verify",
            )
        action.verify(paths[0], as_json=as_json)
        return
    if out is None:
        raise InputError("where to?", hint=f"glass prepare {' '.join(paths[:2])} -o FOLDER")
    action.prepare(paths, Path(out), given, runs=Path(runs), overwrite=overwrite, as_json=as_json)
