"""The feed-forward part of a block, forward and back: an MLP, SwiGLU, or a mixture of experts.

The MLP is down(act(up(x))), SwiGLU down(silu(gate(x)) * up(x)); a mixture has a router, experts, an
optional shared expert and a load-balancing loss.
"""

from collections.abc import Mapping
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
from glassformer.byhand.attention import softmax_backward, softmax_forward
from glassformer.byhand.linear import (
    LinearCache,
    linear_forward,
    linear_grads,
    linear_products,
    sum_rows,
)
from glassformer.byhand.pass_context import Array, PassContext, Workspace, slot
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
    inside: Array | None = None


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
    inside: Array | None = None
    match ffn.activation:
        case "silu" if ffn.clamp is not None:
            opened, slope, inside = clamped_forward(gate, up, clamp=ffn.clamp, ws=ws)
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
    return out_BTD, SwiGLUCache(into, opened, slope, up, keep, down, biased, at, inside)


def clamped_forward(
    gate: Array, up: Array, *, clamp: spec.Clamp, ws: Workspace
) -> tuple[Array, Array, Array]:
    """Return g sigmoid(slope g) and its slope, and where u is inside; u + 1 replaces `up`.

    g = min(gate, limit), u = up within both limits. What lies outside passes no gradient on.
    """
    # g sigmoid(a g) = silu(a g) / a   =>   its slope is silu'(a g)
    below, inside = gate <= clamp.limit, np.abs(up) <= clamp.limit
    np.minimum(gate, clamp.limit, out=gate)
    gate *= clamp.slope
    opened, slope = silu_forward(gate, ws=ws)
    opened /= clamp.slope
    slope *= below
    np.clip(up, -clamp.limit, clamp.limit, out=up)
    up += 1.0
    return opened, slope, inside


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
    dup = np.multiply(dhidden, cache.opened, out=dboth[..., width:])
    if cache.inside is not None:
        dup *= cache.inside
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


# --- mixture of experts ---------------------------------------------------------------------------


# B batch, T length, D d_model, E experts, A experts of a token, M rows (batch x length),
# J rows of one expert

SHARED = "shared_expert"
#: Arrays of each expert by leaf name, under `experts.N` and `shared_expert`.
Experts = dict[str, dict[str, Array]]


class Group(NamedTuple):
    """The rows that chose one expert, which of their choices it was, and its output."""

    rows_J: Array
    choice_J: Array
    out_JD: Array
    inside: FeedCache | SwiGLUCache


class SharedCache(NamedTuple):
    """The cache of gate * shared_expert(x) for its backward; without a gate it is 1."""

    inside: FeedCache | SwiGLUCache
    out_MD: Array
    gate_M1: Array | None
    into_gate: LinearCache | None


class MoECache(NamedTuple):
    """The cache of a mixture for its backward; `loss` is its load-balancing loss."""

    ffn: spec.MoE
    into_router: LinearCache
    p_ME: Array
    chosen_MA: Array
    weights_MA: Array
    total_M1: Array | None
    groups: list[Group | None]
    shared: SharedCache | None
    experts: Experts
    share_E: Array
    real_M: Array
    loss: float
    at: str


def expert_arrays(ffn_arrays: Mapping[str, Array]) -> Experts:
    """Return the arrays of a feed-forward's experts, each by leaf name."""
    experts: Experts = {}
    for name, array in ffn_arrays.items():
        owner, _, leaf = name.rpartition(".")
        expert, _, projection = owner.rpartition(".")
        if expert:  # the router and the shared expert's gate belong to none
            experts.setdefault(expert, {})[f"{projection}.{leaf}"] = array
    return experts


