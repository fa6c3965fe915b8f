"""Llama, Mistral, and every model with their config: SmolLM2, TinyLlama, Yi, ...

RMSNorm before each part, SwiGLU, half-split rotary positions, grouped keys; the modules of most
other families build on the functions here. Ministral, Seed-OSS and Ernie 4.5 are Llamas under other
names, told by their config's fields; Ernie rotates neighbouring rows of q and k. Configs of
transformers 4.x have `rope_theta` and `rope_scaling`, those of 5.x `rope_parameters` alone. Both
are read, and must agree if both are present; both are written.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, assert_never

from glassformer.adapters.config import MOST_LAYERS, MOST_POSITIONS, Config, block_of
from glassformer.adapters.table import Family, Interleaved, Layout, Row, Rows, Table, dense
from glassformer.spec.errors import FileError
from glassformer.spec.init import NormalInit
from glassformer.spec.model import (
    Attention,
    Bias,
    Block,
    Dropout,
    FeedForward,
    GateActivation,
    Layers,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelSpec,
    MoE,
    NextHead,
    Norm,
    RMSNorm,
    Rotary,
    Stack,
    SwiGLU,
    YarnScaling,
    rotary_of,
)
from glassformer.spec.position import Scaling

THETA = 10_000.0  # the default of transformers
FULL, SLIDING = "full_attention", "sliding_attention"
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
#: The activations of a gate, by transformers' words; the first of a meaning is the one written.
GATES: dict[str, GateActivation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}


def read_gate(config: Config, key: str = "hidden_act", *, default: str = "silu") -> GateActivation:
    """Read the activation of a gate."""
    return GATES[config.one_of(key, {word: word for word in GATES}, default=default)]


def gate_word(ffn: FeedForward) -> str:
    """Return transformers' word for the activation of a feed-forward's gate."""
    inner = ffn.expert if isinstance(ffn, MoE) else ffn
    words = {meaning: word for word, meaning in reversed(GATES.items())}
    return words[inner.activation] if isinstance(inner, SwiGLU) else "silu"


def read_rotary(
    config: Config, *, max_seq_len: int, theta: float = THETA, share: float | None = None
) -> Rotary:
    """Read the rotary base and scaling of a config.

    `theta` is the base where none is given, `share` the part of a head that is rotated; families
    that always rotate whole heads have None, and refuse a config with another part.
    """
    new = _table(config, "rope_parameters")
    old = _table(config, "rope_scaling")
    outer = config.number("rope_theta", default=None) if config.data.get("rope_theta") else None
    found = Config(old or new, where=config.where)
    inner = found.number("rope_theta", default=outer or theta)
    for other in (outer, new.get("rope_theta")):
        if other is not None and other != inner:
            raise FileError(
                f"config.json has two values of rope_theta: {other} and {inner}", where=config.where
            )
    kind = found.any("rope_type", "type", default="default")
    if old and new and {**_named(new), "rope_theta": inner} != {**_named(old), "rope_theta": inner}:
        raise FileError(
            "rope_scaling and rope_parameters contradict each other", where=config.where
        )
    part = 1.0
    if share is not None:
        outside = config.number("partial_rotary_factor", "rotary_pct", default=share)
        part = found.number("partial_rotary_factor", default=outside)
    if kind == "longrope" and not found.has("original_max_position_embeddings"):
        found.data["original_max_position_embeddings"] = config.any(
            "original_max_position_embeddings", default=max_seq_len
        )
    return Rotary(base=inner, scaling=_scaling(found, kind, max_seq_len), share=part)


def read_rotaries(
    config: Config, *, max_seq_len: int, thetas: tuple[float, float]
) -> tuple[Rotary, Rotary]:
    """Read the rotations of full and of sliding attention, in either generation's words.

    `thetas` are the bases of both where none is given.
    """
    table = config.any("rope_parameters", default={})
    if isinstance(table, dict) and isinstance(table.get(FULL), dict):
        if set(table) - {FULL, SLIDING}:
            raise config.bad("rope_parameters", table, f"a table of {FULL} and {SLIDING}")
        made = []
        for kind, theta in ((FULL, thetas[0]), (SLIDING, thetas[1])):
            own = Config({"rope_parameters": table.get(kind, {})}, where=config.where)
            made.append(read_rotary(own, max_seq_len=max_seq_len, theta=theta))
        return made[0], made[1]
    whole = read_rotary(config, max_seq_len=max_seq_len, theta=thetas[0])
    local = config.number("rope_local_base_freq", default=thetas[1])
    return whole, Rotary(base=local)


def write_rotaries(spec: ModelSpec) -> dict[str, Any]:
    """Return the table of both rotations, as transformers 5 has it."""
    usual = spec.position if isinstance(spec.position, Rotary) else Rotary()
    found = {FULL: usual, SLIDING: usual}
    for block in spec.decoder.blocks():
        rotary = rotary_of(block.attention, spec.position)
        kind = FULL if block.attention.window is None else SLIDING
        found[kind] = Rotary() if rotary is None else rotary
    own = {kind: write_rotary(rotary)["rope_parameters"] for kind, rotary in found.items()}
    return {"rope_parameters": own}


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


def _scaling(found: Config, kind: Any, max_seq_len: int) -> Scaling | None:
    scaling: Scaling | None
    match kind:
        case "default":
            scaling = None
        case "dynamic":  # acts beyond the context alone
            found.number("factor")
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
            factor = found.number("factor", default=max_seq_len / original)
            scaling = YarnScaling(
                factor=factor,
                original_max_seq_len=original,
                beta_fast=found.number("beta_fast", default=32.0),
                beta_slow=found.number("beta_slow", default=1.0),
                attention_factor=_yarn_attention(found, factor),
                truncate=found.flag("truncate", default=True),
            )
        case "longrope" | "su":
            scaling = _longrope(found, max_seq_len)
        case _:
            raise found.bad("rope_type", kind, f"one of {', '.join(SCALINGS)}")
    found.finish()
    return scaling


def _yarn_attention(found: Config, factor: float) -> float | None:
    """Return the factor of YaRN's scores: given, or by two further keys; None for the usual one."""
    names = ("attention_factor", "mscale", "mscale_all_dim")
    given, own, every = (
        found.number(name) if found.any(name, default=None) is not None else None for name in names
    )
    if given is not None or not own or not every:
        return given
    rise = 0.1 * math.log(factor) if factor > 1 else 0.0
    return (own * rise + 1.0) / (every * rise + 1.0)


