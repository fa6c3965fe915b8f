"""Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, Granite-MoE,
gpt-oss.

Files hold each expert's matrices by themselves; a live module of transformers 5 holds all experts
of a layer in two tensors, so these families have a second table.
"""

from dataclasses import replace
from typing import Any

from glassformer.adapters.config import MOST_LAYERS, Config, block_of
from glassformer.adapters.families.llama import (
    BLOCK,
    FULL,
    LAYER,
    SLIDING,
    TABLE,
    each_block,
    kinds_of,
    optional_whole,
    own_width,
    read_gate,
    read_kinds,
    read_stack,
    window_of,
    write_stack,
)
from glassformer.adapters.families.qwen import read_windows, write_windows
from glassformer.adapters.families.relatives import multipliers_of, with_multipliers
from glassformer.adapters.table import Experts, Family, Row, Table
from glassformer.spec.errors import InputError
from glassformer.spec.model import MLP, Bias, Block, Clamp, FeedForward, ModelSpec, MoE, SwiGLU

PARTS = ("gate_proj", "up_proj", "down_proj")
SHARED = (*(f"shared_expert.{part}" for part in PARTS), "shared_expert_gate")


def experts_table(part: str, names: tuple[str, str, str], *, live: bool = False) -> Any:
    """Return a function to a spec's table; `names` are gate, up and down, `part` holds experts."""

    def table(spec: ModelSpec) -> Table:
        experts = f"{LAYER}{part}.experts."
        ours = f"{BLOCK}ffn.experts."
        every = range(max((mixture.n_experts for mixture in spec.mixtures().values()), default=0))
        if live:
            both = tuple(f"{ours}{e}.{one}.weight" for e in every for one in PARTS[:2])
            down = tuple(f"{ours}{e}.down_proj.weight" for e in every)
            rows = [
                Row(f"{experts}gate_up_proj", both, Experts(per=2)),
                Row(f"{experts}down_proj", down, Experts()),
            ]
        else:
            rows = [
                Row(f"{experts}{e}.{theirs}.weight", f"{ours}{e}.{one}.weight")
                for e in every
                for theirs, one in zip(names, PARTS, strict=True)
            ]
        gate = Row(f"{LAYER}{part}.gate.weight", f"{BLOCK}ffn.gate.weight")
        shared = (Row(f"{LAYER}{part}.{one}.weight", f"{BLOCK}ffn.{one}.weight") for one in SHARED)
        return Table(rows=(*TABLE.rows, gate, *rows, *shared), ignored=TABLE.ignored)

    return table


QWEN_NAMES, MIXTRAL_NAMES = PARTS, ("w1", "w3", "w2")
QWEN_TABLE = experts_table("mlp", QWEN_NAMES)
QWEN_LIVE = experts_table("mlp", QWEN_NAMES, live=True)


def read_mixture(config: Config, *, d_ff: int, normalize: bool, **own: Any) -> MoE:
    """Read the experts of a config; their number has one of two names, by version."""
    names = ("num_local_experts", "num_experts")
    experts, used = config.whole(*names), config.whole("num_experts_per_tok")
    if experts < 2:
        raise config.bad(next(n for n in names if config.has(n)), experts, "2 or more")
    if used == 1 and normalize:
        what = "2 or more where their weights are normalised: that of a single one is always 1"
        raise config.bad("num_experts_per_tok", used, what)
    return MoE(
        n_experts=experts,
        experts_per_token=used,
        expert=SwiGLU(d_ff=d_ff, activation=read_gate(config)),
        normalize=normalize,
        balance=config.number("router_aux_loss_coef", default=0.001),
        **own,
    )


def mixture_of(spec: ModelSpec) -> MoE:
    """Return the first mixture of a spec that a family with experts is to write."""
    for mixture in spec.mixtures().values():
        return mixture
    raise InputError("feed-forward: one for every token here, experts there")


def read_mixtral(config: Config) -> ModelSpec:
    """Read a Mixtral config: experts in every layer, one window or none."""
    window = optional_whole(config, "sliding_window")
    ffn = read_mixture(config, d_ff=config.whole("intermediate_size"), normalize=True)
    return read_stack(
        config,
        bias="none",
        d_head=optional_whole(config, "head_dim"),
        windows=(window,) * config.whole("num_hidden_layers", most=MOST_LAYERS),
        ffn=ffn,
        theta=1_000_000.0,
    )


