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
from typing import TYPE_CHECKING, Any, cast

from glassformer.adapters.config import MOST_LAYERS, MOST_POSITIONS, Config, block_of
from glassformer.adapters.families.gpt2 import ACTIVATIONS
from glassformer.adapters.table import Array, Family, Row, Shape, Table, dense
from glassformer.spec.errors import InputError
from glassformer.spec.init import NormalInit
from glassformer.spec.model import (
    MLP,
    Activation,
    Attention,
    Block,
    Dropout,
    GateActivation,
    LayerNorm,
    Layers,
    Learned,
    ModelSpec,
    NextHead,
    PlainEmbedding,
    Position,
    RelativeBias,
    RMSNorm,
    ScaledEmbedding,
    Sinusoidal,
    Stack,
    SwiGLU,
)

if TYPE_CHECKING:
    from torch import Tensor

WORDS: dict[str, Activation] = {**ACTIVATIONS, "swish": "silu", "silu": "silu"}


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


def _table() -> Table:
    rows = [Row("model.shared.weight", "encoder.embed.weight")]
    rows.append(Row("model.decoder.embed_tokens.weight", "decoder.embed.weight"))
    for side in ("encoder", "decoder"):
        rows.append(Row(f"model.{side}.embed_positions.weight", f"{side}.position.weight"))
        names = {"layernorm_embedding": "embed_norm", "layer_norm": "final_norm"}
        names |= {f"layers.{{}}.{theirs}": f"blocks.{{}}.{ours}" for theirs, ours in PARTS.items()}
        rows += [
            Row(f"model.{side}.{theirs}.{leaf}", f"{side}.{ours}.{leaf}")
            for theirs, ours in names.items()
            for leaf in ("weight", "bias")
        ]
    rows.append(Row("lm_head.weight", "heads.next.weight"))
    rows.append(Row("final_logits_bias", "heads.next.bias", OneRow()))
    sides = [f"model.{side}." for side in ("encoder", "decoder")]
    return Table(
        rows=tuple(rows),
        ignored=(
            "model.encoder.embed_tokens.weight",  # a copy of what is shared
            *(f"{side}embed_positions.{leaf}" for side in sides for leaf in ("weight", "weights")),
        ),
    )


TABLE = _table()


@dataclass(frozen=True, slots=True)
class Kind:
    """What a family has for all its models."""

    position: Position
    pre: bool = False
    embed_norm: bool = False
    final_norm: bool = False
    bias: bool = True


def read_pair(config: Config, kind: Kind) -> ModelSpec:
    """Read the config of an encoder-decoder."""
    if not config.flag("is_encoder_decoder", default=True):
        raise config.bad("is_encoder_decoder", False, "true")
    for key in ("share_encoder_decoder_embeddings", "tie_word_embeddings"):
        if not config.flag(key, default=True):
            raise InputError(
                f"'{key}' is false: encoder, decoder or head have tables of their own",
                hint="released models of this kind share one; others are not read",
            )
    width = config.whole("d_model")
    vocab = config.whole("vocab_size")
    if config.whole("decoder_vocab_size", default=vocab) != vocab:
        raise config.bad("decoder_vocab_size", config.any("decoder_vocab_size"), str(vocab))
    position = kind.position
    if isinstance(position, Sinusoidal) and position.form == "fairseq":
        pad = config.any("pad_token_id", default=1)
        if type(pad) is not int or not 0 <= pad <= 8:
            raise config.bad("pad_token_id", pad, "a small whole number: positions begin after it")
        position = replace(position, offset=pad + 1)
    scaled = config.flag("scale_embedding", default=False)
    return ModelSpec(
        vocab_size=vocab,
        d_model=width,
        max_seq_len=config.whole("max_position_embeddings", most=MOST_POSITIONS),
        position=position,
        embedding=ScaledEmbedding() if scaled else PlainEmbedding(),
        encoder=_read_side(config, "encoder", kind),
        decoder=_read_side(config, "decoder", kind),
        share_embedding=True,
        heads=(NextHead(tied=True, bias=kind.bias),),
        init=NormalInit(std=config.number("init_std", default=0.02)),
    )


def _read_side(config: Config, side: str, kind: Kind) -> Stack:
    norm, decoder = LayerNorm(), side == "decoder"
    word = config.one_of("activation_function", {name: name for name in WORDS}, default="gelu")
    attention = Attention(
        n_heads=config.whole(f"{side}_attention_heads"), bias="all", causal=decoder
    )
    block = Block(
        mixer=attention,
        cross=replace(attention, causal=False) if decoder else None,
        ffn=MLP(d_ff=config.whole(f"{side}_ffn_dim"), activation=WORDS[word]),
        norm=norm,
        placement="pre" if kind.pre else "post",
    )
    rate = config.number("dropout", default=0.1)
    count = config.whole(f"{side}_layers", most=MOST_LAYERS)
    return Stack(
        layers=(Layers(count=count, block=block),),
        embed_norm=norm if kind.embed_norm else None,
        final_norm=norm if kind.final_norm else None,
        dropout=Dropout(
            embedding=rate,
            attention=config.number("attention_dropout", default=0.0),
            residual=rate,
            ffn=config.number("activation_dropout", default=0.0),
        ),
    )


