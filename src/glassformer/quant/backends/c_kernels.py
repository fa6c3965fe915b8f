"""INT8 and INT4 products by our C routines (`kernels.int_matmul`).

Activations are quantized to 8 bits with one scale per row, and integer sums are exact, so no result
depends on the rest of the batch.
"""

import torch
from torch import Tensor

from glassformer.kernels import int_matmul
from glassformer.quant.schemes import QuantizedTensor, codec
from glassformer.spec.schemes import Int4, Int8, Scheme

# M rows, N looked-up rows, O outputs, I inputs

STEPS = 127


class NativeForm:
    """A matrix in the C routines' layout."""

    def __init__(self, tensor: QuantizedTensor) -> None:
        self.scheme = tensor.scheme
        self.weight: int_matmul.Int8Weight | int_matmul.Int4Weight
        match tensor.scheme:
            case Int8():
                self.weight = int_matmul.Int8Weight(tensor.qweight, tensor.scale)
            case Int4(group=int(group)):
                self.weight = int_matmul.Int4Weight(
                    tensor.qweight, tensor.scale, tensor.zero, group=group
                )
            case other:
                raise TypeError(f"{type(other).__name__} has no C routine")

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
        if isinstance(self.weight, int_matmul.Int8Weight):
            qweight, scale = self.weight.unpack()
            return QuantizedTensor(qweight, scale, None, self.scheme)
        levels, scale, zero = self.weight.unpack()
        return QuantizedTensor(codec(self.scheme).pack(levels), scale, zero, self.scheme)


class Native:
    """Our C routines on the CPU."""

    name = "c"
    schemes = (Int8, Int4)

    def why_not(
        self, scheme: Scheme, shape: tuple[int, int], device: torch.device, *, lookup: bool
    ) -> str:
        """Return the reason why it cannot serve such a matrix; empty if it can."""
        if device.type != "cpu":
            return "runs on the CPU only"
        if isinstance(scheme, Int8) and not scheme.symmetric:
            return "has symmetric levels only, for 8 bits"
        return "" if int_matmul.available() else int_matmul.why_not()

    def pack(self, tensor: QuantizedTensor, *, lookup: bool) -> NativeForm:
        """Return the run-time form."""
        return NativeForm(tensor)

    def bound(self, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
        """Return the error bound (M, O) against the reference: half a step of each activation."""
        step_M1 = x_MI.abs().amax(-1, keepdim=True) / STEPS
        return 0.5 * step_M1 * weight_OI.abs().sum(-1)
