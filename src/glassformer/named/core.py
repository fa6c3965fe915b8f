"""The model core: `MultiHeadAttention`, `MLP`, `LayerNorm`, `TransformerBlock`, `Transformer`.

Decoder-only, causal. The same seed gives the same weights: parts draw from torch's generator, or
from one that is passed.
"""

from typing import cast

import torch
from torch import Tensor, nn

from glassformer.models.model import build
from glassformer.nn import attention, block, ffn, norm
from glassformer.nn.init import initialised
from glassformer.nn.mask import Mask
from glassformer.spec import manifest, presets
from glassformer.spec import model as spec
from glassformer.spec.checks import divides
from glassformer.spec.init import NormalInit


def _attention(d_model: int, n_heads: int) -> spec.Attention:
    divides("d_model", d_model, "n_heads", n_heads)
    return spec.Attention(n_heads=n_heads, bias="all")


class MultiHeadAttention(nn.Module):
    """(B, S, d_model) -> (B, S, d_model); position i attends to positions up to i."""

    def __init__(
        self, d_model: int, n_heads: int, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        described = _attention(d_model, n_heads)
        self.n_heads = n_heads
        rules = manifest.attention_parameters(described, "", d_model, init=NormalInit())
        self.part = initialised(
            attention.MultiHeadAttention(described, d_model), rules, generator=generator
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.part(x, mask=Mask(causal=True)))


class MLP(nn.Module):
    """Linear -> GELU -> Linear with inner width d_ff; the shape stays."""

    def __init__(
        self, d_model: int, d_ff: int, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        described = spec.MLP(d_ff=d_ff)
        rules = manifest.ffn_parameters(described, "", d_model, init=NormalInit())
        self.part = initialised(ffn.MLP(described, d_model), rules, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.part(x))


class LayerNorm(nn.Module):
    """Normalises over the last dimension."""

    def __init__(self, d_model: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        described = spec.LayerNorm(eps=eps)
        rules = manifest.norm_parameters(described, "", d_model)
        self.part = initialised(norm.build_norm(described, d_model), rules)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.part(x))


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, d_model: int, n_heads: int, d_ff: int, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        described = spec.Block(
            attention=_attention(d_model, n_heads), ffn=spec.MLP(d_ff=d_ff), norm=spec.LayerNorm()
        )
        rules = manifest.block_parameters(described, "", d_model, init=NormalInit())
        self.part = initialised(
            block.TransformerBlock(described, d_model, dropout=spec.Dropout()),
            rules,
            generator=generator,
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.part(x, mask=Mask(causal=True)))


class Transformer(nn.Module):
    """forward(token_ids [B, S]) -> logits [B, S, vocab_size]."""

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        n_heads: int,
        d_ff: int,
        n_layers: int,
        *,
        max_seq_len: int = 512,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        described = presets.core(
            vocab_size=vocab_size,
            d_model=d_model,
            n_heads=n_heads,
            d_ff=d_ff,
            n_layers=n_layers,
            max_seq_len=max_seq_len,
            dropout=dropout,
        )
        self.model = build(described, generator=generator)

    def forward(self, token_ids: Tensor) -> Tensor:
        return cast(Tensor, self.model(token_ids)["next"])
