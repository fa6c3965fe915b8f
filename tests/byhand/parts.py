"""Every pair of the by-hand engine beside its own reference in torch.

A `Part` runs forward and backward on float64 arrays; the reference computes the same with torch's
own functions and leaves the derivative to autograd. Sizes are distinct primes where they can be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.byhand.activation import (
    clamped_gate_forward,
    dropout_backward,
    dropout_forward,
    gate_backward,
    gate_forward,
    gelu_forward,
    gelu_tanh_forward,
    relu2_forward,
    relu_backward,
    relu_forward,
    silu_forward,
    slope_backward,
    tanh_backward,
    tanh_forward,
)
from glassformer.byhand.attention import (
    attend_backward,
    attend_forward,
    softmax_backward,
    softmax_forward,
)
from glassformer.byhand.embedding import (
    alibi_bias,
    embedding_backward,
    embedding_forward,
    rotate_backward,
    rotate_forward,
    rotations,
)
from glassformer.byhand.experts import (
    route_backward,
    route_forward,
    rows_of_experts,
    scatter_backward,
    scatter_forward,
)
from glassformer.byhand.heads import (
    adjust_backward,
    adjust_forward,
    readout_backward,
    readout_forward,
)
from glassformer.byhand.linear import linear_backward, linear_forward
from glassformer.byhand.loss import cross_entropy_backward, cross_entropy_forward
from glassformer.byhand.norm import (
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from glassformer.byhand.pass_context import PassContext, Workspace
from glassformer.spec import model as spec
from glassformer.spec.position import alibi_slopes

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

B, T, S, D, H, F_, V, R = 3, 5, 7, 11, 4, 13, 17, 2
N, K = 6, 2
rng = np.random.default_rng(5)

TOKENS = rng.integers(0, V, (B, T))
TOKENS[0, 1] = TOKENS[0, 2] = TOKENS[1, 0] = 3  # repeated on purpose
MANY_TOKENS = rng.integers(0, 211, (B, T))
MANY_TOKENS[:, 0] = 150
ALLOW = rng.random((B, 1, T, S)) < 0.6
ALLOW[..., 0] = True
ALLOW[1, :, 2] = False  # a row that may attend to nothing
SELF_ALLOW = ALLOW[..., :T]
KEEP = (rng.random((B, T, D)) < 0.7) / 0.7
VALID = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0]], np.bool_)
TARGETS = rng.integers(0, V, (B, T))
ROTARY = spec.Rotary(base=100.0)
SLOPES = np.array(alibi_slopes(spec.ALiBi(), N, H))
KEY_PLACES = np.array([[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 2, 3]])
COS, SIN = rotations(ROTARY, length=T, d_head=H, dtype=np.dtype(np.float64))


@dataclass(frozen=True)
class Part:
    """What to differentiate; run(arrays, dout) -> out, grads; reference(tensors) -> out; shape."""

    arrays: Callable[[], Arrays]
    run: Callable[[Arrays, Array | None], tuple[Array, Arrays]]
    reference: Callable[[dict[str, Tensor]], Tensor]
    shape: tuple[int, ...]


def normal(**shapes: tuple[int, ...]) -> Callable[[], Arrays]:
    return lambda: {
        name: np.random.default_rng(i).standard_normal(shape)
        for i, (name, shape) in enumerate(shapes.items())
    }


def pass_context() -> PassContext:
    return PassContext(Workspace(np.float64))


def simple(forward: Any, backward: Any) -> Callable[[Arrays, Array | None], tuple[Array, Arrays]]:
    def run(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
        out, cache = forward(a["x"])
        return out, {} if dout is None else {"x": backward(dout, cache)}

    return run


# --- small parts --------------------------------------------------------------------------------


def linear(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
    out, cache = linear_forward(a["x"], weight_OI=a["weight"], bias_O=a["bias"])
    if dout is None:
        return out, {}
    return out, dict(zip(("x", "weight", "bias"), linear_backward(dout, cache), strict=True))


def embedding(tokens: Array, scale: float = 1.0) -> Any:
    def run(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
        out, cache = embedding_forward(tokens, table_VD=a["table"], scale=scale)
        if dout is None:
            return out, {}
        return out, {"table": embedding_backward(dout, cache, dtable_VD=np.zeros_like(a["table"]))}

    return run


def rotary(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
    out, cache = rotate_forward(a["x"].copy(), cos=COS, sin=SIN)
    return out, {} if dout is None else {"x": rotate_backward(dout.copy(), cache)}


def rotated(x: Tensor) -> Tensor:
    """The reference turns complex numbers: another way to the same thing."""
    exponent = (np.arange(0, H, 2) / H).astype(np.float32).astype(np.float64)
    frequency = (1.0 / (100.0**exponent).astype(np.float32)).astype(np.float64)  # single precision
    angle = torch.tensor(np.arange(T)[:, None] * frequency)
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def layer_norm(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
    out, cache = layer_norm_forward(a["x"], weight_D=a["weight"], bias_D=a["bias"])
    if dout is None:
        return out, {}
    return out, dict(zip(("x", "weight", "bias"), layer_norm_backward(dout, cache), strict=True))


def rms_norm(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
    out, cache = rms_norm_forward(a["x"], weight_D=a["weight"])
    if dout is None:
        return out, {}
    return out, dict(zip(("x", "weight"), rms_norm_backward(dout, cache), strict=True))


def attend(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
    heads, cache = attend_forward(
        a["q"],
        k_BKSH=a["k"],
        v_BKSH=a["v"],
        pass_context=pass_context(),
        allow=ALLOW.astype(np.float64),
    )
    out = heads.transpose(0, 2, 1, 3)
    if dout is None:
        return out, {}
    return out, dict(
        zip("qkv", attend_backward(dout, cache, pass_context=pass_context()), strict=True)
    )


def biased_attend(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
    heads, cache = attend_forward(
        a["q"],
        k_BKSH=a["k"],
        v_BKSH=a["v"],
        pass_context=pass_context(),
        allow=ALLOW.astype(np.float64),
        bias=alibi_bias(SLOPES, positions_BS=KEY_PLACES, queries=T),
    )
    out = heads.transpose(0, 2, 1, 3)
    if dout is None:
        return out, {}
    return out, dict(
        zip("qkv", attend_backward(dout, cache, pass_context=pass_context()), strict=True)
    )


CAP, FACTOR = 1.5, 0.4


def capped_attend(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
    heads, cache = attend_forward(
        a["q"],
        k_BKSH=a["k"],
        v_BKSH=a["v"],
        pass_context=pass_context(),
        allow=ALLOW.astype(np.float64),
        scale=FACTOR,
        softcap=CAP,
        sinks_N=a["sinks"],
    )
    out = heads.transpose(0, 2, 1, 3)
    if dout is None:
        return out, {}
    sinks = np.empty(N)
    made = attend_backward(dout, cache, pass_context=pass_context(), dsinks_N=sinks)
    return out, dict(zip("qkv", made, strict=True)) | {"sinks": sinks}


def capped_reference(t: dict[str, Tensor]) -> Tensor:
    """softmax over the capped scores and one more column, whose value is 0."""
    k, v = (t[name].repeat_interleave(N // K, dim=1) for name in "kv")
    scores = CAP * torch.tanh(FACTOR * t["q"] @ k.transpose(-2, -1) / CAP)
    allow = torch.tensor(ALLOW).expand(B, N, T, S)
    scores = scores.masked_fill(~allow, -torch.inf)
    sinks = t["sinks"][:, None, None].expand(B, N, T, 1)
    weights = torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]
    return weights @ v


def torch_bias() -> Tensor:
    """-slope * |i - j|, head by head and pair by pair."""
    bias = torch.empty(B, N, T, S, dtype=torch.float64)
    for b, n, t, s in np.ndindex(B, N, T, S):
        bias[b, n, t, s] = -SLOPES[n] * abs(KEY_PLACES[b, S - T + t] - KEY_PLACES[b, s])
    return bias


def sdpa(q: Tensor, k: Tensor, v: Tensor, allow: Array, bias: Tensor | float = 0.0) -> Tensor:
    """Written out, with the empty rows erased by hand."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    may = torch.tensor(allow)
    scores = (q @ k.mT / q.shape[-1] ** 0.5 + bias).masked_fill(~may, -1e300)
    weights = torch.softmax(scores, -1) * may.any(-1, keepdim=True)
    return weights @ v


