"""Layers prepared for quantization: watched ones for calibration, rounded ones for training.

Both keep the parameters of the float layer, under the same names, so the same training loop trains
them and the same checkpoint holds them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.nn.embedding import TokenEmbedding
from glassformer.nn.linear import Linear
from glassformer.quant.backends.reference import in_pieces
from glassformer.quant.schemes import dequantize, quantize_tensor
from glassformer.spec.schemes import Method, Scheme

# B batch, T length, M rows, D d_model, O outputs, I inputs


class StraightThrough(torch.autograd.Function):
    """Forward: the rounded weights, bit for bit. Backward: as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def fake_quantize(weight_OI: Tensor, scheme: Scheme) -> Tensor:
    """Return the weights as they will be once quantized; gradients pass straight through."""
    rounded_OI = dequantize(quantize_tensor(weight_OI.detach(), scheme)).to(weight_OI.dtype)
    passed_OI: Tensor = StraightThrough.apply(  # type: ignore[no-untyped-call]  # not annotated
        weight_OI, rounded_OI
    )
    return passed_OI


class Watch:
    """Statistics of a layer's inputs for calibration: sum of x x^T, largest entry, rows."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.moment_II = torch.zeros(inputs, inputs, device=device)
        self.largest = 0.0
        self.rows = 0

    @torch.no_grad()
    def see(self, x: Tensor) -> None:
        """Add some rows to the statistics."""
        x_MI = x.detach().reshape(-1, x.shape[-1]).float()
        self.moment_II.addmm_(x_MI.T, x_MI)
        self.largest = max(self.largest, float(x_MI.abs().max()))
        self.rows += len(x_MI)


def become(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give a layer the class of its prepared form, or its plain class again.

    The object stays the same, and with it its parameters, their names, and all that refers to them:
    optimizers, tied heads, hooks. Only classes with the same attributes may be exchanged this way,
    so the two must share a plain layer as their base.
    """
    shared = (Linear, TokenEmbedding)
    assert any(isinstance(module, base) and issubclass(cls, base) for base in shared), cls
    module.__class__ = cls


class WatchedLinear(Linear):
    """A linear layer that records statistics of its inputs."""

    watch: Watch
    scheme: Scheme
    method: Method

    def forward(self, x: Tensor) -> Tensor:
        self.watch.see(x)
        return super().forward(x)


class WatchedEmbedding(TokenEmbedding):
    """A tied table that records statistics of the vectors multiplied with it."""

    watch: Watch
    scheme: Scheme
    method: Method

    def as_linear(self, x_BTD: Tensor) -> Tensor:
        """Return logits, and record their inputs."""
        self.watch.see(x_BTD)
        return super().as_linear(x_BTD)


class RoundedLinear(Linear):
    """A linear layer that computes with rounded weights and trains the unrounded ones."""

    scheme: Scheme

    def forward(self, x: Tensor) -> Tensor:
        weight_OI = fake_quantize(self.weight, self.scheme)
        return in_pieces(x, (self.d_out, self.d_in), lambda piece: weight_OI[piece], self.bias)


class RoundedEmbedding(TokenEmbedding):
    """A tied table that is rounded in both its uses."""

    scheme: Scheme

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = F.embedding(tokens_BT, fake_quantize(self.weight, self.scheme))
        return x_BTD if self.scale is None else x_BTD * self.scale

    def as_linear(self, x_BTD: Tensor) -> Tensor:
        """Return the logits of the rounded table."""
        weight_VD = fake_quantize(self.weight, self.scheme)
        vocab, width = weight_VD.shape
        return in_pieces(x_BTD, (vocab, width), lambda piece: weight_VD[piece], None)