def moe_forward(
    x_BTD: Array,
    *,
    ffn: spec.MoE,
    params: Mapping[str, Array],
    experts: Experts,
    pass_context: PassContext,
    valid_BT: Array | None = None,
    dropout: float = 0.0,
    at: str = "",
) -> tuple[Array, MoECache]:
    """sum_e w_e expert_e(x) + gate * shared_expert(x)."""
    ws, lead = pass_context.ws, x_BTD.shape[:-1]
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    logits_ME, into_router = linear_forward(
        x_MD, weight_OI=params["gate.weight"], bias_O=params.get("gate.bias"), ws=ws
    )
    pass_context.tap(f"{at}router", logits_ME.reshape(*lead, -1))
    p_ME, _ = softmax_forward(logits_ME)
    # stable: of equal logits the lowest index is chosen
    chosen_MA = np.argsort(-logits_ME, axis=-1, kind="stable")[:, : ffn.experts_per_token]
    weights_MA = np.take_along_axis(p_ME, chosen_MA, -1)
    total_M1 = None
    if ffn.normalize:
        total_M1 = weights_MA.sum(-1, keepdims=True)
        weights_MA = weights_MA / total_M1
    pass_context.tap(f"{at}routing", _scattered(weights_MA, chosen_MA, p_ME).reshape(*lead, -1))
    inside = PassContext(ws, rng=pass_context.rng)  # an expert's own activations have no tap
    out_BTD = ws.take(x_BTD.shape)
    out_MD = out_BTD.reshape(x_MD.shape)
    out_MD.fill(0.0)
    groups: list[Group | None] = []
    for expert in range(ffn.n_experts):
        rows_J, choice_J = np.nonzero(chosen_MA == expert)
        if not len(rows_J):
            groups.append(None)
            continue
        out_JD, cache = _expert_forward(
            x_MD[rows_J], ffn.expert, experts[f"experts.{expert}"], inside, dropout
        )
        out_MD[rows_J] += weights_MA[rows_J, choice_J, None] * out_JD
        groups.append(Group(rows_J, choice_J, out_JD, cache))
    shared = None
    if ffn.shared is not None:
        shared = _shared_forward(x_MD, ffn.shared, params, experts, inside, dropout)
        added = shared.out_MD if shared.gate_M1 is None else shared.gate_M1 * shared.out_MD
        pass_context.tap(f"{at}shared", added.reshape(x_BTD.shape))
        out_MD += added
    pass_context.tap(f"{at}out", out_BTD)
    real_M = np.ones(len(x_MD), bool) if valid_BT is None else valid_BT.reshape(-1)
    share_E, loss = balance_loss(p_ME, chosen_MA, real_M=real_M)
    return out_BTD, MoECache(
        ffn=ffn,
        into_router=into_router,
        p_ME=p_ME,
        chosen_MA=chosen_MA,
        weights_MA=weights_MA,
        total_M1=total_M1,
        groups=groups,
        shared=shared,
        experts=experts,
        share_E=share_E,
        real_M=real_M,
        loss=loss,
        at=at,
    )


def moe_backward(
    dout_BTD: Array,
    cache: MoECache,
    *,
    grads: dict[str, Array],
    experts: Experts,
    pass_context: PassContext,
    dloss: float = 0.0,
) -> Array:
    """Return dx; `dloss` is the slope of the objective in this layer's load-balancing loss."""
    ws, lead, ffn = pass_context.ws, dout_BTD.shape[:-1], cache.ffn
    inside = PassContext(ws)
    pass_context.tap_grad(f"{cache.at}out", dout_BTD)
    dout_MD = dout_BTD.reshape(-1, dout_BTD.shape[-1])
    dx_BTD = ws.take(dout_BTD.shape)
    dx_MD = dx_BTD.reshape(dout_MD.shape)
    dx_MD.fill(0.0)
    if cache.shared is not None:
        pass_context.tap_grad(f"{cache.at}shared", dout_BTD)
        dx_MD += _shared_backward(dout_MD, cache.shared, grads, experts, inside)
    dweights_MA = np.zeros_like(cache.weights_MA)
    for expert, group in enumerate(cache.groups):
        name = f"experts.{expert}"
        own = experts.setdefault(name, {})
        if group is None:  # nobody chose it
            for leaf, param in cache.experts[name].items():
                slot(own, leaf, param.shape, param.dtype).fill(0.0)
            continue
        rows_J, choice_J, out_JD, part = group
        dout_JD = dout_MD[rows_J]
        # forward: out[rows] += w * expert(x[rows])
        #   =>   dw = dout[rows] . expert(x[rows]),  dexpert = w * dout[rows]
        dweights_MA[rows_J, choice_J] = np.einsum("jd,jd->j", dout_JD, out_JD)
        dout_JD *= cache.weights_MA[rows_J, choice_J, None]
        dx_MD[rows_J] += _expert_backward(dout_JD, part, own, inside)
    scattered = _scattered(dweights_MA, cache.chosen_MA, cache.p_ME)
    pass_context.tap_grad(f"{cache.at}routing", scattered.reshape(*lead, -1))
    dp_MA = dweights_MA
    if cache.total_M1 is not None:
        # forward: w_a = p_a / s,  s = sum over the chosen of p
        #   =>   dp_a = (dw_a - sum_b dw_b w_b) / s
        dp_MA = dweights_MA - (dweights_MA * cache.weights_MA).sum(-1, keepdims=True)
        dp_MA /= cache.total_M1
    dp_ME = _scattered(dp_MA, cache.chosen_MA, cache.p_ME)
    # forward: loss = E sum_e f_e P_e,  P_e = mean of p_e over real rows; f_e counts, and is flat
    #   =>   dp_e = E f_e / (number of real rows) at every real row
    tokens = max(1, int(cache.real_M.sum()))
    dp_ME[cache.real_M] += dloss * ffn.n_experts / tokens * cache.share_E
    dlogits_ME = softmax_backward(dp_ME, cache.p_ME)
    pass_context.tap_grad(f"{cache.at}router", dlogits_ME.reshape(*lead, -1))
    dx_MD += linear_grads(
        dlogits_ME, cache.into_router, grads=grads, name="gate", biased=ffn.router_bias, ws=ws
    )
    return dx_BTD


