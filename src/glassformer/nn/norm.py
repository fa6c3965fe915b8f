"""LayerNorm and RMSNorm with an explicit eps (no library default), and the precision of sums."""

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.spec import model as spec


def as_float(x: Tensor) -> Tensor:
    """Return a float64 tensor as it is, and any other in float32."""
    return x if x.dtype == torch.float64 else x.float()


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension."""

    def __init__(self, width: int, *, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    The statistics are taken in float32 at least: half precision would lose eps.
    """

    def __init__(self, width: int, *, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = as_float(x)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.offset:  # the sum is not rounded to half precision, and neither is its product
            return (wide * (1.0 + as_float(self.weight))).to(x.dtype)
        return self.weight * wide.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def build_norm(norm: spec.Norm, width: int) -> LayerNorm | RMSNorm:
    """Build the module that a norm's spec describes."""
    match norm:
        case spec.LayerNorm():
            return LayerNorm(width, eps=norm.eps, bias=norm.bias)
        case spec.RMSNorm():
            return RMSNorm(width, eps=norm.eps, offset=norm.offset)
        case _ as unreachable:
            assert_never(unreachable)
