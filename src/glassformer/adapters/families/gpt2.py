"""GPT-2 and its first relatives: GPT-Neo, GPT-J, OPT.

LayerNorm and no gate in all of them. GPT-2 has learned positions, fused q, k, v, and matrices as
(in, out). GPT-Neo has scores without a scale and windows in every other layer; GPT-J rotates a part
of each head and adds both parts at once; OPT has two rows before its first position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from glassformer.adapters.config import MOST_LAYERS, MOST_POSITIONS, Config, block_of
from glassformer.adapters.table import Columns, Family, Interleaved, Layout, Row, Rows, Table, dense
from glassformer.spec.init import NormalInit
from glassformer.spec.model import (
    MLP,
    Activation,
    Attention,
    Block,
    Dropout,
    LayerNorm,
    Layers,
    Learned,
    ModelSpec,
    NextHead,
    Placement,
    Position,
    Rotary,
    Stack,
)

LAYER, BLOCK = "transformer.h.{}.", "blocks.{}."
FUSED = tuple(f"{BLOCK}attn.{letter}_proj." for letter in "qkv")
TABLE = Table(
    rows=(
        Row("transformer.wte.weight", "embed.weight"),
        Row("transformer.wpe.weight", "position.weight"),
        Row(f"{LAYER}attn.c_attn.weight", tuple(f"{name}weight" for name in FUSED), Columns()),
        Row(f"{LAYER}attn.c_attn.bias", tuple(f"{name}bias" for name in FUSED)),
        *(
            Row(f"{LAYER}{theirs}.{leaf}", f"{BLOCK}{ours}.{leaf}", layout)
            for theirs, ours in (
                ("attn.c_proj", "attn.o_proj"),
                ("mlp.c_fc", "ffn.up_proj"),
                ("mlp.c_proj", "ffn.down_proj"),
            )
            for leaf, layout in (("weight", Columns()),)
        ),
        *(
            Row(f"{LAYER}{theirs}", f"{BLOCK}{ours}")
            for theirs, ours in (
                ("attn.c_proj.bias", "attn.o_proj.bias"),
                ("mlp.c_fc.bias", "ffn.up_proj.bias"),
                ("mlp.c_proj.bias", "ffn.down_proj.bias"),
                ("ln_1.weight", "attn_norm.weight"),
                ("ln_1.bias", "attn_norm.bias"),
                ("ln_2.weight", "ffn_norm.weight"),
                ("ln_2.bias", "ffn_norm.bias"),
            )
        ),
        Row("transformer.ln_f.weight", "final_norm.weight"),
        Row("transformer.ln_f.bias", "final_norm.bias"),
        Row("lm_head.weight", "heads.next.weight"),
    ),
    ignored=(f"{LAYER}attn.bias", f"{LAYER}attn.masked_bias"),
    prefix="transformer.",
)
ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python": "gelu",
    "silu": "silu",
    "swish": "silu",
}


def read_gpt2(config: Config) -> ModelSpec:
    """Read a GPT-2 config; sizes have GPT-2's own names or the later common ones."""
    width = config.whole("n_embd", "hidden_size")
    norm = LayerNorm(eps=config.number("layer_norm_epsilon", default=1e-5))
    inner = config.any("n_inner", default=None)
    word = config.one_of(
        "activation_function", {name: name for name in ACTIVATIONS}, default="gelu_new"
    )
    block = Block(
        mixer=Attention(n_heads=config.whole("n_head", "num_attention_heads"), bias="all"),
        ffn=MLP(
            d_ff=4 * width if inner is None else config.whole("n_inner"),
            activation=ACTIVATIONS[word],
        ),
        norm=norm,
    )
    residual = config.number("resid_pdrop", default=0.1)
    return ModelSpec(
        vocab_size=config.whole("vocab_size"),
        d_model=width,
        max_seq_len=config.whole("n_positions", "max_position_embeddings", most=MOST_POSITIONS),
        position=Learned(),
        decoder=Stack(
            layers=(
                Layers(
                    count=config.whole("n_layer", "num_hidden_layers", most=MOST_LAYERS),
                    block=block,
                ),
            ),
            final_norm=norm,
            dropout=Dropout(
                embedding=config.number("embd_pdrop", default=0.1),
                attention=config.number("attn_pdrop", default=0.1),
                residual=residual,
            ),
        ),
        heads=(NextHead(tied=config.flag("tie_word_embeddings", default=True)),),
        init=NormalInit(std=config.number("initializer_range", default=0.02)),
    )


