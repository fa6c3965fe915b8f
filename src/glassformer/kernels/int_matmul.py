"""Products with integer weights (INT8 or INT4, in groups of inputs) and INT8 activations.

The arithmetic, which the C file and the torch references follow operation by operation, in float32.
A group is a part of a row's inputs, or for INT8 the entire row; for each group in order:

    a    = max |x| / 127                           (a = 0: the group's quantized values are 0)
    xq   = round_half_even(x / a), clamped to [-127, 127]
    INT8   sum = float(sum xq q)
    INT4   sum = float(sum xq q) - zero * sum xq
    acc  = acc + (sum * scale) * a                 (from 0)

and y = acc * outer, if there is one, then + bias; with an outer, scales are bytes and zeros count
sixteenths. A refined product is y(x) + y(x - a * xq): what
rounding left of the activations is rounded in its turn.

Sums of integers are exact (nothing saturates), so the result is the same, bit for bit, for any
batch, number of threads and variant of the C code. A row with an infinity or a NaN gives NaN. There
are no gradients. Tensors are on the CPU.
"""

import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from glassformer.kernels import c_library
from glassformer.kernels.c_library import available, variant, why_not
from glassformer.kernels.threads import product_threads
from glassformer.spec.errors import InputError, MachineError

# B rows, I inputs, O outputs, G groups

STEPS = 127
FLOAT32_GROUP = 2**24 // 128 // STEPS  # inputs whose sums, level by level, stay below 2 ** 24


def reference_int8(
    x_BI: Tensor,
    qweight_OI: Tensor,
    scale: Tensor,
    bias_O: Tensor | None = None,
    *,
    refined: bool = False,
) -> Tensor:
    """Compute `Int8Weight.product` in plain torch, bit for bit; scale is (O,) or (O, G)."""
    scale_OG = scale[:, None] if scale.ndim == 1 else scale
    zero_OG = torch.zeros_like(scale_OG)
    return reference_integer(x_BI, qweight_OI, scale_OG, zero_OG, bias_O, refined=refined)


def reference_integer(
    x_BI: Tensor,
    qweight_OI: Tensor,
    scale_OG: Tensor,
    zero_OG: Tensor,
    bias_O: Tensor | None = None,
    *,
    outer_O: Tensor | None = None,
    refined: bool = False,
) -> Tensor:
    """Compute the product of any integer weights in plain torch, on any device."""
    y_BO = _in_groups(x_BI, qweight_OI, scale_OG, zero_OG)
    y_BO = y_BO if outer_O is None else y_BO * outer_O
    if refined:
        rest_BI = rest_of(x_BI, scale_OG.shape[1])
        more_BO = _in_groups(rest_BI, qweight_OI, scale_OG, zero_OG)
        y_BO = y_BO + (more_BO if outer_O is None else more_BO * outer_O)
    return y_BO if bias_O is None else y_BO + bias_O


