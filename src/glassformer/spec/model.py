"""`ModelSpec`: a transformer described as a frozen tree of small types.

Variants are types, not flags, so that a rotary base cannot be set on a sinusoidal model. Each class
checks its own rules; `ModelSpec` checks those between parts. All types of a model's spec can be
imported from here.

`tap_shapes` names the activations that can be read or replaced, the same in every engine. Shapes
are written in the project's letters: B batch, T query length, S key length, D d_model, N query
heads, K key-value heads, H d_head, F d_ff, V logits, E experts.
"""

from collections.abc import Iterator
from typing import assert_never

from glassformer.spec.block import (
    MLP,
    Activation,
    AnswerHead,
    Attention,
    Bias,
    Block,
    Clamp,
    ClassHead,
    Dropout,
    Embedding,
    FactorizedEmbedding,
    FeedForward,
    GateActivation,
    Head,
    HeadTransform,
    LayerNorm,
    Layers,
    MaskedHead,
    Mixer,
    MoE,
    NextHead,
    Norm,
    Placement,
    PlainEmbedding,
    Readout,
    RMSNorm,
    ScaledEmbedding,
    Stack,
    StateHead,
    SwiGLU,
    VectorHead,
    head_name,
)
from glassformer.spec.checks import at_least, check_member, check_tree, divides, size, spec
from glassformer.spec.errors import InputError
from glassformer.spec.init import HeInit, Init, NormalInit, XavierInit
from glassformer.spec.own import OwnPosition
from glassformer.spec.position import (
    ALiBi,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoPosition,
    Position,
    RelativeBias,
    Rotary,
    Sinusoidal,
    YarnScaling,
)

__all__ = [
    "ALiBi",
    "Activation",
    "AnswerHead",
    "Attention",
    "Bias",
    "Block",
    "Clamp",
    "ClassHead",
    "Dropout",
    "Embedding",
    "FactorizedEmbedding",
    "FeedForward",
    "GateActivation",
    "HeInit",
    "Head",
    "HeadTransform",
    "Init",
    "LayerNorm",
    "Layers",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MLP",
    "MaskedHead",
    "Mixer",
    "MoE",
    "ModelSpec",
    "NextHead",
    "NoPosition",
    "Norm",
    "NormalInit",
    "Placement",
    "PlainEmbedding",
    "Position",
    "RMSNorm",
    "Readout",
    "RelativeBias",
    "Rotary",
    "ScaledEmbedding",
    "Sinusoidal",
    "Stack",
    "StateHead",
    "SwiGLU",
    "VectorHead",
    "XavierInit",
    "YarnScaling",
    "head_name",
    "rotary_of",
]


def position_of(mixer: Mixer, position: Position) -> Position:
    """Return how a mixer knows positions: by its own way, or else the model's."""
    return position if mixer.position is None else mixer.position


def rotary_of(mixer: Mixer, position: Position) -> Rotary | None:
    """Return the rotation of a self-attention: its own or else the model's; None without one."""
    own = position_of(mixer, position)
    match own:
        case Rotary():
            return own
        case NoPosition() | Sinusoidal() | Learned() | ALiBi() | RelativeBias() | OwnPosition():
            return None
        case _ as unreachable:
            assert_never(unreachable)


