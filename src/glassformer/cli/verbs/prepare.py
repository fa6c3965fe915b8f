"""`glass prepare`: encode a corpus, print what became of it, and what to do next. No torch."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glassformer.cli.shell.options import AsJson, Runs, takes
from glassformer.cli.shell.terminal import end
from glassformer.spec.errors import InputError
from glassformer.spec.options import option
from glassformer.spec.tasks import OWN_TOKENIZERS, PrepareSpec
from glassformer.spec.units import pasted

if TYPE_CHECKING:
    from glassformer.lab.corpus import PreparedCorpus


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
    overwrite: bool = option(False, help="Delete the corpus in this folder, make it anew."),
    verify: bool = option(False, help="Only hash every file of the prepared corpus PATH."),
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
    if verify:
        if out is not None or given or overwrite or len(paths) != 1:
            raise InputError(
                "--verify takes the folder of one prepared corpus, and nothing else",
                hint=f"glass prepare {paths[0]} --verify",
            )
        from glassformer.lab.corpus import PreparedCorpus

        corpus = PreparedCorpus.open(paths[0])
        corpus.verify()
        _tell(corpus, as_json=as_json)
        if not as_json:
            print("  every file is as it was written")
        return
    if out is None:
        raise InputError("where to?", hint=f"glass prepare {' '.join(paths[:2])} -o FOLDER")
    from glassformer.lab.corpus import prepared

    options, folder = dict(given), Path(out)
    named = options.get("tokenizer", "bpe")
    if named not in OWN_TOKENIZERS and not Path(named).exists():
        from glassformer.cli.shell.resolve import find_model

        options["tokenizer"] = find_model(named, runs=Path(runs), also=OWN_TOKENIZERS)
    _tell(prepared(paths, folder, PrepareSpec(**options), overwrite=overwrite), as_json=as_json)
    if not as_json:
        place = pasted(folder)
        train = (f"glass train lm task.path={place}", "train on it")
        end("", [train, (f"glass prepare {place} --verify", "hash every file of it")])


def _tell(corpus: "PreparedCorpus", *, as_json: bool) -> None:
    print(json.dumps(corpus.to_dict()) if as_json else "\n".join(corpus.summary()), flush=True)
