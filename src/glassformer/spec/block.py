"""The parts of a model: norms, attention, feed-forwards, blocks, stacks, heads, embeddings.

A stack is runs of equal blocks, so that layers may differ. A head reads the last hidden states, one
head for each kind of prediction. An embedding turns a token into d_model numbers.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, assert_never

from glassformer.spec.checks import at_least, divides, positive, probability, size, spec
from glassformer.spec.errors import InputError
from glassformer.spec.position import NoPosition, Rotary

L = TypeVar("L")
T = TypeVar("T")


@spec
class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias; without `bias` the last term is left out."""

    eps: float = 1e-5
    bias: bool = True

    def __post_init__(self) -> None:
        positive("eps", self.eps)


@spec
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight.

    With `offset` the gain is 1 + weight, as Gemma has it: weights that decay pull it to 1, not 0.
    """

    eps: float = 1e-6
    offset: bool = False

    def __post_init__(self) -> None:
        positive("eps", self.eps)


Norm = LayerNorm | RMSNorm

#: Which projections carry a bias. `no_key` is `all` without the key's, whose gradient is zero
#: wherever no rotation or q/k-norm follows it; `out` is the output's alone (GPT-Neo).
Bias = Literal["none", "qkv", "all", "no_key", "out"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2"]
#: Activations of a gate.
GateActivation = Literal["silu", "gelu", "gelu_tanh"]
Placement = Literal["pre", "post", "sandwich", "output", "parallel", "parallel_shared", "pre_ffn"]
#: The values that q/k-norm takes together: those of one head, or of all heads.
NormWidth = Literal["head", "all"]


@spec
class Attention:
    """Heads, grouped keys, biases, q/k-norm, causality and window of one attention.

    `n_kv_heads` None means n_heads; `d_head` None means d_model // n_heads; `window` w lets a
    query attend to itself and the w - 1 tokens before it (on both sides when not causal).

    `scale` multiplies the scores, None means 1 / sqrt(d_head); `softcap` c turns a score s into
    c tanh(s / c) (Gemma 2). q/k-norm is over each head or over all heads at once (OLMo 2), before
    the rotation or, with `qk_norm_last`, after it (Hunyuan). `sinks` gives each head a learned
    score that takes its share of the softmax and has no value (gpt-oss). `position` is a rotation
    of this layer's own, or none (SmolLM3); None means the model's.
    """

    n_heads: int
    n_kv_heads: int | None = None
    d_head: int | None = None
    bias: Bias = "none"
    qk_norm: Norm | None = None
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    qk_norm_over: NormWidth = "head"
    qk_norm_last: bool = False
    sinks: bool = False
    position: Rotary | NoPosition | None = None

    #: Its name in a block, and its taps with their shapes in the order of the computation.
    leaf: ClassVar[str] = "attn"
    taps: ClassVar[Mapping[str, str]] = {
        "q": "BNTH",
        "k": "BKSH",
        "v": "BKSH",
        "scores": "BNTS",
        "weights": "BNTS",
        "heads": "BNTH",
        "out": "BTD",
    }

    def __post_init__(self) -> None:
        size("n_heads", self.n_heads)
        for name in ("scale", "softcap"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        if self.qk_norm_last and self.qk_norm_over == "all":
            raise InputError(
                "a norm over all heads comes before the rotation, which splits them",
                hint="leave qk_norm_last or qk_norm_over out",
            )
        if self.d_head is not None:
            size("d_head", self.d_head)
        if self.window is not None:
            size("window", self.window)
        if self.n_kv_heads is not None:
            size("n_kv_heads", self.n_kv_heads)
            divides("n_heads", self.n_heads, "n_kv_heads", self.n_kv_heads)

    @property
    def kv_heads(self) -> int:
        """Key-value heads, resolved."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    def head_width(self, d_model: int) -> int:
        """d_head, resolved for a model of this width."""
        return d_model // self.n_heads if self.d_head is None else self.d_head


#: What a block does between positions. Each knows its name in a block and its taps, whether it is
#: `causal`, its `window`, and the `position` of its own, where None is the model's.
Mixer: TypeAlias = Attention


@spec
class MLP:
    """down(act(up(x))); gelu is the exact one, gelu_tanh its approximation, relu2 relu(x)^2."""

    d_ff: int
    activation: Activation = "gelu"
    bias: bool = True

    def __post_init__(self) -> None:
        size("d_ff", self.d_ff)


@spec
class Clamp:
    """Limits of a gated feed-forward, as gpt-oss has them.

    g = min(gate(x), limit) and u = up(x) within [-limit, limit]; g sigmoid(slope g) (u + 1) takes
    the place of silu(gate(x)) * up(x).
    """

    limit: float = 7.0
    slope: float = 1.702

    def __post_init__(self) -> None:
        positive("limit", self.limit)
        positive("slope", self.slope)