def write_mixtral(spec: ModelSpec) -> dict[str, Any]:
    """Return Mixtral's config keys."""
    mixture = mixture_of(spec)
    return write_stack(spec, d_ff=mixture.expert.d_ff) | {
        "num_local_experts": mixture.n_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "router_aux_loss_coef": mixture.balance,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
        "sliding_window": block_of(spec.decoder).attention.window,
    }


def with_dense_layers(spec: ModelSpec, config: Config, ffn: FeedForward) -> ModelSpec:
    """Return the spec with experts in every `decoder_sparse_step`-th layer but some by name."""
    step = config.whole("decoder_sparse_step", default=1)
    plain = config.any("mlp_only_layers", default=[])
    if not isinstance(plain, list):
        raise config.bad("mlp_only_layers", plain, "a list of layers")

    def change(block: Block, layer: int) -> Block:
        sparse = layer not in plain and (layer + 1) % step == 0
        return block if sparse else replace(block, ffn=ffn)

    return each_block(spec, change)


def read_qwen_moe(config: Config, **own: Any) -> ModelSpec:
    """Read what Qwen2-MoE and Qwen3-MoE share; `own` is for `read_stack`.

    A width of the shared expert that is null is the width of the dense feed-forwards.
    """
    shared = optional_whole(config, "shared_expert_intermediate_size")
    if shared is None and config.has("shared_expert_intermediate_size"):
        shared = config.whole("intermediate_size")
    ffn = read_mixture(
        config,
        d_ff=config.whole("moe_intermediate_size"),
        normalize=config.flag("norm_topk_prob"),
        shared=None if shared is None else SwiGLU(d_ff=shared, activation=read_gate(config)),
        shared_gate=shared is not None,
    )
    spec = read_stack(config, ffn=ffn, **own)
    plain = SwiGLU(d_ff=config.whole("intermediate_size"), activation=read_gate(config))
    return with_dense_layers(spec, config, plain)


def read_qwen2_moe(config: Config) -> ModelSpec:
    """Read a Qwen2-MoE config: a gated shared expert beside those that the router chooses."""
    bias = "qkv" if config.flag("qkv_bias") else "none"
    d_head = optional_whole(config, "head_dim")
    windows = read_windows(config, alternate=True)
    return read_qwen_moe(config, bias=bias, d_head=d_head, windows=windows)


def read_qwen3_moe(config: Config) -> ModelSpec:
    """Read a Qwen3-MoE config: no shared expert, q/k-norm, one window or none."""
    bias = "all" if config.flag("attention_bias") else "none"
    used, width = config.flag("use_sliding_window"), optional_whole(config, "sliding_window")
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    return read_qwen_moe(
        config,
        bias=bias,
        d_head=optional_whole(config, "head_dim"),
        qk_norm=True,
        windows=(width if used else None,) * layers,
    )


def write_qwen_moe(spec: ModelSpec) -> dict[str, Any]:
    """Return the config keys that Qwen's mixtures share."""
    mixture, blocks = mixture_of(spec), list(spec.decoder.blocks())
    plain = [layer for layer, block in enumerate(blocks) if not isinstance(block.ffn, MoE)]
    widths = [block.ffn.d_ff for block in blocks if isinstance(block.ffn, MLP | SwiGLU)]
    return {
        **write_stack(spec, d_ff=widths[0] if widths else mixture.expert.d_ff),
        "moe_intermediate_size": mixture.expert.d_ff,
        "num_experts": mixture.n_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "norm_topk_prob": mixture.normalize,
        "router_aux_loss_coef": mixture.balance,
        "output_router_logits": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": plain,
    }


def write_qwen2_moe(spec: ModelSpec) -> dict[str, Any]:
    """Return Qwen2-MoE's config keys."""
    shared = mixture_of(spec).shared
    if shared is None:
        raise InputError("feed-forward: no shared expert here, one there")
    return (
        write_qwen_moe(spec)
        | write_windows(spec)
        | {
            "shared_expert_intermediate_size": shared.d_ff,
            "qkv_bias": block_of(spec.decoder).attention.bias == "qkv",
        }
    )


