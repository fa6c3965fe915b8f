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

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.kernels import c_library
from glassformer.kernels.c_library import available, unavailable, variant
from glassformer.kernels.integer import (
    MIDDLE,
    SIXTEENTHS,
    IntegerTiles,
    int4_tiles,
    int8_tiles,
    nibbles,
)
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
        zero_OG = torch.full(scale_OG.shape, MIDDLE)
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
    "IntegerWeight",
    "available",
    "reference_int4",
    "reference_int8",
    "variant",
    "unavailable",
]

# B rows, I inputs, O outputs, G groups, N looked-up rows


class IntegerWeight:
    """Weights in the layout of the C file, multiplied with tensors."""

    def __init__(self, tiles: IntegerTiles) -> None:
        self.tiles = tiles
        self.shape, self.refined = tiles.shape, tiles.refined
        self._address = tiles.address
        self._call = c_library.library().glass_integer

    @property
    def packed(self) -> Tensor:
        """The levels, over the same memory."""
        return torch.from_numpy(self.tiles.words_TWL.view(np.uint8))

    @property
    def nbytes(self) -> int:
        """The number of resident bytes: weights, scales and zero points."""
        return self.tiles.nbytes

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

    def rows(self, index_N: Tensor) -> Tensor:
        """Return some rows of the matrix as float32, (N, I)."""
        return torch.from_numpy(self.tiles.rows(index_N.numpy()))

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors that it was made of, by name; 4-bit levels are two to a byte."""
        return {name: torch.from_numpy(part) for name, part in self.tiles.unpack().items()}


class Int8Weight(IntegerWeight):
    """W = q * scale; q (O, I) int8; scale, float32 or float16, is (O,), or (O, G) for groups.

    A group is a multiple of 8 inputs; without groups any number of inputs will do.
    """

    def __init__(self, qweight_OI: Tensor, scale: Tensor, *, refined: bool = False) -> None:
        parts = views_of({"qweight": qweight_OI, "scale": scale})
        super().__init__(int8_tiles(parts["qweight"], parts["scale"], refined=refined))

    def unpack(self) -> tuple[Tensor, Tensor]:
        """Return q (O, I) and scale, as they were given."""
        parts = self.parts()
        return parts["qweight"], parts["scale"]

    def __reduce__(self) -> tuple[Callable[..., "Int8Weight"], tuple[Tensor, ...]]:
        # Addresses are not valid in another process.
        return functools.partial(Int8Weight, refined=self.refined), self.unpack()


class Int4Weight(IntegerWeight):
    """W = (q - zero) * scale for groups of `group` inputs, a multiple of 8.

    The tensors are those of `integer.int4_tiles`.
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
        given = {"qweight": qweight, "scale": scale_OG, "zero": zero_OG, "outer": outer_O}
        parts = views_of({leaf: part for leaf, part in given.items() if part is not None})
        self.group = group
        super().__init__(
            int4_tiles(
                parts["qweight"],
                parts["scale"],
                parts.get("zero"),
                group=group,
                outer_O=parts.get("outer"),
                refined=refined,
            )
        )

    def unpack(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return q (O, I) with one value per byte, scale and zero (O, G), as they were given."""
        parts = self.parts()
        levels_OI = torch.from_numpy(nibbles(parts["qweight"].numpy()))
        return levels_OI, parts["scale"], parts.get("zero")

    def __reduce__(self) -> tuple[Callable[..., "Int4Weight"], tuple[Tensor | None, ...]]:
        outer_O = self.parts().get("outer")
        make = functools.partial(
            Int4Weight, group=self.group, outer_O=outer_O, refined=self.refined
        )
        return make, self.unpack()


def views_of(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Return tensors on the CPU as arrays over the same memory, by name."""
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or tensor.dtype == torch.bfloat16:
            raise InputError(
                f"{name} is {tensor.dtype}, on {tensor.device}",
                hint="on the CPU, of a type that NumPy has",
            )
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


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
