"""Encoders: BERT, RoBERTa and XLM-RoBERTa, DistilBERT, ModernBERT; with a masked-token head or not.

LayerNorm after each part and after the embedding, learned positions, attention in both directions.
A folder of the body alone (`BertModel`) ends in a vector: BERT's pooled one where it has a pooler,
else the mean over its tokens, which is what sentence embeddings use.
"""

from dataclasses import replace
from itertools import groupby
from typing import Any

from glassformer.adapters.config import MOST_LAYERS, MOST_POSITIONS, Config, block_of
from glassformer.adapters.families.gpt2 import ACTIVATIONS
from glassformer.adapters.families.llama import (
    FULL,
    SLIDING,
    gate_word,
    joined,
    kinds_of,
    read_gate,
    read_kinds,
    read_rotaries,
    window_of,
    write_rotaries,
)
from glassformer.adapters.table import Family, Names, Row, Table, dense
from glassformer.spec.errors import InputError
from glassformer.spec.init import NormalInit
from glassformer.spec.model import (
    MLP,
    Activation,
    Attention,
    Block,
    Dropout,
    Head,
    HeadTransform,
    LayerNorm,
    Layers,
    Learned,
    MaskedHead,
    ModelSpec,
    Stack,
    SwiGLU,
    VectorHead,
)

BLOCK = "blocks.{}."
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


def _pairs(theirs: str, ours: str) -> tuple[Row, Row]:
    """Return the rows of a weight and its bias."""
    return Row(f"{theirs}.weight", f"{ours}.weight"), Row(f"{theirs}.bias", f"{ours}.bias")


