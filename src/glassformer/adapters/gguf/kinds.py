"""How numbers are packed: the `gguf` library's kinds, and numbers into and out of them.

The library is an extra; whoever needs it without having it is told its name.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.spec.errors import InputError, MachineError

#: Kinds that torch has too, by the format's numbers.
FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
F32, F16, Q8_0 = 0, 1, 8
CHUNK = 2**22  # numbers that are packed at a time
#: The largest numbers that the written kinds hold: Q8_0 has a half-precision step, 127 times.
LARGEST = {F32: float(np.finfo(np.float32).max), F16: 65504.0, Q8_0: 127 * 65504.0}


def library() -> Any:
    """The `gguf` package."""
    try:
        import gguf
    except ImportError as error:
        raise MachineError(
            "GGUF files need the library gguf, which is not installed",
            hint="pip install 'glassformer[gguf]'",
        ) from error
    return gguf


@dataclass(frozen=True, slots=True)
class Kind:
    """`block` numbers of a row take `size` bytes."""

    number: int
    name: str
    block: int
    size: int

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the rows of a tensor are whole blocks."""
        return shape[-1] % self.block == 0

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Of a tensor that fits."""
        return math.prod(shape) // self.block * self.size


@cache
def kind_of(number: int) -> Kind | None:
    """A kind whose numbers can be had; None for whole numbers and for what nobody unpacks."""
    gguf = library()
    try:
        kind = gguf.GGMLQuantizationType(number)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if number not in FLOATS:
            gguf.quants.dequantize(np.zeros((1, size), dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return Kind(number, kind.name, block, size)


def unpacked(data: NDArray[np.uint8], kind: Kind, shape: tuple[int, ...]) -> Tensor:
    """The numbers of these bytes: where they lie, or for packed kinds as new float32."""
    if kind.number in FLOATS:
        return torch.from_numpy(data).view(FLOATS[kind.number]).reshape(shape)
    gguf = library()
    rows = data.reshape(-1, shape[-1] // kind.block * kind.size)
    with np.errstate(all="ignore"):  # NaN and infinity are looked for afterwards
        numbers = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(kind.number))
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32)).reshape(shape)


def packed(tensor: Tensor, kind: Kind, *, name: str) -> Iterator[NDArray[Any]]:
    """The bytes of a tensor, some rows at a time."""
    gguf = library()
    rows = tensor.reshape(-1, tensor.shape[-1])
    for part in torch.split(rows, max(1, CHUNK // rows.shape[1])):
        numbers = part.to(torch.float64 if part.dtype == torch.float64 else torch.float32)
        largest = float(numbers.abs().max())
        if largest > LARGEST[kind.number]:
            raise InputError(
                f"{name} holds {largest:g}, which is too large for {kind.name}",
                hint="--dtype f32",
            )
        array = np.ascontiguousarray(numbers.float().numpy())
        yield gguf.quants.quantize(array, gguf.GGMLQuantizationType(kind.number))
