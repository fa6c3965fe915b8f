"""Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, Granite-MoE, gpt-oss.

Files hold each expert's matrices by themselves; a live module of transformers 5 holds all experts
of a layer in two tensors, so these families have a second table.
"""

from typing import Any

from glassformer.adapters.config import Config
from glassformer.adapters.families.llama import (
    BIAS,
    HEAD_DIM,
    KEYS,
    LAYER,
    ROPE,
    WIDTH,
    WINDOW,
    llama_table,
)
from glassformer.adapters.families.qwen import qwen_windows
from glassformer.adapters.families.relatives import MULTIPLIERS
from glassformer.adapters.families.rotary import rope, windows
from glassformer.adapters.keys import (
    GATES,
    Facts,
    Own,
    flag,
    mixture_of,
    number,
    optional,
    optional_whole,
    value_of,
    whole,
    word,
)
from glassformer.adapters.table import Experts, Family, Row, Table, named
from glassformer.spec.model import Clamp, ModelSpec, MoE, ScaledEmbedding

FFN = "blocks.{}.ffn."
GATE, UP, DOWN = (f"{FFN}experts.*.{part}_proj.weight" for part in ("gate", "up", "down"))
SHARED = {
    f"shared_expert.{part}_proj": f"ffn.shared_expert.{part}_proj"
    for part in ("gate", "up", "down")
}


def experts_table(
    part: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Table:
    """Return the names of a file in which each expert has its own; `part` holds them."""
    rows = zip((gate, up, down), (GATE, UP, DOWN), strict=True)
    files = (Row(f"{LAYER}{part}.experts.*.{name}.weight", ours) for name, ours in rows)
    return _sparse(part, *files)


def stacked_table(
    part: str,
    *,
    gate_up: str = "experts.gate_up_proj",
    down: str = "experts.down_proj",
    router: str = "gate",
) -> Table:
    """Return names with which all experts of a layer are in two tensors."""
    return _sparse(
        part,
        Row(f"{LAYER}{part}.{gate_up}", (GATE, UP), Experts(per=2)),
        Row(f"{LAYER}{part}.{down}", (DOWN,), Experts()),
        router=router,
    )


def _sparse(part: str, *experts: Row, router: str = "gate") -> Table:
    names = {router: "ffn.gate", **SHARED, "shared_expert_gate": "ffn.shared_expert_gate"}
    return llama_table(more=(*named(names, layer=f"{LAYER}{part}."), *experts))


QWEN_TABLE, QWEN_LIVE = experts_table("mlp"), stacked_table("mlp")


def mixture(name: str) -> dict[str, Any]:
    """Return the entries of a mixture; the number of experts has one of two names, by version."""

    def read(config: Config, facts: Facts) -> None:
        names = ("num_local_experts", "num_experts")
        experts, used = config.whole(*names), config.whole("num_experts_per_tok")
        if experts < 2:
            raise config.bad(next(n for n in names if config.has(n)), experts, "2 or more")
        if used == 1 and facts["moe.normalize"]:
            what = "2 or more where their weights are normalised: that of a single one is always 1"
            raise config.bad("num_experts_per_tok", used, what)
        facts |= {"moe.n_experts": experts, "moe.experts_per_token": used}

    def write(spec: ModelSpec) -> dict[str, Any]:
        own = mixture_of(spec)
        return {name: own.n_experts, "num_experts_per_tok": own.experts_per_token}

    return {
        "experts": Own(read, write),
        "router_aux_loss_coef": number("moe.balance", default=0.001),
        "output_router_logits": False,
    }


#: A switch that adds the balance loss to the output; the logits do not depend on it.
HARMLESS = ("output_router_logits",)
NORMALIZED = {"moe.normalize": True}
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    experts_table("block_sparse_moe", "w1", "w3", "w2"),
    KEYS
    | HEAD_DIM
    | WINDOW
    | mixture("num_local_experts")
    | {"rope": rope(theta=1_000_000.0), "router_jitter_noise": 0.0},
    NORMALIZED,
    harmless=HARMLESS,
    idle={"router_jitter_noise": 0.0},
    defaults={
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    },
    live=stacked_table("mlp"),
)
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    QWEN_TABLE,
    KEYS
    | BIAS
    | ROPE
    | {"norm_topk_prob": flag("moe.normalize", default=False)}
    | mixture("num_experts"),
    {"qk_norm": True, "attn.qk_norm_over": "all"},
    harmless=HARMLESS,
    defaults={
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-5,
        "router_aux_loss_coef": 0.01,
    },
    live=QWEN_LIVE,
)


# --- Qwen -----------------------------------------------------------------------------------------


def _read_dense(config: Config, facts: Facts) -> None:
    """Experts are in every `decoder_sparse_step`-th layer but some by name."""
    step = config.whole("decoder_sparse_step", default=1)
    plain = config.any("mlp_only_layers", default=[])
    if not isinstance(plain, list):
        raise config.bad("mlp_only_layers", plain, "a list of layers")
    facts["each.dense"] = [n in plain or (n + 1) % step != 0 for n in range(facts["layers"])]