def write_pair(spec: ModelSpec) -> dict[str, Any]:
    """Return the config keys of an encoder-decoder for a spec."""
    if spec.encoder is None:
        raise InputError("encoder: none here, one there")
    words = {meaning: word for word, meaning in reversed(WORDS.items())}
    ffn, rates = dense(block_of(spec.decoder).ffn), spec.decoder.dropout
    made: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "d_model": spec.d_model,
        "max_position_embeddings": spec.max_seq_len,
        "activation_function": words[ffn.activation] if isinstance(ffn, MLP) else "gelu",
        "scale_embedding": isinstance(spec.embedding, ScaledEmbedding),
        "dropout": rates.residual,
        "attention_dropout": rates.attention,
        "activation_dropout": rates.ffn,
        "init_std": spec.init.std if isinstance(spec.init, NormalInit) else 0.02,
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "pad_token_id": max(getattr(spec.position, "offset", 0) - 1, 0),
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    }
    for side, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        block = block_of(stack)
        made |= {
            f"{side}_layers": stack.n_layers,
            f"{side}_attention_heads": block.attention.n_heads,
            f"{side}_ffn_dim": dense(block.ffn).d_ff,
        }
    return made


def _family(
    model_type: str,
    architecture: str,
    kind: Kind,
    *,
    written: bool = True,
    defaults: Mapping[str, Any] | None = None,
) -> Family:
    return Family(
        model_type,
        architecture,
        TABLE,
        lambda config: read_pair(config, kind),
        write_pair if written else None,
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
BART = _family("bart", "BartForConditionalGeneration", Kind(LEARNED, embed_norm=True))
MBART = _family(
    "mbart",
    "MBartForConditionalGeneration",
    Kind(LEARNED, pre=True, embed_norm=True, final_norm=True),
)
MARIAN = _family("marian", "MarianMTModel", Kind(HALVES))
PEGASUS = _family(
    "pegasus",
    "PegasusForConditionalGeneration",
    Kind(HALVES, pre=True, final_norm=True),
    written=False,  # its files hold the sines, which are no parameters here
)
M2M_100 = _family(
    "m2m_100",
    "M2M100ForConditionalGeneration",
    Kind(FAIRSEQ, pre=True, final_norm=True, bias=False),
    defaults={"scale_embedding": True, "activation_function": "relu", "attention_dropout": 0.1},
)


def _t5_table() -> Table:
    rows = [Row("shared.weight", "encoder.embed.weight")]
    rows.append(Row("decoder.embed_tokens.weight", "decoder.embed.weight"))
    for side, last in (("encoder", 1), ("decoder", 2)):
        parts = {"layer.0.SelfAttention": "attn", "layer.1.EncDecAttention": "cross"}
        names = {
            f"{theirs}.{letter}": f"{ours}.{letter}_proj"
            for theirs, ours in parts.items()
            for letter in "qkvo"
        }
        norms = {0: "attn_norm", 1: "cross_norm", last: "ffn_norm"}
        names |= {f"layer.{number}.layer_norm": ours for number, ours in norms.items()}
        feeds = {"wi": "up_proj", "wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
        names |= {
            f"layer.{last}.DenseReluDense.{theirs}": f"ffn.{ours}" for theirs, ours in feeds.items()
        }
        bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rows.append(Row(f"{side}.{bias}", f"{side}.relative.weight"))
        rows.append(Row(f"{side}.final_layer_norm.weight", f"{side}.final_norm.weight"))
        rows += [
            Row(f"{side}.block.{{}}.{theirs}.weight", f"{side}.blocks.{{}}.{ours}.weight")
            for theirs, ours in names.items()
        ]
    rows.append(Row("lm_head.weight", "heads.next.weight"))
    return Table(
        rows=tuple(rows),
        ignored=(
            "encoder.embed_tokens.weight",  # a copy of what is shared
            # Released files hold it; cross-attention has never read it.
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        ),
    )


def _t5_names(spec: ModelSpec) -> Table:
    """Return the rows of plain or of gated feed-forwards, which share the name of a matrix."""
    gated = isinstance(block_of(spec.decoder).ffn, SwiGLU)
    other = "DenseReluDense.wi." if gated else "DenseReluDense.wi_"
    rows = tuple(row for row in T5_TABLE.rows if other not in row.theirs)
    return replace(T5_TABLE, rows=rows)


T5_TABLE = _t5_table()
#: Feed-forwards by their name in a config; their "gated-gelu" is the approximation by tanh.
T5_FEEDS: dict[str, tuple[str, bool]] = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gelu_new": ("gelu_tanh", False),
    "silu": ("silu", False),
    "gated-gelu": ("gelu_tanh", True),
    "gated-silu": ("silu", True),
}


def read_t5(config: Config) -> ModelSpec:
    """Read the config of T5, of version 1.1 and of Flan-T5."""
    if not config.flag("is_encoder_decoder", default=True):
        raise config.bad("is_encoder_decoder", False, "true")
    width, layers = config.whole("d_model"), config.whole("num_layers", most=MOST_LAYERS)
    tied = config.flag("tie_word_embeddings", default=True)
    scaled = config.flag("scale_decoder_outputs", default=tied)
    word = config.one_of("feed_forward_proj", {name: name for name in T5_FEEDS}, default="relu")
    act = "gelu_new" if word == "gated-gelu" else word.removeprefix("gated-")
    for key, wanted in (("dense_act_fn", act), ("is_gated_act", word.startswith("gated-"))):
        if (found := config.any(key, default=wanted)) != wanted:
            raise config.bad(key, found, f"{json.dumps(wanted)}, as 'feed_forward_proj' says")
    counts = {
        "encoder": layers,
        "decoder": config.whole("num_decoder_layers", default=layers, most=MOST_LAYERS),
    }
    factor = config.number("initializer_factor", default=1.0)
    buckets = config.whole("relative_attention_num_buckets", default=32)
    far = config.whole("relative_attention_max_distance", default=128)
    if far <= buckets // 2:
        raise config.bad("relative_attention_max_distance", far, f"above {buckets // 2}")
    sides = {side: _t5_side(config, word, side == "decoder", n) for side, n in counts.items()}
    return ModelSpec(
        vocab_size=config.whole("vocab_size"),
        d_model=width,
        max_seq_len=config.whole("n_positions", default=512, most=MOST_POSITIONS),
        position=RelativeBias(buckets=buckets, max_distance=far),
        encoder=sides["encoder"],
        decoder=sides["decoder"],
        share_embedding=True,
        heads=(NextHead(tied=tied, scale=width**-0.5 if scaled else 1.0),),
        init=NormalInit(std=factor * width**-0.5),
    )


def _t5_side(config: Config, word: str, decoder: bool, count: int) -> Stack:
    attention = Attention(
        n_heads=config.whole("num_heads"), d_head=config.whole("d_kv"), scale=1.0, causal=decoder
    )
    activation, gated = T5_FEEDS[word]
    d_ff = config.whole("d_ff")
    norm = RMSNorm(eps=config.number("layer_norm_epsilon", default=1e-6))
    ffn: MLP | SwiGLU = MLP(d_ff=d_ff, activation=cast(Activation, activation), bias=False)
    if gated:
        ffn = SwiGLU(d_ff=d_ff, activation=cast(GateActivation, activation))
    block = Block(
        mixer=attention,
        cross=replace(attention, causal=False) if decoder else None,
        ffn=ffn,
        norm=norm,
    )
    rate = config.number("dropout_rate", default=0.1)
    return Stack(
        layers=(Layers(count=count, block=block),),
        final_norm=norm,
        dropout=Dropout.from_number(rate),
    )


def write_t5(spec: ModelSpec) -> dict[str, Any]:
    """Return the config keys of T5 for a spec."""
    if spec.encoder is None or not isinstance(spec.position, RelativeBias):
        raise InputError("an encoder and relative position biases: not both here, both there")
    block, head = block_of(spec.decoder), spec.heads[0]
    ffn, norm, attention = dense(block.ffn), block.norm, block.attention
    words = {meaning: word for word, meaning in T5_FEEDS.items()}
    word = words.get((ffn.activation, isinstance(ffn, SwiGLU)), "relu")
    std = spec.init.std if isinstance(spec.init, NormalInit) else spec.d_model**-0.5
    return {
        "vocab_size": spec.vocab_size,
        "d_model": spec.d_model,
        "d_kv": attention.head_width(spec.d_model),
        "d_ff": ffn.d_ff,
        "num_heads": attention.n_heads,
        "num_layers": spec.encoder.n_layers,
        "num_decoder_layers": spec.decoder.n_layers,
        "n_positions": spec.max_seq_len,
        "relative_attention_num_buckets": spec.position.buckets,
        "relative_attention_max_distance": spec.position.max_distance,
        "feed_forward_proj": word,
        "layer_norm_epsilon": norm.eps,
        "dropout_rate": spec.decoder.dropout.residual,
        "initializer_factor": std * spec.d_model**0.5,
        "tie_word_embeddings": isinstance(head, NextHead) and head.tied,
        "scale_decoder_outputs": isinstance(head, NextHead) and head.scale != 1.0,
        "is_encoder_decoder": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


T5 = Family(
    "t5",
    "T5ForConditionalGeneration",
    _t5_names,
    read_t5,
    write_t5,
    harmless=("classifier_dropout",),
    idle={"is_decoder": False},
    encodes=True,
)
TRANSLATORS = (BART, MBART, MARIAN, PEGASUS, M2M_100, T5)
