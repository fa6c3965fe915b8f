"""Relatives of Llama: RMSNorm and rotary positions, with parts of their own.

Arcee (squared ReLU), Hunyuan (q/k-norm after the rotation), SmolLM3 (layers without positions),
Granite (four multipliers), Phi-3 and 4 (fused projections, LongRoPE), OLMo 2 and 3 (norms on
outputs, q/k-norm over all heads), EXAONE 4 (norms on outputs, no positions where there is no
window), GLM and GLM-4 (neighbouring pairs of half a head, norms around), and Gemma 1 to 3 (offset
norms around each part, GeGLU, caps, windows with a base of their own).
"""

from dataclasses import replace
from typing import Any

from glassformer.adapters.config import MOST_LAYERS, MOST_POSITIONS, Config, block_of
from glassformer.adapters.families.llama import (
    FULL,
    NORMS,
    ROTARY_BUFFERS,
    SLIDING,
    TABLE,
    THETA,
    each_block,
    gate_word,
    kinds_of,
    optional_whole,
    own_width,
    read_gate,
    read_kinds,
    read_rotaries,
    read_stack,
    stack_rows,
    turned_layout,
    window_of,
    write_rotaries,
    write_stack,
)
from glassformer.adapters.table import Family, Names, Row, Table, dense
from glassformer.spec.model import (
    MLP,
    Attention,
    Bias,
    Block,
    GateActivation,
    ModelSpec,
    NextHead,
    NoPosition,
    RMSNorm,
    Rotary,
    ScaledEmbedding,
    SwiGLU,
)


def first_of(spec: ModelSpec) -> Attention:
    """Return the attention of the first layer."""
    return block_of(spec.decoder).attention


def head_of(spec: ModelSpec) -> NextHead:
    """Return the head of the next token."""
    head = spec.heads[0]
    return head if isinstance(head, NextHead) else NextHead()


def switch(config: Config, key: str = "attention_bias") -> Any:
    """Read a switch for the biases of all four projections."""
    return "all" if config.flag(key, default=False) else "none"


# --- one difference each --------------------------------------------------------------------------


def read_arcee(config: Config) -> ModelSpec:
    """Read an Arcee config: a feed-forward without a gate, relu(x)^2."""
    config.one_of("hidden_act", {"relu2": "relu2"}, default="relu2")
    ffn = MLP(
        d_ff=config.whole("intermediate_size"),
        activation="relu2",
        bias=config.flag("mlp_bias", default=False),
    )
    d_head = optional_whole(config, "head_dim")
    return read_stack(config, bias=switch(config), d_head=d_head, ffn=ffn)


def write_arcee(spec: ModelSpec) -> dict[str, Any]:
    """Return Arcee's config keys."""
    return write_stack(spec) | {
        "hidden_act": "relu2",
        "attention_bias": first_of(spec).bias == "all",
        "mlp_bias": dense(block_of(spec.decoder).ffn).bias,
    }


HUNYUAN_TABLE = Table(
    rows=(
        *TABLE.rows,
        *(
            Row(f"model.layers.{{}}.self_attn.{name}_layernorm.weight", ours)
            for name, ours in (
                ("query", "blocks.{}.attn.q_norm.weight"),
                ("key", "blocks.{}.attn.k_norm.weight"),
            )
        ),
    ),
    ignored=TABLE.ignored,
)
HUNYUAN_TABLE = replace(
    HUNYUAN_TABLE,
    rows=tuple(
        row
        for row in HUNYUAN_TABLE.rows
        if not row.theirs.endswith(("q_norm.weight", "k_norm.weight"))
    ),
)


def read_hunyuan(config: Config) -> ModelSpec:
    """Read a Hunyuan config: q and k are normalised after their rotation."""
    d_head = optional_whole(config, "head_dim")
    spec = read_stack(
        config,
        bias=switch(config),
        d_head=d_head,
        qk_norm=True,
        rotary=_stretched(config, d_head),
    )
    return each_block(
        spec,
        lambda block, _: replace(block, mixer=replace(block.attention, qk_norm_last=True)),
    )


def _stretched(config: Config, d_head: int | None) -> Rotary | None:
    """Return the rotation of released models: `alpha` stretches the base, whatever the length."""
    table = config.any("rope_scaling", "rope_parameters", default={})
    if not isinstance(table, dict) or not table.get("alpha"):
        return None
    found = Config(table, where=config.where)
    if found.any("rope_type", "type", default="") != "dynamic":
        raise config.bad("rope_scaling", table, "dynamic, where it has 'alpha'")
    base = found.number("rope_theta", default=config.number("rope_theta", default=THETA))
    width = d_head or config.whole("hidden_size") // config.whole("num_attention_heads")
    if width <= 2:
        raise config.bad("head_dim", width, "more than 2, where 'alpha' stretches the base")
    base *= found.number("alpha") ** (width / (width - 2))
    found.finish(harmless=("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"))
    return Rotary(base=base)


