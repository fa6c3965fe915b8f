"""The model core: every name of its specification, parts and model, quantization, adapters.

Decoder-only, causal. The same seed gives the same weights: parts are initialised from torch's
generator, or from one that is passed. A `Transformer` is a model as `gf.build` returns it, so
quantization, adapters and every other function take it as it is.

    model = Transformer(vocab_size=1000, d_model=64, n_heads=4, d_ff=256, n_layers=2)
    logits = model(token_ids)                        # [B, seq_len, vocab_size]
    prepare_model_for_quantization(model)            # then batches or training, then
    quantize_model(model)
    CustomTransformerAdapter(model).get_architecture_type()
"""

import torch
from torch import Tensor

from glassformer.adapters.base import BaseAdapter
from glassformer.adapters.load import load
from glassformer.adapters.native import CustomTransformerAdapter, TrainingConfig
from glassformer.adapters.registry import QwenAdapter, adapter_named, register
from glassformer.checks.adapter import validate_adapter
from glassformer.models.model import build
from glassformer.named.masks import vectors, wide
from glassformer.nn import attention, block, ffn, norm
from glassformer.nn.initialise import initialise
from glassformer.nn.mask import Mask
from glassformer.quant.contents import is_model_quantized, quantization_report
from glassformer.quant.convert import (
    dequantize_model,
    prepare_model_for_quantization,
    quantize_model,
)
from glassformer.spec import manifest, presets
from glassformer.spec import model as spec
from glassformer.spec.checks import divides
from glassformer.spec.init import NormalInit

__all__ = [
    "MLP",
    "BaseAdapter",
    "CustomTransformerAdapter",
    "LayerNorm",
    "MultiHeadAttention",
    "QwenAdapter",
    "TrainingConfig",
    "Transformer",
    "TransformerBlock",
    "adapter_named",
    "dequantize_model",
    "is_model_quantized",
    "load",
    "prepare_model_for_quantization",
    "quantization_report",
    "quantize_model",
    "register",
    "validate_adapter",
]


def _attention(d_model: int, n_heads: int, *, causal: bool = True) -> spec.Attention:
    divides("d_model", d_model, "n_heads", n_heads)
    return spec.Attention(n_heads=n_heads, bias="all", causal=causal)


class MultiHeadAttention(attention.MultiHeadAttention):
    """(B, S, d_model) -> (B, S, d_model); if causal, position i attends to positions up to i."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        causal: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        described = _attention(d_model, n_heads, causal=causal)
        super().__init__(described, d_model)
        self.d_model, self.n_heads, self.causal = d_model, n_heads, causal
        rules = manifest.attention_parameters(described, "", d_model, init=NormalInit())
        initialise(self, tuple(rules), generator=generator)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        vectors("x", x, self.d_model)
        return super().forward(x, mask=Mask(causal=self.causal))


class MLP(ffn.MLP):
    """Linear -> GELU -> Linear with inner width d_ff; the shape stays."""

    def __init__(
        self, d_model: int, d_ff: int, *, generator: torch.Generator | None = None
    ) -> None:
        described = spec.MLP(d_ff=d_ff)
        super().__init__(described, d_model)
        self.d_model = d_model
        rules = manifest.ffn_parameters(described, "", d_model, init=NormalInit())
        initialise(self, tuple(rules), generator=generator)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(wide("x", x, self.d_model))


class LayerNorm(norm.LayerNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension."""

    def __init__(self, d_model: int, *, eps: float = 1e-5) -> None:
        super().__init__(d_model, eps=eps)
        initialise(self, tuple(manifest.norm_parameters(spec.LayerNorm(eps=eps), "", d_model)))


class TransformerBlock(block.TransformerBlock):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, d_model: int, n_heads: int, d_ff: int, *, generator: torch.Generator | None = None
    ) -> None:
        described = spec.Block(
            mixer=_attention(d_model, n_heads), ffn=spec.MLP(d_ff=d_ff), norm=spec.LayerNorm()
        )
        super().__init__(described, d_model, dropout=spec.Dropout())
        self.d_model = d_model
        rules = manifest.block_parameters(described, "", d_model, init=NormalInit())
        initialise(self, tuple(rules), generator=generator)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        vectors("x", x, self.d_model)
        return super().forward(x, mask=Mask(causal=True))


class Transformer(CustomTransformerAdapter):
    """forward(token_ids [B, S]) -> logits [B, S, vocab_size]; an `attention_mask` marks padding."""

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
        described = presets.core(
            vocab_size=vocab_size,
            d_model=d_model,
            n_heads=n_heads,
            d_ff=d_ff,
            n_layers=n_layers,
            max_seq_len=max_seq_len,
            dropout=dropout,
        )
        super().__init__(build(described, generator=generator).train())
