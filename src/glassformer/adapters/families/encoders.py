"""Encoders: BERT, RoBERTa and XLM-RoBERTa, DistilBERT, ModernBERT; with a masked-token head or not.

LayerNorm after each part and after the embedding, learned positions, attention in both directions.
A folder of the body alone (`BertModel`) ends in a vector: BERT's pooled one where it has a pooler,
else the mean over its tokens, which is what sentence embeddings use.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from glassformer.adapters.config import MOST_LAYERS, MOST_POSITIONS, Config
from glassformer.adapters.families.rotary import (
    FULL,
    SLIDING,
    kinds_of,
    read_kinds,
    ropes,
    slide,
    window_of,
)
from glassformer.adapters.keys import GATES, Facts, Own, flag, number, value_of, whole, word
from glassformer.adapters.table import QKV, Family, Row, Table, named
from glassformer.spec.errors import InputError
from glassformer.spec.model import MLP, LayerNorm, Learned, MaskedHead, ModelSpec, VectorHead

PARTS = {
    "attention.self.query": "attn.q_proj",
    "attention.self.key": "attn.k_proj",
    "attention.self.value": "attn.v_proj",
    "attention.output.dense": "attn.o_proj",
    "attention.output.LayerNorm": "attn_norm",
    "intermediate.dense": "ffn.up_proj",
    "output.dense": "ffn.down_proj",
    "output.LayerNorm": "ffn_norm",
}
DISTILLED = {
    "attention.q_lin": "attn.q_proj",
    "attention.k_lin": "attn.k_proj",
    "attention.v_lin": "attn.v_proj",
    "attention.out_lin": "attn.o_proj",
    "sa_layer_norm": "attn_norm",
    "ffn.lin1": "ffn.up_proj",
    "ffn.lin2": "ffn.down_proj",
    "output_layer_norm": "ffn_norm",
}


def table(body: str, layer: str, parts: Mapping[str, str], head: tuple[Row, ...]) -> Table:
    """Return the names of a body under this prefix, and of its head."""
    outer = {
        "word_embeddings": "embed",
        "position_embeddings": "position",
        "token_type_embeddings": "token_type",
        "LayerNorm": "embed_norm",
    }
    return Table(
        rows=(
            *named({f"{body}embeddings.{name}": ours for name, ours in outer.items()}),
            *named(parts, layer=f"{body}{layer}.{{}}."),
            *head,
        ),
        ignored=(
            f"{body}embeddings.position_ids",
            # Parts of a pre-training that a folder may still hold, and copies of what is tied.
            *(f"{body}pooler.dense.{leaf}" for leaf in ("weight", "bias") if body),
            *(f"cls.seq_relationship.{leaf}" for leaf in ("weight", "bias")),
            *("cls.predictions.decoder.bias", "lm_head.decoder.bias"),
            *("cls.predictions.bias", "lm_head.bias"),
        ),
        older={".gamma": ".weight", ".beta": ".bias"},
    )


def head_rows(dense: str, norm: str, *last: Row) -> tuple[Row, ...]:
    """Return the names of a masked-token head."""
    names = {dense: "transforms.masked.dense", norm: "transforms.masked.norm"}
    return (*named(names), *last)


# --- BERT and RoBERTa -----------------------------------------------------------------------------

BERT_KEYS = {
    "vocab_size": whole("vocab_size"),
    "hidden_size": whole("d_model"),
    "num_hidden_layers": whole("layers", most=MOST_LAYERS),
    "num_attention_heads": whole("attn.n_heads"),
    "intermediate_size": whole("ffn.d_ff"),
    "hidden_act": word("ffn.activation", default="gelu"),
    "max_position_embeddings": whole("max_seq_len", most=MOST_POSITIONS),
    "layer_norm_eps": number("norm.eps", default=1e-12),
    "hidden_dropout_prob": number("dropout.residual", "dropout.embedding", default=0.1),
    "attention_probs_dropout_prob": number("dropout.attention", default=0.1),
    "initializer_range": number("init.std", default=0.02),
}
#: An encoder: norms after the parts, attention in both directions.
ENCODER = {
    "norm": LayerNorm,
    "ffn": MLP,
    "attn.bias": "all",
    "attn.causal": False,
    "block.placement": "post",
    "position": Learned,
    "embed_norm": True,
    "final_norm": False,
}
MASKED: Facts = {"head": MaskedHead}


def _absolute(config: Config, facts: Facts) -> None:
    kind = config.any("position_embedding_type", default="absolute")
    if kind != "absolute":
        raise config.bad("position_embedding_type", kind, "absolute")
    facts["token_types"] = config.whole("type_vocab_size", default=2)


def _write_types(spec: ModelSpec) -> dict[str, Any]:
    head = spec.heads[0]
    tied = head.tied if isinstance(head, MaskedHead) else True
    return {"type_vocab_size": max(spec.token_types, 1), "tie_word_embeddings": tied}


def _after_padding(config: Config, facts: Facts) -> None:
    """RoBERTa's positions begin after its padding id."""
    pad = config.any("pad_token_id", default=1)
    if type(pad) is not int or not 0 <= pad <= 8:
        raise config.bad("pad_token_id", pad, "a small whole number, which positions begin after")
    most = facts["max_seq_len"]
    if most <= pad + 1:
        raise config.bad("max_position_embeddings", most, f"more than {pad + 1}")
    facts |= {"position.offset": pad + 1, "max_seq_len": most - pad - 1}


