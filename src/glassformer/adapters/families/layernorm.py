"""Decoders with LayerNorm: StarCoder 1 and 2, GPT-NeoX, Phi-1 and 2, StableLM, Falcon, Bloom, MPT,
Cohere 1 and 2.

They share no common config: each says its sizes in words of its own.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from glassformer.adapters.config import MOST_LAYERS, MOST_POSITIONS, Config, block_of
from glassformer.adapters.families.gpt2 import ACTIVATIONS, read_gpt2, write_gpt2
from glassformer.adapters.families.llama import (
    BLOCK,
    FULL,
    LAYER,
    NORMS,
    ROTARY_BUFFERS,
    SLIDING,
    TABLE,
    each_block,
    joined,
    kinds_of,
    leaves,
    optional_whole,
    own_width,
    read_kinds,
    read_stack,
    stack_rows,
    turned_layout,
    window_of,
    write_stack,
)
from glassformer.adapters.table import (
    Family,
    HeadGroups,
    Layout,
    Names,
    Row,
    Rows,
    Table,
)
from glassformer.spec.model import (
    MLP,
    Activation,
    ALiBi,
    Attention,
    Block,
    Dropout,
    LayerNorm,
    Layers,
    ModelSpec,
    NextHead,
    NoPosition,
    NormalInit,
    Placement,
    Rotary,
    Stack,
)

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
    ffn = block_of(spec.decoder).ffn
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
    block, dropout = block_of(spec.decoder), spec.decoder.dropout
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
    attention = block_of(spec.decoder).attention
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
        lambda block, _: replace(block, mixer=replace(block.attention, n_kv_heads=kv_heads)),
    )


def write_bigcode(spec: ModelSpec) -> dict[str, Any]:
    """Return StarCoder's config keys."""
    attention = block_of(spec.decoder).attention
    return write_gpt2(spec) | {"multi_query": attention.kv_heads == 1 < attention.n_heads}


# --- GPT-NeoX, Phi, StableLM: partial rotary, parts in parallel ----------------------------------

NEOX = "gpt_neox.layers.{}."


def with_placement(spec: ModelSpec, placement: Placement) -> ModelSpec:
    """Return the spec with the norms of every block in that place."""
    return each_block(spec, lambda block, _: replace(block, placement=placement))


def neox_table(head: str) -> Names:
    """Return a function to GPT-NeoX's table; q, k and v are stored head by head."""

    def table(spec: ModelSpec) -> Table:
        width = block_of(spec.decoder).attention.head_width(spec.d_model)
        parts = {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "attention.dense": "attn.o_proj",
            "mlp.dense_h_to_4h": "ffn.up_proj",
            "mlp.dense_4h_to_h": "ffn.down_proj",
        }
        return Table(
            rows=(
                *leaves("gpt_neox.embed_in", "embed"),
                *joined(f"{NEOX}attention.query_key_value", *QKV, layout=HeadGroups(width)),
                *rows_of(NEOX, parts),
                *leaves("gpt_neox.final_layer_norm", "final_norm"),
                *leaves(head, "heads.next"),
            ),
            ignored=(
                f"{NEOX}attention.bias",
                f"{NEOX}attention.masked_bias",
                f"{NEOX}attention.rotary_emb.inv_freq",
            ),
        )

    return table


def read_neox(config: Config) -> ModelSpec:
    """Read a GPT-NeoX or Pythia config."""
    if not config.has("rope_theta") and config.data.get("rotary_emb_base"):
        config.data["rope_theta"] = config.number("rotary_emb_base")
    spec = read_stack(
        config,
        bias="all" if config.flag("attention_bias") else "none",
        d_head=None,
        norm=LayerNorm(eps=config.number("layer_norm_eps")),
        ffn=MLP(
            d_ff=config.whole("intermediate_size"),
            activation=read_activation(config, "hidden_act", default="gelu"),
        ),
        share=0.25,
    )
    rate = config.number("hidden_dropout", default=0.0)
    dropout = replace(spec.decoder.dropout, embedding=rate, residual=rate)
    spec = replace(spec, decoder=replace(spec.decoder, dropout=dropout))
    return with_placement(spec, "parallel" if config.flag("use_parallel_residual") else "pre")