def write_hunyuan(spec: ModelSpec) -> dict[str, Any]:
    """Return Hunyuan's config keys."""
    own = {"attention_bias": first_of(spec).bias == "all"}
    return write_stack(spec) | own_width(spec) | own


def read_smollm3(config: Config) -> ModelSpec:
    """Read a SmolLM3 config: layers marked 0 in `no_rope_layers` have no positions."""
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    interval = config.whole("no_rope_layer_interval", default=4)
    marks = config.any(
        "no_rope_layers", default=[int((layer + 1) % interval != 0) for layer in range(layers)]
    )
    if not isinstance(marks, list) or len(marks) != layers:
        raise config.bad("no_rope_layers", marks, f"{layers} of 0 and 1")
    used = config.flag("use_sliding_window", default=False)
    window = optional_whole(config, "sliding_window") if used else None
    slides = window is not None  # then the layers without positions have the window
    kinds = read_kinds(config, absent=[SLIDING if slides and not m else FULL for m in marks])
    spec = read_stack(
        config,
        bias=switch(config),
        d_head=None,
        n_kv_heads=4,
        windows=[window if kind == SLIDING else None for kind in kinds],
        mlp_bias=config.flag("mlp_bias", default=False),
        theta=2_000_000.0,
    )

    def change(block: Block, layer: int) -> Block:
        position = None if marks[layer] else NoPosition()
        return replace(block, mixer=replace(block.attention, position=position))

    return each_block(spec, change)


def write_smollm3(spec: ModelSpec) -> dict[str, Any]:
    """Return SmolLM3's config keys."""
    blocks = list(spec.decoder.blocks())
    return write_stack(spec) | {
        "attention_bias": first_of(spec).bias == "all",
        "mlp_bias": dense(blocks[0].ffn).bias,
        "no_rope_layers": [int(block.attention.position is None) for block in blocks],
        "use_sliding_window": window_of(spec) is not None,
        "sliding_window": window_of(spec),
        "layer_types": kinds_of(spec),
    }


def read_granite(config: Config) -> ModelSpec:
    """Read a Granite config: factors of the embedding, the scores, the residuals, the logits."""
    spec = read_stack(
        config,
        bias=switch(config),
        d_head=optional_whole(config, "head_dim"),
        mlp_bias=config.flag("mlp_bias", default=False),
    )
    return with_multipliers(spec, config)


def with_multipliers(spec: ModelSpec, config: Config) -> ModelSpec:
    """Return the spec with Granite's four factors."""
    scale = config.number("attention_multiplier", default=1.0)
    residual = config.number("residual_multiplier", default=1.0)
    logits = config.number("logits_scaling", default=1.0)
    if logits == 0:
        raise config.bad("logits_scaling", logits, "a number other than 0")
    spec = each_block(
        spec,
        lambda block, _: replace(
            block, residual_scale=residual, mixer=replace(block.attention, scale=scale)
        ),
    )
    return replace(
        spec,
        embedding=ScaledEmbedding(factor=config.number("embedding_multiplier", default=1.0)),
        heads=(replace(head_of(spec), scale=1.0 / logits),),
    )


