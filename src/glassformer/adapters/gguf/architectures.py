"""What llama.cpp calls the parts and settings of each family, and what its code takes for granted.

`ARCHITECTURES` has an entry for each of them. llama.cpp's code knows more than its files say (the
windows of Gemma, whether weights of experts are normalised), and that is `fixed` there, or done by
`translated`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from glassformer.adapters.config import block_of
from glassformer.adapters.families import experts, gpt2, layernorm, llama, qwen, relatives
from glassformer.adapters.table import Family
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

RMS, LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
#: Ours by llama.cpp's name; several of ours are stacked by rows.
Parts = Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What llama.cpp calls the parts and settings of a family, and what it always has.

    `eps` is config.json's key of the norms' constant, and GGUF's; `wholes`, `numbers` and `flags`
    are further settings, GGUF's key and config.json's; `fixed` is what every model of the
    architecture has, `biases` which tensor shows a switch. `turned`: rows of q and k are rotary
    neighbours. `part`: the key of the rotated part of a head. `window`: files have one. `width`:
    the key that has the width of a head, whatever it is. `shifted`: gains are stored plus 1.
    `called` is GGUF's name where it is not that of the entry; `rotary`: positions are rotations.
    `parts` may depend on the spec. `translated` makes a family's config of one in common words and
    of the names of the file's tensors.
    """

    family: Family
    eps: tuple[str, str] = ("rms_norm_eps", RMS)
    wholes: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    parts: Parts | Callable[[ModelSpec], Parts] = field(default_factory=dict)
    turned: bool = False
    part: str = ""
    window: bool = False
    widths: tuple[str, ...] = ()
    shifted: bool = False
    called: str = ""
    rotary: bool = True
    translated: Callable[[dict[str, Any], Collection[str]], dict[str, Any]] | None = None

    def name(self, entry: str) -> str:
        """Return GGUF's name of the architecture under this entry."""
        return self.called or entry

    def parts_of(self, spec: ModelSpec) -> Parts:
        """Return the names of the parts of a spec."""
        return self.parts(spec) if callable(self.parts) else self.parts


# --- families that say their sizes in words of their own ------------------------------------------


def bloom_config(config: dict[str, Any], _: Collection[str]) -> dict[str, Any]:
    """Return Bloom's config: its feed-forwards are four times as wide, each head has a key."""
    _as_in("feed_forward_length", config.pop("intermediate_size"), 4 * config["hidden_size"])
    _as_in("head_count_kv", config.pop("num_key_value_heads"), config["num_attention_heads"])
    names = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    names["max_position_embeddings"] = "seq_length"
    return {names.get(key, key): value for key, value in config.items()}


def mpt_config(config: dict[str, Any], _: Collection[str]) -> dict[str, Any]:
    """Return MPT's config; its largest linear bias is in a table."""
    _as_in("head_count_kv", config.pop("num_key_value_heads"), config["num_attention_heads"])
    _as_in("feed_forward_length", config.pop("intermediate_size"), 4 * config["hidden_size"])
    most = config.pop("alibi_bias_max")
    names = {"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    names |= {"max_position_embeddings": "max_seq_len", "hidden_size": "d_model"}
    return {
        **{names.get(key, key): value for key, value in config.items()},
        "attn_config": {"alibi": True, "alibi_bias_max": most},
    }


def gpt2_config(config: dict[str, Any], _: Collection[str]) -> dict[str, Any]:
    """Return GPT-2's config."""
    _as_in("head_count_kv", config.pop("num_key_value_heads"), config["num_attention_heads"])
    return {GPT2_NAMES.get(key, key): value for key, value in config.items()}


def starcoder_config(config: dict[str, Any], _: Collection[str]) -> dict[str, Any]:
    """Return StarCoder's config: one key for all heads, or one for each."""
    keys, heads = config.pop("num_key_value_heads"), config["num_attention_heads"]
    if keys != 1:
        _as_in("head_count_kv", keys, heads)
    made = {GPT2_NAMES.get(key, key): value for key, value in config.items()}
    return made | {"multi_query": keys == 1 < heads}


GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}


