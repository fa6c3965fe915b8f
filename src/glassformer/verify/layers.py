"""Whole layers and stacks against PyTorch's nn.Transformer family."""

import torch
from torch import Tensor, nn

from glassformer.models.build import build
from glassformer.models.inputs import Inputs
from glassformer.nn.block import TransformerBlock
from glassformer.nn.mask import Mask, build_mask
from glassformer.spec import model as spec
from glassformer.spec.presets import seq2seq
from glassformer.verify.measure import Measure, Pair, draw, parity, seeded
from glassformer.verify.references import block_pairs, norm_pairs
from glassformer.verify.samples import perturb

# B batch, T target length, S source length, D d_model, N heads, F d_ff


def _worst(measures: list[Measure]) -> Measure:
    return max(measures, key=lambda measure: measure.worst)


def encoder_layers(dtype: torch.dtype) -> Measure:
    """Pre and post norm, ReLU and GELU, the source padded."""
    B, T, D, N, d_ff = 3, 7, 15, 3, 22
    valid = torch.ones(B, T, dtype=torch.bool)
    valid[0, 4:] = False
    mask = build_mask(T, T, causal=False, valid_q_BT=valid, valid_k_BS=valid)
    measures = []
    for placement in ("pre", "post"):
        for activation in ("relu", "gelu"):
            block = spec.Block(
                attention=spec.Attention(n_heads=N, bias="all", causal=False),
                ffn=spec.MLP(d_ff=d_ff, activation=activation),
                norm=spec.LayerNorm(),
                placement=placement,
            )
            ours = TransformerBlock(block, D, dropout=spec.Dropout())
            perturb(ours, dtype=dtype, seed=41)
            reference = nn.TransformerEncoderLayer(
                D,
                N,
                d_ff,
                dropout=0.0,
                activation=activation,
                batch_first=True,
                norm_first=placement == "pre",
                dtype=dtype,
            )
            measures.append(
                parity(
                    lambda x, ours=ours: ours(x, mask=mask),
                    lambda x, reference=reference: reference(x, src_key_padding_mask=~valid),
                    inputs=[draw(B, T, D, dtype=dtype, seed=42)],
                    pairs=list(block_pairs("block", ours, reference)),
                    where=valid,
                    size=f"B{B} T{T} D{D} N{N} F{d_ff}",
                )
            )
    return _worst(measures)


def decoder_layers(dtype: torch.dtype) -> Measure:
    """Pre and post norm, ReLU and GELU; causal, with cross-attention to a padded source."""
    B, T, S, D, N, d_ff = 3, 5, 7, 15, 3, 22
    valid = torch.ones(B, S, dtype=torch.bool)
    valid[1, 3:] = False
    memory_mask = build_mask(T, S, causal=False, valid_k_BS=valid)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    measures = []
    for placement in ("pre", "post"):
        for activation in ("relu", "gelu"):
            both = spec.Attention(n_heads=N, bias="all", causal=False)
            block = spec.Block(
                attention=spec.Attention(n_heads=N, bias="all"),
                cross=both,
                ffn=spec.MLP(d_ff=d_ff, activation=activation),
                norm=spec.LayerNorm(),
                placement=placement,
            )
            ours = TransformerBlock(block, D, dropout=spec.Dropout())
            perturb(ours, dtype=dtype, seed=43)
            reference = nn.TransformerDecoderLayer(
                D,
                N,
                d_ff,
                dropout=0.0,
                activation=activation,
                batch_first=True,
                norm_first=placement == "pre",
                dtype=dtype,
            )

            def run(x: Tensor, memory: Tensor, ours: nn.Module = ours) -> Tensor:
                causal = Mask(causal=True)
                return ours(x, mask=causal, memory_BSD=memory, memory_mask=memory_mask)

            def theirs(x: Tensor, memory: Tensor, reference: nn.Module = reference) -> Tensor:
                return reference(x, memory, tgt_mask=future, memory_key_padding_mask=~valid)

            measures.append(
                parity(
                    run,
                    theirs,
                    inputs=[
                        draw(B, T, D, dtype=dtype, seed=44),
                        draw(B, S, D, dtype=dtype, seed=45),
                    ],
                    pairs=list(block_pairs("block", ours, reference)),
                    size=f"B{B} T{T} S{S} D{D} N{N} F{d_ff}",
                )
            )
    return _worst(measures)


def whole_transformer(dtype: torch.dtype) -> Measure:
    """Two encoder and two decoder layers, from embedded tokens to the last norm, pre and post."""
    return _worst([_whole(dtype, placement) for placement in ("pre", "post")])


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
    perturb(ours, dtype=dtype, seed=46)
    first = placement == "pre"
    settings = {"dropout": 0.0, "batch_first": True, "norm_first": first, "dtype": dtype}
    encoder_layer = nn.TransformerEncoderLayer(D, N, d_ff, **settings)
    decoder_layer = nn.TransformerDecoderLayer(D, N, d_ff, **settings)
    encoder = nn.TransformerEncoder(
        encoder_layer,
        2,
        nn.LayerNorm(D, dtype=dtype) if first else None,
        enable_nested_tensor=False,
    )
    decoder = nn.TransformerDecoder(
        decoder_layer, 2, nn.LayerNorm(D, dtype=dtype) if first else None
    )
    reference = nn.Transformer(
        D, N, custom_encoder=encoder, custom_decoder=decoder, batch_first=True, dtype=dtype
    )
    pairs: list[Pair] = []
    for side, theirs in ((ours.encoder, encoder), (ours.decoder, decoder)):
        for i, (block, layer) in enumerate(zip(side.blocks, theirs.layers, strict=True)):
            pairs += block_pairs(f"blocks.{i}", block, layer)
        if first:
            pairs += norm_pairs("final_norm", side.final_norm, theirs.norm)
    source = torch.randint(0, vocab, (B, S), generator=seeded(47))
    target = torch.randint(0, vocab, (B, T), generator=seeded(48))
    valid = torch.ones(B, S, dtype=torch.bool)
    valid[2, 5:] = False
    future = torch.ones(T, T, dtype=torch.bool).triu(1)

    def embedded(tokens: Tensor, side: nn.Module) -> Tensor:
        x = side.embed.weight[tokens] * D**0.5
        return (x + side.position.table[: tokens.shape[1]]).detach()

    def run() -> Tensor:
        return ours.hidden(Inputs(target, None, None, source, valid))

    def theirs_run() -> Tensor:
        return reference(
            embedded(source, ours.encoder),
            embedded(target, ours.decoder),
            tgt_mask=future,
            src_key_padding_mask=~valid,
            memory_key_padding_mask=~valid,
        )

    return parity(
        run, theirs_run, inputs=[], pairs=pairs, size=f"B{B} T{T} S{S} D{D} N{N} F{d_ff} 2+2"
    )