def write_gpt2(spec: ModelSpec) -> dict[str, Any]:
    """Return the config keys of GPT-2 for a spec."""
    block, head = block_of(spec.decoder), spec.heads[0]
    words = {meaning: word for word, meaning in reversed(ACTIVATIONS.items())}
    ffn = dense(block.ffn)
    return {
        "vocab_size": spec.vocab_size,
        "n_embd": spec.d_model,
        "n_layer": spec.n_layers,
        "n_head": block.attention.n_heads,
        "n_inner": ffn.d_ff,
        "n_positions": spec.max_seq_len,
        "activation_function": words[ffn.activation] if isinstance(ffn, MLP) else "gelu_new",
        "layer_norm_epsilon": block.norm.eps,
        "embd_pdrop": spec.decoder.dropout.embedding,
        "attn_pdrop": spec.decoder.dropout.attention,
        "resid_pdrop": spec.decoder.dropout.residual,
        "initializer_range": spec.init.std if isinstance(spec.init, NormalInit) else 0.02,
        "tie_word_embeddings": isinstance(head, NextHead) and head.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    TABLE,
    read_gpt2,
    write_gpt2,
    harmless=(
        "n_ctx",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "reorder_and_upcast_attn",
    ),
    idle={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
)


# --- GPT-Neo, GPT-J, OPT: separate q, k and v, matrices as (out, in) ------------------------------

#: What a config calls each size, rate and switch; a family without one leaves it out.
NEO_KEYS = {
    "d_model": "hidden_size",
    "n_layers": "num_layers",
    "n_heads": "num_heads",
    "d_ff": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "eps": "layer_norm_epsilon",
    "std": "initializer_range",
    "embedding": "embed_dropout",
    "attention": "attention_dropout",
    "residual": "resid_dropout",
}
J_KEYS = {
    "d_model": "n_embd",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "d_ff": "n_inner",
    "max_seq_len": "n_positions",
    "eps": "layer_norm_epsilon",
    "std": "initializer_range",
    "embedding": "embd_pdrop",
    "attention": "attn_pdrop",
    "residual": "resid_pdrop",
}
OPT_KEYS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "d_ff": "ffn_dim",
    "max_seq_len": "max_position_embeddings",
    "std": "init_std",
    "attention": "attention_dropout",
    "residual": "dropout",
}


def _names(
    body: str, outer: Mapping[str, str], layer: str, parts: Mapping[str, str], turned: Layout
) -> Table:
    """Return the names of a body under this prefix, of its layers and of the head."""
    names = {f"{body}{theirs}": ours for theirs, ours in outer.items()}
    names |= {f"{body}{layer}.{{}}.{theirs}": BLOCK + ours for theirs, ours in parts.items()}
    names["lm_head"] = "heads.next"
    masks = ("bias", "masked_bias", "attention.bias", "attention.masked_bias")
    return Table(
        rows=tuple(
            Row(
                f"{theirs}.{leaf}",
                f"{ours}.{leaf}",
                turned if ours.endswith(("q_proj", "k_proj")) else Rows(),
            )
            for theirs, ours in names.items()
            for leaf in ("weight", "bias")
        ),
        ignored=tuple(f"{body}{layer}.{{}}.attn.{mask}" for mask in masks),
        prefix=body,
    )


