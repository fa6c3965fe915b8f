"""Checkpoint folders: `spec.json`, `model.safetensors`, and `MANIFEST.json` written last.

A folder is written under a temporary name, synced, then renamed: a kill at any moment leaves the
old folder or the new one, never half of one. `MANIFEST.json` holds a format number and the SHA-256
of each file, so that a flipped bit is noticed when the folder is read.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from glassformer.spec.disk import (
    check_new,
    create,
    folder_beside,
    make_folder,
    rename,
    small_text,
    sync_folder,
)
from glassformer.spec.errors import FileError, InputError, MachineError
from glassformer.spec.model import ModelSpec
from glassformer.spec.quantization import Quantization, from_record, stored_tensors, to_record
from glassformer.spec.schemes import StoredTensor
from glassformer.spec.serialize import from_json, to_json, unique_keys
from glassformer.store.tensors import (
    CODES,
    Arrays,
    Deferred,
    TensorPieces,
    explain_difference,
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
SUMS = "SHA256SUMS"
QUANTIZATION = "quantization.json"  # there where layers are quantized


# --- folders that appear complete or not at all --------------------------------------------------


@contextlib.contextmanager
def publishing(folder: Path, *, size: int, what: str = "folder") -> Iterator[Path]:
    """Yield a temporary folder that becomes this one when the block ends; an error removes it."""
    with _told(folder, size=size, what=what), folder_beside(folder) as beside:
        yield beside
        for inner in {path.parent for path in beside.rglob("*")} | {beside}:
            sync_folder(inner)
        rename(beside, folder)


@contextlib.contextmanager
def publishing_file(file: Path, *, size: int) -> Iterator[Path]:
    """Yield a temporary path for a single file, which the block has to sync."""
    with _told(file, size=size, what="file"), folder_beside(file) as beside:
        yield beside / file.name
        rename(beside / file.name, file)


@contextlib.contextmanager
def _told(path: Path, *, size: int, what: str) -> Iterator[None]:
    """Report what the system refuses as an error of the machine."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"could not write the {what}: {error.strerror}",
            where=str(path),
            hint=f"it needs {size:,} bytes; what was there before is untouched",
        ) from error


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file of these pieces; it is on the disk when this returns."""
    make_folder(path.parent)
    with create(path) as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


# --- checkpoints ---------------------------------------------------------------------------------


#: The contents of a file: its bytes, or tensors that are written one at a time.
Contents = bytes | TensorPieces


def save_checkpoint(
    folder: Path,
    spec: ModelSpec,
    weights: Mapping[str, NDArray[Any] | Deferred],
    *,
    files: Mapping[str, Contents] | None = None,
) -> None:
    """Write a new checkpoint folder; one that exists is never overwritten.

    `files` adds others by name (a tokenizer, a training state); they are hashed like the rest.
    """
    check_new(folder)
    problems = explain_misfit(spec, {name: array.shape for name, array in weights.items()})
    if problems:
        raise InputError(f"the weights do not fit the spec: {problems}")
    for name, array in weights.items():
        if not isinstance(array, Deferred) and not is_finite(array):
            raise InputError(
                f"{name} holds NaN or infinity, so the model is not saved",
                hint="go back to the last checkpoint that was written",
            )
    contents = dict(files or {})
    for name in contents:
        _check_name(name)
    contents[SPEC] = to_json(spec).encode()
    contents[WEIGHTS] = TensorPieces(weights)
    write_folder(folder, contents)


def _check_name(name: str) -> None:
    """Require that a further file stays inside the folder, and replaces none of ours."""
    parts = name.split("/")
    if name in (MANIFEST, SPEC, WEIGHTS, QUANTIZATION) or not all(parts) or ".." in parts:
        raise InputError(
            f"'{name}' cannot be the name of a further file",
            hint="use a relative name other than those of the checkpoint itself",
        )


def write_folder(folder: Path, contents: Mapping[str, Contents]) -> None:
    """Write files in their order and their manifest under a temporary name, sync, rename."""
    size = sum(len(d) if isinstance(d, bytes) else d.size for d in contents.values())
    with publishing(folder, size=size, what="checkpoint") as beside:
        files = {name: _write_hashed(beside / name, data) for name, data in contents.items()}
        manifest = {"format": FORMAT, "files": dict(sorted(files.items()))}
        write_synced(beside / MANIFEST, [(json.dumps(manifest, indent=2) + "\n").encode()])


def _write_hashed(path: Path, data: Contents) -> dict[str, Any]:
    """Write a file, and return its entry in the manifest."""
    return write_hashed(path, [data] if isinstance(data, bytes) else data)


def write_hashed(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file of these pieces, synced; return its size and its SHA-256."""
    total, size = hashlib.sha256(), 0

    def hashed() -> Iterator[bytes | memoryview]:
        nonlocal size
        for piece in pieces:
            total.update(piece)
            size += len(piece)
            yield piece

    write_synced(path, hashed())
    return {"bytes": size, "sha256": total.hexdigest()}


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
        manifest = json.loads(small_text(path))
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


