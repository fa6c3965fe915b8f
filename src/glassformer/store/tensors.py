"""Tensor files: safetensors, with limits in front of the library.

The library refuses truncated and overlapping files; the limits here bound what a hostile header can
cost before anything is allocated, and require that every tensor fits the manifest.
"""

import json
import math
import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors
from numpy.typing import NDArray

from glassformer.spec.errors import FileError, InputError
from glassformer.spec.manifest import stored
from glassformer.spec.model import ModelSpec
from glassformer.spec.serialize import unique_keys

#: Numbers that NumPy lacks: their bytes, under the name that torch gives them.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])
FLOAT8_E4M3 = np.dtype([("float8_e4m3fn", "u1")])

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "F8_E4M3": FLOAT8_E4M3,
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
#: The types that NumPy lacks, by torch's name.
OPAQUE = {dtype.names[0]: dtype for dtype in DTYPES.values() if dtype.names is not None}


class Shaped(Protocol):
    """Anything with a shape: a parameter of the manifest, or a stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that a tensor of this name must have."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """An array that is made when it is read: a file can be written with one in memory at a time."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], NDArray[Any]]


HEADER_LIMIT = 10_000_000
#: Of all files of a model together; those of the largest are 20 MB.
HEADERS_LIMIT = 32_000_000
COUNT_LIMIT = 100_000
DIMS_LIMIT = 8
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}")

#: Names of tensors in an error.
LISTED = 20

Arrays = Mapping[str, NDArray[Any]]


