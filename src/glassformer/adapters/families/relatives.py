"""Relatives of Llama: RMSNorm and rotary positions, with parts of their own.

Arcee (squared ReLU), Hunyuan (q/k-norm after the rotation), SmolLM3 (layers without positions),
Granite (four multipliers), Phi-3 and 4 (fused projections, LongRoPE), OLMo 2 and 3 (norms on
outputs, q/k-norm over all heads), EXAONE 4 (norms on outputs, no positions where there is no
window), GLM and GLM-4 (neighbouring pairs of half a head, norms around), and Gemma 1 to 3 (offset
norms around each part, GeGLU, caps, windows with a base of their own).
"""

from dataclasses import replace
from typing import Any

from glassformer.adapters.config import Config
from glassformer.adapters.families.llama import (
    BIAS,
    BIASES,
    HEAD_DIM,
    KEYS,
    ROPE,
    TABLE,
    WIDTH,
    WINDOW,
    llama_table,
)
from glassformer.adapters.families.rotary import (
    FULL,
    SLIDING,
    THETA,
    kinds_of,
    read_kinds,
    rope,
    ropes,
    slide,
    window_of,
    windows,
)
from glassformer.adapters.keys import (
    GATES,
    Facts,
    Key,
    Own,
    flag,
    number,
    optional,
    optional_whole,
    value_of,
    without,
    word,
)
from glassformer.adapters.table import Family, turned
from glassformer.spec.model import (
    MLP,
    ModelSpec,
    NoPosition,
    RMSNorm,
    Rotary,
    ScaledEmbedding,
)

ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    TABLE,
    KEYS
    | HEAD_DIM
    | BIASES
    | ROPE
    | {"hidden_act": word("ffn.activation", words={"relu2": "relu2"}, default="relu2")},
    {"ffn": MLP},
    defaults={"rms_norm_eps": 1e-5},
)


# --- Hunyuan, SmolLM3 -----------------------------------------------------------------------------


def _read_stretched(config: Config, facts: Facts) -> None:
    """In released models `alpha` stretches the base, whatever the length."""
    table = config.any("rope_scaling", "rope_parameters", default={})
    if not isinstance(table, dict) or not table.get("alpha"):
        ROPE["rope"].reading(config, facts)
        return
    found = Config(table, where=config.where)
    if found.any("rope_type", "type", default="") != "dynamic":
        raise config.bad("rope_scaling", table, "dynamic, where it has 'alpha'")
    base = found.number("rope_theta", default=config.number("rope_theta", default=THETA))
    width = facts["attn.d_head"] or facts["d_model"] // facts["attn.n_heads"]
    if width <= 2 or width % 2:
        raise config.bad(
            "head_dim", width, "even and more than 2, where 'alpha' stretches the base"
        )
    base *= found.number("alpha") ** (width / (width - 2))
    found.finish(harmless=("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"))
    facts["position"] = Rotary(base=base)


HUNYUAN = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    llama_table(
        qk_norms={
            "self_attn.query_layernorm": "attn.q_norm",
            "self_attn.key_layernorm": "attn.k_norm",
        }
    ),
    KEYS
    | {"head_dim": optional("attn.d_head", written="attn.width")}
    | BIAS
    | {"rope": Own(_read_stretched, ROPE["rope"].writing)},
    {"qk_norm": True, "attn.qk_norm_last": True},
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


def _read_smollm3(config: Config, facts: Facts) -> None:
    """Layers marked 0 in `no_rope_layers` have no positions."""
    layers = facts["layers"]
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
    slide(facts, kinds, window)
    facts["each.attn.position"] = [None if mark else NoPosition() for mark in marks]


def _write_smollm3(spec: ModelSpec) -> dict[str, Any]:
    blocks = spec.decoder.blocks()
    return {
        "no_rope_layers": [int(block.attention.position is None) for block in blocks],
        "use_sliding_window": window_of(spec) is not None,
        "sliding_window": window_of(spec),
        "layer_types": kinds_of(spec),
    }


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    TABLE,
    KEYS | BIASES | {"rope": rope(theta=2_000_000.0), "layers": Own(_read_smollm3, _write_smollm3)},
    harmless=("max_window_layers",),
    defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "num_key_value_heads": 4},
)


# --- Granite, Phi-3, GLM --------------------------------------------------------------------------


def _divisor(config: Config, *names: str, default: Any) -> float:
    value = config.number(*names, default=default)
    if value == 0:
        raise config.bad(names[0], value, "a number other than 0")
    return 1.0 / value


#: Factors of the scores, the residuals, the logits and the embedding.
MULTIPLIERS = {
    "attention_multiplier": number("attn.scale", default=1.0),
    "residual_multiplier": number("block.residual_scale", default=1.0),
    "logits_scaling": Key(
        fields=("head.scale",), ask=_divisor, default=1.0, outward=lambda scale: 1.0 / scale
    ),
    "embedding_multiplier": number("embedding.factor", default=1.0),
}
GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    TABLE,
    KEYS | HEAD_DIM | BIASES | ROPE | MULTIPLIERS,
    {"embedding": ScaledEmbedding},
)
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    llama_table(fused=("qkv", "gate_up")),
    KEYS
    | WINDOW
    | {
        "rope": rope(share=1.0),
        # The original context is the one that the model has: LongRoPE's short factors.
        "context": Own(
            lambda *_: None,
            lambda spec: {"original_max_position_embeddings": spec.max_seq_len},
        ),
    },
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
    llama_table(fused=("gate_up",), qk=turned),
    KEYS
    | WIDTH
    | {
        "attention_bias": flag("attn.bias", default=False, yes="qkv", no="none"),
        "rope": rope(share=0.5),
    },
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
    table=llama_table(
        norms={
            "input_layernorm": "attn_norm",
            "post_self_attn_layernorm": "attn_post_norm",
            "post_attention_layernorm": "ffn_norm",
            "post_mlp_layernorm": "ffn_post_norm",
        },
        fused=("gate_up",),
        qk=turned,
    ),
    fixed={"block.placement": "sandwich"},
)


