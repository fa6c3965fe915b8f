"""Quantization as functions of tensors: weight = (level - zero) * scale.

One set of functions for conversion, for training with rounded weights and for the tests. Rounding
is to the nearest level, ties to even, and what lies outside the grid is held to its ends.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from glassformer.spec.errors import InputError
from glassformer.spec.quantization import Scheme

# O outputs, I inputs, G groups of inputs, E entries of a group

#: Shares of the full range that the search for the least squared error tries.
SHRINKS = tuple(1.0 - 0.025 * step for step in range(17))


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A quantized (O, I) matrix in the form that is stored, whatever runs it.

    qweight: int8 (O, I), or uint8 (O, I / 2) with the even column in the low nibble; scale: (O,) in
    float32, or (O, G) in float16; zero: the type of the levels, in the shape of the scale, or None
    where 0 is the scheme's middle level.
    """

    qweight: Tensor
    scale: Tensor
    zero: Tensor | None
    scheme: Scheme

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        outputs, width = self.qweight.shape
        return outputs, width * 2 if self.scheme.bits == 4 else width

    @property
    def nbytes(self) -> int:
        """Of levels, scales and zeros."""
        zeros = 0 if self.zero is None else self.zero.nbytes
        return self.qweight.nbytes + self.scale.nbytes + zeros

    def levels(self) -> Tensor:
        """(O, I), one level an entry."""
        return unpack(self.qweight) if self.scheme.bits == 4 else self.qweight

    def rows(self, index: Tensor | slice) -> "QuantizedTensor":
        """Some outputs of it."""
        zero = None if self.zero is None else self.zero[index]
        return QuantizedTensor(self.qweight[index], self.scale[index], zero, self.scheme)


