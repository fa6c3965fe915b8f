"""Encoder-decoders: BART, mBART, Marian, Pegasus, M2M-100 and NLLB; and T5 in both versions.

One table of names for all of BART's kind. They differ in where the norms are, in positions (a
learned table with two rows in front, or sinusoids in one of two forms), in whether the embedding is
scaled, and in a bias of the logits. Encoder and decoder may differ in depth, heads and width.

T5 has names of its own, biases by distance in place of positions, and scores without a scale. Its
first version ties and scales the head; version 1.1 (Flan) has gates, and a head of its own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from glassformer.adapters.config import MOST_LAYERS, MOST_POSITIONS, Config, block_of
from glassformer.adapters.keys import Facts, Own, number, value_of, whole, word
from glassformer.adapters.table import Array, Family, Row, Shape, Table, named
from glassformer.spec.errors import InputError
from glassformer.spec.model import (
    MLP,
    LayerNorm,
    Learned,
    ModelSpec,
    PlainEmbedding,
    Position,
    RelativeBias,
    ScaledEmbedding,
    Sinusoidal,
    SwiGLU,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class OneRow:
    """A vector that is stored as a matrix of one row."""

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        return (1, *shapes[0])

    def split(self, stored: Array, shapes: Sequence[Shape]) -> list[Array]:
        return [stored.reshape(shapes[0])]

    def join(self, tensors: "Sequence[Tensor]") -> "Tensor":
        return tensors[0].reshape(1, -1)


PARTS = {
    **{f"self_attn.{letter}_proj": f"attn.{letter}_proj" for letter in "qkv"},
    "self_attn.out_proj": "attn.o_proj",
    "self_attn_layer_norm": "attn_norm",
    **{f"encoder_attn.{letter}_proj": f"cross.{letter}_proj" for letter in "qkv"},
    "encoder_attn.out_proj": "cross.o_proj",
    "encoder_attn_layer_norm": "cross_norm",
    "fc1": "ffn.up_proj",
    "fc2": "ffn.down_proj",
    "final_layer_norm": "ffn_norm",
}


OUTER = {
    "embed_positions": "position",
    "layernorm_embedding": "embed_norm",
    "layer_norm": "final_norm",
}
SIDES = ("encoder", "decoder")
TABLE = Table(
    rows=(
        *named({"model.shared": "encoder.embed", "model.decoder.embed_tokens": "decoder.embed"}),
        *named(
            {
                f"model.{side}.{theirs}": f"{side}.{ours}"
                for side in SIDES
                for theirs, ours in (
                    OUTER
                    | {f"layers.{{}}.{name}": f"blocks.{{}}.{part}" for name, part in PARTS.items()}
                ).items()
            }
        ),
        Row("lm_head.weight", "heads.next.weight"),
        Row("final_logits_bias", "heads.next.bias", OneRow()),
    ),
    ignored=(
        "model.encoder.embed_tokens.weight",  # a copy of what is shared
        *(
            f"model.{side}.embed_positions.{leaf}"
            for side in SIDES
            for leaf in ("weight", "weights")
        ),
    ),
)


def _encodes(config: Config, _: Facts) -> None:
    if not config.flag("is_encoder_decoder", default=True):
        raise config.bad("is_encoder_decoder", False, "true")


def _read_shared(config: Config, facts: Facts) -> None:
    """Encoder, decoder and head share one table."""
    for key in ("share_encoder_decoder_embeddings", "tie_word_embeddings"):
        if not config.flag(key, default=True):
            raise InputError(
                f"'{key}' is false: encoder, decoder or head have tables of their own",
                hint="released models of this kind share one; others are not read",
            )
    vocab = facts["vocab_size"]
    if config.whole("decoder_vocab_size", default=vocab) != vocab:
        raise config.bad("decoder_vocab_size", config.any("decoder_vocab_size"), str(vocab))
    position = facts["position"]
    if isinstance(position, Sinusoidal) and position.form == "fairseq":
        pad = config.any("pad_token_id", default=1)
        if type(pad) is not int or not 0 <= pad <= 8:
            raise config.bad("pad_token_id", pad, "a small whole number: positions begin after it")
        facts["position"] = replace(position, offset=pad + 1)
    scaled = config.flag("scale_embedding", default=False)
    facts["embedding"] = ScaledEmbedding if scaled else PlainEmbedding


def _write_shared(spec: ModelSpec) -> dict[str, Any]:
    return {
        "scale_embedding": isinstance(spec.embedding, ScaledEmbedding),
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "pad_token_id": max((value_of(spec, "position.offset") or 0) - 1, 0),
    }


PAIR_KEYS = {
    "vocab_size": whole("vocab_size"),
    "d_model": whole("d_model"),
    "max_position_embeddings": whole("max_seq_len", most=MOST_POSITIONS),
    "activation_function": word("ffn.activation", default="gelu"),
    "encoder_layers": whole("encoder.layers", most=MOST_LAYERS),
    "encoder_attention_heads": whole("encoder.attn.n_heads"),
    "encoder_ffn_dim": whole("encoder.ffn.d_ff"),
    "decoder_layers": whole("layers", most=MOST_LAYERS),
    "decoder_attention_heads": whole("attn.n_heads"),
    "decoder_ffn_dim": whole("ffn.d_ff"),
    "dropout": number("dropout.residual", "dropout.embedding", default=0.1),
    "attention_dropout": number("dropout.attention", default=0.0),
    "activation_dropout": number("dropout.ffn", default=0.0),
    "init_std": number("init.std", default=0.02),
    "encodes": Own(_encodes),
    "shared": Own(_read_shared, _write_shared),
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


def _family(
    model_type: str,
    architecture: str,
    position: Position,
    *,
    pre: bool = False,
    embed_norm: bool = False,
    bias: bool = True,
    written: bool = True,
    defaults: Mapping[str, Any] | None = None,
) -> Family:
    """Return a family of BART's kind; those with norms before the parts have one at the end."""
    return Family(
        model_type,
        architecture,
        TABLE,
        PAIR_KEYS,
        {
            "norm": LayerNorm,
            "ffn": MLP,
            "attn.bias": "all",
            "block.placement": "pre" if pre else "post",
            "embed_norm": embed_norm,
            "final_norm": pre,
            "head.bias": bias,
            "position": position,
        },
        written=written,
        harmless=(
            *("encoder_layerdrop", "decoder_layerdrop", "classifier_dropout", "classif_dropout"),
            *("num_hidden_layers", "force_bos_token_to_be_generated"),
            *("add_bias_logits", "add_final_layer_norm", "normalize_before", "normalize_embedding"),
            *("static_position_embeddings", "extra_pos_embeddings", "classifier_dropout_prob"),
        ),
        defaults=defaults or {},
        encodes=True,
    )


