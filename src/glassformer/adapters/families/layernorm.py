"""Decoders with LayerNorm: StarCoder 1 and 2, GPT-NeoX, Phi-1 and 2, StableLM, Falcon, Bloom, MPT,
Cohere 1 and 2.

They share no common config: each says its sizes in words of its own.
"""

from dataclasses import replace
from typing import Any

from glassformer.adapters.config import MOST_LAYERS, MOST_POSITIONS, Config
from glassformer.adapters.families.gpt2 import GPT2_KEYS, MASKS, OUTER, PARTS, SUMMARY
from glassformer.adapters.families.llama import (
    BIAS,
    KEYS,
    NORMS,
    ROPE,
    ROTARY_BUFFERS,
    SIZES,
    TABLE,
    WINDOW,
    llama_table,
)
from glassformer.adapters.families.rotary import rope, windows
from glassformer.adapters.keys import (
    Facts,
    Own,
    flag,
    number,
    optional,
    optional_whole,
    value_of,
    whole,
    without,
    word,
)
from glassformer.adapters.table import (
    QKV,
    Family,
    Layout,
    Rows,
    Table,
    by_head,
    decoder_table,
    turned,
)
from glassformer.spec.model import MLP, ALiBi, LayerNorm, Learned, ModelSpec, Rotary

#: Llama's keys without its norm and gate; with an activation alone.
PLAIN = SIZES | {"intermediate_size": whole("ffn.d_ff")}
EPS = {"layer_norm_eps": number("norm.eps")}
FEED_FORWARD = {"ffn": MLP, "norm": LayerNorm}
EMBEDDING, RESIDUAL = "dropout.embedding", "dropout.residual"


# --- StarCoder 2, and 1: GPT-2 with one key-value head -------------------------------------------

STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    decoder_table(
        "model.",
        "layers",
        outer={"embed_tokens": "embed", "norm": "final_norm"},
        parts={
            **NORMS,
            **{f"self_attn.{one}_proj": f"attn.{one}_proj" for one in "qkvo"},
            "mlp.c_fc": "ffn.up_proj",
            "mlp.c_proj": "ffn.down_proj",
        },
        buffers=ROTARY_BUFFERS,
    ),
    PLAIN
    | ROPE
    | WINDOW
    | {
        "hidden_act": word("ffn.activation", default="gelu_pytorch_tanh"),
        "norm_epsilon": number("norm.eps"),
        "use_bias": (flag("attn.bias", yes="all", no="none"), flag("ffn.bias")),
        "embedding_dropout": number(EMBEDDING),
        "residual_dropout": number(RESIDUAL),
    },
    FEED_FORWARD,
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


def alone_or_by_head(spec: ModelSpec) -> Layout:
    """Return the layout of q, k and v: head by head where each has a key."""
    return Rows() if value_of(spec, "attn.kv_heads") == 1 else by_head(spec)


def _read_multi_query(config: Config, facts: Facts) -> None:
    """All heads share one key, or none do."""
    if config.flag("multi_query"):
        facts["attn.n_kv_heads"] = 1
        config.whole("num_key_value_heads", default=1)
    else:
        optional_whole(config, "num_key_value_heads")


def _write_multi_query(spec: ModelSpec) -> dict[str, Any]:
    return {"multi_query": value_of(spec, "attn.kv_heads") == 1 < value_of(spec, "attn.n_heads")}


BIGCODE = Family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    decoder_table(
        "transformer.",
        "h",
        outer=OUTER,
        parts=PARTS,
        layouts={"attn.c_attn": alone_or_by_head},
        ignored=MASKS,
        alone=True,
    ),
    GPT2_KEYS | {"multi_query": Own(_read_multi_query, _write_multi_query)},
    FEED_FORWARD | {"attn.bias": "all", "position": Learned},
    harmless=(
        *SUMMARY,
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
        "inference_runner",
        "max_batch_size",
        "max_sequence_length",
        "pad_key_length",
        "pre_allocate_kv_cache",
        "validate_runner_input",
    ),
    idle={"scale_attn_weights": True},
    defaults={"multi_query": True, "activation_function": "gelu_pytorch_tanh"},
)


# --- GPT-NeoX, Phi, StableLM: partial rotary, parts in parallel ----------------------------------

NEOX_TABLE = decoder_table(
    "gpt_neox.",
    "layers",
    outer={"embed_in": "embed", "final_layer_norm": "final_norm"},
    parts={
        **NORMS,
        "attention.query_key_value": QKV,
        "attention.dense": "attn.o_proj",
        "mlp.dense_h_to_4h": "ffn.up_proj",
        "mlp.dense_4h_to_h": "ffn.down_proj",
    },
    layouts={"attention.query_key_value": by_head},
    head="embed_out",
    ignored=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
)


def _write_share(spec: ModelSpec) -> dict[str, Any]:
    share = spec.position.share if isinstance(spec.position, Rotary) else 1.0
    return {"rotary_pct": share, "partial_rotary_factor": share}