OUTER = {"wte": "embed", "wpe": "position", "ln_f": "final_norm"}
NEO_PARTS = {
    **{f"attn.attention.{one}_proj": f"attn.{one}_proj" for one in "qkv"},
    "attn.attention.out_proj": "attn.o_proj",
    "mlp.c_fc": "ffn.up_proj",
    "mlp.c_proj": "ffn.down_proj",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
}
J_PARTS = {
    **{f"attn.{one}_proj": f"attn.{one}_proj" for one in "qkv"},
    "attn.out_proj": "attn.o_proj",
    "mlp.fc_in": "ffn.up_proj",
    "mlp.fc_out": "ffn.down_proj",
    "ln_1": "attn_norm",
}
OPT_OUTER = {
    "embed_tokens": "embed",
    "embed_positions": "position",
    "final_layer_norm": "final_norm",
}
OPT_PARTS = {
    **{f"self_attn.{one}_proj": f"attn.{one}_proj" for one in "qkv"},
    "self_attn.out_proj": "attn.o_proj",
    "self_attn_layer_norm": "attn_norm",
    "fc1": "ffn.up_proj",
    "fc2": "ffn.down_proj",
    "final_layer_norm": "ffn_norm",
}


def gptj_table(spec: ModelSpec) -> Table:
    """Return GPT-J's table: neighbouring rows of q and k are a rotary pair."""
    width = block_of(spec.decoder).attention.head_width(spec.d_model)
    turned = spec.position.width(width) if isinstance(spec.position, Rotary) else width
    return _names("transformer.", OUTER, "h", J_PARTS, Interleaved(width, turned))


def _read(
    config: Config,
    keys: Mapping[str, str],
    *,
    activation: str,
    attention: Attention,
    position: Position,
    bias: bool = True,
    placement: Placement = "pre",
    final: bool = True,
    windows: Sequence[int | None] = (),
    head_bias: bool = False,
) -> ModelSpec:
    """Read what these families share, under the names that `keys` has for it."""
    width = config.whole(keys["d_model"])
    inner = config.any(keys["d_ff"], default=None)
    word = config.one_of(
        "activation_function", {name: name for name in ACTIVATIONS}, default=activation
    )
    eps = config.number(keys["eps"], default=1e-5) if "eps" in keys else 1e-5
    norm = LayerNorm(eps=eps)
    block = Block(
        mixer=attention,
        ffn=MLP(
            d_ff=4 * width if inner is None else config.whole(keys["d_ff"]),
            activation=ACTIVATIONS[word],
            bias=bias,
        ),
        norm=norm,
        placement=placement,
    )
    layers = config.whole(keys["n_layers"], most=MOST_LAYERS)
    rates = {
        name: config.number(keys[name], default=0.0)
        for name in ("embedding", "attention", "residual")
        if name in keys
    }
    return ModelSpec(
        vocab_size=config.whole("vocab_size"),
        d_model=width,
        max_seq_len=config.whole(keys["max_seq_len"], most=MOST_POSITIONS),
        position=position,
        decoder=Stack(
            layers=tuple(
                Layers(
                    count=len(list(run)),
                    block=replace(block, mixer=replace(attention, window=window)),
                )
                for window, run in groupby(windows or (None,) * layers)
            ),
            final_norm=norm if final else None,
            dropout=Dropout(**rates),
        ),
        heads=(NextHead(tied=config.flag("tie_word_embeddings"), bias=head_bias),),
        init=NormalInit(std=config.number(keys["std"], default=0.02)),
    )


