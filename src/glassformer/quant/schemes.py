"""The arithmetic of each quantization scheme: quantize, dequantize, pack, unpack, error bound.

A `Codec` turns a float matrix into the levels of one scheme and back: weight = (level - zero) *
scale, where a scale belongs to an output channel or to a group of its inputs. `codec` is the only
function that tests a scheme's type. Conversion, training with rounded weights, GPTQ and the
tests share these functions. Rounding is to the nearest level, ties to even; what lies outside the
range is clamped to its ends.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from glassformer.spec.errors import InputError
from glassformer.spec.schemes import Float8, Int4, Int8, Scheme, check_scheme

# O outputs, I inputs, G groups of inputs, E entries of a group

#: Shares of the full range that the search for the least squared error tries.
SHRINKS = tuple(1.0 - 0.025 * step for step in range(17))


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A quantized (O, I) matrix in its stored form, which no backend changes.

    The types and shapes of `qweight`, `scale` and `zero` are those of `scheme.parts`; `zero` is
    None where the scheme's middle level means 0.
    """

    qweight: Tensor
    scale: Tensor
    zero: Tensor | None
    scheme: Scheme

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        outputs, width = self.qweight.shape
        return outputs, width * codec(self.scheme).per_item

    @property
    def nbytes(self) -> int:
        """Bytes of levels, scales and zeros."""
        zeros = 0 if self.zero is None else self.zero.nbytes
        return self.qweight.nbytes + self.scale.nbytes + zeros

    def levels(self) -> Tensor:
        """Return the levels (O, I), one per entry."""
        return codec(self.scheme).unpack(self.qweight)

    def rows(self, index: Tensor | slice) -> "QuantizedTensor":
        """Return some of the outputs."""
        zero = None if self.zero is None else self.zero[index]
        return QuantizedTensor(self.qweight[index], self.scale[index], zero, self.scheme)


