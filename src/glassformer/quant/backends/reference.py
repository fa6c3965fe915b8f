"""The reference product, which runs on every machine: weights are dequantized piece by piece.

It needs little memory and is slow. Every backend is compared with it, and training with rounded
weights computes the same, bit for bit.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.quant.schemes import QuantizedTensor, dequantize

# M rows, O outputs, I inputs

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


def reference_product(x: Tensor, tensor: QuantizedTensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + b for x (..., I), in x's precision."""
    bias_O = None if bias_O is None else bias_O.to(x.dtype)
    return in_pieces(
        x, tensor.shape, lambda piece: dequantize(tensor.rows(piece)).to(x.dtype), bias_O
    )


def reference_rows(tensor: QuantizedTensor, index: Tensor) -> Tensor:
    """Return rows of the matrix by index: (..., I) for an index of any shape."""
    flat = index.reshape(-1)
    rows: Tensor = dequantize(tensor.rows(flat)).unflatten(0, index.shape)
    return rows