NEOX_FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    NEOX_TABLE,
    without(PLAIN, "num_key_value_heads")
    | EPS
    | {
        "hidden_act": word("ffn.activation", default="gelu"),
        "attention_bias": flag("attn.bias", yes="all", no="none"),
        "use_parallel_residual": flag("block.placement", yes="parallel", no="pre"),
        "hidden_dropout": number(RESIDUAL, EMBEDDING, default=0.0),
        "rope": rope(share=0.25, base="rotary_emb_base"),
        "share": Own(lambda *_: None, _write_share),
    },
    FEED_FORWARD,
    harmless=("classifier_dropout",),
    idle={"rope_scaling": None},
    defaults={"layer_norm_eps": 1e-5, "attention_bias": True, "use_parallel_residual": True},
    live=replace(
        NEOX_TABLE,
        rows=tuple(
            replace(row, theirs=row.theirs.replace("embed_out", "lm_head"))
            for row in NEOX_TABLE.rows
        ),
    ),
)
PHI = Family(
    "phi",
    "PhiForCausalLM",
    decoder_table(
        "model.",
        "layers",
        outer={"embed_tokens": "embed", "final_layernorm": "final_norm"},
        parts={
            "input_layernorm": "attn_norm",
            **{f"self_attn.{one}_proj": f"attn.{one}_proj" for one in "qkv"},
            "self_attn.dense": "attn.o_proj",
            "mlp.fc1": "ffn.up_proj",
            "mlp.fc2": "ffn.down_proj",
        },
        buffers=ROTARY_BUFFERS,
    ),
    PLAIN
    | EPS
    | {
        "hidden_act": word("ffn.activation", default="gelu_new"),
        "embd_pdrop": number(EMBEDDING, default=0.0),
        "resid_pdrop": number(RESIDUAL, default=0.0),
        "qk_layernorm": False,
        "rope": rope(share=0.5),
    },
    FEED_FORWARD | {"attn.bias": "all", "head.bias": True, "block.placement": "parallel_shared"},
    idle={"qk_layernorm": False},
    defaults={"layer_norm_eps": 1e-5},
)
STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    TABLE,
    without(KEYS, "rms_norm_eps")
    | EPS
    | {
        "use_qkv_bias": flag("attn.bias", yes="qkv", no="none"),
        "use_parallel_residual": flag("block.placement", yes="parallel_shared", no="pre"),
        "qk_layernorm": False,
        "hidden_dropout": number(RESIDUAL, default=0.0),
        "rope": rope(share=0.25),
    },
    {"norm": LayerNorm},
    idle={"qk_layernorm": False},
    defaults={"layer_norm_eps": 1e-5, "use_qkv_bias": False, "use_parallel_residual": False},
)


# --- Cohere ---------------------------------------------------------------------------------------

#: Neighbouring rotary pairs, one norm in a layer; q/k-norm with a gain for each head is not read.
COHERE_TABLE = llama_table(norms={"input_layernorm": "attn_norm"}, qk=turned)
COHERE_KEYS = (
    without(KEYS, "rms_norm_eps")
    | EPS
    | BIAS
    | {"logit_scale": number("head.scale", default=0.0625)}
)
COHERE_FIXED = {"norm": LayerNorm, "norm.bias": False, "block.placement": "parallel_shared"}
COHERE = Family(
    "cohere",
    "CohereForCausalLM",
    COHERE_TABLE,
    COHERE_KEYS | {"rope": rope(theta=500_000.0), "use_qk_norm": False},
    COHERE_FIXED,
    harmless=("model_max_length",),
    idle={"use_qk_norm": False},
    defaults={"layer_norm_eps": 1e-5, "tie_word_embeddings": True},
)
COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    COHERE_TABLE,
    COHERE_KEYS
    | {"head_dim": optional("attn.d_head", written="attn.width")}
    | ROPE
    | {
        "windows": windows(4, "sliding_window_pattern", "_sliding_window_pattern", bare=True),
    },
    COHERE_FIXED,
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


# --- Falcon, Bloom, MPT ---------------------------------------------------------------------------


def falcon_table(spec: ModelSpec) -> Table:
    """Return Falcon's names; those of the norms tell their number."""
    two = value_of(spec, "block.placement") == "parallel"
    return decoder_table(
        "transformer.",
        "h",
        outer={
            "word_embeddings": "embed",
            "word_embeddings_layernorm": "embed_norm",
            "ln_f": "final_norm",
        },
        parts={
            **({"ln_attn": "attn_norm", "ln_mlp": "ffn_norm"} if two else NORMS),
            "self_attention.query_key_value": QKV,
            "self_attention.dense": "attn.o_proj",
            "mlp.dense_h_to_4h": "ffn.up_proj",
            "mlp.dense_4h_to_h": "ffn.down_proj",
        },
        layouts={"self_attention.query_key_value": by_head},
        alone=True,
    )