def _write_dense(spec: ModelSpec) -> dict[str, Any]:
    blocks = enumerate(spec.decoder.blocks())
    plain = [layer for layer, block in blocks if not isinstance(block.ffn, MoE)]
    width = value_of(spec, "dense.d_ff") or value_of(spec, "ffn.d_ff")
    return {"decoder_sparse_step": 1, "mlp_only_layers": plain, "intermediate_size": width}


QWEN_MOE = (
    KEYS
    | {
        "hidden_act": word(
            *("ffn.activation", "dense.activation", "shared.activation"),
            words=GATES,
            default="silu",
        ),
        "moe_intermediate_size": whole("ffn.d_ff"),
        "intermediate_size": whole("dense.d_ff"),
        "norm_topk_prob": flag("moe.normalize"),
        "dense": Own(_read_dense, _write_dense),
    }
    | mixture("num_experts")
    | ROPE
)


def _read_shared(config: Config, facts: Facts) -> None:
    """A width that is null is the width of the dense feed-forwards."""
    width = optional_whole(config, "shared_expert_intermediate_size")
    facts |= {"shared.d_ff": width or facts["dense.d_ff"], "moe.shared_gate": True}


QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    QWEN_TABLE,
    QWEN_MOE
    | HEAD_DIM
    | {
        "shared": Own(
            _read_shared,
            lambda spec: {"shared_expert_intermediate_size": value_of(spec, "shared.d_ff")},
        ),
        "qkv_bias": flag("attn.bias", yes="qkv", no="none"),
        "windows": qwen_windows(alternate=True),
    },
    harmless=HARMLESS,
    defaults={
        "qkv_bias": True,
        "norm_topk_prob": False,
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "shared_expert_intermediate_size": 5632,
    },
    live=QWEN_LIVE,
)


def _read_window(config: Config, facts: Facts) -> None:
    width = optional_whole(config, "sliding_window")
    facts["attn.window"] = width if config.flag("use_sliding_window") else None


def _write_window(spec: ModelSpec) -> dict[str, Any]:
    window = value_of(spec, "attn.window")
    return {"use_sliding_window": window is not None, "sliding_window": window}


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    QWEN_TABLE,
    QWEN_MOE
    | {"head_dim": optional("attn.d_head", written="attn.width")}
    | BIAS
    | {"window": Own(_read_window, _write_window)},
    {"qk_norm": True},
    harmless=(*HARMLESS, "max_window_layers"),
    defaults={
        "attention_bias": False,
        "use_sliding_window": False,
        "norm_topk_prob": False,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
    },
    live=QWEN_LIVE,
)


# --- Granite, gpt-oss: all experts in one tensor, in files and modules ----------------------------

GRANITE_MOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    stacked_table(
        "block_sparse_moe",
        gate_up="input_linear.weight",
        down="output_linear.weight",
        router="router.layer",
    ),
    KEYS | BIAS | ROPE | MULTIPLIERS | mixture("num_local_experts"),
    NORMALIZED | {"embedding": ScaledEmbedding},
    idle={"output_router_logits": False},
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    live=stacked_table("block_sparse_moe", router="router"),
)


def gpt_oss_table() -> Table:
    """Return gpt-oss's names: experts in one tensor as (in, out), gate and up row by row."""
    rows = [
        Row(f"{LAYER}self_attn.sinks", "blocks.{}.attn.sinks"),
        *named({"mlp.router": "ffn.gate"}, layer=LAYER),
    ]
    for leaf, ending in (("weight", ""), ("bias", "_bias")):
        gate, up, down = (name.replace("weight", leaf) for name in (GATE, UP, DOWN))
        layout = Experts(per=2, transposed=True, alternating=True)
        rows += [
            Row(f"{LAYER}mlp.experts.gate_up_proj{ending}", (gate, up), layout),
            Row(f"{LAYER}mlp.experts.down_proj{ending}", (down,), Experts(transposed=True)),
        ]
    return llama_table(more=tuple(rows))


#: The rotation where a config has none.
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read_clamp(config: Config, facts: Facts) -> None:
    config.any("initial_context_length", default=None)  # rope_parameters has it too
    config.one_of("hidden_act", {"silu": "silu"}, default="silu")
    if not config.data.get("rope_parameters") and not config.data.get("rope_scaling"):
        config.data["rope_parameters"] = dict(GPT_OSS_ROPE)
    limit, slope = config.number("swiglu_limit"), config.number("swiglu_alpha")
    facts["ffn.clamp"] = Clamp(limit=limit, slope=slope)


def _write_clamp(spec: ModelSpec) -> dict[str, Any]:
    clamp = value_of(spec, "ffn.clamp") or Clamp()
    return {"swiglu_limit": clamp.limit, "swiglu_alpha": clamp.slope}


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    gpt_oss_table(),
    KEYS
    | WIDTH
    | {"clamp": Own(_read_clamp, _write_clamp)}
    | mixture("num_local_experts")
    | {
        "attention_bias": flag("attn.bias", yes="all", no="none"),
        "windows": windows(2, absent=128),
        "rope": rope(theta=150_000.0),
    },
    NORMALIZED | {"attn.sinks": True, "ffn.bias": True, "moe.router_bias": True},
    harmless=("experts_per_token",),
    idle={"output_router_logits": False},
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
)
