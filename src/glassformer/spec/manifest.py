"""The manifest: names, shapes, roles and initial rules of every parameter, from the spec alone.

They are defined here only. The manifest serves counting, initialisation, decay groups,
both engines' allocation, checkpoints, conversion and the list of gradients that are zero by theory;
no other code parses names. The functions for single parts can be called on their own, to count or
to build a part; `manifest` joins them.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal, Protocol, assert_never

from glassformer.spec.block import common
from glassformer.spec.checks import check_tree, spec
from glassformer.spec.execution import check_memory
from glassformer.spec.init import Constant, Gaussian, Init, Rule
from glassformer.spec.model import (
    MLP,
    ALiBi,
    AnswerHead,
    Attention,
    Block,
    ClassHead,
    Embedding,
    FactorizedEmbedding,
    FeedForward,
    Head,
    LayerNorm,
    Learned,
    MaskedHead,
    ModelSpec,
    MoE,
    NextHead,
    NoPosition,
    Norm,
    PlainEmbedding,
    Position,
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

Role = Literal[
    "embedding",
    "position",
    "attention",
    "cross_attention",
    "ffn",
    "router",
    "norm",
    "final_norm",
    "head",
]
Kind = Literal["table", "matrix", "bias", "gain"]

KEY_BIAS_IS_IDLE = (
    "softmax ignores a constant added to every score of a row, and a key bias adds one"
)


@spec
class Parameter:
    """One tensor of the model.

    `tied_to` names the parameter whose storage this one shares (then it is not counted again);
    `zero_gradient` gives the reason where theory says that the gradient vanishes. `expert` is the
    index of the routed expert that owns it: a token uses only some of those.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    kind: Kind
    init: Rule
    decay: bool = False
    tied_to: str | None = None
    layer: int | None = None
    zero_gradient: str = ""
    expert: int | None = None

    @property
    def size(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)


def embedding_parameters(model: ModelSpec, prefix: str, vocab: int) -> Iterator[Parameter]:
    """Yield the token table, or its two factors."""
    match model.embedding:
        case FactorizedEmbedding(rank=rank):
            shapes = {"u": (vocab, rank), "v": (rank, model.d_model)}
        case PlainEmbedding() | ScaledEmbedding():
            shapes = {"weight": (vocab, model.d_model)}
        case _ as unreachable:
            assert_never(unreachable)
    for leaf, shape in shapes.items():
        yield Parameter(
            name=f"{prefix}{leaf}",
            shape=shape,
            role="embedding",
            kind="table",
            init=model.init.table(shape),
        )


def is_factorized(embedding: Embedding) -> bool:
    """Return True if the token table is a product of two factors, which is never formed."""
    match embedding:
        case FactorizedEmbedding():
            return True
        case PlainEmbedding() | ScaledEmbedding():
            return False
        case _ as unreachable:
            assert_never(unreachable)


def position_parameters(model: ModelSpec, prefix: str) -> Iterator[Parameter]:
    """Yield the learned table of positions, if there is one."""
    match model.position:
        case Learned(offset=offset):
            shape = (model.max_seq_len + offset, model.d_model)
            yield Parameter(
                name=f"{prefix}weight",
                shape=shape,
                role="position",
                kind="table",
                init=model.init.table(shape),
            )
        case OwnPosition(parameters=own):
            for one in own:
                yield Parameter(
                    name=f"{prefix}{one.name}",
                    shape=one.shape,
                    role="position",
                    kind="table",
                    init=Gaussian(std=one.std),
                )
        case NoPosition() | Sinusoidal() | Rotary() | ALiBi() | RelativeBias():
            pass
        case _ as unreachable:
            assert_never(unreachable)


def relative_parameters(model: ModelSpec, stack: Stack, prefix: str) -> Iterator[Parameter]:
    """Yield the biases of a stack by bucket and head, if its positions are such."""
    attentions = stack.attentions()
    if isinstance(model.position, RelativeBias) and attentions:
        heads = common(attentions, lambda each: each.n_heads, "n_heads")
        shape = (model.position.buckets, heads)
        yield Parameter(
            name=f"{prefix}weight",
            shape=shape,
            role="position",
            kind="table",
            init=model.init.table(shape),
        )


def turns_keys(position: Position) -> bool:
    """True if keys are turned after their bias was added, so that the bias matters."""
    match position:
        case Rotary():
            return True
        case NoPosition() | Sinusoidal() | Learned() | ALiBi() | RelativeBias() | OwnPosition():
            return False
        case _ as unreachable:
            assert_never(unreachable)


