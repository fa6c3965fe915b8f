"""Triton kernels of a decoding step on a GPU: products of one row, and attention of one query.

Both read their operands once and keep sums in float32. The product can normalise its input first,
gate its output, and add a residual; attention rotates and stores the new key itself and reads the
length from memory, so that one launch, and one CUDA graph, serves every step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# B rows, I inputs, O outputs, N query heads, K key-value heads, X = N + 2 K, H d_head,
# S positions of the cache, P parts of the past

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHUNK = 64  # positions of the cache that are read at once


@triton.jit
def _product(
    x_ptr, w_ptr, bias_ptr, gain_ptr, shift_ptr, residual_ptr, out_ptr, n_out, eps,
    n_in: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, WHOLE_I: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    mean, rate = 0.0, 1.0
    if NORM != "":
        every = tl.arange(0, WHOLE_I)
        whole = tl.load(x_ptr + every, every < n_in, 0.0).to(tl.float32)
        if NORM == "layer":
            mean = tl.sum(whole, 0) / n_in
            whole = tl.where(every < n_in, whole - mean, 0.0)
        rate = tl.rsqrt(tl.sum(whole * whole, 0) / n_in + eps)
    acc = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    acc_up = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    for begin in tl.static_range(0, n_in, BLOCK_I):  # unrolled: all loads are under way at once
        i = begin + tl.arange(0, BLOCK_I)
        x = tl.load(x_ptr + i, i < n_in, 0.0).to(tl.float32)
        if NORM != "":
            x = (x - mean) * rate * tl.load(gain_ptr + i, i < n_in, 0.0).to(tl.float32)
            if NORM == "layer":
                x += tl.load(shift_ptr + i, i < n_in, 0.0).to(tl.float32)
        inside = (o < n_out)[:, None] & (i < n_in)[None, :]
        at = w_ptr + o.to(tl.int64)[:, None] * n_in + i[None, :]
        acc += tl.load(at, inside, 0.0).to(tl.float32) * x[None, :]
        if GATED:
            up = tl.load(at + n_out.to(tl.int64) * n_in, inside, 0.0).to(tl.float32)
            acc_up += up * x[None, :]
    out = tl.sum(acc, 1)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + o, o < n_out, 0.0).to(tl.float32)
    if GATED:
        wide = tl.sum(acc_up, 1)
        if bias_ptr is not None:
            wide += tl.load(bias_ptr + n_out + o, o < n_out, 0.0).to(tl.float32)
        out = out * tl.sigmoid(out) * wide
    if residual_ptr is not None:
        out += tl.load(residual_ptr + o, o < n_out, 0.0).to(tl.float32)
    tl.store(out_ptr + o, out.to(out_ptr.dtype.element_ty), o < n_out)


def product(
    x_1I: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    *,
    norm: str = "",
    gain_I: Tensor | None = None,
    shift_I: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual_1O: Tensor | None = None,
) -> Tensor:
    """Return norm(x) W^T + b + residual of one row; gated: silu(first half) * second half."""
    rows, n_in = x_1I.shape
    assert rows == 1 and x_1I.is_contiguous() and weight_OI.is_contiguous()
    n_out = weight_OI.shape[0] // 2 if gated else weight_OI.shape[0]
    out_1O = x_1I.new_empty(1, n_out)
    block_out, block_in, warps = _tile(n_in, n_out)
    _product[(triton.cdiv(n_out, block_out),)](
        x_1I, weight_OI, bias_O, gain_I, shift_I, residual_1O, out_1O, n_out, eps,
        n_in=n_in, NORM=norm, GATED=gated,
        BLOCK_O=block_out, BLOCK_I=block_in, WHOLE_I=triton.next_power_of_2(n_in), num_warps=warps,
    )  # fmt: skip
    return out_1O


def _tile(n_in: int, n_out: int) -> tuple[int, int, int]:
    """Return the outputs and inputs that a program reads at once, and its warps.

    The best of a search over the products of a 0.5 B model on an H200: 5 shapes, 80 tiles.
    """
    if n_in > 1024:
        return 1, min(8192, triton.next_power_of_2(n_in)), 4
    return 2 if n_out < 4096 else 4, triton.next_power_of_2(n_in), 1


@triton.jit
def _gate(wide_ptr, out_ptr, d_ff, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(wide_ptr + b * 2 * d_ff + f, f < d_ff, 0.0).to(tl.float32)
    up = tl.load(wide_ptr + b * 2 * d_ff + d_ff + f, f < d_ff, 0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + b * d_ff + f, out.to(out_ptr.dtype.element_ty), f < d_ff)


def gate(wide_BF: Tensor) -> Tensor:
    """Return silu(first half of each row) * second half."""
    B, d_ff = len(wide_BF), wide_BF.shape[1] // 2
    assert wide_BF.is_contiguous()
    out_BF = wide_BF.new_empty(B, d_ff)
    _gate[(B, triton.cdiv(d_ff, 1024))](wide_BF, out_BF, d_ff, BLOCK=1024)
    return out_BF


@triton.jit
def _turned(
    base_ptr, h, ok, gain_ptr, cos, sin, eps, d_head,
    NORM: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """A head's vector, normalised and rotated, in float32; `base` points at rows of heads."""
    half = (h + d_head // 2) % d_head
    x = tl.load(base_ptr + h[None, :], ok, 0.0).to(tl.float32)
    other = tl.load(base_ptr + half[None, :], ok, 0.0).to(tl.float32)
    if NORM:
        rate = tl.rsqrt(tl.sum(x * x, 1) / d_head + eps)[:, None]
        inside = h < d_head
        x = x * rate * tl.load(gain_ptr + h, inside, 0.0).to(tl.float32)[None, :]
        other = other * rate * tl.load(gain_ptr + half, inside, 0.0).to(tl.float32)[None, :]
    if TURN:
        x = x * cos[None, :] + other * sin[None, :]
    return x


@triton.jit
def _attend(
    qkv_ptr, kv_ptr, mask_ptr, slope_ptr, q_gain_ptr, k_gain_ptr, cos_ptr, sin_ptr, end_ptr,
    place_ptr, slot_ptr, out_ptr, part_ptr, most_ptr, sum_ptr,
    scale, eps, n_heads, n_kv, d_head, kv_row, kv_head, n_places, n_mask, window, n_parts, span,
    end_step,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    NORM: tl.constexpr, TURN: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) // n_kv
    head = tl.program_id(0) % n_kv
    part = tl.program_id(1)
    end = tl.load(end_ptr + b * end_step)
    new = end - 1
    slot = b.to(tl.int64)
    if slot_ptr is not None:
        slot = tl.load(slot_ptr + b).to(tl.int64)
    h = tl.arange(0, WIDTH)
    inside = h < d_head
    g = tl.arange(0, QUERIES)
    dtype = kv_ptr.dtype.element_ty
    cos = tl.zeros((WIDTH,), tl.float32)
    sin = tl.zeros((WIDTH,), tl.float32)
    if TURN:
        place = tl.load(place_ptr + b).to(tl.int64)
        cos = tl.load(cos_ptr + place * d_head + h, inside, 0.0).to(tl.float32)
        sin = tl.load(sin_ptr + place * d_head + h, inside, 0.0).to(tl.float32)
    row_ptr = qkv_ptr + b * (n_heads + 2 * n_kv) * d_head
    q_ok = (g < GROUP)[:, None] & inside[None, :]
    q = _turned(row_ptr + (head * GROUP + g)[:, None] * d_head, h, q_ok, q_gain_ptr, cos, sin,
                eps, d_head, NORM=NORM, TURN=TURN).to(dtype)  # fmt: skip
    slope = tl.zeros((QUERIES,), tl.float32)
    if slope_ptr is not None:
        slope = tl.load(slope_ptr + head * GROUP + g, g < GROUP, 0.0).to(tl.float32)
    key_ptr = kv_ptr + slot * kv_row + head * kv_head
    value_ptr = key_ptr + n_kv * kv_head

    first = part * span
    last = tl.minimum(first + span, end)
    lowest = tl.zeros((), end.dtype)
    if WINDOW:
        lowest = tl.maximum(end - window, 0)
        first = tl.maximum(first, lowest // CHUNK * CHUNK)
    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, WIDTH), tl.float32)
    owner = (new >= part * span) & (new < part * span + span)
    one = tl.arange(0, 1)
    key_ok = owner & (one == 0)[:, None] & inside[None, :]
    k_new = _turned(row_ptr + (n_heads + head + one)[:, None] * d_head, h, key_ok, k_gain_ptr, cos,
                    sin, eps, d_head, NORM=NORM, TURN=TURN).to(dtype)  # fmt: skip
    v_new = tl.load(
        row_ptr + (n_heads + n_kv + head + one)[:, None] * d_head + h[None, :], key_ok, 0.0
    ).to(dtype)
    tl.store(key_ptr + new * d_head + one[:, None] + h[None, :], k_new, key_ok)
    tl.store(value_ptr + new * d_head + one[:, None] + h[None, :], v_new, key_ok)
    for begin in range(first, last, CHUNK):
        s = begin + tl.arange(0, CHUNK)
        seen = s < end
        if WINDOW:
            seen = seen & (s >= lowest)
        held = (s < new)[:, None] & inside[None, :]
        at = s.to(tl.int64)[:, None] * d_head + h[None, :]
        fresh = (s == new)[:, None]
        key = tl.where(fresh, k_new, tl.load(key_ptr + at, held, 0.0))
        value = tl.where(fresh, v_new, tl.load(value_ptr + at, held, 0.0))
        score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        if mask_ptr is not None:
            score += tl.load(mask_ptr + b * n_mask + s, s < n_mask, 0.0).to(tl.float32)[None, :]
        if slope_ptr is not None:  # ALiBi: columns are as far apart as the positions they hold
            score -= slope[:, None] * (new - s).to(tl.float32)[None, :]
        score = tl.where(seen[None, :], score, float("-inf"))
        top = tl.maximum(most, tl.max(score, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp(score - base[:, None])
        keep = tl.exp(most - base)
        total = total * keep + tl.sum(weight, 1)
        acc = acc * keep[:, None] + tl.dot(weight.to(dtype), value, input_precision="ieee")
        most = top
    query = b * n_heads + head * GROUP + g
    if PARTS == 1:
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + query[:, None] * d_head + h[None, :], out.to(dtype), q_ok)
    else:
        at = query * n_parts + part
        tl.store(part_ptr + at[:, None] * d_head + h[None, :], acc, q_ok)
        tl.store(most_ptr + at, most, g < GROUP)
        tl.store(sum_ptr + at, total, g < GROUP)


@triton.jit
def _combine(
    part_ptr, most_ptr, sum_ptr, out_ptr, d_head, n_parts,
    PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    p = tl.arange(0, PARTS)
    h = tl.arange(0, WIDTH)
    there = p < n_parts
    most = tl.load(most_ptr + query * n_parts + p, there, float("-inf"))
    total = tl.load(sum_ptr + query * n_parts + p, there, 0.0)
    top = tl.max(most, 0)
    share = tl.exp(most - tl.where(top == float("-inf"), 0.0, top))
    at = (query * n_parts + p)[:, None] * d_head + h[None, :]
    acc = tl.load(part_ptr + at, there[:, None] & (h < d_head)[None, :], 0.0)
    whole = tl.sum(total * share, 0)
    out = tl.sum(acc * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out_ptr + query * d_head + h, out.to(out_ptr.dtype.element_ty), h < d_head)


def attend(
    qkv_BXH: Tensor,
    kv_BXSH: Tensor,
    ends: Tensor,
    *,
    n_heads: int,
    places_B: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    gains: tuple[Tensor, Tensor] | None,
    eps: float,
    window: int | None,
    mask_BS: Tensor | None,
    slopes_N: Tensor | None = None,
    slots_B: Tensor | None = None,
) -> Tensor:
    """Return attention (B, N H) of one new query per row; store its key and value at end - 1.

    `ends` is one end for all rows, or each row's own. Row b of the batch is row b of the memory, or
    `slots_B[b]` of it; no two rows may write to one place.
    `rotation` is (cos, sin) of every position, both halves, sin's first half negated; `gains` are
    those of the queries' and keys' RMS norm. `mask_BS` is added to the scores, and with `slopes_N`
    ALiBi's bias -slope * distance.
    """
    B, X, H = qkv_BXH.shape
    K, S = kv_BXSH.shape[1] // 2, kv_BXSH.shape[2]
    assert kv_BXSH.is_contiguous() and qkv_BXH.is_contiguous() and n_heads + 2 * K == X
    assert len(ends) in (1, B)
    parts = _parts(B * K, S)
    span = triton.cdiv(triton.cdiv(S, parts), CHUNK) * CHUNK
    out_BN = qkv_BXH.new_empty(B, n_heads * H)
    part = most = total = out_BN
    if parts > 1:
        part = torch.empty(B, n_heads, parts, H, dtype=torch.float32, device=qkv_BXH.device)
        most, total = torch.empty(2, B, n_heads, parts, dtype=torch.float32, device=part.device)
    cos, sin = rotation if rotation is not None else (None, None)
    q_gain, k_gain = gains if gains is not None else (None, None)
    group, width = n_heads // K, max(16, triton.next_power_of_2(H))
    _attend[(B * K, parts)](
        qkv_BXH, kv_BXSH, mask_BS, slopes_N, q_gain, k_gain, cos, sin, ends, places_B,
        slots_B, out_BN, part, most, total,
        H**-0.5, eps, n_heads, K, H, 2 * K * S * H, S * H, S,
        0 if mask_BS is None else mask_BS.shape[1], window or 0, parts, span, int(len(ends) > 1),
        GROUP=group, QUERIES=max(16, triton.next_power_of_2(group)), WIDTH=width, CHUNK=CHUNK,
        NORM=gains is not None, TURN=rotation is not None, WINDOW=window is not None,
        PARTS=triton.next_power_of_2(parts), num_warps=4,
    )  # fmt: skip
    if parts > 1:
        _combine[(B * n_heads,)](
            part, most, total, out_BN, H, parts,
            PARTS=triton.next_power_of_2(parts), WIDTH=width, num_warps=1,
        )  # fmt: skip
    return out_BN


def _parts(programs: int, n_places: int) -> int:
    """Return the number of parts the past is split into, so that a small batch fills the GPU."""
    chunks: int = triton.cdiv(n_places, CHUNK)
    return max(1, min(chunks, 256 // programs))