def table(body: str, layer: str, parts: dict[str, str], head: tuple[Row, ...]) -> Table:
    """Return the names of a body under this prefix, and of its head."""
    return Table(
        rows=(
            Row(f"{body}embeddings.word_embeddings.weight", "embed.weight"),
            Row(f"{body}embeddings.position_embeddings.weight", "position.weight"),
            Row(f"{body}embeddings.token_type_embeddings.weight", "token_type.weight"),
            *_pairs(f"{body}embeddings.LayerNorm", "embed_norm"),
            *(
                row
                for theirs, ours in parts.items()
                for row in _pairs(f"{body}{layer}.{{}}.{theirs}", f"{BLOCK}{ours}")
            ),
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


POOLER = _pairs("pooler.dense", "heads.vector")
BERT_HEAD = (
    *_pairs("cls.predictions.transform.dense", "transforms.masked.dense"),
    *_pairs("cls.predictions.transform.LayerNorm", "transforms.masked.norm"),
    Row("cls.predictions.decoder.weight", "heads.masked.weight"),
    Row("cls.predictions.bias", "heads.masked.bias"),
)
ROBERTA_HEAD = (
    *_pairs("lm_head.dense", "transforms.masked.dense"),
    *_pairs("lm_head.layer_norm", "transforms.masked.norm"),
    Row("lm_head.decoder.weight", "heads.masked.weight"),
    Row("lm_head.bias", "heads.masked.bias"),
)
DISTIL_HEAD = (
    *_pairs("vocab_transform", "transforms.masked.dense"),
    *_pairs("vocab_layer_norm", "transforms.masked.norm"),
    *_pairs("vocab_projector", "heads.masked"),
)


# --- reading --------------------------------------------------------------------------------------


def read_body(
    config: Config, *, head: Head, block: Block, layers: int, offset: int = 0, types: int = 0
) -> ModelSpec:
    """Read what these families share."""
    positions = config.whole("max_position_embeddings", most=MOST_POSITIONS)
    if positions <= offset:
        raise config.bad("max_position_embeddings", positions, f"more than {offset}")
    return ModelSpec(
        vocab_size=config.whole("vocab_size"),
        d_model=config.whole("hidden_size", "dim"),
        max_seq_len=positions - offset,
        position=Learned(offset=offset),
        token_types=types,
        decoder=Stack(
            layers=(Layers(count=layers, block=block),),
            embed_norm=block.norm,
            dropout=Dropout(
                embedding=config.number("hidden_dropout_prob", "dropout", default=0.1),
                attention=config.number(
                    "attention_probs_dropout_prob", "attention_dropout", default=0.1
                ),
                residual=config.number("hidden_dropout_prob", "dropout", default=0.1),
            ),
        ),
        heads=(head,),
        init=NormalInit(std=config.number("initializer_range", default=0.02)),
    )


def _masked(config: Config, activation: Activation, norm: LayerNorm) -> MaskedHead:
    return MaskedHead(
        tied=config.flag("tie_word_embeddings", default=True),
        transform=HeadTransform(activation=activation, norm=norm),
    )


def _untied(spec: ModelSpec) -> bool:
    return any(isinstance(head, MaskedHead) and not head.tied for head in spec.heads)


def bert_table(prefix: str, head: tuple[Row, ...]) -> Names:
    """Return a function to the names of BERT or RoBERTa with its masked-token head.

    An untied head adds the bias beside its matrix; the other one, which its files hold too, is then
    a parameter that no code reads.
    """

    def names(spec: ModelSpec) -> Table:
        rows = head
        if _untied(spec):
            base = head[-1].theirs.removesuffix(".bias")
            rows = (*head[:-1], Row(f"{base}.decoder.bias", "heads.masked.bias"))
        return table(prefix, "encoder.layer", PARTS, rows)

    return names


def write_bert_head(spec: ModelSpec) -> dict[str, Any]:
    """Return the config keys of BERT and RoBERTa with a masked-token head."""
    if _untied(spec):
        raise InputError(
            "tie_word_embeddings: an untied head here; theirs has a second bias that nothing reads",
            hint="an untied masked-token head is written for DistilBERT and ModernBERT",
        )
    return write_bert(spec)


def _activation(config: Config, key: str) -> Activation:
    word = config.one_of(key, {name: name for name in ACTIVATIONS}, default="gelu")
    return ACTIVATIONS[word]


def read_bert(config: Config, *, masked: bool, offset: int = 0, types: int = 2) -> ModelSpec:
    """Read BERT's config; RoBERTa's positions begin after its padding id."""
    kind = config.any("position_embedding_type", default="absolute")
    if kind != "absolute":
        raise config.bad("position_embedding_type", kind, "absolute")
    activation = _activation(config, "hidden_act")
    norm = LayerNorm(eps=config.number("layer_norm_eps", default=1e-12))
    block = Block(
        mixer=Attention(n_heads=config.whole("num_attention_heads"), bias="all", causal=False),
        ffn=MLP(d_ff=config.whole("intermediate_size"), activation=activation),
        norm=norm,
        placement="post",
    )
    return read_body(
        config,
        # RoBERTa's head has GELU, whatever the blocks have.
        head=_masked(config, "gelu" if offset else activation, norm)
        if masked
        else VectorHead(readout="first", pooler=True),
        block=block,
        layers=config.whole("num_hidden_layers", most=MOST_LAYERS),
        offset=offset,
        types=config.whole("type_vocab_size", default=types),
    )


def read_roberta(config: Config, *, masked: bool) -> ModelSpec:
    """Read RoBERTa's config."""
    pad = config.any("pad_token_id", default=1)
    if type(pad) is not int or not 0 <= pad <= 8:
        raise config.bad("pad_token_id", pad, "a small whole number, which positions begin after")
    return read_bert(config, masked=masked, offset=pad + 1)


def read_distilbert(config: Config, *, masked: bool) -> ModelSpec:
    """Read DistilBERT's config: BERT without token types and pooler, under names of its own."""
    # Sinusoidal positions are a table like any other here: stored, only their first values differ.
    config.flag("sinusoidal_pos_embds", default=False)
    activation, norm = _activation(config, "activation"), LayerNorm(eps=1e-12)
    block = Block(
        mixer=Attention(n_heads=config.whole("n_heads"), bias="all", causal=False),
        ffn=MLP(d_ff=config.whole("hidden_dim"), activation=activation),
        norm=norm,
        placement="post",
    )
    head = _masked(config, activation, norm) if masked else VectorHead()
    layers = config.whole("n_layers", most=MOST_LAYERS)
    return read_body(config, head=head, block=block, layers=layers)


# --- writing --------------------------------------------------------------------------------------


def write_bert(spec: ModelSpec) -> dict[str, Any]:
    """Return the config keys of BERT and RoBERTa for a spec."""
    block, ffn = block_of(spec.decoder), dense(block_of(spec.decoder).ffn)
    head, rates = spec.heads[0], spec.decoder.dropout
    offset = spec.position.offset if isinstance(spec.position, Learned) else 0
    words = {meaning: word for word, meaning in reversed(ACTIVATIONS.items())}
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": block.attention.n_heads,
        "intermediate_size": ffn.d_ff,
        "hidden_act": words[ffn.activation] if isinstance(ffn, MLP) else "gelu",
        "max_position_embeddings": spec.max_seq_len + offset,
        "type_vocab_size": max(spec.token_types, 1),
        "layer_norm_eps": block.norm.eps,
        "hidden_dropout_prob": rates.residual,
        "attention_probs_dropout_prob": rates.attention,
        "initializer_range": spec.init.std if isinstance(spec.init, NormalInit) else 0.02,
        "tie_word_embeddings": head.tied if isinstance(head, MaskedHead) else True,
        "pad_token_id": max(offset - 1, 0),
    }


def write_distilbert(spec: ModelSpec) -> dict[str, Any]:
    """Return the config keys of DistilBERT for a spec."""
    made = write_bert(spec)
    names = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    }
    same = ("vocab_size", "max_position_embeddings", "initializer_range", "tie_word_embeddings")
    return (
        {ours: made[theirs] for theirs, ours in names.items()}
        | {key: made[key] for key in (*same, "pad_token_id")}
        | {"sinusoidal_pos_embds": False}
    )