class Codec(ABC):
    """The arithmetic of one scheme. Levels are float tensors here until they are packed."""

    #: Levels in one item of the packed tensor.
    per_item = 1
    #: The level that means 0 where no zero is stored.
    middle = 0.0
    #: True if levels are so few that GPTQ gains by rounding each column again.
    coarse = False

    def groups(self, inputs: int) -> int:
        """Return the number of scales per output channel."""
        return 1

    @abstractmethod
    def grid(self, weight_OI: Tensor, *, shrink: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return scale and zero level (O, G) that cover each group's range, or a share of it."""

    @abstractmethod
    def nearest(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Return the level nearest to each weight; all three broadcast."""

    @abstractmethod
    def pack(self, levels_OI: Tensor) -> Tensor:
        """Return the stored form of levels."""

    @abstractmethod
    def unpack(self, qweight: Tensor) -> Tensor:
        """Return the levels (O, I) of a stored form."""

    @abstractmethod
    def assemble(self, levels_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor) -> QuantizedTensor:
        """Return the stored form of levels, scales and zeros."""

    @abstractmethod
    def error_bound(self, weight_OI: Tensor, scale_OG: Tensor) -> Tensor:
        """Return the largest error (O, I) that rounding to the full range's grid can leave."""

    def values(self, levels_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor) -> Tensor:
        """Return (level - zero) * scale, (O, I)."""
        levels_OGE = self.grouped(levels_OI)
        return ((levels_OGE - zero_OG[..., None]) * scale_OG[..., None]).flatten(1)

    def nearest_levels(self, weight_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor) -> Tensor:
        """Return the level nearest to each weight (O, I), as floats."""
        scale, zero = scale_OG[..., None], zero_OG[..., None]
        return self.nearest(self.grouped(weight_OI), scale, zero).flatten(1)

    def grouped(self, x_OI: Tensor) -> Tensor:
        """Return a view (O, G, E)."""
        x_OGE: Tensor = x_OI.unflatten(1, (self.groups(x_OI.shape[1]), -1))
        return x_OGE


class IntegerCodec(Codec):
    """Levels are the integers from `lowest` to `highest`."""

    lowest: int
    highest: int
    symmetric: bool

    def grid(self, weight_OI: Tensor, *, shrink: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return scale and zero level (O, G) that cover each group's range, or a share of it."""
        weight_OGE = self.grouped(weight_OI)
        if self.symmetric:
            reach_OG = weight_OGE.abs().amax(-1) * shrink
            scale_OG = self.storable(reach_OG / (self.highest - self.middle))
            return scale_OG, torch.full_like(scale_OG, self.middle)
        # The range holds 0, so that 0 is a level and a weight of 0 stays one.
        low_OG = weight_OGE.amin(-1).clamp(max=0) * shrink
        high_OG = weight_OGE.amax(-1).clamp(min=0) * shrink
        scale_OG = self.storable((high_OG - low_OG) / (self.highest - self.lowest))
        zero_OG = torch.round(self.lowest - low_OG / scale_OG)
        return scale_OG, zero_OG.clamp(self.lowest, self.highest)

    def nearest(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Return the level nearest to each weight; all three broadcast."""
        return (torch.round(weight / scale) + zero).clamp(self.lowest, self.highest)

    def error_bound(self, weight_OI: Tensor, scale_OG: Tensor) -> Tensor:
        """Return half a step; a whole one if asymmetric, as the zero level is rounded too."""
        steps = 0.5 if self.symmetric else 1.0
        width = weight_OI.shape[1] // scale_OG.shape[1]
        return steps * scale_OG.repeat_interleave(width, 1)

    def storable(self, scale_OG: Tensor) -> Tensor:
        """Return the scale as it is stored, in float32. A group of zeros gets scale 1."""
        return torch.where(scale_OG > 0, scale_OG, torch.ones_like(scale_OG))


class Int8Codec(IntegerCodec):
    """8-bit levels, one scale per output channel."""

    highest = 127

    def __init__(self, scheme: Int8) -> None:
        self.scheme, self.symmetric = scheme, scheme.symmetric
        self.lowest = -127 if scheme.symmetric else -128

    def pack(self, levels_OI: Tensor) -> Tensor:
        """Return the levels as int8."""
        return levels_OI.to(torch.int8).contiguous()

    def unpack(self, qweight: Tensor) -> Tensor:
        """Return the levels, which are stored as they are."""
        return qweight

    def assemble(self, levels_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor) -> QuantizedTensor:
        """Return the stored form of levels, scales and zeros."""
        zero = None if self.symmetric else zero_OG[:, 0].to(torch.int8).contiguous()
        scale = scale_OG[:, 0].contiguous()
        return QuantizedTensor(self.pack(levels_OI), scale, zero, self.scheme)


class Int4Codec(IntegerCodec):
    """Levels 0 to 15, two per byte; one float16 scale per group of inputs."""

    lowest, highest, middle = 0, 15, 8.0
    per_item = 2
    coarse = True

    def __init__(self, scheme: Int4) -> None:
        self.scheme, self.symmetric = scheme, scheme.symmetric

    def groups(self, inputs: int) -> int:
        """Return the number of scales per output channel."""
        group = self.scheme.resolve(inputs).group
        assert group is not None
        return inputs // group

    def pack(self, levels_OI: Tensor) -> Tensor:
        """Return two levels per byte: the even column in the low nibble, the odd in the high."""
        levels = levels_OI.to(torch.uint8)
        return levels[:, 0::2] | (levels[:, 1::2] << 4)

    def unpack(self, qweight: Tensor) -> Tensor:
        """Return the levels of packed bytes."""
        return torch.stack((qweight & 15, qweight >> 4), dim=-1).flatten(-2)

    def assemble(self, levels_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor) -> QuantizedTensor:
        """Return the stored form of levels, scales and zeros."""
        zero = None if self.symmetric else zero_OG.to(torch.uint8).contiguous()
        return QuantizedTensor(self.pack(levels_OI), scale_OG.half(), zero, self.scheme)

    def storable(self, scale_OG: Tensor) -> Tensor:
        """Return the scale as float16 holds it, in float32."""
        scale_OG = scale_OG.half().float()
        if not bool(torch.isfinite(scale_OG).all()):
            raise InputError("weights too large for scales of 16 bits", hint="use 8 bits")
        return super().storable(scale_OG)


class Float8Codec(Codec):
    """Levels are the e4m3 floats, one scale per output channel; there is no zero level."""

    highest = 448.0  # the largest e4m3 number
    dtype = torch.float8_e4m3fn

    def __init__(self, scheme: Float8) -> None:
        self.scheme = scheme

    def grid(self, weight_OI: Tensor, *, shrink: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return a scale (O, 1) that maps each row's range, or a share of it, to +-448."""
        scale_O1 = weight_OI.abs().amax(-1, keepdim=True) * shrink / self.highest
        scale_O1 = torch.where(scale_O1 > 0, scale_O1, torch.ones_like(scale_O1))
        return scale_O1, torch.zeros_like(scale_O1)

    def nearest(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Return the float nearest to each weight over its scale."""
        # Clamped first: whether a conversion that overflows saturates depends on torch's version.
        bounded = (weight / scale).clamp(-self.highest, self.highest)
        return bounded.to(self.dtype).to(weight.dtype)

    def pack(self, levels_OI: Tensor) -> Tensor:
        """Return the levels as 8-bit floats."""
        return levels_OI.to(self.dtype).contiguous()

    def unpack(self, qweight: Tensor) -> Tensor:
        """Return the levels as float32."""
        return qweight.float()

    def assemble(self, levels_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor) -> QuantizedTensor:
        """Return the stored form of levels and scales."""
        scale = scale_OG[:, 0].contiguous()
        return QuantizedTensor(self.pack(levels_OI), scale, None, self.scheme)

    def error_bound(self, weight_OI: Tensor, scale_OG: Tensor) -> Tensor:
        """Return 2^-4 of a weight; near 0, where floats are evenly spaced, half of that spacing."""
        return torch.maximum(weight_OI.abs() * 2.0**-4, scale_OG * 2.0**-10)


def codec(scheme: Scheme) -> Codec:
    """Return the arithmetic of a scheme."""
    match scheme:
        case Int8():
            return Int8Codec(scheme)
        case Int4():
            return Int4Codec(scheme)
        case Float8():
            return Float8Codec(scheme)
        case _ as unreachable:
            assert_never(unreachable)


# --- functions of tensors -----------------------------------------------------------------------


@torch.no_grad()
def quantize_tensor(
    weight_OI: Tensor, scheme: Scheme, *, least_squares: bool = False
) -> QuantizedTensor:
    """Round a matrix to a grid over its full range, or to the one of least squared error."""
    rules = codec(check_matrix(weight_OI, scheme))
    weight_OI = weight_OI.float()
    find = least_squares_grid if least_squares else _full_range
    scale_OG, zero_OG = find(weight_OI, rules)
    return rules.assemble(rules.nearest_levels(weight_OI, scale_OG, zero_OG), scale_OG, zero_OG)


def dequantize(tensor: QuantizedTensor) -> Tensor:
    """Return the float32 weights (O, I) that a quantized matrix stands for."""
    rules = codec(tensor.scheme)
    scale_OG = tensor.scale.float().reshape(len(tensor.scale), -1)
    if tensor.zero is None:
        zero_OG = torch.full_like(scale_OG, rules.middle)
    else:
        zero_OG = tensor.zero.reshape(scale_OG.shape).to(scale_OG.dtype)
    return rules.values(tensor.levels().to(scale_OG.dtype), scale_OG, zero_OG)


def least_squares_grid(weight_OI: Tensor, rules: Codec) -> tuple[Tensor, Tensor]:
    """Return the grid of least squared error among shrunk ones, for each group alone."""
    best_OG = best_scale_OG = best_zero_OG = None
    for shrink in SHRINKS:
        scale_OG, zero_OG = rules.grid(weight_OI, shrink=shrink)
        levels_OI = rules.nearest_levels(weight_OI, scale_OG, zero_OG)
        error_OI = rules.values(levels_OI, scale_OG, zero_OG) - weight_OI
        error_OG = rules.grouped(error_OI.square()).sum(-1)
        if best_OG is None:
            best_OG, best_scale_OG, best_zero_OG = error_OG, scale_OG, zero_OG
            continue
        assert best_scale_OG is not None and best_zero_OG is not None
        better_OG = error_OG < best_OG
        best_OG = torch.where(better_OG, error_OG, best_OG)
        best_scale_OG = torch.where(better_OG, scale_OG, best_scale_OG)
        best_zero_OG = torch.where(better_OG, zero_OG, best_zero_OG)
    assert best_scale_OG is not None and best_zero_OG is not None
    return best_scale_OG, best_zero_OG


def _full_range(weight_OI: Tensor, rules: Codec) -> tuple[Tensor, Tensor]:
    return rules.grid(weight_OI)


def check_matrix(weight_OI: Tensor, scheme: Scheme) -> Scheme:
    """Return the scheme with its options chosen for this matrix; refuse a matrix without a grid."""
    if weight_OI.ndim != 2 or weight_OI.numel() == 0:
        raise InputError(
            f"a tensor of shape {tuple(weight_OI.shape)} is not a matrix to quantize",
            hint="(outputs, inputs)",
        )
    scheme = check_scheme(scheme).resolve(weight_OI.shape[1])
    problem = scheme.why_not(weight_OI.shape[1])
    if problem:
        raise InputError(problem, hint="another scheme, or leave this layer as it is")
    if not bool(torch.isfinite(weight_OI).all()):
        raise InputError("weights that are not finite have no scale", hint="train again, or reload")
    return scheme
