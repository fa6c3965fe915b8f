"""What must hold of a training step's passes on arrays: autograd in float64 is the reference.

Sizes are primes: no multiple of a vector, a block of rows, or a piece. Every check goes through
every variant that the machine has.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.kernels import c_library, training
from glassformer.kernels.threads import taking
from glassformer.kernels.training import Array

# M rows, D width, B sequences, N query heads, K key-value heads, T queries, S keys, H d_head

#: Relative to the largest number of an array, or to 1; the worst seen was 7e-6, of a tail of gelu.
NEAR = 1e-5
#: Rows and widths: one row, pieces of a norm's gradient, part of a vector and several.
TABLES = ((1, 3), (67, 16), (131, 37), (7, 129))

#: B, N, K, T, S, H: one block and several, heads of part of a vector, of one and of several.
SIZES = (
    (2, 3, 3, 5, 7, 11),
    (1, 6, 2, 19, 19, 16),
    (1, 2, 1, 131, 131, 33),
    (2, 2, 1, 67, 139, 8),
    (1, 1, 1, 2, 53, 67),
)
#: The worst seen was 2e-6, of attention over 131 keys.
NEAR = 1e-5


def single(*shape: int, seed: int = 0) -> Tensor:
    return noise(*shape, seed=seed, dtype=torch.float32)


def noise(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def near(found: Array, wanted: Tensor, *, name: str) -> None:
    other = wanted.detach().numpy()
    gap = float(np.abs(found.reshape(other.shape) - other).max(initial=0.0))
    assert gap <= NEAR * max(1.0, float(np.abs(other).max(initial=0.0))), (name, gap)


def wide(*arrays: Array) -> list[Tensor]:
    return [torch.from_numpy(x).double().requires_grad_() for x in arrays]


def every_variant(check: Callable[[], None]) -> Callable[[], None]:
    def all_of_them() -> None:
        for name in c_library.variants():
            with c_library.use_variant(name):
                check()

    all_of_them.__name__ = check.__name__
    return all_of_them


def kept_of(shape: Sequence[int], drop: training.Drop) -> Tensor:
    """Return the 0 and factors that a dropout multiplies by: it is told by a sum of nothing."""
    ones = np.ones((1, math.prod(shape)), np.float32)
    training.add(None, ones, out=ones, drop=drop)
    return torch.from_numpy(ones.reshape(shape)).double()


@every_variant
def attention_of_arrays() -> None:
    """Masks, biases, sinks, a cap, dropout, alone and together; a query that sees nothing."""
    rng = np.random.default_rng(0)
    for case, (B, N, K, T, S, H) in enumerate(SIZES):
        allow = rng.random((B, 1, T, S)) > 0.4
        allow[..., 1] = True
        allow[0, :, 1] = False  # a query that sees nothing
        bias, sinks = noise(1, N, T, S, seed=4), noise(N, seed=5)
        drop = training.drop_of(0.3, rng)
        attention_of(B, N, K, T, S, H)
        attention_of(B, N, K, T, S, H, causal=T == S, bias=bias, softcap=2.5, drop=drop)
        attention_of(B, N, K, T, S, H, allow=allow)  # without sinks, its sum is 0
        attention_of(B, N, K, T, S, H, allow=allow, sinks=sinks)
        if case == 0:
            attention_of(
                B, N, K, T, S, H,
                allow=allow, bias=bias, sinks=sinks, softcap=1.5, drop=drop,
            )  # fmt: skip


def attention_of(
    B: int,
    N: int,
    K: int,
    T: int,
    S: int,
    H: int,
    *,
    causal: bool = False,
    allow: Array | None = None,
    bias: Array | None = None,
    sinks: Array | None = None,
    softcap: float | None = None,
    drop: training.Drop = training.KEEP,
) -> None:
    # Keys and values are columns of one table, as a joined projection leaves them.
    q, kv = noise(B * T, N * H, seed=1), noise(B * S, 2 * K * H, seed=2)
    d_out, d_kv = noise(B * T, N * H, seed=3), np.empty_like(kv)
    k, v, d_k, d_v = (x[:, at : at + K * H] for x in (kv, d_kv) for at in (0, K * H))
    out, d_q = np.empty_like(q), np.empty_like(q)
    d_bias = None if bias is None else np.zeros((B, N, T, S), np.float32)
    d_sinks = None if sinks is None else np.zeros((B, N), np.float32)
    made = training.attention_forward(
        q, k, v, out_MQ=out, kept=np.empty((B * T, N, 2), np.float32), sequences=B, heads=N,
        kv_heads=K, scale=0.3, causal=causal, allow=allow, bias=bias, sinks_N=sinks,
        softcap=softcap, drop=drop,
    )  # fmt: skip
    training.attention_backward(
        d_out, made, d_q_MQ=d_q, d_k_RK=d_k, d_v_RK=d_v, d_bias=d_bias, d_sinks_BN=d_sinks
    )
    q64, k64, v64 = wide(q, k.copy(), v.copy())
    heads = [
        x.view(B, -1, count, H).transpose(1, 2).repeat_interleave(N // count, 1)
        for x, count in ((q64, N), (k64, K), (v64, K))
    ]
    scores = heads[0] @ heads[1].mT * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    given = [q64, k64, v64]
    if bias is not None:
        given += wide(bias)
        scores = scores + given[-1]
    if causal:
        scores = scores.masked_fill(torch.ones(T, S).triu(1).bool(), -torch.inf)
    if allow is not None:
        scores = scores.masked_fill(~torch.from_numpy(allow), -torch.inf)
    exps = (scores - scores.detach().amax(-1, keepdim=True).clamp(min=-1e9)).exp()
    total = exps.sum(-1, keepdim=True)
    if sinks is not None:
        given += wide(sinks)
        most = scores.detach().amax(-1, keepdim=True).clamp(min=-1e9)
        total = total + (given[-1][:, None, None] - most).clamp(max=80).exp()
    weights = exps / total.clamp(min=1e-300)
    mixed = weights * kept_of((B, N, T, S), drop) @ heads[2]
    wanted = mixed.transpose(1, 2).reshape(B * T, N * H)
    slopes = torch.autograd.grad(wanted, given, torch.from_numpy(d_out).double())
    near(out, wanted, name="out")
    found = [d_q, d_k, d_v]
    found += [] if d_bias is None else [d_bias.sum(0)]
    found += [] if d_sinks is None else [d_sinks.sum(0)]
    for one, slope, name in zip(
        found, slopes, ("q", "k", "v", "bias or sinks", "sinks"), strict=False
    ):
        near(one, slope, name=name)
    if allow is not None:
        assert not out.reshape(B, T, -1)[0, 1].any() or T == 1
        assert np.isfinite(d_q).all() and np.isfinite(d_kv).all()


@every_variant
def norms_of_arrays() -> None:
    """LayerNorm and RMSNorm, with a bias, a gain around 1, a sum before and a sum behind."""
    for M, D in TABLES:
        x, gain, bias = noise(M, D, seed=1) + 2, noise(D, seed=2), noise(D, seed=3)
        d_out, more, added = (noise(M, D, seed=s) for s in (4, 5, 6))
        drop = training.drop_of(0.4, np.random.default_rng(7))
        for layer, plus, joined in ((True, 0.0, False), (False, 1.0, False), (True, 0.5, True)):
            out, total, rate, mean = (np.empty_like(y) for y in (x, x, x[:, 0], x[:, 0]))
            sums = {"added": added, "total": total, "scale": 0.7, "drop": drop} if joined else {}
            shape = {"mean_M": mean if layer else None, "plus": plus, "rate_M": rate}
            shift = bias if layer else None
            training.norm_forward(x, gain, out=out, eps=0.1, bias_D=shift, **shape, **sums)
            dx, d_gain, d_bias = np.empty_like(x), np.empty_like(gain), np.empty_like(gain)
            training.norm_backward(
                d_out, total if joined else x, gain, dx=dx, d_gain_D=d_gain, **shape,
                d_bias_D=d_bias if layer else None, more=more if joined else None,
            )  # fmt: skip
            x64, gain64, bias64 = wide(x, gain, bias)
            z = x64
            if joined:
                z = x64 + 0.7 * kept_of((M, D), drop) * torch.from_numpy(added).double()
                near(total, z, name="total")
            if layer:
                wanted = F.layer_norm(z, (D,), gain64 + plus, bias64, eps=0.1)
            else:
                wanted = z * (z.square().mean(-1, keepdim=True) + 0.1).rsqrt() * (gain64 + plus)
                wanted = wanted + 0 * bias64
            near(out, wanted, name="out")
            slopes = torch.autograd.grad(
                wanted, (x64, gain64, bias64), torch.from_numpy(d_out).double()
            )
            near(dx - more if joined else dx, slopes[0], name="dx")
            near(d_gain, slopes[1], name="gain")
            if layer:
                near(d_bias, slopes[2], name="bias")


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
}


@every_variant
def activations_of_arrays() -> None:
    """Each function alone and as a gate, small numbers, large ones and the tails."""
    assert set(FORMULAS) == set(training.ACTIVATIONS)
    x = np.concatenate(
        [noise(17 * 61 - 7, seed=1) * 3, [0.0, 1e-6, -1e-6, 90.0, -90.0, 11.0, -11.0]]
    )
    x = x.astype(np.float32)
    up, d_out = noise(x.size, seed=2), noise(x.size, seed=3)
    for name, function in FORMULAS.items():
        out, dx, d_up = np.empty_like(x), np.empty_like(x), np.empty_like(x)
        x64, up64 = wide(x, up)
        training.activation_forward(x, name, out=out)
        training.activation_backward(d_out, x, name, dx=dx)
        wanted = function(x64)
        (slope,) = torch.autograd.grad(wanted, x64, torch.from_numpy(d_out).double())
        # Relative to each number: a small one is not hidden by a large one.
        for found, other in ((out, wanted), (dx, slope)):
            gap = np.abs(found - other.detach().numpy())
            size = np.maximum(np.abs(other.detach().numpy()), 0.1)
            assert (gap <= NEAR * size).all(), (name, float((gap / size).max()))
        # As columns of a joined table, too.
        joined = np.ascontiguousarray(
            np.stack((x, up), axis=1).reshape(17, -1, 2).transpose(0, 2, 1)
        )
        made = np.empty_like(joined)
        training.gate_forward(joined[:, 0], joined[:, 1], name, out=out.reshape(17, -1))
        training.gate_backward(
            d_out.reshape(17, -1), joined[:, 0], joined[:, 1], name,
            d_gate=made[:, 0], d_up=made[:, 1],
        )  # fmt: skip
        dx, d_up = made[:, 0].copy(), made[:, 1].copy()
        wanted = function(x64) * up64
        slopes = torch.autograd.grad(wanted, (x64, up64), torch.from_numpy(d_out).double())
        for found, other in ((out, wanted), (dx, slopes[0]), (d_up, slopes[1])):
            near(found, other, name=name)


@every_variant
def sums_of_arrays() -> None:
    """Residual sums, a row for all, sums over rows, rows of a table that occur again."""
    for M, D in TABLES:
        x, z, row = noise(M, D, seed=1), noise(M, D, seed=2), noise(D, seed=3)
        out, sums = np.empty_like(x), np.empty_like(row)
        training.add(x, z, out=out, scale=0.5)
        near(out, torch.from_numpy(x).double() + 0.5 * torch.from_numpy(z), name="sum")
        training.add(x, row, out=x)
        training.columns_sum(np.concatenate((x, z), axis=1)[:, D:], out_D=sums)
        near(sums, torch.from_numpy(z).double().sum(0), name="columns")
        near(x, torch.from_numpy(noise(M, D, seed=1)).double() + torch.from_numpy(row), name="row")
        table, index = noise(5, D, seed=4), np.random.default_rng(5).integers(0, 5, M)
        wanted = torch.from_numpy(table).double()
        wanted = wanted.index_add(0, torch.from_numpy(index), torch.from_numpy(z).double())
        training.add_rows(table, z, index)
        near(table, wanted, name="rows of a table")


@every_variant
def dropouts_of_arrays() -> None:
    """As many are dropped as the rate says, others each time, and backward the same."""
    drop = training.drop_of(0.25, np.random.default_rng(1))
    ones = np.ones((113, 1009), np.float32)
    out = np.empty_like(ones)
    training.add(None, ones, out=out, drop=drop)
    assert abs((out == 0).mean() - 0.25) < 0.01
    assert np.allclose(out[out != 0], 1 / 0.75)
    # Neither along a row nor down a column does one dropped number say anything of the next.
    dropped = (out == 0) - 0.25
    for axis in (0, 1):
        one, other = np.roll(dropped, 1, axis), np.roll(dropped, 7, axis)
        assert abs((dropped * one).mean()) < 0.005 and abs((dropped * other).mean()) < 0.005
    again = np.empty_like(ones)
    training.add(None, ones, out=again, drop=drop)
    assert np.array_equal(out, again)
    training.add(None, ones, out=again, drop=training.drop_of(0.25, np.random.default_rng(2)))
    assert abs(((out == 0) & (again == 0)).mean() - 0.25**2) < 0.01
    x = noise(*ones.shape, seed=3)
    training.add(x, x, out=again, scale=0.5, drop=drop)
    assert np.allclose(again, x + 0.5 * out * x, atol=1e-6)


@every_variant
def rotations_of_arrays() -> None:
    """There and back, one table for all sequences or a row for each token, part of a head."""
    for B, T, N, H, half in ((2, 5, 3, 8, 4), (3, 7, 1, 38, 19), (1, 11, 2, 18, 5)):
        x = noise(B * T, N * H, seed=1)
        for rows in (T, B * T):
            angle = noise(rows, half, seed=2)
            cos, sin = np.cos(angle), np.sin(angle)
            out, back = np.empty_like(x), np.empty_like(x)
            training.rotate(x, cos, sin, out_MQ=out, heads=N)
            training.rotate(out, cos, sin, out_MQ=back, heads=N, back=True)
            near(back, torch.from_numpy(x).double(), name="back")
            c, s = (np.tile(y, (B * T // rows, 1))[:, None] for y in (cos, sin))
            heads = x.reshape(B * T, N, H).astype(np.float64)
            first, second = heads[..., :half], heads[..., half : 2 * half]
            parts = (first * c - second * s, second * c + first * s, heads[..., 2 * half :])
            near(out, torch.from_numpy(np.concatenate(parts, -1)), name="rotated")


@every_variant
def losses_of_arrays() -> None:
    """Sums in float64, weighted and smoothed; the gradient over the logits; a weight of 0."""
    for M, V in ((1, 2), (37, 131), (19, 1031)):
        logits, targets = noise(M, V, seed=1) * 4, np.random.default_rng(2).integers(0, V, M)
        weights = np.abs(noise(M, seed=3))
        weights[-1] = 0.0 if M > 1 else 1.0
        for smoothing in (0.0, 0.1):
            (wide_MV,) = wide(logits)
            given, weighed = torch.from_numpy(targets), torch.from_numpy(weights).double()
            each = F.cross_entropy(wide_MV, given, reduction="none", label_smoothing=smoothing)
            wanted = (each * weighed).sum()
            (slope,) = torch.autograd.grad(wanted, wide_MV)
            plain = (F.cross_entropy(wide_MV, given, reduction="none") * weighed).sum()
            made = logits.copy()
            sums = training.cross_entropy(made, targets, weights, smoothing=smoothing)
            near(np.array(sums), torch.stack((wanted, plain)), name="sums")
            near(made, slope, name="gradient")


@every_variant
def updates_of_arrays() -> None:
    """AdamW over two slices of one vector, one with decay, and the norm of both."""
    size, cut = 40_009, 20_011
    vector, gradient = noise(size, seed=1), np.empty(size, np.float32)
    mean, square = np.zeros(size, np.float32), np.zeros(size, np.float32)
    parts = (slice(0, cut), slice(cut, size))
    own = [torch.nn.Parameter(torch.from_numpy(vector[at]).double().clone()) for at in parts]
    groups = [
        {"params": [p], "weight_decay": decay} for p, decay in zip(own, (0.1, 0.0), strict=True)
    ]
    torchs = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-3)
    for step in range(1, 4):
        gradient[...] = noise(size, seed=10 + step)
        for p, at in zip(own, parts, strict=True):
            p.grad = torch.from_numpy(gradient[at]).double() * 0.3
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
        assert abs(training.norm_of(gradient) - norm) <= NEAR * norm
        for at, decay in zip(parts, (0.1, 0.0), strict=True):
            training.adamw(
                vector[at], gradient[at], mean[at], square[at], step=step, lr=0.01,
                betas=(0.8, 0.95), eps=1e-3, decay=decay, scale=0.3,
            )  # fmt: skip
        torchs.step()
        near(vector, torch.cat([p.detach() for p in own]), name="weights")


def threads_change_no_bit_of_arrays() -> None:
    """Everything at once on one, two and three threads."""
    found = []
    for threads in (1, 2, 3):
        with taking(threads):
            B, T, N, H = 5, 67, 4, 16
            q, k, v, d_out = (noise(B * T, N * H, seed=s) for s in range(4))
            out, d_q, d_k, d_v = (np.empty_like(q) for _ in range(4))
            drop = training.drop_of(0.2, np.random.default_rng(1))
            made = training.attention_forward(
                q, k, v, out_MQ=out, kept=np.empty((B * T, N, 2), np.float32), sequences=B,
                heads=N, kv_heads=N, scale=0.25, causal=True, drop=drop,
            )  # fmt: skip
            training.attention_backward(d_out, made, d_q_MQ=d_q, d_k_RK=d_k, d_v_RK=d_v)
            x, gain, d_y = noise(1031, 37, seed=5), noise(37, seed=6), noise(1031, 37, seed=7)
            y, dx, sums = np.empty_like(x), np.empty_like(x), np.empty_like(gain)
            d_gain, d_bias = np.empty_like(gain), np.empty_like(gain)
            rate, mean = np.empty(1031, np.float32), np.empty(1031, np.float32)
            training.norm_forward(x, gain, out=y, rate_M=rate, mean_M=mean, eps=1e-5)
            training.norm_backward(
                d_y, x, gain, rate_M=rate, mean_M=mean, dx=dx, d_gain_D=d_gain, d_bias_D=d_bias
            )
            training.columns_sum(d_y, out_D=sums)
            gated, dropped = np.empty_like(x), np.empty_like(x)
            training.gate_forward(x, y, "gelu", out=gated)
            training.add(x, y, out=dropped, drop=drop)
            logits = noise(331, 1009, seed=8)
            loss = training.cross_entropy(
                logits, np.arange(331), np.ones(331, np.float32), smoothing=0.1
            )
            flat = [noise(200_003, seed=s) for s in range(9, 13)]
            norm = training.norm_of(flat[1])
            flat[3] = np.abs(flat[3])
            training.adamw(*flat, step=3, lr=0.1, betas=(0.9, 0.99), eps=1e-8, decay=0.1)
            numbers = np.array([*loss, norm])
            slopes = (d_q, d_k, d_v, dx, d_gain, d_bias, sums)
            found.append([out, y, gated, dropped, logits, flat[0], numbers, *slopes])
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


ARRAY_CHECKS = {
    check.__name__: check
    for check in (
        attention_of_arrays,
        norms_of_arrays,
        activations_of_arrays,
        sums_of_arrays,
        dropouts_of_arrays,
        rotations_of_arrays,
        losses_of_arrays,
        updates_of_arrays,
        threads_change_no_bit_of_arrays,
    )
}