def multipliers_of(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys that `with_multipliers` reads."""
    factor = spec.embedding.factor if isinstance(spec.embedding, ScaledEmbedding) else None
    return {
        "attention_multiplier": first_of(spec).scale or 1.0,
        "residual_multiplier": block_of(spec.decoder).residual_scale,
        "logits_scaling": 1.0 / head_of(spec).scale,
        "embedding_multiplier": factor or 1.0,
    }


def write_granite(spec: ModelSpec) -> dict[str, Any]:
    """Return Granite's config keys."""
    own = {
        "attention_bias": first_of(spec).bias == "all",
        "mlp_bias": dense(block_of(spec.decoder).ffn).bias,
    }
    return write_stack(spec) | own | multipliers_of(spec)


# --- Phi-3, GLM -----------------------------------------------------------------------------------

PHI3_TABLE = Table(rows=stack_rows(fused=("qkv", "gate_up")), ignored=ROTARY_BUFFERS)


def read_phi3(config: Config) -> ModelSpec:
    """Read a Phi-3 or Phi-4 config: one window or none; LongRoPE up to its original context."""
    window = optional_whole(config, "sliding_window")
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    return read_stack(config, bias="none", d_head=None, windows=(window,) * layers, share=1.0)


def write_phi3(spec: ModelSpec) -> dict[str, Any]:
    """Return Phi-3's config keys; the original context is the one that the model has."""
    original = {"original_max_position_embeddings": spec.max_seq_len}
    return write_stack(spec) | {"sliding_window": first_of(spec).window} | original


def glm_table(norms: dict[str, str]) -> Names:
    """Return a function to a GLM's table, with these norms of a layer."""

    def table(spec: ModelSpec) -> Table:
        rows = stack_rows(norms=norms, fused=("gate_up",), turned=turned_layout(spec))
        return Table(rows=rows, ignored=ROTARY_BUFFERS)

    return table


GLM4_NORMS = {
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "attn_post_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "ffn_post_norm",
}


def read_glm(config: Config) -> ModelSpec:
    """Read a GLM config: half of each head is rotated."""
    bias: Bias = "qkv" if config.flag("attention_bias", default=False) else "none"
    return read_stack(config, bias=bias, d_head=config.whole("head_dim"), share=0.5)


def read_glm4(config: Config) -> ModelSpec:
    """Read a GLM-4 config: GLM's, with norms before and after each part."""
    return each_block(read_glm(config), lambda block, _: replace(block, placement="sandwich"))


def write_glm(spec: ModelSpec) -> dict[str, Any]:
    """Return the config keys of GLM and GLM-4."""
    own = {"attention_bias": first_of(spec).bias == "qkv"}
    return write_stack(spec) | own_width(spec) | own


# --- OLMo 2 and 3 ---------------------------------------------------------------------------------

OLMO2_TABLE = Table(
    rows=stack_rows(
        norms={"post_attention_layernorm": "attn_norm", "post_feedforward_layernorm": "ffn_norm"}
    ),
    ignored=ROTARY_BUFFERS,
)


def _olmo(spec: ModelSpec) -> ModelSpec:
    def change(block: Block, _: int) -> Block:
        attention = replace(block.attention, qk_norm_over="all")
        return replace(block, mixer=attention, placement="output")

    return each_block(spec, change)


def read_olmo2(config: Config) -> ModelSpec:
    """Read an OLMo 2 config: norms on each part's output, and over all of q and k."""
    return _olmo(read_stack(config, bias=switch(config), d_head=None, qk_norm=True))


def write_olmo2(spec: ModelSpec) -> dict[str, Any]:
    """Return OLMo 2's config keys."""
    return write_stack(spec) | {"attention_bias": first_of(spec).bias == "all"}


def read_olmo3(config: Config) -> ModelSpec:
    """Read an OLMo 3 config: OLMo 2 with a window in three layers of four."""
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    usual = [SLIDING if (layer + 1) % 4 else FULL for layer in range(layers)]
    kinds, window = read_kinds(config, absent=usual), config.whole("sliding_window")
    most = config.whole("max_position_embeddings", most=MOST_POSITIONS)
    whole, local = read_rotaries(config, max_seq_len=most, thetas=(500_000.0, 500_000.0))
    spec = read_stack(
        config,
        bias=switch(config),
        d_head=None,
        qk_norm=True,
        windows=[window if kind == SLIDING else None for kind in kinds],
        rotary=whole,
    )
    return _olmo(with_local(spec, local))


def read_exaone4(config: Config) -> ModelSpec:
    """Read an EXAONE 4 config: norms on outputs, q/k-norm, and in the larger models windows.

    Where there is a window, layers without it have no positions.
    """
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    window = optional_whole(config, "sliding_window")
    every = config.any("sliding_window_pattern", default=4)
    every = 1 if window is None else every
    usual: list[str] = []
    if isinstance(every, int) and every > 0:
        usual = [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]
    kinds = read_kinds(config, absent=usual)
    if window is None and SLIDING in kinds:
        raise config.bad("sliding_window", None, f"a whole number where a layer is {SLIDING}")
    spec = read_stack(
        config,
        bias="none",
        d_head=optional_whole(config, "head_dim"),
        qk_norm=True,
        windows=[window if kind == SLIDING else None for kind in kinds],
    )

    def change(block: Block, _: int) -> Block:
        whole = window is not None and block.attention.window is None
        attention = replace(block.attention, position=NoPosition() if whole else None)
        return replace(block, mixer=attention, placement="output")

    return each_block(spec, change)


def write_exaone4(spec: ModelSpec) -> dict[str, Any]:
    """Return EXAONE 4's config keys."""
    blocks = list(spec.decoder.blocks())
    hybrid = any(isinstance(block.attention.position, NoPosition) for block in blocks)
    window = window_of(spec) or (4096 if hybrid else None)
    return write_stack(spec) | {
        "sliding_window": window,
        "sliding_window_pattern": None if window is None else 4,
        "layer_types": kinds_of(spec),
    }


def with_local(spec: ModelSpec, local: Rotary) -> ModelSpec:
    """Return the spec with a rotation of its own in layers that have a window."""

    def change(block: Block, _: int) -> Block:
        own = local if block.attention.window is not None and local != spec.position else None
        return replace(block, mixer=replace(block.attention, position=own))

    return each_block(spec, change)


def write_olmo3(spec: ModelSpec) -> dict[str, Any]:
    """Return OLMo 3's config keys."""
    return _by_layer(spec) | {"attention_bias": first_of(spec).bias == "all"}


def _by_layer(spec: ModelSpec) -> dict[str, Any]:
    """Return the shared keys, with windows and two rotations in the words of transformers 5."""
    keys = write_stack(spec)
    for name in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
        keys.pop(name, None)
    windows = {"sliding_window": window_of(spec) or 4096, "layer_types": kinds_of(spec)}
    return keys | write_rotaries(spec) | windows


# --- Gemma ----------------------------------------------------------------------------------------

GEMMA2_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
}
GEMMA2_TABLE = Table(rows=stack_rows(norms=GEMMA2_NORMS), ignored=ROTARY_BUFFERS)


