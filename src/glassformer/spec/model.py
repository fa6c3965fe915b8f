"""What a transformer is: a frozen tree of small types.

Variants are types, not flags, so that a rotary base cannot be set on a sinusoidal model. A stack is
a tuple of runs of equal blocks, so that layers may differ; `n_layers` is derived. Each class checks
the rules that it owns; `ModelSpec` checks those between parts.
"""

from collections.abc import Iterator
from typing import Literal, get_args

from glassformer.spec.base import at_least, divides, one_of, positive, probability, spec
from glassformer.spec.errors import InputError
from glassformer.spec.inits import HeInit, NormalInit, XavierInit

# --- embedding ----------------------------------------------------------------------------------


@spec
class PlainEmbedding:
    """One row of d_model numbers for each token."""


@spec
class ScaledEmbedding:
    """The row times sqrt(d_model), as in the 2017 paper: keeps it level with the sinusoids.

    Historical and optional: it changes the embedding's effective learning rate, and most models
    since GPT-2 leave it out.
    """


@spec
class FactorizedEmbedding:
    """U[token] @ V, U (vocab, rank), V (rank, d_model); `l1` weighs the sum of |U| in the loss."""

    rank: int
    l1: float = 0.0

    def __post_init__(self) -> None:
        at_least("rank", self.rank)
        if not 0.0 <= self.l1 < float("inf"):
            raise InputError(f"l1 {self.l1} is negative", hint="0 turns the penalty off")


Embedding = PlainEmbedding | ScaledEmbedding | FactorizedEmbedding

# --- position -----------------------------------------------------------------------------------


@spec
class NoPosition:
    """Order is seen through the causal mask alone."""


@spec
class Sinusoidal:
    """PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos of the same; not learned."""

    base: float = 10_000.0

    def __post_init__(self) -> None:
        positive("base", self.base)


@spec
class Learned:
    """A learned row for each of max_seq_len positions."""


@spec
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        positive("factor", self.factor)


@spec
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a smooth ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        positive("factor", self.factor)
        at_least("original_max_seq_len", self.original_max_seq_len)
        if not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise InputError(
                f"low_freq_factor {self.low_freq_factor} is not below high_freq_factor "
                f"{self.high_freq_factor}",
                hint="Llama 3.1 uses 1 and 4",
            )


@spec
class YarnScaling:
    """A ramp over dimensions between kept and divided frequencies, and a factor on cos and sin.

    `attention_factor` None means the paper's 0.1 ln(factor) + 1.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        positive("factor", self.factor)
        at_least("original_max_seq_len", self.original_max_seq_len)
        if not 0.0 < self.beta_slow < self.beta_fast:
            raise InputError(
                f"beta_slow {self.beta_slow} is not below beta_fast {self.beta_fast}",
                hint="the paper uses 1 and 32",
            )


@spec
class Rotary:
    """Queries and keys turned by an angle that grows with position, in half-split pairs."""

    base: float = 10_000.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    def __post_init__(self) -> None:
        if not 1.0 < self.base < float("inf"):
            raise InputError(
                f"base {self.base} is not above 1, so every pair would turn alike",
                hint="10000 is the usual base",
            )


Position = NoPosition | Sinusoidal | Learned | Rotary

# --- norm, attention, feed-forward --------------------------------------------------------------


@spec
class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias."""

    eps: float = 1e-5

    def __post_init__(self) -> None:
        positive("eps", self.eps)


@spec
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight."""

    eps: float = 1e-6

    def __post_init__(self) -> None:
        positive("eps", self.eps)


Norm = LayerNorm | RMSNorm

#: Which projections carry a bias. `no_key` is `all` without the key's, whose gradient is zero
#: wherever no rotation or q/k-norm follows it.
Bias = Literal["none", "qkv", "all", "no_key"]
Activation = Literal["relu", "gelu", "gelu_tanh"]
Placement = Literal["pre", "post"]
Readout = Literal["last", "first", "mean"]


@spec
class Attention:
    """Heads, grouped keys, biases, q/k-norm, causality and window of one attention.

    `n_kv_heads` None means n_heads; `d_head` None means d_model // n_heads; `window` w lets a
    query see itself and the w - 1 tokens before it (on both sides when not causal).
    """

    n_heads: int
    n_kv_heads: int | None = None
    d_head: int | None = None
    bias: Bias = "none"
    qk_norm: LayerNorm | RMSNorm | None = None
    causal: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        at_least("n_heads", self.n_heads)
        one_of("bias", self.bias, get_args(Bias))
        if self.d_head is not None:
            at_least("d_head", self.d_head)
        if self.window is not None:
            at_least("window", self.window)
        if self.n_kv_heads is not None:
            at_least("n_kv_heads", self.n_kv_heads)
            divides("n_heads", self.n_heads, "n_kv_heads", self.n_kv_heads)

    @property
    def kv_heads(self) -> int:
        """Key-value heads, resolved."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    def head_width(self, d_model: int) -> int:
        """d_head, resolved for a model of this width."""
        return d_model // self.n_heads if self.d_head is None else self.d_head