LEARNED, HALVES = Learned(offset=2), Sinusoidal(form="halves")
FAIRSEQ = Sinusoidal(form="fairseq", offset=2)
BART = _family("bart", "BartForConditionalGeneration", LEARNED, embed_norm=True)
MBART = _family("mbart", "MBartForConditionalGeneration", LEARNED, pre=True, embed_norm=True)
MARIAN = _family("marian", "MarianMTModel", HALVES)
PEGASUS = _family(
    "pegasus",
    "PegasusForConditionalGeneration",
    HALVES,
    pre=True,
    written=False,  # its files hold the sines, which are no parameters here
)
M2M_100 = _family(
    "m2m_100",
    "M2M100ForConditionalGeneration",
    FAIRSEQ,
    pre=True,
    bias=False,
    defaults={"scale_embedding": True, "activation_function": "relu", "attention_dropout": 0.1},
)


# --- T5 -------------------------------------------------------------------------------------------


def t5_table(spec: ModelSpec) -> Table:
    """Return T5's names; plain and gated feed-forwards share the name of a matrix."""
    gated = isinstance(block_of(spec.decoder).ffn, SwiGLU)
    feeds = {"wi_0": "gate_proj", "wi_1": "up_proj"} if gated else {"wi": "up_proj"}
    names = {"shared": "encoder.embed", "decoder.embed_tokens": "decoder.embed"}
    for side, last in (("encoder", 1), ("decoder", 2)):
        layer, parts = f"{side}.block.{{}}.layer", {"0.SelfAttention": "attn"}
        norms = {0: "attn_norm", last: "ffn_norm"}
        if side == "decoder":
            parts, norms = parts | {"1.EncDecAttention": "cross"}, norms | {1: "cross_norm"}
        own = {f"{one}.{x}": f"{ours}.{x}_proj" for one, ours in parts.items() for x in "qkvo"}
        own |= {f"{number}.layer_norm": ours for number, ours in norms.items()}
        for theirs, ours in (feeds | {"wo": "down_proj"}).items():
            own[f"{last}.DenseReluDense.{theirs}"] = f"ffn.{ours}"
        bias = "block.0.layer.0.SelfAttention.relative_attention_bias"
        names |= {
            f"{side}.{bias}": f"{side}.relative",
            f"{side}.final_layer_norm": f"{side}.final_norm",
            **{f"{layer}.{theirs}": f"{side}.blocks.{{}}.{ours}" for theirs, ours in own.items()},
        }
    return Table(
        rows=named(names | {"lm_head": "heads.next"}),
        ignored=(
            "encoder.embed_tokens.weight",  # a copy of what is shared
            # Released files hold it; cross-attention has never read it.
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        ),
    )


