"""Weight-only products by torch's own ops: INT4 on the GPU and, without a C compiler, on the CPU;
INT8 on the GPU. Activations and scales are bfloat16.

The ops are private and their layouts differ by device, so a packed matrix is never saved. It is
unpacked by a product with the identity matrix: levels are small integers, which bfloat16 holds
exactly. The original scales are kept, as the packed ones are rounded.
"""

import torch
from torch import Tensor

from glassformer.quant.backends.reference import in_pieces, reference_rows
from glassformer.quant.schemes import QuantizedTensor, codec
from glassformer.spec.schemes import Int4, Int8, Scheme

# M rows, N looked-up rows, O outputs, I inputs, G groups

#: Relative rounding error of bfloat16: half a unit in the last place.
HALF_PLACE = 2.0**-8


class AtenInt4:
    """A packed INT4 matrix; for lookups the stored form is kept too."""

    def __init__(self, tensor: QuantizedTensor, *, lookup: bool) -> None:
        assert isinstance(tensor.scheme, Int4)
        self.scheme, self.shape = tensor.scheme, tensor.shape
        self.scale_OG, self.zero_OG = tensor.scale, tensor.zero
        self.stored = tensor if lookup else None
        self.cuda = tensor.qweight.is_cuda
        if self.cuda:
            # This op expects the even column in the high nibble.
            turned = (tensor.qweight << 4) | (tensor.qweight >> 4)
            tiles = next(n for n in (8, 4, 2) if self.shape[1] % (16 * n) == 0)
            self.packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(turned, tiles)
        else:
            levels = tensor.levels().int()
            self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
        zero_OG = 8.0 if tensor.zero is None else tensor.zero.float()
        scale_OG = self.scale_OG.float()
        self.table = self._table(scale_OG, (8.0 - zero_OG) * scale_OG)

    @staticmethod
    def _table(scale_OG: Tensor, shift_OG: Tensor) -> Tensor:
        """Return the (G, O, 2) table of weight = (level - 8) * scale + shift."""
        both = torch.stack((scale_OG, shift_OG.expand_as(scale_OG)), -1)
        return both.transpose(0, 1).contiguous().to(torch.bfloat16)

    @property
    def nbytes(self) -> int:
        """The number of resident bytes."""
        zeros = 0 if self.zero_OG is None else self.zero_OG.nbytes
        kept = 0 if self.stored is None else self.stored.qweight.nbytes
        return self.packed.nbytes + self.table.nbytes + self.scale_OG.nbytes + zeros + kept

    def _multiply(self, x_MI: Tensor, table: Tensor) -> Tensor:
        name = "_weight_int4pack_mm" if self.cuda else "_weight_int4pack_mm_for_cpu"
        multiply = getattr(torch.ops.aten, name)
        x = x_MI.to(torch.bfloat16).contiguous()
        out_MO: Tensor = multiply(x, self.packed, self.scheme.group, table)
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
        ones = self._table(torch.ones_like(self.scale_OG), torch.zeros_like(self.scale_OG))
        levels_OI = (self._multiply(unit, ones).t() + 8).to(torch.uint8).contiguous()
        return QuantizedTensor(
            codec(self.scheme).pack(levels_OI), self.scale_OG, self.zero_OG, self.scheme
        )


class AtenInt8:
    """An INT8 matrix in its stored form.

    A single row goes through torch's op. That op takes as long for each further row, so for more
    rows the levels, which bfloat16 holds exactly, are converted piece by piece.
    """

    def __init__(self, tensor: QuantizedTensor) -> None:
        self.stored = tensor
        self.scale_O = tensor.scale.to(torch.bfloat16)
        self.nbytes = tensor.nbytes + self.scale_O.nbytes

    @torch.no_grad()
    def product(self, x_MI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + b."""
        levels_OI, x = self.stored.qweight, x_MI.to(torch.bfloat16).contiguous()
        out_MO: Tensor
        if len(x) == 1:
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
    """Torch's weight-only ops."""

    name = "aten"
    schemes = (Int8, Int4)

    def why_not(
        self, scheme: Scheme, shape: tuple[int, int], device: torch.device, *, lookup: bool
    ) -> str:
        """Return the reason why it cannot serve such a matrix; empty if it can."""
        if device.type not in ("cpu", "cuda"):
            return "runs on the CPU and on CUDA only"
        outputs, inputs = shape
        if isinstance(scheme, Int8):
            if device.type == "cpu":
                return "has nothing fast for 8 bits on the CPU"
            return "" if scheme.symmetric else "has symmetric levels only, for 8 bits"
        if device.type == "cpu" and outputs % 16:
            return f"packs 16 outputs at a time, and there are {outputs}"
        if device.type == "cuda" and (outputs % 8 or inputs % 32):
            return f"packs 8 outputs by 32 inputs, and there are {outputs} by {inputs}"
        return ""

    def pack(self, tensor: QuantizedTensor, *, lookup: bool) -> AtenInt4 | AtenInt8:
        """Return the run-time form."""
        match tensor.scheme:
            case Int4():
                return AtenInt4(tensor, lookup=lookup)
            case Int8():
                return AtenInt8(tensor)
            case other:
                raise TypeError(f"{type(other).__name__} has no op in torch")

    def bound(self, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
        """Return the error bound (M, O) against the reference.

        Activations, scales and results are rounded to bfloat16; sums are kept in float32.
        """
        return 4 * HALF_PLACE * (x_MI.abs() @ weight_OI.abs().T)
