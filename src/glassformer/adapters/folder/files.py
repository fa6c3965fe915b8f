"""The small files beside a model's weights: found by fixed names, read within limits.

A model folder is somebody else's data. Names are never taken from a file's content, only regular
files are opened, and their size is known before a byte is read. A native checkpoint keeps the
files of the model that it was imported from in `origin/`, which is searched second.
"""

import json
from pathlib import Path
from typing import Any

from glassformer.adapters.gguf.header import is_gguf
from glassformer.adapters.gguf.hf_files import small_file
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.serialize import unique_keys

ORIGIN = "origin"
SIDECAR_LIMIT = 10_000_000


def find_sidecar(folder: Path, name: str) -> Path | None:
    """Return the regular file of that name in the folder, or in its `origin/`."""
    for place in (folder / name, folder / ORIGIN / name):
        if place.is_file():
            return place
    return None


def read_sidecar(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object by its file name; empty if there is no such file."""
    if is_gguf(folder):
        return small_file(folder, name)
    path = find_sidecar(folder, name)
    return {} if path is None else read_object(path, limit=SIDECAR_LIMIT)


def read_object(path: Path, *, limit: int) -> dict[str, Any]:
    """Read a file that holds one JSON object, with no key twice."""
    text = read_text(path, limit=limit)
    try:
        found = json.loads(text, object_pairs_hook=unique_keys)
        if "\\ud" in text.lower():  # half of a character can be spelled, and is no text
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path.name} is not JSON: {error}", where=str(path)) from error
    if not isinstance(found, dict):
        raise FileError(f"{path.name} holds no JSON object", where=str(path))
    return found


def read_text(path: Path, *, limit: int) -> str:
    """Read a text file of at most `limit` bytes."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise FileError(
                f"{path.name} has {size:,} bytes, more than the {limit:,} that are read",
                where=str(path),
            )
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path.name} is not UTF-8 text", where=str(path)) from error
    except OSError as error:
        raise FileError(f"{path.name} cannot be read: {error.strerror}", where=str(path)) from error


def need_folder(folder: Path) -> None:
    """Refuse a path that is neither a folder nor a GGUF file."""
    if not folder.is_dir() and not is_gguf(folder):
        raise InputError(f"there is no folder {folder}", hint="give a folder with a model's files")