@spec
class SwiGLU:
    """down(silu(gate(x)) * up(x)), with the names that LLaMA and Qwen use.

    With GELU for its `activation` it is known as GeGLU (Gemma). `clamp` limits both factors.
    """

    d_ff: int
    bias: bool = False
    activation: GateActivation = "silu"
    clamp: Clamp | None = None

    def __post_init__(self) -> None:
        size("d_ff", self.d_ff)
        if self.clamp is not None and self.activation != "silu":
            raise InputError(
                f"clamp with activation {self.activation!r}", hint="a clamped gate has silu"
            )


@spec
class MoE:
    """A mixture of experts: sum_e w_e expert_e(x) over the experts that a router chooses.

    logits = gate(x), p = softmax(logits); the `experts_per_token` largest logits choose (of equal
    ones the lowest index), and w = p there, divided by its sum where `normalize` says so (Mixtral,
    Qwen3-MoE: yes; OLMoE, Qwen2-MoE: no). No token is ever dropped.
    `router_bias` adds a learned number to each expert's logit (gpt-oss).
    `shared` is one more expert that every token passes through; with `shared_gate` it is multiplied
    by sigmoid(shared_expert_gate(x)), as in Qwen2-MoE.
    `balance` is the coefficient of the load-balancing loss n_experts * sum_e f_e P_e: f_e is the
    share of tokens that choose e, P_e the mean of p_e, over real tokens. Spread evenly it is
    `experts_per_token`; each layer has its own, and the objective has their mean.
    Sources: Shazeer and others, 2017; Fedus and others, 2021 (the loss).
    """

    n_experts: int
    experts_per_token: int
    expert: MLP | SwiGLU
    normalize: bool = True
    shared: MLP | SwiGLU | None = None
    shared_gate: bool = False
    balance: float = 0.01
    router_bias: bool = False

    def __post_init__(self) -> None:
        size("n_experts", self.n_experts, 2)
        size("experts_per_token", self.experts_per_token)
        if self.experts_per_token > self.n_experts:
            raise InputError(
                f"experts_per_token {self.experts_per_token} is above n_experts {self.n_experts}",
                hint=f"the nearest valid experts_per_token is {self.n_experts}",
            )
        if self.normalize and self.experts_per_token == 1:
            raise InputError(
                "the normalized weight of a single expert is always 1, and the router learns "
                "nothing from the loss",
                hint="set normalize=false, or experts_per_token=2",
            )
        if self.shared_gate and self.shared is None:
            raise InputError("shared_gate without a shared expert", hint="give `shared` as well")
        if not 0.0 <= self.balance < float("inf"):
            raise InputError(
                f"balance {self.balance} is negative", hint="0 turns the balance loss off"
            )


FeedForward = MLP | SwiGLU | MoE


@spec
class Block:
    """A mixer, cross-attention if any, feed-forward; `placement` is where the norms are.

    The mixer is what a block does between positions: self-attention. In files and in Python it may
    be given as `attention`, which it was called when there was no other.

    post: x = norm(x + part(x)), the 2017 paper. pre: x = x + part(norm(x)), steadier when deep.
    sandwich: x = x + norm'(part(norm(x))) (Gemma 2). output: x = x + norm(part(x)) (OLMo 2).
    parallel: x = x + attention(norm(x)) + ffn(norm'(x)) (GPT-NeoX); parallel_shared: with one norm
    for both (Falcon, Cohere). pre_ffn: x = x + attention(x), then x = x + ffn(norm(x)): a first
    block whose embedding is normalised (ModernBERT). `residual_scale` multiplies what a part adds
    to x (Granite).
    """

    mixer: Mixer
    ffn: FeedForward
    norm: Norm
    placement: Placement = "pre"
    cross: Attention | None = None
    residual_scale: float = 1.0

    #: Keys that stand for a field with a value of this class.
    shorthands: ClassVar[Mapping[str, tuple[str, str]]] = {"attention": ("mixer", "Attention")}

    def __post_init__(self) -> None:
        positive("residual_scale", self.residual_scale)
        if self.residual_scale != 1.0 and self.placement != "pre":
            raise InputError(
                f"residual_scale with placement {self.placement!r}",
                hint="norms before the parts alone: placement='pre'",
            )
        if self.cross is not None and self.placement not in ("pre", "post"):
            raise InputError(
                f"cross-attention with placement {self.placement!r}", hint="use pre or post"
            )
        if self.cross is not None and (self.cross.position is not None or self.cross.sinks):
            raise InputError("cross-attention has no positions and no sinks")
        if self.cross is not None and (self.cross.causal or self.cross.window is not None):
            raise InputError(
                "cross-attention cannot be causal or windowed: it reads another sequence",
                hint="set cross.causal=false and leave cross.window out",
            )

    @property
    def attention(self) -> Attention:
        """The mixer of a block that has attention; any other is refused by name."""
        if not isinstance(self.mixer, Attention):
            raise InputError(
                f"a block with {type(self.mixer).__name__} in the place of attention",
                hint="what is wanted here is known for attention alone",
            )
        return self.mixer


