"""Llama, Mistral, and every model with their config: SmolLM2, TinyLlama, Yi, ...

RMSNorm before each part, SwiGLU, half-split rotary positions, grouped keys; Qwen's module builds on
the functions here. Configs of transformers 4.x have `rope_theta` and `rope_scaling`, those of 5.x
`rope_parameters` alone. Both are read, and must agree if both are present; both are written.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, assert_never

from glassformer.adapters.config import MOST_LAYERS, MOST_POSITIONS, Config
from glassformer.adapters.table import Family, Row, Table, dense
from glassformer.spec.errors import FileError
from glassformer.spec.init import NormalInit
from glassformer.spec.model import (
    Attention,
    Bias,
    Block,
    Dropout,
    Layers,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    NextHead,
    RMSNorm,
    Rotary,
    Stack,
    SwiGLU,
    YarnScaling,
)

THETA = 10_000.0  # the default of transformers
SCALINGS = ("default", "linear", "llama3", "yarn")


def read_rotary(config: Config, *, max_seq_len: int) -> Rotary:
    """Read the rotary base and scaling of a config."""
    new = _table(config, "rope_parameters")
    old = _table(config, "rope_scaling")
    theta = config.number("rope_theta", default=None) if config.data.get("rope_theta") else None
    found = Config(old or new, where=config.where)
    inner = found.number("rope_theta", default=theta or THETA)
    for other in (theta, new.get("rope_theta")):
        if other is not None and other != inner:
            raise FileError(
                f"config.json has two values of rope_theta: {other} and {inner}", where=config.where
            )
    kind = found.any("rope_type", "type", default="default")
    if old and new and {**_named(new), "rope_theta": inner} != {**_named(old), "rope_theta": inner}:
        raise FileError(
            "rope_scaling and rope_parameters contradict each other", where=config.where
        )
    return Rotary(base=inner, scaling=_scaling(found, kind, max_seq_len))


def _table(config: Config, key: str) -> dict[str, Any]:
    value = config.any(key, default={})
    if not isinstance(value, dict):
        raise config.bad(key, value, "a table")
    if any(isinstance(item, dict) for item in value.values()):
        raise FileError(
            f"config.json: '{key}' differs between layers, which is not handled here",
            where=config.where,
        )
    return value


def _named(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table with its type under one name."""
    rest = {key: value for key, value in table.items() if key not in ("type", "rope_type")}
    return {"rope_type": table.get("rope_type", table.get("type", "default")), **rest}


def _scaling(
    found: Config, kind: Any, max_seq_len: int
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None
    match kind:
        case "default":
            scaling = None
        case "linear":
            scaling = LinearScaling(factor=found.number("factor"))
        case "llama3":
            scaling = Llama3Scaling(
                factor=found.number("factor"),
                low_freq_factor=found.number("low_freq_factor"),
                high_freq_factor=found.number("high_freq_factor"),
                original_max_seq_len=_original(found, max_seq_len),
            )
        case "yarn":
            original = _original(found, max_seq_len)
            share = found.any("attention_factor", default=None)
            scaling = YarnScaling(
                factor=found.number("factor", default=max_seq_len / original),
                original_max_seq_len=original,
                beta_fast=found.number("beta_fast", default=32.0),
                beta_slow=found.number("beta_slow", default=1.0),
                attention_factor=None if share is None else found.number("attention_factor"),
            )
        case _:
            raise FileError(
                f"config.json scales rotary positions by {str(kind)[:40]!r}",
                where=found.where,
                hint=f"known here: {', '.join(SCALINGS)}",
            )
    found.finish(idle={"truncate": True})
    return scaling


def _original(found: Config, max_seq_len: int) -> int:
    return found.whole("original_max_position_embeddings", default=max_seq_len)


def write_rotary(rotary: Rotary) -> dict[str, Any]:
    """Return the config keys of both generations of files."""
    scaled = _write_scaling(rotary)
    return {
        "rope_theta": rotary.base,
        "rope_scaling": scaled,
        "rope_parameters": {"rope_type": "default", **(scaled or {}), "rope_theta": rotary.base},
    }


def _write_scaling(rotary: Rotary) -> dict[str, Any] | None:
    match rotary.scaling:
        case None:
            return None
        case LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as scaling:
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            }
        case YarnScaling() as scaling:
            share = scaling.attention_factor
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                **({} if share is None else {"attention_factor": share}),
            }
        case _ as unreachable:
            assert_never(unreachable)