def write_neox(spec: ModelSpec) -> dict[str, Any]:
    """Return GPT-NeoX's config keys."""
    block, position = block_of(spec.decoder), spec.position
    keys = write_stack(spec)
    del keys["num_key_value_heads"]
    return keys | {
        "hidden_act": activation_word(spec),
        "layer_norm_eps": block.norm.eps,
        "attention_bias": block.attention.bias == "all",
        "use_parallel_residual": block.placement == "parallel",
        "hidden_dropout": spec.decoder.dropout.residual,
        "rotary_pct": position.share if isinstance(position, Rotary) else 1.0,
        "partial_rotary_factor": position.share if isinstance(position, Rotary) else 1.0,
    }


PHI_TABLE = Table(
    rows=(
        *leaves("model.embed_tokens", "embed"),
        *rows_of(
            LAYER,
            {
                "input_layernorm": "attn_norm",
                **{f"self_attn.{one}_proj": f"attn.{one}_proj" for one in "qkv"},
                "self_attn.dense": "attn.o_proj",
                "mlp.fc1": "ffn.up_proj",
                "mlp.fc2": "ffn.down_proj",
            },
        ),
        *leaves("model.final_layernorm", "final_norm"),
        *leaves("lm_head", "heads.next"),
    ),
    ignored=ROTARY_BUFFERS,
)


def read_phi(config: Config) -> ModelSpec:
    """Read a Phi-1, 1.5 or 2 config: one norm for both parts, biases everywhere."""
    spec = read_stack(
        config,
        bias="all",
        d_head=None,
        norm=LayerNorm(eps=config.number("layer_norm_eps")),
        ffn=MLP(
            d_ff=config.whole("intermediate_size"),
            activation=read_activation(config, "hidden_act", default="gelu_new"),
        ),
        share=0.5,
    )
    dropout = replace(
        spec.decoder.dropout,
        embedding=config.number("embd_pdrop", default=0.0),
        residual=config.number("resid_pdrop", default=0.0),
    )
    head = NextHead(tied=config.flag("tie_word_embeddings", default=False), bias=True)
    spec = replace(spec, decoder=replace(spec.decoder, dropout=dropout), heads=(head,))
    return with_placement(spec, "parallel_shared")


def write_phi(spec: ModelSpec) -> dict[str, Any]:
    """Return Phi's config keys."""
    dropout = spec.decoder.dropout
    return write_stack(spec) | {
        "hidden_act": activation_word(spec),
        "layer_norm_eps": block_of(spec.decoder).norm.eps,
        "embd_pdrop": dropout.embedding,
        "resid_pdrop": dropout.residual,
        "qk_layernorm": False,
    }


def read_stablelm(config: Config) -> ModelSpec:
    """Read a StableLM config: a quarter of each head is rotated; parts may be in parallel."""
    spec = read_stack(
        config,
        bias="qkv" if config.flag("use_qkv_bias") else "none",
        d_head=None,
        norm=LayerNorm(eps=config.number("layer_norm_eps")),
        share=0.25,
    )
    rate = config.number("hidden_dropout", default=0.0)
    spec = replace(
        spec, decoder=replace(spec.decoder, dropout=replace(spec.decoder.dropout, residual=rate))
    )
    shared = config.flag("use_parallel_residual")
    return with_placement(spec, "parallel_shared" if shared else "pre")


def write_stablelm(spec: ModelSpec) -> dict[str, Any]:
    """Return StableLM's config keys."""
    block = block_of(spec.decoder)
    return write_stack(spec) | {
        "layer_norm_eps": block.norm.eps,
        "use_qkv_bias": block.attention.bias == "qkv",
        "use_parallel_residual": block.placement == "parallel_shared",
        "qk_layernorm": False,
        "hidden_dropout": spec.decoder.dropout.residual,
    }