#: Blocks of one run: each has parameters of its own, and names for them.
MOST_LAYERS = 10_000


@spec
class Layers:
    """A run of `count` equal blocks."""

    count: int
    block: Block

    def __post_init__(self) -> None:
        at_least("count", self.count, most=MOST_LAYERS)


@spec
class Dropout:
    """Dropout rates: after the embedding, on attention weights, after a sublayer, in the ffn."""

    embedding: float = 0.0
    attention: float = 0.0
    residual: float = 0.0
    ffn: float = 0.0

    def __post_init__(self) -> None:
        for name in ("embedding", "attention", "residual", "ffn"):
            probability(f"dropout.{name}", getattr(self, name))

    @classmethod
    def from_number(cls, rate: float) -> "Dropout":
        """Use one rate everywhere."""
        return cls(embedding=rate, attention=rate, residual=rate, ffn=rate)


@spec
class Stack:
    """Runs of blocks from first to last, then a final norm or none.

    `embed_norm` normalises the embedded sequence, positions included, before the first block (BERT,
    BART, Bloom).
    """

    layers: tuple[Layers, ...]
    final_norm: Norm | None = None
    dropout: Dropout = Dropout()
    embed_norm: Norm | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError("a stack has no layers", hint="give at least one run of blocks")

    @property
    def n_layers(self) -> int:
        """The number of blocks in all runs."""
        return sum(run.count for run in self.layers)

    def blocks(self) -> Iterator[Block]:
        """Yield every block from the first layer to the last."""
        for run in self.layers:
            for _ in range(run.count):
                yield run.block

    def common(self, read: Callable[[Block], T], what: str) -> T:
        """Return what all blocks have in common; layers that differ in it are refused by name."""
        return common(dict(enumerate(self.blocks())), read, what)

    def block(self, *, but: tuple[str, ...] = ()) -> Block:
        """Return the first block, which all are but for fields such as `mixer.window`.

        Layers that differ in another field are refused by its name.
        """
        first, layer = self.layers[0].block, 0
        for run in self.layers:
            for path, ours, theirs in _differences(first, run.block):
                if not any(path == one or path.startswith(f"{one}.") for one in but):
                    raise InputError(
                        f"layers differ in {path}: {ours} in layer 0, {theirs} in layer {layer}",
                        hint="one value for all of them is wanted here: give all layers the same",
                    )
            layer += run.count
        return first

    def heads_in_words(self) -> str:
        """Return the numbers of heads of its attentions, first to last: `8`, `16 and 4`, `0`."""
        numbers = dict.fromkeys(each.n_heads for each in self.attentions().values())
        return " and ".join(map(str, numbers)) or "0"

    def attentions(self) -> dict[int, Attention]:
        """Self-attentions by the number of their layer; other mixers are left out."""
        return {
            layer: block.mixer
            for layer, block in enumerate(self.blocks())
            if isinstance(block.mixer, Attention)
        }


def common(layers: Mapping[int, L], read: Callable[[L], T], what: str) -> T:
    """Return what all layers have in common; layers that differ are refused by name.

    For what has one number where a model has one for each layer: a format's header, a page's line.
    """
    found: dict[T, list[int]] = {}
    for layer, one in layers.items():
        found.setdefault(read(one), []).append(layer)
    if len(found) == 1:
        return next(iter(found))
    each = "; ".join(f"{value} in {_in_words(numbers)}" for value, numbers in found.items())
    raise InputError(
        f"layers differ in {what}: {each or 'there are none'}",
        hint="one value for all of them is wanted here: give all layers the same",
    )


def _in_words(numbers: list[int]) -> str:
    """`layer 3`, `layers 0, 2 and 5 more`."""
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    rest = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return f"layers {', '.join(map(str, numbers[:3]))}{rest}"


