"""The feed-forward half of a block: two layers with ReLU or GELU, or SwiGLU."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.nn.linear import Linear
from glassformer.nn.taps import TapsAt, tap
from glassformer.spec import model as spec

# B batch, T length, D d_model, F d_ff

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    """down(dropout(act(up(x))))."""

    def __init__(self, ffn: spec.MLP, d_model: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[ffn.activation]
        self.up_proj = Linear(d_model, ffn.d_ff, bias=ffn.bias)
        self.down_proj = Linear(ffn.d_ff, d_model, bias=ffn.bias)
        self.dropout = dropout

    def forward(self, x_BTD: Tensor, *, taps: TapsAt | None = None) -> Tensor:
        hidden_BTF = tap(taps, "hidden", self.activation(self.up_proj(x_BTD)))
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
        hidden_BTF = F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)
        hidden_BTF = F.dropout(tap(taps, "hidden", hidden_BTF), self.dropout, self.training)
        return tap(taps, "out", self.down_proj(hidden_BTF))


def build_ffn(ffn: spec.FeedForward, d_model: int, *, dropout: float = 0.0) -> MLP | SwiGLU:
    """The module that a feed-forward's spec describes."""
    match ffn:
        case spec.MLP():
            return MLP(ffn, d_model, dropout=dropout)
        case spec.SwiGLU():
            return SwiGLU(ffn, d_model, dropout=dropout)
