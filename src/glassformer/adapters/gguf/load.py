"""Open a GGUF file: settings become a spec, tensors a model, the rest small files.

The types of its tensors, packing and unpacking them: packing is the `gguf` library's, an optional
dependency. Bounds and types are checked first; then tensors are mapped one at a time.
"""

import json
import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.adapters.config import Config
from glassformer.adapters.folder.weights import check_finite, filled
from glassformer.adapters.gguf.config import FACTORS, entry_of, read_settings, table_of
from glassformer.adapters.gguf.header import Head, read_head
from glassformer.adapters.gguf.hf_files import kept_files, why_no_tokenizer
from glassformer.adapters.native import NativeAdapter, TrainingConfig
from glassformer.adapters.registry import adapter_for
from glassformer.adapters.table import Family, Shape, make_plan
from glassformer.kernels import c_library
from glassformer.kernels.large_pages import LargePages
from glassformer.spec.errors import FileError, InputError, MachineError
from glassformer.spec.model import ModelSpec

#: Kinds that torch has too, by the format's numbers.
FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
F32, F16, Q4_0, Q5_0, Q8_0, Q4_K = 0, 1, 2, 6, 8, 12
CHUNK = 2**22  # numbers that are packed at a time
#: The largest numbers that the written kinds hold: those of a half-precision step, times a number
#: of steps.
HALF = 65504.0
STEPS = {F16: 1, Q4_0: 8, Q5_0: 16, Q8_0: 127, Q4_K: 15 * 63}
LARGEST = {F32: float(np.finfo(np.float32).max)} | {kind: n * HALF for kind, n in STEPS.items()}


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
    empty: Callable[[tuple[int, ...]], Tensor] = torch.empty,
) -> tuple[Tensor, bool]:
    """Return the numbers of these bytes: a view, or for packed types float32 in `empty` memory.

    True if all of them are known to be finite.
    """
    if kind.number in FLOATS:
        return torch.from_numpy(data).view(FLOATS[kind.number]).reshape(shape), False
    if not c_library.available():
        return _unpacked_by_library(data, kind, shape), False
    tensor = empty(shape)
    blocks, threads = data.size // kind.size, torch.get_num_threads()
    found = c_library.library().glass_unpack(
        kind.number, data.ctypes.data, tensor.data_ptr(), blocks, threads
    )
    if found < 0:  # a type that the C file does not have
        return _unpacked_by_library(data, kind, shape), False
    return tensor, found == 0


def _unpacked_by_library(data: NDArray[np.uint8], kind: Kind, shape: tuple[int, ...]) -> Tensor:
    gguf = library()
    # Blocks are unpacked one by one, and the library goes over 16 rows at a time: longer rows, of
    # any blocks that follow each other, are fewer calls.
    blocks, row = data.size // kind.size, shape[-1] // kind.block
    most = max(row, ROW // kind.block)
    width = next(n for n in range(min(most, blocks), 0, -1) if blocks % n == 0)
    rows = data.reshape(-1, max(width, row) * kind.size)
    with np.errstate(all="ignore"):  # NaN and infinity are checked afterwards
        numbers = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(kind.number))
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32)).reshape(shape)