def norm_parameters(
    norm: Norm, prefix: str, width: int, *, role: Role = "norm"
) -> Iterator[Parameter]:
    """Yield the gain, and LayerNorm's bias."""
    one, zero = Constant(value=1.0), Constant(value=0.0)
    match norm:
        case LayerNorm(bias=biased):
            first = one
        case RMSNorm(offset=offset):
            first, biased = zero if offset else one, False
        case _ as unreachable:
            assert_never(unreachable)
    yield Parameter(name=f"{prefix}weight", shape=(width,), role=role, kind="gain", init=first)
    if biased:
        yield Parameter(name=f"{prefix}bias", shape=(width,), role=role, kind="bias", init=zero)


def linear_parameters(
    prefix: str,
    shape: tuple[int, int],
    *,
    role: Role,
    init: Init,
    bias: bool,
    feeds_relu: bool = False,
    residual_depth: int = 0,
    bias_is_idle: str = "",
) -> Iterator[Parameter]:
    """Yield a weight (out, in) and its bias, if there is one."""
    rule = init.matrix(shape, feeds_relu=feeds_relu, residual_depth=residual_depth)
    yield Parameter(
        name=f"{prefix}weight", shape=shape, role=role, kind="matrix", init=rule, decay=True
    )
    if bias:
        yield Parameter(
            name=f"{prefix}bias",
            shape=shape[:1],
            role=role,
            kind="bias",
            init=Constant(value=0.0),
            zero_gradient=bias_is_idle,
        )


def attention_parameters(
    attention: Attention,
    prefix: str,
    d_model: int,
    *,
    init: Init,
    role: Role = "attention",
    rotated: bool = False,
    residual_depth: int = 0,
) -> Iterator[Parameter]:
    """Yield q, k, v, o projections and q/k-norm; `rotated`: keys are rotated after their bias."""
    d_head = attention.head_width(d_model)
    q_width, kv_width = attention.n_heads * d_head, attention.kv_heads * d_head
    # A cap or a sink makes a row's softmax depend on what all of its scores share.
    matters = rotated or attention.qk_norm or attention.softcap or attention.sinks
    idle = "" if matters else KEY_BIAS_IS_IDLE
    biased = {
        "none": "",
        "qkv": "qkv",
        "all": "qkvo",
        "no_key": "qvo",
        "out": "o",
    }[attention.bias]
    if attention.sinks:
        yield Parameter(
            name=f"{prefix}sinks",
            shape=(attention.n_heads,),
            role=role,
            kind="bias",
            init=Constant(value=0.0),
        )
    for letter, shape in (
        ("q", (q_width, d_model)),
        ("k", (kv_width, d_model)),
        ("v", (kv_width, d_model)),
        ("o", (d_model, q_width)),
    ):
        yield from linear_parameters(
            f"{prefix}{letter}_proj.",
            shape,
            role=role,
            init=init,
            bias=letter in biased,
            residual_depth=residual_depth if letter == "o" else 0,
            bias_is_idle=idle if letter == "k" else "",
        )
    if attention.qk_norm is not None:
        whole = attention.qk_norm_over == "all"
        for letter, width in (("q", q_width), ("k", kv_width)):
            yield from norm_parameters(
                attention.qk_norm,
                f"{prefix}{letter}_norm.",
                width if whole else d_head,
                role=role,
            )


def ffn_parameters(
    ffn: FeedForward, prefix: str, d_model: int, *, init: Init, residual_depth: int = 0
) -> Iterator[Parameter]:
    """Yield the projections of a feed-forward, or a router and the projections of its experts."""
    match ffn:
        case MLP() | SwiGLU():
            yield from _dense_parameters(
                ffn, prefix, d_model, init=init, residual_depth=residual_depth
            )
        case MoE():
            yield from _moe_parameters(
                ffn, prefix, d_model, init=init, residual_depth=residual_depth
            )
        case _ as unreachable:
            assert_never(unreachable)


def _dense_parameters(
    ffn: MLP | SwiGLU, prefix: str, d_model: int, *, init: Init, residual_depth: int
) -> Iterator[Parameter]:
    """Yield up and down, and SwiGLU's gate before them."""
    match ffn:
        case MLP():
            into, feeds_relu = ["up_proj"], ffn.activation == "relu"
        case SwiGLU():
            into, feeds_relu = ["gate_proj", "up_proj"], False
        case _ as unreachable:
            assert_never(unreachable)
    for leaf in into:
        yield from linear_parameters(
            f"{prefix}{leaf}.",
            (ffn.d_ff, d_model),
            role="ffn",
            init=init,
            bias=ffn.bias,
            feeds_relu=feeds_relu,
        )
    yield from linear_parameters(
        f"{prefix}down_proj.",
        (d_model, ffn.d_ff),
        role="ffn",
        init=init,
        bias=ffn.bias,
        residual_depth=residual_depth,
    )


