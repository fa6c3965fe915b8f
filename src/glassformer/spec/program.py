"""The program: what a model computes, as a flat list of operations in order.

`program(spec)` writes it down, and this is the only place that walks a spec's unions to say what is
computed. Whoever needs to know (an engine, a cost, a diagram, a comparison) reads the list.

An `Op` has a kind, the values it reads, the value it writes, its weights by their names in the
manifest, and the taps that read what it writes. Values are written once: buffers, layouts and
fusing belong to executors. A value is a table of rows, one row for each token; only `Remember` and
`Attend` look beyond their own row, each through a named memory, which is why a batch, a chunk of a
prompt and a decoding step need no program of their own.

`missing(program, runs)` derives what an executor lacks from what it declares.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal, assert_never, get_args

from glassformer.spec.block import (
    MLP,
    Activation,
    AnswerHead,
    Attention,
    Block,
    ClassHead,
    FactorizedEmbedding,
    GateActivation,
    LayerNorm,
    MaskedHead,
    MoE,
    NextHead,
    PlainEmbedding,
    Readout,
    RMSNorm,
    ScaledEmbedding,
    Stack,
    StateHead,
    SwiGLU,
    VectorHead,
)
from glassformer.spec.checks import check_tree, spec
from glassformer.spec.lacking import Runs, every_field, lacks, shortened
from glassformer.spec.manifest import is_tied
from glassformer.spec.model import ModelSpec, rotary_of
from glassformer.spec.own import OwnPosition
from glassformer.spec.position import (
    ALiBi,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoPosition,
    RelativeBias,
    Rotary,
    Sinusoidal,
    YarnScaling,
)
from glassformer.spec.train import LoRA, lora_targets

# --- the kinds of operations ----------------------------------------------------------------------


@spec
class Embed:
    """y = table[token] * scale."""

    scale: float = 1.0


@spec
class AddRows:
    """y = x + a row of a table, by the token's position or its type.

    `table` is how rows are computed where they are not learned; None: they are the weights, and
    position 0 has row `offset`.
    """

    by: Literal["position", "type"] = "position"
    table: Sinusoidal | OwnPosition | None = None
    offset: int = 0


@spec
class Norm:
    """Each run of `over` numbers normalised by itself: LayerNorm's or RMSNorm's formula.

    The gain is 1 + weight where `offset` says so.
    """

    over: int
    eps: float
    form: Literal["rms", "layer"] = "rms"
    offset: bool = False


@spec
class Linear:
    """y = x W^T + b, or x W where `transposed`."""

    transposed: bool = False


@spec
class Rotate:
    """Pairs of each head turned by angles that grow with the position.

    The first `share` of a head, with the frequencies of `base` and `scaling`.
    """

    heads: int
    base: float = 10_000.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None = None
    share: float = 1.0

    def rotary(self) -> Rotary:
        """The rotation as a spec has it."""
        return Rotary(base=self.base, scaling=self.scaling, share=self.share)


@spec
class Bias:
    """What is added to the scores of every head, by the distance of query and key."""

    heads: int
    d_head: int
    form: ALiBi | RelativeBias
    causal: bool = True


@spec
class Remember:
    """Keys and values join the memory that the next `Attend` of its name reads."""

    heads: int


@spec
class Attend:
    """softmax(scale q k^T + bias) v over a memory; query head n reads key head n // (heads / kv).

    `before` and `after` are how far a query sees to either side, None: to the end. `softcap` c
    bounds scaled scores as c tanh(s / c). With a weight: scores that take part in the softmax and
    have no value. `drop` is the rate at which weights are dropped in training.
    """

    heads: int
    kv_heads: int
    scale: float
    before: int | None = None
    after: int | None = 0
    softcap: float | None = None
    drop: float = 0.0


@spec
class Activate:
    """y = f(x)."""

    function: Activation | Literal["tanh"]


@spec
class Gate:
    """y = f(gate) * up.

    With `limit`: g = min(gate, limit), u = up within [-limit, limit], y = g sigmoid(slope g)
    (u + 1). A gate of width 1 multiplies the complete row.
    """

    function: GateActivation | Literal["sigmoid"] = "silu"
    limit: float | None = None
    slope: float = 1.0


@spec
class Adjust:
    """y = scale x, then `softcap` c as c tanh(y / c)."""

    scale: float = 1.0
    softcap: float | None = None


@spec
class Route:
    """The weight of each expert: softmax at the `chosen` largest logits, 0 elsewhere.

    Of equal logits the lowest index is chosen; `normalize` divides by the sum of those chosen.
    `balance` is the coefficient of the load-balancing loss.
    """

    chosen: int
    normalize: bool = True
    balance: float = 0.0


@spec
class Gather:
    """The rows whose weight of this expert is not 0."""

    expert: int


@spec
class Scatter:
    """y = sum_e weight_e expert_e, each row's experts put back in its place."""

    experts: int


