"""`Linear`: the only product with a weight matrix in the package, so that counting, quantization
and low-rank adapters find all of them.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from glassformer.nn.operations import Part
from glassformer.spec.model import ModelSpec


class Linear(Part):
    """y = x W^T + b, weight (out, in). Values come from `initialise`."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool) -> None:
        super().__init__()
        self.d_in = d_in
        self.d_out = d_out
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.operations.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.d_in} -> {self.d_out}, bias={self.bias is not None}"


class PackedWeight(nn.Module, ABC):
    """A module whose weights are packed buffers, not parameters.

    Buffers have no version that outlives a change of form, so `loads` counts how often other
    weights were loaded: whoever keeps results of a model can tell that it has changed.
    """

    loads: int = 0
    shape: tuple[int, int]
    dtype: torch.dtype
    bias: Tensor | None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the weights."""

    @abstractmethod
    def weights(self) -> Tensor:
        """Return the float32 weights (outputs, inputs) that it stands for."""

    @abstractmethod
    def freeze(self) -> None:
        """Take part in training from now on: as it is, and passing gradients to its input."""


class Specified(Part):
    """A module that a spec describes."""

    spec: ModelSpec