LAYER = "model.layers.{}."
TABLE = Table(
    rows=(
        Row("model.embed_tokens.weight", "embed.weight"),
        Row(f"{LAYER}input_layernorm.weight", "blocks.{}.attn_norm.weight"),
        *(
            Row(f"{LAYER}self_attn.{leaf}", f"blocks.{{}}.attn.{leaf}")
            for letter in "qkvo"
            for leaf in (f"{letter}_proj.weight", f"{letter}_proj.bias")
        ),
        Row(f"{LAYER}self_attn.q_norm.weight", "blocks.{}.attn.q_norm.weight"),
        Row(f"{LAYER}self_attn.k_norm.weight", "blocks.{}.attn.k_norm.weight"),
        # Named for what precedes it; it is the norm of the feed-forward.
        Row(f"{LAYER}post_attention_layernorm.weight", "blocks.{}.ffn_norm.weight"),
        *(
            Row(f"{LAYER}mlp.{leaf}", f"blocks.{{}}.ffn.{leaf}")
            for name in ("gate", "up", "down")
            for leaf in (f"{name}_proj.weight", f"{name}_proj.bias")
        ),
        Row("model.norm.weight", "final_norm.weight"),
        Row("lm_head.weight", "heads.next.weight"),
    ),
    ignored=(f"{LAYER}self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
)


# --- reading ------------------------------------------------------------------------------------


def read_stack(
    config: Config,
    *,
    bias: Bias,
    d_head: int | None,
    n_kv_heads: int | None = None,
    windows: Sequence[int | None] = (),
    qk_norm: bool = False,
    mlp_bias: bool = False,
) -> ModelSpec:
    """Read the stack that these families share; `windows` has one entry per layer, or none."""
    config.one_of("hidden_act", {"silu": "silu", "swish": "silu"}, default="silu")
    n_layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    norm = RMSNorm(eps=config.number("rms_norm_eps", default=1e-6))
    attention = Attention(
        n_heads=config.whole("num_attention_heads"),
        n_kv_heads=_kv_heads(config, absent=n_kv_heads),
        d_head=d_head,
        bias=bias,
        qk_norm=norm if qk_norm else None,
    )
    ffn = SwiGLU(d_ff=config.whole("intermediate_size"), bias=mlp_bias)
    block = Block(attention=attention, ffn=ffn, norm=norm)
    max_seq_len = config.whole("max_position_embeddings", most=MOST_POSITIONS)
    return ModelSpec(
        vocab_size=config.whole("vocab_size"),
        d_model=config.whole("hidden_size"),
        max_seq_len=max_seq_len,
        position=read_rotary(config, max_seq_len=max_seq_len),
        decoder=Stack(
            layers=windowed(block, windows or (None,) * n_layers),
            final_norm=norm,
            dropout=Dropout(attention=config.number("attention_dropout", default=0.0)),
        ),
        heads=(NextHead(tied=config.flag("tie_word_embeddings", default=False)),),
        init=NormalInit(std=config.number("initializer_range", default=0.02)),
    )


def _kv_heads(config: Config, *, absent: int | None) -> int | None:
    """Return n_kv_heads: null means as many as query heads, a missing key the family's default."""
    key = "num_key_value_heads"
    return optional_whole(config, key) if config.has(key) else absent


def windowed(block: Block, windows: Sequence[int | None]) -> tuple[Layers, ...]:
    """Group layers into runs of equal blocks by their window."""
    return tuple(
        Layers(
            count=len(list(run)),
            block=replace(block, attention=replace(block.attention, window=window)),
        )
        for window, run in groupby(windows)
    )


def optional_whole(config: Config, key: str) -> int | None:
    """Return a whole number, or None if the key is null or absent."""
    return None if config.any(key, default=None) is None else config.whole(key)


def read_llama(config: Config) -> ModelSpec:
    """Read a Llama config: biases have switches; `attention_bias` includes the output's."""
    spec = read_stack(
        config,
        bias="all" if config.flag("attention_bias", default=False) else "none",
        d_head=optional_whole(config, "head_dim"),
        mlp_bias=config.flag("mlp_bias", default=False),
    )
    heads = config.whole("num_attention_heads")
    if spec.d_model % heads:
        raise FileError(
            f"config.json: hidden_size {spec.d_model} is no multiple of {heads} heads, which "
            "model_type 'llama' requires",
            where=config.where,
        )
    return spec


def read_mistral(config: Config) -> ModelSpec:
    """Read a Mistral config: one window for every layer, 4096 if the key is missing."""
    window = 4096 if not config.has("sliding_window") else optional_whole(config, "sliding_window")
    return read_stack(
        config,
        bias="none",
        d_head=optional_whole(config, "head_dim"),
        n_kv_heads=8,
        windows=(window,) * config.whole("num_hidden_layers", most=MOST_LAYERS),
    )


# --- writing ------------------------------------------------------------------------------------


def write_stack(spec: ModelSpec) -> dict[str, Any]:
    """Return the config keys that these families share; reading them back must give the spec."""
    block = next(spec.decoder.blocks())
    attention, head = block.attention, spec.heads[0]
    position = spec.position if isinstance(spec.position, Rotary) else Rotary()
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "intermediate_size": dense(block.ffn).d_ff,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.kv_heads,
        **({} if attention.d_head is None else {"head_dim": attention.d_head}),
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": block.norm.eps,
        "attention_dropout": spec.decoder.dropout.attention,
        "initializer_range": spec.init.std if isinstance(spec.init, NormalInit) else 0.02,
        "tie_word_embeddings": isinstance(head, NextHead) and head.tied,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        **write_rotary(position),
    }


def write_llama(spec: ModelSpec) -> dict[str, Any]:
    """Return Llama's config keys."""
    block = next(spec.decoder.blocks())
    return write_stack(spec) | {
        "attention_bias": block.attention.bias == "all",
        "mlp_bias": dense(block.ffn).bias,
    }


def write_mistral(spec: ModelSpec) -> dict[str, Any]:
    """Return Mistral's config keys."""
    return write_stack(spec) | {"sliding_window": next(spec.decoder.blocks()).attention.window}


LLAMA = Family("llama", "LlamaForCausalLM", TABLE, read_llama, write_llama)
MISTRAL = Family("mistral", "MistralForCausalLM", TABLE, read_mistral, write_mistral)
