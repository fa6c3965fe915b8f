"""GPT-2 and its first relatives: GPT-Neo, GPT-J, OPT.

LayerNorm and no gate in all of them. GPT-2 has learned positions, fused q, k, v, and matrices as
(in, out). GPT-Neo has scores without a scale and windows in every other layer; GPT-J rotates a part
of each head and adds both parts at once; OPT has two rows before its first position.
"""

from typing import Any

from glassformer.adapters.config import MOST_LAYERS, MOST_POSITIONS, Config
from glassformer.adapters.keys import (
    Facts,
    Own,
    flag,
    number,
    optional,
    value_of,
    whole,
    without,
    word,
)
from glassformer.adapters.table import QKV, Columns, Family, decoder_table, turned
from glassformer.spec.model import MLP, LayerNorm, Learned, ModelSpec, Rotary

MASKS = ("attn.bias", "attn.masked_bias")
OUTER = {"wte": "embed", "wpe": "position", "ln_f": "final_norm"}
PARTS: dict[str, str | tuple[str, ...]] = {
    "attn.c_attn": QKV,
    "attn.c_proj": "attn.o_proj",
    "mlp.c_fc": "ffn.up_proj",
    "mlp.c_proj": "ffn.down_proj",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
}
SUMMARY = (
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
)
PLAIN: Facts = {"norm": LayerNorm, "ffn": MLP, "position": Learned}


