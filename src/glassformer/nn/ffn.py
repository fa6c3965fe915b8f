"""The feed-forward half of a block: two layers with ReLU or GELU, or SwiGLU."""

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.nn.linear import Linear
from glassformer.nn.taps import TapsAt, tap
from glassformer.spec import model as spec
from glassformer.spec.errors import InputError

# B batch, T length, D d_model, F d_ff


def activate(x_BTF: Tensor, activation: str) -> Tensor:
    """ReLU, exact GELU, GELU by tanh, or SiLU of a fresh tensor.

    In place where no backward needs the input: it is the widest array of a layer.
    """
    spare = not torch.is_grad_enabled()
    match activation:
        case "relu":
            return F.relu(x_BTF, inplace=spare)
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
        self.dropout = dropout

    def forward(self, x_BTD: Tensor, *, taps: TapsAt | None = None) -> Tensor:
        hidden_BTF = tap(taps, "hidden", activate(self.up_proj(x_BTD), self.activation))
        hidden_BTF = F.dropout(hidden_BTF, self.dropout, self.training)
        return tap(taps, "out", self.down_proj(hidden_BTF))


class SwiGLU(nn.Module):
    """down(dropout(silu(gate(x)) * up(x)))."""

    def __init__(self, ffn: spec.SwiGLU, d_model: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate_proj = Linear(d_model, ffn.d_ff, bias=ffn.bias)
        self.up_proj = Linear(d_model, ffn.d_ff, bias=ffn.bias)
        self.down_proj = Linear(ffn.d_ff, d_model, bias=ffn.bias)
        self.dropout = dropout

    def forward(self, x_BTD: Tensor, *, taps: TapsAt | None = None) -> Tensor:
        hidden_BTF = activate(self.gate_proj(x_BTD), "silu") * self.up_proj(x_BTD)
        hidden_BTF = F.dropout(tap(taps, "hidden", hidden_BTF), self.dropout, self.training)
        return tap(taps, "out", self.down_proj(hidden_BTF))


def build_ffn(ffn: spec.MLP | spec.SwiGLU, d_model: int, *, dropout: float = 0.0) -> MLP | SwiGLU:
    """Build a feed-forward that every token passes through; `moe` has the others."""
    match ffn:
        case spec.MLP():
            return MLP(ffn, d_model, dropout=dropout)
        case spec.SwiGLU():
            return SwiGLU(ffn, d_model, dropout=dropout)
        case _ as unreachable:
            assert_never(unreachable)
