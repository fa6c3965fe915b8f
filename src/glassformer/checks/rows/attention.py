"""Our attention against PyTorch's own and against one head, one query at a time.

Each check takes a dtype and gives a `Measure`: results and every gradient. Sizes are distinct
primes where the claim allows, so that no transposition passes by luck.
"""

import itertools
import math
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glasscheck.measure import EXACT, TOLERANCE, Measure, Pair, draw, gap, parity, seeded
from glassformer.checks.preset_subjects import perturb
from glassformer.checks.rows.layers import attention_pairs
from glassformer.checks.rows.parts import turn_by_hand
from glassformer.nn.attention import MultiHeadAttention, attend
from glassformer.nn.mask import Mask, build_mask, mask_from_allow
from glassformer.nn.position import ALiBiPosition, RelativePosition, rotations
from glassformer.nn.taps import Taps, TapsAt
from glassformer.spec import model as spec

# B batch, T query length, S key length, D d_model, N query heads, K key-value heads, H d_head


def everything_explicit() -> TapsAt:
    """Return taps that read the weights, which selects the explicit path."""
    return TapsAt(Taps(read="weights"), "")


def explicit_attention(dtype: torch.dtype) -> Measure:
    """Our softmax(q k^T / sqrt(H)) v, causal and with a random mask, against PyTorch's kernel."""
    B, N, T, H = 2, 3, 13, 7
    allow = torch.rand(B, 1, T, T, generator=seeded(1)) < 0.6
    allow |= torch.eye(T, dtype=torch.bool)
    worst = []
    for mask, extra in (
        (Mask(causal=True), {"is_causal": True}),
        (mask_from_allow(allow), {"attn_mask": allow}),
        (Mask(), {}),
    ):
        inputs = [draw(B, N, T, H, dtype=dtype, seed=seed) for seed in (2, 3, 4)]

        def ours(q: Tensor, k: Tensor, v: Tensor, mask: Mask = mask) -> Tensor:
            return attend(q, k, v, mask=mask, taps=everything_explicit())

        def theirs(q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Any] = extra) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, **extra)

        worst.append(parity(ours, theirs, inputs=inputs, size=f"B{B} N{N} T{T} H{H}"))
    return max(worst, key=lambda measure: measure.worst)


def fused_is_explicit(dtype: torch.dtype) -> Measure:
    """The fused path against the explicit one, grouped heads, padding and window at once."""
    B, N, K, T, H = 2, 6, 2, 11, 5
    valid = torch.ones(B, T, dtype=torch.bool)
    valid[0, 7:] = False
    mask = build_mask(T, T, causal=True, window=5, valid_q_BT=valid, valid_k_BS=valid)
    inputs = [draw(B, n, T, H, dtype=dtype, seed=n) for n in (N, K, K)]
    return parity(
        lambda q, k, v: attend(q, k, v, mask=mask, taps=everything_explicit()),
        lambda q, k, v: attend(q, k, v, mask=mask),
        inputs=inputs,
        size=f"B{B} N{N} K{K} T{T} H{H}",
    )


def grouped_heads(dtype: torch.dtype) -> Measure:
    """Query head n attends to key-value head n // (N / K): against one head at a time."""
    B, N, K, T, H = 2, 6, 3, 7, 5

    def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = []
        for n in range(N):
            kv = n // (N // K)
            weights = torch.softmax(q[:, n] @ k[:, kv].mT / math.sqrt(H), -1)
            heads.append(weights @ v[:, kv])
        return torch.stack(heads, 1)

    inputs = [draw(B, n, T, H, dtype=dtype, seed=n) for n in (N, K, K)]
    fused = parity(
        lambda q, k, v: attend(q, k, v, mask=Mask()), one_by_one, inputs=inputs, size=f"N{N} K{K}"
    )
    inputs = [draw(B, n, T, H, dtype=dtype, seed=n) for n in (N, K, K)]
    explicit = parity(
        lambda q, k, v: attend(q, k, v, mask=Mask(), taps=everything_explicit()),
        one_by_one,
        inputs=inputs,
        size=f"B{B} N{N} K{K} T{T} H{H}",
    )
    return max(fused, explicit, key=lambda measure: measure.worst)