# --- OLMo 2 and 3, EXAONE 4 -----------------------------------------------------------------------

OLMO = {"qk_norm": True, "attn.qk_norm_over": "all", "block.placement": "output"}
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    llama_table(
        norms={"post_attention_layernorm": "attn_norm", "post_feedforward_layernorm": "ffn_norm"}
    ),
    KEYS | BIAS | ROPE,
    OLMO,
    defaults={"rms_norm_eps": 1e-5},
)
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    OLMO2.table,
    KEYS | BIAS | {"windows": windows(4), "rope": ropes(500_000.0, 500_000.0)},
    OLMO,
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
)


def _read_exaone4(config: Config, facts: Facts) -> None:
    """Where there is a window (in the larger models), layers without it have no positions."""
    window = optional_whole(config, "sliding_window")
    every = config.any("sliding_window_pattern", default=4)
    every = 1 if window is None else every
    usual: list[str] = []
    if isinstance(every, int) and every > 0:
        usual = [SLIDING if (layer + 1) % every else FULL for layer in range(facts["layers"])]
    kinds = read_kinds(config, absent=usual)
    if window is None and SLIDING in kinds:
        raise config.bad("sliding_window", None, f"a whole number where a layer is {SLIDING}")
    slide(facts, kinds, window)
    bare = NoPosition() if window else None
    facts["each.attn.position"] = [bare if kind == FULL else None for kind in kinds]


def _write_exaone4(spec: ModelSpec) -> dict[str, Any]:
    bare = any(isinstance(b.attention.position, NoPosition) for b in spec.decoder.blocks())
    window = window_of(spec) or (4096 if bare else None)
    return {
        "sliding_window": window,
        "sliding_window_pattern": None if window is None else 4,
        "layer_types": kinds_of(spec),
    }


EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    OLMO2.table,
    KEYS | HEAD_DIM | ROPE | {"windows": Own(_read_exaone4, _write_exaone4)},
    {"qk_norm": True, "block.placement": "output"},
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "num_key_value_heads": 32},
)


# --- Gemma ----------------------------------------------------------------------------------------


def _one_way(config: Config, _: Facts) -> None:
    if config.any("use_bidirectional_attention", default=None):
        raise config.bad("use_bidirectional_attention", True, "false: it predicts the next token")


def _read_gelu(config: Config, facts: Facts) -> None:
    """Gemma's GELU is the one by tanh, whatever older files call it."""
    each = ("hidden_act", "hidden_activation")
    old, new = (
        GATES[config.one_of(key, {w: w for w in GATES}, default="gelu_pytorch_tanh")]
        for key in each
    )
    meant = "gelu_tanh" if old == "gelu" else old
    if config.any("hidden_activation", default=None) is not None and new not in (old, meant):
        raise config.bad(
            "hidden_activation", config.any("hidden_activation"), f"{meant}, as in hidden_act"
        )
    facts["ffn.activation"] = meant


ACTIVATION = word("ffn.activation", words=GATES, default="gelu_pytorch_tanh")


def _write_gelu(spec: ModelSpec) -> dict[str, Any]:
    return {**ACTIVATION.write("hidden_act", spec), **ACTIVATION.write("hidden_activation", spec)}


def _write_scalar(spec: ModelSpec) -> dict[str, Any]:
    """A whole number where that has this scale."""
    scale = value_of(spec, "attn.scale") or value_of(spec, "attn.width") ** -0.5
    scalar = scale**-2.0
    if abs(round(scalar) - scalar) < 1e-6 and round(scalar) ** -0.5 == scale:
        scalar = round(scalar)
    return {"query_pre_attn_scalar": scalar}


def _read_scalar(config: Config, facts: Facts) -> None:
    facts["attn.scale"] = config.number("query_pre_attn_scalar") ** -0.5


GEMMA_KEYS = KEYS | WIDTH | BIAS | {"direction": Own(_one_way)}
GEMMA_FIXED = {"norm": RMSNorm, "norm.offset": True, "embedding": ScaledEmbedding}
GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    TABLE,
    GEMMA_KEYS | ROPE | {"hidden_act": Own(_read_gelu, _write_gelu)},
    GEMMA_FIXED,
    defaults=GEMMA_DEFAULTS | {"num_key_value_heads": 16},
)
GEMMA2_KEYS = without(GEMMA_KEYS, "hidden_act") | {
    "hidden_activation": ACTIVATION,
    "scale": Own(_read_scalar, _write_scalar),
    "attn_logit_softcapping": optional("attn.softcap", ask=Config.number),
    "final_logit_softcapping": optional("head.softcap", ask=Config.number),
}
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    llama_table(
        norms={
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "attn_post_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "ffn_post_norm",
        }
    ),
    GEMMA2_KEYS | ROPE | {"windows": windows(2)},
    GEMMA_FIXED | {"block.placement": "sandwich"},
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
    GEMMA2.table,
    GEMMA2_KEYS
    | {
        "windows": windows(6, "sliding_window_pattern", "_sliding_window_pattern"),
        "rope": ropes(1_000_000.0, 10_000.0),
    },
    GEMMA2.fixed | {"qk_norm": True},
    defaults=GEMMA_DEFAULTS
    | {"num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096},
)
