"""Checkpoints with quantized layers: the same folder, and `quantization.json` to say which.

The tensors are whole numbers, scales and zeros in our own layout, whatever machine wrote them; each
must have the shape and type that the spec and the quantization give it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from glassformer.spec.errors import FileError, InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.quantization import Quantization, from_record, stored_tensors, to_record
from glassformer.spec.schemes import StoredTensor
from glassformer.spec.serialize import from_json, to_json, unique_keys
from glassformer.store.checkpoint import (
    QUANTIZATION,
    SPEC,
    WEIGHTS,
    read_text,
    verify_folder,
    write_folder,
)
from glassformer.store.tensors import (
    CODES,
    Arrays,
    explain_difference,
    is_finite,
    read_header,
    read_tensors,
    tensor_bytes,
)


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
    if folder.exists():
        raise InputError(f"{folder} exists", hint="choose another name, or remove it first")
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


def load_quantized(folder: Path) -> tuple[ModelSpec, Quantization, dict[str, NDArray[Any]]]:
    """Return the spec, the quantization, and the tensors, verified."""
    manifest = verify_folder(folder)
    for name in (SPEC, WEIGHTS, QUANTIZATION):
        if name not in manifest["files"]:
            raise FileError(f"the checkpoint holds no {name}", where=str(folder))
    try:
        spec = from_json(ModelSpec, read_text(folder / SPEC))
        quantization = _read_quantization(folder / QUANTIZATION)
        wanted = stored_tensors(spec, quantization)
    except InputError as error:
        raise FileError(f"a bad description: {error.what}", where=str(folder)) from error
    problems = _explain(wanted, read_header(folder / WEIGHTS))
    if problems:
        raise FileError(f"the weights do not fit the spec: {problems}", where=str(folder))
    return spec, quantization, read_tensors(folder / WEIGHTS)


def _read_quantization(path: Path) -> Quantization:
    """Read `quantization.json`, of this version or an earlier one."""
    try:
        record = json.loads(read_text(path), object_pairs_hook=unique_keys)
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
