"""Products with quantized matrices: the reference, and the routines of torch and of our C kernels.

Two run on every machine, piece by piece, with little memory and slowly. The reference does the
arithmetic of the C routines, activations of 8 bits and exact sums, bit for bit. The float product
has rounded weights and activations as they are: training with rounded weights and a dequantized
model compute the same, bit for bit, and every backend is held to a bound around it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.kernels import c_library, int_matmul, integer
from glassformer.quant.schemes import (
    IntegerCodec,
    QuantizedTensor,
    codec,
    dequantize,
    grid_of,
)
from glassformer.spec.schemes import Int4, Int8, Scheme

# M rows, N looked-up rows, O outputs, I inputs, G groups

#: Weights that are dequantized at once: 16 MiB of float32.
PIECE = 1 << 22


def in_pieces(
    x: Tensor, shape: tuple[int, int], weight: Callable[[slice], Tensor], bias_O: Tensor | None
) -> Tensor:
    """Return x W^T + b; `weight` gives the weights of some outputs at a time."""
    outputs, inputs = shape
    step = max(1, PIECE // inputs)
    if outputs <= step:
        return F.linear(x, weight(slice(0, outputs)), bias_O)
    pieces = [slice(start, start + step) for start in range(0, outputs, step)]
    found = [
        F.linear(x, weight(piece), None if bias_O is None else bias_O[piece]) for piece in pieces
    ]
    return torch.cat(found, dim=-1)


def reference_product(
    x: Tensor, tensor: QuantizedTensor, bias_O: Tensor | None = None, *, head: bool = False
) -> Tensor:
    """Return x W^T + b for x (..., I) as the C routines compute it, for schemes that they know."""
    if not isinstance(codec(tensor.scheme), IntegerCodec):
        return float_product(x, tensor, bias_O)
    outputs, inputs = tensor.shape
    rows_MI = x.reshape(-1, inputs).float()
    step, found = max(1, PIECE // inputs), []
    for start in range(0, outputs, step):
        part = tensor.rows(slice(start, start + step))
        scale_OG, zero_OG = grid_of(part)
        # A power of two changes no bit, whether it multiplies scales or sums.
        found.append(
            int_matmul.reference_integer(rows_MI, part.levels(), scale_OG, zero_OG, refined=head)
        )
    y_MO = torch.cat(found, -1) if len(found) > 1 else found[0]
    y_MO = y_MO if bias_O is None else y_MO + bias_O.float()
    return y_MO.view(*x.shape[:-1], outputs).to(x.dtype)


def float_product(x: Tensor, tensor: QuantizedTensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + b for x (..., I), in x's precision: rounded weights, activations as given."""
    bias_O = None if bias_O is None else bias_O.to(x.dtype)
    return in_pieces(
        x, tensor.shape, lambda piece: dequantize(tensor.rows(piece)).to(x.dtype), bias_O
    )


