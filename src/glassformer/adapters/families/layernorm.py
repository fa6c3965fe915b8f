"""Decoders with LayerNorm: StarCoder, StarCoder 2.

They share no common config: each says its sizes in words of its own.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from glassformer.adapters.config import MOST_LAYERS, Config
from glassformer.adapters.families.gpt2 import ACTIVATIONS, read_gpt2, write_gpt2
from glassformer.adapters.families.llama import (
    BLOCK,
    LAYER,
    NORMS,
    ROTARY_BUFFERS,
    each_block,
    joined,
    leaves,
    optional_whole,
    read_stack,
    window_of,
    write_stack,
)
from glassformer.adapters.table import Family, HeadGroups, Layout, Row, Rows, Table
from glassformer.spec.model import MLP, Activation, LayerNorm, ModelSpec

QKV = tuple(f"{BLOCK}attn.{letter}_proj" for letter in "qkv")


def rows_of(prefix: str, parts: Mapping[str, str]) -> tuple[Row, ...]:
    """Return the rows of parts of a layer: their name behind the prefix, and ours in a block."""
    return tuple(row for name, one in parts.items() for row in leaves(prefix + name, BLOCK + one))


def read_activation(config: Config, key: str, *, default: str) -> Activation:
    """Read the activation of a feed-forward without a gate."""
    word = config.one_of(key, {name: name for name in ACTIVATIONS}, default=default)
    return ACTIVATIONS[word]


def activation_word(spec: ModelSpec, *, gated: str = "silu") -> str:
    """Return transformers' word for the first block's activation."""
    ffn = next(spec.decoder.blocks()).ffn
    words = {meaning: word for word, meaning in reversed(ACTIVATIONS.items())}
    return words[ffn.activation] if isinstance(ffn, MLP) else gated


# --- StarCoder 2 ----------------------------------------------------------------------------------

STARCODER2_TABLE = Table(
    rows=(
        *leaves("model.embed_tokens", "embed"),
        *rows_of(LAYER, NORMS),
        *rows_of(f"{LAYER}self_attn.", {f"{one}_proj": f"attn.{one}_proj" for one in "qkvo"}),
        *rows_of(f"{LAYER}mlp.", {"c_fc": "ffn.up_proj", "c_proj": "ffn.down_proj"}),
        *leaves("model.norm", "final_norm"),
        *leaves("lm_head", "heads.next"),
    ),
    ignored=ROTARY_BUFFERS,
)


def read_starcoder2(config: Config) -> ModelSpec:
    """Read a StarCoder 2 config: one window or none, one switch for every bias."""
    window, biased = optional_whole(config, "sliding_window"), config.flag("use_bias")
    spec = read_stack(
        config,
        bias="all" if biased else "none",
        d_head=None,
        windows=(window,) * config.whole("num_hidden_layers", most=MOST_LAYERS),
        norm=LayerNorm(eps=config.number("norm_epsilon")),
        ffn=MLP(
            d_ff=config.whole("intermediate_size"),
            activation=read_activation(config, "hidden_act", default="gelu_pytorch_tanh"),
            bias=biased,
        ),
    )
    dropout = replace(
        spec.decoder.dropout,
        embedding=config.number("embedding_dropout"),
        residual=config.number("residual_dropout"),
    )
    return replace(spec, decoder=replace(spec.decoder, dropout=dropout))


def write_starcoder2(spec: ModelSpec) -> dict[str, Any]:
    """Return StarCoder 2's config keys."""
    block, dropout = next(spec.decoder.blocks()), spec.decoder.dropout
    return write_stack(spec) | {
        "hidden_act": activation_word(spec),
        "norm_epsilon": block.norm.eps,
        "use_bias": block.attention.bias == "all",
        "sliding_window": window_of(spec),
        "embedding_dropout": dropout.embedding,
        "residual_dropout": dropout.residual,
    }


# --- StarCoder (GPT-2 with one key-value head) ----------------------------------------------------

GPT = "transformer.h.{}."


def bigcode_table(spec: ModelSpec) -> Table:
    """Return StarCoder's table; with a key for every head, q, k and v are stored head by head."""
    attention = next(spec.decoder.blocks()).attention
    alone = attention.kv_heads == 1
    layout: Layout = Rows() if alone else HeadGroups(attention.head_width(spec.d_model))
    parts = {
        "attn.c_proj": "attn.o_proj",
        "mlp.c_fc": "ffn.up_proj",
        "mlp.c_proj": "ffn.down_proj",
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
    }
    return Table(
        rows=(
            Row("transformer.wte.weight", "embed.weight"),
            Row("transformer.wpe.weight", "position.weight"),
            *joined(f"{GPT}attn.c_attn", *QKV, layout=layout),
            *rows_of(GPT, parts),
            *leaves("transformer.ln_f", "final_norm"),
            *leaves("lm_head", "heads.next"),
        ),
        ignored=(f"{GPT}attn.bias", f"{GPT}attn.masked_bias"),
        prefix="transformer.",
    )


def read_bigcode(config: Config) -> ModelSpec:
    """Read a StarCoder config: GPT-2's, and whether all heads share one key."""
    kv_heads = 1 if config.flag("multi_query") else None
    if kv_heads == 1:
        config.whole("num_key_value_heads", default=1)
    else:
        optional_whole(config, "num_key_value_heads")
    return each_block(
        read_gpt2(config),
        lambda block, _: replace(block, attention=replace(block.attention, n_kv_heads=kv_heads)),
    )


def write_bigcode(spec: ModelSpec) -> dict[str, Any]:
    """Return StarCoder's config keys."""
    attention = next(spec.decoder.blocks()).attention
    return write_gpt2(spec) | {"multi_query": attention.kv_heads == 1 < attention.n_heads}


STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    STARCODER2_TABLE,
    read_starcoder2,
    write_starcoder2,
    defaults={
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "num_key_value_heads": 2,
        "embedding_dropout": 0.0,
        "residual_dropout": 0.0,
        "tie_word_embeddings": True,
    },
)
BIGCODE = Family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    bigcode_table,
    read_bigcode,
    write_bigcode,
    harmless=(
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
        "inference_runner",
        "max_batch_size",
        "max_sequence_length",
        "pad_key_length",
        "pre_allocate_kv_cache",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "validate_runner_input",
    ),
    idle={"scale_attn_weights": True},
    defaults={"multi_query": True, "activation_function": "gelu_pytorch_tanh"},
)