def _write(spec: ModelSpec, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the config keys that `_read` reads."""
    block, head = block_of(spec.decoder), spec.heads[0]
    words = {meaning: word for word, meaning in reversed(ACTIVATIONS.items())}
    ffn, rates = dense(block.ffn), spec.decoder.dropout
    found = {
        "d_model": spec.d_model,
        "n_layers": spec.n_layers,
        "n_heads": block.attention.n_heads,
        "d_ff": ffn.d_ff,
        "max_seq_len": spec.max_seq_len,
        "eps": block.norm.eps,
        "std": spec.init.std if isinstance(spec.init, NormalInit) else 0.02,
        "embedding": rates.embedding,
        "attention": rates.attention,
        "residual": rates.residual,
    }
    return {
        "vocab_size": spec.vocab_size,
        **{theirs: found[ours] for ours, theirs in keys.items()},
        "activation_function": words[ffn.activation] if isinstance(ffn, MLP) else "gelu_new",
        "tie_word_embeddings": isinstance(head, NextHead) and head.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def read_neo(config: Config) -> ModelSpec:
    """Read a GPT-Neo config: `attention_types` lists pairs of kinds of layers and repetitions."""
    layers = config.whole("num_layers", most=MOST_LAYERS)
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
    return _read(
        config,
        NEO_KEYS,
        activation="gelu_new",
        attention=Attention(n_heads=config.whole("num_heads"), bias="out", scale=1.0),
        position=Learned(),
        windows=[window if kind == "local" else None for kind in kinds],
    )


def write_neo(spec: ModelSpec) -> dict[str, Any]:
    """Return GPT-Neo's config keys."""
    windows = [block.attention.window for block in spec.decoder.blocks()]
    kinds = ["global" if window is None else "local" for window in windows]
    return _write(spec, NEO_KEYS) | {
        "attention_types": [[kinds, 1]],
        "attention_layers": kinds,
        "window_size": next((window for window in windows if window is not None), 256),
    }


def read_gptj(config: Config) -> ModelSpec:
    """Read a GPT-J config: one norm for both parts, a head with a bias."""
    heads, width = config.whole("n_head"), config.whole("n_embd")
    turned = config.whole("rotary_dim")
    if not heads or width % heads or turned > width // heads:
        raise config.bad("rotary_dim", turned, f"at most n_embd / n_head of {width} / {heads}")
    return _read(
        config,
        J_KEYS,
        activation="gelu_new",
        attention=Attention(n_heads=heads),
        position=Rotary(share=turned / (width // heads)),
        placement="parallel_shared",
        head_bias=True,
    )


def write_gptj(spec: ModelSpec) -> dict[str, Any]:
    """Return GPT-J's config keys."""
    width = block_of(spec.decoder).attention.head_width(spec.d_model)
    turned = spec.position.width(width) if isinstance(spec.position, Rotary) else width
    return _write(spec, J_KEYS) | {"rotary_dim": turned}


def read_opt(config: Config) -> ModelSpec:
    """Read an OPT config: norms before the parts, or (350 M) after them and none at the end."""
    before, biased = config.flag("do_layer_norm_before"), config.flag("enable_bias")
    narrow = config.any("word_embed_proj_dim", default=None)
    if narrow not in (None, config.whole("hidden_size")):
        raise config.bad("word_embed_proj_dim", narrow, "hidden_size: an embedding of that width")
    return _read(
        config,
        OPT_KEYS,
        activation="relu",
        attention=Attention(
            n_heads=config.whole("num_attention_heads"), bias="all" if biased else "none"
        ),
        position=Learned(offset=2),
        bias=biased,
        placement="pre" if before else "post",
        final=not config.flag("_remove_final_layer_norm") and before,
    )


def write_opt(spec: ModelSpec) -> dict[str, Any]:
    """Return OPT's config keys."""
    block = block_of(spec.decoder)
    return _write(spec, OPT_KEYS) | {
        "do_layer_norm_before": block.placement == "pre",
        "enable_bias": block.attention.bias == "all",
        "word_embed_proj_dim": spec.d_model,
        "_remove_final_layer_norm": block.placement == "pre" and spec.decoder.final_norm is None,
    }


GPT_NEO = Family(
    "gpt_neo",
    "GPTNeoForCausalLM",
    _names("transformer.", OUTER, "h", NEO_PARTS, Rows()),
    read_neo,
    write_neo,
    harmless=(
        "classifier_dropout",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ),
    defaults={
        "window_size": 256,
        "tie_word_embeddings": True,
        "attention_types": [[["global", "local"], 12]],
    },
)
GPT_J = Family(
    "gptj",
    "GPTJForCausalLM",
    gptj_table,
    read_gptj,
    write_gptj,
    harmless=(
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "n_ctx",
        "rotary",
    ),
    idle={"scale_attn_weights": True},
    defaults={"rotary_dim": 64, "tie_word_embeddings": False},
)
OPT = Family(
    "opt",
    "OPTForCausalLM",
    _names("model.decoder.", OPT_OUTER, "layers", OPT_PARTS, Rows()),
    read_opt,
    write_opt,
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