def write_qwen3_moe(spec: ModelSpec) -> dict[str, Any]:
    """Return Qwen3-MoE's config keys."""
    attention = block_of(spec.decoder).attention
    own = {
        "attention_bias": attention.bias == "all",
        "use_sliding_window": attention.window is not None,
        "sliding_window": attention.window,
    }
    return write_qwen_moe(spec) | own_width(spec) | own


def read_olmoe(config: Config) -> ModelSpec:
    """Read an OLMoE config: q/k-norm over all heads, weights of experts as they are."""
    ffn = read_mixture(
        config,
        d_ff=config.whole("intermediate_size"),
        normalize=config.flag("norm_topk_prob", default=False),
    )
    bias: Bias = "all" if config.flag("attention_bias", default=False) else "none"
    spec = read_stack(config, bias=bias, d_head=None, qk_norm=True, ffn=ffn)
    return each_block(
        spec,
        lambda block, _: replace(block, mixer=replace(block.attention, qk_norm_over="all")),
    )


def write_olmoe(spec: ModelSpec) -> dict[str, Any]:
    """Return OLMoE's config keys."""
    mixture = mixture_of(spec)
    return write_stack(spec, d_ff=mixture.expert.d_ff) | {
        "num_experts": mixture.n_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "norm_topk_prob": mixture.normalize,
        "router_aux_loss_coef": mixture.balance,
        "output_router_logits": False,
        "attention_bias": block_of(spec.decoder).attention.bias == "all",
    }


#: A switch that adds the balance loss to the output; the logits do not depend on it.
HARMLESS = ("output_router_logits",)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    experts_table("block_sparse_moe", MIXTRAL_NAMES),
    read_mixtral,
    write_mixtral,
    harmless=HARMLESS,
    idle={"router_jitter_noise": 0.0},
    defaults={
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    },
    live=experts_table("mlp", MIXTRAL_NAMES, live=True),
)
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    QWEN_TABLE,
    read_olmoe,
    write_olmoe,
    harmless=HARMLESS,
    defaults={
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-5,
        "router_aux_loss_coef": 0.01,
    },
    live=QWEN_LIVE,
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    QWEN_TABLE,
    read_qwen2_moe,
    write_qwen2_moe,
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
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    QWEN_TABLE,
    read_qwen3_moe,
    write_qwen3_moe,
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


def granite_moe_table(experts: str, gate: tuple[str, str], router: str) -> Any:
    """Return a function to a spec's table: all experts in one tensor, in files and modules."""

    def table(spec: ModelSpec) -> Table:
        ours = f"{BLOCK}ffn.experts."
        every = range(mixture_of(spec).n_experts)
        both = tuple(f"{ours}{e}.{one}.weight" for e in every for one in PARTS[:2])
        down = tuple(f"{ours}{e}.down_proj.weight" for e in every)
        rows = (
            Row(f"{LAYER}block_sparse_moe.{experts}{gate[0]}", both, Experts(per=2)),
            Row(f"{LAYER}block_sparse_moe.{experts}{gate[1]}", down, Experts()),
            Row(f"{LAYER}block_sparse_moe.{router}.weight", f"{BLOCK}ffn.gate.weight"),
        )
        return Table(rows=(*TABLE.rows, *rows), ignored=TABLE.ignored)

    return table


def read_granite_moe(config: Config) -> ModelSpec:
    """Read a Granite-MoE config: Granite's factors, experts in every layer."""
    ffn = read_mixture(config, d_ff=config.whole("intermediate_size"), normalize=True)
    bias: Bias = "all" if config.flag("attention_bias", default=False) else "none"
    return with_multipliers(read_stack(config, bias=bias, d_head=None, ffn=ffn), config)