def _gemma(config: Config, activation: GateActivation, **own: Any) -> ModelSpec:
    """Read what all Gemmas share; `own` is for `read_stack`."""
    if config.any("use_bidirectional_attention", default=None):
        raise config.bad("use_bidirectional_attention", True, "false: it predicts the next token")
    spec = read_stack(
        config,
        bias=switch(config),
        d_head=config.whole("head_dim"),
        norm=RMSNorm(eps=config.number("rms_norm_eps", default=1e-6), offset=True),
        ffn=SwiGLU(d_ff=config.whole("intermediate_size"), activation=activation),
        **own,
    )
    return replace(spec, embedding=ScaledEmbedding())


def read_gemma(config: Config) -> ModelSpec:
    """Read a Gemma config; its GELU is the one by tanh, whatever older files call it."""
    usual = "gelu_pytorch_tanh"
    old, new = (
        read_gate(config, key, default=usual) for key in ("hidden_act", "hidden_activation")
    )
    meant: GateActivation = "gelu_tanh" if old == "gelu" else old
    if config.any("hidden_activation", default=None) is not None and new not in (old, meant):
        raise config.bad(
            "hidden_activation", config.any("hidden_activation"), f"{meant}, as in hidden_act"
        )
    return _gemma(config, meant)


def _gelu(config: Config) -> GateActivation:
    """Read the activation of Gemma 2 and 3."""
    return read_gate(config, "hidden_activation", default="gelu_pytorch_tanh")


def write_gemma(spec: ModelSpec) -> dict[str, Any]:
    """Return Gemma's config keys."""
    word = gate_word(block_of(spec.decoder).ffn)
    own = {"hidden_act": word, "hidden_activation": word}
    return (
        write_stack(spec) | own_width(spec) | own | {"attention_bias": first_of(spec).bias == "all"}
    )


def _capped(spec: ModelSpec, config: Config) -> ModelSpec:
    """Return the spec with Gemma 2's norms around each part, scale and caps."""
    scale = config.number("query_pre_attn_scalar") ** -0.5
    caps = [
        None if config.any(key, default=None) is None else config.number(key)
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    ]

    def change(block: Block, _: int) -> Block:
        attention = replace(block.attention, scale=scale, softcap=caps[0])
        return replace(block, mixer=attention, placement="sandwich")

    return replace(each_block(spec, change), heads=(replace(head_of(spec), softcap=caps[1]),))


def read_gemma2(config: Config) -> ModelSpec:
    """Read a Gemma 2 config: every other layer has a window."""
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    usual = [FULL if layer % 2 else SLIDING for layer in range(layers)]
    kinds, window = read_kinds(config, absent=usual), config.whole("sliding_window")
    windows = [window if kind == SLIDING else None for kind in kinds]
    return _capped(_gemma(config, _gelu(config), windows=windows), config)


