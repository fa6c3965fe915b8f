"""`Linear`: the only product with a weight matrix in the package, so that counting, quantization
and low-rank adapters find all of them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T + b, weight (out, in). Values come from `init.initialise`."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool) -> None:
        super().__init__()
        self.d_in = d_in
        self.d_out = d_out
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.d_in} -> {self.d_out}, bias={self.bias is not None}"


class PackedWeight(nn.Module):
    """A module whose weights are packed buffers, not parameters.

    Buffers have no version that outlives a change of form, so `loads` counts how often other
    weights were loaded: whoever keeps results of a model can tell that it has changed.
    """

    loads: int = 0
