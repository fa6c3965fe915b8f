"""The rounding of a matrix by each quantization scheme: to nearest, and by GPTQ.

A `Codec` turns a float matrix into the levels of one scheme and back: weight = (level - zero) *
scale, where a scale belongs to an output channel or to a group of its inputs. `codec` is the only
function that tests a scheme's type; it also packs, unpacks and bounds the error. Conversion,
training with rounded weights, GPTQ and the tests share these functions. Rounding is to the nearest
level, ties to even; what lies outside the range is clamped to its ends.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.kernels import c_library
from glassformer.kernels.grids import Levels, corrected_columns, rounded_columns, searched_grids
from glassformer.spec.errors import InputError
from glassformer.spec.schemes import Float8, Int4, Int8, Scheme, Search, check_scheme

# O outputs, I inputs, G groups of inputs, E entries of a group

#: Shares of the full range that the search for the least squared error tries.
SHRINKS = tuple(1.0 - 0.025 * step for step in range(17))
#: Weights that a grid is searched for at once: what a processor's cache holds.
SEARCHED = 1 << 16
#: Entries of a group that are added side by side: those of grids.c.
LANES = 32


#: The tensors of the stored form; a scheme may lack the last two.
STORED = ("qweight", "scale", "zero", "exponent")


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A quantized (O, I) matrix in its stored form, which no backend changes.

    The types and shapes of its tensors are those of `scheme.parts`; `zero` is None where the
    scheme's middle level means 0, `exponent` where scales are stored as they are.
    """

    qweight: Tensor
    scale: Tensor
    zero: Tensor | None
    scheme: Scheme
    exponent: Tensor | None = None

    @classmethod
    def of(cls, parts: Mapping[str, Tensor], scheme: Scheme) -> "QuantizedTensor":
        """Return the matrix whose tensors these are, by their names in a checkpoint."""
        return cls(
            parts["qweight"], parts["scale"], parts.get("zero"), scheme, parts.get("exponent")
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        outputs, width = self.qweight.shape
        return outputs, width * codec(self.scheme).per_item

    @property
    def nbytes(self) -> int:
        """Bytes of levels, scales, zeros and exponents."""
        return sum(part.nbytes for part in self.parts().values())

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors that there are, by their names in a checkpoint."""
        every = {leaf: getattr(self, leaf) for leaf in STORED}
        return {leaf: part for leaf, part in every.items() if part is not None}

    def levels(self) -> Tensor:
        """Return the levels (O, I), one per entry."""
        return codec(self.scheme).unpack(self.qweight)

    def rows(self, index: Tensor | slice) -> "QuantizedTensor":
        """Return some of the outputs."""
        return self._each(lambda part: part[index])

    def to(self, device: torch.device) -> "QuantizedTensor":
        """Return the same tensor on another device."""
        return self._each(lambda part: part.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "QuantizedTensor":
        parts = {leaf: change(part) for leaf, part in self.parts().items()}
        return QuantizedTensor.of(parts, self.scheme)


class Codec(ABC):
    """The arithmetic of one scheme. Levels are float tensors here until they are packed."""

    #: Levels in one item of the packed tensor.
    per_item = 1
    #: The level that means 0 where no zero is stored.
    middle = 0.0
    #: True if levels are so few that GPTQ gains by rounding each column again.
    coarse = False
    #: True if zeros lie between levels.
    fine = False

    def groups(self, inputs: int) -> int:
        """Return the number of scales per output channel."""
        return 1

    def unit(self, weight_OI: Tensor) -> Tensor | None:
        """Return what the scales of each row are multiples of, (O, 1); None if they are free."""
        return None

    @abstractmethod
    def grid(
        self, weight_OI: Tensor, *, shrink: float = 1.0, unit_O1: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return scale and zero level (O, G) that cover each group's range, or a share of it."""

    def fitted(
        self,
        weight_OI: Tensor,
        levels_OI: Tensor,
        grid: tuple[Tensor, Tensor],
        weight_I: Tensor,
        unit_O1: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the grid of least squared error for these levels; columns weigh `weight_I`."""
        return grid

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
    def assemble(
        self,
        levels_OI: Tensor,
        scale_OG: Tensor,
        zero_OG: Tensor,
        unit_O1: Tensor | None = None,
    ) -> QuantizedTensor:
        """Return the stored form of levels, scales and zeros."""

    def rounded_scale(self, scale_OG: Tensor, unit_O1: Tensor | None) -> Tensor:
        """Return the nearest scale that can be stored, in float32."""
        return scale_OG

    def rounded_zero(self, zero_OG: Tensor) -> Tensor:
        """Return the nearest zero level that can be stored."""
        return zero_OG

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
    #: True if scales are stored as float16.
    halves: bool

    def grid(
        self, weight_OI: Tensor, *, shrink: float = 1.0, unit_O1: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return scale and zero level (O, G) that cover each group's range, or a share of it."""
        weight_OGE = self.grouped(weight_OI)
        if self.symmetric:
            reach_OG = weight_OGE.abs().amax(-1) * shrink
            scale_OG = self.storable(reach_OG / (self.highest - self.middle), unit_O1)
            return scale_OG, torch.full_like(scale_OG, self.middle)
        # The range holds 0, so that 0 is a level and a weight of 0 stays one.
        low_OG = weight_OGE.amin(-1).clamp(max=0) * shrink
        high_OG = weight_OGE.amax(-1).clamp(min=0) * shrink
        scale_OG = self.storable((high_OG - low_OG) / (self.highest - self.lowest), unit_O1)
        return scale_OG, self.rounded_zero(self.lowest - low_OG / scale_OG)

    def rounded_zero(self, zero_OG: Tensor) -> Tensor:
        """Return the nearest zero level that can be stored."""
        return torch.round(zero_OG).clamp(self.lowest, self.highest)

    def fitted(
        self,
        weight_OI: Tensor,
        levels_OI: Tensor,
        grid: tuple[Tensor, Tensor],
        weight_I: Tensor,
        unit_O1: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the grid of least squared error for these levels; columns weigh `weight_I`.

        The zero stays where it is: then the scale is sum(v w u) / sum(v u u), u = level - zero.
        """
        scale_OG, zero_OG = grid
        units_OGE = self.grouped(levels_OI) - zero_OG[..., None]
        pull_OGE = units_OGE * self.grouped(weight_I[None])
        above_OG = _by_halves(pull_OGE * self.grouped(weight_OI))
        found_OG = above_OG / _by_halves(pull_OGE * units_OGE)
        good_OG = found_OG.isfinite() & (found_OG > 0)
        return self.rounded_scale(torch.where(good_OG, found_OG, scale_OG), unit_O1), zero_OG

    def nearest(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Return the level nearest to each weight; all three broadcast."""
        return (torch.round(weight / scale) + zero).clamp(self.lowest, self.highest)

    def error_bound(self, weight_OI: Tensor, scale_OG: Tensor) -> Tensor:
        """Return half a step; a whole one if asymmetric, as the zero level is rounded too."""
        steps = 0.5 if self.symmetric else 1.0
        width = weight_OI.shape[1] // scale_OG.shape[1]
        return steps * scale_OG.repeat_interleave(width, 1)

    def storable(self, scale_OG: Tensor, unit_O1: Tensor | None = None) -> Tensor:
        """Return the scale as it is stored, in float32. A group of zeros gets scale 1."""
        return torch.where(scale_OG > 0, scale_OG, torch.ones_like(scale_OG))

    def rounded_scale(self, scale_OG: Tensor, unit_O1: Tensor | None) -> Tensor:
        """Return the nearest scale that can be stored, in float32."""
        return self.storable(scale_OG)


def _as_half(scale_OG: Tensor) -> Tensor:
    """Return the scale as float16 holds it, in float32."""
    scale_OG = scale_OG.half().float()
    if not bool(torch.isfinite(scale_OG).all()):
        raise InputError(
            "weights too large for scales of 16 bits", hint="8 bits, one scale per channel: group 0"
        )
    return scale_OG


class Int8Codec(IntegerCodec):
    """8-bit levels; one float16 scale per group of inputs, or one float32 per output channel."""

    highest = 127

    def __init__(self, scheme: Int8) -> None:
        self.scheme, self.symmetric = scheme, scheme.symmetric
        self.lowest = -127 if scheme.symmetric else -128
        self.halves = scheme.group != 0

    def groups(self, inputs: int) -> int:
        """Return the number of scales per output channel."""
        group = self.scheme.resolve(inputs).group
        return inputs // group if group else 1

    def pack(self, levels_OI: Tensor) -> Tensor:
        """Return the levels as int8."""
        return levels_OI.to(torch.int8).contiguous()

    def unpack(self, qweight: Tensor) -> Tensor:
        """Return the levels, which are stored as they are."""
        return qweight

    def assemble(
        self,
        levels_OI: Tensor,
        scale_OG: Tensor,
        zero_OG: Tensor,
        unit_O1: Tensor | None = None,
    ) -> QuantizedTensor:
        """Return the stored form of levels, scales and zeros."""
        if not self.scheme.group:
            scale_OG, zero_OG = scale_OG[:, 0], zero_OG[:, 0]
        zero = None if self.symmetric else zero_OG.to(torch.int8).contiguous()
        scale = (scale_OG.half() if self.scheme.group else scale_OG).contiguous()
        return QuantizedTensor(self.pack(levels_OI), scale, zero, self.scheme)

    def storable(self, scale_OG: Tensor, unit_O1: Tensor | None = None) -> Tensor:
        """Return the scale as it is stored, in float32: a group's as float16 holds it."""
        return super().storable(_as_half(scale_OG) if self.scheme.group else scale_OG)


#: A fine zero counts sixteenths of a level, in a byte; a fine scale is a byte times its row's unit.
SIXTEENTHS, BYTE = 16, 255
#: Exponents of units, which int8 and float32 both hold, scales and their squares included.
EXPONENTS = (-60, 60)


class Int4Codec(IntegerCodec):
    """Levels 0 to 15, two per byte; one scale per group of inputs: a byte, or float16."""

    lowest, highest, middle = 0, 15, 8.0
    per_item = 2
    coarse = True

    def __init__(self, scheme: Int4) -> None:
        self.scheme, self.symmetric = scheme, scheme.symmetric
        self.fine = scheme.fine and not scheme.symmetric
        self.halves = not scheme.fine

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

    def unit(self, weight_OI: Tensor) -> Tensor | None:
        """Return the power of two of each row that its widest group's scale is 128 to 255 times.

        A power of two, so that products with it are exact, wherever they are multiplied.
        """
        if not self.scheme.fine:
            return None
        weight_OGE = self.grouped(weight_OI)
        if self.symmetric:
            widest_OG = weight_OGE.abs().amax(-1) / (self.highest - self.middle)
        else:
            low_OG, high_OG = weight_OGE.amin(-1), weight_OGE.amax(-1)
            widest_OG = (high_OG.clamp(min=0) - low_OG.clamp(max=0)) / (self.highest - self.lowest)
        widest_O1 = widest_OG.amax(-1, keepdim=True)
        widest_O1 = torch.where(widest_O1 > 0, widest_O1, torch.ones_like(widest_O1))
        exponent_O1 = torch.ceil(torch.log2(widest_O1 / BYTE))
        if bool((exponent_O1 > EXPONENTS[1]).any()):
            raise InputError(
                f"weights up to {float(weight_OI.abs().max()):.3g} are too large for 4 bits"
            )
        return torch.exp2(exponent_O1.clamp(min=EXPONENTS[0]))

    def nearest(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Return the level nearest to each weight; all three broadcast."""
        if not self.scheme.fine:
            return super().nearest(weight, scale, zero)
        return torch.round(weight / scale + zero).clamp(self.lowest, self.highest)

    def rounded_zero(self, zero_OG: Tensor) -> Tensor:
        """Return the nearest zero level that can be stored: a whole one, or sixteenths."""
        if not self.scheme.fine:
            return super().rounded_zero(zero_OG)
        return torch.round(zero_OG * SIXTEENTHS).clamp(0, BYTE) / SIXTEENTHS

    def fitted(
        self,
        weight_OI: Tensor,
        levels_OI: Tensor,
        grid: tuple[Tensor, Tensor],
        weight_I: Tensor,
        unit_O1: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the grid of least squared error for these levels, its zero fitted first.

        A straight line through the points (level, weight): its slope is the scale.
        """
        if self.fine:
            scale_OG, zero_OG = grid
            v_OGE, x_OGE = self.grouped(weight_I[None]), self.grouped(weight_OI)
            level_OGE = self.grouped(levels_OI)
            total_OG = _by_halves(v_OGE)
            x_OG, level_OG = (_by_halves(v_OGE * one) / total_OG for one in (x_OGE, level_OGE))
            off_OGE = v_OGE * (level_OGE - level_OG[..., None])
            slope_OG = _by_halves(off_OGE * x_OGE) / _by_halves(off_OGE * level_OGE)
            found_OG = level_OG - x_OG / slope_OG
            good_OG = found_OG.isfinite() & (slope_OG > 0)
            zero_OG = torch.where(good_OG, found_OG, zero_OG)
            grid = (scale_OG, self.rounded_zero(zero_OG))
        return super().fitted(weight_OI, levels_OI, grid, weight_I, unit_O1)

    def assemble(
        self,
        levels_OI: Tensor,
        scale_OG: Tensor,
        zero_OG: Tensor,
        unit_O1: Tensor | None = None,
    ) -> QuantizedTensor:
        """Return the stored form of levels, scales and zeros."""
        zero_OG = zero_OG * SIXTEENTHS if self.scheme.fine else zero_OG
        zero = None if self.symmetric else zero_OG.to(torch.uint8).contiguous()
        if not self.scheme.fine:
            return QuantizedTensor(self.pack(levels_OI), scale_OG.half(), zero, self.scheme)
        assert unit_O1 is not None
        scale = (scale_OG / unit_O1).to(torch.uint8).contiguous()
        exponent = torch.log2(unit_O1[:, 0]).to(torch.int8)
        return QuantizedTensor(self.pack(levels_OI), scale, zero, self.scheme, exponent)

    def storable(self, scale_OG: Tensor, unit_O1: Tensor | None = None) -> Tensor:
        """Return the scale as it is stored, in float32; rounded up, so that nothing is cut off."""
        if not self.scheme.fine:
            return super().storable(_as_half(scale_OG))
        assert unit_O1 is not None
        return torch.ceil(scale_OG / unit_O1).clamp(1, BYTE) * unit_O1

    def rounded_scale(self, scale_OG: Tensor, unit_O1: Tensor | None) -> Tensor:
        """Return the nearest scale that can be stored, in float32."""
        if not self.scheme.fine:
            return super().rounded_scale(scale_OG, unit_O1)
        assert unit_O1 is not None
        return torch.round(scale_OG / unit_O1).clamp(1, BYTE) * unit_O1


class Float8Codec(Codec):
    """Levels are the e4m3 floats, one scale per output channel; there is no zero level."""

    highest = 448.0  # the largest e4m3 number
    dtype = torch.float8_e4m3fn

    def __init__(self, scheme: Float8) -> None:
        self.scheme = scheme

    def grid(
        self, weight_OI: Tensor, *, shrink: float = 1.0, unit_O1: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
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

    def assemble(
        self,
        levels_OI: Tensor,
        scale_OG: Tensor,
        zero_OG: Tensor,
        unit_O1: Tensor | None = None,
    ) -> QuantizedTensor:
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
    weight_OI: Tensor,
    scheme: Scheme,
    *,
    method: Search = "absmax",
    inputs_I: Tensor | None = None,
) -> QuantizedTensor:
    """Round a matrix to a grid over its full range (absmax), or to one that is searched for.

    `inputs_I`: the root mean square of each input; squared errors (mse) count by what they are
    multiplied with.
    """
    rules = codec(check_matrix(weight_OI, scheme))
    weight_OI = weight_OI.float()
    unit_O1 = rules.unit(weight_OI)
    match method:
        case "absmax":
            scale_OG, zero_OG = rules.grid(weight_OI, unit_O1=unit_O1)
        case "mse":
            scale_OG, zero_OG = least_squares_grid(weight_OI, rules, unit_O1, inputs_I)
        case _ as unreachable:
            assert_never(unreachable)
    levels_OI = rules.nearest_levels(weight_OI, scale_OG, zero_OG)
    return rules.assemble(levels_OI, scale_OG, zero_OG, unit_O1)


def dequantize(tensor: QuantizedTensor) -> Tensor:
    """Return the float32 weights (O, I) that a quantized matrix stands for."""
    scale_OG, zero_OG = grid_of(tensor)
    return codec(tensor.scheme).values(tensor.levels().to(scale_OG.dtype), scale_OG, zero_OG)


def grid_of(tensor: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Return the float32 scales and zero levels (O, G) of a quantized matrix."""
    scale_OG = tensor.scale.float().reshape(len(tensor.scale), -1)
    if tensor.exponent is not None:
        scale_OG = scale_OG * outer_of(tensor)[:, None]
    if tensor.zero is None:
        return scale_OG, torch.full_like(scale_OG, codec(tensor.scheme).middle)
    zero_OG = tensor.zero.reshape(scale_OG.shape).to(scale_OG.dtype)
    return scale_OG, zero_OG if tensor.exponent is None else zero_OG / SIXTEENTHS


def outer_of(tensor: QuantizedTensor) -> Tensor:
    """Return the power of two (O,) that each row's scales are multiples of."""
    assert tensor.exponent is not None
    return torch.exp2(tensor.exponent.float())


def least_squares_grid(
    weight_OI: Tensor,
    rules: Codec,
    unit_O1: Tensor | None = None,
    inputs_I: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the grid of least squared error for each group alone.

    Each grid over a share of the range gives levels; a grid fitted to those is tried too. On a CPU
    the compiled search does the same operations, one group after another in a processor's
    registers.
    """
    weight_I = _counts(weight_OI, inputs_I)
    levels = _levels_in_c(rules, weight_OI)
    if levels is not None:
        groups = rules.groups(weight_OI.shape[1])
        grids = searched_grids(
            weight_OI, weight_I, unit_O1, groups=groups, shares=SHRINKS, levels=levels
        )
        if grids is not None:  # else what follows raises the error that names the cure
            return grids
    step = max(1, SEARCHED // weight_OI.shape[1])
    found = [
        _searched_grid(rows_OI, rules, None if unit_O1 is None else unit_O1[i : i + step], weight_I)
        for i, rows_OI in zip(range(0, len(weight_OI), step), weight_OI.split(step), strict=True)
    ]
    scale_OG, zero_OG = (torch.cat(parts) for parts in zip(*found, strict=True))
    return scale_OG, zero_OG


def _counts(weight_OI: Tensor, inputs_I: Tensor | None) -> Tensor:
    """Return what the squared error of each input counts; one that was not seen counts too."""
    weight_I = torch.ones_like(weight_OI[0]) if inputs_I is None else inputs_I.float().square()
    seen_I: Tensor = weight_I + 1e-3 * weight_I.mean().clamp(min=1e-30)
    return seen_I


def _levels_in_c(rules: Codec, weight_OI: Tensor) -> Levels | None:
    """Return the scheme's levels for the compiled routines; None where torch computes."""
    if not isinstance(rules, IntegerCodec) or weight_OI.device.type != "cpu":
        return None
    if not c_library.available():
        return None
    return Levels(rules.lowest, rules.highest, rules.middle, rules.symmetric, rules.halves)


def _by_halves(x_OGE: Tensor) -> Tensor:
    """Return the sums (O, G) of groups: of every 32nd entry, then of halves of those, as C adds."""
    x_OGE = F.pad(x_OGE, (0, -x_OGE.shape[-1] % LANES))
    total, *others = x_OGE.split(LANES, -1)
    for other in others:
        total = total + other
    for half in (16, 8, 4, 2, 1):
        total = total[..., :half] + total[..., half:]
    summed_OG: Tensor = total[..., 0]
    return summed_OG


def _searched_grid(
    weight_OI: Tensor, rules: Codec, unit_O1: Tensor | None, weight_I: Tensor
) -> tuple[Tensor, Tensor]:
    best_OG = best_scale_OG = best_zero_OG = None
    for shrink in SHRINKS:
        grid = rules.grid(weight_OI, shrink=shrink, unit_O1=unit_O1)
        levels_OI = rules.nearest_levels(weight_OI, *grid)
        fitted = rules.fitted(weight_OI, levels_OI, grid, weight_I, unit_O1)
        for scale_OG, zero_OG in (grid, fitted):
            levels_OI = rules.nearest_levels(weight_OI, scale_OG, zero_OG)
            error_OI = rules.values(levels_OI, scale_OG, zero_OG) - weight_OI
            error_OG = _by_halves(rules.grouped(error_OI.square() * weight_I))
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


def check_matrix(weight_OI: Tensor, scheme: Scheme) -> Scheme:
    """Return the scheme with its options chosen for this matrix; refuse a matrix without a grid."""
    if weight_OI.ndim != 2 or weight_OI.numel() == 0:
        raise InputError(
            f"a tensor of shape {tuple(weight_OI.shape)} is not a matrix to quantize",
            hint="(outputs, inputs)",
        )
    scheme = check_scheme(scheme).resolve(weight_OI.shape[1])
    problem = scheme.lacks(weight_OI.shape[1])
    if problem:
        raise InputError(problem, hint="another scheme, or leave this layer as it is")
    if not bool(torch.isfinite(weight_OI).all()):
        raise InputError("weights that are not finite have no scale", hint="train again, or reload")
    return scheme


# --- GPTQ -----------------------------------------------------------------------------------------
#
# Columns are rounded one after another, and the remaining ones compensate for the error. With
# H = sum x x^T over calibration rows, rounding column i costs error^2 / [H^-1]_ii, and the later
# columns compensate best by moving along row i of the upper Cholesky factor of H^-1 (Frantar et
# al., 2022). Each group's grid is fitted to its weights after the corrections so far.
#
# That is greedy: early columns are rounded before later errors are known. So for schemes of few
# levels, each column is then rounded again with the others fixed, and the scales are set to their
# least-squares values; each such step lowers the error of the products, except for the rounding of
# the scales themselves.

#: Added to the diagonal, as a share of its mean: weights of rare inputs hardly move.
DAMPING = 0.1
#: Columns that are corrected one by one; later columns are corrected once per block.
BLOCK = 128
#: Passes over all columns after the first.
SWEEPS = 3


@torch.no_grad()
def quantize_with_inputs(
    weight_OI: Tensor, scheme: Scheme, *, moment_II: Tensor
) -> QuantizedTensor:
    """Quantize a matrix so that its products with inputs like the calibration's change least."""
    rules = codec(check_matrix(weight_OI, scheme))
    wanted_OI = weight_OI.float()
    unit_O1 = rules.unit(wanted_OI)
    moment_II = _damped(moment_II)
    levels_OI, scale_OG, zero_OG = _corrected(wanted_OI, _inverse_factor(moment_II), rules, unit_O1)
    if rules.coarse:
        moment_II = moment_II.float()
        pulled_OI = wanted_OI @ moment_II
        for _ in range(SWEEPS):
            values_OI = rules.values(levels_OI, scale_OG, zero_OG)
            slope_OI = values_OI @ moment_II - pulled_OI
            grid = (scale_OG, zero_OG)
            levels_OI = _rounded_again(levels_OI, grid, slope_OI, moment_II, rules, unit_O1)
            scale_OG, zero_OG = _grid_again(levels_OI, grid, pulled_OI, moment_II, rules, unit_O1)
    return rules.assemble(levels_OI, scale_OG, zero_OG, unit_O1)


def _corrected(
    weight_OI: Tensor, factor_II: Tensor, rules: Codec, unit_O1: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Round columns in order, later ones compensating; return levels, scales and zeros."""
    inputs = weight_OI.shape[1]
    groups = rules.groups(inputs)
    width = inputs // groups
    levels = _levels_in_c(rules, weight_OI)
    if levels is not None:
        found = corrected_columns(
            weight_OI,
            factor_II,
            _counts(weight_OI[:, :width], None),
            unit_O1,
            groups=groups,
            shares=SHRINKS,
            levels=levels,
        )
        if found is not None:
            return found
    weight_OI, levels_OI = weight_OI.clone(), torch.empty_like(weight_OI)
    scales, zeros = [], []
    for start in range(0, inputs, BLOCK):
        end = min(start + BLOCK, inputs)
        errors_OB = torch.zeros_like(weight_OI[:, start:end])
        for i in range(start, end):
            if i % width == 0:
                # From the weights as the corrections have left them.
                group_OE = weight_OI[:, i : i + width]
                scale_O1, zero_O1 = least_squares_grid(group_OE, rules, unit_O1)
                scales.append(scale_O1)
                zeros.append(zero_O1)
            scale_O, zero_O = scales[-1][:, 0], zeros[-1][:, 0]
            column_O = weight_OI[:, i]
            level_O = rules.nearest(column_O, scale_O, zero_O)
            levels_OI[:, i] = level_O
            error_O = (column_O - (level_O - zero_O) * scale_O) / factor_II[i, i]
            weight_OI[:, i + 1 : end] -= torch.outer(error_O, factor_II[i, i + 1 : end])
            errors_OB[:, i - start] = error_O
        weight_OI[:, end:] -= errors_OB @ factor_II[start:end, end:]
    return levels_OI, torch.cat(scales, 1), torch.cat(zeros, 1)


def making_up(weight_OI: Tensor, *, moment_II: Tensor, cross_II: Tensor) -> Tensor:
    """Return the weights that, on the actual inputs y, best give the products of W with inputs x.

    x are the float model's inputs to the layer: W (sum x y^T) (sum y y^T)^-1, damped.
    """
    damped_II = _damped(moment_II)
    extra_II = damped_II - moment_II.double()
    wanted_OI = weight_OI.double() @ (cross_II.double() + extra_II)
    moved_OI: Tensor = torch.linalg.solve(damped_II, wanted_OI, left=False)
    return moved_OI.float()


def _rounded_again(
    levels_OI: Tensor,
    grid: tuple[Tensor, Tensor],
    slope_OI: Tensor,
    moment_II: Tensor,
    rules: Codec,
    unit_O1: Tensor | None,
) -> Tensor:
    """Round each column to its best level, given the others: slope = (rounded - wanted) H."""
    scale_OG, zero_OG = grid
    levels = _levels_in_c(rules, slope_OI)
    if levels is not None:
        return rounded_columns(
            levels_OI, scale_OG, zero_OG, slope_OI, moment_II, unit_O1, levels=levels
        )
    levels_OI, inputs = levels_OI.clone(), levels_OI.shape[1]
    width = inputs // rules.groups(inputs)
    for start in range(0, inputs, BLOCK):
        end = min(start + BLOCK, inputs)
        steps_OB = torch.zeros_like(slope_OI[:, start:end])
        for i in range(start, end):
            scale_O, zero_O = scale_OG[:, i // width], zero_OG[:, i // width]
            before_O = (levels_OI[:, i] - zero_O) * scale_O
            best_O = before_O - slope_OI[:, i] / moment_II[i, i]
            levels_OI[:, i] = rules.nearest(best_O, scale_O, zero_O)
            step_O = (levels_OI[:, i] - zero_O) * scale_O - before_O
            slope_OI[:, start:end] += torch.outer(step_O, moment_II[i, start:end])
            steps_OB[:, i - start] = step_O
        slope_OI[:, end:] += steps_OB @ moment_II[start:end, end:]
    return levels_OI


def _grid_again(
    levels_OI: Tensor,
    grid: tuple[Tensor, Tensor],
    pulled_OI: Tensor,
    moment_II: Tensor,
    rules: Codec,
    unit_O1: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the grid of least squared error of the products, solved for all groups of a row.

    Where zeros are fine, weight = scale * level - shift is solved first, and zero = shift / scale;
    `pulled_OI`: the wanted weights times the moment. Products of groups' levels, and of their
    ones, with the moment give both systems: u = level - zero.
    """
    scale_OG, zero_OG = grid
    groups = zero_OG.shape[1]
    ll_OGG, l1_OGG, one_GG = _group_moments(levels_OI, moment_II, groups)
    of_OI = _summed_groups(pulled_OI * levels_OI, groups).double()
    ones_OG = _summed_groups(pulled_OI, groups).double()
    if rules.fine:
        left_ONN = torch.cat(
            (
                torch.cat((ll_OGG, -l1_OGG), 2),
                torch.cat((-l1_OGG.transpose(1, 2), one_GG.expand_as(ll_OGG)), 2),
            ),
            1,
        )
        found_ON = _solved(left_ONN, torch.cat((of_OI, -ones_OG), 1))
        found_OG, shift_OG = found_ON.split(groups, 1)
        good_OG = (found_OG > 0) & found_OG.isfinite() & shift_OG.isfinite()
        moved_OG = rules.rounded_zero((shift_OG / found_OG).float())
        zero_OG = torch.where(good_OG, moved_OG, zero_OG)
    zero = zero_OG.double()
    crossed_OGG = l1_OGG * zero[:, None, :]
    both_OGG = zero[:, :, None] * one_GG * zero[:, None, :]
    units_OGG = ll_OGG - crossed_OGG - crossed_OGG.transpose(1, 2) + both_OGG
    found_OG = _solved(units_OGG, of_OI - zero * ones_OG)
    good_OG = (found_OG > 0) & found_OG.isfinite()
    scale_OG = torch.where(good_OG, found_OG.float(), scale_OG)
    return rules.rounded_scale(scale_OG, unit_O1), zero_OG


def _group_moments(
    levels_OI: Tensor, moment_II: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums over pairs of groups of level x H x level, level x H and H, in float64."""
    outputs = len(levels_OI)
    ll_OGG = levels_OI.new_empty(outputs, groups, groups, dtype=torch.float64)
    l1_OGG = torch.empty_like(ll_OGG)
    for g, (levels_OE, moment_EI) in enumerate(
        zip(levels_OI.chunk(groups, 1), moment_II.chunk(groups, 0), strict=True)
    ):
        pull_OI = levels_OE @ moment_EI
        ll_OGG[:, g] = _summed_groups(pull_OI * levels_OI, groups)
        l1_OGG[:, g] = _summed_groups(pull_OI, groups)
    one_GG = moment_II.double().unflatten(0, (groups, -1)).sum(1)
    return ll_OGG, l1_OGG, one_GG.unflatten(1, (groups, -1)).sum(-1)


def _summed_groups(x_OI: Tensor, groups: int) -> Tensor:
    """Return the sum of each group (O, G), as a product: adding along short rows is slow."""
    member_GI = torch.eye(groups).to(x_OI).repeat_interleave(x_OI.shape[1] // groups, 1)
    return x_OI @ member_GI.T


def _solved(left_ONN: Tensor, right_ON: Tensor) -> Tensor:
    # A group of zero levels makes the system singular; a small diagonal keeps it solvable.
    size_O = left_ONN.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-30)
    left_ONN.diagonal(dim1=1, dim2=2).add_(1e-7 * size_O[:, None])
    found_ON: Tensor = torch.linalg.solve(left_ONN, right_ON)
    return found_ON


def _damped(moment_II: Tensor) -> Tensor:
    """Return the second moment with a share of its mean on the diagonal, in float64."""
    moment_II = moment_II.double()
    diagonal_I = moment_II.diagonal()
    if not bool(torch.isfinite(moment_II).all()):
        raise InputError("calibration inputs that are not finite", hint="other calibration text")
    if float(diagonal_I.sum()) == 0.0:
        raise InputError(
            "calibration has seen nothing of this layer's inputs",
            hint="run some batches through the prepared model first",
        )
    return moment_II + torch.diag(torch.full_like(diagonal_I, float(DAMPING * diagonal_I.mean())))


def _inverse_factor(damped_II: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse."""
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(damped_II))
    factor_II: Tensor = torch.linalg.cholesky(inverse_II, upper=True)
    return factor_II.float()