def write_granite_moe(spec: ModelSpec) -> dict[str, Any]:
    """Return Granite-MoE's config keys."""
    mixture = mixture_of(spec)
    return {
        **write_stack(spec, d_ff=mixture.expert.d_ff),
        **multipliers_of(spec),
        "attention_bias": block_of(spec.decoder).attention.bias == "all",
        "num_local_experts": mixture.n_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "router_aux_loss_coef": mixture.balance,
        "output_router_logits": False,
    }


GRANITE_MOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    granite_moe_table("", ("input_linear.weight", "output_linear.weight"), "router.layer"),
    read_granite_moe,
    write_granite_moe,
    idle={"output_router_logits": False},
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    live=granite_moe_table("experts.", ("gate_up_proj", "down_proj"), "router"),
)


# --- gpt-oss --------------------------------------------------------------------------------------


def gpt_oss_table(spec: ModelSpec) -> Table:
    """Return gpt-oss's table: experts in one tensor as (in, out), gate and up row by row."""
    every = range(mixture_of(spec).n_experts)
    rows = [
        Row(f"{LAYER}self_attn.sinks", f"{BLOCK}attn.sinks"),
        Row(f"{LAYER}mlp.router.weight", f"{BLOCK}ffn.gate.weight"),
        Row(f"{LAYER}mlp.router.bias", f"{BLOCK}ffn.gate.bias"),
    ]
    for leaf, ending in (("weight", ""), ("bias", "_bias")):
        names = [tuple(f"{BLOCK}ffn.experts.{e}.{one}.{leaf}" for one in PARTS) for e in every]
        both = tuple(name for gate, up, _ in names for name in (gate, up))
        down = tuple(name for _, _, name in names)
        layout = Experts(per=2, transposed=True, alternating=True)
        rows += [
            Row(f"{LAYER}mlp.experts.gate_up_proj{ending}", both, layout),
            Row(f"{LAYER}mlp.experts.down_proj{ending}", down, Experts(transposed=True)),
        ]
    return Table(rows=(*TABLE.rows, *rows), ignored=TABLE.ignored)


#: The rotation where a config has none.
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss(config: Config) -> ModelSpec:
    """Read a gpt-oss config: sinks, windows in every other layer, clamped experts with biases."""
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    kinds = read_kinds(config, absent=[(SLIDING, FULL)[layer % 2] for layer in range(layers)])
    window = config.whole("sliding_window")
    clamp = Clamp(limit=config.number("swiglu_limit"), slope=config.number("swiglu_alpha"))
    if not config.data.get("rope_parameters") and not config.data.get("rope_scaling"):
        config.data["rope_parameters"] = dict(GPT_OSS_ROPE)
    config.any("initial_context_length", default=None)  # rope_parameters has it too
    expert = SwiGLU(d_ff=config.whole("intermediate_size"), bias=True, clamp=clamp)
    ffn = replace(
        read_mixture(config, d_ff=expert.d_ff, normalize=True), expert=expert, router_bias=True
    )
    config.one_of("hidden_act", {"silu": "silu"}, default="silu")
    spec = read_stack(
        config,
        bias="all" if config.flag("attention_bias") else "none",
        d_head=config.whole("head_dim"),
        windows=[window if kind == SLIDING else None for kind in kinds],
        ffn=ffn,
        theta=150_000.0,
    )
    return each_block(
        spec, lambda block, _: replace(block, mixer=replace(block.attention, sinks=True))
    )


def write_gpt_oss(spec: ModelSpec) -> dict[str, Any]:
    """Return gpt-oss's config keys."""
    mixture = mixture_of(spec)
    gated = mixture.expert if isinstance(mixture.expert, SwiGLU) else SwiGLU(d_ff=1)
    clamp = gated.clamp or Clamp()
    return {
        **write_stack(spec, d_ff=mixture.expert.d_ff),
        **own_width(spec),
        "attention_bias": block_of(spec.decoder).attention.bias == "all",
        "sliding_window": window_of(spec) or 128,
        "layer_types": kinds_of(spec),
        "num_local_experts": mixture.n_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "router_aux_loss_coef": mixture.balance,
        "output_router_logits": False,
        "swiglu_limit": clamp.limit,
        "swiglu_alpha": clamp.slope,
    }


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    gpt_oss_table,
    read_gpt_oss,
    write_gpt_oss,
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
