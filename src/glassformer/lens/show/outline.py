"""What a model is made of, in the order of the computation: parts with words and parameters.

The diagram draws this list, the explorer's Model page and `print` show it. A part's parameters are
the manifest's: those whose names begin with the part's key.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, assert_never

from glassformer.spec.manifest import Parameter, is_tied, manifest
from glassformer.spec.model import (
    MLP,
    ALiBi,
    AnswerHead,
    Attention,
    Block,
    ClassHead,
    FactorizedEmbedding,
    FeedForward,
    LayerNorm,
    Learned,
    MaskedHead,
    ModelSpec,
    MoE,
    NextHead,
    NoPosition,
    Norm,
    PlainEmbedding,
    RelativeBias,
    RMSNorm,
    Rotary,
    ScaledEmbedding,
    Sinusoidal,
    Stack,
    StateHead,
    SwiGLU,
    VectorHead,
    rotary_of,
)
from glassformer.spec.own import OwnPosition

Kind = Literal["embed", "position", "norm", "attn", "cross", "ffn", "head"]


@dataclass(frozen=True)
class Part:
    """One part of a model: `key` is the prefix of its parameters' names, `note` a line on it."""

    key: str
    kind: Kind
    title: str
    note: str
    parameters: tuple[Parameter, ...] = ()
    tied: str = ""

    @property
    def count(self) -> int:
        """Parameters that it owns; tied ones are counted where they are owned."""
        return sum(each.size for each in self.parameters if each.tied_to is None)


@dataclass(frozen=True)
class Layer:
    """Equal blocks that are drawn once: the first layer's parts, and how many layers there are."""

    prefix: str
    first: int
    count: int
    block: Block
    parts: tuple[Part, ...]

    @property
    def parameters(self) -> int:
        """Parameters of one of them."""
        return sum(part.count for part in self.parts)


@dataclass(frozen=True)
class Column:
    """One stack, from its tokens on: what comes before the layers, the layers, what follows."""

    prefix: str
    before: tuple[Part, ...]
    layers: tuple[Layer, ...]
    after: tuple[Part, ...]

    def parts(self) -> Iterator[Part]:
        """Yield every part, in the order of the computation."""
        yield from self.before
        for layer in self.layers:
            yield from layer.parts
        yield from self.after


class _Owned:
    """The parameters of a model by the part that owns them; `keys` are prefixes of names."""

    def __init__(self, model: ModelSpec) -> None:
        self._by: dict[str, list[Parameter]] = {}
        for parameter in manifest(model):
            words = parameter.name.split(".")
            for length in range(1, len(words)):
                self._by.setdefault(".".join(words[:length]), []).append(parameter)

    def __call__(self, key: str) -> tuple[Parameter, ...]:
        return tuple(self._by.get(key, ()))


def outline(model: ModelSpec, *, every_block: bool = False) -> tuple[Column, ...]:
    """List the parts of a model: a column for a decoder, two for an encoder-decoder."""
    owned = _Owned(model)
    columns = []
    for prefix, stack in model.stacks().items():
        before = [*_before(model, prefix, owned), *_types_and_norm(model, stack, prefix, owned)]
        layers = _layers(model, prefix, stack, owned, every_block=every_block)
        after = []
        if stack.final_norm is not None:
            key = f"{prefix}final_norm"
            note = _norm_note(stack.final_norm)
            title = f"Final {norm_name(stack.final_norm)}"
            after.append(Part(key, "norm", title, note, owned(key)))
        if prefix != "encoder.":
            after += [_head_part(model, name, owned) for name in model.head_names()]
        columns.append(Column(prefix, tuple(before), tuple(layers), tuple(after)))
    return tuple(columns)


def _before(model: ModelSpec, prefix: str, owned: _Owned) -> Iterator[Part]:
    key, D = f"{prefix}embed", model.d_model
    vocab = model.source_vocab if prefix == "encoder." else model.vocab_size
    match model.embedding:
        case PlainEmbedding():
            note = f"one row of {vocab:,} × {D} for each token"
        case ScaledEmbedding():
            factor = model.embedding.factor
            times = f"√{D}" if factor is None else f"{factor:g}"
            note = f"one row of {vocab:,} × {D}, times {times}"
        case FactorizedEmbedding(rank=rank):
            note = f"{vocab:,} × {rank} times {rank} × {D}"
        case _ as unreachable:
            assert_never(unreachable)
    tied = "the encoder's table" if prefix == "decoder." and model.share_embedding else ""
    yield Part(key, "embed", "Token embedding", note, owned(key), tied)
    yield from _positions(model, f"{prefix}position", owned)
    if isinstance(model.position, RelativeBias):
        note = f"by {model.position.buckets} ranges of distance, for the scores of every layer"
        key = f"{prefix}relative"
        yield Part(key, "position", "Relative position biases", note, owned(key))