@spec
class ModelSpec:
    """A complete transformer: sizes, embedding, position, one or two stacks, heads, initialisation.

    With an encoder, `source_vocab_size` (None: the same as vocab_size) and `share_embedding` (one
    table for source and target) describe the source side. `token_types` is the number of kinds of
    tokens (first or second text) that a learned row is added for; 0: none.
    """

    vocab_size: int
    d_model: int
    max_seq_len: int
    decoder: Stack
    encoder: Stack | None = None
    embedding: Embedding = PlainEmbedding()
    position: Position = NoPosition()
    heads: tuple[Head, ...] = (NextHead(),)
    init: Init = NormalInit()
    source_vocab_size: int | None = None
    share_embedding: bool = False
    token_types: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "max_seq_len"):
            size(name, getattr(self, name))
        self._check_heads()
        self._check_source()
        halved = isinstance(self.position, Sinusoidal) and self.position.form != "interleaved"
        if halved and (self.d_model % 2 or self.d_model < 4):
            raise InputError(
                f"sines and cosines in halves, and d_model {self.d_model} is odd or below 4",
                hint=f"the nearest valid d_model is {max(self.d_model + self.d_model % 2, 4)}",
            )
        for stack in self.stacks().values():
            for run in stack.layers:
                self._check_cross(run.block.cross)
            for attention in stack.attentions().values():
                self._check_attention(attention)
            if isinstance(self.position, RelativeBias):
                kinds = {(each.n_heads, each.causal) for each in stack.attentions().values()}
                if len(kinds) > 1:
                    raise InputError(
                        "layers of one stack share their relative position biases, and differ in "
                        "n_heads or causal",
                        hint="give all of them the same",
                    )

    def _check_heads(self) -> None:
        names = self.head_names()
        if not names:
            raise InputError("a model needs at least one head", hint="heads=(NextHead(),)")
        at_least("token_types", self.token_types, 0)
        if len(set(names)) < len(names):
            raise InputError(f"two heads share a name: {', '.join(names)}")
        causal = all(run.block.mixer.causal for run in self.decoder.layers)
        if "next" in names and not causal:
            raise InputError(
                "a next-token head on bidirectional attention sees its own answer",
                hint="set attention.causal=true, or use a MaskedHead or an AnswerHead",
            )
        if self.token_types and (causal or self.encoder is not None):
            raise InputError(
                "token types are for a stack whose attention is not causal",
                hint="set attention.causal=false, or token_types=0",
            )

    def _check_source(self) -> None:
        if self.source_vocab_size is not None:
            size("source_vocab_size", self.source_vocab_size)
        crossed = [run.block.cross is not None for run in self.decoder.layers]
        if self.encoder is None:
            if any(crossed):
                raise InputError("cross-attention without an encoder", hint="give an encoder stack")
            if self.source_vocab_size is not None or self.share_embedding:
                raise InputError("source_vocab_size and share_embedding need an encoder")
            return
        if not all(crossed):
            first = sum(run.count for run in self.decoder.layers[: crossed.index(False)])
            raise InputError(
                f"decoder layer {first} has no cross-attention, so it never reads the encoder",
                hint="give every decoder block a `cross`",
            )
        if any(block.cross for block in self.encoder.blocks()):
            raise InputError("an encoder block has cross-attention", hint="leave `cross` out there")
        if any(block.mixer.causal for block in self.encoder.blocks()):
            raise InputError("an encoder block is causal", hint="set attention.causal=false there")
        if self.share_embedding and self.source_vocab != self.vocab_size:
            raise InputError(
                f"share_embedding needs equal vocabularies, not {self.source_vocab} and "
                f"{self.vocab_size}",
                hint="leave source_vocab_size out",
            )

    def _check_cross(self, cross: Attention | None) -> None:
        if cross is not None and cross.d_head is None:
            divides("d_model", self.d_model, "n_heads", cross.n_heads)

    def _check_attention(self, attention: Attention) -> None:
        if attention.d_head is None:
            divides("d_model", self.d_model, "n_heads", attention.n_heads)
        if attention.position is not None:
            check_member("position", self.position, Rotary | NoPosition)
        d_head = attention.head_width(self.d_model)
        rotary = rotary_of(attention, self.position)
        if rotary is not None and rotary.share == 1.0 and d_head % 2:
            raise InputError(
                f"rotary positions turn pairs, and d_head {d_head} is odd",
                hint=f"the nearest valid d_head is {d_head + 1}",
            )
        if rotary is not None and (rotary.width(d_head) % 2 or not rotary.width(d_head)):
            raise InputError(
                f"rotary positions turn pairs, and {rotary.share:g} of d_head {d_head} is "
                f"{rotary.width(d_head)}",
                hint="choose a share that gives an even number",
            )

    @property
    def n_layers(self) -> int:
        """Decoder layers."""
        return self.decoder.n_layers

    def positions(self) -> tuple[Position, ...]:
        """The ways in which the layers know positions, each once; without one NoPosition."""
        ways = dict.fromkeys(
            position_of(block.mixer, self.position)
            for stack in self.stacks().values()
            for block in stack.blocks()
        )
        return tuple(way for way in ways if way != NoPosition()) or (NoPosition(),)

    @property
    def source_vocab(self) -> int:
        """Vocabulary of the source side, resolved."""
        return self.vocab_size if self.source_vocab_size is None else self.source_vocab_size

    def stacks(self) -> dict[str, Stack]:
        """Stacks by the prefix of their names: "" for a decoder alone, else encoder., decoder."""
        if self.encoder is None:
            return {"": self.decoder}
        return {"encoder.": self.encoder, "decoder.": self.decoder}

    def mixtures(self) -> dict[str, MoE]:
        """Mixtures of experts by the name of their layer: `blocks.0`, `encoder.blocks.1`."""
        return {
            f"{prefix}blocks.{layer}": block.ffn
            for prefix, stack in self.stacks().items()
            for layer, block in enumerate(stack.blocks())
            if isinstance(block.ffn, MoE)
        }

    def head_names(self) -> tuple[str, ...]:
        """The names of this model's heads, in order: of next, class, state, answer."""
        return tuple(head_name(head) for head in self.heads)

    def head(self, name: str) -> Head:
        """Return the head of that name."""
        for head in self.heads:
            if head_name(head) == name:
                return head
        raise InputError(
            f"no head '{name}'", hint=f"this model has: {', '.join(self.head_names())}"
        )

    def predicts_tokens(self, name: str) -> bool:
        """Return True if the classes of that head are the tokens of the vocabulary."""
        head = self.head(name)
        match head:
            case NextHead() | MaskedHead():
                return True
            case AnswerHead():
                return head.num_answers is None
            case ClassHead() | StateHead() | VectorHead():
                return False
            case _ as unreachable:
                assert_never(unreachable)

    def head_size(self, name: str) -> int:
        """Return the number of logits of that head."""
        head = self.head(name)
        match head:
            case ClassHead():
                return head.num_classes
            case StateHead():
                return head.num_states
            case AnswerHead(num_answers=int(count)):
                return count
            case NextHead() | AnswerHead() | MaskedHead():
                return self.vocab_size
            case VectorHead():
                return self.d_model
            case _ as unreachable:
                assert_never(unreachable)