def _longrope(found: Config, max_seq_len: int) -> LongRopeScaling:
    """Read LongRoPE's factors: the short ones are used, up to the context that they are for."""
    original = _original(found, max_seq_len)
    factor = found.number("factor", default=max_seq_len / original)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    lists = [found.any(key) for key in ("short_factor", "long_factor")]
    for each in lists:
        if not isinstance(each, list) or not all(isinstance(f, int | float) for f in each):
            raise found.bad("short_factor", each, "a list of numbers")
    short, long = (tuple(float(f) for f in each) for each in lists)
    return LongRopeScaling(
        short=short,
        long=long,
        original_max_seq_len=original,
        attention_factor=found.number("attention_factor", default=usual),
    )


def _original(found: Config, max_seq_len: int) -> int:
    return found.whole("original_max_position_embeddings", default=max_seq_len)


def write_rotary(rotary: Rotary) -> dict[str, Any]:
    """Return the config keys of both generations of files."""
    scaled = _write_scaling(rotary)
    part = {} if rotary.share == 1.0 else {"partial_rotary_factor": rotary.share}
    new = {"rope_type": "default", **(scaled or {}), "rope_theta": rotary.base, **part}
    return {
        "rope_theta": rotary.base,
        "rope_scaling": None if scaled is None else scaled | part,
        "rope_parameters": new,
        **part,
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
                **({} if scaling.truncate else {"truncate": False}),
            }
        case LongRopeScaling() as scaling:
            return {
                "rope_type": "longrope",
                "short_factor": list(scaling.short),
                "long_factor": list(scaling.long),
                "original_max_position_embeddings": scaling.original_max_seq_len,
                "attention_factor": scaling.attention_factor,
            }
        case _ as unreachable:
            assert_never(unreachable)


