"""Checkpoint folders: `spec.json`, `model.safetensors`, and `MANIFEST.json` written last.

A folder is written under a temporary name, synced, then renamed: a kill at any moment leaves the
old folder or the new one, never half of one. `MANIFEST.json` holds a format number and the SHA-256
of each file, so that a flipped bit is noticed when the folder is read.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from glassformer.spec.errors import FileError, InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.serialize import from_json, to_json
from glassformer.store.publish import publishing, write_synced
from glassformer.store.tensors import (
    Arrays,
    explain_misfit,
    is_finite,
    read_header,
    read_tensors,
    tensor_bytes,
)

FORMAT = 1
MANIFEST = "MANIFEST.json"
SPEC = "spec.json"
WEIGHTS = "model.safetensors"
QUANTIZATION = "quantization.json"  # there where layers are quantized
TEXT_LIMIT = 10_000_000


def save_checkpoint(
    folder: Path, spec: ModelSpec, weights: Arrays, *, files: Mapping[str, bytes] | None = None
) -> None:
    """Write a new checkpoint folder; one that exists is never overwritten.

    `files` adds others by name (a tokenizer, a training state); they are hashed like the rest.
    """
    if folder.exists():
        raise InputError(f"{folder} exists", hint="choose another name, or remove it first")
    problems = explain_misfit(spec, {name: array.shape for name, array in weights.items()})
    if problems:
        raise InputError(f"the weights do not fit the spec: {problems}")
    for name, array in weights.items():
        if not is_finite(array):
            raise InputError(
                f"{name} holds NaN or infinity, so the model is not saved",
                hint="go back to the last checkpoint that was written",
            )
    contents = dict(files or {})
    for name in contents:
        _check_name(name)
    contents[SPEC] = to_json(spec).encode()
    contents[WEIGHTS] = tensor_bytes(weights)
    write_folder(folder, contents)


def _check_name(name: str) -> None:
    """Require that a further file stays inside the folder, and replaces none of ours."""
    parts = name.split("/")
    if name in (MANIFEST, SPEC, WEIGHTS, QUANTIZATION) or not all(parts) or ".." in parts:
        raise InputError(
            f"'{name}' cannot be the name of a further file",
            hint="use a relative name other than those of the checkpoint itself",
        )


def write_folder(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files and their manifest under a temporary name, sync, rename."""
    size = sum(len(data) for data in contents.values())
    with publishing(folder, size=size, what="checkpoint") as beside:
        for name, data in contents.items():
            write_synced(beside / name, [data])
        write_synced(beside / MANIFEST, [_manifest_text(contents).encode()])


def _manifest_text(contents: Mapping[str, bytes]) -> str:
    files = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in sorted(contents.items())
    }
    return json.dumps({"format": FORMAT, "files": files}, indent=2) + "\n"


def verify_folder(folder: Path) -> dict[str, Any]:
    """Check every file against MANIFEST.json, and return it; a damaged file is named."""
    path = folder / MANIFEST
    if not path.is_file():
        raise FileError(
            "not a checkpoint: MANIFEST.json is missing",
            where=str(folder),
            hint="a checkpoint folder holds MANIFEST.json, spec.json and model.safetensors",
        )
    try:
        manifest = json.loads(read_text(path))
        number, files = manifest["format"], manifest["files"]
        if not isinstance(files, dict):
            raise TypeError("its files are not a table")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileError(f"MANIFEST.json cannot be read: {error}", where=str(folder)) from error
    if number != FORMAT:
        raise FileError(
            f"checkpoint format {number}; this version reads format {FORMAT}", where=str(folder)
        )
    for name, entry in files.items():
        _verify_file(folder, name, entry)
    return dict(manifest)


def _verify_file(folder: Path, name: str, entry: Any) -> None:
    path = folder / name
    try:
        found = path.resolve().is_relative_to(folder.resolve()) and path.is_file()
    except (OSError, ValueError):  # a name that no file system takes
        found = False
    if not found:
        raise FileError(f"{name[:80]!a} is missing", where=str(folder))
    if not isinstance(entry, dict) or path.stat().st_size != entry.get("bytes"):
        raise FileError(f"{name} has another size than when it was written", where=str(folder))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != entry.get("sha256"):
        raise FileError(
            f"{name} was changed after it was written: its SHA-256 differs", where=str(folder)
        )


def load_checkpoint(folder: Path) -> tuple[ModelSpec, dict[str, NDArray[Any]]]:
    """Return the spec and the weights, verified; each tensor has the shape that the spec gives."""
    manifest = verify_folder(folder)
    if QUANTIZATION in manifest["files"]:
        raise InputError(
            "the checkpoint is quantized, and plain weights are needed here",
            where=str(folder),
            hint="open it with glassformer.load; quant.dequantize_model gives plain weights",
        )
    for name in (SPEC, WEIGHTS):
        if name not in manifest["files"]:
            raise FileError(f"the checkpoint holds no {name}", where=str(folder))
    try:
        spec = from_json(ModelSpec, read_text(folder / SPEC))
    except InputError as error:
        raise FileError(f"spec.json: {error.what}", where=str(folder)) from error
    shapes = {name: shape for name, (_, shape) in read_header(folder / WEIGHTS).items()}
    problems = explain_misfit(spec, shapes)
    if problems:
        raise FileError(f"the weights do not fit the spec: {problems}", where=str(folder))
    return spec, read_tensors(folder / WEIGHTS)


def read_text(path: Path) -> str:
    """Read a small text file of a checkpoint."""
    if path.stat().st_size > TEXT_LIMIT:
        raise FileError(f"{path.name} is too large", where=str(path.parent))
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path.name} is not text", where=str(path.parent)) from error