# --- Cohere ---------------------------------------------------------------------------------------


def cohere_table(spec: ModelSpec) -> Table:
    """Return Cohere's table: Llama's names, neighbouring rotary pairs, one norm in a layer."""
    rows = stack_rows(norms={"input_layernorm": "attn_norm"}, turned=turned_layout(spec))
    return Table(rows=rows, ignored=ROTARY_BUFFERS)


def _cohere(config: Config, **own: Any) -> ModelSpec:
    spec = read_stack(
        config,
        bias="all" if config.flag("attention_bias", default=False) else "none",
        norm=LayerNorm(eps=config.number("layer_norm_eps"), bias=False),
        **own,
    )
    head = NextHead(
        tied=config.flag("tie_word_embeddings"), scale=config.number("logit_scale", default=0.0625)
    )
    return with_placement(replace(spec, heads=(head,)), "parallel_shared")


def read_cohere(config: Config) -> ModelSpec:
    """Read a Cohere (Command R) config; q/k-norm with a gain for each head is not read."""
    return _cohere(config, d_head=None, theta=500_000.0)


def read_cohere2(config: Config) -> ModelSpec:
    """Read a Cohere 2 config: windows in three layers of four, no positions in the others."""
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    every = config.whole("sliding_window_pattern", "_sliding_window_pattern", default=4)
    usual = [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]
    kinds, window = read_kinds(config, absent=usual), config.whole("sliding_window")
    spec = _cohere(
        config,
        d_head=optional_whole(config, "head_dim"),
        windows=[window if kind == SLIDING else None for kind in kinds],
    )

    def change(block: Block, _: int) -> Block:
        own = NoPosition() if block.attention.window is None else None
        return replace(block, mixer=replace(block.attention, position=own))

    return each_block(spec, change)


def write_cohere(spec: ModelSpec) -> dict[str, Any]:
    """Return Cohere's config keys."""
    block, head = block_of(spec.decoder), spec.heads[0]
    return write_stack(spec) | {
        "layer_norm_eps": block.norm.eps,
        "attention_bias": block.attention.bias == "all",
        "logit_scale": head.scale if isinstance(head, NextHead) else 1.0,
        "use_qk_norm": False,
    }


def write_cohere2(spec: ModelSpec) -> dict[str, Any]:
    """Return Cohere 2's config keys."""
    keys = write_cohere(spec) | own_width(spec)
    del keys["use_qk_norm"]
    windows = {"sliding_window": window_of(spec) or 4096, "layer_types": kinds_of(spec)}
    return keys | windows


# --- Falcon, Bloom, MPT ---------------------------------------------------------------------------


def falcon_table(spec: ModelSpec) -> Table:
    """Return Falcon's table: q, k and v by key-value head; the norms' names tell their number."""
    block = block_of(spec.decoder)
    width = block.attention.head_width(spec.d_model)
    two = {"ln_attn": "attn_norm", "ln_mlp": "ffn_norm"}
    norms = two if block.placement == "parallel" else NORMS
    parts = {
        **norms,
        "self_attention.dense": "attn.o_proj",
        "mlp.dense_h_to_4h": "ffn.up_proj",
        "mlp.dense_4h_to_h": "ffn.down_proj",
    }
    return Table(
        rows=(
            *leaves("transformer.word_embeddings", "embed"),
            *leaves("transformer.word_embeddings_layernorm", "embed_norm"),
            *joined(f"{GPT}self_attention.query_key_value", *QKV, layout=HeadGroups(width)),
            *rows_of(GPT, parts),
            *leaves("transformer.ln_f", "final_norm"),
            *leaves("lm_head", "heads.next"),
        ),
        prefix="transformer.",
    )