HARMLESS = (
    *("classifier_dropout", "qa_dropout", "seq_classif_dropout", "directionality", "pooler_type"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    "pooler_size_per_head",
)


def _bert(kind: str, masked: str, body: str, prefix: str, head: tuple[Row, ...]) -> list[Family]:
    """Return the two families of a model_type: with its masked-token head, and the body alone."""
    roberta = prefix == "roberta."

    def read(config: Config, *, masked: bool) -> ModelSpec:
        if roberta:
            return read_roberta(config, masked=masked)
        return read_bert(config, masked=masked)

    return [
        Family(
            kind,
            masked,
            bert_table(prefix, head),
            lambda config: read(config, masked=True),
            write_bert_head,
            harmless=HARMLESS,
        ),
        Family(
            kind,
            body,
            table("", "encoder.layer", PARTS, POOLER),
            lambda config: read(config, masked=False),
            write_bert,
            harmless=(*HARMLESS, "tie_word_embeddings"),
        ),
    ]


BERT, BERT_BODY = _bert("bert", "BertForMaskedLM", "BertModel", "bert.", BERT_HEAD)
ROBERTA, ROBERTA_BODY = _bert(
    "roberta", "RobertaForMaskedLM", "RobertaModel", "roberta.", ROBERTA_HEAD
)
XLM_ROBERTA, XLM_ROBERTA_BODY = _bert(
    "xlm-roberta", "XLMRobertaForMaskedLM", "XLMRobertaModel", "roberta.", ROBERTA_HEAD
)
DISTILBERT = Family(
    "distilbert",
    "DistilBertForMaskedLM",
    table("distilbert.", "transformer.layer", DISTILLED, DISTIL_HEAD),
    lambda config: read_distilbert(config, masked=True),
    write_distilbert,
    harmless=HARMLESS,
    idle={"tie_weights_": True},
)
DISTILBERT_BODY = Family(
    "distilbert",
    "DistilBertModel",
    table("", "transformer.layer", DISTILLED, ()),
    lambda config: read_distilbert(config, masked=False),
    write_distilbert,
    harmless=(*HARMLESS, "tie_word_embeddings", "tie_weights_"),
)


# --- ModernBERT -----------------------------------------------------------------------------------

MODERN_PARTS = {
    "attn.Wo": "attn.o_proj",
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "mlp.Wo": "ffn.down_proj",
}
MODERN_HEAD = (
    *_pairs("head.dense", "transforms.masked.dense"),
    *_pairs("head.norm", "transforms.masked.norm"),
    *_pairs("decoder", "heads.masked"),
)


def modern_table(body: str, head: tuple[Row, ...]) -> Table:
    """Return ModernBERT's names: q, k and v in one matrix, gate and up in another."""
    layer = f"{body}layers.{{}}."
    qkv = [f"{BLOCK}attn.{letter}_proj" for letter in "qkv"]
    return Table(
        rows=(
            Row(f"{body}embeddings.tok_embeddings.weight", "embed.weight"),
            *_pairs(f"{body}embeddings.norm", "embed_norm"),
            *joined(f"{layer}attn.Wqkv", *qkv),
            *joined(f"{layer}mlp.Wi", f"{BLOCK}ffn.gate_proj", f"{BLOCK}ffn.up_proj"),
            *(
                row
                for name, ours in MODERN_PARTS.items()
                for row in _pairs(layer + name, BLOCK + ours)
            ),
            *_pairs(f"{body}final_norm", "final_norm"),
            *head,
        ),
    )


def read_modern(config: Config, *, masked: bool) -> ModelSpec:
    """Read ModernBERT's config: windows to both sides in most layers, two rotary bases.

    The first layer's attention reads the normalised embedding as it is.
    """
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    every = config.whole("global_attn_every_n_layers", default=3)
    kinds = read_kinds(config, absent=[SLIDING if i % every else FULL for i in range(layers)])
    window = config.whole("local_attention") // 2 + 1
    most = config.whole("max_position_embeddings", most=MOST_POSITIONS)
    base = config.number("global_rope_theta", default=160_000.0)
    near = config.any("local_rope_theta", default=10_000.0)
    near = base if near is None else config.number("local_rope_theta", default=10_000.0)
    whole, local = read_rotaries(config, max_seq_len=most, thetas=(base, near))
    norm = LayerNorm(eps=config.number("norm_eps"), bias=config.flag("norm_bias"))
    attention = Attention(
        n_heads=config.whole("num_attention_heads"),
        bias="all" if config.flag("attention_bias") else "none",
        causal=False,
    )
    slides = replace(attention, window=window, position=None if local == whole else local)
    blocks = [
        Block(
            mixer=slides if kind == SLIDING else attention,
            ffn=SwiGLU(
                d_ff=config.whole("intermediate_size"),
                bias=config.flag("mlp_bias"),
                activation=read_gate(config, "hidden_activation", default="gelu"),
            ),
            norm=norm,
            placement="pre" if layer else "pre_ffn",
        )
        for layer, kind in enumerate(kinds)
    ]
    transform = HeadTransform(
        activation=_activation(config, "classifier_activation"),
        norm=norm,
        bias=config.flag("classifier_bias"),
    )
    tied, biased = config.flag("tie_word_embeddings"), config.flag("decoder_bias")
    return ModelSpec(
        vocab_size=config.whole("vocab_size"),
        d_model=config.whole("hidden_size"),
        max_seq_len=most,
        position=whole,
        decoder=Stack(
            layers=tuple(Layers(count=len(list(run)), block=one) for one, run in groupby(blocks)),
            embed_norm=norm,
            final_norm=norm,
            dropout=Dropout(
                embedding=config.number("embedding_dropout", default=0.0),
                ffn=config.number("mlp_dropout", default=0.0),
            ),
        ),
        heads=(
            MaskedHead(tied=tied, bias=biased, transform=transform) if masked else VectorHead(),
        ),
        init=NormalInit(std=config.number("initializer_range", default=0.02)),
    )


def write_modern(spec: ModelSpec) -> dict[str, Any]:
    """Return ModernBERT's config keys."""
    block, head, rates = block_of(spec.decoder), spec.heads[0], spec.decoder.dropout
    ffn, norm = dense(block.ffn), block.norm
    masked = head if isinstance(head, MaskedHead) else MaskedHead()
    transform = masked.transform or HeadTransform(bias=False)
    words = {meaning: word for word, meaning in reversed(ACTIVATIONS.items())}
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": block.attention.n_heads,
        "intermediate_size": ffn.d_ff,
        "hidden_activation": gate_word(ffn),
        "max_position_embeddings": spec.max_seq_len,
        "norm_eps": norm.eps,
        "norm_bias": isinstance(norm, LayerNorm) and norm.bias,
        "attention_bias": block.attention.bias == "all",
        "attention_dropout": 0.0,
        "mlp_bias": ffn.bias,
        "mlp_dropout": rates.ffn,
        "embedding_dropout": rates.embedding,
        "layer_types": kinds_of(spec),
        "local_attention": 2 * ((window_of(spec) or 65) - 1),
        **write_rotaries(spec),
        "classifier_activation": words.get(transform.activation, "gelu"),
        "classifier_bias": transform.bias,
        "decoder_bias": masked.bias,
        "initializer_range": spec.init.std if isinstance(spec.init, NormalInit) else 0.02,
        "tie_word_embeddings": masked.tied,
        **dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id")),
        "pad_token_id": 0,
    }


