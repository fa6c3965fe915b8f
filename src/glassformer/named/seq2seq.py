"""The encoder-decoder of the 2017 paper, its mask builders and its layers.

Defaults are the paper's: d_model 512, N 6, heads 8, post-norm, dropout 0.1, embeddings times
sqrt(d_model). `pre_norm=True` gives the variant that is steadier when deep.
"""

from typing import cast

import torch
from torch import Tensor, nn

from glassformer.models.inputs import Inputs
from glassformer.models.model import build
from glassformer.nn import attention, block
from glassformer.nn.init import initialised
from glassformer.nn.mask import Mask, build_mask, causal_allow, mask_from_allow
from glassformer.nn.position import SinusoidalPosition
from glassformer.nn.taps import Taps, TapsAt
from glassformer.spec import manifest, presets
from glassformer.spec import model as spec
from glassformer.spec.init import XavierInit


def padding_mask(lengths: Tensor, *, max_length: int | None = None) -> Tensor:
    """Return (B, S) bool from sequence lengths, True = real token."""
    width = int(lengths.max()) if max_length is None else max_length
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def causal_mask(length: int) -> Tensor:
    """Return (T, T) bool, True = may attend: the lower triangle with its diagonal."""
    return causal_allow(length, length)


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, allow: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(d_k)) v and the weights; q (B, N, T, d_k), allow True = may attend."""
    taps = Taps(read="weights")
    mask = Mask() if allow is None else mask_from_allow(allow)
    out = attention.attend(q, k, v, mask=mask, taps=TapsAt(taps, ""))
    return out, taps.seen["weights"]


class PositionalEncoding(SinusoidalPosition):
    """x + PE for positions from 0: a buffer, not a parameter."""

    def __init__(self, d_model: int, *, max_seq_len: int = 512) -> None:
        super().__init__(max_seq_len, d_model, base=10_000.0)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, slice(0, x.shape[1]))


class _Layer(nn.Module):
    """One block of the preset's encoder or decoder, drawn from torch's generator."""

    side: str

    def __init__(
        self,
        d_model: int = 512,
        heads: int = 8,
        d_ff: int | None = None,
        *,
        dropout: float = 0.1,
        pre_norm: bool = False,
    ) -> None:
        super().__init__()
        whole = presets.seq2seq(
            d_model=d_model, n_heads=heads, d_ff=d_ff, n_layers=1, pre_norm=pre_norm
        )
        described = getattr(whole, self.side).layers[0].block
        rates = spec.Dropout(attention=dropout, residual=dropout, ffn=dropout)
        rules = manifest.block_parameters(described, "", d_model, init=XavierInit())
        part = block.TransformerBlock(described, d_model, dropout=rates)
        self.part = initialised(part, rules)


class EncoderLayer(_Layer):
    """Self-attention and feed-forward, each with residual and norm; valid True = real token."""

    side = "encoder"

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        T = x.shape[1]
        return cast(
            Tensor,
            self.part(x, mask=build_mask(T, T, causal=False, valid_q_BT=valid, valid_k_BS=valid)),
        )


class DecoderLayer(_Layer):
    """Masked self-attention, cross-attention to `memory`, feed-forward."""

    side = "decoder"

    def forward(self, x: Tensor, memory: Tensor, memory_valid: Tensor | None = None) -> Tensor:
        reads = build_mask(x.shape[1], memory.shape[1], causal=False, valid_k_BS=memory_valid)
        return cast(
            Tensor, self.part(x, mask=Mask(causal=True), memory_BSD=memory, memory_mask=reads)
        )


class Transformer(nn.Module):
    """forward(source, target, source_valid, target_valid) -> logits (B, T, vocab)."""

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        *,
        d_model: int = 512,
        N: int = 6,
        heads: int = 8,
        d_ff: int | None = None,
        dropout: float = 0.1,
        max_seq_len: int = 512,
        pre_norm: bool = False,
        scale_embedding: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        described = presets.seq2seq(
            vocab_size=target_vocab,
            source_vocab_size=source_vocab,
            d_model=d_model,
            n_heads=heads,
            d_ff=d_ff,
            n_layers=N,
            max_seq_len=max_seq_len,
            dropout=dropout,
            pre_norm=pre_norm,
            scaled=scale_embedding,
        )
        self.model = build(described, generator=generator)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_valid: Tensor | None = None,
        target_valid: Tensor | None = None,
    ) -> Tensor:
        return cast(
            Tensor, self.model(Inputs(target, target_valid, None, source, source_valid))["next"]
        )