def falcon_config(config: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Return Falcon's config: a second norm, or several keys, are those of the later ones."""
    keys, heads = config.pop("num_key_value_heads"), config["num_attention_heads"]
    two = "blk.0.attn_norm_2.weight" in tensors
    new = two or keys not in (1, heads)
    config["ffn_hidden_size"] = config.pop("intermediate_size")
    return config | {
        "num_kv_heads": keys,
        "multi_query": keys == 1,
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": (2 if two else 1) if new else None,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
    }


def falcon_parts(spec: ModelSpec) -> Parts:
    """Return Falcon's parts; of two norms, the first is the feed-forward's."""
    if block_of(spec.decoder).placement != "parallel":
        return FUSED
    return {**FUSED, "attn_norm": "ffn_norm", "attn_norm_2": "attn_norm"}


def gpt_oss_config(config: dict[str, Any], _: Collection[str]) -> dict[str, Any]:
    """Return gpt-oss's config: the ranges of its YaRN are not rounded, which files do not say."""
    scaling = config["rope_scaling"] or {}
    yarn = {"truncate": False} if scaling.get("rope_type") == "yarn" else {}
    config["rope_parameters"] = {"rope_type": "default", **scaling, **yarn}
    config["rope_parameters"]["rope_theta"] = config.pop("rope_theta")
    del config["rope_scaling"]
    return config


def _as_in(key: str, value: int, wanted: int) -> None:
    if value != wanted:
        raise InputError(f"{key}: {value}, and what is read here has {wanted}")


GATES = ("ffn.gate_proj", "ffn.up_proj")
QKV = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
AROUND = {
    "post_attention_norm": "attn_post_norm",
    "post_ffw_norm": "ffn_post_norm",
}
AFTER = {"post_attention_norm": "attn_norm", "post_ffw_norm": "ffn_norm"}
FUSED = {"attn_qkv": QKV}
SPARSE = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
LOCAL_SPARSE = SPARSE | {"expert_count": "num_local_experts"}
WIDE_EXPERTS = {"expert_feed_forward_length": "moe_intermediate_size"}
Q_BIAS = "blk.0.attn_q.bias"
GATED_BIASES = {"attention_bias": Q_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"}
EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}
MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GEMMAS: dict[str, Any] = {
    "parts": AROUND,
    "window": True,
    "widths": ("head_dim", "query_pre_attn_scalar"),
    "shifted": True,
}
#: By GGUF's name. llama.cpp's own Llama reads Mistral's files too, without their window.
ARCHITECTURES = {
    "llama": Architecture(
        llama.LLAMA,
        turned=True,
        biases=GATED_BIASES,
    ),
    "qwen2": Architecture(qwen.QWEN2),
    "qwen3": Architecture(qwen.QWEN3, widths=("head_dim",)),
    "granite": Architecture(
        relatives.GRANITE,
        turned=True,
        numbers=MULTIPLIERS,
        biases=GATED_BIASES,
    ),
    "granitemoe": Architecture(
        experts.GRANITE_MOE,
        turned=True,
        wholes=LOCAL_SPARSE,
        numbers=MULTIPLIERS,
        biases={"attention_bias": Q_BIAS},
    ),
    "olmo2": Architecture(relatives.OLMO2, parts=AFTER),
    "olmoe": Architecture(experts.OLMOE, wholes=SPARSE, fixed={"norm_topk_prob": False}),
    "qwen2moe": Architecture(
        experts.QWEN2_MOE,
        wholes=SPARSE
        | WIDE_EXPERTS
        | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        fixed=EVERY_LAYER | {"norm_topk_prob": False},
        biases={"qkv_bias": Q_BIAS},
    ),
    "qwen3moe": Architecture(
        experts.QWEN3_MOE,
        wholes=SPARSE | WIDE_EXPERTS,
        fixed=EVERY_LAYER | {"norm_topk_prob": True},
        widths=("head_dim",),
    ),
    "starcoder2": Architecture(
        layernorm.STARCODER2,
        eps=("norm_epsilon", LAYER_NORM),
        fixed={"sliding_window": None, "use_bias": True},
    ),
    "stablelm": Architecture(
        layernorm.STABLELM,
        eps=("layer_norm_eps", LAYER_NORM),
        flags={"use_parallel_residual": "use_parallel_residual"},
        biases={"use_qkv_bias": Q_BIAS},
        part="partial_rotary_factor",
    ),
    "gptneox": Architecture(
        layernorm.NEOX_FAMILY,
        eps=("layer_norm_eps", LAYER_NORM),
        flags={"use_parallel_residual": "use_parallel_residual"},
        parts=FUSED,
        biases={"attention_bias": "blk.0.attn_qkv.bias"},
        part="rotary_pct",
    ),
    "command-r": Architecture(
        layernorm.COHERE,
        eps=("layer_norm_eps", LAYER_NORM),
        numbers={"logit_scale": "logit_scale"},
        biases={"attention_bias": Q_BIAS},
        turned=True,
    ),
    "phi3": Architecture(
        relatives.PHI3, parts={"attn_qkv": QKV, "ffn_up": GATES}, part="partial_rotary_factor"
    ),
    "glm4": Architecture(
        relatives.GLM4,
        parts=AROUND | {"ffn_up": GATES},
        biases={"attention_bias": Q_BIAS},
        widths=("head_dim",),
        part="partial_rotary_factor",
        turned=True,
    ),
    "gemma2": Architecture(relatives.GEMMA2, numbers=CAPS, **GEMMAS),
    "gemma3": Architecture(
        relatives.GEMMA3,
        fixed={"attn_logit_softcapping": None, "final_logit_softcapping": None},
        **GEMMAS,
    ),
    "gemma": Architecture(relatives.GEMMA, widths=("head_dim",), shifted=True),
    "mixtral": Architecture(
        experts.MIXTRAL,
        called="llama",
        turned=True,
        wholes=LOCAL_SPARSE,
        fixed={"sliding_window": None},
    ),
    "arcee": Architecture(
        relatives.ARCEE,
        turned=True,
        biases={"attention_bias": Q_BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
    ),
    "seed_oss": Architecture(
        llama.SEED_OSS,
        parts={"post_attention_norm": "ffn_norm"},
        biases={"attention_bias": Q_BIAS, "attention_out_bias": "blk.0.attn_output.bias"},
        widths=("head_dim",),
    ),
    "ernie4_5": Architecture(
        llama.ERNIE, turned=True, biases={"use_bias": Q_BIAS}, widths=("head_dim",)
    ),
    "exaone4": Architecture(
        relatives.EXAONE4,
        parts=AFTER,
        fixed={"sliding_window": None},
    ),
    "hunyuan-dense": Architecture(relatives.HUNYUAN, fixed={"attention_bias": False}),
    "smollm3": Architecture(relatives.SMOLLM3, turned=True),
    "cohere2": Architecture(
        layernorm.COHERE2,
        eps=("layer_norm_eps", LAYER_NORM),
        numbers={"logit_scale": "logit_scale"},
        biases={"attention_bias": Q_BIAS},
        turned=True,
        window=True,
    ),
    "gpt-oss": Architecture(
        experts.GPT_OSS,
        wholes=LOCAL_SPARSE | {"expert_feed_forward_length": "intermediate_size"},
        parts={"post_attention_norm": "ffn_norm"},
        biases={"attention_bias": Q_BIAS},
        widths=("head_dim",),
        window=True,
        translated=gpt_oss_config,
    ),
    "phi2": Architecture(
        layernorm.PHI,
        eps=("layer_norm_eps", LAYER_NORM),
        parts=FUSED,
        part="partial_rotary_factor",
    ),
    "falcon": Architecture(
        layernorm.FALCON,
        eps=("layer_norm_epsilon", LAYER_NORM),
        parts=falcon_parts,
        translated=falcon_config,
    ),
    "bloom": Architecture(
        layernorm.BLOOM,
        eps=("layer_norm_epsilon", LAYER_NORM),
        parts=FUSED,
        rotary=False,
        translated=bloom_config,
    ),
    "mpt": Architecture(
        layernorm.MPT,
        eps=("layer_norm_epsilon", LAYER_NORM),
        numbers={"attention.max_alibi_bias": "alibi_bias_max"},
        parts=FUSED,
        rotary=False,
        translated=mpt_config,
    ),
    "gpt2": Architecture(
        gpt2.GPT2,
        eps=("layer_norm_epsilon", LAYER_NORM),
        parts=FUSED,
        rotary=False,
        translated=gpt2_config,
    ),
    "starcoder": Architecture(
        layernorm.BIGCODE,
        eps=("layer_norm_epsilon", LAYER_NORM),
        parts=FUSED,
        rotary=False,
        translated=starcoder_config,
    ),
}
FAMILIES = {kind: one.family for kind, one in ARCHITECTURES.items()}
