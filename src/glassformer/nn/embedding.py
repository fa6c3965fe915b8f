"""Token embeddings: plain, scaled by sqrt(d_model), or factorized as U[token] @ V.

`as_linear` uses the same weights as an output projection; a tied head calls it.

Heads: hidden states to logits, by a projection of their own or by the transposed embedding.
"""

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.kernels import train_kernels
from glassformer.nn.ffn import activate
from glassformer.nn.linear import Linear, linear
from glassformer.nn.norm import build_norm
from glassformer.spec import model as spec
from glassformer.spec.errors import InputError

# B batch, T length, D d_model, V vocab, R rank


class TokenEmbedding(nn.Module):
    """weight[token], times `scale`: sqrt(d_model) in the 2017 paper."""

    def __init__(self, vocab_size: int, d_model: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        if train_kernels.in_use(self.weight) and train_kernels.writes(self.weight):
            x_BTD = train_kernels.embedded(tokens_BT, self.weight)
        else:
            x_BTD = F.embedding(tokens_BT, self.weight)
        return x_BTD if self.scale is None else x_BTD * self.scale

    def as_linear(self, x_BTD: Tensor) -> Tensor:
        """Return logits x @ weight^T; the scale applies to the input side only."""
        return linear(x_BTD, self.weight)


class FactorizedTokenEmbedding(nn.Module):
    """U[token] @ V with u (vocab, rank) and v (rank, d_model).

    `penalty` is l1 * sum |U|, to be added to a loss: it drives rows of U to few active factors.
    """

    def __init__(self, vocab_size: int, d_model: int, *, rank: int, l1: float) -> None:
        super().__init__()
        self.l1 = l1
        self.u = nn.Parameter(torch.empty(vocab_size, rank))
        self.v = nn.Parameter(torch.empty(rank, d_model))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.u) @ self.v

    def as_linear(self, x_BTD: Tensor) -> Tensor:
        """Return logits x @ V^T @ U^T, without a (vocab, d_model) table."""
        return linear(linear(x_BTD, self.v), self.u)

    def penalty(self) -> Tensor:
        """l1 * sum |U|."""
        return self.l1 * self.u.abs().sum()


def build_embedding(
    embedding: spec.Embedding, vocab_size: int, d_model: int
) -> TokenEmbedding | FactorizedTokenEmbedding:
    """Build the module that an embedding's spec describes."""
    match embedding:
        case spec.PlainEmbedding():
            return TokenEmbedding(vocab_size, d_model)
        case spec.ScaledEmbedding():
            return TokenEmbedding(vocab_size, d_model, scale=embedding.scale(d_model))
        case spec.FactorizedEmbedding():
            return FactorizedTokenEmbedding(
                vocab_size, d_model, rank=embedding.rank, l1=embedding.l1
            )
        case _ as unreachable:
            assert_never(unreachable)


# B batch, T length, D d_model, V logits


class TiedHead(nn.Module):
    """embed.as_linear(x) + bias. The embedding is an argument, so the weights are stored once."""

    def __init__(self, size: int, *, bias: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x_BTD: Tensor, embed: TokenEmbedding | FactorizedTokenEmbedding) -> Tensor:
        logits_BTV = embed.as_linear(x_BTD)
        return logits_BTV if self.bias is None else logits_BTV + self.bias


class HeadTransform(nn.Module):
    """norm(act(dense(x)))."""

    def __init__(self, transform: spec.HeadTransform, d_model: int) -> None:
        super().__init__()
        self.activation = transform.activation
        self.dense = Linear(d_model, d_model, bias=transform.bias)
        self.norm = build_norm(transform.norm, d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        normed_BTD: Tensor = self.norm(activate(self.dense(x_BTD), self.activation))
        return normed_BTD


class Pooler(Linear):
    """tanh(W x + b)."""

    def forward(self, x_BD: Tensor) -> Tensor:
        return torch.tanh(super().forward(x_BD))


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
