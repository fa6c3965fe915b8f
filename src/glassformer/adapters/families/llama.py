"""Llama, Mistral, and every model with their config: SmolLM2, TinyLlama, Yi, ...

RMSNorm before each part, SwiGLU, half-split rotary positions, grouped keys; the tables of most
other families are these with other entries. Ministral, Seed-OSS and Ernie 4.5 are Llamas under
other names, told by their config's fields; Ernie rotates neighbouring rows of q and k.
"""

from collections.abc import Collection, Mapping
from typing import Any

from glassformer.adapters.config import MOST_LAYERS, MOST_POSITIONS, Config
from glassformer.adapters.families.rotary import rope, windows
from glassformer.adapters.keys import (
    GATES,
    Facts,
    Own,
    flag,
    number,
    optional,
    value_of,
    whole,
    word,
)
from glassformer.adapters.table import (
    QKV,
    AnyLayout,
    Family,
    Row,
    Rows,
    Table,
    decoder_table,
    turned,
)
from glassformer.spec.errors import FileError
from glassformer.spec.model import ModelSpec

LAYER = "model.layers.{}."
#: Named for what precedes it, `post_attention_layernorm` is the norm of the feed-forward.
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
ROTARY_BUFFERS = (f"{LAYER}self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
QK_NORMS = {"self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm"}


def llama_table(
    *,
    norms: Mapping[str, str] = NORMS,
    qk_norms: Mapping[str, str] = QK_NORMS,
    fused: Collection[str] = (),
    qk: AnyLayout = Rows(),  # noqa: B008
    more: tuple[Row, ...] = (),
) -> Table:
    """Return the names in files of transformers' Llama, and in those of its relatives.

    `norms` and `qk_norms` are those of a layer by their names, `fused` says which of qkv and
    gate_up are one tensor, and `qk` is the layout of q and k.
    """
    parts: dict[str, str | tuple[str, ...]] = {
        **norms,
        **qk_norms,
        "self_attn.o_proj": "attn.o_proj",
        "mlp.down_proj": "ffn.down_proj",
    }
    if "qkv" in fused:
        parts["self_attn.qkv_proj"] = QKV
    else:
        parts |= {f"self_attn.{one}_proj": f"attn.{one}_proj" for one in "qkv"}
    if "gate_up" in fused:
        parts["mlp.gate_up_proj"] = ("ffn.gate_proj", "ffn.up_proj")
    else:
        parts |= {f"mlp.{one}_proj": f"ffn.{one}_proj" for one in ("gate", "up")}
    return decoder_table(
        "model.",
        "layers",
        outer={"embed_tokens": "embed", "norm": "final_norm"},
        parts=parts,
        layouts={"self_attn.q_proj": qk, "self_attn.k_proj": qk},
        buffers=ROTARY_BUFFERS,
        more=more,
    )


TABLE = llama_table()
#: Llama's names in files in which neighbouring rows of q and k are a rotary pair.
NEIGHBOURS = llama_table(qk=turned)

#: The keys of a config that these families share. Of those below, each has some.
SIZES: dict[str, Any] = {
    "vocab_size": whole("vocab_size"),
    "hidden_size": whole("d_model"),
    "num_hidden_layers": whole("layers", most=MOST_LAYERS),
    "num_attention_heads": whole("attn.n_heads"),
    "num_key_value_heads": optional("attn.n_kv_heads", written="attn.kv_heads"),
    "max_position_embeddings": whole("max_seq_len", most=MOST_POSITIONS),
    "attention_dropout": number("dropout.attention", default=0.0),
    "initializer_range": number("init.std", default=0.02),
    "tie_word_embeddings": flag("head.tied", default=False),
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KEYS = SIZES | {
    "intermediate_size": whole("ffn.d_ff"),
    "hidden_act": word("ffn.activation", words=GATES, default="silu"),
    "rms_norm_eps": number("norm.eps", default=1e-6),
}
#: The width of a head where a config may leave it out, and where it always has one.
HEAD_DIM = {"head_dim": optional("attn.d_head", unless_none=True)}
WIDTH = {"head_dim": whole("attn.d_head", written="attn.width")}
BIAS = {"attention_bias": flag("attn.bias", default=False, yes="all", no="none")}
BIASES = BIAS | {"mlp_bias": flag("ffn.bias", default=False)}
WINDOW = {"sliding_window": optional("attn.window")}
ROPE = {"rope": rope()}


def _whole_heads(config: Config, facts: Facts) -> None:
    width, heads = facts["d_model"], facts["attn.n_heads"]
    if width % heads:
        raise FileError(
            f"config.json: hidden_size {width} is no multiple of {heads} heads, which "
            "model_type 'llama' requires",
            where=config.where,
        )


def _read_seed_biases(config: Config, facts: Facts) -> None:
    """The output projection's bias has a switch of its own."""
    biased, out = config.flag("attention_bias"), config.flag("attention_out_bias")
    if out and not biased:
        raise config.bad("attention_out_bias", True, "false where attention_bias is false")
    facts["attn.bias"] = "all" if out else "qkv" if biased else "none"


def _write_seed_biases(spec: ModelSpec) -> dict[str, Any]:
    bias = value_of(spec, "attn.bias")
    return {"attention_bias": bias in ("qkv", "all"), "attention_out_bias": bias == "all"}


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    TABLE,
    KEYS | HEAD_DIM | BIASES | ROPE | {"heads": Own(_whole_heads)},
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    TABLE,
    KEYS | HEAD_DIM | WINDOW | ROPE,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
MINISTRAL = Family(
    "ministral",
    "MinistralForCausalLM",
    TABLE,
    KEYS | HEAD_DIM | ROPE | {"windows": windows(0)},
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    TABLE,
    KEYS
    | WIDTH
    | ROPE
    | {
        "biases": Own(_read_seed_biases, _write_seed_biases),
        "mlp_bias": flag("ffn.bias"),
        "residual_dropout": number("dropout.residual"),
    },
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
    NEIGHBOURS,
    KEYS
    | WIDTH
    | {
        "use_bias": (flag("attn.bias", yes="all", no="none"), flag("ffn.bias")),
        "rope": rope(theta=500_000.0),
    },
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
)
