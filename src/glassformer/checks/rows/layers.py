"""Our layers and stacks against PyTorch's nn.Transformer family, tensor by tensor."""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from glasscheck.measure import Measure, Pair, draw, parity, seeded
from glassformer.checks.preset_subjects import perturb
from glassformer.models.inputs import Inputs
from glassformer.models.model import EncoderDecoder, build
from glassformer.models.stack import Stack
from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.block import TransformerBlock
from glassformer.nn.embedding import TokenEmbedding
from glassformer.nn.ffn import MLP
from glassformer.nn.linear import Linear
from glassformer.nn.mask import Mask, build_mask
from glassformer.nn.norm import LayerNorm, RMSNorm
from glassformer.nn.position import SinusoidalPosition
from glassformer.spec import model as spec
from glassformer.spec.presets import seq2seq


def linear_pairs(name: str, ours: Linear, reference: nn.Linear) -> Iterator[Pair]:
    """Pair weight and bias."""
    yield Pair(f"{name}.weight", ours.weight, reference.weight)
    if ours.bias is not None:
        yield Pair(f"{name}.bias", ours.bias, reference.bias)


def norm_pairs(
    name: str, ours: LayerNorm | RMSNorm | None, reference: nn.LayerNorm
) -> Iterator[Pair]:
    """Pair gain and shift."""
    assert isinstance(ours, LayerNorm) and ours.bias is not None
    yield Pair(f"{name}.weight", ours.weight, reference.weight)
    yield Pair(f"{name}.bias", ours.bias, reference.bias)


def attention_pairs(
    name: str, ours: MultiHeadAttention, reference: nn.MultiheadAttention
) -> Iterator[Pair]:
    """Three projections of ours are row blocks of one of theirs; the key bias has no gradient."""
    width = reference.embed_dim
    for i, part in enumerate((ours.q_proj, ours.k_proj, ours.v_proj)):
        rows = slice(i * width, (i + 1) * width)
        leaf = f"{name}.{'qkv'[i]}_proj"
        yield Pair(f"{leaf}.weight", part.weight, reference.in_proj_weight, rows)
        if part.bias is not None:
            yield Pair(f"{leaf}.bias", part.bias, reference.in_proj_bias, rows, i == 1)
    yield from linear_pairs(f"{name}.o_proj", ours.o_proj, reference.out_proj)


def block_pairs(
    name: str,
    ours: TransformerBlock,
    reference: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer,
) -> Iterator[Pair]:
    """Pair a complete layer; in torch's decoder layer the second norm is cross-attention's."""
    assert isinstance(ours.ffn, MLP) and ours.attn_norm is not None
    yield from attention_pairs(f"{name}.attn", ours.attn, reference.self_attn)
    yield from norm_pairs(f"{name}.attn_norm", ours.attn_norm, reference.norm1)
    ffn_norm = reference.norm2
    if isinstance(reference, nn.TransformerDecoderLayer):
        assert ours.cross is not None and ours.cross_norm is not None
        yield from attention_pairs(f"{name}.cross", ours.cross, reference.multihead_attn)
        yield from norm_pairs(f"{name}.cross_norm", ours.cross_norm, reference.norm2)
        ffn_norm = reference.norm3
    yield from norm_pairs(f"{name}.ffn_norm", ours.ffn_norm, ffn_norm)
    yield from linear_pairs(f"{name}.up_proj", ours.ffn.up_proj, reference.linear1)
    yield from linear_pairs(f"{name}.down_proj", ours.ffn.down_proj, reference.linear2)


# B batch, T target length, S source length, D d_model, N heads, F d_ff

Placement = Literal["pre", "post"]
PLACEMENTS: tuple[Placement, ...] = ("pre", "post")
ACTIVATIONS: tuple[Literal["relu", "gelu"], ...] = ("relu", "gelu")
VARIANTS = tuple(product(PLACEMENTS, ACTIVATIONS))


def _worst(measures: Iterable[Measure]) -> Measure:
    return max(measures, key=lambda measure: measure.worst)