def read_falcon(config: Config) -> ModelSpec:
    """Read a Falcon config: three generations, told by their switches."""
    new, parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn")
    heads = config.whole("num_attention_heads", "n_head")
    stated = config.any("num_kv_heads", "n_head_kv", default=None)
    kv_heads, alone = heads, config.flag("multi_query")
    if new:
        kv_heads = heads if stated is None else config.whole("num_kv_heads", "n_head_kv")
    elif alone:
        kv_heads = 1
    norms = config.any("num_ln_in_parallel_attn", default=2 if new else 1)
    biased, width = config.flag("bias"), config.whole("hidden_size")
    d_ff = config.any("ffn_hidden_size", default=None)
    same = {
        **config.data,
        "num_hidden_layers": config.whole("num_hidden_layers", "n_layer", most=MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": config.whole(
            "max_position_embeddings", default=2048, most=MOST_POSITIONS
        ),
    }
    for key in ("rope_theta", "rope_scaling", "rope_parameters", "vocab_size"):
        config.any(key, default=None)
    for key in ("attention_dropout", "initializer_range", "tie_word_embeddings"):
        config.any(key, default=None)
    spec = read_stack(
        Config(same, where=config.where),
        bias="all" if biased else "none",
        d_head=None,
        norm=LayerNorm(eps=config.number("layer_norm_epsilon")),
        ffn=MLP(
            d_ff=4 * width if d_ff is None else config.whole("ffn_hidden_size"),
            activation=read_activation(config, "activation", default="gelu"),
            bias=biased,
        ),
    )
    if config.flag("alibi"):
        spec = replace(spec, position=ALiBi(scaled=True))
    if not (new or parallel):
        return spec
    return with_placement(spec, "parallel" if new and norms == 2 else "parallel_shared")


def write_falcon(spec: ModelSpec) -> dict[str, Any]:
    """Return Falcon's config keys."""
    block = block_of(spec.decoder)
    keys, attention = write_stack(spec), block.attention
    new = attention.kv_heads not in (1, attention.n_heads) or block.placement == "parallel"
    intermediate = keys.pop("intermediate_size")
    del keys["num_key_value_heads"], keys["hidden_act"]
    return keys | {
        "ffn_hidden_size": intermediate,
        "activation": activation_word(spec),
        "layer_norm_epsilon": block.norm.eps,
        "bias": attention.bias == "all",
        "alibi": isinstance(spec.position, ALiBi),
        "new_decoder_architecture": new,
        "num_kv_heads": attention.kv_heads,
        "num_ln_in_parallel_attn": 2 if block.placement == "parallel" else None if not new else 1,
        "parallel_attn": block.placement != "pre",
        "multi_query": attention.kv_heads == 1 < attention.n_heads,
        "hidden_dropout": 0.0,
    }


def read_bloom(config: Config) -> ModelSpec:
    """Read a Bloom config: a norm after the embedding, linear biases, q, k and v head by head."""
    width = config.whole("hidden_size", "n_embed")
    norm = LayerNorm(eps=config.number("layer_norm_epsilon", default=1e-5))
    attention = Attention(n_heads=config.whole("n_head", "num_attention_heads"), bias="all")
    ffn = MLP(d_ff=4 * width, activation="gelu_tanh")
    block = Block(mixer=attention, ffn=ffn, norm=norm)
    count = config.whole("n_layer", "num_hidden_layers", most=MOST_LAYERS)
    rate = config.number("hidden_dropout", default=0.0)
    return ModelSpec(
        vocab_size=config.whole("vocab_size"),
        d_model=width,
        max_seq_len=config.whole("seq_length", default=2048, most=MOST_POSITIONS),
        position=ALiBi(),
        decoder=Stack(
            layers=(Layers(count=count, block=block),),
            final_norm=norm,
            embed_norm=norm,
            dropout=Dropout(
                attention=config.number("attention_dropout", default=0.0), residual=rate
            ),
        ),
        heads=(NextHead(tied=config.flag("tie_word_embeddings", default=True)),),
        init=NormalInit(std=config.number("initializer_range", default=0.02)),
    )