# --- taps -----------------------------------------------------------------------------------------


FFN_TAPS = {"hidden": "BTF", "out": "BTD"}
#: The router's logits; the weight of each expert, 0 where it was not chosen; the weighted sum.
MOE_TAPS = {"router": "BTE", "routing": "BTE", "out": "BTD"}


def ffn_taps(ffn: FeedForward) -> dict[str, str]:
    """Return the taps of a feed-forward, in the order of the computation."""
    match ffn:
        case MLP() | SwiGLU():
            return FFN_TAPS
        case MoE(shared=None):
            return MOE_TAPS
        case MoE():
            return {"router": "BTE", "routing": "BTE", "shared": "BTD", "out": "BTD"}
        case _ as unreachable:
            assert_never(unreachable)


def tap_shapes(model: ModelSpec) -> dict[str, str]:
    """Return every tap of this model with its shape in letters, in the order of the computation."""
    check_tree(model)
    return dict(_taps(model))


def _taps(model: ModelSpec) -> Iterator[tuple[str, str]]:
    for prefix, stack in model.stacks().items():
        yield f"{prefix}embed", "BTD"
        for layer, block in enumerate(stack.blocks()):
            at = f"{prefix}blocks.{layer}"
            yield f"{at}.resid_pre", "BTD"
            for leaf, shape in block.mixer.taps.items():
                yield f"{at}.{block.mixer.leaf}.{leaf}", shape
            yield f"{at}.resid_mid", "BTD"
            if block.cross is not None:
                for leaf, shape in block.cross.taps.items():
                    yield f"{at}.cross.{leaf}", shape
                yield f"{at}.resid_cross", "BTD"
            for leaf, shape in ffn_taps(block.ffn).items():
                yield f"{at}.ffn.{leaf}", shape
            yield f"{at}.resid_post", "BTD"
        yield f"{prefix}final", "BTD"
    for head, name in zip(model.heads, model.head_names(), strict=True):
        yield f"logits.{name}", "BTV" if head.readout is None else "BV"