@spec
class Drop:
    """Dropout in training."""

    rate: float


@spec
class Add:
    """y = x + scale z."""

    scale: float = 1.0


@spec
class ReadOut:
    """One row for each sequence: its last or first token's, or the mean."""

    place: Readout


Kind = (
    Embed
    | AddRows
    | Norm
    | Linear
    | Rotate
    | Bias
    | Remember
    | Attend
    | Activate
    | Gate
    | Adjust
    | Route
    | Gather
    | Scatter
    | Drop
    | Add
    | ReadOut
)

#: What a row belongs to: a token of the target or the source, a token that chose an expert, a
#: sequence, or a pair of query and key.
Rows = Literal["target", "source", "chosen", "sequence", "pair"]


@dataclass(frozen=True, slots=True)
class Value:
    """A table of rows, `width` numbers each."""

    name: str
    width: int
    rows: Rows


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: what it reads, writes and weighs.

    `part` is where it stands (`blocks.0.attn`, `heads.next`), `layer` the number of its block.
    `memory` names the state that `Remember` extends and `Attend` reads. `taps` read what it writes,
    in order; of `Attend` the scores, the weights and what it writes, of `Remember` keys and values.
    """

    kind: Kind
    reads: tuple[str, ...]
    writes: str | None
    part: str
    weights: tuple[str, ...] = ()
    layer: int | None = None
    memory: str | None = None
    taps: tuple[str, ...] = ()


#: The values that a program is given.
INPUTS: tuple[str, ...] = ("tokens", "source", "types")


@dataclass(frozen=True, slots=True)
class Program:
    """Operations in order, the values they write, the last hidden state and each head's output."""

    ops: tuple[Op, ...]
    values: dict[str, Value]
    hidden: str
    outputs: dict[str, str]

    def weights(self) -> tuple[str, ...]:
        """Every weight that is read, once, in the order of its first use."""
        return tuple(dict.fromkeys(name for op in self.ops for name in op.weights))

    def taps(self) -> tuple[str, ...]:
        """Every tap, in the order of the computation."""
        return tuple(name for op in self.ops for name in op.taps)

    def for_head(self, name: str) -> "Program":
        """Return the part of it that one head needs."""
        own = (f"heads.{name}", f"transforms.{name}")
        ops = tuple(
            op
            for op in self.ops
            if op.part in own or not op.part.startswith(("heads.", "transforms."))
        )
        written = {op.writes for op in ops}
        values = {key: value for key, value in self.values.items() if key in written}
        return Program(ops, values, self.hidden, {name: self.outputs[name]})

    def with_one_expert(self) -> Iterator[Op]:
        """Yield the operations; of a mixture's experts, which are alike, those of the first."""
        for op in self.ops:
            _, found, expert = op.part.partition(".experts.")
            if not found or expert == "0":
                yield op

    def memories(self) -> tuple[str, ...]:
        """Every memory, in the order in which they are written."""
        return tuple(
            op.memory for op in self.ops if isinstance(op.kind, Remember) and op.memory is not None
        )


# --- writing it -----------------------------------------------------------------------------------


def program(model: ModelSpec, *, training: bool = False, lora: LoRA | None = None) -> Program:
    """Return what the model computes; with `training`, what it drops as well.

    `lora` corrects projections: the corrections are operations like all others.
    """
    check_tree(model)
    return _Writer(model, training=training, lora=lora).written()


