"""The tensors of a GGUF file: their types, and the numbers in them as NumPy arrays.

Bounds and types are checked first; then tensors are mapped one at a time. Imports no torch.
"""

import math
import mmap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.adapters.folder.weights import check_finite, not_finite
from glassformer.adapters.gguf.config import FACTORS, entry_of, read_settings, table_of
from glassformer.adapters.gguf.header import Head, read_head
from glassformer.adapters.table import Array, Family, Plan, Shape, make_plan
from glassformer.kernels import c_library, threads
from glassformer.kernels.large_pages import Floats, LargePages, empty
from glassformer.kernels.packed import MOST_INPUTS, PackedMatrix
from glassformer.spec.errors import FileError, MachineError
from glassformer.spec.model import ModelSpec
from glassformer.store.tensors import BFLOAT16, DTYPES

#: Kinds that are no blocks, by the format's numbers.
FLOATS = {0: DTYPES["F32"], 1: DTYPES["F16"], 28: DTYPES["F64"], 30: BFLOAT16}


def library() -> Any:
    """Import the `gguf` package, or raise with how to install it."""
    try:
        import gguf
    except ImportError as error:
        raise MachineError(
            "GGUF files need the library gguf, which is not installed",
            hint="pip install gguf",
        ) from error
    return gguf


@dataclass(frozen=True, slots=True)
class Kind:
    """A tensor type: `block` numbers of a row take `size` bytes."""

    number: int
    name: str
    block: int
    size: int

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether the rows of a tensor are complete blocks."""
        return shape[-1] % self.block == 0

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Return the size in bytes of a tensor that fits."""
        return math.prod(shape) // self.block * self.size


#: Numbers of a row that is unpacked at once.
ROW = 1 << 13


#: The usual kinds, which need no library to be read.
USUAL = {
    kind.number: kind
    for kind in (
        *(
            Kind(0, "F32", 1, 4),
            Kind(1, "F16", 1, 2),
            Kind(28, "F64", 1, 8),
            Kind(30, "BF16", 1, 2),
        ),
        *(Kind(2, "Q4_0", 32, 18), Kind(3, "Q4_1", 32, 20), Kind(6, "Q5_0", 32, 22)),
        *(Kind(8, "Q8_0", 32, 34), Kind(12, "Q4_K", 256, 144), Kind(14, "Q6_K", 256, 210)),
    )
}