def _differences(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted names of the fields in which two specs differ, with both values."""
    if type(one) is type(other) and dataclasses.is_dataclass(one):
        for each in dataclasses.fields(one):
            below = f"{path}.{each.name}" if path else each.name
            yield from _differences(getattr(one, each.name), getattr(other, each.name), below)
    elif one != other:
        yield path, one, other


Readout = Literal["last", "first", "mean"]


@spec
class NextHead:
    """Logits of the next token at each position; tied shares the embedding's weights.

    Logits are multiplied by `scale` (Granite, Cohere); `softcap` c turns a logit s into
    c tanh(s / c) (Gemma 2).
    """

    tied: bool = True
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        positive("scale", self.scale)
        if self.softcap is not None:
            positive("softcap", self.softcap)

    @property
    def readout(self) -> None:
        """None: it predicts at every position."""

    def rows(self, length: int) -> int:
        """Predictions for a sequence of `length` tokens."""
        return length


@spec
class ClassHead:
    """Logits of a class at each position."""

    num_classes: int
    bias: bool = True

    def __post_init__(self) -> None:
        size("num_classes", self.num_classes)

    @property
    def readout(self) -> None:
        """None: it predicts at every position."""

    def rows(self, length: int) -> int:
        """Predictions for a sequence of `length` tokens."""
        return length


@spec
class StateHead:
    """Logits of a machine's state at each position."""

    num_states: int
    bias: bool = True

    def __post_init__(self) -> None:
        size("num_states", self.num_states)

    @property
    def readout(self) -> None:
        """None: it predicts at every position."""

    def rows(self, length: int) -> int:
        """Predictions for a sequence of `length` tokens."""
        return length


@spec
class AnswerHead:
    """Logits of one answer for a sequence: read at its last or first token, or their mean.

    The answer is one of `num_answers` classes; with None it is a token of the vocabulary.
    """

    readout: Readout = "last"
    bias: bool = True
    num_answers: int | None = None

    def __post_init__(self) -> None:
        if self.num_answers is not None:
            size("num_answers", self.num_answers)

    def rows(self, length: int) -> int:
        """Predictions for a sequence, whatever its length: one."""
        return 1


@spec
class HeadTransform:
    """norm(act(dense(x))), width kept: what BERT puts between its last block and the logits."""

    activation: Activation = "gelu"
    norm: Norm = LayerNorm()
    bias: bool = True


@spec
class MaskedHead:
    """Logits of the token itself at each position, for a model that fills in hidden tokens."""

    tied: bool = True
    bias: bool = True
    transform: HeadTransform | None = None

    @property
    def readout(self) -> None:
        """None: it predicts at every position."""

    def rows(self, length: int) -> int:
        """Predictions for a sequence of `length` tokens."""
        return length


@spec
class VectorHead:
    """One vector of d_model numbers for a sequence, not logits: a sentence's place among others.

    Read at its first or last token, or their mean. With `pooler`, tanh(W x + b) of that: what BERT
    calls pooled.
    """

    readout: Readout = "mean"
    pooler: bool = False

    @property
    def bias(self) -> bool:
        """True: the pooler has one."""
        return self.pooler

    def rows(self, length: int) -> int:
        """Vectors for a sequence, whatever its length: one."""
        return 1


Head = NextHead | ClassHead | StateHead | AnswerHead | MaskedHead | VectorHead


def head_name(head: Head) -> str:
    """Return the name under which a model holds this head, its logits and its targets."""
    match head:
        case NextHead():
            return "next"
        case ClassHead():
            return "class"
        case StateHead():
            return "state"
        case AnswerHead():
            return "answer"
        case MaskedHead():
            return "masked"
        case VectorHead():
            return "vector"
        case _ as unreachable:
            assert_never(unreachable)


@spec
class PlainEmbedding:
    """One row of d_model numbers for each token."""


@spec
class ScaledEmbedding:
    """The row times sqrt(d_model), as in the 2017 paper: keeps it level with the sinusoids.

    Historical and optional: it changes the embedding's effective learning rate, and most models
    since GPT-2 leave it out. Gemma has it; Granite has a `factor` of its own in its place.
    """

    factor: float | None = None

    def __post_init__(self) -> None:
        if self.factor is not None:
            positive("factor", self.factor)

    def scale(self, d_model: int) -> float:
        """The factor, resolved for a model of this width."""
        return d_model**0.5 if self.factor is None else self.factor


@spec
class FactorizedEmbedding:
    """U[token] @ V, U (vocab, rank), V (rank, d_model); `l1` weighs the sum of |U| in the loss."""

    rank: int
    l1: float = 0.0

    def __post_init__(self) -> None:
        size("rank", self.rank)
        if not 0.0 <= self.l1 < float("inf"):
            raise InputError(f"l1 {self.l1} is negative", hint="0 turns the penalty off")


Embedding = PlainEmbedding | ScaledEmbedding | FactorizedEmbedding