def rest_of(x_BI: Tensor, groups: int) -> Tensor:
    """Return what rounding activations to 8 bits, by groups, leaves of them."""
    x_NI = x_BI.reshape(-1, x_BI.shape[1] // groups)
    xq_NI, a_N1 = quantized_rows(x_NI)
    return (x_NI - a_N1 * xq_NI).view_as(x_BI)


def reference_int4(
    x_BI: Tensor,
    qweight_OI: Tensor,
    scale_OG: Tensor,
    zero_OG: Tensor | None = None,
    bias_O: Tensor | None = None,
    outer_O: Tensor | None = None,
    *,
    refined: bool = False,
) -> Tensor:
    """Compute `Int4Weight.product` in plain torch, bit for bit; q is (O, I).

    With `outer_O` zeros count sixteenths.
    """
    if zero_OG is None:
        zero_OG = torch.full(scale_OG.shape, 8.0)
    elif outer_O is not None:
        zero_OG = zero_OG.float() / SIXTEENTHS
    return reference_integer(
        x_BI, qweight_OI, scale_OG, zero_OG, bias_O, outer_O=outer_O, refined=refined
    )


def _in_groups(x_BI: Tensor, qweight_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor) -> Tensor:
    groups = scale_OG.shape[1]
    acc_BO = x_BI.new_zeros(len(x_BI), len(qweight_OI))
    for g, (x, q) in enumerate(
        zip(x_BI.chunk(groups, 1), qweight_OI.chunk(groups, 1), strict=True)
    ):
        xq, a_B1 = quantized_rows(x)
        # Sums of integers are exact in float32 below 2 ** 24, and in float64 always.
        exact = torch.float32 if q.shape[1] <= FLOAT32_GROUP else torch.float64
        sum_BO = (xq.to(exact) @ q.to(exact).t()).float()
        sum_BO = sum_BO - zero_OG[:, g].float() * xq.sum(1, keepdim=True)
        acc_BO = acc_BO + sum_BO * scale_OG[:, g].float() * a_B1
    return acc_BO


def quantized_rows(x_BI: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers in [-127, 127] as float32, and the step size of each row (a, above)."""
    most_B1 = x_BI.abs().amax(1, keepdim=True)
    a_B1 = (most_B1 / STEPS).masked_fill(~most_B1.isfinite(), torch.nan)
    xq_BI = torch.round(x_BI / a_B1).clamp(-STEPS, STEPS)
    return torch.where(a_B1 > 0, xq_BI, 0.0), a_B1


__all__ = [
    "Int4Weight",
    "Int8Weight",
    "available",
    "reference_int4",
    "reference_int8",
    "variant",
    "why_not",
]

# B rows, I inputs, O outputs, G groups, N looked-up rows, T tiles, L = 16 outputs of a tile

TILE = 16
MOST_INPUTS = 1 << 17  # 128 * 127 * this still fits into 32 bits
MOST_GROUP = 1 << 13  # 15 * 127 * this is still exact in float32
KINDS = (torch.float32, torch.float16, torch.uint8)  # `enum kind` of integer.c
SIXTEENTHS = 16  # what a zero counts where scales have an outer factor: the kind after the last


class _Form(ctypes.Structure):
    """`struct integer` of integer.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "zero", "outer")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "groups", "group")),
        *((name, ctypes.c_int32) for name in ("bits", "scale_kind", "zero_kind", "refined")),
    )