class _Writer:
    """Writes the operations of one model, in order."""

    def __init__(self, model: ModelSpec, *, training: bool, lora: LoRA | None) -> None:
        self.model, self.training, self.lora = model, training, lora
        self.corrected = {} if lora is None else lora_targets(model, lora)
        self.ops: list[Op] = []
        self.values: dict[str, Value] = {}
        self.part, self.layer = "", None  # type: tuple[str, int | None]

    def written(self) -> Program:
        """Write both stacks and the heads."""
        memory, hidden = None, ""
        for prefix, stack in self.model.stacks().items():
            source = prefix == "encoder."
            hidden = self.stack(prefix, stack, rows="source" if source else "target", read=memory)
            memory = hidden
        outputs = {name: self.head(name, hidden) for name in self.model.head_names()}
        return Program(tuple(self.ops), self.values, hidden, outputs)

    def op(
        self,
        kind: Kind,
        *reads: str,
        to: str | None,
        width: int = 0,
        rows: Rows | None = None,
        weights: tuple[str, ...] = (),
        memory: str | None = None,
    ) -> str:
        """Append an operation; rows are those of what it reads first, unless they are given."""
        if to is not None:
            assert to not in self.values, f"{to} is written twice"
            kept = self.values[reads[0]] if reads and reads[0] in self.values else None
            assert rows is not None or kept is not None
            self.values[to] = Value(
                to,
                width or (kept.width if kept is not None else 0),
                rows or (kept.rows if kept is not None else "target"),
            )
        self.ops.append(
            Op(kind, reads, to, self.part, weights=weights, layer=self.layer, memory=memory)
        )
        return to or ""

    def tap(self, *names: str) -> None:
        """Let taps read what the last operation writes."""
        self.ops[-1] = dataclasses.replace(self.ops[-1], taps=(*self.ops[-1].taps, *names))

    # --- a stack

    def stack(self, prefix: str, stack: Stack, *, rows: Rows, read: str | None) -> str:
        """Write one stack and return its last hidden state; `read` is the encoder's."""
        model, self.part, self.layer = self.model, f"{prefix}embed", None
        x = self.embedded(prefix, rows)
        x = self.placed(prefix, x)
        if model.token_types:
            self.part = f"{prefix}token_type"
            x = self.op(
                AddRows(by="type"), x, "types", to=self.part, weights=(f"{self.part}.weight",)
            )
        if stack.embed_norm is not None:
            self.part = f"{prefix}embed_norm"
            x = self.norm(stack.embed_norm, x, self.part, to=self.part)
        self.part = f"{prefix}embed"
        x = self.drop(x, stack.dropout.embedding)
        self.tap(f"{prefix}embed")
        biases = self.biases(prefix, stack)
        for layer, block in enumerate(stack.blocks()):
            at, self.layer = f"{prefix}blocks.{layer}", layer
            # A bias stands between the embedding and the blocks: the tap belongs to what wrote x.
            self.tap_value(x, f"{at}.resid_pre")
            x = self.block(at, block, stack, x, biases=biases, read=read)
        self.layer = None
        if stack.final_norm is not None:
            self.part = f"{prefix}final_norm"
            x = self.norm(stack.final_norm, x, self.part, to=f"{prefix}final")
        self.tap(f"{prefix}final")
        return x

    def tap_value(self, value: str, name: str) -> None:
        """Let a tap read a value that an earlier operation wrote."""
        at = next(i for i in reversed(range(len(self.ops))) if self.ops[i].writes == value)
        self.ops[at] = dataclasses.replace(self.ops[at], taps=(*self.ops[at].taps, name))

    def embedded(self, prefix: str, rows: Rows) -> str:
        """Write the lookup of a token, or its two factors."""
        model = self.model
        owner = "encoder.embed" if prefix and model.share_embedding else f"{prefix}embed"
        given = "source" if prefix == "encoder." else "tokens"
        to = f"{prefix}embed"
        match model.embedding:
            case PlainEmbedding():
                scale = 1.0
            case ScaledEmbedding() as scaled:
                scale = scaled.scale(model.d_model)
            case FactorizedEmbedding(rank=rank):
                low = self.op(
                    Embed(), given, to=f"{to}.low", width=rank, rows=rows, weights=(f"{owner}.u",)
                )
                factor = Linear(transposed=True)
                return self.op(factor, low, to=to, width=model.d_model, weights=(f"{owner}.v",))
            case _ as unreachable:
                assert_never(unreachable)
        table = (f"{owner}.weight",)
        return self.op(
            Embed(scale=scale), given, to=to, width=model.d_model, rows=rows, weights=table
        )

    def placed(self, prefix: str, x: str) -> str:
        """Write what is added to the embedding for its position, if anything is."""
        self.part = at = f"{prefix}position"
        weights: tuple[str, ...] = ()
        match self.model.position:
            case Sinusoidal() as table:
                kind = AddRows(table=table)
            case Learned(offset=offset):
                kind, weights = AddRows(offset=offset), (f"{at}.weight",)
            case OwnPosition() as own:
                kind = AddRows(table=own)
                weights = tuple(f"{at}.{one.name}" for one in own.parameters)
            case NoPosition() | Rotary() | ALiBi() | RelativeBias():
                return x
            case _ as unreachable:
                assert_never(unreachable)
        return self.op(kind, x, to=at, weights=weights)

    def biases(self, prefix: str, stack: Stack) -> dict[tuple[int, int], str]:
        """Write the biases of a stack's scores, one for each shape of heads; {} without any."""
        made: dict[tuple[int, int], str] = {}
        weights: tuple[str, ...] = ()
        form: ALiBi | RelativeBias
        match self.model.position:
            case ALiBi() as form:
                self.part = f"{prefix}alibi"
            case RelativeBias() as form:
                self.part, weights = f"{prefix}relative", (f"{prefix}relative.weight",)
            case NoPosition() | Sinusoidal() | Learned() | Rotary() | OwnPosition():
                return made
            case _ as unreachable:
                assert_never(unreachable)
        first: dict[int, str] = {}
        for attention in stack.attentions().values():
            heads = attention.n_heads
            shape = (heads, attention.head_width(self.model.d_model))
            if shape in made:
                continue
            if weights and heads in first:  # a learned bias does not depend on the width of a head
                made[shape] = first[heads]
                continue
            kind = Bias(heads=heads, d_head=shape[1], form=form, causal=attention.causal)
            number = f".{len(made)}" if made else ""
            made[shape] = first[heads] = self.op(
                kind, to=f"{self.part}{number}", width=heads, rows="pair", weights=weights
            )
        return made

    # --- a block

    def block(
        self,
        at: str,
        block: Block,
        stack: Stack,
        x: str,
        *,
        biases: Mapping[tuple[int, int], str],
        read: str | None,
    ) -> str:
        """Write a block: its parts and where the norms stand."""

        def normed(name: str, value: str) -> str:
            self.part = f"{at}.{name}"
            return self.norm(block.norm, value, self.part, to=self.part)

        def mix(value: str) -> str:
            self.part = f"{at}.{block.mixer.leaf}"
            match block.mixer:
                case Attention() as own:
                    bias = biases.get((own.n_heads, own.head_width(self.model.d_model)))
                    out = self.attention(self.part, own, value, stack, bias=bias)
                case _ as unreachable:
                    assert_never(unreachable)
            return self.drop(out, stack.dropout.residual)

        def cross(value: str) -> str:
            assert block.cross is not None and read is not None
            self.part = f"{at}.cross"
            out = self.attention(self.part, block.cross, value, stack, read=read)
            return self.drop(out, stack.dropout.residual)

        def feed(value: str) -> str:
            self.part = f"{at}.ffn"
            out = self.feed_forward(self.part, block.ffn, value, stack)
            return self.drop(out, stack.dropout.residual)

        def add(value: str, part: str, name: str, *, tap: bool = True) -> str:
            self.part = at
            total = self.op(Add(scale=block.residual_scale), value, part, to=f"{at}.{name}")
            if tap:
                self.tap(f"{at}.{name}")
            return total

        def after(name: str, value: str, tap: str) -> str:
            """Normalise the residual stream itself."""
            self.part = f"{at}.{name}"
            total = self.norm(block.norm, value, self.part, to=f"{at}.{tap}")
            self.tap(f"{at}.{tap}")
            return total

        match block.placement:
            case "pre":
                x = add(x, mix(normed("attn_norm", x)), "resid_mid")
                if block.cross is not None:
                    x = add(x, cross(normed("cross_norm", x)), "resid_cross")
                return add(x, feed(normed("ffn_norm", x)), "resid_post")
            case "post":
                x = after("attn_norm", add(x, mix(x), "attn.sum", tap=False), "resid_mid")
                if block.cross is not None:
                    total = add(x, cross(x), "cross.sum", tap=False)
                    x = after("cross_norm", total, "resid_cross")
                return after("ffn_norm", add(x, feed(x), "ffn.sum", tap=False), "resid_post")
            case "sandwich":
                out = normed("attn_post_norm", mix(normed("attn_norm", x)))
                x = add(x, out, "resid_mid")
                out = normed("ffn_post_norm", feed(normed("ffn_norm", x)))
                return add(x, out, "resid_post")
            case "output":
                x = add(x, normed("attn_norm", mix(x)), "resid_mid")
                return add(x, normed("ffn_norm", feed(x)), "resid_post")
            case "parallel":
                one, two = normed("attn_norm", x), normed("ffn_norm", x)
            case "parallel_shared":
                one = two = normed("attn_norm", x)
            case "pre_ffn":
                x = add(x, mix(x), "resid_mid")
                return add(x, feed(normed("ffn_norm", x)), "resid_post")
            case _ as unreachable:
                assert_never(unreachable)
        x = add(x, mix(one), "resid_mid")
        return add(x, feed(two), "resid_post")

    def norm(
        self, norm: LayerNorm | RMSNorm, x: str, weights: str, *, to: str, over: int | None = None
    ) -> str:
        """Write a norm over complete rows, or over runs of `over` numbers."""
        over = self.values[x].width if over is None else over
        match norm:
            case LayerNorm(eps=eps, bias=biased):
                kind = Norm(over=over, eps=eps, form="layer")
            case RMSNorm(eps=eps, offset=offset):
                kind, biased = Norm(over=over, eps=eps, offset=offset), False
            case _ as unreachable:
                assert_never(unreachable)
        names = (f"{weights}.weight", *((f"{weights}.bias",) if biased else ()))
        return self.op(kind, x, to=to, weights=names)

    def linear(self, at: str, x: str, *, width: int, bias: bool, to: str | None = None) -> str:
        """Write a projection; it writes the name of its weights, unless another is given."""
        names = (f"{at}.weight", *((f"{at}.bias",) if bias else ()))
        if self.lora is None or at not in self.corrected:
            return self.op(Linear(), x, to=to or at, width=width, weights=names)
        # W x + b + (alpha / rank) B A drop(x)
        lora, a, b = self.lora, f"{at}.lora_A", f"{at}.lora_B"
        plain = self.op(Linear(), x, to=f"{at}.frozen", width=width, weights=names)
        x = self.drop(x, lora.dropout, to=f"{at}.dropped")
        low = self.op(Linear(), x, to=a, width=lora.rank, weights=(f"{a}.weight",))
        high = self.op(Linear(), low, to=b, width=width, weights=(f"{b}.weight",))
        return self.op(Add(scale=lora.scale), plain, high, to=to or at)

    def drop(self, x: str, rate: float, *, to: str | None = None) -> str:
        """Write dropout, where a training step has it."""
        if not self.training or rate == 0.0:
            return x
        return self.op(Drop(rate=rate), x, to=to or f"{x}.dropped")

    # --- attention

    def attention(
        self,
        at: str,
        attention: Attention,
        x: str,
        stack: Stack,
        *,
        bias: str | None = None,
        read: str | None = None,
    ) -> str:
        """Write attention over x itself, or over what `read` holds."""
        d_head = attention.head_width(self.model.d_model)
        N, K = attention.n_heads, attention.kv_heads
        crossing, context = read is not None, x if read is None else read
        biased = attention.bias in ("qkv", "all", "no_key")
        q = self.heads(f"{at}.q", attention, x, N, bias=biased, crossing=crossing)
        self.tap(f"{at}.q")
        k_bias = attention.bias in ("qkv", "all")
        k = self.heads(f"{at}.k", attention, context, K, bias=k_bias, crossing=crossing)
        v = self.linear(f"{at}.v_proj", context, width=K * d_head, bias=biased, to=f"{at}.v")
        self.op(Remember(heads=K), k, v, to=None, memory=at)
        self.tap(f"{at}.k", f"{at}.v")
        before = None if attention.window is None else attention.window - 1
        kind = Attend(
            heads=N,
            kv_heads=K,
            scale=d_head**-0.5 if attention.scale is None else attention.scale,
            before=before,
            after=0 if attention.causal else before,
            softcap=attention.softcap,
            drop=stack.dropout.attention if self.training else 0.0,
        )
        heads = self.op(
            kind,
            *((q,) if bias is None else (q, bias)),
            to=f"{at}.heads",
            weights=(f"{at}.sinks",) if attention.sinks else (),
            memory=at,
        )
        self.tap(f"{at}.scores", f"{at}.weights", f"{at}.heads")
        o_bias = attention.bias in ("all", "no_key", "out")
        out = self.linear(
            f"{at}.o_proj", heads, width=self.model.d_model, bias=o_bias, to=f"{at}.out"
        )
        self.tap(f"{at}.out")
        return out

    def heads(
        self, at: str, attention: Attention, x: str, heads: int, *, bias: bool, crossing: bool
    ) -> str:
        """Write queries or keys: projection, norm and rotation in the order that the spec says."""
        d_head = attention.head_width(self.model.d_model)
        rotary = None if crossing else rotary_of(attention, self.model.position)
        steps = ["norm"] if attention.qk_norm is not None else []
        if rotary is not None:
            steps.insert(0 if attention.qk_norm_last else len(steps), "rotate")
        names = [f"{at}.{step}" for step in ("proj", *steps)]
        names[-1] = at
        y = self.linear(f"{at}_proj", x, width=heads * d_head, bias=bias, to=names[0])
        for step, name in zip(steps, names[1:], strict=True):
            if step == "norm":
                assert attention.qk_norm is not None
                over = None if attention.qk_norm_over == "all" else d_head
                y = self.norm(attention.qk_norm, y, f"{at}_norm", to=name, over=over)
            else:
                assert rotary is not None
                turn = Rotate(
                    heads=heads, base=rotary.base, scaling=rotary.scaling, share=rotary.share
                )
                y = self.op(turn, y, to=name)
        return y

    # --- feed-forwards

    def feed_forward(
        self, at: str, ffn: MLP | SwiGLU | MoE, x: str, stack: Stack, *, taps: bool = True
    ) -> str:
        """Write a feed-forward and return its output."""
        match ffn:
            case MLP() | SwiGLU():
                return self.dense(at, ffn, x, stack, out=f"{at}.out", taps=taps)
            case MoE():
                return self.mixture(at, ffn, x, stack)
            case _ as unreachable:
                assert_never(unreachable)

    def dense(
        self, at: str, ffn: MLP | SwiGLU, x: str, stack: Stack, *, out: str, taps: bool
    ) -> str:
        """Write down(act(up(x))), or down(act(gate(x)) * up(x))."""
        hidden = f"{at}.hidden"
        match ffn:
            case MLP():
                up = self.linear(f"{at}.up_proj", x, width=ffn.d_ff, bias=ffn.bias)
                y = self.op(Activate(function=ffn.activation), up, to=hidden)
            case SwiGLU(clamp=clamp):
                gate = self.linear(f"{at}.gate_proj", x, width=ffn.d_ff, bias=ffn.bias)
                up = self.linear(f"{at}.up_proj", x, width=ffn.d_ff, bias=ffn.bias)
                kind = (
                    Gate(function=ffn.activation)
                    if clamp is None
                    else Gate(function=ffn.activation, limit=clamp.limit, slope=clamp.slope)
                )
                y = self.op(kind, gate, up, to=hidden)
            case _ as unreachable:
                assert_never(unreachable)
        if taps:
            self.tap(hidden)
        y = self.drop(y, stack.dropout.ffn)
        y = self.linear(f"{at}.down_proj", y, width=self.model.d_model, bias=ffn.bias, to=out)
        if taps:
            self.tap(out)
        return y

    def mixture(self, at: str, ffn: MoE, x: str, stack: Stack) -> str:
        """Write a router, its experts, and the one that every token passes through."""
        logits = self.linear(
            f"{at}.gate", x, width=ffn.n_experts, bias=ffn.router_bias, to=f"{at}.router"
        )
        self.tap(f"{at}.router")
        kind = Route(chosen=ffn.experts_per_token, normalize=ffn.normalize, balance=ffn.balance)
        routing = self.op(kind, logits, to=f"{at}.routing")
        self.tap(f"{at}.routing")
        rows, outs, part = self.values[x].rows, [], self.part
        for expert in range(ffn.n_experts):
            self.part = one = f"{at}.experts.{expert}"
            mine = self.op(Gather(expert=expert), x, routing, to=f"{one}.rows", rows="chosen")
            outs.append(self.dense(one, ffn.expert, mine, stack, out=f"{one}.out", taps=False))
        self.part = part
        single = f"{at}.out" if ffn.shared is None else f"{at}.routed"
        y = self.op(Scatter(experts=ffn.n_experts), routing, *outs, to=single, rows=rows)
        self.values[y] = Value(y, self.model.d_model, rows)
        if ffn.shared is not None:
            self.part = shared = f"{at}.shared_expert"
            plain = f"{at}.shared" if not ffn.shared_gate else f"{shared}.out"
            added = self.dense(shared, ffn.shared, x, stack, out=plain, taps=False)
            if ffn.shared_gate:
                weight = self.linear(f"{at}.shared_expert_gate", x, width=1, bias=False)
                width = self.model.d_model
                kind_of_gate = Gate(function="sigmoid")
                added = self.op(kind_of_gate, weight, added, to=f"{at}.shared", width=width)
            self.tap(f"{at}.shared")
            self.part = part
            y = self.op(Add(), y, added, to=f"{at}.out")
        self.tap(f"{at}.out")
        return y

    # --- heads

    def head(self, name: str, hidden: str) -> str:
        """Write what reads the last hidden state for one kind of prediction."""
        self.part = at = f"heads.{name}"
        head, y = self.model.head(name), hidden
        if head.readout is not None:
            y = self.op(ReadOut(place=head.readout), y, to=f"{at}.row", rows="sequence")
        if isinstance(head, MaskedHead) and head.transform is not None:
            self.part = before = "transforms.masked"
            transform, width = head.transform, self.model.d_model
            y = self.linear(f"{before}.dense", y, width=width, bias=transform.bias)
            y = self.op(Activate(function=transform.activation), y, to=f"{before}.active")
            y = self.norm(transform.norm, y, f"{before}.norm", to=before)
            self.part = at
        match head:
            case VectorHead(pooler=False):
                pass
            case VectorHead():
                y = self.linear(at, y, width=self.model.d_model, bias=True)
                y = self.op(Activate(function="tanh"), y, to=f"{at}.vector")
            case NextHead() | MaskedHead() | ClassHead() | StateHead() | AnswerHead():
                if is_tied(head):
                    y = self.tied(at, y, bias=head.bias)
                else:
                    y = self.linear(at, y, width=self.model.head_size(name), bias=head.bias)
            case _ as unreachable:
                assert_never(unreachable)
        if isinstance(head, NextHead) and (head.scale != 1.0 or head.softcap is not None):
            y = self.op(Adjust(scale=head.scale, softcap=head.softcap), y, to=f"{at}.logits")
        self.tap(f"logits.{name}")
        return y

    def tied(self, at: str, x: str, *, bias: bool) -> str:
        """Write logits by the table of the target's tokens, or its two factors in turn."""
        model = self.model
        owner = "embed"
        if model.encoder is not None:
            owner = "encoder.embed" if model.share_embedding else "decoder.embed"
        added = (f"{at}.bias",) if bias else ()
        match model.embedding:
            case PlainEmbedding() | ScaledEmbedding():
                table = f"{owner}.weight"
            case FactorizedEmbedding(rank=rank):
                x = self.op(Linear(), x, to=f"{at}.low", width=rank, weights=(f"{owner}.v",))
                table = f"{owner}.u"
            case _ as unreachable:
                assert_never(unreachable)
        return self.op(Linear(), x, to=at, width=model.vocab_size, weights=(table, *added))