def paper_slopes(n_heads: int) -> list[float]:
    """The slopes as the paper's own code finds them: by recursion over powers of two."""
    exponent = math.log2(n_heads)
    if exponent.is_integer():
        start = 2 ** (-(2 ** -(exponent - 3)))
        return [start * start**i for i in range(n_heads)]
    below = 2 ** math.floor(exponent)
    return paper_slopes(below) + paper_slopes(2 * below)[0::2][: n_heads - below]


def alibi_by_hand(dtype: torch.dtype) -> Measure:
    """Scores lowered by slope times distance: each query alone over the keys it may see.

    Grouped heads whose number is no power of two; causal with padding before and behind, where a
    distance counts real tokens; and both ways.
    """
    B, N, K, T, H = 2, 6, 3, 11, 5
    valid = torch.ones(B, T, dtype=torch.bool)
    valid[0, :3], valid[1, 7:] = False, False
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    slopes = paper_slopes(N)
    part = ALiBiPosition(spec.ALiBi(), N, H).to(dtype)
    measures = []
    for causal in (True, False):
        mask = build_mask(T, T, causal=causal, valid_q_BT=valid, valid_k_BS=valid)
        mask = replace(mask, bias=part.bias(positions, T))

        def one_by_one(q: Tensor, k: Tensor, v: Tensor, causal: bool = causal) -> Tensor:
            rows = []
            for b, n, t in itertools.product(range(B), range(N), range(T)):
                real = [s for s in range(T) if valid[b, s] and (s <= t or not causal)]
                if not valid[b, t]:
                    rows.append(v.new_zeros(H))
                    continue
                apart = torch.tensor([sum(valid[b, min(s, t) : max(s, t)]) for s in real])
                keys, values = k[b, n // (N // K)][real], v[b, n // (N // K)][real]
                scores = keys @ q[b, n, t] / math.sqrt(H) - slopes[n] * apart.to(dtype)
                rows.append(torch.softmax(scores, -1) @ values)
            return torch.stack(rows).view(B, N, T, H)

        for taps in (None, everything_explicit(), TapsAt(Taps(read="scores"), "")):
            inputs = [draw(B, n, T, H, dtype=dtype, seed=n) for n in (N, K, K)]

            def ours(
                q: Tensor, k: Tensor, v: Tensor, mask: Mask = mask, taps: TapsAt | None = taps
            ) -> Tensor:
                return attend(q, k, v, mask=mask, taps=taps)

            measures.append(
                parity(ours, one_by_one, inputs=inputs, size=f"B{B} N{N} K{K} T{T} H{H}")
            )
    return max(measures, key=lambda measure: measure.worst)


def paper_bucket(distance: int, *, buckets: int, most: int) -> int:
    """The bucket of a distance, by counting edges: from buckets / 2 on they grow by one factor."""
    exact = buckets // 2
    power = buckets - exact
    edges: list[float] = [exact * (most / exact) ** (i / power) for i in range(power)]
    return min(distance, exact - 1) + sum(distance >= edge - 1e-9 for edge in edges)


def relative_by_hand(dtype: torch.dtype) -> Measure:
    """Scores raised by the learned bias of their distance's bucket: each query alone.

    Causal, and to both sides, where keys behind have a half of the buckets to themselves; padding
    before and behind, where a distance counts real tokens. The biases' gradient is compared too.
    """
    B, N, T, H, buckets, most = 2, 3, 11, 5, 8, 7
    valid = torch.ones(B, T, dtype=torch.bool)
    valid[0, :3], valid[1, 9:] = False, False
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    measures = []
    for causal, taps in itertools.product((True, False), (None, everything_explicit())):
        relative = spec.RelativeBias(buckets=buckets, max_distance=most)
        part = RelativePosition(relative, N, causal=causal)
        perturb(part, dtype=dtype, seed=41)
        table = nn.Parameter(torch.empty(buckets, N, dtype=dtype))
        mask = build_mask(T, T, causal=causal, valid_q_BT=valid, valid_k_BS=valid)
        half = buckets if causal else buckets // 2

        def bucket(b: int, t: int, s: int, half: int = half) -> int:
            apart = int(valid[b, min(s, t) : max(s, t)].sum())
            return paper_bucket(apart, buckets=half, most=most) + (half if s > t else 0)

        def ours(
            q: Tensor, k: Tensor, v: Tensor, mask: Mask = mask, part: Any = part, taps: Any = taps
        ) -> Tensor:
            return attend(q, k, v, mask=replace(mask, bias=part.bias(positions, T)), taps=taps)

        def one_by_one(
            q: Tensor, k: Tensor, v: Tensor, causal: bool = causal, table: Tensor = table
        ) -> Tensor:
            rows = []
            for b, n, t in itertools.product(range(B), range(N), range(T)):
                real = [s for s in range(T) if valid[b, s] and (s <= t or not causal)]
                biases = table[[bucket(b, t, s) for s in real], n]
                weights = torch.softmax(k[b, n, real] @ q[b, n, t] / math.sqrt(H) + biases, -1)
                rows.append(
                    weights @ v[b, n, real] if valid[b, t] else torch.zeros_like(v[b, n, t])
                )
            return torch.stack(rows).view(B, N, T, H)

        inputs = [draw(B, N, T, H, dtype=dtype, seed=seed) for seed in (42, 43, 44)]
        pairs = [Pair("biases", part.weight, table)]
        measures.append(parity(ours, one_by_one, inputs=inputs, pairs=pairs, size=f"N{N} T{T}"))
    return max(measures, key=lambda measure: measure.worst)


def window_by_hand(dtype: torch.dtype) -> Measure:
    """A window of w: each query alone over the keys it may attend to."""
    B, N, T, H, w = 2, 3, 11, 5, 4

    def slices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = []
        for t in range(T):
            seen = slice(max(0, t - w + 1), t + 1)
            scores = q[:, :, t : t + 1] @ k[:, :, seen].mT / math.sqrt(H)
            rows.append(torch.softmax(scores, -1) @ v[:, :, seen])
        return torch.cat(rows, 2)

    mask = build_mask(T, T, causal=True, window=w)
    inputs = [draw(B, N, T, H, dtype=dtype, seed=seed) for seed in (5, 6, 7)]
    return parity(
        lambda q, k, v: attend(q, k, v, mask=mask), slices, inputs=inputs, size=f"T{T} window {w}"
    )


def empty_rows(dtype: torch.dtype) -> Measure:
    """A row that may attend to nothing gives exact zeros, forward and backward, on both paths."""
    B, N, T, H = 2, 3, 5, 7
    allow = torch.ones(B, 1, T, T, dtype=torch.bool)
    allow[0, :, 2] = False
    allow[1, :, :, :] = False
    mask, worst = mask_from_allow(allow), 0.0
    for taps in (None, everything_explicit()):
        q, k, v = (draw(B, N, T, H, dtype=dtype, seed=seed) for seed in (8, 9, 10))
        out = attend(q, k, v, mask=mask, taps=taps)
        out.sum().backward()
        assert q.grad is not None and k.grad is not None and v.grad is not None
        zeros = [out[0, :, 2], out[1], q.grad[0, :, 2], q.grad[1], k.grad[1], v.grad[1]]
        alive = [out.detach()[0, :, 0], v.grad[0]]
        worst = max(worst, *(gap(z, torch.zeros_like(z)) for z in zeros))
        if not all(bool(a.isfinite().all()) and float(a.abs().max()) > 0 for a in alive):
            worst = math.inf
    return Measure(worst, EXACT, f"B{B} N{N} T{T} H{H}")


def large_scores(dtype: torch.dtype) -> Measure:
    """Scores of 1e4 stay finite and pick the largest: the maximum is subtracted before exp."""
    q = torch.tensor([[[[1e4, 0.0]]]], dtype=dtype)
    k = torch.tensor([[[[1.0, 0.0], [0.5, 0.0], [-1.0, 0.0]]]], dtype=dtype)
    v = torch.tensor([[[[3.0], [5.0], [7.0]]]], dtype=dtype).expand(1, 1, 3, 2)
    worst = 0.0
    for taps in (None, everything_explicit()):
        out = attend(q, k, v, mask=Mask(), taps=taps)
        worst = max(worst, gap(out, torch.full_like(out, 3.0)))
    return Measure(worst, TOLERANCE[dtype], "scores of 7e3")


def multi_head(dtype: torch.dtype) -> Measure:
    """Self-attention with causal mask and padding, against nn.MultiheadAttention."""
    B, T, D, N = 3, 11, 21, 3
    ours = MultiHeadAttention(spec.Attention(n_heads=N, bias="all"), D)
    perturb(ours, dtype=dtype, seed=11)
    reference = nn.MultiheadAttention(D, N, batch_first=True, dtype=dtype)
    valid = torch.ones(B, T, dtype=torch.bool)
    valid[1, 6:] = False
    mask = build_mask(T, T, causal=True, valid_q_BT=valid, valid_k_BS=valid)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)

    def theirs(x: Tensor) -> Tensor:
        masks = {"key_padding_mask": ~valid, "attn_mask": future}
        return cast(Tensor, reference(x, x, x, **masks, need_weights=False)[0])

    return parity(
        lambda x: ours(x, mask=mask),
        theirs,
        inputs=[draw(B, T, D, dtype=dtype, seed=12)],
        pairs=list(attention_pairs("attn", ours, reference)),
        where=valid,
        size=f"B{B} T{T} D{D} N{N}",
    )


