"""A family's config as a table: each key, and the field of the spec that it says.

    {"hidden_size": whole("d_model"), "qkv_bias": flag("attn.bias", yes="qkv", no="none")}

Such a table is read and written. Reading fills a flat dictionary of facts, of which `spec_of` makes
the spec; writing looks each field up in a spec (`value_of`). What a family always has is given as
facts too. A fact's name is a part and its field, `attn.n_heads`, and a part's name alone is its
type: `{"norm": LayerNorm, "norm.bias": False}`.

    (none)       vocab_size, d_model, max_seq_len, token_types, layers (how many); without a
                 ffn.d_ff, feed-forwards are four times as wide as the model;
                 qk_norm, embed_norm, final_norm (whether there is one, of the blocks' kind)
    attn, ffn, norm, block, dropout, head, transform, init, embedding, position
    moe, shared, dense    the mixture whose experts are `ffn`, its shared expert, and the
                 feed-forward of layers without experts
    each.        before a field: a list with a value for each layer; each.dense, whether it is dense
    encoder.     before a fact: what the encoder has instead; the decoder then attends to it
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from glassformer.adapters.config import REQUIRED, Config, block_of
from glassformer.spec.errors import InputError
from glassformer.spec.init import NormalInit
from glassformer.spec.model import (
    Activation,
    Attention,
    Block,
    Dropout,
    HeadTransform,
    Layers,
    ModelSpec,
    MoE,
    NextHead,
    NoPosition,
    PlainEmbedding,
    RMSNorm,
    Stack,
    SwiGLU,
)

Facts = dict[str, Any]

#: Transformers' words for activations; the first of a meaning is the one written.
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
#: Those that a gate may have.
GATES: dict[str, Activation] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    **{word: meaning for word, meaning in ACTIVATIONS.items() if "relu" not in word},
}


# --- one key --------------------------------------------------------------------------------------


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key that says one fact, or the same of several.

    `ask` reads its value, under any of its names; `inward` and `outward` translate. `written` is
    the field to look up where it is not the first of `fields`; `unless_none` leaves the key out.
    """

    fields: tuple[str, ...]
    ask: Callable[..., Any]
    default: Any = REQUIRED
    also: tuple[str, ...] = ()
    inward: Callable[[Any], Any] = _same
    outward: Callable[[Any], Any] = _same
    written: str = ""
    unless_none: bool = False

    def read(self, name: str, config: Config, facts: Facts) -> None:
        """Add what the config says under this name."""
        value = self.inward(self.ask(config, name, *self.also, default=self.default))
        facts.update(dict.fromkeys(self.fields, value))

    def write(self, name: str, spec: ModelSpec) -> dict[str, Any]:
        """Return the key as it is in the config of a spec."""
        value = value_of(spec, self.written or self.fields[0])
        if value is None:
            made = None if self.default is REQUIRED else self.default
        else:
            made = self.outward(value)
        return {} if self.unless_none and made is None else {name: made}


