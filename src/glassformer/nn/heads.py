"""Heads: hidden states to logits, by a projection of their own or by the transposed embedding."""

import torch
from torch import Tensor, nn

from glassformer.nn.embedding import FactorizedTokenEmbedding, TokenEmbedding
from glassformer.spec.errors import InputError

# B batch, T length, D d_model, V logits


class TiedHead(nn.Module):
    """embed.as_linear(x) + bias. The embedding is an argument, so the weights are stored once."""

    def __init__(self, size: int, *, bias: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x_BTD: Tensor, embed: TokenEmbedding | FactorizedTokenEmbedding) -> Tensor:
        logits_BTV = embed.as_linear(x_BTD)
        return logits_BTV if self.bias is None else logits_BTV + self.bias


def read_out(x_BTD: Tensor, valid_BT: Tensor | None, *, readout: str) -> Tensor:
    """Return one vector per sequence: at the last or first valid position, or their mean."""
    if valid_BT is None:
        valid_BT = torch.ones(x_BTD.shape[:2], dtype=torch.bool, device=x_BTD.device)
    match readout:
        case "mean":
            share_BT = valid_BT.to(x_BTD.dtype) / valid_BT.sum(1, keepdim=True).clamp(min=1)
            return (x_BTD * share_BT.unsqueeze(-1)).sum(1)
        case "last":
            T = valid_BT.shape[1]
            index_B = T - 1 - valid_BT.flip(1).int().argmax(1)
        case "first":
            index_B = valid_BT.int().argmax(1)
        case _:
            raise InputError(f"unknown readout '{readout}'", hint="last, first or mean")
    return x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), index_B]
