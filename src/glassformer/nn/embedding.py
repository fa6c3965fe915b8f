"""Token embeddings: plain, scaled by sqrt(d_model), or factorized as U[token] @ V.

`as_linear` uses the same weights as an output projection; a tied head calls it.
"""

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.nn.operations import Part
from glassformer.spec import model as spec

# B batch, T length, D d_model, V vocab, R rank


class TokenEmbedding(Part):
    """weight[token], times `scale`: sqrt(d_model) in the 2017 paper."""

    def __init__(self, vocab_size: int, d_model: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = F.embedding(tokens_BT, self.weight)
        return x_BTD if self.scale is None else x_BTD * self.scale

    def as_linear(self, x_BTD: Tensor) -> Tensor:
        """Return logits x @ weight^T; the scale applies to the input side only."""
        return self.operations.linear(x_BTD, self.weight, None)


class FactorizedTokenEmbedding(Part):
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
        linear = self.operations.linear
        return linear(linear(x_BTD, self.v, None), self.u, None)

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