def multi_head_weights(dtype: torch.dtype) -> Measure:
    """The weights that the explicit path shows, head by head, against nn.MultiheadAttention."""
    B, T, D, N = 2, 7, 15, 3
    ours = MultiHeadAttention(spec.Attention(n_heads=N, bias="all", causal=False), D)
    perturb(ours, dtype=dtype, seed=13)
    reference = nn.MultiheadAttention(D, N, batch_first=True, dtype=dtype)
    for pair in attention_pairs("attn", ours, reference):
        pair.copy()
    x, taps = draw(B, T, D, dtype=dtype, seed=14), Taps(read="weights")
    ours(x, mask=Mask(), taps=TapsAt(taps, ""))
    expected = reference(x, x, x, need_weights=True, average_attn_weights=False)[1]
    return Measure(gap(taps.seen["weights"], expected), TOLERANCE[dtype], f"B{B} T{T} D{D} N{N}")


def cross_attention(dtype: torch.dtype) -> Measure:
    """Queries from one sequence, keys and values from another, the source padded."""
    B, T, S, D, N = 3, 5, 11, 21, 3
    ours = MultiHeadAttention(spec.Attention(n_heads=N, bias="all", causal=False), D)
    perturb(ours, dtype=dtype, seed=15)
    reference = nn.MultiheadAttention(D, N, batch_first=True, dtype=dtype)
    valid = torch.ones(B, S, dtype=torch.bool)
    valid[2, 4:] = False
    mask = build_mask(T, S, causal=False, valid_k_BS=valid)
    return parity(
        lambda x, memory: ours(x, context_BSD=memory, mask=mask),
        lambda x, memory: reference(x, memory, memory, key_padding_mask=~valid, need_weights=False)[
            0
        ],
        inputs=[draw(B, T, D, dtype=dtype, seed=16), draw(B, S, D, dtype=dtype, seed=17)],
        pairs=list(attention_pairs("cross", ours, reference)),
        size=f"B{B} T{T} S{S} D{D} N{N}",
    )