def packed(tensor: Tensor, kind: Kind, *, name: str) -> Iterator[NDArray[Any]]:
    """Yield the bytes of a tensor, some rows at a time."""
    gguf = library()
    rows = tensor.reshape(-1, tensor.shape[-1])
    for part in torch.split(rows, max(1, CHUNK // rows.shape[1])):
        numbers = part.to(torch.float64 if part.dtype == torch.float64 else torch.float32)
        largest = float(numbers.abs().max())
        if largest > LARGEST[kind.number]:
            raise InputError(
                f"{name} holds {largest:g}, which is too large for {kind.name}",
                hint="{--dtype f32|dtype='f32'}",
            )
        array = np.ascontiguousarray(numbers.float().numpy())
        if kind.number == Q4_K:
            yield pack_q4_k(array)
            continue
        yield gguf.quants.quantize(array, gguf.GGMLQuantizationType(kind.number))


def pack_q4_k(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return rows as blocks of Q4_K, which the library unpacks and does not pack.

    256 numbers are 8 parts of 32, each `step * q - low` with q in 0..15. The steps and lows of the
    8 parts are 6-bit multiples of two half-precision numbers.
    """
    x = numbers.reshape(-1, 8, 32)
    step, low = _steps_and_lows(x)
    coarse = np.stack([step, low]).max(-1) / np.float32(63)
    coarse = coarse.astype(np.float16)  # (2, blocks): of the steps and of the lows
    wide = coarse.astype(np.float32)[..., None]
    six = np.rint(_over(np.stack([step, low]), wide)).clip(0, 63)
    step, low = six * wide
    q = np.rint(_over(x + low[..., None], step[..., None])).clip(0, 15).astype(np.uint8)
    first, last = np.split(six.astype(np.uint8), 2, axis=-1)  # of parts 0-3 and 4-7
    tops = first | (last >> 4) << 6
    scales = np.concatenate([*tops, (last[0] & 15) | (last[1] & 15) << 4], axis=-1)
    pairs = q.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(x), -1)
    heads = np.ascontiguousarray(coarse.T).view(np.uint8)
    return np.concatenate([heads, scales, nibbles], axis=-1).reshape(len(numbers), -1)


def _over(above: NDArray[np.float32], below: NDArray[np.float32]) -> NDArray[np.float32]:
    """Divide; by zero gives zero."""
    return np.divide(above, below, out=np.zeros_like(above), where=below != 0)


def _steps_and_lows(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the steps and lows of parts with the smallest weighted error among 22 roundings.

    Each rounding to 0..15 has a best line through it (weighted least squares, large numbers count
    more); lows below zero are not in the format.
    """
    weight = np.abs(x) + np.sqrt((x * x).mean(-1, keepdims=True))
    bottom = np.minimum(x.min(-1, keepdims=True), 0)
    span = x.max(-1, keepdims=True) - bottom
    best_step, best_low = _over(span, np.full_like(span, 15)), -bottom
    least = np.full_like(span, np.inf)
    for top in (15.0, *np.linspace(14, 16, 21)):
        q = np.rint(_over(np.float32(top) * (x - bottom), span)).clip(0, 15)
        w, wx, wq, wqq, wxq = (
            (weight * part).sum(-1, keepdims=True) for part in (1, x, q, q * q, x * q)
        )
        inside = w * wqq - wq * wq
        step = _over(w * wxq - wx * wq, inside)
        low = _over(wq * wxq - wqq * wx, inside)
        step, low = np.where(low < 0, _over(wxq, wqq), step), np.maximum(low, 0)
        error = (weight * (step * q - low - x) ** 2).sum(-1, keepdims=True)
        better = (error < least) & (step > 0)
        least = np.where(better, error, least)
        best_step, best_low = np.where(better, step, best_step), np.where(better, low, best_low)
    return best_step[..., 0], best_low[..., 0]


class GGUFWeights:
    """The `Weights` of a file: floats as they are stored, packed types as float32."""

    def __init__(self, path: Path, *, large_pages: bool = True) -> None:
        self.path = path
        self.where = str(path)
        self.head: Head = read_head(path)
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._kinds: dict[str, Kind] = {}
        self._empty = LargePages().empty if large_pages else torch.empty
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
            self.dtypes[name] = FLOATS.get(stored.kind, torch.float32)
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

    def read(self, name: str, *, again: bool = False) -> Tensor:
        """Read one tensor from its own copy-on-write map.

        With large pages several tensors share a piece of memory; `again` is for one that is
        converted and then freed, which has its own.
        """
        kind, shape = self._kinds[name], self.shapes[name]
        size = kind.bytes_of(shape)
        start = self.head.data + self.head.tensors[name].offset
        before = start % mmap.ALLOCATIONGRANULARITY
        try:
            with self.path.open("rb") as file:
                mapped = mmap.mmap(
                    file.fileno(), before + size, access=mmap.ACCESS_COPY, offset=start - before
                )
        except (OSError, ValueError) as error:  # the file has changed meanwhile
            raise self._bad(name, f"cannot be read: {error}") from error
        data = np.frombuffer(mapped, dtype=np.uint8, count=size, offset=before)
        empty = torch.empty if again else self._empty
        tensor, is_finite = unpacked(data, kind, shape, empty=empty)
        if not is_finite:
            check_finite(name, tensor, where=self.where)
        return tensor


# --- the model ------------------------------------------------------------------------------------


def read_gguf_spec(path: Path) -> ModelSpec:
    """Return the spec of a file's model, from its header alone."""
    return _read_spec(path, GGUFWeights(path))[1]


def _read_spec(path: Path, weights: GGUFWeights) -> tuple[Family, ModelSpec]:
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


def open_gguf(
    path: Path,
    settings: TrainingConfig,
    *,
    dtype: torch.dtype | None,
    device: str,
    large_pages: bool = True,
) -> NativeAdapter:
    """Open the model of a file; the report notes what was unpacked or could not be read."""
    weights = GGUFWeights(path, large_pages=large_pages)
    head = weights.head
    family, spec = _read_spec(path, weights)
    entry = entry_of(head.metadata, where=str(path))
    plan = make_plan(table_of(entry, spec), spec)
    model, report = filled(settings.adjusted(spec), plan, weights, dtype=dtype, device=device)
    kept = kept_files(head)
    stored = str(next(model.parameters()).dtype).removeprefix("torch.")
    ends = json.loads(kept.get("generation_config.json", b"{}")).get("eos_token_id", [None])
    config = family.config_of(spec, dtype=stored) | {"eos_token_id": ends[0]}
    kept["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    notes = []
    if weights.packed_kinds:
        kinds = ", ".join(f"{count} {name}" for name, count in weights.packed_kinds.items())
        notes.append(f"unpacked to {stored}: {kinds}")
    if why := why_no_tokenizer(head):
        notes.append(f"read without a tokenizer: {why}")
    adapter, _ = adapter_for(Config(config))
    return adapter(
        model,
        config=config,
        origin=path,
        kept=kept,
        report=replace(report, notes=tuple(notes)),
    )
