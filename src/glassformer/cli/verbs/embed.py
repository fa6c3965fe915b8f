"""`glass embed`: a vector for each text, and how near they are to each other."""

import json
from pathlib import Path
from typing import Annotated, cast

import typer

from glassformer.cli.shell.options import AnyModel, AsJson, Backend, Device, Runs
from glassformer.cli.shell.process import check_device, load_by
from glassformer.cli.shell.resolve import find_model
from glassformer.cli.shell.terminal import tell
from glassformer.spec.errors import InputError
from glassformer.spec.options import option

SHOWN = 40  # characters of a text in the table


def embed(
    model: AnyModel,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="One or more texts.")],
    pooling: str | None = option(
        None,
        metavar="WHERE",
        help="mean, first, last, max, mean_sqrt or weighted_mean; "
        "by default what the model's folder says.",
    ),
    plain: bool = option(False, help="Keep the lengths of vectors: do not scale them to 1."),
    backend: Backend = "native",
    device: Device = "cpu",
    runs: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Turn texts into vectors, and print the cosine between every two.

    Examples:

      glass embed path/to/all-MiniLM-L6-v2 "a cat" "a kitten" "a spreadsheet"

      glass embed path/to/bge-small "a cat" --json
    """
    if not texts:
        raise InputError("no text", hint='glass embed MODEL "a cat" "a kitten"')
    path, device = find_model(model, runs=Path(runs)), check_device(device)
    from glassformer.adapters.embed import embed as vectors_of  # imports torch
    from glassformer.adapters.sentence import Pooling

    adapter = load_by(path, backend, device=device)
    found = vectors_of(adapter, texts, pooling=cast(Pooling | None, pooling), normalize=not plain)
    if found.shortened:
        tell(f"note: {found.shortened} texts were longer than {found.limit} tokens")
    if as_json:
        result = {
            "vectors": found.vectors.tolist(),
            "tokens": list(found.tokens),
            "pooling": found.pooling,
            "normalized": found.normalized,
        }
        print(json.dumps(result))
        return
    width = found.vectors.shape[1]
    print(f"{len(texts)} vectors of {width} numbers, read at: {found.pooling}")
    for number, (text, row) in enumerate(zip(texts, found.cosines(), strict=True), 1):
        shown = text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
        print(f"{number:>3}  {'  '.join(f'{cosine:5.2f}' for cosine in row)}  {shown}")