def _write_padding(spec: ModelSpec) -> dict[str, Any]:
    offset = value_of(spec, "position.offset") or 0
    return {
        "max_position_embeddings": spec.max_seq_len + offset,
        "pad_token_id": max(offset - 1, 0),
    }


def _read_masked(config: Config, facts: Facts) -> None:
    facts["head.tied"] = config.flag("tie_word_embeddings", default=True)
    # RoBERTa's head has GELU, whatever the blocks have.
    roberta = facts.get("position.offset")
    facts["transform.activation"] = "gelu" if roberta else facts["ffn.activation"]


def _write_masked(spec: ModelSpec) -> dict[str, Any]:
    if value_of(spec, "head.tied") is False:
        raise InputError(
            "tie_word_embeddings: an untied head here; theirs has a second bias that nothing reads",
            hint="an untied masked-token head is written for DistilBERT and ModernBERT",
        )
    return {}


HARMLESS = (
    *("classifier_dropout", "qa_dropout", "seq_classif_dropout", "directionality", "pooler_type"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    "pooler_size_per_head",
)


def _bert(
    kind: str, name: str, prefix: str, dense: str, norm: str, decoder: str, bias: str
) -> tuple[Family, Family]:
    """Return the two families of a model_type: with its masked-token head, and the body alone."""

    def names(spec: ModelSpec) -> Table:
        # An untied head adds the bias beside its matrix; the other one, which its files hold too,
        # is then a parameter that no code reads.
        own = f"{decoder}.bias" if value_of(spec, "head.tied") is False else bias
        head = (Row(f"{decoder}.weight", "heads.masked.weight"), Row(own, "heads.masked.bias"))
        return table(prefix, "encoder.layer", PARTS, head_rows(dense, norm, *head))

    padding = {"padding": Own(_after_padding, _write_padding)}
    keys = BERT_KEYS | {"types": Own(_absolute, _write_types)}
    keys |= padding if prefix == "roberta." else {"padding": Own(lambda *_: None, _write_padding)}
    masked = Family(
        kind,
        f"{name}ForMaskedLM",
        names,
        keys | {"head": Own(_read_masked, _write_masked)},
        ENCODER | MASKED,
        harmless=HARMLESS,
    )
    body = Family(
        kind,
        f"{name}Model",
        table("", "encoder.layer", PARTS, named({"pooler.dense": "heads.vector"})),
        keys,
        ENCODER | {"head": VectorHead(readout="first", pooler=True)},
        harmless=(*HARMLESS, "tie_word_embeddings"),
    )
    return masked, body


BERT, BERT_BODY = _bert(
    "bert",
    "Bert",
    "bert.",
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
LM_HEAD = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
ROBERTA, ROBERTA_BODY = _bert("roberta", "Roberta", "roberta.", *LM_HEAD)
XLM_ROBERTA, XLM_ROBERTA_BODY = _bert("xlm-roberta", "XLMRoberta", "roberta.", *LM_HEAD)

# --- DistilBERT: BERT without token types and pooler, under names of its own ----------------------

DISTIL_KEYS = {
    "vocab_size": whole("vocab_size"),
    "dim": whole("d_model", also=("hidden_size",)),
    "n_layers": whole("layers", most=MOST_LAYERS),
    "n_heads": whole("attn.n_heads"),
    "hidden_dim": whole("ffn.d_ff"),
    "activation": word("ffn.activation", default="gelu"),
    "max_position_embeddings": whole("max_seq_len", most=MOST_POSITIONS),
    "dropout": number(
        "dropout.residual", "dropout.embedding", default=0.1, also=("hidden_dropout_prob",)
    ),
    "attention_dropout": number(
        "dropout.attention", default=0.1, also=("attention_probs_dropout_prob",)
    ),
    "initializer_range": number("init.std", default=0.02),
    "tie_word_embeddings": True,
    "padding": Own(lambda *_: None, _write_padding),
    # Sinusoidal positions are a table like any other here: stored, only their first values differ.
    "positions": Own(
        lambda config, _: config.flag("sinusoidal_pos_embds", default=False),
        lambda _: {"sinusoidal_pos_embds": False},
    ),
}
DISTIL = ENCODER | {"norm": LayerNorm(eps=1e-12)}
DISTILBERT = Family(
    "distilbert",
    "DistilBertForMaskedLM",
    table(
        "distilbert.",
        "transformer.layer",
        DISTILLED,
        head_rows(
            "vocab_transform", "vocab_layer_norm", *named({"vocab_projector": "heads.masked"})
        ),
    ),
    DISTIL_KEYS
    | {
        "head": Own(_read_masked),
        "tie_word_embeddings": flag("head.tied", default=True),
    },
    DISTIL | MASKED,
    harmless=HARMLESS,
    idle={"tie_weights_": True},
)
DISTILBERT_BODY = Family(
    "distilbert",
    "DistilBertModel",
    table("", "transformer.layer", DISTILLED, ()),
    DISTIL_KEYS,
    DISTIL | {"head": VectorHead},
    harmless=(*HARMLESS, "tie_word_embeddings", "tie_weights_"),
)


# --- ModernBERT -----------------------------------------------------------------------------------


def modern_table(body: str, head: tuple[Row, ...]) -> Table:
    """Return ModernBERT's names: q, k and v in one matrix, gate and up in another."""
    outer = {
        "embeddings.tok_embeddings": "embed",
        "embeddings.norm": "embed_norm",
        "final_norm": "final_norm",
    }
    parts: dict[str, str | tuple[str, ...]] = {
        "attn.Wqkv": QKV,
        "attn.Wo": "attn.o_proj",
        "attn_norm": "attn_norm",
        "mlp_norm": "ffn_norm",
        "mlp.Wi": ("ffn.gate_proj", "ffn.up_proj"),
        "mlp.Wo": "ffn.down_proj",
    }
    return Table(
        rows=(
            *named({body + name: ours for name, ours in outer.items()}),
            *named(parts, layer=f"{body}layers.{{}}."),
            *head,
        ),
    )


def _read_windows(config: Config, facts: Facts) -> None:
    """Windows are to both sides, in most layers.

    The first layer's attention reads the normalised embedding as it is.
    """
    layers = facts["layers"]
    every = config.whole("global_attn_every_n_layers", default=3)
    kinds = read_kinds(config, absent=[SLIDING if i % every else FULL for i in range(layers)])
    slide(facts, kinds, config.whole("local_attention") // 2 + 1)
    facts["each.block.placement"] = ["pre" if layer else "pre_ffn" for layer in range(layers)]


def _write_windows(spec: ModelSpec) -> dict[str, Any]:
    window = window_of(spec) or 65
    return {"layer_types": kinds_of(spec), "local_attention": 2 * (window - 1)}


MODERN_KEYS: dict[str, Any] = {
    "vocab_size": whole("vocab_size"),
    "hidden_size": whole("d_model"),
    "num_hidden_layers": whole("layers", most=MOST_LAYERS),
    "num_attention_heads": whole("attn.n_heads"),
    "intermediate_size": whole("ffn.d_ff"),
    "hidden_activation": word("ffn.activation", words=GATES, default="gelu"),
    "max_position_embeddings": whole("max_seq_len", most=MOST_POSITIONS),
    "norm_eps": number("norm.eps"),
    "norm_bias": flag("norm.bias"),
    "attention_bias": flag("attn.bias", yes="all", no="none"),
    "attention_dropout": 0.0,
    "mlp_bias": flag("ffn.bias"),
    "mlp_dropout": number("dropout.ffn", default=0.0),
    "embedding_dropout": number("dropout.embedding", default=0.0),
    "windows": Own(_read_windows, _write_windows),
    "rope": ropes(160_000.0, 10_000.0, keys=("global_rope_theta", "local_rope_theta")),
    "initializer_range": number("init.std", default=0.02),
    **dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id")),
    "pad_token_id": 0,
}
#: Keys of the head, and what a folder of the body says there.
MODERN_HEAD = {
    "classifier_activation": (word("transform.activation", default="gelu"), "gelu"),
    "classifier_bias": (flag("transform.bias"), False),
    "decoder_bias": (flag("head.bias"), True),
    "tie_word_embeddings": (flag("head.tied"), True),
}
MODERN = {
    "norm": LayerNorm,
    "attn.causal": False,
    "embed_norm": True,
}
MODERNBERT = Family(
    "modernbert",
    "ModernBertForMaskedLM",
    modern_table(
        "model.", head_rows("head.dense", "head.norm", *named({"decoder": "heads.masked"}))
    ),
    MODERN_KEYS | {name: key for name, (key, _) in MODERN_HEAD.items()},
    MODERN | MASKED,
    harmless=(
        *("classifier_dropout", "classifier_pooling", "initializer_cutoff_factor", "sep_token_id"),
        *("cls_token_id", "deterministic_flash_attn", "repad_logits_with_grad"),
        *("sparse_pred_ignore_index", "reference_compile", "layer_norm_eps"),
        "position_embedding_type",
    ),
    idle={"sparse_prediction": False, "attention_dropout": 0.0},
    defaults={
        "local_attention": 128,
        "norm_eps": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "classifier_bias": False,
        "decoder_bias": True,
        "tie_word_embeddings": True,
    },
)
MODERNBERT_BODY = replace(
    MODERNBERT,
    architecture="ModernBertModel",
    table=modern_table("", ()),
    keys=MODERN_KEYS | {name: usual for name, (_, usual) in MODERN_HEAD.items()},
    fixed=MODERN | {"head": VectorHead},
    harmless=(*MODERNBERT.harmless, *MODERN_HEAD),
)
ENCODERS = (
    *(BERT, BERT_BODY, ROBERTA, ROBERTA_BODY, XLM_ROBERTA, XLM_ROBERTA_BODY),
    *(DISTILBERT, DISTILBERT_BODY, MODERNBERT, MODERNBERT_BODY),
)