def _moe_parameters(
    ffn: MoE, prefix: str, d_model: int, *, init: Init, residual_depth: int
) -> Iterator[Parameter]:
    """Yield the router, its experts, the shared expert and its gate, with Qwen-MoE's names."""
    yield from linear_parameters(
        f"{prefix}gate.", (ffn.n_experts, d_model), role="router", init=init, bias=ffn.router_bias
    )
    for expert in range(ffn.n_experts):
        for parameter in _dense_parameters(
            ffn.expert,
            f"{prefix}experts.{expert}.",
            d_model,
            init=init,
            residual_depth=residual_depth,
        ):
            yield replace(parameter, expert=expert)
    if ffn.shared is not None:
        yield from _dense_parameters(
            ffn.shared,
            f"{prefix}shared_expert.",
            d_model,
            init=init,
            residual_depth=residual_depth,
        )
    if ffn.shared_gate:
        yield from linear_parameters(
            f"{prefix}shared_expert_gate.", (1, d_model), role="router", init=init, bias=False
        )


def block_parameters(
    block: Block,
    prefix: str,
    d_model: int,
    *,
    init: Init,
    rotated: bool = False,
    residual_depth: int = 0,
) -> Iterator[Parameter]:
    """Yield the parameters of a block: each sublayer's norm, then the sublayer."""
    if block.placement != "pre_ffn":
        yield from norm_parameters(block.norm, f"{prefix}attn_norm.", d_model)
    at = f"{prefix}{block.mixer.leaf}."
    match block.mixer:
        case Attention() as attention:
            yield from attention_parameters(
                attention, at, d_model, init=init, rotated=rotated, residual_depth=residual_depth
            )
        case _ as unreachable:
            assert_never(unreachable)
    if block.cross is not None:
        yield from norm_parameters(block.norm, f"{prefix}cross_norm.", d_model)
        yield from attention_parameters(
            block.cross,
            f"{prefix}cross.",
            d_model,
            init=init,
            role="cross_attention",
            residual_depth=residual_depth,
        )
    if block.placement == "sandwich":
        yield from norm_parameters(block.norm, f"{prefix}attn_post_norm.", d_model)
    if block.placement != "parallel_shared":
        yield from norm_parameters(block.norm, f"{prefix}ffn_norm.", d_model)
    yield from ffn_parameters(
        block.ffn, f"{prefix}ffn.", d_model, init=init, residual_depth=residual_depth
    )
    if block.placement == "sandwich":
        yield from norm_parameters(block.norm, f"{prefix}ffn_post_norm.", d_model)


def _stack_parameters(model: ModelSpec, prefix: str, stack: Stack) -> Iterator[Parameter]:
    vocab = model.source_vocab if prefix == "encoder." else model.vocab_size
    for parameter in embedding_parameters(model, f"{prefix}embed.", vocab):
        if prefix == "decoder." and model.share_embedding:
            owner = parameter.name.replace("decoder.", "encoder.", 1)
            yield replace(parameter, tied_to=owner)
        else:
            yield parameter
    yield from position_parameters(model, f"{prefix}position.")
    yield from relative_parameters(model, stack, f"{prefix}relative.")
    if model.token_types:
        shape = (model.token_types, model.d_model)
        yield Parameter(
            name=f"{prefix}token_type.weight",
            shape=shape,
            role="position",
            kind="table",
            init=model.init.table(shape),
        )
    if stack.embed_norm is not None:
        yield from norm_parameters(
            stack.embed_norm, f"{prefix}embed_norm.", model.d_model, role="norm"
        )
    depth = sum(2 + (block.cross is not None) for block in stack.blocks())
    for layer, block in enumerate(stack.blocks()):
        for parameter in block_parameters(
            block,
            f"{prefix}blocks.{layer}.",
            model.d_model,
            init=model.init,
            rotated=rotary_of(block.mixer, model.position) is not None,
            residual_depth=depth,
        ):
            yield replace(parameter, layer=layer)
    if stack.final_norm is not None:
        yield from norm_parameters(
            stack.final_norm, f"{prefix}final_norm.", model.d_model, role="final_norm"
        )


def _target_embedding(model: ModelSpec) -> str:
    """Return the prefix of the parameters that own the target side's table."""
    if model.encoder is None:
        return "embed."
    return "encoder.embed." if model.share_embedding else "decoder.embed."


def penalties(model: ModelSpec) -> dict[str, float]:
    """Return the tables whose sum of absolute values is in the objective, with its coefficient."""
    match model.embedding:
        case FactorizedEmbedding(l1=l1):
            return {name: l1 for name in stored(model) if name.endswith("embed.u")}
        case PlainEmbedding() | ScaledEmbedding():
            return {}
        case _ as unreachable:
            assert_never(unreachable)