@spec
class MLP:
    """down(act(up(x))); gelu is the exact one, gelu_tanh its approximation."""

    d_ff: int
    activation: Activation = "gelu"
    bias: bool = True

    def __post_init__(self) -> None:
        at_least("d_ff", self.d_ff)
        one_of("activation", self.activation, get_args(Activation))


@spec
class SwiGLU:
    """down(silu(gate(x)) * up(x)), with the names that LLaMA and Qwen use."""

    d_ff: int
    bias: bool = False

    def __post_init__(self) -> None:
        at_least("d_ff", self.d_ff)


FeedForward = MLP | SwiGLU

# --- blocks and stacks --------------------------------------------------------------------------


@spec
class Block:
    """Self-attention, cross-attention if any, feed-forward; `placement` says where the norm stands.

    post: x = norm(x + part(x)), the 2017 paper. pre: x = x + part(norm(x)), steadier when deep.
    """

    attention: Attention
    ffn: MLP | SwiGLU
    norm: LayerNorm | RMSNorm
    placement: Placement = "pre"
    cross: Attention | None = None

    def __post_init__(self) -> None:
        one_of("placement", self.placement, get_args(Placement))
        if self.cross is not None and (self.cross.causal or self.cross.window is not None):
            raise InputError(
                "cross-attention cannot be causal or windowed: it reads another sequence",
                hint="set cross.causal=false and leave cross.window out",
            )


@spec
class Layers:
    """A run of `count` equal blocks."""

    count: int
    block: Block

    def __post_init__(self) -> None:
        at_least("count", self.count)


@spec
class Dropout:
    """Rates by place: after the embedding, on attention weights, after a sublayer, in the ffn."""

    embedding: float = 0.0
    attention: float = 0.0
    residual: float = 0.0
    ffn: float = 0.0

    def __post_init__(self) -> None:
        for place in ("embedding", "attention", "residual", "ffn"):
            probability(f"dropout.{place}", getattr(self, place))

    @classmethod
    def from_number(cls, rate: float) -> "Dropout":
        """The same rate in every place."""
        return cls(embedding=rate, attention=rate, residual=rate, ffn=rate)


@spec
class Stack:
    """Runs of blocks from first to last, then a final norm or none."""

    layers: tuple[Layers, ...]
    final_norm: LayerNorm | RMSNorm | None = None
    dropout: Dropout = Dropout()

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError("a stack has no layers", hint="give at least one run of blocks")

    @property
    def n_layers(self) -> int:
        """Blocks in all runs together."""
        return sum(run.count for run in self.layers)

    def blocks(self) -> Iterator[Block]:
        """Each block once, from the first layer to the last."""
        for run in self.layers:
            for _ in range(run.count):
                yield run.block


# --- heads --------------------------------------------------------------------------------------


@spec
class NextHead:
    """Logits of the next token at each position; tied shares the embedding's weights."""

    tied: bool = True
    bias: bool = False


@spec
class ClassHead:
    """Logits of a class at each position."""

    num_classes: int
    bias: bool = True

    def __post_init__(self) -> None:
        at_least("num_classes", self.num_classes)


@spec
class StateHead:
    """Logits of a machine's state at each position."""

    num_states: int
    bias: bool = True

    def __post_init__(self) -> None:
        at_least("num_states", self.num_states)


@spec
class AnswerHead:
    """Logits of one answer for a whole sequence: at its last or first token, or their mean."""

    readout: Readout = "last"
    bias: bool = True

    def __post_init__(self) -> None:
        one_of("readout", self.readout, get_args(Readout))