def _read_falcon(config: Config, facts: Facts) -> None:
    """Three generations, told by their switches."""
    new, parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn")
    heads = facts["attn.n_heads"]
    stated = config.any("num_kv_heads", "n_head_kv", default=None)
    kv_heads, alone = heads, config.flag("multi_query")
    if new:
        kv_heads = heads if stated is None else config.whole("num_kv_heads", "n_head_kv")
    elif alone:
        kv_heads = 1
    facts["attn.n_kv_heads"] = kv_heads
    norms = config.any("num_ln_in_parallel_attn", default=2 if new else 1)
    if new or parallel:
        facts["block.placement"] = "parallel" if new and norms == 2 else "parallel_shared"
    if config.flag("alibi"):
        facts["position"] = ALiBi(scaled=True)


def _write_falcon(spec: ModelSpec) -> dict[str, Any]:
    heads, kv_heads = value_of(spec, "attn.n_heads"), value_of(spec, "attn.kv_heads")
    placement = value_of(spec, "block.placement")
    new = kv_heads not in (1, heads) or placement == "parallel"
    return {
        "alibi": isinstance(spec.position, ALiBi),
        "new_decoder_architecture": new,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": 2 if placement == "parallel" else None if not new else 1,
        "parallel_attn": placement != "pre",
        "multi_query": kv_heads == 1 < heads,
    }


FALCON = Family(
    "falcon",
    "FalconForCausalLM",
    falcon_table,
    without(SIZES, "num_key_value_heads")
    | ROPE
    | {
        "num_hidden_layers": whole("layers", also=("n_layer",), most=MOST_LAYERS),
        "num_attention_heads": whole("attn.n_heads", also=("n_head",)),
        "max_position_embeddings": whole("max_seq_len", default=2048, most=MOST_POSITIONS),
        "ffn_hidden_size": optional("ffn.d_ff"),
        "activation": word("ffn.activation", default="gelu"),
        "layer_norm_epsilon": number("norm.eps"),
        "bias": (flag("attn.bias", yes="all", no="none"), flag("ffn.bias")),
        "generation": Own(_read_falcon, _write_falcon),
        "hidden_dropout": 0.0,
    },
    FEED_FORWARD,
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


#: What Bloom and MPT say last. Neither limits the context: that is a note of ours.
LAST = {
    "initializer_range": SIZES["initializer_range"],
    "tie_word_embeddings": flag("head.tied", default=True),
    "bos_token_id": None,
    "eos_token_id": None,
}
BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    falcon_table,
    {
        "vocab_size": whole("vocab_size"),
        "hidden_size": whole("d_model", also=("n_embed",)),
        "n_layer": whole("layers", also=("num_hidden_layers",), most=MOST_LAYERS),
        "n_head": whole("attn.n_heads", also=("num_attention_heads",)),
        "seq_length": whole("max_seq_len", default=2048, most=MOST_POSITIONS),
        "layer_norm_epsilon": number("norm.eps", default=1e-5),
        "attention_dropout": number("dropout.attention", default=0.0),
        "hidden_dropout": number(RESIDUAL, default=0.0),
    }
    | LAST,
    FEED_FORWARD
    | {
        "attn.bias": "all",
        "ffn.activation": "gelu_tanh",
        "embed_norm": True,
        "position": ALiBi,
    },
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


def _read_mpt(config: Config, facts: Facts) -> None:
    """Linear biases, no other bias anywhere."""
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
    if (ratio := config.whole("expansion_ratio", default=4)) != 4:
        raise config.bad("expansion_ratio", ratio, "4, which transformers builds whatever it is")
    facts["position"] = ALiBi(max_bias=most)


def _write_mpt(_: ModelSpec) -> dict[str, Any]:
    biases = {"alibi": True, "alibi_bias_max": 8}
    return {"expansion_ratio": 4, "no_bias": True, "attn_config": biases}


MPT = Family(
    "mpt",
    "MptForCausalLM",
    decoder_table(
        "transformer.",
        "blocks",
        outer={"wte": "embed", "norm_f": "final_norm"},
        parts={
            "attn.Wqkv": QKV,
            "attn.out_proj": "attn.o_proj",
            "ffn.up_proj": "ffn.up_proj",
            "ffn.down_proj": "ffn.down_proj",
            "norm_1": "attn_norm",
            "norm_2": "ffn_norm",
        },
    ),
    {
        "vocab_size": whole("vocab_size"),
        "d_model": whole("d_model"),
        "n_layers": whole("layers", most=MOST_LAYERS),
        "n_heads": whole("attn.n_heads"),
        "max_seq_len": whole("max_seq_len", most=MOST_POSITIONS),
        "layer_norm_epsilon": number("norm.eps", default=1e-5),
        "emb_pdrop": number(EMBEDDING, default=0.0),
        "resid_pdrop": number(RESIDUAL, default=0.0),
        "biases": Own(_read_mpt, _write_mpt),
    }
    | LAST,
    FEED_FORWARD | {"norm.bias": False, "ffn.bias": False},
    harmless=(
        *("init_device", "norm_type", "verbose", "learned_pos_emb", "init_config"),
        "tokenizer_name",
    ),
    idle={"embedding_fraction": 1.0, "logit_scale": None},
    remote_code=True,
    older="MPTForCausalLM",
)