#: Feed-forwards by their name in a config; their "gated-gelu" is the approximation by tanh.
T5_FEEDS: dict[str, tuple[str, bool]] = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gelu_new": ("gelu_tanh", False),
    "silu": ("silu", False),
    "gated-gelu": ("gelu_tanh", True),
    "gated-silu": ("silu", True),
}


def _read_t5(config: Config, facts: Facts) -> None:
    tied = config.flag("tie_word_embeddings", default=True)
    width = facts["d_model"]
    scaled = config.flag("scale_decoder_outputs", default=tied)
    facts |= {"head.tied": tied, "head.scale": width**-0.5 if scaled else 1.0}
    word = config.one_of("feed_forward_proj", {name: name for name in T5_FEEDS}, default="relu")
    act = "gelu_new" if word == "gated-gelu" else word.removeprefix("gated-")
    for key, wanted in (("dense_act_fn", act), ("is_gated_act", word.startswith("gated-"))):
        if (found := config.any(key, default=wanted)) != wanted:
            raise config.bad(key, found, f"{json.dumps(wanted)}, as 'feed_forward_proj' says")
    activation, gated = T5_FEEDS[word]
    facts |= {"ffn": SwiGLU if gated else MLP, "ffn.activation": activation, "ffn.bias": False}
    facts["layers"] = config.whole(
        "num_decoder_layers", default=facts["encoder.layers"], most=MOST_LAYERS
    )
    buckets = config.whole("relative_attention_num_buckets", default=32)
    far = config.whole("relative_attention_max_distance", default=128)
    if far <= buckets // 2:
        raise config.bad("relative_attention_max_distance", far, f"above {buckets // 2}")
    facts["position"] = RelativeBias(buckets=buckets, max_distance=far)
    facts["init.std"] = config.number("initializer_factor", default=1.0) * width**-0.5


def _write_t5(spec: ModelSpec) -> dict[str, Any]:
    if spec.encoder is None or not isinstance(spec.position, RelativeBias):
        raise InputError("an encoder and relative position biases: not both here, both there")
    gated = isinstance(block_of(spec.decoder).ffn, SwiGLU)
    words = {meaning: word for word, meaning in T5_FEEDS.items()}
    std = value_of(spec, "init.std")
    scale = value_of(spec, "head.scale")
    return {
        "num_decoder_layers": spec.decoder.n_layers,
        "relative_attention_num_buckets": spec.position.buckets,
        "relative_attention_max_distance": spec.position.max_distance,
        "feed_forward_proj": words.get((value_of(spec, "ffn.activation"), gated), "relu"),
        "initializer_factor": 1.0 if std is None else std * spec.d_model**0.5,
        "tie_word_embeddings": bool(value_of(spec, "head.tied")),
        "scale_decoder_outputs": scale is not None and scale != 1.0,
        "is_encoder_decoder": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


T5 = Family(
    "t5",
    "T5ForConditionalGeneration",
    t5_table,
    {
        "encodes": Own(_encodes),
        "vocab_size": whole("vocab_size"),
        "d_model": whole("d_model"),
        "d_kv": whole("attn.d_head", written="attn.width"),
        "d_ff": whole("ffn.d_ff"),
        "num_heads": whole("attn.n_heads"),
        "num_layers": whole("encoder.layers", most=MOST_LAYERS),
        "n_positions": whole("max_seq_len", default=512, most=MOST_POSITIONS),
        "layer_norm_epsilon": number("norm.eps", default=1e-6),
        "dropout_rate": number(
            *(f"dropout.{one}" for one in ("residual", "embedding", "attention", "ffn")),
            default=0.1,
        ),
        "rest": Own(_read_t5, _write_t5),
    },
    {"attn.scale": 1.0},
    harmless=("classifier_dropout",),
    idle={"is_decoder": False},
    encodes=True,
)
TRANSLATORS = (BART, MBART, MARIAN, PEGASUS, M2M_100, T5)