def write_bloom(spec: ModelSpec) -> dict[str, Any]:
    """Return Bloom's config keys; the context is our own note, since Bloom has no limit."""
    block = block_of(spec.decoder)
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "n_layer": spec.n_layers,
        "n_head": block.attention.n_heads,
        "seq_length": spec.max_seq_len,
        "layer_norm_epsilon": block.norm.eps,
        "attention_dropout": spec.decoder.dropout.attention,
        "hidden_dropout": spec.decoder.dropout.residual,
        "initializer_range": spec.init.std if isinstance(spec.init, NormalInit) else 0.02,
        "tie_word_embeddings": isinstance(spec.heads[0], NextHead) and spec.heads[0].tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


MPT_LAYER = "transformer.blocks.{}."
MPT_TABLE = Table(
    rows=(
        *leaves("transformer.wte", "embed"),
        *joined(f"{MPT_LAYER}attn.Wqkv", *QKV),
        *rows_of(
            MPT_LAYER,
            {
                "attn.out_proj": "attn.o_proj",
                "ffn.up_proj": "ffn.up_proj",
                "ffn.down_proj": "ffn.down_proj",
                "norm_1": "attn_norm",
                "norm_2": "ffn_norm",
            },
        ),
        *leaves("transformer.norm_f", "final_norm"),
        *leaves("lm_head", "heads.next"),
    )
)
#: What the attention of an MPT may say beside its biases, at the values that do nothing.
MPT_IDLE = {
    "attn_impl": "torch",
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "clip_qkv": None,
    "prefix_lm": False,
    "qk_ln": False,
    "softmax_scale": None,
    "attn_pdrop": 0,
}


def read_mpt(config: Config) -> ModelSpec:
    """Read an MPT config: linear biases, no other bias anywhere."""
    table = config.any("attn_config", default={})
    if not isinstance(table, dict):
        raise config.bad("attn_config", table, "a table")
    inner = Config(table, where=config.where)
    if not inner.flag("alibi", default=True):
        raise inner.bad("attn_config.alibi", False, "true")
    most = inner.number("alibi_bias_max", default=8)
    if most != 8:
        raise inner.bad("attn_config.alibi_bias_max", most, "8, which transformers takes always")
    inner.any("attn_impl", default=None)
    inner.finish(idle=MPT_IDLE)
    if not config.flag("no_bias", default=True):
        raise config.bad("no_bias", False, "true")
    norm = LayerNorm(eps=config.number("layer_norm_epsilon", default=1e-5), bias=False)
    width, ratio = config.whole("d_model"), config.whole("expansion_ratio", default=4)
    if ratio != 4:
        raise config.bad("expansion_ratio", ratio, "4, which transformers builds whatever it is")
    block = Block(
        mixer=Attention(n_heads=config.whole("n_heads")),
        ffn=MLP(d_ff=4 * width, bias=False),
        norm=norm,
    )
    return ModelSpec(
        vocab_size=config.whole("vocab_size"),
        d_model=width,
        max_seq_len=config.whole("max_seq_len", most=MOST_POSITIONS),
        position=ALiBi(max_bias=most),
        decoder=Stack(
            layers=(Layers(count=config.whole("n_layers", most=MOST_LAYERS), block=block),),
            final_norm=norm,
            dropout=Dropout(
                embedding=config.number("emb_pdrop", default=0.0),
                residual=config.number("resid_pdrop", default=0.0),
            ),
        ),
        heads=(NextHead(tied=config.flag("tie_word_embeddings", default=True)),),
        init=NormalInit(std=config.number("initializer_range", default=0.02)),
    )