def tensor_bytes(arrays: Arrays, *, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a safetensors file, names sorted: equal weights give equal bytes."""
    return b"".join(_pieces(arrays, metadata=metadata))


@dataclass(frozen=True, slots=True)
class TensorPieces:
    """The contents of a tensor file, made an array at a time while it is written."""

    arrays: Mapping[str, NDArray[Any] | Deferred]

    @property
    def size(self) -> int:
        """The number of bytes of the arrays."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in self.arrays.values())

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return _pieces(self.arrays)


def _pieces(
    arrays: Mapping[str, NDArray[Any] | Deferred], *, metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Return a file's bytes an array at a time; a deferred one is refused if it is not finite."""
    described = {}
    for name in sorted(arrays):
        if arrays[name].dtype not in CODES:
            raise InputError(
                f"tensor '{name}' has dtype {arrays[name].dtype}",
                hint=f"use one of {', '.join(DTYPES)}",
            )
        described[name] = (CODES[arrays[name].dtype], arrays[name].shape)

    def read(name: str) -> NDArray[Any]:
        array = arrays[name]
        if not isinstance(array, Deferred):
            return array
        made = array.read()
        if not is_finite(made):
            raise InputError(
                f"{name} holds NaN or infinity, so the model is not saved",
                hint="go back to the last checkpoint that was written",
            )
        return made

    return tensor_chunks(described, read, metadata=metadata)


def tensor_chunks(
    described: Mapping[str, tuple[str, tuple[int, ...]]],
    array_of: Callable[[str], NDArray[Any]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file in pieces: dtype code and shape of each tensor, then the data.

    Written here because the library's own writer takes no bfloat16 without torch: eight bytes of
    header length, the header as JSON padded to eight bytes, then the data, an array at a time.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, (code, shape) in described.items():
        end = offset + DTYPES[code].itemsize * math.prod(shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text))
    yield text
    for name in described:
        yield _memory(array_of(name))


def _memory(array: NDArray[Any]) -> memoryview:
    """Return an array's bytes where they are: hashing and writing these lets other threads run."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a tensor file."""
    found = _header(path).get("__metadata__", {})
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise FileError("a tensor file whose metadata is not text", where=path.name)
    return found


def header_length(path: Path) -> int:
    """Return the number of bytes of a file's header, which is bounded."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
    length = int(struct.unpack("<Q", first)[0]) if len(first) == 8 else size
    if length > min(HEADER_LIMIT, size - 8):
        raise FileError("a tensor file whose header is cut off or too long", where=path.name)
    return length


def _header(path: Path) -> dict[str, Any]:
    """Read the header, bounded in length; its entries are not checked yet."""
    length = header_length(path)
    with path.open("rb") as file:
        file.seek(8)
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise FileError(f"a tensor file with a broken header: {error}", where=path.name) from error
    if not isinstance(header, dict):
        raise FileError("a tensor file with a broken header: not an object", where=path.name)
    return header


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype code and shape of each tensor, before any of them is read."""
    header = _header(path)
    try:
        entries = {
            name: (str(entry["dtype"]), tuple(int(n) for n in entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise FileError(f"a tensor file with a broken header: {error}", where=path.name) from error
    if len(entries) > COUNT_LIMIT:
        raise FileError(f"{len(entries)} tensors in one file", where=path.name)
    for name, (code, shape) in entries.items():
        if not NAME.fullmatch(name) or ".." in name:
            raise FileError(f"a tensor named {name[:80]!r}", where=path.name)
        if code not in DTYPES:
            raise FileError(f"tensor {name} has dtype {code[:40]}", where=path.name)
        if len(shape) > DIMS_LIMIT or any(not 0 <= n < 1 << 48 for n in shape):
            what = f"{len(shape)} dimensions" if len(shape) > DIMS_LIMIT else "an impossible shape"
            raise FileError(f"tensor {name} has {what}", where=path.name)
    return entries


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Read every tensor of the file, which is mapped."""
    file = MappedTensors(path, where=path.name)
    arrays = {name: file.read(name) for name in file.described}
    for name, array in arrays.items():
        if not is_finite(array):
            raise FileError(f"tensor {name} holds NaN or infinity", where=path.name)
    return arrays


class MappedTensors:
    """The tensors of a file, mapped: arrays that may be written to, and the file stays as it is.

    The map lives as long as one of them.
    """

    def __init__(self, path: Path, *, where: str | None = None) -> None:
        self.path, self.described = path, read_header(path)
        try:
            with safetensors.safe_open(path, framework="np"):
                pass  # the library refuses truncated and overlapping files
            with path.open("rb") as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            named = str(path) if where is None else where
            raise FileError(f"a damaged tensor file: {error}", where=named) from error
        entries = _header(path)
        begin = 8 + struct.unpack("<Q", self._mapped[:8])[0]
        self._spans = {
            name: (begin + int(entries[name]["data_offsets"][0]), math.prod(shape))
            for name, (_, shape) in self.described.items()
        }

    def read(self, name: str) -> NDArray[Any]:
        """Return one tensor."""
        code, shape = self.described[name]
        offset, count = self._spans[name]
        if count == 0:
            return np.empty(shape, dtype=DTYPES[code])
        found = np.frombuffer(self._mapped, dtype=DTYPES[code], count=count, offset=offset)
        return np.require(found, requirements="A").reshape(shape)


def widened(array: NDArray[Any]) -> NDArray[np.float32]:
    """Return bfloat16 numbers as float32."""
    bits = np.ascontiguousarray(array).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def rounded(array: NDArray[np.float32]) -> NDArray[Any]:
    """Return finite float32 numbers as bfloat16: the nearest, of two the even one."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16).view(BFLOAT16)


def is_finite(array: NDArray[Any]) -> bool:
    """Return True if there is no NaN and no infinity; integers are always finite."""
    if array.dtype == BFLOAT16:  # NaN and infinity: all eight exponent bits set
        return bool(((array.view("<u2") & 0x7F80) != 0x7F80).all())
    if array.dtype == FLOAT8_E4M3:  # no infinity; NaN: all bits set but the sign
        return bool(((array.view("u1") & 0x7F) != 0x7F).all())
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def explain_misfit(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Name what is missing, unexpected or misshapen against the manifest; empty if all fits."""
    return explain_difference(stored(spec), shapes)


def explain_difference(wanted: Mapping[str, Shaped], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Name what is missing, unexpected or misshapen against any set of tensors."""
    parts = []
    missing = [name for name in wanted if name not in shapes]
    unexpected = [name for name in shapes if name not in wanted]
    misshapen = [
        f"{name} {tuple(shapes[name])} instead of {wanted[name].shape}"
        for name in wanted
        if name in shapes and tuple(shapes[name]) != wanted[name].shape
    ]
    for word, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen)):
        if names:
            more = f" and {len(names) - LISTED:,} more" if len(names) > LISTED else ""
            parts.append(f"{word}: {', '.join(names[:LISTED])}{more}")
    return "; ".join(parts)