def qk_norm(dtype: torch.dtype) -> Measure:
    """Queries and keys normed over the head, then turned: written out step by step."""
    B, T, D, N, H = 2, 7, 12, 3, 4
    attention = spec.Attention(n_heads=N, qk_norm=spec.RMSNorm(eps=1e-3))
    ours = MultiHeadAttention(attention, D)
    perturb(ours, dtype=dtype, seed=18)
    assert ours.q_norm is not None and ours.k_norm is not None
    q_gain, k_gain = ours.q_norm.weight, ours.k_norm.weight
    cos, sin = rotations(spec.Rotary(), T, H, dtype=dtype)

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight

    def by_hand(x: Tensor) -> Tensor:
        heads = []
        for n in range(N):
            rows = slice(n * H, (n + 1) * H)
            q = rms(x @ ours.q_proj.weight[rows].T, q_gain)
            k = rms(x @ ours.k_proj.weight[rows].T, k_gain)
            q, k = turn_by_hand(q, H), turn_by_hand(k, H)
            weights = torch.softmax(q @ k.mT / math.sqrt(H), -1)
            heads.append(weights @ (x @ ours.v_proj.weight[rows].T))
        return torch.cat(heads, -1) @ ours.o_proj.weight.T

    return parity(
        lambda x: ours(x, mask=Mask(), rotation=(cos, sin)),
        by_hand,
        inputs=[draw(B, T, D, dtype=dtype, seed=19)],
        size=f"B{B} T{T} D{D} N{N}",
    )