MODERN_HARMLESS = (
    *("classifier_dropout", "classifier_pooling", "initializer_cutoff_factor", "sep_token_id"),
    *(
        "cls_token_id",
        "deterministic_flash_attn",
        "repad_logits_with_grad",
        "sparse_pred_ignore_index",
    ),
    *("reference_compile", "layer_norm_eps", "position_embedding_type"),
)
MODERN_DEFAULTS = {
    "local_attention": 128,
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
    "tie_word_embeddings": True,
}
MODERNBERT = Family(
    "modernbert",
    "ModernBertForMaskedLM",
    modern_table("model.", MODERN_HEAD),
    lambda config: read_modern(config, masked=True),
    write_modern,
    harmless=MODERN_HARMLESS,
    idle={"sparse_prediction": False, "attention_dropout": 0.0},
    defaults=MODERN_DEFAULTS,
)
MODERNBERT_BODY = Family(
    "modernbert",
    "ModernBertModel",
    modern_table("", ()),
    lambda config: read_modern(config, masked=False),
    write_modern,
    harmless=MODERN_HARMLESS,
    idle={"sparse_prediction": False, "attention_dropout": 0.0},
    defaults=MODERN_DEFAULTS,
)
ENCODERS = (
    *(BERT, BERT_BODY, ROBERTA, ROBERTA_BODY, XLM_ROBERTA, XLM_ROBERTA_BODY),
    *(DISTILBERT, DISTILBERT_BODY, MODERNBERT, MODERNBERT_BODY),
)