# --- gates, experts, what stands around a head ---------------------------------------------------

LIMIT, SLOPE = 0.6, 1.3


def gate(function: Any, *, clamped: bool = False) -> Any:
    def run(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
        if clamped:
            out, cache = clamped_gate_forward(a["gate"], a["up"], limit=LIMIT, slope=SLOPE)
        else:
            out, cache = gate_forward(a["gate"], a["up"], function=function)
        if dout is None:
            return out, {}
        return out, dict(zip(("gate", "up"), gate_backward(dout, cache), strict=True))

    return run


def clamped_reference(t: dict[str, Tensor]) -> Tensor:
    opened = t["gate"].clamp(max=LIMIT)
    return opened * torch.sigmoid(SLOPE * opened) * (t["up"].clamp(-LIMIT, LIMIT) + 1)


E, A, M = 5, 2, B * T
REAL = VALID.reshape(-1)


def route(*, normalize: bool = True, loss: bool = False) -> Any:
    """The weights of the experts, or their load-balancing loss."""

    def run(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
        routing, balance, cache = route_forward(
            a["logits"], chosen=A, normalize=normalize, real_M=REAL
        )
        result = np.array(balance) if loss else routing
        if dout is None:
            return result, {}
        droutes = np.zeros_like(routing) if loss else dout
        slope = float(dout) if loss else 0.0
        return result, {"logits": route_backward(droutes, cache, dloss=slope)}

    return run


def route_reference(*, normalize: bool = True, loss: bool = False) -> Any:
    def run(t: dict[str, Tensor]) -> Tensor:
        p = torch.softmax(t["logits"], -1)
        chosen = (p >= p.sort(-1).values[..., -A, None]).double()
        if loss:
            real = torch.tensor(REAL)
            return E * (chosen[real].mean(0) * p[real].mean(0)).sum()
        weights = p * chosen
        return weights / weights.sum(-1, keepdim=True) if normalize else weights

    return run


ROUTING = route_forward(np.random.default_rng(3).standard_normal((M, E)), chosen=A)[0]


def scatter_arrays() -> Arrays:
    """A routing's own weights, and what each expert made of the rows that chose it."""
    drawn = np.random.default_rng(4)
    rows = rows_of_experts(ROUTING)
    outs = {f"out{e}": drawn.standard_normal((len(rows[e]), D)) for e in range(E)}
    return {"routing": ROUTING.copy(), **outs}


def scatter(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
    outs, rows = [a[f"out{e}"] for e in range(E)], rows_of_experts(ROUTING)
    out = scatter_forward(a["routing"], outs, rows, out_MD=np.empty((M, D)))
    if dout is None:
        return out, {}
    drouting, douts = np.empty((M, E)), [np.empty_like(x) for x in outs]
    scatter_backward(dout, a["routing"], outs, rows, drouting_ME=drouting, douts=douts)
    return out, {"routing": drouting} | {f"out{e}": d for e, d in enumerate(douts)}


def scatter_reference(t: dict[str, Tensor]) -> Tensor:
    """Every expert's rows spread over all rows, multiplied by a weight that may be 0."""
    total = torch.zeros(M, D, dtype=torch.float64)
    for e, rows in enumerate(rows_of_experts(ROUTING)):
        spread = torch.zeros(M, D, dtype=torch.float64).index_copy(
            0, torch.tensor(rows), t[f"out{e}"]
        )
        total = total + t["routing"][:, e, None] * spread
    return total


def adjust(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
    out, cache = adjust_forward(a["x"], scale=FACTOR, softcap=CAP)
    return out, {} if dout is None else {"x": adjust_backward(dout, cache)}


def readout(place: Any) -> Any:
    def run(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
        out, cache = readout_forward(a["x"], valid_BT=VALID, readout=place)
        return out, {} if dout is None else {"x": readout_backward(dout, cache)}

    return run


def readout_reference(t: dict[str, Tensor], place: str) -> Tensor:
    rows = [
        x[valid].mean(0) if place == "mean" else x[valid][-1 if place == "last" else 0]
        for x, valid in zip(t["x"], torch.tensor(VALID), strict=True)
    ]
    return torch.stack(rows)


def cross_entropy(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
    loss, cache = cross_entropy_forward(
        a["logits"], targets=TARGETS, weights=VALID, label_smoothing=0.1
    )
    if dout is None:
        return np.array(loss), {}
    found = cross_entropy_backward(float(dout), cache)
    return np.array(loss), {"logits": found.reshape(B, T, V)}


def cross_entropy_reference(t: dict[str, Tensor]) -> Tensor:
    kept = torch.tensor(VALID)
    return F.cross_entropy(t["logits"][kept], torch.tensor(TARGETS)[kept], label_smoothing=0.1)


X = normal(x=(B, T, D))
GATE = normal(gate=(B, T, F_), up=(B, T, F_))
LOGITS = normal(logits=(M, E))

PARTS: dict[str, Part] = {
    "linear": Part(
        normal(x=(B, T, D), weight=(F_, D), bias=(F_,)),
        linear,
        lambda t: F.linear(t["x"], t["weight"], t["bias"]),
        (B, T, F_),
    ),
    "embedding": Part(
        normal(table=(V, D)),
        embedding(TOKENS),
        lambda t: F.embedding(torch.tensor(TOKENS), t["table"]),
        (B, T, D),
    ),
    "scaled embedding, many rows": Part(
        normal(table=(211, D)),
        embedding(MANY_TOKENS, 1.7),
        lambda t: 1.7 * F.embedding(torch.tensor(MANY_TOKENS), t["table"]),
        (B, T, D),
    ),
    "rotary": Part(normal(x=(B, N, T, H)), rotary, lambda t: rotated(t["x"]), (B, N, T, H)),
    "layer_norm": Part(
        normal(x=(B, T, D), weight=(D,), bias=(D,)),
        layer_norm,
        lambda t: F.layer_norm(t["x"], (D,), t["weight"], t["bias"]),
        (B, T, D),
    ),
    "rms_norm": Part(
        normal(x=(B, T, D), weight=(D,)),
        rms_norm,
        lambda t: F.rms_norm(t["x"], (D,), t["weight"], 1e-6),
        (B, T, D),
    ),
    "relu": Part(X, simple(relu_forward, relu_backward), lambda t: F.relu(t["x"]), (B, T, D)),
    "gelu": Part(X, simple(gelu_forward, slope_backward), lambda t: F.gelu(t["x"]), (B, T, D)),
    "relu2": Part(
        X, simple(relu2_forward, slope_backward), lambda t: F.relu(t["x"]).square(), (B, T, D)
    ),
    "gelu_tanh": Part(
        X,
        simple(gelu_tanh_forward, slope_backward),
        lambda t: F.gelu(t["x"], approximate="tanh"),
        (B, T, D),
    ),
    "silu": Part(X, simple(silu_forward, slope_backward), lambda t: F.silu(t["x"]), (B, T, D)),
    "softmax": Part(
        X, simple(softmax_forward, softmax_backward), lambda t: torch.softmax(t["x"], -1), (B, T, D)
    ),
    "dropout": Part(
        X,
        simple(lambda x: dropout_forward(x, keep=KEEP), dropout_backward),
        lambda t: t["x"] * torch.tensor(KEEP),
        (B, T, D),
    ),
    "attend": Part(
        normal(q=(B, N, T, H), k=(B, K, S, H), v=(B, K, S, H)),
        attend,
        lambda t: sdpa(t["q"], t["k"], t["v"], ALLOW),
        (B, N, T, H),
    ),
    "attend, capped, with sinks": Part(
        normal(q=(B, N, T, H), k=(B, K, S, H), v=(B, K, S, H), sinks=(N,)),
        capped_attend,
        capped_reference,
        (B, N, T, H),
    ),
    "attend with linear biases": Part(
        normal(q=(B, N, T, H), k=(B, K, S, H), v=(B, K, S, H)),
        biased_attend,
        lambda t: sdpa(t["q"], t["k"], t["v"], ALLOW, torch_bias()),
        (B, N, T, H),
    ),
    "gate": Part(GATE, gate("silu"), lambda t: F.silu(t["gate"]) * t["up"], (B, T, F_)),
    "gate, gelu": Part(GATE, gate("gelu"), lambda t: F.gelu(t["gate"]) * t["up"], (B, T, F_)),
    "clamped gate": Part(GATE, gate("silu", clamped=True), clamped_reference, (B, T, F_)),
    "gate of a row": Part(
        normal(gate=(B, T, 1), up=(B, T, F_)),
        gate("sigmoid"),
        lambda t: torch.sigmoid(t["gate"]) * t["up"],
        (B, T, F_),
    ),
    "route": Part(LOGITS, route(), route_reference(), (M, E)),
    "route, not normalized": Part(
        LOGITS, route(normalize=False), route_reference(normalize=False), (M, E)
    ),
    "route, balance loss": Part(LOGITS, route(loss=True), route_reference(loss=True), ()),
    "scatter": Part(scatter_arrays, scatter, scatter_reference, (M, D)),
    "adjust": Part(X, adjust, lambda t: CAP * torch.tanh(FACTOR * t["x"] / CAP), (B, T, D)),
    "tanh": Part(X, simple(tanh_forward, tanh_backward), lambda t: torch.tanh(t["x"]), (B, T, D)),
    **{
        f"read out, {place}": Part(
            X, readout(place), lambda t, p=place: readout_reference(t, p), (B, D)
        )
        for place in ("last", "first", "mean")
    },
    "cross_entropy": Part(normal(logits=(B, T, V)), cross_entropy, cross_entropy_reference, ()),
}