def pack(levels_OI: Tensor) -> Tensor:
    """Levels 0 to 15, two a byte: the even column in the low nibble, the odd one in the high."""
    return levels_OI[:, 0::2] | (levels_OI[:, 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def grid(
    weight_OI: Tensor, scheme: Scheme, *, shrink: "float | Tensor" = 1.0
) -> tuple[Tensor, Tensor]:
    """Scale and zero level (O, G) of a grid over each group's range, or over a share of it."""
    weight_OGE = _grouped(weight_OI, scheme)
    if scheme.symmetric:
        reach_OG = weight_OGE.abs().amax(-1) * shrink
        scale_OG = _storable(reach_OG / (scheme.highest - scheme.middle), scheme)
        return scale_OG, torch.full_like(scale_OG, scheme.middle)
    # The range holds 0, so that 0 is a level and a weight of 0 stays one.
    low_OG = weight_OGE.amin(-1).clamp(max=0) * shrink
    high_OG = weight_OGE.amax(-1).clamp(min=0) * shrink
    scale_OG = _storable((high_OG - low_OG) / (scheme.highest - scheme.lowest), scheme)
    zero_OG = torch.round(scheme.lowest - low_OG / scale_OG)
    return scale_OG, zero_OG.clamp(scheme.lowest, scheme.highest)


def nearest_levels(weight_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor, scheme: Scheme) -> Tensor:
    """The level nearest to each weight, as floats (O, I)."""
    weight_OGE = _grouped(weight_OI, scheme)
    levels_OGE = torch.round(weight_OGE / scale_OG[..., None]) + zero_OG[..., None]
    return levels_OGE.clamp(scheme.lowest, scheme.highest).flatten(1)


def least_squares_grid(weight_OI: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """The grid with the least squared error among shrunk ones, for each group alone."""
    best_OG = best_scale_OG = best_zero_OG = None
    for shrink in SHRINKS:
        scale_OG, zero_OG = grid(weight_OI, scheme, shrink=shrink)
        levels_OI = nearest_levels(weight_OI, scale_OG, zero_OG, scheme)
        error_OI = grid_values(levels_OI, scale_OG, zero_OG, scheme) - weight_OI
        error_OG = _grouped(error_OI.square(), scheme).sum(-1)
        if best_OG is None:
            best_OG, best_scale_OG, best_zero_OG = error_OG, scale_OG, zero_OG
            continue
        better_OG = error_OG < best_OG
        best_OG = torch.where(better_OG, error_OG, best_OG)
        best_scale_OG = torch.where(better_OG, scale_OG, best_scale_OG)
        best_zero_OG = torch.where(better_OG, zero_OG, best_zero_OG)
    assert best_scale_OG is not None and best_zero_OG is not None
    return best_scale_OG, best_zero_OG


@torch.no_grad()
def quantize_tensor(
    weight_OI: Tensor, scheme: Scheme, *, least_squares: bool = False
) -> QuantizedTensor:
    """The matrix on its grid: over the whole range, or with the least squared error."""
    check_matrix(weight_OI, scheme)
    weight_OI = weight_OI.float()
    find = least_squares_grid if least_squares else grid
    scale_OG, zero_OG = find(weight_OI, scheme)
    return assemble(nearest_levels(weight_OI, scale_OG, zero_OG, scheme), scale_OG, zero_OG, scheme)


def assemble(
    levels_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor, scheme: Scheme
) -> QuantizedTensor:
    """The stored form of levels on a grid."""
    kind = torch.uint8 if scheme.bits == 4 else torch.int8
    levels_OI = levels_OI.to(kind)
    if scheme.group is None:
        scale_OG, zero_OG = scale_OG[:, 0], zero_OG[:, 0]
    return QuantizedTensor(
        pack(levels_OI) if scheme.bits == 4 else levels_OI.contiguous(),
        scale_OG.contiguous() if scheme.group is None else scale_OG.half(),
        None if scheme.symmetric else zero_OG.to(kind).contiguous(),
        scheme,
    )


def dequantize(tensor: QuantizedTensor) -> Tensor:
    """The float32 weights (O, I) that a quantized matrix stands for."""
    scheme = tensor.scheme
    scale_OG = tensor.scale.float().reshape(len(tensor.scale), -1)
    if tensor.zero is None:
        zero_OG = torch.full_like(scale_OG, scheme.middle)
    else:
        zero_OG = tensor.zero.reshape(scale_OG.shape).to(scale_OG.dtype)
    return grid_values(tensor.levels().to(scale_OG.dtype), scale_OG, zero_OG, scheme)


def check_matrix(weight_OI: Tensor, scheme: Scheme) -> None:
    """Refuse what has no grid: other shapes, groups that do not fit, numbers not finite."""
    if weight_OI.ndim != 2 or weight_OI.numel() == 0:
        raise InputError(
            f"a tensor of shape {tuple(weight_OI.shape)} is no matrix to quantize",
            hint="(outputs, inputs)",
        )
    if not scheme.divides(weight_OI.shape[1]):
        raise InputError(
            f"group {scheme.group} does not divide {weight_OI.shape[1]} inputs",
            hint="a smaller group, 8 bits, or leave this layer as it is",
        )
    if not bool(torch.isfinite(weight_OI).all()):
        raise InputError("weights that are not finite have no scale", hint="train again, or reload")


def _grouped(x_OI: Tensor, scheme: Scheme) -> Tensor:
    """(O, G, E)."""
    return x_OI.unflatten(1, (scheme.groups(x_OI.shape[1]), -1))


def grid_values(levels_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor, scheme: Scheme) -> Tensor:
    """(level - zero) * scale, (O, I)."""
    levels_OGE = _grouped(levels_OI, scheme)
    return ((levels_OGE - zero_OG[..., None]) * scale_OG[..., None]).flatten(1)


def _storable(scale_OG: Tensor, scheme: Scheme) -> Tensor:
    """The scale as it will be stored, in float32. A group of zeros has no range; 1 serves it."""
    if scheme.group is not None:
        scale_OG = scale_OG.half().float()
        if not bool(torch.isfinite(scale_OG).all()):
            raise InputError("weights too large for scales of 16 bits", hint="use 8 bits")
    return torch.where(scale_OG > 0, scale_OG, torch.ones_like(scale_OG))