class _IntegerWeight(ABC):
    """Weights in the layout of the C file: tiles of 16 outputs."""

    def __init__(
        self,
        packed: Tensor,
        scale_TGL: Tensor,
        zero_TGL: Tensor | None,
        *,
        shape: tuple[int, int],
        bits: int,
        outer_TL: Tensor | None = None,
        refined: bool = False,
    ) -> None:
        self.shape, self.packed, self.scale_TGL, self.zero_TGL = shape, packed, scale_TGL, zero_TGL
        self.outer_TL, self.refined = outer_TL, refined
        self._call = c_library.library().glass_integer
        groups = scale_TGL.shape[1]
        self._form = _Form(
            packed.data_ptr(),
            scale_TGL.data_ptr(),
            None if zero_TGL is None else zero_TGL.data_ptr(),
            None if outer_TL is None else outer_TL.data_ptr(),
            *shape,
            groups,
            shape[1] // groups,
            bits,
            KINDS.index(scale_TGL.dtype),
            0 if zero_TGL is None else KINDS.index(zero_TGL.dtype) + (outer_TL is not None),
            refined,
        )
        self._address = ctypes.addressof(self._form)

    @property
    def address(self) -> int:
        """The address of the `struct integer`, valid as long as this object."""
        return self._address

    @property
    def nbytes(self) -> int:
        """The number of resident bytes: weights, scales and zero points."""
        parts = (self.packed, self.scale_TGL, self.zero_TGL, self.outer_TL)
        return sum(part.nbytes for part in parts if part is not None)

    def product(self, x_BI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Return x W^T + b, (B, O) of float32, for any number of rows."""
        outputs, inputs = self.shape
        _check_float32("x", x_BI, (x_BI.shape[0] if x_BI.ndim == 2 else -1, inputs))
        x_BI = x_BI.contiguous()
        if bias_O is not None:
            _check_float32("bias", bias_O, (outputs,))
            bias_O = bias_O.contiguous()
        y_BO = torch.empty(len(x_BI), outputs)
        if len(x_BI) and self._call(
            self._address,
            None if bias_O is None else bias_O.data_ptr(),
            x_BI.data_ptr(),
            y_BO.data_ptr(),
            len(x_BI),
            product_threads(),
        ):
            raise MachineError(f"no memory for the product of {len(x_BI)} rows of {inputs}")
        return y_BO

    @abstractmethod
    def rows(self, index_N: Tensor) -> Tensor:
        """Return some rows of the matrix as float32, (N, I)."""


class Int8Weight(_IntegerWeight):
    """W = q * scale; q (O, I) int8; scale, float32 or float16, is (O,), or (O, G) for groups.

    A group is a multiple of 8 inputs; without groups any number of inputs will do.
    """

    def __init__(self, qweight_OI: Tensor, scale: Tensor, *, refined: bool = False) -> None:
        shape = _matrix_shape(qweight_OI, torch.int8)
        self.per_channel = scale.ndim == 1
        groups = 1 if self.per_channel else scale.shape[-1]
        _check_numbers("scale", scale, shape[:1] if self.per_channel else (shape[0], groups))
        if not 0 < shape[1] <= MOST_INPUTS:
            raise InputError(f"{shape[1]} inputs", hint=f"1 to {MOST_INPUTS}: sums have 32 bits")
        if not self.per_channel and shape[1] % (8 * groups):
            raise InputError(
                f"{groups} groups of {shape[1]} inputs", hint="a multiple of 8 inputs each"
            )
        blocks = -(-shape[1] // 8) * 2
        padded = torch.zeros(_tiles(shape[0]) * TILE, blocks * 4, dtype=torch.int8)
        padded[: shape[0], : shape[1]] = qweight_OI
        lifted = padded.view(torch.uint8).bitwise_xor_(128)  # q + 128
        packed = lifted.view(-1, TILE, blocks, 4).transpose(1, 2).contiguous()
        scale_TGL = _in_tiles(scale.reshape(shape[0], groups))
        super().__init__(packed, scale_TGL, None, shape=shape, bits=8, refined=refined)

    def unpack(self) -> tuple[Tensor, Tensor]:
        """Return q (O, I) and scale, as they were given."""
        flat = self.packed.transpose(1, 2).flatten(2).flatten(0, 1)
        qweight_OI = (flat[: self.shape[0], : self.shape[1]] ^ 128).view(torch.int8)
        scale_OG = _from_tiles(self.scale_TGL, self.shape[0])
        return qweight_OI.contiguous(), scale_OG[:, 0] if self.per_channel else scale_OG

    def rows(self, index_N: Tensor) -> Tensor:
        tile_N, lane_N = index_N // TILE, index_N % TILE
        q_NI = (self.packed[tile_N, :, lane_N].flatten(1) ^ 128).view(torch.int8)
        scale_NG = self.scale_TGL[tile_N, :, lane_N].float()
        q_NGi = q_NI[:, : self.shape[1]].float().reshape(*scale_NG.shape, -1)
        return (q_NGi * scale_NG[..., None]).flatten(1)

    def __reduce__(self) -> tuple[Callable[..., "Int8Weight"], tuple[Tensor, ...]]:
        # Addresses are not valid in another process.
        return functools.partial(Int8Weight, refined=self.refined), self.unpack()


class Int4Weight(_IntegerWeight):
    """W = (q - zero) * scale for groups of `group` inputs, a multiple of 8.

    q is uint8, (O, I) with one value 0..15 per byte, or (O, I / 2) with two, the low nibble first;
    scale (O, G) is float16 or float32, zero (O, G) also uint8; no zero means 8 everywhere. With
    outer (O,) of float32, W = (q - zero / 16) * scale * outer, where scale and zero are uint8.
    """

    def __init__(
        self,
        qweight: Tensor,
        scale_OG: Tensor,
        zero_OG: Tensor | None = None,
        *,
        group: int,
        outer_O: Tensor | None = None,
        refined: bool = False,
    ) -> None:
        outputs, width = _matrix_shape(qweight, torch.uint8)
        if not (0 < group <= MOST_GROUP and group % 8 == 0):
            raise InputError(f"groups of {group}", hint=f"a multiple of 8 up to {MOST_GROUP}")
        shape = (outputs, scale_OG.shape[-1] * group)
        if width not in (shape[1], shape[1] // 2):
            raise InputError(
                f"qweight has {width} bytes a row, scale {tuple(scale_OG.shape)} groups of {group}",
                hint=f"{shape[1]} unpacked, {shape[1] // 2} packed",
            )
        grid = (outputs, shape[1] // group)
        byte = KINDS[-1:]
        if outer_O is not None:
            _check_numbers("outer", outer_O, (outputs,), kinds=KINDS[:1])
        _check_numbers("scale", scale_OG, grid, kinds=KINDS[:2] if outer_O is None else byte)
        if zero_OG is not None:
            _check_numbers("zero", zero_OG, grid, kinds=KINDS if outer_O is None else byte)
        q_OI = qweight if width == shape[1] else _nibbles(qweight)
        if q_OI.numel() and int(q_OI.max()) > 15:
            raise InputError(f"a 4-bit value of {int(q_OI.max())}", hint="0 to 15")
        padded = torch.zeros(_tiles(outputs) * TILE, shape[1], dtype=torch.uint8)
        padded[:outputs] = q_OI
        halves = padded.view(-1, TILE, shape[1] // 8, 2, 4)
        packed = (halves[..., 0, :] | halves[..., 1, :] << 4).transpose(1, 2).contiguous()
        zero_TGL = None if zero_OG is None else _in_tiles(zero_OG)
        super().__init__(
            packed,
            _in_tiles(scale_OG),
            zero_TGL,
            shape=shape,
            bits=4,
            outer_TL=None if outer_O is None else _in_tiles(outer_O[:, None]),
            refined=refined,
        )
        self.group = group

    @property
    def outer(self) -> Tensor | None:
        """The factor of each output's scales."""
        return None if self.outer_TL is None else _from_tiles(self.outer_TL, self.shape[0])[:, 0]

    def unpack(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return q (O, I) with one value per byte, scale and zero (O, G), as they were given."""
        zero_OG = None if self.zero_TGL is None else _from_tiles(self.zero_TGL, self.shape[0])
        q_OI = _eights(self.packed.transpose(1, 2)).flatten(2).flatten(0, 1)[: self.shape[0]]
        return q_OI.contiguous(), _from_tiles(self.scale_TGL, self.shape[0]), zero_OG

    def rows(self, index_N: Tensor) -> Tensor:
        tile_N, lane_N = index_N // TILE, index_N % TILE
        q_NI = _eights(self.packed[tile_N, :, lane_N]).flatten(1)
        q_NGi = q_NI.view(len(q_NI), -1, self.group).float()
        zero: Tensor | float = 8.0
        if self.zero_TGL is not None:
            zero = self.zero_TGL[tile_N, :, lane_N].float()[..., None]
            zero = zero if self.outer_TL is None else zero / SIXTEENTHS
        scale_NG1 = self.scale_TGL[tile_N, :, lane_N].float()[..., None]
        rows_NI = ((q_NGi - zero) * scale_NG1).flatten(1)
        return rows_NI if self.outer_TL is None else rows_NI * self.outer_TL[tile_N, :, lane_N]

    def __reduce__(self) -> tuple[Callable[..., "Int4Weight"], tuple[Tensor | None, ...]]:
        make = functools.partial(
            Int4Weight, group=self.group, outer_O=self.outer, refined=self.refined
        )
        return make, self.unpack()


def _tiles(outputs: int) -> int:
    return -(-outputs // TILE)


def _in_tiles(numbers_OG: Tensor) -> Tensor:
    outputs, groups = numbers_OG.shape
    padded = numbers_OG.new_zeros(_tiles(outputs) * TILE, groups)
    padded[:outputs] = numbers_OG
    return padded.view(-1, TILE, groups).transpose(1, 2).contiguous()


def _from_tiles(numbers_TGL: Tensor, outputs: int) -> Tensor:
    return numbers_TGL.transpose(1, 2).flatten(0, 1)[:outputs].contiguous()


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack two values per byte, the low nibble first, to one value per byte."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _eights(packed: Tensor) -> Tensor:
    """Unpack (..., 4) bytes of a tile to (..., 8) values: four low nibbles, then four high."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _matrix_shape(qweight: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    if qweight.ndim != 2 or qweight.dtype != dtype or qweight.device.type != "cpu":
        raise InputError(
            f"qweight is {tuple(qweight.shape)}, {qweight.dtype}, on {qweight.device}",
            hint=f"a matrix of {dtype} on the CPU",
        )
    return qweight.shape[0], qweight.shape[1]


def _check_numbers(
    name: str,
    numbers: Tensor,
    shape: tuple[int, ...],
    *,
    kinds: tuple[torch.dtype, ...] = (torch.float32, torch.float16),
) -> None:
    fits = numbers.shape == shape and numbers.dtype in kinds
    if not fits or numbers.device.type != "cpu":
        raise InputError(
            f"{name} is {tuple(numbers.shape)}, {numbers.dtype}, on {numbers.device}",
            hint=f"{shape} of {' or '.join(map(str, kinds))} on the CPU",
        )


def _check_float32(name: str, given: Tensor, shape: tuple[int, ...]) -> None:
    if given.shape != shape or given.dtype != torch.float32 or given.device.type != "cpu":
        raise InputError(
            f"{name} is {tuple(given.shape)}, {given.dtype}, on {given.device}",
            hint=f"{shape} of float32 on the CPU",
        )
    if given.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"{name} requires a gradient, and integer products have none",
            hint="call it under torch.no_grad()",
        )
