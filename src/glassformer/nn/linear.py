"""`Linear`: the only product with a weight matrix in the package, so that counting, quantization
and low-rank adapters find all of them.
"""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.kernels import train_kernels
from glassformer.spec.execution import GPU_JOINED, GPU_WIDTHS
from glassformer.spec.model import ModelSpec

#: Kernels of our own for a GPU are written in Triton, and compute in these formats.
HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Linear(nn.Module):
    """y = x W^T + b, weight (out, in). Values come from `initialise`."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool) -> None:
        super().__init__()
        self.d_in = d_in
        self.d_out = d_out
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.d_in} -> {self.d_out}, bias={self.bias is not None}"


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + b; compiled for a GPU, with widths filled up by zeros, which change nothing.

    The compiler makes the filling part of the kernels before and after.
    """
    more_in, more_out = missing_widths(x, weight_OI)
    if not (more_in or more_out):
        return F.linear(x, weight_OI, bias_O)
    weight = F.pad(weight_OI, (0, more_in, 0, more_out))
    bias = None if bias_O is None else F.pad(bias_O, (0, more_out))
    return F.linear(F.pad(x, (0, more_in)), weight, bias)[..., : len(weight_OI)]


def missing_widths(x: Tensor, weight_OI: Tensor) -> tuple[int, int]:
    """Return by how much inputs and outputs are filled up; nothing outside compiled GPU code."""
    if not (torch.compiler.is_compiling() and x.is_cuda):
        return 0, 0
    d_out, d_in = weight_OI.shape[-2:]
    return -d_in % GPU_WIDTHS, -d_out % GPU_WIDTHS


def side_by_side(x: Tensor, parts: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Return the product of one input with each of some parts; compiled for a GPU, as one product.

    That saves launches and is worth it for small weights; with large ones, what reads a slice of
    the result loses more.
    """
    found = in_kernels(x, parts)
    if found is not None:
        return train_kernels.products(x, *found)
    plain = [part for part in parts if type(part) is Linear]
    small = sum(part.weight.numel() for part in plain) <= GPU_JOINED
    joined = joined_product(x, parts) if small else None
    if joined is None:
        return tuple(part(x) for part in parts)
    outputs: tuple[Tensor, ...] = joined.split([part.d_out for part in plain], dim=-1)
    return outputs


def in_kernels(x: Tensor, parts: Sequence[nn.Module]) -> tuple[list[Tensor], list[Any]] | None:
    """Return the weights and biases of some parts in a training step on a CPU, where one node of
    the graph is to compute all of them; None elsewhere, and for parts that are more than `Linear`.
    """
    plain = [part for part in parts if type(part) is Linear]
    if len(plain) < len(parts) or not train_kernels.in_use(x, *(part.weight for part in plain)):
        return None
    return [part.weight for part in plain], [part.bias for part in plain]


def joined_product(x: Tensor, parts: Sequence[nn.Module]) -> Tensor | None:
    """Return the products of one input with some parts, side by side, as one; None outside code
    that is compiled for a GPU, and for parts that are more than a `Linear`, such as one with a
    low-rank adapter.

    The compiler joins the weights where it casts them.
    """
    plain = [part for part in parts if type(part) is Linear]
    if not (torch.compiler.is_compiling() and x.is_cuda and len(plain) == len(parts)):
        return None
    weight = torch.cat([part.weight for part in plain])
    bias = None
    if any(part.bias is not None for part in plain):
        zeros = weight.new_zeros
        bias = torch.cat([zeros(p.d_out) if p.bias is None else p.bias for p in plain])
    return linear(x, weight, bias)


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


class Specified(nn.Module):
    """A module that a spec describes."""

    spec: ModelSpec
