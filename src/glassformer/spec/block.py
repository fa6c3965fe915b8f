"""What a block is made of: norm, attention, feed-forward, and where the norm stands."""

from typing import Literal, get_args

from glassformer.spec.base import at_least, divides, one_of, positive, spec
from glassformer.spec.errors import InputError


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
    qk_norm: Norm | None = None
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


@spec
class Block:
    """Self-attention, cross-attention if any, feed-forward; `placement` says where the norm stands.

    post: x = norm(x + part(x)), the 2017 paper. pre: x = x + part(norm(x)), steadier when deep.
    """

    attention: Attention
    ffn: FeedForward
    norm: Norm
    placement: Placement = "pre"
    cross: Attention | None = None

    def __post_init__(self) -> None:
        one_of("placement", self.placement, get_args(Placement))
        if self.cross is not None and (self.cross.causal or self.cross.window is not None):
            raise InputError(
                "cross-attention cannot be causal or windowed: it reads another sequence",
                hint="set cross.causal=false and leave cross.window out",
            )
