"""The feed-forward part of a block: down(act(up(x))), and SwiGLU's down(silu(gate(x)) * up(x))."""

from typing import NamedTuple, assert_never

import numpy as np

from glassformer.byhand.activation import (
    activate_backward,
    activate_forward,
    dropout_backward,
    dropout_forward,
    gelu_forward,
    gelu_tanh_forward,
    silu_forward,
    slope_backward,
)
from glassformer.byhand.linear import (
    LinearCache,
    linear_forward,
    linear_grads,
    linear_products,
    sum_rows,
)
from glassformer.byhand.pass_context import Array, PassContext
from glassformer.spec import model as spec

# B batch, T length, D d_model, F d_ff, W = 2F, gate and up side by side

JOINED = "gate_up_proj"


class FeedCache(NamedTuple):
    """The cache of down(dropout(act(up(x)))) for its backward."""

    into: LinearCache
    act: Array
    keep: Array | None
    down: LinearCache
    activation: spec.Activation
    biased: bool
    at: str


class SwiGLUCache(NamedTuple):
    """The cache of down(dropout(silu(gate(x)) * up(x))) for its backward."""

    into: LinearCache
    opened: Array
    slope: Array
    up: Array
    keep: Array | None
    down: LinearCache
    biased: bool
    at: str


def feed_forward(
    x_BTD: Array,
    *,
    ffn: spec.MLP,
    params: dict[str, Array],
    pass_context: PassContext,
    dropout: float = 0.0,
    at: str = "",
) -> tuple[Array, FeedCache]:
    """down(dropout(act(up(x))))."""
    bias = params.get("up_proj.bias")
    up_BTF, into = linear_forward(
        x_BTD, weight_OI=params["up_proj.weight"], bias_O=bias, ws=pass_context.ws
    )
    hidden, act = activate_forward(up_BTF, ffn.activation, ws=pass_context.ws)
    pass_context.tap(f"{at}hidden", hidden)
    keep = pass_context.keep(hidden.shape, dropout)
    if keep is not None:
        hidden, _ = dropout_forward(hidden, keep=keep, out=pass_context.ws.take(hidden.shape))
    out_BTD, down = linear_forward(
        hidden,
        weight_OI=params["down_proj.weight"],
        bias_O=params.get("down_proj.bias"),
        ws=pass_context.ws,
    )
    pass_context.tap(f"{at}out", out_BTD)
    return out_BTD, FeedCache(into, act, keep, down, ffn.activation, bias is not None, at)


def feed_backward(
    dout_BTD: Array, cache: FeedCache, *, grads: dict[str, Array], pass_context: PassContext
) -> Array:
    """Return dx: backward through down, dropout, activation, up."""
    pass_context.tap_grad(f"{cache.at}out", dout_BTD)
    dhidden = linear_grads(
        dout_BTD, cache.down, grads=grads, name="down_proj", biased=cache.biased, ws=pass_context.ws
    )
    if cache.keep is not None:
        dropout_backward(dhidden, cache.keep, dx=dhidden)
    pass_context.tap_grad(f"{cache.at}hidden", dhidden)
    activate_backward(dhidden, cache.act, cache.activation)
    return linear_grads(
        dhidden, cache.into, grads=grads, name="up_proj", biased=cache.biased, ws=pass_context.ws
    )


def swiglu_forward(
    x_BTD: Array,
    *,
    ffn: spec.SwiGLU,
    params: dict[str, Array],
    pass_context: PassContext,
    dropout: float = 0.0,
    at: str = "",
) -> tuple[Array, SwiGLUCache]:
    """down(dropout(act(gate(x)) * up(x))); gate and up are one product."""
    ws = pass_context.ws
    weight_WD, bias_W = params.get(f"{JOINED}.weight"), params.get(f"{JOINED}.bias")
    if weight_WD is None:
        weight_WD = np.concatenate([params["gate_proj.weight"], params["up_proj.weight"]])
    both, into = linear_forward(x_BTD, weight_OI=weight_WD, bias_O=bias_W, ws=ws)
    width = both.shape[-1] // 2
    gate, up = both[..., :width], both[..., width:]
    biased = "gate_proj.bias" in params
    if biased and bias_W is None:
        gate += params["gate_proj.bias"]
        up += params["up_proj.bias"]
    match ffn.activation:
        case "silu":
            opened, slope = silu_forward(gate, ws=ws)
        case "gelu":
            opened, slope = gelu_forward(gate, ws=ws)
        case "gelu_tanh":
            opened, slope = gelu_tanh_forward(gate, ws=ws)
        case _ as unreachable:
            assert_never(unreachable)
    hidden = np.multiply(opened, up, out=ws.take(opened.shape))
    pass_context.tap(f"{at}hidden", hidden)
    keep = pass_context.keep(hidden.shape, dropout)
    if keep is not None:
        hidden, _ = dropout_forward(hidden, keep=keep, out=hidden)
    out_BTD, down = linear_forward(
        hidden, weight_OI=params["down_proj.weight"], bias_O=params.get("down_proj.bias"), ws=ws
    )
    pass_context.tap(f"{at}out", out_BTD)
    return out_BTD, SwiGLUCache(into, opened, slope, up, keep, down, biased, at)


def swiglu_backward(
    dout_BTD: Array, cache: SwiGLUCache, *, grads: dict[str, Array], pass_context: PassContext
) -> Array:
    """Return dx: backward through down, dropout, the product, silu, and the joined projection."""
    ws = pass_context.ws
    pass_context.tap_grad(f"{cache.at}out", dout_BTD)
    dhidden = linear_grads(
        dout_BTD, cache.down, grads=grads, name="down_proj", biased=cache.biased, ws=ws
    )
    if cache.keep is not None:
        dropout_backward(dhidden, cache.keep, dx=dhidden)
    pass_context.tap_grad(f"{cache.at}hidden", dhidden)
    width = dhidden.shape[-1]
    dboth = ws.take((*dhidden.shape[:-1], 2 * width))
    # forward: hidden = act(gate) * up
    #   =>   dup = dhidden * act(gate),  dgate = dhidden * up * act'(gate)
    np.multiply(dhidden, cache.opened, out=dboth[..., width:])
    dgate = np.multiply(dhidden, cache.up, out=dboth[..., :width])
    slope_backward(dgate, cache.slope, dx=dgate)
    dweight_WD = grads.get(f"{JOINED}.weight")
    dx, dweight_WD = linear_products(dboth, cache.into, dweight_OI=dweight_WD, ws=ws)
    if f"{JOINED}.weight" not in grads:
        grads["gate_proj.weight"], grads["up_proj.weight"] = dweight_WD[:width], dweight_WD[width:]
    if cache.biased:
        dboth_RW = dboth.reshape(-1, 2 * width)
        for name, half in (
            ("gate_proj.bias", dboth_RW[:, :width]),
            ("up_proj.bias", dboth_RW[:, width:]),
        ):
            grads[name] = sum_rows(half, out=grads.get(name))
    return dx
