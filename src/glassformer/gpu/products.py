"""Products of rows by torch's library, and rows that are prepared for the norm after them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# B rows, I inputs, O outputs, P tiles of columns


class Product:
    """x W^T + b, and residual + x W^T + b, without gradients."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI, self.bias_O = weight_OI, bias_O

    def __call__(self, x_BI: Tensor) -> Tensor:
        if self.bias_O is None:
            return torch.mm(x_BI, self.weight_OI.t())
        return torch.addmm(self.bias_O, x_BI, self.weight_OI.t())

    def onto(self, residual_BO: Tensor, x_BI: Tensor) -> Tensor:
        """Return residual + x W^T + b."""
        out_BO = torch.addmm(residual_BO, x_BI, self.weight_OI.t())
        return out_BO if self.bias_O is None else out_BO.add_(self.bias_O)


class Gained(NamedTuple):
    """Rows before an RMS norm, prepared for it by whoever made them (`cuda_rows`).

    The rows as they are, times the norm's gain, and their sums of squares by tiles of columns.
    """

    rows_BI: Tensor
    gained_BI: Tensor
    squares_PB: Tensor


def plain_rows(x_BI: "Tensor | Gained") -> Tensor:
    """Return the rows themselves."""
    return x_BI.rows_BI if isinstance(x_BI, Gained) else x_BI


def joined(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Stack linear layers that share an input into one; a missing bias is 0."""
    weight = torch.cat([weight for weight, _ in parts])
    if all(bias is None for _, bias in parts):
        return weight, None
    biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in parts]
    return weight, torch.cat(biases)
