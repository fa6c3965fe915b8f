"""Source 001's language model as a spec, and the same size of model in today's parts."""

from glassformer.spec.inits import NormalInit
from glassformer.spec.model import (
    Attention,
    Block,
    Dropout,
    LayerNorm,
    Layers,
    Learned,
    ModelSpec,
    NextHead,
    RMSNorm,
    Rotary,
    Stack,
    SwiGLU,
)


def budget_lm(
    *,
    vocab_size: int = 16_000,
    d_model: int = 216,
    d_ff: int = 607,
    n_layers: int = 11,
    n_heads: int = 8,
    max_seq_len: int = 512,
    tied: bool = True,
    dropout: float = 0.0,
    scale_residual: bool = False,
) -> ModelSpec:
    """Source 001: pre-norm, SwiGLU, no biases, learned positions, tied head, normal 0.02.

    `scale_residual` starts the projections that write into the residual stream smaller, by the
    square root of their number, as GPT-2 does; the source does not.
    """
    block = Block(attention=Attention(n_heads=n_heads), ffn=SwiGLU(d_ff=d_ff), norm=LayerNorm())
    return ModelSpec(
        vocab_size=vocab_size,
        d_model=d_model,
        max_seq_len=max_seq_len,
        position=Learned(),
        decoder=Stack(
            layers=(Layers(count=n_layers, block=block),),
            final_norm=LayerNorm(),
            dropout=Dropout.from_number(dropout),
        ),
        heads=(NextHead(tied=tied),),
        init=NormalInit(std=0.02, scale_residual=scale_residual),
    )


def modern_lm(
    *,
    vocab_size: int = 16_000,
    d_model: int = 216,
    d_ff: int = 648,
    n_layers: int = 12,
    n_heads: int = 12,
    n_kv_heads: int = 4,
    max_seq_len: int = 512,
    tied: bool = True,
    dropout: float = 0.0,
) -> ModelSpec:
    """Source 001's model in today's parts: rotary positions, RMSNorm, grouped keys and values."""
    block = Block(
        attention=Attention(n_heads=n_heads, n_kv_heads=n_kv_heads),
        ffn=SwiGLU(d_ff=d_ff),
        norm=RMSNorm(),
    )
    return ModelSpec(
        vocab_size=vocab_size,
        d_model=d_model,
        max_seq_len=max_seq_len,
        position=Rotary(),
        decoder=Stack(
            layers=(Layers(count=n_layers, block=block),),
            final_norm=RMSNorm(),
            dropout=Dropout.from_number(dropout),
        ),
        heads=(NextHead(tied=tied),),
        init=NormalInit(std=0.02, scale_residual=True),
    )