#: Keys that these families share.
SHARED = {
    "vocab_size": whole("vocab_size"),
    "initializer_range": number("init.std", default=0.02),
    "activation_function": word("ffn.activation", default="gelu_new"),
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2_KEYS: dict[str, Any] = {
    "n_embd": whole("d_model", also=("hidden_size",)),
    "n_layer": whole("layers", also=("num_hidden_layers",), most=MOST_LAYERS),
    "n_head": whole("attn.n_heads", also=("num_attention_heads",)),
    "n_positions": whole("max_seq_len", also=("max_position_embeddings",), most=MOST_POSITIONS),
    "layer_norm_epsilon": number("norm.eps", default=1e-5),
    "embd_pdrop": number("dropout.embedding", default=0.1),
    "attn_pdrop": number("dropout.attention", default=0.1),
    "resid_pdrop": number("dropout.residual", default=0.1),
    "tie_word_embeddings": flag("head.tied", default=True),
    "n_inner": optional("ffn.d_ff"),
    **SHARED,
}
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    decoder_table(
        "transformer.",
        "h",
        outer=OUTER,
        parts=PARTS,
        layouts={part: Columns() for part in PARTS if not part.startswith("ln")},
        ignored=MASKS,
        alone=True,
    ),
    GPT2_KEYS,
    PLAIN | {"attn.bias": "all"},
    harmless=("n_ctx", *SUMMARY, "reorder_and_upcast_attn"),
    idle={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
)


# --- GPT-Neo, GPT-J, OPT: separate q, k and v, matrices as (out, in) ------------------------------


NEO_MASKS = (*MASKS, "attn.attention.bias", "attn.attention.masked_bias")


def _read_kinds(config: Config, facts: Facts) -> None:
    """`attention_types` lists pairs of kinds of layers and repetitions."""
    layers = facts["layers"]
    window, given = config.whole("window_size"), config.any("attention_types")
    try:
        runs = [list(group) * min(count, layers) for group, count in given]
        kinds = [str(kind) for run in runs for kind in run]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != layers or not set(kinds) <= {"global", "local"}:
        raise config.bad("attention_types", given, f"{layers} layers, each global or local")
    if (written := config.any("attention_layers", default=kinds)) != kinds:
        raise config.bad("attention_layers", written, "what 'attention_types' says, written out")
    facts["each.attn.window"] = [window if kind == "local" else None for kind in kinds]


def _write_kinds(spec: ModelSpec) -> dict[str, Any]:
    windows = [block.attention.window for block in spec.decoder.blocks()]
    kinds = ["global" if window is None else "local" for window in windows]
    return {
        "attention_types": [[kinds, 1]],
        "attention_layers": kinds,
        "window_size": next((window for window in windows if window is not None), 256),
    }


GPT_NEO = Family(
    "gpt_neo",
    "GPTNeoForCausalLM",
    decoder_table(
        "transformer.",
        "h",
        outer=OUTER,
        parts={
            **{f"attn.attention.{one}_proj": f"attn.{one}_proj" for one in "qkv"},
            "attn.attention.out_proj": "attn.o_proj",
            "mlp.c_fc": "ffn.up_proj",
            "mlp.c_proj": "ffn.down_proj",
            "ln_1": "attn_norm",
            "ln_2": "ffn_norm",
        },
        ignored=NEO_MASKS,
        alone=True,
    ),
    {
        "hidden_size": whole("d_model"),
        "num_layers": whole("layers", most=MOST_LAYERS),
        "num_heads": whole("attn.n_heads"),
        "max_position_embeddings": whole("max_seq_len", most=MOST_POSITIONS),
        "layer_norm_epsilon": number("norm.eps", default=1e-5),
        "embed_dropout": number("dropout.embedding", default=0.0),
        "attention_dropout": number("dropout.attention", default=0.0),
        "resid_dropout": number("dropout.residual", default=0.0),
        "tie_word_embeddings": flag("head.tied"),
        "pad_token_id": None,
        "kinds": Own(_read_kinds, _write_kinds),
        "intermediate_size": optional("ffn.d_ff"),
        **SHARED,
    },
    PLAIN | {"attn.bias": "out", "attn.scale": 1.0},
    harmless=("classifier_dropout", *SUMMARY),
    defaults={
        "window_size": 256,
        "tie_word_embeddings": True,
        "attention_types": [[["global", "local"], 12]],
    },
)


def _read_turned(config: Config, facts: Facts) -> None:
    heads, width = facts["attn.n_heads"], facts["d_model"]
    turned_rows = config.whole("rotary_dim")
    if width % heads or turned_rows > width // heads:
        raise config.bad("rotary_dim", turned_rows, f"at most n_embd / n_head of {width} / {heads}")
    facts["position"] = Rotary(share=turned_rows / (width // heads))


def _write_turned(spec: ModelSpec) -> dict[str, Any]:
    width: int = value_of(spec, "attn.width")
    return {
        "rotary_dim": spec.position.width(width) if isinstance(spec.position, Rotary) else width
    }


GPT_J = Family(
    "gptj",
    "GPTJForCausalLM",
    decoder_table(
        "transformer.",
        "h",
        outer=OUTER,
        parts={
            **{f"attn.{one}_proj": f"attn.{one}_proj" for one in "qkv"},
            "attn.out_proj": "attn.o_proj",
            "mlp.fc_in": "ffn.up_proj",
            "mlp.fc_out": "ffn.down_proj",
            "ln_1": "attn_norm",
        },
        layouts={"attn.q_proj": turned, "attn.k_proj": turned},
        ignored=NEO_MASKS,
        alone=True,
    ),
    {
        "n_embd": whole("d_model"),
        "n_layer": whole("layers", most=MOST_LAYERS),
        "n_head": whole("attn.n_heads"),
        "n_positions": whole("max_seq_len", most=MOST_POSITIONS),
        "layer_norm_epsilon": number("norm.eps", default=1e-5),
        "embd_pdrop": number("dropout.embedding", default=0.0),
        "attn_pdrop": number("dropout.attention", default=0.0),
        "resid_pdrop": number("dropout.residual", default=0.0),
        "tie_word_embeddings": flag("head.tied"),
        "pad_token_id": None,
        "turned": Own(_read_turned, _write_turned),
        "n_inner": optional("ffn.d_ff"),
        **SHARED,
    },
    PLAIN | {"block.placement": "parallel_shared", "head.bias": True},
    harmless=(*SUMMARY, "n_ctx", "rotary"),
    idle={"scale_attn_weights": True},
    defaults={"rotary_dim": 64, "tie_word_embeddings": False},
)


def _read_norms(config: Config, facts: Facts) -> None:
    """Norms stand before the parts, or (350 M) after them and none at the end."""
    narrow = config.any("word_embed_proj_dim", default=None)
    if narrow not in (None, facts["d_model"]):
        raise config.bad("word_embed_proj_dim", narrow, "hidden_size: an embedding of that width")
    before = config.flag("do_layer_norm_before")
    facts["block.placement"] = "pre" if before else "post"
    facts["final_norm"] = not config.flag("_remove_final_layer_norm") and before


def _write_norms(spec: ModelSpec) -> dict[str, Any]:
    before = value_of(spec, "block.placement") == "pre"
    return {
        "do_layer_norm_before": before,
        "word_embed_proj_dim": spec.d_model,
        "_remove_final_layer_norm": before and spec.decoder.final_norm is None,
    }


OPT = Family(
    "opt",
    "OPTForCausalLM",
    decoder_table(
        "model.decoder.",
        "layers",
        outer={
            "embed_tokens": "embed",
            "embed_positions": "position",
            "final_layer_norm": "final_norm",
        },
        parts={
            **{f"self_attn.{one}_proj": f"attn.{one}_proj" for one in "qkv"},
            "self_attn.out_proj": "attn.o_proj",
            "self_attn_layer_norm": "attn_norm",
            "fc1": "ffn.up_proj",
            "fc2": "ffn.down_proj",
            "final_layer_norm": "ffn_norm",
        },
        ignored=NEO_MASKS,
        alone=True,
    ),
    {
        "hidden_size": whole("d_model"),
        "num_hidden_layers": whole("layers", most=MOST_LAYERS),
        "num_attention_heads": whole("attn.n_heads"),
        "max_position_embeddings": whole("max_seq_len", most=MOST_POSITIONS),
        "attention_dropout": number("dropout.attention", default=0.0),
        "dropout": number("dropout.residual", default=0.0),
        "tie_word_embeddings": flag("head.tied"),
        "pad_token_id": None,
        "enable_bias": (flag("attn.bias", yes="all", no="none"), flag("ffn.bias")),
        "norms": Own(_read_norms, _write_norms),
        "ffn_dim": optional("ffn.d_ff"),
        **without(SHARED, "initializer_range"),
        "init_std": SHARED["initializer_range"],
        "activation_function": word("ffn.activation", default="relu"),
    },
    PLAIN | {"position": Learned(offset=2)},
    harmless=("activation_dropout", "prefix"),
    idle={"layer_norm_elementwise_affine": True, "layerdrop": 0.0},
    defaults={
        "do_layer_norm_before": True,
        "enable_bias": True,
        "tie_word_embeddings": True,
        "_remove_final_layer_norm": False,
        "dropout": 0.1,
    },
)