def _positions(model: ModelSpec, key: str, owned: _Owned) -> Iterator[Part]:
    """Yield what is added to the embedding; rotary positions and ALiBi act in the attention."""
    match model.position:
        case Learned():
            note = f"a learned row for each of {model.max_seq_len:,} positions"
            yield Part(key, "position", "Learned positions", note, owned(key))
        case Sinusoidal():
            yield Part(key, "position", "Sinusoidal positions", "sines and cosines, not learned")
        case OwnPosition(class_name=name):
            yield Part(key, "position", f"Positions: {name}", "a part of yours", owned(key))
        case Rotary() | ALiBi() | RelativeBias() | NoPosition():
            pass
        case _ as unreachable:
            assert_never(unreachable)


def _types_and_norm(model: ModelSpec, stack: Stack, prefix: str, owned: _Owned) -> Iterator[Part]:
    """Yield what is added for the kind of a token, and the norm before the first block."""
    if model.token_types:
        key, note = f"{prefix}token_type", f"a learned row for each of {model.token_types} kinds"
        yield Part(key, "position", "Token types", note, owned(key))
    if stack.embed_norm is not None:
        key, title = f"{prefix}embed_norm", f"Embedding {norm_name(stack.embed_norm)}"
        yield Part(key, "norm", title, _norm_note(stack.embed_norm), owned(key))


def _layers(
    model: ModelSpec, prefix: str, stack: Stack, owned: _Owned, *, every_block: bool
) -> Iterator[Layer]:
    first = 0
    for run in _runs(stack):
        for count in [1] * run[0] if every_block else [run[0]]:
            at = f"{prefix}blocks.{first}"
            parts = tuple(_block_parts(model, run[1], at, owned, encoder=prefix == "encoder."))
            yield Layer(prefix, first, count, run[1], parts)
            first += count


def _runs(stack: Stack) -> list[tuple[int, Block]]:
    """Merge neighbouring runs of equal blocks."""
    runs: list[tuple[int, Block]] = []
    for run in stack.layers:
        if runs and runs[-1][1] == run.block:
            runs[-1] = (runs[-1][0] + run.count, run.block)
        else:
            runs.append((run.count, run.block))
    return runs


def _block_parts(
    model: ModelSpec, block: Block, at: str, owned: _Owned, *, encoder: bool
) -> Iterator[Part]:
    """Yield norm and sublayer, in the order of the computation."""
    title = "Self-attention"
    subs: list[tuple[str, Kind, str, str]] = [
        ("attn", "attn", title, _attention_note(block.attention, model)),
    ]
    if block.cross is not None:
        note = _heads_note(block.cross, model.d_model)
        subs.append(("cross", "cross", "Cross-attention", f"{note}; reads the encoder"))
    subs.append(("ffn", "ffn", *ffn_words(block.ffn, model.d_model)))
    for leaf, kind, name, note in subs:
        norm_key = f"{at}.{leaf}_norm"
        norm = Part(
            norm_key, "norm", norm_name(block.norm), _norm_note(block.norm), owned(norm_key)
        )
        part = Part(f"{at}.{leaf}", kind, name, note, owned(f"{at}.{leaf}"))
        post_key = f"{at}.{leaf}_post_norm"
        after = Part(
            post_key, "norm", norm_name(block.norm), _norm_note(block.norm), owned(post_key)
        )
        match block.placement:
            case "pre" | "parallel":
                yield from (norm, part)
            case "post" | "output":
                yield from (part, norm)
            case "sandwich":
                yield from (norm, part, after)
            case "parallel_shared":
                yield from (norm, part) if leaf == "attn" else (part,)
            case "pre_ffn":
                yield from (part,) if leaf == "attn" else (norm, part)
            case _ as unreachable:
                assert_never(unreachable)


def _heads_note(attention: Attention, d_model: int) -> str:
    words = f"{counted(attention.n_heads, 'head')} of {attention.head_width(d_model)}"
    if attention.kv_heads != attention.n_heads:
        words += f" ({attention.kv_heads} K/V)"
    return words