# --- folders of other formats: sums beside the files, as `sha256sum --check` reads them -----------


def sums_text(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of SHA256SUMS for files by name, each with its `sha256`."""
    return "".join(f"{entry['sha256']}  {name}\n" for name, entry in sorted(files.items()))


def verify_sums(folder: Path, *, weights: bool = True) -> None:
    """Check the files that SHA256SUMS names, if the folder has one; without `weights`, small ones.

    A format of others holds no hash of its own: what we export has one beside it.
    """
    path = folder / SUMS
    if not path.is_file():
        return
    for line in small_text(path).splitlines():
        digest, name = line[:64], line[66:]
        if not name or line[64:66] not in ("  ", " *"):
            raise FileError(f"{SUMS} is damaged", where=str(folder), hint=_SUMS_HINT)
        if weights or not name.endswith(".safetensors"):
            try:
                found = {"bytes": (folder / name).stat().st_size, "sha256": digest}
            except (OSError, ValueError):
                found = {}
            try:
                _verify_file(folder, name, found)
            except FileError as error:
                raise FileError(error.what, where=str(folder), hint=_SUMS_HINT) from error


_SUMS_HINT = f"if the change was meant, delete {SUMS}"


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
        spec = from_json(ModelSpec, small_text(folder / SPEC))
    except InputError as error:
        raise FileError(f"spec.json: {error.what}", where=str(folder)) from error
    shapes = {name: shape for name, (_, shape) in read_header(folder / WEIGHTS).items()}
    problems = explain_misfit(spec, shapes)
    if problems:
        raise FileError(f"the weights do not fit the spec: {problems}", where=str(folder))
    return spec, read_tensors(folder / WEIGHTS)


# --- with quantized layers: the same folder, and quantization.json to say which ------------------


def is_quantized(folder: Path) -> bool:
    """Return True if a checkpoint folder holds quantized layers."""
    return (folder / QUANTIZATION).is_file()


def save_quantized(
    folder: Path,
    spec: ModelSpec,
    quantization: Quantization,
    weights: Arrays,
    *,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a new checkpoint folder; one that exists is never overwritten."""
    check_new(folder)
    header = {name: (CODES[array.dtype], array.shape) for name, array in weights.items()}
    problems = _explain(stored_tensors(spec, quantization), header)
    if problems:
        raise InputError(f"the weights do not fit the spec: {problems}")
    for name, array in weights.items():
        if not is_finite(array):
            raise InputError(f"{name} holds NaN or infinity, so the model is not saved")
    contents = dict(files or {})
    contents[SPEC] = to_json(spec).encode()
    contents[QUANTIZATION] = (json.dumps(to_record(quantization), indent=2) + "\n").encode()
    contents[WEIGHTS] = tensor_bytes(weights)
    write_folder(folder, contents)


def describe_quantized(
    folder: Path,
) -> tuple[ModelSpec, Quantization, dict[str, StoredTensor]]:
    """Return the spec, the quantization and the tensors that follow from them; verify no file."""
    try:
        spec = from_json(ModelSpec, small_text(folder / SPEC))
        quantization = _read_quantization(folder / QUANTIZATION)
        return spec, quantization, stored_tensors(spec, quantization)
    except InputError as error:
        raise FileError(f"a bad description: {error.what}", where=str(folder)) from error


def load_quantized(folder: Path) -> tuple[ModelSpec, Quantization, dict[str, NDArray[Any]]]:
    """Return the spec, the quantization, and the tensors, verified."""
    manifest = verify_folder(folder)
    for name in (SPEC, WEIGHTS, QUANTIZATION):
        if name not in manifest["files"]:
            raise FileError(f"the checkpoint holds no {name}", where=str(folder))
    spec, quantization, wanted = describe_quantized(folder)
    problems = _explain(wanted, read_header(folder / WEIGHTS))
    if problems:
        raise FileError(f"the weights do not fit the spec: {problems}", where=str(folder))
    return spec, quantization, read_tensors(folder / WEIGHTS)


def _read_quantization(path: Path) -> Quantization:
    """Read `quantization.json`, of this version or an earlier one."""
    try:
        record = json.loads(small_text(path), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}") from error
    return from_record(record)


def _explain(
    wanted: Mapping[str, StoredTensor], header: Mapping[str, tuple[str, tuple[int, ...]]]
) -> str:
    """Name what is missing, unexpected, misshapen or mistyped; empty if everything fits."""
    problems = explain_difference(wanted, {name: shape for name, (_, shape) in header.items()})
    mistyped = [
        f"{name} {header[name][0]} instead of {tensor.dtype or 'a float'}"
        for name, tensor in wanted.items()
        if name in header and not _fits(header[name][0], tensor.dtype)
    ]
    parts = [problems, f"mistyped: {', '.join(mistyped)}" if mistyped else ""]
    return "; ".join(part for part in parts if part)


def _fits(code: str, wanted: str) -> bool:
    return code == wanted if wanted else code in ("F64", "F32", "F16", "BF16")
