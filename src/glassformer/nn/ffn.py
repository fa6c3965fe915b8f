"""The feed-forward half of a block: two layers with ReLU or GELU, or SwiGLU."""

from typing import assert_never

import torch
from torch import Tensor, nn

from glassformer.nn.linear import Linear
from glassformer.nn.operations import Part
from glassformer.nn.taps import TapsAt, tap
from glassformer.spec import model as spec

# B batch, T length, D d_model, F d_ff, W = 2 F


class MLP(Part):
    """down(dropout(act(up(x))))."""

    def __init__(self, ffn: spec.MLP, d_model: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.activation = ffn.activation
        self.up_proj = Linear(d_model, ffn.d_ff, bias=ffn.bias)
        self.down_proj = Linear(ffn.d_ff, d_model, bias=ffn.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, *, taps: TapsAt | None = None) -> Tensor:
        hidden_BTF = self.operations.activate(self.up_proj(x_BTD), self.activation)
        hidden_BTF = tap(taps, "hidden", hidden_BTF)
        return tap(taps, "out", self.down_proj(self.dropout(hidden_BTF)))


def clamped_product(gate_BTF: Tensor, up_BTF: Tensor, clamp: spec.Clamp) -> Tensor:
    """g sigmoid(slope g) (u + 1), with g at most `limit` and u between both limits."""
    gate_BTF = gate_BTF.clamp(max=clamp.limit)
    up_BTF = up_BTF.clamp(min=-clamp.limit, max=clamp.limit)
    return gate_BTF * torch.sigmoid(clamp.slope * gate_BTF) * (up_BTF + 1)


class SwiGLU(Part):
    """down(dropout(silu(gate(x)) * up(x))), or with GELU in place of SiLU, or clamped."""

    def __init__(self, ffn: spec.SwiGLU, d_model: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.activation, self.clamp = ffn.activation, ffn.clamp
        self.gate_proj = Linear(d_model, ffn.d_ff, bias=ffn.bias)
        self.up_proj = Linear(d_model, ffn.d_ff, bias=ffn.bias)
        self.down_proj = Linear(ffn.d_ff, d_model, bias=ffn.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, *, taps: TapsAt | None = None) -> Tensor:
        gate_BTF, up_BTF = self.operations.project(x_BTD, (self.gate_proj, self.up_proj))
        if self.clamp is not None:
            hidden_BTF = clamped_product(gate_BTF, up_BTF, self.clamp)
        else:
            hidden_BTF = self.operations.gate(gate_BTF, up_BTF, self.activation)
        hidden_BTF = tap(taps, "hidden", hidden_BTF)
        return tap(taps, "out", self.down_proj(self.dropout(hidden_BTF)))


def build_ffn(ffn: spec.MLP | spec.SwiGLU, d_model: int, *, dropout: float = 0.0) -> MLP | SwiGLU:
    """Build a feed-forward that every token passes through; `moe` has the others."""
    match ffn:
        case spec.MLP():
            return MLP(ffn, d_model, dropout=dropout)
        case spec.SwiGLU():
            return SwiGLU(ffn, d_model, dropout=dropout)
        case _ as unreachable:
            assert_never(unreachable)