def write_gemma2(spec: ModelSpec) -> dict[str, Any]:
    """Return Gemma 2's config keys."""
    keys = write_gemma(spec)
    del keys["hidden_act"]
    return (
        keys
        | _caps(spec)
        | {
            "sliding_window": window_of(spec) or 4096,
            "layer_types": kinds_of(spec),
        }
    )


def _caps(spec: ModelSpec) -> dict[str, Any]:
    attention = first_of(spec)
    scale = attention.scale or attention.head_width(spec.d_model) ** -0.5
    scalar = scale**-2.0
    if abs(round(scalar) - scalar) < 1e-6 and round(scalar) ** -0.5 == scale:
        scalar = round(scalar)
    return {
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": attention.softcap,
        "final_logit_softcapping": head_of(spec).softcap,
    }


def read_gemma3(config: Config) -> ModelSpec:
    """Read a Gemma 3 config: q/k-norm, windows in five layers of six with a base of their own."""
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    every = config.whole("sliding_window_pattern", "_sliding_window_pattern", default=6)
    usual = [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]
    kinds, window = read_kinds(config, absent=usual), config.whole("sliding_window")
    most = config.whole("max_position_embeddings", most=MOST_POSITIONS)
    whole, local = read_rotaries(config, max_seq_len=most, thetas=(1_000_000.0, 10_000.0))
    windows = [window if kind == SLIDING else None for kind in kinds]
    spec = _gemma(config, _gelu(config), windows=windows, qk_norm=True, rotary=whole)
    return _capped(with_local(spec, local), config)


def write_gemma3(spec: ModelSpec) -> dict[str, Any]:
    """Return Gemma 3's config keys."""
    keys, made = write_gemma(spec), _by_layer(spec) | _caps(spec) | own_width(spec)
    del made["hidden_act"]
    same = ("hidden_activation", "attention_bias")
    return made | {key: keys[key] for key in same}


ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    TABLE,
    read_arcee,
    write_arcee,
    defaults={"rms_norm_eps": 1e-5},
)
HUNYUAN = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    HUNYUAN_TABLE,
    read_hunyuan,
    write_hunyuan,
    harmless=(
        *("eod_token_id", "attention_head_dim", "cla_share_factor", "class_num", "dense_list"),
        *("pool_type", "anyres_pooling_size", "anyres_vit_max_image_size"),
    ),
    idle={
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
        "use_cla": False,
        "add_classification_head": False,
        "mlp_bias": False,
        "norm_type": "rms",
    },
    defaults={"rms_norm_eps": 1e-5},
)
SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", TABLE, read_smollm3, write_smollm3)
SMOLLM3 = replace(
    SMOLLM3,
    harmless=("max_window_layers",),
    defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": True},
)
GRANITE = Family("granite", "GraniteForCausalLM", TABLE, read_granite, write_granite)
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    PHI3_TABLE,
    read_phi3,
    write_phi3,
    harmless=("original_max_position_embeddings",),
    idle={
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attention_bias": False,
        "mlp_bias": False,
        "lm_head_bias": False,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
    },
    remote_code=True,
    defaults={"rms_norm_eps": 1e-5},
)
GLM = Family(
    "glm",
    "GlmForCausalLM",
    glm_table(dict(NORMS)),
    read_glm,
    write_glm,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
    },
)
GLM4 = replace(
    GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    table=glm_table(GLM4_NORMS),
    read=read_glm4,
)
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    OLMO2_TABLE,
    read_olmo2,
    write_olmo2,
    defaults={"rms_norm_eps": 1e-5},
)
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    OLMO2_TABLE,
    read_olmo3,
    write_olmo3,
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
)
EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    OLMO2_TABLE,
    read_exaone4,
    write_exaone4,
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "num_key_value_heads": 32},
)
GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    TABLE,
    read_gemma,
    write_gemma,
    defaults=GEMMA_DEFAULTS | {"num_key_value_heads": 16},
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    GEMMA2_TABLE,
    read_gemma2,
    write_gemma2,
    harmless=("hidden_act",),
    defaults=GEMMA_DEFAULTS
    | {
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    GEMMA2_TABLE,
    read_gemma3,
    write_gemma3,
    defaults=GEMMA_DEFAULTS
    | {"num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096},
)
RELATIVES = (
    *(GEMMA, GEMMA2, GEMMA3),
    *(PHI3, OLMO2, OLMO3, SMOLLM3, GRANITE, GLM, GLM4, ARCEE, HUNYUAN),
)
