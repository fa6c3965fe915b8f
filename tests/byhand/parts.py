"""Every pair of the by-hand engine beside its own reference in torch.

A `Part` runs forward and backward on float64 arrays; the reference computes the same with torch's
own functions and leaves the derivative to autograd. Sizes are distinct primes where they can be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.byhand.activation import (
    dropout_backward,
    dropout_forward,
    gelu_forward,
    gelu_tanh_forward,
    relu2_forward,
    relu_backward,
    relu_forward,
    silu_forward,
    slope_backward,
)
from glassformer.byhand.attention import (
    attend_backward,
    attend_forward,
    multi_head_backward,
    multi_head_forward,
    softmax_backward,
    softmax_forward,
)
from glassformer.byhand.block import BlockArrays, Setting, block_backward, block_forward
from glassformer.byhand.embedding import (
    alibi_bias,
    embedding_backward,
    embedding_forward,
    factorized_backward,
    factorized_forward,
    rotate_backward,
    rotate_forward,
    rotations,
    sinusoidal_backward,
    sinusoidal_forward,
    sinusoids,
)
from glassformer.byhand.ffn import (
    expert_arrays,
    feed_backward,
    feed_forward,
    moe_backward,
    moe_forward,
    swiglu_backward,
    swiglu_forward,
)
from glassformer.byhand.linear import linear_backward, linear_forward
from glassformer.byhand.loss import cross_entropy_backward, cross_entropy_forward
from glassformer.byhand.model import head_backward, head_forward
from glassformer.byhand.norm import (
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from glassformer.byhand.pass_context import PassContext, Workspace
from glassformer.byhand.storage import under
from glassformer.spec import model as spec
from glassformer.spec.block import Placement
from glassformer.spec.init import HeInit
from glassformer.spec.manifest import attention_parameters, block_parameters, ffn_parameters
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


def named(part: Callable[..., Any], width: int) -> Callable[[], Arrays]:
    """Arrays of a composite part under manifest names, and `x` of that width; none is trivial."""

    def make() -> Arrays:
        drawn = np.random.default_rng(8)
        arrays = {p.name: 0.4 * drawn.standard_normal(p.shape) for p in part()}
        return arrays | {"x": drawn.standard_normal((B, T, width))}

    return make


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


def factorized(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
    out, cache = factorized_forward(TOKENS, u_VR=a["u"], v_RD=a["v"])
    if dout is None:
        return out, {}
    grads = factorized_backward(
        dout, cache, du_VR=np.zeros_like(a["u"]), dv_RD=np.zeros_like(a["v"])
    )
    return out, dict(zip("uv", grads, strict=True))


def sinusoidal(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
    table = sinusoids(29, d_model=D)
    out = sinusoidal_forward(a["x"].copy(), table_SD=table, positions=slice(0, T))
    return out, {} if dout is None else {"x": sinusoidal_backward(dout)}


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


# --- composite parts ----------------------------------------------------------------------------

GROUPED = spec.Attention(
    n_heads=N, n_kv_heads=K, d_head=H, bias="no_key", qk_norm=spec.LayerNorm(), causal=False
)
CROSS = spec.Attention(n_heads=2, d_head=H, bias="all", qk_norm=spec.RMSNorm(), causal=False)


def multi_head(attention: spec.Attention, *, turned: bool, context: bool) -> Any:
    def run(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
        carried = pass_context()
        params = {name: x for name, x in a.items() if name not in ("x", "context")}
        out, cache = multi_head_forward(
            a["x"],
            attention=attention,
            params=params,
            pass_context=carried,
            context_BSD=a.get("context"),
            rotation=(COS, SIN) if turned else None,
            allow=(ALLOW if context else SELF_ALLOW).astype(np.float64),
        )
        if dout is None:
            return out, {}
        grads: Arrays = {}
        dx, dcontext = multi_head_backward(dout, cache, grads=grads, pass_context=carried)
        grads["x"] = dx
        if dcontext is not None:
            grads["context"] = dcontext
        return out, grads

    return run


def multi_head_reference(attention: spec.Attention, *, turned: bool) -> Any:
    def run(t: dict[str, Tensor]) -> Tensor:
        context = t.get("context", t["x"])
        made = {}
        for letter, x in (("q", t["x"]), ("k", context), ("v", context)):
            flat = F.linear(x, t[f"{letter}_proj.weight"], t.get(f"{letter}_proj.bias"))
            heads = flat.unflatten(-1, (-1, H)).transpose(1, 2)
            if letter != "v" and isinstance(attention.qk_norm, spec.LayerNorm):
                weight, bias = t[f"{letter}_norm.weight"], t[f"{letter}_norm.bias"]
                heads = F.layer_norm(heads, (H,), weight, bias, attention.qk_norm.eps)
            elif letter != "v" and attention.qk_norm is not None:
                heads = F.rms_norm(heads, (H,), t[f"{letter}_norm.weight"], attention.qk_norm.eps)
            made[letter] = rotated(heads) if turned and letter != "v" else heads
        allow = ALLOW if "context" in t else SELF_ALLOW
        heads = sdpa(made["q"], made["k"], made["v"], allow)
        joined = heads.transpose(1, 2).flatten(2)
        return F.linear(joined, t["o_proj.weight"], t.get("o_proj.bias"))

    return run


def with_context(make: Callable[[], Arrays]) -> Callable[[], Arrays]:
    return lambda: make() | {"context": np.random.default_rng(9).standard_normal((B, S, D))}


RELU = spec.MLP(d_ff=F_, activation="relu")
TANH = spec.MLP(d_ff=F_, activation="gelu_tanh", bias=False)
GATED = spec.SwiGLU(d_ff=F_, bias=True)
CLAMPED = spec.SwiGLU(d_ff=F_, bias=True, clamp=spec.Clamp(limit=0.6, slope=1.3))


def feed(ffn: spec.MLP | spec.SwiGLU) -> Any:
    def run(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
        carried, params = pass_context(), {name: x for name, x in a.items() if name != "x"}
        grads: Arrays = {}
        if isinstance(ffn, spec.SwiGLU):
            out, gated = swiglu_forward(a["x"], ffn=ffn, params=params, pass_context=carried)
            if dout is not None:
                grads["x"] = swiglu_backward(dout, gated, grads=grads, pass_context=carried)
            return out, grads
        out, cache = feed_forward(a["x"], ffn=ffn, params=params, pass_context=carried)
        if dout is not None:
            grads["x"] = feed_backward(dout, cache, grads=grads, pass_context=carried)
        return out, grads

    return run


def feed_reference(t: dict[str, Tensor], prefix: str = "", act: Any = F.relu) -> Tensor:
    def line(name: str, x: Tensor) -> Tensor:
        return F.linear(x, t[f"{prefix}{name}.weight"], t.get(f"{prefix}{name}.bias"))

    if f"{prefix}gate_proj.weight" in t:
        return line("down_proj", F.silu(line("gate_proj", t["x"])) * line("up_proj", t["x"]))
    return line("down_proj", act(line("up_proj", t["x"])))


def clamped_reference(t: dict[str, Tensor]) -> Tensor:
    gate, up = (
        F.linear(t["x"], t[f"{one}_proj.weight"], t[f"{one}_proj.bias"]) for one in ("gate", "up")
    )
    gate = gate.clamp(max=0.6)
    hidden = gate * torch.sigmoid(1.3 * gate) * (up.clamp(-0.6, 0.6) + 1)
    return F.linear(hidden, t["down_proj.weight"], t["down_proj.bias"])


ROUTED = spec.MoE(
    n_experts=5,
    experts_per_token=2,
    expert=spec.SwiGLU(d_ff=F_),
    shared=spec.SwiGLU(d_ff=7),
    shared_gate=True,
)
PLAIN_ROUTED = spec.MoE(n_experts=5, experts_per_token=3, expert=RELU, normalize=False)


def moe(ffn: spec.MoE, *, loss: bool = False) -> Any:
    """The mixture's output, or its load-balancing loss."""

    def run(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
        carried = pass_context()
        params = {name: x for name, x in a.items() if name != "x"}
        out, cache = moe_forward(
            a["x"],
            ffn=ffn,
            params=params,
            experts=expert_arrays(params),
            pass_context=carried,
            valid_BT=VALID,
        )
        result = np.array(cache.loss) if loss else out
        if dout is None:
            return result, {}
        grads: Arrays = {}
        experts: dict[str, Arrays] = {}
        grads["x"] = moe_backward(
            np.zeros_like(out) if loss else dout,
            cache,
            grads=grads,
            experts=experts,
            pass_context=carried,
            dloss=float(dout) if loss else 0.0,
        )
        for owner, own in experts.items():
            grads |= {f"{owner}.{name}": grad for name, grad in own.items()}
        return result, grads

    return run


def moe_reference(ffn: spec.MoE, *, loss: bool = False) -> Any:
    """Every expert for every token, multiplied by a weight that is 0 where it was not chosen."""

    def run(t: dict[str, Tensor]) -> Tensor:
        p = torch.softmax(F.linear(t["x"], t["gate.weight"]), -1)
        smallest = p.sort(-1).values[..., -ffn.experts_per_token, None]
        chosen = (p >= smallest).double()
        if loss:
            real = torch.tensor(VALID)
            return ffn.n_experts * (chosen[real].mean(0) * p[real].mean(0)).sum()
        weights = p * chosen
        if ffn.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out = sum(
            weights[..., e, None] * feed_reference(t, f"experts.{e}.") for e in range(ffn.n_experts)
        )
        if ffn.shared is not None:
            gate = torch.sigmoid(F.linear(t["x"], t["shared_expert_gate.weight"]))
            out = out + gate * feed_reference(t, "shared_expert.")
        assert isinstance(out, Tensor)
        return out

    return run


def block_of(placement: Any) -> spec.Block:
    attention = spec.Attention(n_heads=2, d_head=H, bias="all", causal=False)
    return spec.Block(attention=attention, ffn=RELU, norm=spec.LayerNorm(), placement=placement)


def block(placement: str) -> Any:
    def run(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
        carried = pass_context()
        params = BlockArrays(
            attn=under(a, "attn."),
            ffn=under(a, "ffn."),
            norms={name: x for name, x in a.items() if "_norm." in name},
        )
        setting = Setting(allow=SELF_ALLOW.astype(np.float64))
        out, cache = block_forward(
            a["x"].copy(),
            block=block_of(placement),
            params=params,
            pass_context=carried,
            setting=setting,
            dropout=spec.Dropout(),
        )
        if dout is None:
            return out, {}
        grads = BlockArrays()
        dx = block_backward(dout.copy(), cache, grads=grads, pass_context=carried)
        found = {"x": dx} | grads.norms
        for prefix, part in (("attn.", grads.attn), ("ffn.", grads.ffn)):
            found |= {f"{prefix}{name}": grad for name, grad in part.items()}
        return out, found

    return run


def block_reference(placement: str) -> Any:
    attention = multi_head_reference(block_of(placement).attention, turned=False)

    def norm(t: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (D,), t[f"{name}.weight"], t[f"{name}.bias"])

    def attn(t: dict[str, Tensor], x: Tensor) -> Tensor:
        return attention({k.removeprefix("attn."): v for k, v in t.items()} | {"x": x})

    def run(t: dict[str, Tensor]) -> Tensor:
        x = t["x"]

        def ffn(x: Tensor) -> Tensor:
            return feed_reference(t | {"x": x}, "ffn.")

        match placement:
            case "pre":
                x = x + attn(t, norm(t, "attn_norm", x))
                return x + ffn(norm(t, "ffn_norm", x))
            case "post":
                x = norm(t, "attn_norm", x + attn(t, x))
                return norm(t, "ffn_norm", x + ffn(x))
            case "sandwich":
                x = x + norm(t, "attn_post_norm", attn(t, norm(t, "attn_norm", x)))
                return x + norm(t, "ffn_post_norm", ffn(norm(t, "ffn_norm", x)))
            case "pre_ffn":
                x = x + attn(t, x)
                return x + ffn(norm(t, "ffn_norm", x))
            case "output":
                x = x + norm(t, "attn_norm", attn(t, x))
                return x + norm(t, "ffn_norm", ffn(x))
            case _:
                one = norm(t, "attn_norm", x)
                two = one if placement == "parallel_shared" else norm(t, "ffn_norm", x)
                return x + attn(t, one) + ffn(two)

    return run


def head(kind: spec.Head) -> Any:
    def run(a: Arrays, dout: Array | None) -> tuple[Array, Arrays]:
        params = {name: x for name, x in a.items() if name != "x"}
        out, cache = head_forward(a["x"], head=kind, params=params, valid_BT=VALID)
        if dout is None:
            return out, {}
        grads = {name: np.zeros_like(x) for name, x in a.items()}
        head_backward(dout, cache, params=params, grads=grads, dhidden_BTD=grads["x"])
        return out, grads

    return run


def readout_reference(t: dict[str, Tensor], readout: str) -> Tensor:
    rows = [
        x[valid].mean(0) if readout == "mean" else x[valid][-1 if readout == "last" else 0]
        for x, valid in zip(t["x"], torch.tensor(VALID), strict=True)
    ]
    return F.linear(torch.stack(rows), t["weight"], t["bias"])


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
ANSWER = normal(x=(B, T, D), weight=(V, D), bias=(V,))

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
    "factorized": Part(
        normal(u=(V, R), v=(R, D)),
        factorized,
        lambda t: F.embedding(torch.tensor(TOKENS), t["u"]) @ t["v"],
        (B, T, D),
    ),
    "sinusoidal": Part(
        X, sinusoidal, lambda t: t["x"] + torch.tensor(sinusoids(T, d_model=D)), (B, T, D)
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
    "multi_head": Part(
        named(lambda: attention_parameters(GROUPED, "", D, init=HeInit()), D),
        multi_head(GROUPED, turned=True, context=False),
        multi_head_reference(GROUPED, turned=True),
        (B, T, D),
    ),
    "cross multi_head": Part(
        with_context(named(lambda: attention_parameters(CROSS, "", D, init=HeInit()), D)),
        multi_head(CROSS, turned=False, context=True),
        multi_head_reference(CROSS, turned=False),
        (B, T, D),
    ),
    "feed_forward": Part(
        named(lambda: ffn_parameters(RELU, "", D, init=HeInit()), D),
        feed(RELU),
        feed_reference,
        (B, T, D),
    ),
    "feed_forward, tanh, no bias": Part(
        named(lambda: ffn_parameters(TANH, "", D, init=HeInit()), D),
        feed(TANH),
        lambda t: feed_reference(t, act=lambda x: F.gelu(x, approximate="tanh")),
        (B, T, D),
    ),
    "moe": Part(
        named(lambda: ffn_parameters(ROUTED, "", D, init=HeInit()), D),
        moe(ROUTED),
        moe_reference(ROUTED),
        (B, T, D),
    ),
    "moe, not normalized": Part(
        named(lambda: ffn_parameters(PLAIN_ROUTED, "", D, init=HeInit()), D),
        moe(PLAIN_ROUTED),
        moe_reference(PLAIN_ROUTED),
        (B, T, D),
    ),
    "moe, balance loss": Part(
        named(lambda: ffn_parameters(ROUTED, "", D, init=HeInit()), D),
        moe(ROUTED, loss=True),
        moe_reference(ROUTED, loss=True),
        (),
    ),
    "swiglu": Part(
        named(lambda: ffn_parameters(GATED, "", D, init=HeInit()), D),
        feed(GATED),
        feed_reference,
        (B, T, D),
    ),
    "clamped swiglu": Part(
        named(lambda: ffn_parameters(CLAMPED, "", D, init=HeInit()), D),
        feed(CLAMPED),
        clamped_reference,
        (B, T, D),
    ),
    **{
        f"block, {placement}": Part(
            named(lambda p=placement: block_parameters(block_of(p), "", D, init=HeInit()), D),
            block(placement),
            block_reference(placement),
            (B, T, D),
        )
        for placement in get_args(Placement)
    },
    "tied head": Part(
        normal(x=(B, T, D), weight=(V, D), bias=(V,)),
        head(spec.NextHead(tied=True, bias=True)),
        lambda t: F.linear(t["x"], t["weight"], t["bias"]),
        (B, T, V),
    ),
    "tied factorized head": Part(
        normal(x=(B, T, D), u=(V, R), v=(R, D)),
        head(spec.NextHead(tied=True)),
        lambda t: t["x"] @ t["v"].mT @ t["u"].mT,
        (B, T, V),
    ),
    "answer, last": Part(
        ANSWER, head(spec.AnswerHead()), lambda t: readout_reference(t, "last"), (B, V)
    ),
    "answer, first": Part(
        ANSWER,
        head(spec.AnswerHead(readout="first")),
        lambda t: readout_reference(t, "first"),
        (B, V),
    ),
    "answer, mean": Part(
        ANSWER,
        head(spec.AnswerHead(readout="mean")),
        lambda t: readout_reference(t, "mean"),
        (B, V),
    ),
    "cross_entropy": Part(normal(logits=(B, T, V)), cross_entropy, cross_entropy_reference, ()),
}
