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
from glassformer.adapters.table import QKV, Family
from glassformer.spec.errors import InputError
from glassformer.spec.model import LayerNorm, ModelSpec

#: Ours by llama.cpp's name; several of ours are stacked by rows.
Parts = Mapping[str, str | tuple[str, ...]]
#: A config in words of its family's own, made of the common ones and the names of the tensors.
Translation = Callable[[dict[str, Any], Collection[str]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What llama.cpp calls the parts and settings of a family, and what it always has.

    `wholes`, `numbers` and `flags` are settings beside sizes and the norms' constant, GGUF's key
    and config.json's; `fixed` is what every model of the architecture has, `biases` which tensor
    shows a switch. `turned`: rows of q and k are rotary neighbours. `part`: the key of the rotated
    part of a head. `window`: files have one. `width`: a further key that has the width of a head.
    `shifted`: gains are stored plus 1. `called` is GGUF's name where it is not that of the entry.
    `parts` may depend on the spec. `translated` changes the config, which then has the number of
    keys and values as `num_key_value_heads`.
    """

    family: Family
    wholes: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    parts: Parts | Callable[[ModelSpec], Parts] = field(default_factory=dict)
    turned: bool = False
    part: str = ""
    window: bool = False
    width: str = ""
    shifted: bool = False
    called: str = ""
    translated: Translation | None = None

    @property
    def rotary(self) -> bool:
        """Whether positions are rotations."""
        return "rope" in self.family.keys

    @property
    def eps(self) -> tuple[str, str]:
        """The keys of the norms' constant: config.json's, and GGUF's."""
        own = self.family.key_of("norm.eps")
        assert own is not None
        layered = self.family.fixed.get("norm") is LayerNorm
        return own, f"attention.layer_norm_{'' if layered else 'rms_'}epsilon"

    def name(self, entry: str) -> str:
        """Return GGUF's name of the architecture under this entry."""
        return self.called or entry

    def parts_of(self, spec: ModelSpec) -> Parts:
        """Return the names of the parts of a spec."""
        return self.parts(spec) if callable(self.parts) else self.parts


# --- families that say other things than sizes in words of their own ------------------------------


def mpt_config(config: dict[str, Any], _: Collection[str]) -> dict[str, Any]:
    """Return MPT's config; its largest linear bias is in a table."""
    same_heads(config)
    most = config.pop("alibi_bias_max")
    return {**config, "attn_config": {"alibi": True, "alibi_bias_max": most}}


def same_heads(config: dict[str, Any]) -> None:
    """Require a key for each head of a family that has no number of keys."""
    keys, heads = config.pop("num_key_value_heads"), config.get("n_heads", config.get("n_head"))
    if keys != heads:
        raise InputError(f"head_count_kv: {keys}, and what is read here has {heads}")


def starcoder_config(config: dict[str, Any], _: Collection[str]) -> dict[str, Any]:
    """Return StarCoder's config: one key for all heads, or one for each."""
    alone = config["num_key_value_heads"] == 1 < config["n_head"]
    if alone:
        del config["num_key_value_heads"]
    else:
        same_heads(config)
    return config | {"multi_query": alone}


def falcon_config(config: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Return Falcon's config: a second norm, or several keys, are those of the later ones."""
    keys, heads = config.pop("num_key_value_heads"), config["num_attention_heads"]
    two = "blk.0.attn_norm_2.weight" in tensors
    new = two or keys not in (1, heads)
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


GATES = ("ffn.gate_proj", "ffn.up_proj")
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
    "width": "query_pre_attn_scalar",
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
    "qwen3": Architecture(qwen.QWEN3),
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
    ),
    "starcoder2": Architecture(
        layernorm.STARCODER2,
        fixed={"sliding_window": None, "use_bias": True},
    ),
    "stablelm": Architecture(
        layernorm.STABLELM,
        flags={"use_parallel_residual": "use_parallel_residual"},
        biases={"use_qkv_bias": Q_BIAS},
        part="partial_rotary_factor",
    ),
    "gptneox": Architecture(
        layernorm.NEOX_FAMILY,
        flags={"use_parallel_residual": "use_parallel_residual"},
        parts=FUSED,
        biases={"attention_bias": "blk.0.attn_qkv.bias"},
        part="rotary_pct",
    ),
    "command-r": Architecture(
        layernorm.COHERE,
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
        part="partial_rotary_factor",
        turned=True,
    ),
    "gemma2": Architecture(relatives.GEMMA2, numbers=CAPS, **GEMMAS),
    "gemma3": Architecture(
        relatives.GEMMA3,
        fixed={"attn_logit_softcapping": None, "final_logit_softcapping": None},
        **GEMMAS,
    ),
    "gemma": Architecture(relatives.GEMMA, shifted=True),
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
    ),
    "ernie4_5": Architecture(llama.ERNIE, turned=True, biases={"use_bias": Q_BIAS}),
    "exaone4": Architecture(
        relatives.EXAONE4,
        parts=AFTER,
        fixed={"sliding_window": None},
    ),
    "hunyuan-dense": Architecture(relatives.HUNYUAN, fixed={"attention_bias": False}),
    "smollm3": Architecture(relatives.SMOLLM3, turned=True),
    "cohere2": Architecture(
        layernorm.COHERE2,
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
        window=True,
        translated=gpt_oss_config,
    ),
    "phi2": Architecture(
        layernorm.PHI,
        parts=FUSED,
        part="partial_rotary_factor",
    ),
    "falcon": Architecture(
        layernorm.FALCON,
        parts=falcon_parts,
        translated=falcon_config,
    ),
    "bloom": Architecture(
        layernorm.BLOOM,
        parts=FUSED,
    ),
    "mpt": Architecture(
        layernorm.MPT,
        numbers={"attention.max_alibi_bias": "alibi_bias_max"},
        parts=FUSED,
        translated=mpt_config,
    ),
    "gpt2": Architecture(
        gpt2.GPT2,
        parts=FUSED,
    ),
    "starcoder": Architecture(
        layernorm.BIGCODE,
        parts=FUSED,
        translated=starcoder_config,
    ),
}
FAMILIES = {kind: one.family for kind, one in ARCHITECTURES.items()}