def is_tied(head: Head) -> bool:
    """True if a head uses the token table as its weights."""
    match head:
        case NextHead() | MaskedHead():
            return head.tied
        case ClassHead() | StateHead() | AnswerHead() | VectorHead():
            return False
        case _ as unreachable:
            assert_never(unreachable)


def head_parameters(model: ModelSpec) -> Iterator[Parameter]:
    """Yield the parameters of all heads, tied ones marked."""
    for head, name in zip(model.heads, model.head_names(), strict=True):
        prefix, width = f"heads.{name}.", model.head_size(name)
        if isinstance(head, VectorHead) and not head.pooler:
            continue
        if is_tied(head):
            source = _target_embedding(model)
            for parameter in embedding_parameters(model, source, model.vocab_size):
                leaf = parameter.name.removeprefix(source)
                yield replace(
                    parameter, name=f"{prefix}{leaf}", role="head", tied_to=parameter.name
                )
            if head.bias:
                yield Parameter(
                    name=f"{prefix}bias",
                    shape=(width,),
                    role="head",
                    kind="bias",
                    init=Constant(value=0.0),
                )
        else:
            yield from linear_parameters(
                prefix, (width, model.d_model), role="head", init=model.init, bias=head.bias
            )


def _transform_parameters(model: ModelSpec) -> Iterator[Parameter]:
    """Yield what stands between the last block and a masked-token head."""
    for head in model.heads:
        if not isinstance(head, MaskedHead) or head.transform is None:
            continue
        prefix, width = "transforms.masked.", model.d_model
        yield from linear_parameters(
            f"{prefix}dense.",
            (width, width),
            role="head",
            init=model.init,
            bias=head.transform.bias,
            feeds_relu=head.transform.activation == "relu",
        )
        yield from norm_parameters(head.transform.norm, f"{prefix}norm.", width, role="head")


def manifest(model: ModelSpec) -> tuple[Parameter, ...]:
    """List every parameter in the order in which the model holds them, tied ones marked."""
    check_tree(model)
    parameters: list[Parameter] = []
    for prefix, stack in model.stacks().items():
        parameters += _stack_parameters(model, prefix, stack)
    parameters += head_parameters(model)
    parameters += _transform_parameters(model)
    return tuple(parameters)


def stored(model: ModelSpec) -> dict[str, Parameter]:
    """Return the parameters that own their storage, by name: those that a checkpoint holds."""
    return {p.name: p for p in manifest(model) if p.tied_to is None}


class HasParameters(Protocol):
    """A torch module, as far as it is counted here."""

    def parameters(self) -> Iterable[Any]:
        """Return its parameters, each once."""


def count_parameters(model: "ModelSpec | HasParameters") -> int:
    """Return the number of trainable numbers of a spec, a model or any module; tied count once.

    A model of ours is counted by its spec, so that a quantized one counts as before.
    """
    described = model if isinstance(model, ModelSpec) else getattr(model, "spec", None)
    if isinstance(described, ModelSpec):
        return sum(p.size for p in stored(described).values())
    assert not isinstance(model, ModelSpec)
    return sum(p.numel() for p in model.parameters())


def check_fits(spec: ModelSpec, *, bytes_each: int) -> None:
    """Refuse a model whose parameters and tables exceed this machine's memory, before it is made.

    `bytes_each` are the bytes that a parameter takes in whatever is about to be built.
    """
    numbers, tables = count_parameters(spec), 0
    match spec.position:
        case Sinusoidal():
            tables = spec.max_seq_len * spec.d_model
        case Rotary():
            widths = [
                attention.head_width(spec.d_model)
                for stack in spec.stacks().values()
                for attention in stack.attentions().values()
            ]
            tables = spec.max_seq_len * max(widths, default=0)
        case NoPosition() | Learned() | ALiBi() | RelativeBias() | OwnPosition():
            pass
        case _ as unreachable:
            assert_never(unreachable)
    check_memory(
        f"a model of {numbers:,} parameters and {spec.max_seq_len:,} positions",
        bytes_each * (numbers + tables),
        hint="a smaller d_model, d_ff, vocab_size, max_seq_len or fewer layers",
    )


def active(block: Block, parameter: Parameter) -> bool:
    """True if a token in this block uses the parameter; the first experts stand for the chosen."""
    match block.ffn:
        case MLP() | SwiGLU():
            return True
        case MoE(experts_per_token=chosen):
            return parameter.expert is None or parameter.expert < chosen
        case _ as unreachable:
            assert_never(unreachable)


def count_active_parameters(model: ModelSpec) -> int:
    """Count the parameters that one token uses: all but the experts that it does not choose."""
    idle = 0
    for stack in model.stacks().values():
        for block in stack.blocks():
            own = block_parameters(block, "", model.d_model, init=model.init)
            idle += sum(p.size for p in own if not active(block, p))
    return count_parameters(model) - idle
