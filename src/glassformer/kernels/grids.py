"""The search for a matrix's grids, and GPTQ's passes over its columns, in C.

The search does the operations of `quant.schemes.least_squares_grid`, bit for bit; the passes do
those of `quant.schemes.quantize_with_inputs`, whose sums torch adds in another order.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glassformer.kernels import c_library
from glassformer.kernels.threads import product_threads
from glassformer.spec.errors import MachineError

# O outputs, I inputs, G groups, E entries of a group


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels of a scheme, and how its scales are stored: as float16, if `half`."""

    lowest: float
    highest: float
    middle: float
    symmetric: bool
    half: bool


class _Grids(ctypes.Structure):
    """`struct grids` of grids.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "count", "unit", "share")),
        *((name, ctypes.c_void_p) for name in ("scale", "zero")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "groups", "shares")),
        *((name, ctypes.c_float) for name in ("lowest", "highest", "middle")),
        *((name, ctypes.c_int32) for name in ("symmetric", "half", "too_large", "no_memory")),
    )


class _Columns(ctypes.Structure):
    """`struct columns` of grids.c."""

    _fields_ = (
        ("grids", _Grids),
        *((name, ctypes.c_void_p) for name in ("factor", "moment", "slope", "level")),
    )


def searched_grids(
    weight_OI: Tensor,
    count_I: Tensor,
    unit_O1: Tensor | None,
    *,
    groups: int,
    shares: Sequence[float],
    levels: Levels,
) -> tuple[Tensor, Tensor] | None:
    """Return scales and zeros (O, G); None where a scale is too large for float16.

    `count_I`: what the squared error of each input counts. Tensors are float32, on the CPU.
    """
    outputs = len(weight_OI)
    scale_OG, zero_OG = torch.empty(outputs, groups), torch.empty(outputs, groups)
    given, held = _grids(weight_OI, count_I, unit_O1, shares, levels, scale_OG, zero_OG)
    found = c_library.library().glass_grids(ctypes.addressof(given), product_threads())
    del held
    return (scale_OG, zero_OG) if _fits(found) else None


def corrected_columns(
    weight_OI: Tensor,
    factor_II: Tensor,
    count_E: Tensor,
    unit_O1: Tensor | None,
    *,
    groups: int,
    shares: Sequence[float],
    levels: Levels,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return levels (O, I), scales and zeros (O, G) of GPTQ's first pass; None as above.

    `factor_II`: the upper Cholesky factor of the inverse of the inputs' second moment.
    """
    outputs = len(weight_OI)
    scale_OG, zero_OG = torch.empty(outputs, groups), torch.empty(outputs, groups)
    given, held = _grids(weight_OI, count_E, unit_O1, shares, levels, scale_OG, zero_OG)
    level_OI, factor_II = torch.empty(weight_OI.shape), factor_II.contiguous()
    columns = _Columns(given, factor_II.data_ptr(), None, None, level_OI.data_ptr())
    found = c_library.library().glass_columns(ctypes.addressof(columns), product_threads())
    del held
    return (level_OI, scale_OG, zero_OG) if _fits(found) else None


def rounded_columns(
    level_OI: Tensor,
    scale_OG: Tensor,
    zero_OG: Tensor,
    slope_OI: Tensor,
    moment_II: Tensor,
    unit_O1: Tensor | None,
    *,
    levels: Levels,
) -> Tensor:
    """Return levels, each column's the best given the others; slope = (rounded - wanted) H."""
    level_OI, scale_OG, zero_OG = level_OI.clone(), scale_OG.contiguous(), zero_OG.contiguous()
    slope_OI, moment_II = slope_OI.contiguous(), moment_II.contiguous()
    given, held = _grids(slope_OI, moment_II, unit_O1, (), levels, scale_OG, zero_OG)
    columns = _Columns(given, None, moment_II.data_ptr(), slope_OI.data_ptr(), level_OI.data_ptr())
    _fits(c_library.library().glass_columns(ctypes.addressof(columns), product_threads()))
    del held
    return level_OI


def _grids(
    weight_OI: Tensor,
    count: Tensor,
    unit_O1: Tensor | None,
    shares: Sequence[float],
    levels: Levels,
    scale_OG: Tensor,
    zero_OG: Tensor,
) -> tuple[_Grids, list[Tensor | None]]:
    """Return the C structure, and what must live as long as it does."""
    weight_OI, count = weight_OI.contiguous(), count.contiguous()
    unit_O = None if unit_O1 is None else unit_O1[:, 0].contiguous()
    share = torch.tensor(shares, dtype=torch.float32)
    given = _Grids(
        weight_OI.data_ptr(),
        count.data_ptr(),
        None if unit_O is None else unit_O.data_ptr(),
        share.data_ptr(),
        scale_OG.data_ptr(),
        zero_OG.data_ptr(),
        *weight_OI.shape,
        scale_OG.shape[1],
        len(shares),
        levels.lowest,
        levels.highest,
        levels.middle,
        levels.symmetric,
        levels.half,
    )
    return given, [weight_OI, count, unit_O, share]


def _fits(found: int) -> bool:
    """Return False where a scale is too large; raise an error where there is no memory."""
    if found < 0:
        raise MachineError("no memory for a group of weights")
    return found == 0
