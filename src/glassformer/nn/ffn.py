"""The feed-forward half of a block: two layers with ReLU or GELU, or SwiGLU."""

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.kernels import train_kernels
from glassformer.nn.linear import (
    HAS_TRITON,
    TRITON_DTYPES,
    Linear,
    joined_product,
    linear,
    side_by_side,
)
from glassformer.nn.taps import TapsAt, tap
from glassformer.spec import model as spec
from glassformer.spec.errors import InputError

# B batch, T length, D d_model, F d_ff, W = 2 F


def activate(x_BTF: Tensor, activation: str) -> Tensor:
    """ReLU, its square, exact GELU, GELU by tanh, or SiLU of a fresh tensor.

    In place where no backward needs the input: it is the widest array of a layer.
    """
    spare = not torch.is_grad_enabled()
    match activation:
        case "relu":
            return F.relu(x_BTF, inplace=spare)
        case "relu2":
            return F.relu(x_BTF, inplace=spare).square()
        case "silu":
            return F.silu(x_BTF, inplace=spare)
        case "gelu":
            return torch.ops.aten.gelu_(x_BTF) if spare else F.gelu(x_BTF)
        case "gelu_tanh":
            kind = {"approximate": "tanh"}
            return torch.ops.aten.gelu_(x_BTF, **kind) if spare else F.gelu(x_BTF, **kind)
    raise InputError(f"unknown activation '{activation}'")


class MLP(nn.Module):
    """down(dropout(act(up(x))))."""

    def __init__(self, ffn: spec.MLP, d_model: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.activation = ffn.activation
        self.up_proj = Linear(d_model, ffn.d_ff, bias=ffn.bias)
        self.down_proj = Linear(ffn.d_ff, d_model, bias=ffn.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, *, taps: TapsAt | None = None) -> Tensor:
        hidden_BTF = self._activated(x_BTD)
        if hidden_BTF is None:
            hidden_BTF = activate(self.up_proj(x_BTD), self.activation)
        hidden_BTF = tap(taps, "hidden", hidden_BTF)
        return tap(taps, "out", self.down_proj(self.dropout(hidden_BTF)))

    def _activated(self, x_BTD: Tensor) -> Tensor | None:
        """Return gelu(up(x)) with bias and GELU as one kernel; None outside code that is compiled
        for a GPU, and for another activation.
        """
        if not HAS_TRITON or self.activation != "gelu":
            return None
        if not (torch.compiler.is_compiling() and x_BTD.is_cuda and type(self.up_proj) is Linear):
            return None
        wide_BTF = linear(x_BTD, self.up_proj.weight)
        if wide_BTF.dtype not in TRITON_DTYPES:
            return None
        from glassformer.kernels.triton_norm import biased_gelu

        hidden_BTF: Tensor = biased_gelu(wide_BTF, self.up_proj.bias)
        return hidden_BTF


def clamped_product(gate_BTF: Tensor, up_BTF: Tensor, clamp: spec.Clamp) -> Tensor:
    """g sigmoid(slope g) (u + 1), with g at most `limit` and u between both limits."""
    gate_BTF = gate_BTF.clamp(max=clamp.limit)
    up_BTF = up_BTF.clamp(min=-clamp.limit, max=clamp.limit)
    return gate_BTF * torch.sigmoid(clamp.slope * gate_BTF) * (up_BTF + 1)


class SwiGLU(nn.Module):
    """down(dropout(silu(gate(x)) * up(x))), or with GELU in place of SiLU, or clamped."""

    def __init__(self, ffn: spec.SwiGLU, d_model: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.activation, self.clamp = ffn.activation, ffn.clamp
        self.gate_proj = Linear(d_model, ffn.d_ff, bias=ffn.bias)
        self.up_proj = Linear(d_model, ffn.d_ff, bias=ffn.bias)
        self.down_proj = Linear(ffn.d_ff, d_model, bias=ffn.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, *, taps: TapsAt | None = None) -> Tensor:
        hidden_BTF = self._gated(x_BTD)
        if hidden_BTF is None:
            gate_BTF, up_BTF = side_by_side(x_BTD, (self.gate_proj, self.up_proj))
            if self.clamp is not None:
                hidden_BTF = clamped_product(gate_BTF, up_BTF, self.clamp)
            elif self.activation == "silu" and train_kernels.in_use(gate_BTF, up_BTF):
                hidden_BTF = train_kernels.gated(gate_BTF, up_BTF)
            else:
                hidden_BTF = activate(gate_BTF, self.activation) * up_BTF
        hidden_BTF = tap(taps, "hidden", hidden_BTF)
        return tap(taps, "out", self.down_proj(self.dropout(hidden_BTF)))

    def _gated(self, x_BTD: Tensor) -> Tensor | None:
        """Return silu(gate(x)) * up(x) by one product and one kernel; None outside code that is
        compiled for a GPU, and for another gate.
        """
        if not HAS_TRITON or self.clamp is not None or self.activation != "silu":
            return None
        wide_BTW = joined_product(x_BTD, (self.gate_proj, self.up_proj))
        if wide_BTW is None or wide_BTW.dtype not in TRITON_DTYPES:
            return None
        from glassformer.kernels.triton_step import gated

        hidden_BTF: Tensor = gated(wide_BTW)
        return hidden_BTF


def build_ffn(ffn: spec.MLP | spec.SwiGLU, d_model: int, *, dropout: float = 0.0) -> MLP | SwiGLU:
    """Build a feed-forward that every token passes through; `moe` has the others."""
    match ffn:
        case spec.MLP():
            return MLP(ffn, d_model, dropout=dropout)
        case spec.SwiGLU():
            return SwiGLU(ffn, d_model, dropout=dropout)
        case _ as unreachable:
            assert_never(unreachable)