# --- what an executor lacks -----------------------------------------------------------------------


def missing(made: Program, runs: Runs) -> tuple[str, ...]:
    """Return what an executor that runs `runs` lacks here, each once, with its first place."""
    found: dict[str, str] = {}
    for op in made.ops:
        for lack in lacks(op.kind, runs):
            found.setdefault(lack, op.part)
    return tuple(f"{lack} ({part})" for lack, part in found.items())


#: The names of all kinds, in the order in which they are listed.
KINDS: tuple[type, ...] = get_args(Kind)
#: Specs that a kind's field may hold.
_INSIDE = (
    *(Sinusoidal, OwnPosition, ALiBi, RelativeBias),
    *(LinearScaling, Llama3Scaling, YarnScaling, LongRopeScaling),
)


def everything_but(*lacking: type) -> Runs:
    """Return what an executor runs that runs every kind with every value, but for these."""
    return {one: every_field(one) for one in (*KINDS, *_INSIDE) if one not in lacking}


# --- the list as text -----------------------------------------------------------------------------


def listing(made: Program, *, every_block: bool = False) -> str:
    """Return the program as a table; of equal blocks, and of equal experts, the first is shown.

    Under the name of a block, its own names stand without it. A tap `=` has the name of what is
    written.
    """
    head = ("", "writes", "kind", "reads", "fields", "weights", "taps")
    lines: list[tuple[str, ...] | str] = [head]
    skipped, under = {} if every_block else _repeated(made), ""
    for number, op in enumerate(made.ops):
        block = _block_of(op)
        note = skipped.get(number)
        if note is None and block != under:
            lines.append(block)
        under = block
        if note is None:
            lines.append((str(number), *_cells(op, f"{block}." if block else "")))
        elif lines[-1] != note:
            lines.append(note)
    rows = [line for line in lines if isinstance(line, tuple)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(_line(line, widths) for line in lines)


def _block_of(op: Op) -> str:
    """Return the name of an operation's block; empty outside of blocks."""
    if op.layer is None:
        return ""
    before, _, _ = op.part.partition(f"blocks.{op.layer}")
    return f"{before}blocks.{op.layer}"


def _cells(op: Op, own: str) -> Iterator[str]:
    """Yield the columns of an operation, names without the block's own."""

    def short(names: tuple[str, ...]) -> str:
        left = [name.removeprefix(own) for name in names]
        return " ".join(left if len(left) < MANY else [left[0], left[1], "...", left[-1]])

    yield op.writes.removeprefix(own) if op.writes else "-"
    yield type(op.kind).__name__
    yield short(op.reads)
    yield " ".join(_settings(op, own))
    yield short(op.weights)
    yield short(tuple("=" if name == op.writes else name for name in op.taps))


#: More names than these in a cell are shortened: all experts of a mixture.
MANY = 6


def _line(line: tuple[str, ...] | str, widths: list[int]) -> str:
    if isinstance(line, str):
        return f"{'':>{widths[0]}}  {line}".rstrip()
    first, *rest = line
    cells = [f"{cell:<{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
    return "  ".join([f"{first:>{widths[0]}}", *cells]).rstrip()


def _settings(op: Op, own: str) -> Iterator[str]:
    """Yield the fields of an operation that say something: sizes, and what is not the default."""
    if op.memory is not None:
        yield f"memory={op.memory.removeprefix(own)}"
    if isinstance(op.kind, Attend):
        yield f"heads={op.kind.heads}/{op.kind.kv_heads}"
        yield _reach(op.kind)
        yield f"scale={op.kind.scale:g}"
    for one in fields(op.kind):
        held = getattr(op.kind, one.name)
        told = isinstance(op.kind, Attend) and one.name not in ("softcap", "drop")
        if told or (held == one.default and one.name not in ("form", "function")):
            continue
        plain = one.name in ("form", "function") and isinstance(held, str)
        yield held if plain else f"{one.name}={shortened(held)}"


def _reach(kind: Attend) -> str:
    """Say what a query sees."""
    order = "causal" if kind.after == 0 else ""
    window = "" if kind.before is None else f"window={kind.before + 1}"
    return " ".join(filter(None, (order, window))) or "all"


def _repeated(made: Program) -> dict[int, str]:
    """Return the operations that repeat what was shown, with the line that stands for them."""
    notes: dict[int, str] = {}
    blocks: dict[str, list[int]] = {}
    for number, op in enumerate(made.ops):
        if (block := _block_of(op)) != "":
            blocks.setdefault(block, []).append(number)
        mixture, found, expert = op.part.partition(".experts.")
        if found and expert != "0":
            left = mixture.rpartition("blocks.")[2].partition(".")[2]
            notes[number] = f"{left}.experts.1 and on: as {left}.experts.0"
    for first, *others in block_runs(made):
        if others:
            last = others[-1].rpartition(".")[2]
            span = others[0] if len(others) == 1 else f"{others[0]} to {last}"
            for number in (number for block in others for number in blocks[block]):
                notes[number] = f"{span}: as {first}"
    return notes


def block_runs(made: Program) -> list[tuple[str, ...]]:
    """Return the names of the blocks, those together that follow each other and are equal."""
    blocks: dict[str, list[int]] = {}
    for number, op in enumerate(made.ops):
        if (block := _block_of(op)) != "":
            blocks.setdefault(block, []).append(number)
    runs: list[tuple[str, ...]] = []
    before: object = None
    for block, numbers in blocks.items():
        shape = (block.rpartition("blocks.")[0], _shape(made, numbers, block))
        if shape == before:
            runs[-1] = (*runs[-1], block)
        else:
            runs.append((block,))
        before = shape
    return runs


def _shape(made: Program, numbers: list[int], block: str) -> tuple[object, ...]:
    """Return a block's operations without the block's own name, to compare it with others."""
    given = made.ops[numbers[0]].reads[0]

    def short(name: str | None) -> str:
        return "x" if name == given else (name or "").removeprefix(f"{block}.")

    def width(op: Op) -> int:
        return 0 if op.writes is None else made.values[op.writes].width

    return tuple(
        (
            op.kind,
            width(op),
            short(op.writes),
            short(op.memory),
            *map(short, (*op.reads, *op.weights)),
        )
        for op in (made.ops[number] for number in numbers)
    )