def write_mpt(spec: ModelSpec) -> dict[str, Any]:
    """Return MPT's config keys."""
    block = block_of(spec.decoder)
    return {
        "vocab_size": spec.vocab_size,
        "d_model": spec.d_model,
        "n_layers": spec.n_layers,
        "n_heads": block.attention.n_heads,
        "expansion_ratio": 4,
        "max_seq_len": spec.max_seq_len,
        "layer_norm_epsilon": block.norm.eps,
        "no_bias": True,
        "emb_pdrop": spec.decoder.dropout.embedding,
        "resid_pdrop": spec.decoder.dropout.residual,
        "attn_config": {"alibi": True, "alibi_bias_max": 8},
        "initializer_range": spec.init.std if isinstance(spec.init, NormalInit) else 0.02,
        "tie_word_embeddings": isinstance(spec.heads[0], NextHead) and spec.heads[0].tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


NEOX_FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    neox_table("embed_out"),
    read_neox,
    write_neox,
    harmless=("classifier_dropout",),
    idle={"rope_scaling": None},
    defaults={"layer_norm_eps": 1e-5, "attention_bias": True, "use_parallel_residual": True},
    live=neox_table("lm_head"),
)
PHI = Family(
    "phi",
    "PhiForCausalLM",
    PHI_TABLE,
    read_phi,
    write_phi,
    idle={"qk_layernorm": False},
    defaults={"layer_norm_eps": 1e-5},
)
STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    TABLE,
    read_stablelm,
    write_stablelm,
    idle={"qk_layernorm": False},
    defaults={"layer_norm_eps": 1e-5, "use_qkv_bias": False, "use_parallel_residual": False},
)
COHERE = Family(
    "cohere",
    "CohereForCausalLM",
    cohere_table,
    read_cohere,
    write_cohere,
    harmless=("model_max_length",),
    idle={"use_qk_norm": False},
    defaults={"layer_norm_eps": 1e-5, "tie_word_embeddings": True},
)
COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    cohere_table,
    read_cohere2,
    write_cohere2,
    harmless=("use_gated_activation", "order_of_interleaved_layers"),
    idle={
        "use_embedding_sharing": True,
        "use_parallel_block": True,
        "use_parallel_embedding": False,
        "use_qk_norm": False,
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "layer_switch": 4,
    },
    defaults={"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 4096},
)
FALCON = Family(
    "falcon",
    "FalconForCausalLM",
    falcon_table,
    read_falcon,
    write_falcon,
    idle={"hidden_dropout": 0.0, "apply_residual_connection_post_layernorm": False},
    remote_code=True,
    defaults={
        "layer_norm_epsilon": 1e-5,
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": False,
        "bias": False,
        "alibi": False,
        "tie_word_embeddings": True,
    },
)
BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    falcon_table,
    read_bloom,
    write_bloom,
    harmless=("slow_but_exact", "skip_bias_add", "skip_bias_add_qkv", "unk_token_id"),
    idle={
        "apply_residual_connection_post_layernorm": False,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "attention_softmax_in_fp32": True,
        "offset_alibi": 100,
        "n_inner": None,
    },
)
MPT = Family(
    "mpt",
    "MptForCausalLM",
    MPT_TABLE,
    read_mpt,
    write_mpt,
    harmless=(
        *("init_device", "norm_type", "verbose", "learned_pos_emb", "init_config"),
        "tokenizer_name",
    ),
    idle={"embedding_fraction": 1.0, "logit_scale": None},
    remote_code=True,
    older="MPTForCausalLM",
)
LAYERNORM = (NEOX_FAMILY, PHI, STABLELM, FALCON, BLOOM, MPT, COHERE, COHERE2)

STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    STARCODER2_TABLE,
    read_starcoder2,
    write_starcoder2,
    harmless=(  # of StarCoder's config; this architecture has other keys for them
        *("activation_function", "layer_norm_epsilon", "attention_softmax_in_fp32"),
        "scale_attention_softmax_in_fp32",
    ),
    idle={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
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