LAYER, BLOCK = "model.layers.{}.", "blocks.{}."


def leaves(theirs: str, ours: str, layout: Layout = Rows()) -> tuple[Row, Row]:  # noqa: B008
    """Return the rows of a part's weight and of its bias."""
    return tuple(  # type: ignore[return-value]
        Row(f"{theirs}.{leaf}", f"{ours}.{leaf}", layout) for leaf in ("weight", "bias")
    )


def joined(theirs: str, *ours: str, layout: Layout = Rows()) -> tuple[Row, Row]:  # noqa: B008
    """Return the rows of several parts' weights in one tensor, and of their biases in one."""
    return tuple(  # type: ignore[return-value]
        Row(f"{theirs}.{leaf}", tuple(f"{one}.{leaf}" for one in ours), layout)
        for leaf in ("weight", "bias")
    )


#: Named for what precedes it, `post_attention_layernorm` is the norm of the feed-forward.
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
ROTARY_BUFFERS = (f"{LAYER}self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")


def stack_rows(
    *,
    norms: Mapping[str, str] = NORMS,
    fused: Iterable[str] = (),
    turned: Layout = Rows(),  # noqa: B008
) -> tuple[Row, ...]:
    """Return the rows that files of transformers' Llama have, and those of its relatives.

    `norms` are the norms of a layer by their names, `fused` says which of qkv and gate_up are one
    tensor, and `turned` is the layout of q and k.
    """
    attention: list[Row] = []
    if "qkv" in fused:
        qkv = [f"{BLOCK}attn.{letter}_proj" for letter in "qkv"]
        attention += joined(f"{LAYER}self_attn.qkv_proj", *qkv)
    for letter in "qkvo":
        layout = turned if letter in "qk" else Rows()
        ours = f"{BLOCK}attn.{letter}_proj"
        if letter == "o" or "qkv" not in fused:
            attention += leaves(f"{LAYER}self_attn.{letter}_proj", ours, layout)
    ffn = [*leaves(f"{LAYER}mlp.down_proj", f"{BLOCK}ffn.down_proj")]
    both = (f"{BLOCK}ffn.gate_proj", f"{BLOCK}ffn.up_proj")
    if "gate_up" in fused:
        ffn += joined(f"{LAYER}mlp.gate_up_proj", *both)
    else:
        ffn += leaves(f"{LAYER}mlp.gate_proj", both[0]) + leaves(f"{LAYER}mlp.up_proj", both[1])
    return (
        *leaves("model.embed_tokens", "embed"),
        *(row for name, ours in norms.items() for row in leaves(LAYER + name, BLOCK + ours)),
        *attention,
        *leaves(f"{LAYER}self_attn.q_norm", f"{BLOCK}attn.q_norm"),
        *leaves(f"{LAYER}self_attn.k_norm", f"{BLOCK}attn.k_norm"),
        *ffn,
        *leaves("model.norm", "final_norm"),
        *leaves("lm_head", "heads.next"),
    )


TABLE = Table(rows=stack_rows(), ignored=ROTARY_BUFFERS)


def turned_layout(spec: ModelSpec) -> Interleaved:
    """Return the layout of q and k where neighbouring rows are a rotary pair."""
    attention = block_of(spec.decoder).attention
    width, rotary = attention.head_width(spec.d_model), rotary_of(attention, spec.position)
    return Interleaved(width, width if rotary is None else rotary.width(width))