def balance_loss(p_ME: Array, chosen_MA: Array, *, real_M: Array) -> tuple[Array, float]:
    """Return f_E, the share of real rows that choose each expert, and E sum_e f_e P_e."""
    E, tokens = p_ME.shape[1], max(1, int(real_M.sum()))
    f_E = np.bincount(chosen_MA[real_M].reshape(-1), minlength=E) / tokens
    P_E = p_ME[real_M].sum(0) / tokens
    return f_E.astype(p_ME.dtype), float(E * np.dot(f_E, P_E))


def _scattered(values_MA: Array, chosen_MA: Array, like_ME: Array) -> Array:
    """Put the values in the columns of their experts, 0 elsewhere."""
    out_ME = np.zeros_like(like_ME)
    np.put_along_axis(out_ME, chosen_MA, values_MA, -1)
    return out_ME


def _shared_forward(
    x_MD: Array,
    ffn: spec.MLP | spec.SwiGLU,
    params: Mapping[str, Array],
    experts: Experts,
    pass_context: PassContext,
    dropout: float,
) -> SharedCache:
    out_MD, inside = _expert_forward(x_MD, ffn, experts[SHARED], pass_context, dropout)
    weight = params.get("shared_expert_gate.weight")
    if weight is None:
        return SharedCache(inside, out_MD, None, None)
    logit_M1, into_gate = linear_forward(x_MD, weight_OI=weight, ws=pass_context.ws)
    gate_M1 = 0.5 * (1.0 + np.tanh(0.5 * logit_M1))  # sigmoid, which cannot overflow
    return SharedCache(inside, out_MD, gate_M1, into_gate)


def _shared_backward(
    dout_MD: Array,
    cache: SharedCache,
    grads: dict[str, Array],
    experts: Experts,
    pass_context: PassContext,
) -> Array:
    own = experts.setdefault(SHARED, {})
    if cache.gate_M1 is None or cache.into_gate is None:
        return _expert_backward(dout_MD.copy(), cache.inside, own, pass_context)
    # forward: out = g * shared(x),  g = sigmoid(x . u)
    #   =>   dshared = g * dout,  dlogit = (dout . shared(x)) g (1 - g)
    gate_M1 = cache.gate_M1
    dgate_M1 = (dout_MD * cache.out_MD).sum(-1, keepdims=True)
    dx_MD = _expert_backward(gate_M1 * dout_MD, cache.inside, own, pass_context)
    dlogit_M1 = dgate_M1 * gate_M1 * (1.0 - gate_M1)
    dx_MD += linear_grads(
        dlogit_M1,
        cache.into_gate,
        grads=grads,
        name="shared_expert_gate",
        biased=False,
        ws=pass_context.ws,
    )
    return dx_MD


def _expert_forward(
    x_JD: Array,
    ffn: spec.MLP | spec.SwiGLU,
    params: dict[str, Array],
    pass_context: PassContext,
    dropout: float,
) -> tuple[Array, FeedCache | SwiGLUCache]:
    match ffn:
        case spec.MLP():
            return feed_forward(
                x_JD, ffn=ffn, params=params, pass_context=pass_context, dropout=dropout
            )
        case spec.SwiGLU():
            return swiglu_forward(
                x_JD, ffn=ffn, params=params, pass_context=pass_context, dropout=dropout
            )
        case _ as unreachable:
            assert_never(unreachable)


def _expert_backward(
    dout_JD: Array,
    cache: FeedCache | SwiGLUCache,
    grads: dict[str, Array],
    pass_context: PassContext,
) -> Array:
    match cache:
        case FeedCache():
            return feed_backward(dout_JD, cache, grads=grads, pass_context=pass_context)
        case SwiGLUCache():
            return swiglu_backward(dout_JD, cache, grads=grads, pass_context=pass_context)
        case _ as unreachable:
            assert_never(unreachable)