@cache
def kind_of(number: int) -> Kind | None:
    """Return a type that can be unpacked; None for integer types and unknown ones."""
    if number in USUAL:
        return USUAL[number]
    gguf = library()
    try:
        kind = gguf.GGMLQuantizationType(number)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if number not in FLOATS:
            gguf.quants.dequantize(np.zeros((1, size), dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return Kind(number, kind.name, block, size)


def unpacked(
    data: NDArray[np.uint8],
    kind: Kind,
    shape: tuple[int, ...],
    *,
    empty: Callable[[tuple[int, ...]], Floats] = empty,
) -> tuple[Array, bool]:
    """Return the numbers of these bytes: a view, or for packed types float32 in `empty` memory.

    True if all of them are known to be finite.
    """
    if kind.number in FLOATS:
        return data.view(FLOATS[kind.number]).reshape(shape), False
    if not c_library.available():
        return _unpacked_by_library(data, kind, shape), False
    array = empty(shape)
    blocks = data.size // kind.size
    found = c_library.library().glass_unpack(
        kind.number, data.ctypes.data, array.ctypes.data, blocks, threads.current()
    )
    if found < 0:  # a type that the C file does not have
        return _unpacked_by_library(data, kind, shape), False
    return array, found == 0


def _unpacked_by_library(data: NDArray[np.uint8], kind: Kind, shape: tuple[int, ...]) -> Floats:
    gguf = library()
    # Blocks are unpacked one by one, and the library goes over 16 rows at a time: longer rows, of
    # any blocks that follow each other, are fewer calls.
    blocks, row = data.size // kind.size, shape[-1] // kind.block
    most = max(row, ROW // kind.block)
    width = next(n for n in range(min(most, blocks), 0, -1) if blocks % n == 0)
    rows = data.reshape(-1, max(width, row) * kind.size)
    with np.errstate(all="ignore"):  # NaN and infinity are checked afterwards
        numbers = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(kind.number))
    return np.ascontiguousarray(numbers, dtype=np.float32).reshape(shape)


class GGUFWeights:
    """The `Weights` of a file: floats as they are stored, packed types as float32."""

    def __init__(self, path: Path, *, large_pages: bool = True) -> None:
        self.path = path
        self.where = str(path)
        self.head: Head = read_head(path)
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, np.dtype] = {}
        self._kinds: dict[str, Kind] = {}
        self._empty = LargePages().empty if large_pages else empty
        spans = []
        for name, stored in self.head.tensors.items():
            kind = kind_of(stored.kind)
            if kind is None:
                raise self._bad(name, f"is of kind {stored.kind}, which cannot be read as numbers")
            if not kind.fits(stored.shape):
                raise self._bad(name, f"of kind {kind.name} has rows of {stored.shape[-1]} numbers")
            size = kind.bytes_of(stored.shape)
            start = self.head.data + stored.offset
            if stored.offset % self.head.alignment or start + size > self.head.size:
                raise self._bad(name, "has an offset outside of the file, or not aligned")
            spans.append((start, start + size, name))
            self.shapes[name] = stored.shape
            self.dtypes[name] = FLOATS.get(stored.kind, DTYPES["F32"])
            self._kinds[name] = kind
        end = 0
        for start, stop, name in sorted(spans):
            if start < end:
                raise self._bad(name, "shares bytes with another one")
            end = stop

    def _bad(self, name: str, what: str) -> FileError:
        return FileError(f"tensor {name[:80]} {what}", where=self.where)

    @property
    def packed_kinds(self) -> Counter[str]:
        """The number of tensors of each packed type."""
        return Counter(kind.name for kind in self._kinds.values() if kind.number not in FLOATS)

    def read(self, name: str, *, again: bool = False) -> Array:
        """Read one tensor from its own copy-on-write map.

        With large pages several tensors share a piece of memory; `again` is for one that is
        converted and then freed, which has its own.
        """
        kind, shape = self._kinds[name], self.shapes[name]
        where = empty if again else self._empty
        array, is_finite = unpacked(self._bytes(name), kind, shape, empty=where)
        if not is_finite:
            check_finite(name, array, where=self.where)
        return array

    def read_packed(self, name: str) -> PackedMatrix | None:
        """Map a matrix as it is packed; None if it is not, or the C file has no such blocks."""
        kind, shape = self._kinds[name], self.shapes[name]
        if kind.number in FLOATS or len(shape) != 2 or shape[1] > MOST_INPUTS:
            return None
        found = PackedMatrix(kind.number, shape[1], self._bytes(name).reshape(shape[0], -1))
        is_finite = found.is_finite(block=kind.size)
        if is_finite is False:
            raise not_finite(name, where=self.where)
        return None if is_finite is None else found

    def _bytes(self, name: str) -> NDArray[np.uint8]:
        size = self._kinds[name].bytes_of(self.shapes[name])
        start = self.head.data + self.head.tensors[name].offset
        before = start % mmap.ALLOCATIONGRANULARITY
        try:
            with self.path.open("rb") as file:
                mapped = mmap.mmap(
                    file.fileno(), before + size, access=mmap.ACCESS_COPY, offset=start - before
                )
        except (OSError, ValueError) as error:  # the file has changed meanwhile
            raise self._bad(name, f"cannot be read: {error}") from error
        return np.frombuffer(mapped, dtype=np.uint8, count=size, offset=before)


def read_family(path: Path, weights: GGUFWeights) -> tuple[Family, ModelSpec]:
    """Return the family that computes a file's model, and its spec."""
    embedding = weights.shapes.get("token_embd.weight")
    if embedding is None:
        raise FileError("there is no tensor token_embd.weight", where=str(path))
    factors = None
    if FACTORS in weights.shapes:
        if len(weights.shapes[FACTORS]) != 1:
            raise FileError(f"{FACTORS} has the shape {weights.shapes[FACTORS]}", where=str(path))
        factors = weights.read(FACTORS).tolist()
    return read_settings(
        weights.head.metadata,
        tensors=weights.shapes,
        rows=embedding[0],
        factors=factors,
        where=str(path),
    )


def plan_of(weights: GGUFWeights, spec: ModelSpec) -> Plan:
    """Return which of a file's tensors is which of our parameters."""
    entry = entry_of(weights.head.metadata, where=weights.where)
    return make_plan(table_of(entry, spec), spec)
