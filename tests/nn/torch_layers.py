"""torch's own transformer layers, and which of our parameters stand for which of theirs."""

from torch import nn

from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.block import TransformerBlock
from tests.compare import Pairs


def encoder_layer(d_model, n_heads, d_ff, *, activation, pre):
    return nn.TransformerEncoderLayer(
        d_model, n_heads, d_ff, 0.0, activation, batch_first=True, norm_first=pre
    ).double()


def decoder_layer(d_model, n_heads, d_ff, *, activation, pre):
    return nn.TransformerDecoderLayer(
        d_model, n_heads, d_ff, 0.0, activation, batch_first=True, norm_first=pre
    ).double()


def attention_pairs(name: str, ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> Pairs:
    parts = (ours.q_proj, ours.k_proj, ours.v_proj)
    return {
        f"{name}.in": ([part.weight for part in parts], theirs.in_proj_weight),
        f"{name}.in_bias": ([part.bias for part in parts], theirs.in_proj_bias),
        f"{name}.out": (ours.o_proj.weight, theirs.out_proj.weight),
        f"{name}.out_bias": (ours.o_proj.bias, theirs.out_proj.bias),
    }


def simple_pairs(name: str, ours: nn.Module, theirs: nn.Module) -> Pairs:
    return {
        f"{name}.weight": (ours.weight, theirs.weight),
        f"{name}.bias": (ours.bias, theirs.bias),
    }


def encoder_layer_pairs(ours: TransformerBlock, theirs: nn.TransformerEncoderLayer) -> Pairs:
    return {
        **attention_pairs("attn", ours.attn, theirs.self_attn),
        **simple_pairs("attn_norm", ours.attn_norm, theirs.norm1),
        **simple_pairs("ffn_norm", ours.ffn_norm, theirs.norm2),
        **simple_pairs("up", ours.ffn.up_proj, theirs.linear1),
        **simple_pairs("down", ours.ffn.down_proj, theirs.linear2),
    }


def decoder_layer_pairs(ours: TransformerBlock, theirs: nn.TransformerDecoderLayer) -> Pairs:
    return {
        **attention_pairs("attn", ours.attn, theirs.self_attn),
        **attention_pairs("cross", ours.cross, theirs.multihead_attn),
        **simple_pairs("attn_norm", ours.attn_norm, theirs.norm1),
        **simple_pairs("cross_norm", ours.cross_norm, theirs.norm2),
        **simple_pairs("ffn_norm", ours.ffn_norm, theirs.norm3),
        **simple_pairs("up", ours.ffn.up_proj, theirs.linear1),
        **simple_pairs("down", ours.ffn.down_proj, theirs.linear2),
    }