def _attention_note(attention: Attention, model: ModelSpec) -> str:
    words = [
        _heads_note(attention, model.d_model),
        "causal" if attention.causal else "bidirectional",
    ]
    if attention.window is not None:
        words[1] = f"window {attention.window:,}"
    rotary = rotary_of(attention, model.position)
    match model.position:
        case ALiBi():
            words.append("ALiBi")
        case RelativeBias():
            words.append("relative biases")
        case Rotary() | NoPosition() if rotary is not None:
            words.append("rotary" if rotary.share == 1.0 else f"{rotary.share:.0%} rotary")
        case Rotary() | NoPosition():
            words += ["no positions"] if attention.position is not None else []
        case Learned() | Sinusoidal() | OwnPosition():
            pass
        case _ as unreachable:
            assert_never(unreachable)
    if attention.softcap is not None:
        words.append(f"scores capped at {attention.softcap:g}")
    if attention.sinks:
        words.append("a sink")
    return ", ".join(words)


def ffn_words(ffn: FeedForward, d_model: int) -> tuple[str, str]:
    """Return the name of a feed-forward, and its widths or its experts."""
    match ffn:
        case MLP():
            names = {
                "relu": "ReLU",
                "gelu": "GELU",
                "gelu_tanh": "GELU",
                "silu": "SiLU",
                "relu2": "ReLU²",
            }
            name = names[ffn.activation]
            return "Feed-forward", f"{d_model} → {ffn.d_ff:,} → {d_model}, {name}"
        case SwiGLU():
            name = "SwiGLU" if ffn.activation == "silu" else "GeGLU"
            name += "" if ffn.clamp is None else f" clamped at {ffn.clamp.limit:g}"
            return "Feed-forward", f"{d_model} → 2 × {ffn.d_ff:,} → {d_model}, {name}"
        case MoE():
            shared = ", and a shared one" if ffn.shared is not None else ""
            chosen = f"{ffn.experts_per_token} of {ffn.n_experts}"
            return "Mixture of experts", f"each token: {chosen} experts{shared}"
        case _ as unreachable:
            assert_never(unreachable)


def norm_name(norm: Norm) -> str:
    """LayerNorm or RMSNorm."""
    match norm:
        case LayerNorm():
            return "LayerNorm"
        case RMSNorm():
            return "RMSNorm"
        case _ as unreachable:
            assert_never(unreachable)


def _norm_note(norm: Norm) -> str:
    match norm:
        case LayerNorm():
            return f"mean 0, variance 1, then gain{' and bias' if norm.bias else ''}"
        case RMSNorm():
            return "mean square 1, then 1 + gain" if norm.offset else "mean square 1, then gain"
        case _ as unreachable:
            assert_never(unreachable)


def _head_part(model: ModelSpec, name: str, owned: _Owned) -> Part:
    head = model.head(name)
    size = f"{model.d_model} → {model.head_size(name):,}"
    match head:
        case NextHead():
            title, note = "Next-token head", f"{size} logits at each position"
        case ClassHead():
            title, note = "Class head", f"{size} classes at each position"
        case StateHead():
            title, note = "State head", f"{size} states at each position"
        case AnswerHead(readout=readout):
            at = {"last": "the last token", "first": "the first token", "mean": "the mean"}[readout]
            title, note = "Answer head", f"{size} logits, read at {at}"
        case MaskedHead(transform=transform):
            title, note = "Masked-token head", f"{size} logits of the token itself"
            if transform is not None:
                note += f", after a {transform.activation} layer and {norm_name(transform.norm)}"
        case VectorHead(readout=readout, pooler=pooler):
            at = {"last": "the last token", "first": "the first token", "mean": "the mean"}[readout]
            pooled = f"tanh of {size}" if pooler else f"{model.d_model} numbers"
            title, note = "Vector of the sequence", f"{pooled}, read at {at}"
        case _ as unreachable:
            assert_never(unreachable)
    key = f"heads.{name}"
    size_of = owned(key) + owned(f"transforms.{name}")
    return Part(key, "head", title, note, size_of, "the embedding" if is_tied(head) else "")


def counted(count: int, noun: str) -> str:
    """`1 head`, `8 heads`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_count(count: int) -> str:
    """`12,704`, and from a million on `1.24 M`."""
    for size, letter in ((10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.3g} {letter}" if count < 1000 * size else f"{count:,}"
    return f"{count:,}"