@dataclass(frozen=True, slots=True)
class Own:
    """Keys that are read and written together, by two functions."""

    reading: Callable[[Config, Facts], object]
    writing: Callable[[ModelSpec], dict[str, Any]] = lambda _: {}

    def read(self, _: str, config: Config, facts: Facts) -> None:
        """Add what the config says."""
        self.reading(config, facts)

    def write(self, _: str, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys as they are in the config of a spec."""
        return self.writing(spec)


#: By key: a `Key`, an `Own` under any name, or the value that is always written.
Entries = Mapping[str, Any]


def whole(*fields: str, default: Any = REQUIRED, most: int = 2**31, **own: Any) -> Key:
    """Return a key that says a whole number above 0."""

    def ask(config: Config, *names: str, default: Any) -> int:
        return config.whole(*names, default=default, most=most)

    return Key(fields=fields, ask=ask, default=default, **own)


def number(*fields: str, default: Any = REQUIRED, **own: Any) -> Key:
    """Return a key that says a number."""
    return Key(fields=fields, ask=Config.number, default=default, **own)


def optional(*fields: str, ask: Callable[..., Any] = Config.whole, **own: Any) -> Key:
    """Return a key that says a whole number, or None where it is null or absent."""

    def either(config: Config, *names: str, default: None) -> Any:
        return default if config.any(*names, default=None) is None else ask(config, *names)

    return Key(fields=fields, ask=either, default=None, **own)


def optional_whole(config: Config, key: str) -> int | None:
    """Return a whole number, or None if the key is null or absent."""
    return None if config.any(key, default=None) is None else config.whole(key)


def flag(*fields: str, default: Any = REQUIRED, yes: Any = True, no: Any = False) -> Key:
    """Return a key that chooses one of two values."""
    return Key(
        fields=fields,
        ask=Config.flag,
        default=default,
        inward=lambda value: yes if value else no,
        outward=lambda value: value == yes,
    )


def word(*fields: str, default: str, words: Mapping[str, Any] = ACTIVATIONS) -> Key:
    """Return a key that says one of these words; the first of a meaning is the one written."""

    def ask(config: Config, *names: str, default: str) -> Any:
        return words[config.one_of(names[0], {each: each for each in words}, default=default)]

    meanings = {meaning: each for each, meaning in reversed(list(words.items()))}
    return Key(
        fields=fields,
        ask=ask,
        default=default,
        outward=lambda value: meanings.get(value, default),
    )


def without(entries: Entries, *names: str) -> dict[str, Any]:
    """Return the entries without some."""
    return {name: entry for name, entry in entries.items() if name not in names}


# --- all keys of a family -------------------------------------------------------------------------


def read_entries(entries: Entries, fixed: Facts, config: Config) -> ModelSpec:
    """Return the spec that a config describes."""
    facts = dict(fixed)
    for name, entry in entries.items():
        for one in entry if isinstance(entry, tuple) else (entry,):
            if isinstance(one, Key | Own):
                one.read(name, config, facts)
    return spec_of(facts)


def write_entries(entries: Entries, spec: ModelSpec) -> dict[str, Any]:
    """Return the config keys of a spec; reading them back gives it, if the family can say it."""
    made: dict[str, Any] = {}
    for name, entry in entries.items():
        one = entry[0] if isinstance(entry, tuple) else entry
        made |= one.write(name, spec) if isinstance(one, Key | Own) else {name: one}
    return made


# --- facts and specs ------------------------------------------------------------------------------


def group(facts: Facts, part: str) -> Facts:
    """Return the facts of a part, by their fields."""
    start = f"{part}."
    return {name.removeprefix(start): facts[name] for name in facts if name.startswith(start)}


def part_of(facts: Facts, part: str, usual: Any) -> Any:
    """Return a part: of its type or the usual one, or a given one with some fields changed."""
    kind = facts.get(part, usual)
    return (
        kind(**group(facts, part))
        if isinstance(kind, type)
        else replace(kind, **group(facts, part))
    )


def spec_of(facts: Facts) -> ModelSpec:
    """Return the spec that has these facts."""
    if facts.get("ffn.d_ff") is None:
        facts = facts | {"ffn.d_ff": 4 * facts["d_model"]}
    encoder = group(facts, "encoder")
    head = part_of(facts, "head", NextHead)
    if transform := group(facts, "transform"):
        head = replace(
            head, transform=HeadTransform(**transform, norm=part_of(facts, "norm", RMSNorm))
        )
    return ModelSpec(
        **{name: facts[name] for name in ("vocab_size", "d_model", "max_seq_len")},
        position=part_of(facts, "position", NoPosition),
        embedding=part_of(facts, "embedding", PlainEmbedding),
        encoder=stack_of(facts | {"attn.causal": False} | encoder) if encoder else None,
        decoder=stack_of(facts, crossed=bool(encoder)),
        share_embedding=bool(encoder),
        heads=(head,),
        init=part_of(facts, "init", NormalInit),
        token_types=facts.get("token_types", 0),
    )


def stack_of(facts: Facts, *, crossed: bool = False) -> Stack:
    """Return the stack that has these facts; equal blocks are one run."""
    norm = part_of(facts, "norm", RMSNorm)
    attention: Attention = part_of(facts, "attn", Attention)
    if facts.get("qk_norm"):
        attention = replace(attention, qk_norm=norm)
    ffn: Any = part_of(facts, "ffn", SwiGLU)
    if mixture := group(facts, "moe"):
        shared = SwiGLU(**group(facts, "shared")) if facts.get("shared.d_ff") else None
        ffn = MoE(expert=ffn, shared=shared, **mixture)
    by_layer = group(facts, "each")

    def block(layer: int) -> Block:
        own = {name: values[layer] for name, values in by_layer.items()}
        return Block(
            mixer=replace(attention, **group(own, "attn")),
            cross=replace(attention, causal=False) if crossed else None,
            ffn=SwiGLU(**group(facts, "dense")) if own.get("dense") else ffn,
            norm=norm,
            **group(facts, "block") | group(own, "block"),
        )

    runs = groupby(map(block, range(facts["layers"])))
    return Stack(
        layers=tuple(Layers(count=len(list(run)), block=one) for one, run in runs),
        final_norm=norm if facts.get("final_norm", True) else None,
        embed_norm=norm if facts.get("embed_norm", False) else None,
        dropout=Dropout(**group(facts, "dropout")),
    )


def value_of(spec: ModelSpec, field: str) -> Any:
    """Return a field of a spec by the name of its fact; None where it has none.

    Two more names: attn.kv_heads and attn.width, the numbers that apply where those of the spec
    are None.
    """
    stack = spec.decoder
    if field.startswith("encoder."):
        if spec.encoder is None:
            raise InputError("encoder: none here, one there")
        stack, field = spec.encoder, field.removeprefix("encoder.")
    blocks, block = list(stack.blocks()), block_of(stack)
    part, _, leaf = field.rpartition(".")
    experts = [each.ffn.expert for each in blocks if isinstance(each.ffn, MoE)]
    if field == "attn.width":
        return block.attention.head_width(spec.d_model)
    parts = {
        "attn": block.attention,
        "norm": block.norm,
        "ffn": experts[0] if experts else block.ffn,
        "dense": next((each.ffn for each in blocks if not isinstance(each.ffn, MoE)), None),
        "block": block,
        "dropout": stack.dropout,
        "head": spec.heads[0],
        "transform": getattr(spec.heads[0], "transform", None),
        "init": spec.init,
        "embedding": spec.embedding,
        "position": spec.position,
        "": spec if leaf != "layers" else stack,
    }
    if part in ("moe", "shared"):
        mixture = mixture_of(spec)
        parts |= {"moe": mixture, "shared": mixture.shared}
        if part == "shared" and mixture.shared is None:
            raise InputError("feed-forward: no shared expert here, one there")
    return getattr(parts[part], "n_layers" if field == "layers" else leaf, None)


def mixture_of(spec: ModelSpec) -> MoE:
    """Return the first mixture of a spec that a family with experts is to write."""
    for mixture in spec.mixtures().values():
        return mixture
    raise InputError("feed-forward: one for every token here, experts there")
