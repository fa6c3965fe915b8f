"""Run `glass prepare`: encode a corpus, print what became of it, and what to do next."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glassformer.cli.shell.output import end
from glassformer.lab.corpus import PreparedCorpus, prepared
from glassformer.spec.corpus import OWN_TOKENIZERS, PrepareSpec


def prepare(
    paths: Sequence[str],
    folder: Path,
    given: Mapping[str, Any],
    *,
    runs: Path,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Encode the corpus, going on with one that was begun, and print its sizes."""
    options = dict(given)
    named = options.get("tokenizer", "bpe")
    if named not in OWN_TOKENIZERS and not Path(named).exists():
        from glassformer.cli.shell.resolve import find_model

        options["tokenizer"] = find_model(named, runs=runs, also=OWN_TOKENIZERS)
    corpus = prepared(paths, folder, PrepareSpec(**options), overwrite=overwrite)
    _tell(corpus, as_json=as_json)
    if not as_json:
        place = shlex.quote(str(folder))
        end(
            "",
            [
                (f"glass train lm task.path={place}", "train on it"),
                (f"glass prepare {place} --verify", "hash every file of it"),
            ],
        )


def verify(path: str, *, as_json: bool) -> None:
    """Hash every file of a prepared corpus."""
    corpus = PreparedCorpus.open(path)
    corpus.verify()
    _tell(corpus, as_json=as_json)
    if not as_json:
        print("  every file is as it was written")


def _tell(corpus: PreparedCorpus, *, as_json: bool) -> None:
    print(json.dumps(corpus.to_dict()) if as_json else "\n".join(corpus.summary()), flush=True)