def neighbours_table(spec: ModelSpec) -> Table:
    """Return Llama's table for files in which neighbouring rows are a rotary pair."""
    return Table(rows=stack_rows(turned=turned_layout(spec)), ignored=ROTARY_BUFFERS)


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
    norm: Norm | None = None,
    ffn: FeedForward | None = None,
    theta: float = THETA,
    share: float | None = None,
    rotary: Rotary | None = None,
) -> ModelSpec:
    """Read the stack that these families share; `windows` has one entry per layer, or none.

    Without `norm` and `ffn` they are RMSNorm and SwiGLU, by Llama's keys.
    """
    n_layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    if norm is None:
        norm = RMSNorm(eps=config.number("rms_norm_eps", default=1e-6))
    attention = Attention(
        n_heads=config.whole("num_attention_heads"),
        n_kv_heads=_kv_heads(config, absent=n_kv_heads),
        d_head=d_head,
        bias=bias,
        qk_norm=norm if qk_norm else None,
    )
    if ffn is None:
        ffn = SwiGLU(
            d_ff=config.whole("intermediate_size"), bias=mlp_bias, activation=read_gate(config)
        )
    block = Block(mixer=attention, ffn=ffn, norm=norm)
    max_seq_len = config.whole("max_position_embeddings", most=MOST_POSITIONS)
    if rotary is None:
        rotary = read_rotary(config, max_seq_len=max_seq_len, theta=theta, share=share)
    d_model = config.whole("hidden_size")
    width = attention.head_width(d_model)
    if int(width * rotary.share) % 2 or int(width * rotary.share) == 0:
        if rotary.share == 1.0:
            raise config.bad("head_dim", width, "an even number: rotary positions turn pairs")
        what = f"a part of 'head_dim' {width} that is pairs of numbers"
        raise config.bad("partial_rotary_factor", rotary.share, what)
    if isinstance(rotary.scaling, LongRopeScaling):
        max_seq_len = min(max_seq_len, rotary.scaling.original_max_seq_len)
    return ModelSpec(
        vocab_size=config.whole("vocab_size"),
        d_model=d_model,
        max_seq_len=max_seq_len,
        position=rotary,
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
            block=replace(block, mixer=replace(block.attention, window=window)),
        )
        for window, run in groupby(windows)
    )


def each_block(spec: ModelSpec, change: Callable[[Block, int], Block]) -> ModelSpec:
    """Return the spec with every block changed, given its layer's number."""
    blocks = [change(block, layer) for layer, block in enumerate(spec.decoder.blocks())]
    runs = tuple(Layers(count=len(list(run)), block=block) for block, run in groupby(blocks))
    return replace(spec, decoder=replace(spec.decoder, layers=runs))


def read_kinds(config: Config, *, absent: Sequence[str]) -> list[str]:
    """Return `layer_types`: for each layer full or sliding attention."""
    kinds = config.any("layer_types", default=list(absent))
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    known = (FULL, SLIDING)
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise config.bad("layer_types", kinds, f"{layers} of {FULL} and {SLIDING}")
    return kinds


def kinds_of(spec: ModelSpec) -> list[str]:
    """Return `layer_types` of a spec."""
    windows = [block.attention.window for block in spec.decoder.blocks()]
    return [FULL if window is None else SLIDING for window in windows]


def window_of(spec: ModelSpec) -> int | None:
    """Return the window of the first layer that has one."""
    windows = [block.attention.window for block in spec.decoder.blocks()]
    return next((window for window in windows if window is not None), None)


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


def read_ministral(config: Config) -> ModelSpec:
    """Read a Ministral config: Mistral with a window in some layers."""
    window = config.whole("sliding_window")
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    kinds = read_kinds(config, absent=[SLIDING] * layers)
    return read_stack(
        config,
        bias="none",
        d_head=optional_whole(config, "head_dim"),
        n_kv_heads=8,
        windows=[window if kind == SLIDING else None for kind in kinds],
    )


def read_seed_oss(config: Config) -> ModelSpec:
    """Read a Seed-OSS config: the output projection's bias has a switch of its own."""
    biases = config.flag("attention_bias"), config.flag("attention_out_bias")
    if biases == (False, True):
        raise config.bad("attention_out_bias", True, "false where attention_bias is false")
    kinds: dict[tuple[bool, bool], Bias] = {
        (False, False): "none",
        (True, False): "qkv",
        (True, True): "all",
    }
    spec = read_stack(
        config,
        bias=kinds[biases],
        d_head=config.whole("head_dim"),
        mlp_bias=config.flag("mlp_bias"),
    )
    residual = config.number("residual_dropout")
    dropout = replace(spec.decoder.dropout, residual=residual)
    return replace(spec, decoder=replace(spec.decoder, dropout=dropout))


