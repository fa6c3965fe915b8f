"""Qwen2 and 2.5, Qwen3 (dense), and Qwen-1 with its own names.

Qwen2 always has biases on q, k and v, and no key that says so; Qwen3 has q/k-norm instead, a head
width of its own, and biases everywhere if its config says so. Windows act on layers from
`max_window_layers`. Qwen-1 fuses q, k and v, calls the gate w2 and the other w1, and halves
`intermediate_size`.
"""

from typing import Any

from glassformer.adapters.config import MOST_LAYERS, Config, block_of
from glassformer.adapters.families.llama import (
    FULL,
    SLIDING,
    TABLE,
    optional_whole,
    read_stack,
    write_stack,
)
from glassformer.adapters.table import Family, Row, Table
from glassformer.spec.model import ModelSpec, Rotary


def read_windows(config: Config, *, alternate: bool = False) -> tuple[int | None, ...]:
    """Return a window or None per layer, by `layer_types` or from `max_window_layers` on.

    `alternate`: without `layer_types`, every other layer before `max_window_layers` has a window.
    """
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    used = config.flag("use_sliding_window", default=False)
    there = config.has("sliding_window")
    unused = not used and config.any("sliding_window", default=None) == 0  # of Qwen2-MoE
    width = optional_whole(config, "sliding_window") if there and not unused else 4096
    first = config.any("max_window_layers", default=28)
    kinds = config.any("layer_types", default=None)
    window = width if used else None
    if kinds is None:
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise config.bad("max_window_layers", first, "a whole number")
        if alternate:
            slides = [layer < first and layer % 2 == 0 for layer in range(layers)]
        else:
            slides = [layer >= first for layer in range(layers)]
        return tuple(window if slide else None for slide in slides)
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in (FULL, SLIDING) for kind in kinds)
        or (window is None and SLIDING in kinds)
    ):
        raise config.bad("layer_types", kinds, f"{layers} of {FULL} and, with a window, {SLIDING}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def write_windows(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys that `read_windows` reads."""
    windows = [block.attention.window for block in spec.decoder.blocks()]
    width = next((window for window in windows if window is not None), None)
    sliding = [window is not None for window in windows]
    return {
        "use_sliding_window": width is not None,
        "sliding_window": width,
        "max_window_layers": sliding.index(True) if any(sliding) else len(windows),
        "layer_types": [SLIDING if one else FULL for one in sliding],
    }


def read_qwen2(config: Config) -> ModelSpec:
    """Read a Qwen2 config: always biases on q, k and v."""
    return read_stack(
        config,
        bias="qkv",
        d_head=optional_whole(config, "head_dim"),
        n_kv_heads=32,
        windows=read_windows(config),
    )


def read_qwen3(config: Config) -> ModelSpec:
    """Read a Qwen3 config: always q/k-norm; `head_dim` is given, or 128."""
    return read_stack(
        config,
        bias="all" if config.flag("attention_bias", default=False) else "none",
        d_head=config.whole("head_dim", default=128),
        n_kv_heads=32,
        windows=read_windows(config),
        qk_norm=True,
    )


def write_qwen2(spec: ModelSpec) -> dict[str, Any]:
    """Return Qwen2's config keys."""
    return write_stack(spec) | write_windows(spec)


def write_qwen3(spec: ModelSpec) -> dict[str, Any]:
    """Return Qwen3's config keys."""
    attention = block_of(spec.decoder).attention
    width = attention.head_width(spec.d_model)
    own = {"attention_bias": attention.bias == "all", "head_dim": width}
    return write_stack(spec) | write_windows(spec) | own


# --- Qwen-1 -------------------------------------------------------------------------------------

LAYER, BLOCK = "transformer.h.{}.", "blocks.{}."
FUSED = tuple(f"{BLOCK}attn.{letter}_proj." for letter in "qkv")
TABLE_1 = Table(
    rows=(
        Row("transformer.wte.weight", "embed.weight"),
        Row(f"{LAYER}ln_1.weight", f"{BLOCK}attn_norm.weight"),
        Row(f"{LAYER}attn.c_attn.weight", tuple(f"{name}weight" for name in FUSED)),
        Row(f"{LAYER}attn.c_attn.bias", tuple(f"{name}bias" for name in FUSED)),
        Row(f"{LAYER}attn.c_proj.weight", f"{BLOCK}attn.o_proj.weight"),
        Row(f"{LAYER}ln_2.weight", f"{BLOCK}ffn_norm.weight"),
        Row(f"{LAYER}mlp.w2.weight", f"{BLOCK}ffn.gate_proj.weight"),
        Row(f"{LAYER}mlp.w1.weight", f"{BLOCK}ffn.up_proj.weight"),
        Row(f"{LAYER}mlp.c_proj.weight", f"{BLOCK}ffn.down_proj.weight"),
        Row("transformer.ln_f.weight", "final_norm.weight"),
        Row("lm_head.weight", "heads.next.weight"),
    ),
    ignored=("transformer.rotary_emb.inv_freq", f"{LAYER}attn.rotary_emb.inv_freq"),
)


def read_qwen1(config: Config) -> ModelSpec:
    """Read a Qwen-1 config: `seq_length` is the context; attention is scaled only beyond it."""
    d_ff = config.whole("intermediate_size")
    if d_ff % 2:
        raise config.bad("intermediate_size", d_ff, "even")
    config.flag("use_dynamic_ntk", default=True)
    config.flag("use_logn_attn", default=True)
    context = config.whole("seq_length")
    config.whole("max_position_embeddings", default=context)
    heads = config.whole("num_attention_heads")
    same = {
        "vocab_size": config.whole("vocab_size"),
        "hidden_size": config.whole("hidden_size"),
        "num_hidden_layers": config.whole("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": d_ff // 2,
        "max_position_embeddings": context,
        "rms_norm_eps": config.number("layer_norm_epsilon", default=1e-6),
        "rope_theta": config.number("rotary_emb_base", default=10_000.0),
        "attention_dropout": config.number("attn_dropout_prob", default=0.0),
        "initializer_range": config.number("initializer_range", default=0.02),
        "tie_word_embeddings": config.flag("tie_word_embeddings", default=False),
    }
    d_head = config.whole("kv_channels", default=128)
    return read_stack(Config(same, where=config.where), bias="qkv", d_head=d_head)


def write_qwen1(spec: ModelSpec) -> dict[str, Any]:
    """Return Qwen-1's config keys."""
    keys = write_stack(spec)
    position = spec.position if isinstance(spec.position, Rotary) else Rotary()
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    return {key: keys[key] for key in (*same, "initializer_range", "tie_word_embeddings")} | {
        "intermediate_size": 2 * keys["intermediate_size"],
        "kv_channels": block_of(spec.decoder).attention.head_width(spec.d_model),
        "seq_length": spec.max_seq_len,
        "max_position_embeddings": spec.max_seq_len,
        "layer_norm_epsilon": block_of(spec.decoder).norm.eps,
        "rotary_emb_base": position.base,
        "attn_dropout_prob": keys["attention_dropout"],
        "emb_dropout_prob": 0.0,
        "no_bias": True,
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
    }


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", TABLE, read_qwen2, write_qwen2)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", TABLE, read_qwen3, write_qwen3)
QWEN1 = Family(
    "qwen",
    "QWenLMHeadModel",
    TABLE_1,
    read_qwen1,
    write_qwen1,
    harmless=(
        "bf16",
        "fp16",
        "fp32",
        "onnx_safe",
        "use_flash_attn",
        "use_cache_kernel",
        "softmax_in_fp32",
    ),
    idle={
        "emb_dropout_prob": 0.0,
        "no_bias": True,
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "use_cache_quantization": False,
    },
    remote_code=True,
)