Head = NextHead | ClassHead | StateHead | AnswerHead

HEAD_NAMES: dict[type, str] = {
    NextHead: "next",
    ClassHead: "class",
    StateHead: "state",
    AnswerHead: "answer",
}

# --- the model ----------------------------------------------------------------------------------


@spec
class ModelSpec:
    """A whole transformer: sizes, embedding, position, one or two stacks, heads, initialisation.

    With an encoder, `source_vocab_size` (None: the same as vocab_size) and `share_embedding` (one
    table for source and target) describe the source side.
    """

    vocab_size: int
    d_model: int
    max_seq_len: int
    decoder: Stack
    encoder: Stack | None = None
    embedding: PlainEmbedding | ScaledEmbedding | FactorizedEmbedding = PlainEmbedding()
    position: NoPosition | Sinusoidal | Learned | Rotary = NoPosition()
    heads: tuple[NextHead | ClassHead | StateHead | AnswerHead, ...] = (NextHead(),)
    init: XavierInit | NormalInit | HeInit = NormalInit()
    source_vocab_size: int | None = None
    share_embedding: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "max_seq_len"):
            at_least(name, getattr(self, name))
        self._check_heads()
        self._check_source()
        for stack in self.stacks().values():
            for run in stack.layers:
                self._check_block(run.block)

    def _check_heads(self) -> None:
        names = self.head_names()
        if not names:
            raise InputError("a model without heads answers nothing", hint="heads=(NextHead(),)")
        if len(set(names)) < len(names):
            raise InputError(f"two heads share a name: {', '.join(names)}")
        causal = all(run.block.attention.causal for run in self.decoder.layers)
        if "next" in names and not causal:
            raise InputError(
                "a next-token head on bidirectional attention sees its own answer",
                hint="set attention.causal=true, or use an AnswerHead",
            )

    def _check_source(self) -> None:
        if self.source_vocab_size is not None:
            at_least("source_vocab_size", self.source_vocab_size)
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
        if any(block.attention.causal for block in self.encoder.blocks()):
            raise InputError("an encoder block is causal", hint="set attention.causal=false there")
        if self.share_embedding and self.source_vocab != self.vocab_size:
            raise InputError(
                f"share_embedding needs equal vocabularies, not {self.source_vocab} and "
                f"{self.vocab_size}",
                hint="leave source_vocab_size out",
            )

    def _check_block(self, block: Block) -> None:
        for attention in (block.attention, block.cross):
            if attention is None:
                continue
            if attention.d_head is None:
                divides("d_model", self.d_model, "n_heads", attention.n_heads)
        d_head = block.attention.head_width(self.d_model)
        if isinstance(self.position, Rotary) and d_head % 2:
            raise InputError(
                f"rotary positions turn pairs, and d_head {d_head} is odd",
                hint=f"the nearest valid d_head is {d_head + 1}",
            )

    @property
    def n_layers(self) -> int:
        """Decoder layers."""
        return self.decoder.n_layers

    @property
    def source_vocab(self) -> int:
        """Vocabulary of the source side, resolved."""
        return self.vocab_size if self.source_vocab_size is None else self.source_vocab_size

    def stacks(self) -> dict[str, Stack]:
        """Stacks by the prefix of their names: "" for a decoder alone, else encoder., decoder."""
        if self.encoder is None:
            return {"": self.decoder}
        return {"encoder.": self.encoder, "decoder.": self.decoder}

    def head_names(self) -> tuple[str, ...]:
        """next, class, state, answer: those that this model has, in order."""
        return tuple(HEAD_NAMES[type(head)] for head in self.heads)

    def head(self, name: str) -> NextHead | ClassHead | StateHead | AnswerHead:
        """The head of that name."""
        for head in self.heads:
            if HEAD_NAMES[type(head)] == name:
                return head
        raise InputError(
            f"no head '{name}'", hint=f"this model has: {', '.join(self.head_names())}"
        )

    def head_size(self, name: str) -> int:
        """How many logits that head gives."""
        head = self.head(name)
        match head:
            case ClassHead():
                return head.num_classes
            case StateHead():
                return head.num_states
            case _:
                return self.vocab_size
