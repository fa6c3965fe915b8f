"""Names, shapes, roles and first values of each part's parameters.

These functions can be called on their own, to count or to build a part; `manifest` joins them.
"""

import math
from collections.abc import Iterator
from typing import Literal

from glassformer.spec.base import spec
from glassformer.spec.inits import Constant, HeInit, NormalInit, Rule, XavierInit
from glassformer.spec.model import (
    MLP,
    Attention,
    Block,
    FactorizedEmbedding,
    LayerNorm,
    ModelSpec,
    RMSNorm,
    SwiGLU,
)

Role = Literal[
    "embedding", "position", "attention", "cross_attention", "ffn", "norm", "final_norm", "head"
]
Kind = Literal["table", "matrix", "bias", "gain"]
Init = XavierInit | NormalInit | HeInit

KEY_BIAS_IS_IDLE = (
    "softmax ignores a constant added to every score of a row, and a key bias adds one"
)


@spec
class Parameter:
    """One tensor of the model.

    `tied_to` names the parameter whose storage this one shares (then it is not counted again);
    `zero_gradient` gives the reason where theory says that the gradient vanishes.
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

    @property
    def size(self) -> int:
        """Entries of the tensor."""
        return math.prod(self.shape)


def embedding_parameters(model: ModelSpec, prefix: str, vocab: int) -> Iterator[Parameter]:
    """The token table, or its two factors."""
    if isinstance(model.embedding, FactorizedEmbedding):
        rank = model.embedding.rank
        shapes = {"u": (vocab, rank), "v": (rank, model.d_model)}
    else:
        shapes = {"weight": (vocab, model.d_model)}
    for leaf, shape in shapes.items():
        yield Parameter(
            name=f"{prefix}{leaf}",
            shape=shape,
            role="embedding",
            kind="table",
            init=model.init.table(shape),
        )


def norm_parameters(
    norm: LayerNorm | RMSNorm, prefix: str, width: int, *, role: Role = "norm"
) -> Iterator[Parameter]:
    """The gain, and LayerNorm's shift."""
    one, zero = Constant(value=1.0), Constant(value=0.0)
    yield Parameter(name=f"{prefix}weight", shape=(width,), role=role, kind="gain", init=one)
    if isinstance(norm, LayerNorm):
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
    """A weight (out, in) and its bias, if there is one."""
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
    """q, k, v, o projections and q/k-norm. `rotated`: positions turn keys after their bias."""
    d_head = attention.head_width(d_model)
    q_width, kv_width = attention.n_heads * d_head, attention.kv_heads * d_head
    idle = "" if rotated or attention.qk_norm else KEY_BIAS_IS_IDLE
    biased = {
        "none": "",
        "qkv": "qkv",
        "all": "qkvo",
        "no_key": "qvo",
    }[attention.bias]
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
        for letter in "qk":
            yield from norm_parameters(
                attention.qk_norm, f"{prefix}{letter}_norm.", d_head, role=role
            )


def ffn_parameters(
    ffn: MLP | SwiGLU, prefix: str, d_model: int, *, init: Init, residual_depth: int = 0
) -> Iterator[Parameter]:
    """up and down, and SwiGLU's gate before them."""
    into = ("gate_proj", "up_proj") if isinstance(ffn, SwiGLU) else ("up_proj",)
    feeds_relu = isinstance(ffn, MLP) and ffn.activation == "relu"
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


def block_parameters(
    block: Block,
    prefix: str,
    d_model: int,
    *,
    init: Init,
    rotated: bool = False,
    residual_depth: int = 0,
) -> Iterator[Parameter]:
    """One block: each sublayer's norm, then the sublayer."""
    yield from norm_parameters(block.norm, f"{prefix}attn_norm.", d_model)
    yield from attention_parameters(
        block.attention,
        f"{prefix}attn.",
        d_model,
        init=init,
        rotated=rotated,
        residual_depth=residual_depth,
    )
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
    yield from norm_parameters(block.norm, f"{prefix}ffn_norm.", d_model)
    yield from ffn_parameters(
        block.ffn, f"{prefix}ffn.", d_model, init=init, residual_depth=residual_depth
    )
