"""States on disk: what a model remembers of sequences that it has read (`spec.state`), in one file.

A file holds the arrays of one state, positions included, with a digest of all that their numbers
depend on and one of its own bytes. It is written complete or not at all, and read by the same model
only: a file of another model, or one that has changed, is refused by its name and the reason.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.spec.disk import make_folder, replace_file
from glassformer.spec.errors import FileError, MachineError
from glassformer.store.tensors import read_metadata, read_tensors, tensor_bytes

FORMAT = "glassformer-state-1"

Arrays = Mapping[str, NDArray[Any]]


def write_state(path: Path, arrays: Arrays, *, model: str, tokens: Sequence[int] = ()) -> None:
    """Write a state that this model has made; `tokens` are what its only row has read, if known."""
    about = {
        "format": FORMAT,
        "model": model,
        "tokens": " ".join(map(str, tokens)),
        "sha256": _digest(arrays),
    }
    try:
        make_folder(path.parent)
        replace_file(path, tensor_bytes(arrays, metadata=about))
    except OSError as error:
        raise MachineError(
            f"the state cannot be written: {error.strerror}", where=str(path)
        ) from error


def read_state(path: Path, *, model: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of a state that this model has made."""
    about, arrays = _about(path, model), read_tensors(path)
    if _digest(arrays) != about.get("sha256"):
        raise unusable(path, "its bytes have changed since it was written")
    return arrays


def read_tokens(path: Path, *, model: str) -> list[int]:
    """Return the tokens that are noted beside a state; only the file's header is read."""
    try:
        return [int(each) for each in _about(path, model).get("tokens", "").split()]
    except ValueError as error:
        raise unusable(path, "its token ids are not numbers") from error


def unusable(path: Path, why: str) -> FileError:
    """Return the error of a file that cannot be used."""
    return FileError(f"a kept state cannot be used: {why}", where=str(path), hint="remove the file")


def _about(path: Path, model: str) -> dict[str, str]:
    about = read_metadata(path)
    if about.get("format") != FORMAT:
        raise unusable(path, f"its format is {about.get('format', 'unknown')[:40]}, not {FORMAT}")
    if about.get("model") != model:
        raise unusable(
            path,
            "it is of another model, or of other weights, another stepper or cache of this one: "
            f"its digest is {about.get('model', 'missing')[:12]}, this one's {model[:12]}",
        )
    return about


def _digest(arrays: Arrays) -> str:
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total.update(f"{name} {array.dtype} {array.shape}\n".encode())
        total.update(array.reshape(-1).view(np.uint8).data)
    return total.hexdigest()
