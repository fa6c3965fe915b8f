"""PyTorch's own layers beside ours: which of their tensors plays the role of which of ours."""

from collections.abc import Iterator

from torch import nn

from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.block import TransformerBlock
from glassformer.nn.linear import Linear
from glassformer.nn.norm import LayerNorm
from glassformer.verify.measure import Pair


def linear_pairs(name: str, ours: Linear, reference: nn.Linear) -> Iterator[Pair]:
    """Weight and bias."""
    yield Pair(f"{name}.weight", ours.weight, reference.weight)
    if ours.bias is not None:
        yield Pair(f"{name}.bias", ours.bias, reference.bias)


def norm_pairs(name: str, ours: LayerNorm, reference: nn.LayerNorm) -> Iterator[Pair]:
    """Gain and shift."""
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
    """A whole layer; in torch's decoder layer the second norm belongs to cross-attention."""
    yield from attention_pairs(f"{name}.attn", ours.attn, reference.self_attn)
    yield from norm_pairs(f"{name}.attn_norm", ours.attn_norm, reference.norm1)
    ffn_norm = reference.norm2
    if isinstance(reference, nn.TransformerDecoderLayer):
        yield from attention_pairs(f"{name}.cross", ours.cross, reference.multihead_attn)
        yield from norm_pairs(f"{name}.cross_norm", ours.cross_norm, reference.norm2)
        ffn_norm = reference.norm3
    yield from norm_pairs(f"{name}.ffn_norm", ours.ffn_norm, ffn_norm)
    yield from linear_pairs(f"{name}.up_proj", ours.ffn.up_proj, reference.linear1)
    yield from linear_pairs(f"{name}.down_proj", ours.ffn.down_proj, reference.linear2)