def transposed_product(y: Tensor, tensor: QuantizedTensor) -> Tensor:
    """Return y W for y (..., O), in y's precision."""
    outputs, inputs = tensor.shape
    found = y.new_zeros(*y.shape[:-1], inputs)
    step = max(1, PIECE // inputs)
    for start in range(0, outputs, step):
        piece = slice(start, start + step)
        found += y[..., piece] @ dequantize(tensor.rows(piece)).to(y.dtype)
    return found


def reference_rows(tensor: QuantizedTensor, index: Tensor) -> Tensor:
    """Return rows of the matrix by index: (..., I) for an index of any shape."""
    flat = index.reshape(-1)
    rows: Tensor = dequantize(tensor.rows(flat)).unflatten(0, index.shape)
    return rows


# --- torch's weight-only ops ----------------------------------------------------------------------
#
# On a GPU alone. Activations and scales are bfloat16. The ops are private and their layouts may
# change, so a packed matrix is never saved. It is unpacked by a product with the identity matrix:
# levels are small integers, which bfloat16 holds exactly. The original scales are kept, as the
# packed ones are rounded.

#: Relative rounding error of bfloat16: half a unit in the last place.
HALF_PLACE = 2.0**-8


class AtenInt4:
    """A packed INT4 matrix; for lookups the stored form is kept too."""

    def __init__(self, tensor: QuantizedTensor, *, lookup: bool) -> None:
        assert isinstance(tensor.scheme, Int4)
        self.scheme, self.shape = tensor.scheme, tensor.shape
        self.own = (tensor.scale, tensor.zero, tensor.exponent)
        self.stored = tensor if lookup else None
        # This op expects the even column in the high nibble.
        turned = (tensor.qweight << 4) | (tensor.qweight >> 4)
        tiles = next(n for n in (8, 4, 2) if self.shape[1] % (16 * n) == 0)
        self.packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(turned, tiles)
        scale_OG, zero_OG = grid_of(tensor)
        self.table = self._table(scale_OG, (8.0 - zero_OG) * scale_OG)

    @staticmethod
    def _table(scale_OG: Tensor, shift_OG: Tensor) -> Tensor:
        """Return the (G, O, 2) table of weight = (level - 8) * scale + shift."""
        both = torch.stack((scale_OG, shift_OG.expand_as(scale_OG)), -1)
        return both.transpose(0, 1).contiguous().to(torch.bfloat16)

    @property
    def nbytes(self) -> int:
        """The number of resident bytes."""
        kept = 0 if self.stored is None else self.stored.qweight.nbytes
        own = sum(part.nbytes for part in self.own if part is not None)
        return self.packed.nbytes + self.table.nbytes + own + kept

    def _multiply(self, x_MI: Tensor, table: Tensor) -> Tensor:
        x, group = x_MI.to(torch.bfloat16).contiguous(), self.scheme.group
        out_MO: Tensor = torch.ops.aten._weight_int4pack_mm(x, self.packed, group, table)
        return out_MO

    @torch.no_grad()
    def product(self, x_MI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + b."""
        out_MO = self._multiply(x_MI, self.table).to(x_MI.dtype)
        return out_MO if bias_O is None else out_MO.add_(bias_O)

    def rows(self, index_N: Tensor) -> Tensor:
        """Return dequantized rows (N, I)."""
        assert self.stored is not None
        return reference_rows(self.stored, index_N)

    def unpack(self) -> QuantizedTensor:
        """Return the stored form again, by a product with the identity matrix."""
        if self.stored is not None:
            return self.stored
        unit = torch.eye(self.shape[1], device=self.packed.device)
        scale, zero, exponent = self.own
        ones_OG = torch.ones(scale.shape, device=scale.device)
        ones = self._table(ones_OG, torch.zeros_like(ones_OG))
        levels_OI = (self._multiply(unit, ones).t() + 8).to(torch.uint8).contiguous()
        qweight = codec(self.scheme).pack(levels_OI)
        return QuantizedTensor(qweight, scale, zero, self.scheme, exponent)


class AtenInt8:
    """An INT8 matrix in its stored form.

    A single row goes through torch's op, if there is one scale per channel. That op takes as long
    for each further row, so for more rows the levels, which bfloat16 holds exactly, are converted
    piece by piece; with scales per group, so are the weights.
    """

    def __init__(self, tensor: QuantizedTensor) -> None:
        assert isinstance(tensor.scheme, Int8)
        self.stored = tensor
        self.grouped = bool(tensor.scheme.group)
        self.scale_O = tensor.scale.to(torch.bfloat16)
        self.nbytes = tensor.nbytes + (0 if self.grouped else self.scale_O.nbytes)

    @torch.no_grad()
    def product(self, x_MI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + b."""
        levels_OI, x = self.stored.qweight, x_MI.to(torch.bfloat16).contiguous()
        out_MO: Tensor
        if self.grouped:
            out_MO = float_product(x, self.stored).to(x_MI.dtype)
        elif len(x) == 1:
            out_MO = torch.ops.aten._weight_int8pack_mm(x, levels_OI, self.scale_O).to(x_MI.dtype)
        else:
            out_MO = in_pieces(x, self.stored.shape, lambda at: levels_OI[at].to(x.dtype), None)
            out_MO = out_MO.to(x_MI.dtype) * self.stored.scale
        return out_MO if bias_O is None else out_MO.add_(bias_O)

    def rows(self, index_N: Tensor) -> Tensor:
        """Return dequantized rows (N, I)."""
        return reference_rows(self.stored, index_N)

    def unpack(self) -> QuantizedTensor:
        """Return the stored form, which is the one in use."""
        return self.stored


class Aten:
    """Torch's weight-only ops on a GPU."""

    name = "aten"
    device = "cuda"
    runs = integer.RUNS

    def lacks(self, scheme: Scheme, shape: tuple[int, int]) -> str:
        """Return what it lacks for a matrix of this shape; empty if nothing."""
        outputs, inputs = shape
        if scheme.bits == 4 and (outputs % 8 or inputs % 32):
            return f"packs 8 outputs by 32 inputs, and there are {outputs} by {inputs}"
        return ""

    def pack(
        self, tensor: QuantizedTensor, *, lookup: bool, head: bool = False
    ) -> AtenInt4 | AtenInt8:
        """Return the run-time form."""
        return AtenInt4(tensor, lookup=lookup) if tensor.scheme.bits == 4 else AtenInt8(tensor)

    def bound(self, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
        """Return the error bound (M, O) against the reference.

        Activations, scales and results are rounded to bfloat16; sums are kept in float32.
        """
        return 4 * HALF_PLACE * (x_MI.abs() @ weight_OI.abs().T)


# --- our C routines -------------------------------------------------------------------------------
#
# Activations are quantized to 8 bits with one scale per row and group of inputs, and integer sums
# are exact, so no result depends on the rest of the batch. Of a head's activations, what is left is
# rounded once more: a final norm's outliers have nowhere to go, and a head's time is spent on
# reading weights, not on arithmetic.


class NativeForm:
    """A matrix in the C routines' layout."""

    def __init__(self, tensor: QuantizedTensor, *, head: bool) -> None:
        self.scheme = tensor.scheme
        parts = int_matmul.views_of(tensor.parts())
        self.weight = int_matmul.IntegerWeight(integer.tiles_of(self.scheme, parts, refined=head))

    @property
    def nbytes(self) -> int:
        """The number of resident bytes."""
        return self.weight.nbytes

    def product(self, x_MI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + b."""
        return self.weight.product(x_MI, bias_O)

    def rows(self, index_N: Tensor) -> Tensor:
        """Return dequantized rows (N, I)."""
        return self.weight.rows(index_N)

    def unpack(self) -> QuantizedTensor:
        """Return the stored form again."""
        stored = integer.stored_parts(self.weight.tiles)
        parts = {leaf: torch.from_numpy(part) for leaf, part in stored.items()}
        return QuantizedTensor.of(parts, self.scheme)


class Native:
    """Our C routines on the CPU."""

    name = "c"
    device = "cpu"
    runs = integer.RUNS

    def lacks(self, scheme: Scheme, shape: tuple[int, int]) -> str:
        """Return why the C library is not here; empty if it is."""
        return c_library.unavailable()

    def pack(self, tensor: QuantizedTensor, *, lookup: bool, head: bool = False) -> NativeForm:
        """Return the run-time form; a head's activations are rounded twice."""
        return NativeForm(tensor, head=head)

    def bound(self, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
        """Return the error bound (M, O) against the reference: half a step of each activation."""
        step_M1 = x_MI.abs().amax(-1, keepdim=True) / int_matmul.STEPS
        return 0.5 * step_M1 * weight_OI.abs().sum(-1)