def _settings(placement: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the settings that all of PyTorch's layers share."""
    return {
        "dropout": 0.0,
        "batch_first": True,
        "norm_first": placement == "pre",
        "dtype": dtype,
    }


def encoder_layers(dtype: torch.dtype) -> Measure:
    """Pre and post norm, ReLU and GELU, the source padded."""
    return _worst(_encoder_layer(dtype, *variant) for variant in VARIANTS)


def _encoder_layer(
    dtype: torch.dtype, placement: Placement, activation: Literal["relu", "gelu"]
) -> Measure:
    B, T, D, N, d_ff = 3, 7, 15, 3, 22
    valid = torch.ones(B, T, dtype=torch.bool)
    valid[0, 4:] = False
    mask = build_mask(T, T, causal=False, valid_q_BT=valid, valid_k_BS=valid)
    block = spec.Block(
        mixer=spec.Attention(n_heads=N, bias="all", causal=False),
        ffn=spec.MLP(d_ff=d_ff, activation=activation),
        norm=spec.LayerNorm(),
        placement=placement,
    )
    ours = TransformerBlock(block, D, dropout=spec.Dropout())
    perturb(ours, dtype=dtype, seed=41)
    settings = _settings(placement, dtype)
    reference = nn.TransformerEncoderLayer(D, N, d_ff, activation=activation, **settings)
    return parity(
        lambda x: ours(x, mask=mask),
        lambda x: reference(x, src_key_padding_mask=~valid),
        inputs=[draw(B, T, D, dtype=dtype, seed=42)],
        pairs=list(block_pairs("block", ours, reference)),
        where=valid,
        size=f"B{B} T{T} D{D} N{N} F{d_ff}",
    )


def decoder_layers(dtype: torch.dtype) -> Measure:
    """Pre and post norm, ReLU and GELU; causal, with cross-attention to a padded source."""
    return _worst(_decoder_layer(dtype, *variant) for variant in VARIANTS)


def _decoder_layer(
    dtype: torch.dtype, placement: Placement, activation: Literal["relu", "gelu"]
) -> Measure:
    B, T, S, D, N, d_ff = 3, 5, 7, 15, 3, 22
    valid = torch.ones(B, S, dtype=torch.bool)
    valid[1, 3:] = False
    memory_mask = build_mask(T, S, causal=False, valid_k_BS=valid)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    block = spec.Block(
        mixer=spec.Attention(n_heads=N, bias="all"),
        cross=spec.Attention(n_heads=N, bias="all", causal=False),
        ffn=spec.MLP(d_ff=d_ff, activation=activation),
        norm=spec.LayerNorm(),
        placement=placement,
    )
    ours = TransformerBlock(block, D, dropout=spec.Dropout())
    perturb(ours, dtype=dtype, seed=43)
    settings = _settings(placement, dtype)
    reference = nn.TransformerDecoderLayer(D, N, d_ff, activation=activation, **settings)

    def run(x: Tensor, memory: Tensor) -> Tensor:
        return cast(
            Tensor, ours(x, mask=Mask(causal=True), memory_BSD=memory, memory_mask=memory_mask)
        )

    def theirs(x: Tensor, memory: Tensor) -> Tensor:
        return cast(Tensor, reference(x, memory, tgt_mask=future, memory_key_padding_mask=~valid))

    return parity(
        run,
        theirs,
        inputs=[draw(B, T, D, dtype=dtype, seed=44), draw(B, S, D, dtype=dtype, seed=45)],
        pairs=list(block_pairs("block", ours, reference)),
        size=f"B{B} T{T} S{S} D{D} N{N} F{d_ff}",
    )


def whole_transformer(dtype: torch.dtype) -> Measure:
    """Two encoder and two decoder layers, from embedded tokens to the last norm, pre and post."""
    return _worst(_whole(dtype, placement) for placement in PLACEMENTS)


def _whole(dtype: torch.dtype, placement: str) -> Measure:
    B, T, S, D, N, d_ff, vocab = 3, 5, 7, 15, 3, 22, 19
    model_spec = seq2seq(
        vocab_size=vocab,
        d_model=D,
        n_heads=N,
        d_ff=d_ff,
        n_layers=2,
        max_seq_len=11,
        pre_norm=placement == "pre",
        dropout=0.0,
    )
    ours = build(model_spec)
    assert isinstance(ours, EncoderDecoder)
    perturb(ours, dtype=dtype, seed=46)
    reference = _reference(D, N, d_ff, placement=placement, dtype=dtype)
    source = torch.randint(0, vocab, (B, S), generator=seeded(47))
    target = torch.randint(0, vocab, (B, T), generator=seeded(48))
    valid = torch.ones(B, S, dtype=torch.bool)
    valid[2, 5:] = False
    future = torch.ones(T, T, dtype=torch.bool).triu(1)

    def embedded(tokens: Tensor, side: Stack) -> Tensor:
        assert isinstance(side.embed, TokenEmbedding)
        assert isinstance(side.position, SinusoidalPosition)
        x: Tensor = side.embed.weight[tokens] * D**0.5
        return (x + side.position.table[: tokens.shape[1]]).detach()

    def theirs() -> Tensor:
        out = reference(
            embedded(source, ours.encoder),
            embedded(target, ours.decoder),
            tgt_mask=future,
            src_key_padding_mask=~valid,
            memory_key_padding_mask=~valid,
        )
        return cast(Tensor, out)

    return parity(
        lambda: ours.hidden(Inputs(target, None, None, source, valid)),
        theirs,
        inputs=[],
        pairs=_whole_pairs(ours, reference),
        size=f"B{B} T{T} S{S} D{D} N{N} F{d_ff} 2+2",
    )


def _reference(D: int, N: int, d_ff: int, *, placement: str, dtype: torch.dtype) -> nn.Transformer:
    """nn.Transformer of two layers a side; a last norm only where norms come first, as in ours."""
    settings = _settings(placement, dtype)
    norms = [nn.LayerNorm(D, dtype=dtype) if placement == "pre" else None for _ in range(2)]
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, N, d_ff, **settings), 2, norms[0], enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, N, d_ff, **settings), 2, norms[1])
    return nn.Transformer(
        D, N, custom_encoder=encoder, custom_decoder=decoder, batch_first=True, dtype=dtype
    )


def _whole_pairs(ours: EncoderDecoder, reference: nn.Transformer) -> list[Pair]:
    pairs: list[Pair] = []
    for side, theirs in ((ours.encoder, reference.encoder), (ours.decoder, reference.decoder)):
        for i, (block, layer) in enumerate(zip(side.blocks, theirs.layers, strict=True)):
            assert isinstance(block, TransformerBlock)
            pairs += block_pairs(f"blocks.{i}", block, layer)
        if theirs.norm is not None:
            assert isinstance(side.final_norm, LayerNorm)
            pairs += norm_pairs("final_norm", side.final_norm, theirs.norm)
    return pairs