def read_ernie(config: Config) -> ModelSpec:
    """Read an Ernie 4.5 config: one switch for every bias."""
    biased = config.flag("use_bias")
    return read_stack(
        config,
        bias="all" if biased else "none",
        d_head=config.whole("head_dim"),
        mlp_bias=biased,
        theta=500_000.0,
    )


# --- writing ------------------------------------------------------------------------------------


def write_stack(spec: ModelSpec, *, d_ff: int | None = None) -> dict[str, Any]:
    """Return the config keys that these families share; reading them back must give the spec.

    `d_ff` is for families whose feed-forwards are not all alike.
    """
    block = block_of(spec.decoder)
    attention, head = block.attention, spec.heads[0]
    position = spec.position if isinstance(spec.position, Rotary) else Rotary()
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "intermediate_size": dense(block.ffn).d_ff if d_ff is None else d_ff,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.kv_heads,
        **({} if attention.d_head is None else {"head_dim": attention.d_head}),
        "hidden_act": gate_word(block.ffn),
        "max_position_embeddings": spec.max_seq_len,
        **({"rms_norm_eps": block.norm.eps} if isinstance(block.norm, RMSNorm) else {}),
        "attention_dropout": spec.decoder.dropout.attention,
        "initializer_range": spec.init.std if isinstance(spec.init, NormalInit) else 0.02,
        "tie_word_embeddings": isinstance(head, NextHead) and head.tied,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **write_rotary(position),
    }


def write_llama(spec: ModelSpec) -> dict[str, Any]:
    """Return Llama's config keys."""
    block = block_of(spec.decoder)
    return write_stack(spec) | {
        "attention_bias": block.attention.bias == "all",
        "mlp_bias": dense(block.ffn).bias,
    }


def write_mistral(spec: ModelSpec) -> dict[str, Any]:
    """Return Mistral's config keys."""
    return write_stack(spec) | {"sliding_window": block_of(spec.decoder).attention.window}


def own_width(spec: ModelSpec) -> dict[str, int]:
    """Return `head_dim`, for families that always state it."""
    return {"head_dim": block_of(spec.decoder).attention.head_width(spec.d_model)}


def write_ministral(spec: ModelSpec) -> dict[str, Any]:
    """Return Ministral's config keys."""
    windows = {"sliding_window": window_of(spec) or 4096, "layer_types": kinds_of(spec)}
    return write_stack(spec) | windows


def write_seed_oss(spec: ModelSpec) -> dict[str, Any]:
    """Return Seed-OSS's config keys."""
    block = block_of(spec.decoder)
    return {
        **write_stack(spec),
        **own_width(spec),
        "attention_bias": block.attention.bias in ("qkv", "all"),
        "attention_out_bias": block.attention.bias == "all",
        "mlp_bias": dense(block.ffn).bias,
        "residual_dropout": spec.decoder.dropout.residual,
    }


def write_ernie(spec: ModelSpec) -> dict[str, Any]:
    """Return Ernie 4.5's config keys."""
    biased = block_of(spec.decoder).attention.bias == "all"
    return {**write_stack(spec), **own_width(spec), "use_bias": biased}


LLAMA = Family("llama", "LlamaForCausalLM", TABLE, read_llama, write_llama)
MISTRAL = Family("mistral", "MistralForCausalLM", TABLE, read_mistral, write_mistral)
MINISTRAL = Family(
    "ministral",
    "MinistralForCausalLM",
    TABLE,
    read_ministral,
    write_ministral,
    defaults={"sliding_window": 4096},
)
SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    TABLE,
    read_seed_oss,
    write_seed_oss,
    defaults={
        "attention_bias": True,
        "attention_out_bias": False,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "mlp_bias": False,
        "head_dim": 128,
        "num_key_value_heads": 8,
    },
)
ERNIE = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    neighbours_table,
    read_ernie,
    write_ernie,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
)
