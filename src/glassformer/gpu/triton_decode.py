"""Triton kernels of a decoding step on a GPU: products of one row, norms, attention of one query.

They read their operands once and keep sums in float32. The product can normalise its input first,
apply an activation or a gate, and add a residual; attention rotates and stores the new key itself
and reads the length from memory, so that one launch, and one CUDA graph, serves every step.

On a GPU from Hopper on, a kernel starts while the one before it still runs (programmatic dependent
launch): it loads its weights, which no kernel writes, and then waits for the other's results.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from glassformer.gpu import cuda_attend

# B rows, I inputs, O outputs, N query heads, K key-value heads, X = N + 2 K, H d_head,
# S positions of the cache, P parts of the past

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_PARTS = 8  # of a past that the product after the attention puts together itself


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Return True if a kernel may start before the one before it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class Parts(NamedTuple):
    """Attention over parts of the past, to be put together: sums, maxima and totals, float32."""

    sums_NPH: Tensor
    most_NP: Tensor
    total_NP: Tensor


@triton.jit
def await_inputs(EARLY: tl.constexpr):
    """Let the next kernel start, and wait until everything before this one is written."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def _put_together(
    part_ptr, most_ptr, sum_ptr, n_heads, n_parts,
    HEADS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Attention's output of some heads, one after the other, from its parts."""
    n = tl.arange(0, HEADS)
    p = tl.arange(0, PARTS)
    h = tl.arange(0, WIDTH)
    there = (n < n_heads)[:, None] & (p < n_parts)[None, :]
    at = n[:, None] * n_parts + p[None, :]
    most = tl.load(most_ptr + at, there, float("-inf"))
    total = tl.load(sum_ptr + at, there, 0.0)
    acc = tl.load(part_ptr + at[:, :, None] * WIDTH + h[None, None, :], there[:, :, None], 0.0)
    top = tl.max(most, 1)
    share = tl.exp(most - tl.where(top == float("-inf"), 0.0, top)[:, None])
    whole = tl.sum(total * share, 1)
    share = share / tl.where(whole == 0.0, 1.0, whole)[:, None]
    return tl.reshape(tl.sum(acc * share[:, :, None], 1), (HEADS * WIDTH,))


@triton.jit
def _product(
    x_ptr, most_ptr, sum_ptr, w_ptr, bias_ptr, gain_ptr, shift_ptr, residual_ptr, out_ptr,
    n_out, eps, n_parts,
    n_in: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, WHOLE_I: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_I)
    real = o < n_out
    at = w_ptr + o.to(tl.int64)[:, None] * n_in
    if ACTIVATION == "gate":  # gate and up of an output are neighbours
        at = w_ptr + 2 * o.to(tl.int64)[:, None] * n_in
    # What no kernel writes is loaded before the wait: the weights of the first inputs, mostly all.
    inside = real[:, None] & (i < n_in)[None, :]
    weight = tl.load(at + i[None, :], inside, 0.0, eviction_policy="evict_first")
    up = weight
    if ACTIVATION == "gate":
        at_up = at + n_in
        up = tl.load(at_up + i[None, :], inside, 0.0, eviction_policy="evict_first")
    bias = tl.zeros((BLOCK_O,), tl.float32)
    bias_up = tl.zeros((BLOCK_O,), tl.float32)
    if bias_ptr is not None:
        if ACTIVATION == "gate":
            bias = tl.load(bias_ptr + 2 * o, real, 0.0).to(tl.float32)
            bias_up = tl.load(bias_ptr + 2 * o + 1, real, 0.0).to(tl.float32)
        else:
            bias = tl.load(bias_ptr + o, real, 0.0).to(tl.float32)
    await_inputs(EARLY)
    residual = tl.zeros((BLOCK_O,), tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + o, real, 0.0).to(tl.float32)
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
    for begin in tl.static_range(0, n_in, BLOCK_I):
        i = begin + tl.arange(0, BLOCK_I)
        ok = i < n_in
        if begin > 0:
            inside = real[:, None] & ok[None, :]
            weight = tl.load(at + i[None, :], inside, 0.0, eviction_policy="evict_first")
            if ACTIVATION == "gate":
                up = tl.load(at_up + i[None, :], inside, 0.0, eviction_policy="evict_first")
        if PARTS > 0:
            x = _put_together(x_ptr, most_ptr, sum_ptr, n_in // WIDTH, n_parts,
                              HEADS=BLOCK_I // WIDTH, PARTS=PARTS, WIDTH=WIDTH)  # fmt: skip
            x = x.to(w_ptr.dtype.element_ty).to(tl.float32)
        else:
            x = tl.load(x_ptr + i, ok, 0.0).to(tl.float32)
        if NORM != "":
            x = (x - mean) * rate * tl.load(gain_ptr + i, ok, 0.0).to(tl.float32)
            if NORM == "layer":
                x += tl.load(shift_ptr + i, ok, 0.0).to(tl.float32)
        acc += weight.to(tl.float32) * x[None, :]
        if ACTIVATION == "gate":
            acc_up += up.to(tl.float32) * x[None, :]
    out = tl.sum(acc, 1) + bias
    if ACTIVATION == "gate":
        out = out * tl.sigmoid(out) * (tl.sum(acc_up, 1) + bias_up)
    elif ACTIVATION == "relu":
        out = tl.maximum(out, 0.0)
    elif ACTIVATION == "gelu":
        out = 0.5 * out * (1.0 + tl.erf(out * 0.7071067811865476))
    tl.store(out_ptr + o, (out + residual).to(out_ptr.dtype.element_ty), real)


#: What a product can do to its outputs; "gate" is silu(even outputs) * odd outputs.
ACTIVATIONS = ("", "gate", "relu", "gelu")


def product(
    x_1I: "Tensor | Parts",
    weight_OI: Tensor,
    bias_O: Tensor | None,
    *,
    norm: str = "",
    gain_I: Tensor | None = None,
    shift_I: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    residual_1O: Tensor | None = None,
) -> Tensor:
    """Return activation(norm(x) W^T + b) + residual of one row."""
    n_in = weight_OI.shape[1]
    assert weight_OI.is_contiguous() and activation in ACTIVATIONS
    n_out = weight_OI.shape[0] // 2 if activation == "gate" else weight_OI.shape[0]
    parts, width, most, total = 0, 1, None, None
    if isinstance(x_1I, Parts):
        assert norm == ""
        x_1I, most, total = x_1I
        parts, width = x_1I.shape[1:]
    assert x_1I.is_contiguous() and x_1I.numel() == n_in * max(1, parts)
    out_1O = weight_OI.new_empty(1, n_out)
    block_out, block_in, warps = _tile(n_in, n_out, activation == "gate", parts > 0)
    assert parts == 0 or block_in >= n_in
    early = overlaps(weight_OI.device)
    _product[(triton.cdiv(n_out, block_out),)](
        x_1I, most, total, weight_OI, bias_O, gain_I, shift_I, residual_1O, out_1O,
        n_out, eps, parts,
        n_in=n_in, NORM=norm, ACTIVATION=activation,
        PARTS=triton.next_power_of_2(parts) if parts else 0, WIDTH=width,
        BLOCK_O=block_out, BLOCK_I=block_in, WHOLE_I=triton.next_power_of_2(n_in),
        EARLY=early, num_warps=warps, launch_pdl=early,
    )  # fmt: skip
    return out_1O


def _tile(n_in: int, n_out: int, gated: bool, in_parts: bool) -> tuple[int, int, int]:
    """Return the outputs and inputs that a program reads at once, and its warps.

    The best of a search over the products of a 0.5 B model on an H200: 5 shapes, 80 tiles.
    """
    whole = triton.next_power_of_2(n_in)
    if in_parts:
        return 4, whole, 4
    if n_in > 1024:
        return 2, min(8192, whole), 8
    return 2 if n_out < 4096 or gated else 4, whole, 1


@triton.jit
def _norm(
    x_ptr, gain_ptr, shift_ptr, out_ptr, eps, width,
    LAYER: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    ok = i < width
    gain = tl.load(gain_ptr + i, ok, 0.0).to(tl.float32)
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64) * width
    x = tl.load(x_ptr + row + i, ok, 0.0).to(tl.float32)
    if LAYER:
        x = tl.where(ok, x - tl.sum(x, 0) / width, 0.0)
    out = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * gain
    if LAYER:
        out += tl.load(shift_ptr + i, ok, 0.0).to(tl.float32)
    tl.store(out_ptr + row + i, out.to(out_ptr.dtype.element_ty), ok)


def normalise(
    x_BI: Tensor, *, norm: str, gain_I: Tensor, shift_I: Tensor | None, eps: float
) -> Tensor:
    """Return the LayerNorm ("layer") or RMSNorm ("rms") of each row."""
    assert x_BI.is_contiguous() and norm in ("layer", "rms")
    B, width = x_BI.shape
    out_BI, early = torch.empty_like(x_BI), overlaps(x_BI.device)
    _norm[(B,)](
        x_BI, gain_I, shift_I, out_BI, eps, width,
        LAYER=norm == "layer", BLOCK=triton.next_power_of_2(width), EARLY=early,
        num_warps=4 if width > 1024 else 2, launch_pdl=early,
    )  # fmt: skip
    return out_BI


@triton.jit
def _gate(wide_ptr, out_ptr, d_ff, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    b = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    both = wide_ptr + b * 2 * d_ff + 2 * f[:, None] + tl.arange(0, 2)[None, :]
    gate, up = tl.split(tl.load(both, (f < d_ff)[:, None], 0.0).to(tl.float32))
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + b * d_ff + f, out.to(out_ptr.dtype.element_ty), f < d_ff)


def gate(wide_BF: Tensor) -> Tensor:
    """Return silu(even columns) * odd columns."""
    B, d_ff = len(wide_BF), wide_BF.shape[1] // 2
    assert wide_BF.is_contiguous()
    out_BF, early = wide_BF.new_empty(B, d_ff), overlaps(wide_BF.device)
    _gate[(B, triton.cdiv(d_ff, 1024))](
        wide_BF, out_BF, d_ff, BLOCK=1024, EARLY=early, launch_pdl=early
    )
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
def _past(
    key_ptr, value_ptr, line_ptr, begin, b, slot, stored, h, d_head, kv_row, n_places,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Keys and values of some positions, of those that are stored."""
    s = begin + tl.arange(0, CHUNK)
    line = slot
    if line_ptr is not None:  # a beam's past lies in the rows of those it continues
        line = tl.load(line_ptr + b * n_places + s, s < stored, 0).to(tl.int64)
    at = (line * kv_row + s.to(tl.int64) * d_head)[:, None] + h[None, :]
    held = (s < stored)[:, None] & (h < d_head)[None, :]
    return tl.load(key_ptr + at, held, 0.0), tl.load(value_ptr + at, held, 0.0)


@triton.jit
def _attend(
    q_ptr, new_ptr, key_ptr, value_ptr, mask_ptr, slope_ptr, q_gain_ptr, k_gain_ptr, cos_ptr,
    sin_ptr, end_ptr, place_ptr, slot_ptr, source_ptr, line_ptr, out_ptr, part_ptr, most_ptr,
    sum_ptr,
    scale, eps, n_heads, n_kv, d_head, q_row, kv_row, kv_head, n_places, n_mask, window, n_parts,
    span, end_step,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    NORM: tl.constexpr, TURN: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) // n_kv
    head = tl.program_id(0) % n_kv
    part = tl.program_id(1)
    h = tl.arange(0, WIDTH)
    inside = h < d_head
    g = tl.arange(0, QUERIES)
    dtype = key_ptr.dtype.element_ty
    end = tl.zeros((), tl.int64) + n_places
    if end_ptr is not None:
        end = tl.load(end_ptr + b * end_step)
    slot = b.to(tl.int64)
    if slot_ptr is not None:
        slot = tl.load(slot_ptr + b).to(tl.int64)
    source = slot
    if source_ptr is not None:
        source = tl.load(source_ptr + b).to(tl.int64)
    cos = tl.zeros((WIDTH,), tl.float32)
    sin = tl.zeros((WIDTH,), tl.float32)
    if TURN:
        place = tl.load(place_ptr + b).to(tl.int64)
        cos = tl.load(cos_ptr + place * d_head + h, inside, 0.0).to(tl.float32)
        sin = tl.load(sin_ptr + place * d_head + h, inside, 0.0).to(tl.float32)
    slope = tl.zeros((QUERIES,), tl.float32)
    if slope_ptr is not None:
        slope = tl.load(slope_ptr + head * GROUP + g, g < GROUP, 0.0).to(tl.float32)
    key_ptr += head * kv_head
    value_ptr += head * kv_head
    first = part * span
    last = tl.minimum(first + span, end)
    lowest = tl.zeros((), end.dtype)
    if WINDOW:
        lowest = tl.maximum(end - window, 0)
        first = tl.maximum(first, lowest // CHUNK * CHUNK)
    stored = end  # positions whose keys and values are in memory
    if new_ptr is not None:
        stored = end - 1
    # Lengths, positions and the past were written before this step: they are read before the wait.
    next_key, next_value = _past(key_ptr, value_ptr, line_ptr, first, b, slot, stored, h, d_head,
                                 kv_row, n_places, CHUNK=CHUNK)  # fmt: skip
    await_inputs(EARLY)
    q_ok = (g < GROUP)[:, None] & inside[None, :]
    q = _turned(q_ptr + b * q_row + (head * GROUP + g)[:, None] * d_head, h, q_ok, q_gain_ptr,
                cos, sin, eps, d_head, NORM=NORM, TURN=TURN).to(dtype)  # fmt: skip
    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, WIDTH), tl.float32)
    if new_ptr is not None:
        owner = (stored >= part * span) & (stored < part * span + span)
        one = tl.arange(0, 1)
        key_ok = owner & (one == 0)[:, None] & inside[None, :]
        row_ptr = new_ptr + b * q_row
        k_new = _turned(row_ptr + (head + one)[:, None] * d_head, h, key_ok, k_gain_ptr, cos, sin,
                        eps, d_head, NORM=NORM, TURN=TURN).to(dtype)  # fmt: skip
        v_new = tl.load(row_ptr + (n_kv + head + one)[:, None] * d_head + h[None, :], key_ok, 0.0)
        v_new = v_new.to(dtype)
        here = slot * kv_row + stored * d_head + one[:, None] + h[None, :]
        tl.store(key_ptr + here, k_new, key_ok)
        tl.store(value_ptr + here, v_new, key_ok)
    for begin in range(first, last, CHUNK):
        s = begin + tl.arange(0, CHUNK)
        seen = s < end
        if WINDOW:
            seen = seen & (s >= lowest)
        key, value = next_key, next_value
        next_key, next_value = _past(key_ptr, value_ptr, line_ptr, begin + CHUNK, b, slot,
                                     tl.minimum(stored, last), h, d_head, kv_row, n_places,
                                     CHUNK=CHUNK)  # fmt: skip
        if new_ptr is not None:
            fresh = (s == stored)[:, None]
            key = tl.where(fresh, k_new, key)
            value = tl.where(fresh, v_new, value)
        score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        if mask_ptr is not None:
            added = tl.load(mask_ptr + source * n_mask + s, s < n_mask, 0.0)
            score += added.to(tl.float32)[None, :]
        if slope_ptr is not None:  # ALiBi: columns are as far apart as the positions they hold
            score -= slope[:, None] * (stored - s).to(tl.float32)[None, :]
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
    PARTS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    p = tl.arange(0, PARTS)
    h = tl.arange(0, WIDTH)
    there = p < n_parts
    await_inputs(EARLY)
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
    sources_B: Tensor | None = None,
    lines_BS: Tensor | None = None,
    in_parts: bool = False,
) -> "Tensor | Parts":
    """Return attention (B, N H) of one new query per row; store its key and value at end - 1.

    `ends` is one end for all rows, or each row's own. Row b of the batch is row b of the memory, or
    `slots_B[b]` of it; no two rows may write to one place. With `lines_BS` position s of row b is
    read from row `lines_BS[b, s]`, and its mask is row `sources_B[b]`.
    `rotation` is (cos, sin) of every position, both halves, sin's first half negated; `gains` are
    those of the queries' and keys' RMS norm. `mask_BS` is added to the scores, and with `slopes_N`
    ALiBi's bias -slope * distance. With `in_parts` the result of a single row may be in parts.
    """
    X, K = qkv_BXH.shape[1], kv_BXSH.shape[1] // 2
    assert kv_BXSH.is_contiguous() and qkv_BXH.is_contiguous() and n_heads + 2 * K == X
    assert len(ends) in (1, len(qkv_BXH)) and (lines_BS is None or lines_BS.is_contiguous())
    if cuda_attend.takes(
        qkv_BXH, kv_BXSH, n_heads=n_heads, rotation=rotation, gains=gains, mask_BS=mask_BS,
        slopes_N=slopes_N,
    ):  # fmt: skip
        return cuda_attend.attend(
            qkv_BXH, kv_BXSH, ends, n_heads=n_heads, places_B=places_B, rotation=rotation,
            gains=gains, eps=eps, window=window, mask_BS=mask_BS, slopes_N=slopes_N,
            slots_B=slots_B, sources_B=sources_B, lines_BS=lines_BS,
        )  # fmt: skip
    return _attention(
        qkv_BXH, qkv_BXH[:, n_heads:], kv_BXSH[:, :K], kv_BXSH[:, K:], ends,
        n_heads=n_heads, places_B=places_B, rotation=rotation, gains=gains, eps=eps, window=window,
        mask_BS=mask_BS, slopes_N=slopes_N, slots_B=slots_B,
        sources_B=sources_B, lines_BS=lines_BS, in_parts=in_parts,
    )  # fmt: skip


@triton.jit
def _turn(
    qkv_ptr, kv_ptr, q_gain_ptr, k_gain_ptr, cos_ptr, sin_ptr, out_ptr,
    eps, length, n_heads, n_kv, d_head, kv_row, kv_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // length
    t = row % length
    n = tl.arange(0, HEADS)
    h = tl.arange(0, WIDTH)
    half = (h + d_head // 2) % d_head
    inside = h < d_head
    n_turned = n_heads + n_kv
    ok = (n < n_turned + n_kv)[:, None] & inside[None, :]
    base = qkv_ptr + (row * (n_turned + n_kv) + n[:, None]) * d_head
    given = tl.load(base + h[None, :], ok, 0.0)
    x = given.to(tl.float32)
    other = tl.load(base + half[None, :], ok, 0.0).to(tl.float32)
    if NORM:
        rate = tl.rsqrt(tl.sum(x * x, 1) / d_head + eps)[:, None]
        query = (n < n_heads)[:, None]
        gain = tl.where(query, tl.load(q_gain_ptr + h, inside, 0.0)[None, :],
                        tl.load(k_gain_ptr + h, inside, 0.0)[None, :])  # fmt: skip
        gain_half = tl.where(query, tl.load(q_gain_ptr + half, inside, 0.0)[None, :],
                             tl.load(k_gain_ptr + half, inside, 0.0)[None, :])  # fmt: skip
        x = x * rate * gain.to(tl.float32)
        other = other * rate * gain_half.to(tl.float32)
    if TURN:
        cos = tl.load(cos_ptr + t * d_head + h, inside, 0.0).to(tl.float32)
        sin = tl.load(sin_ptr + t * d_head + h, inside, 0.0).to(tl.float32)
        x = x * cos[None, :] + other * sin[None, :]
    turned = (n < n_turned)[:, None]
    made = tl.where(turned, x.to(given.dtype), given)
    to_out = out_ptr + (row * n_turned + n[:, None]) * d_head + h[None, :]
    tl.store(to_out, made, ok & turned)
    kept = kv_ptr + b * kv_row + (n - n_heads).to(tl.int64)[:, None] * kv_head + t * d_head
    tl.store(kept + h[None, :], made, ok & (n >= n_heads)[:, None])


def turn(
    qkv_RXH: Tensor,
    kv_BXSH: Tensor,
    *,
    length: int,
    n_heads: int,
    rotation: tuple[Tensor, Tensor] | None,
    gains: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Return queries and keys (R, N + K, H) of prompts of one length, normalised and rotated.

    Row r is position r % length of sequence r // length, whose keys and values are stored. The
    arguments are those of `attend`.
    """
    (R, X, H), K = qkv_RXH.shape, kv_BXSH.shape[1] // 2
    assert kv_BXSH.is_contiguous() and qkv_RXH.is_contiguous() and n_heads + 2 * K == X
    out_RYH = qkv_RXH.new_empty(R, n_heads + K, H)
    cos, sin = rotation if rotation is not None else (None, None)
    q_gain, k_gain = gains if gains is not None else (None, None)
    _turn[(R,)](
        qkv_RXH, kv_BXSH, q_gain, k_gain, cos, sin, out_RYH,
        eps, length, n_heads, K, H, kv_BXSH.stride(0), kv_BXSH.stride(1),
        HEADS=triton.next_power_of_2(X), WIDTH=max(16, triton.next_power_of_2(H)),
        NORM=gains is not None, TURN=rotation is not None, num_warps=4,
    )  # fmt: skip
    return out_RYH


def attend_source(
    q_BNH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    *,
    mask_BS: Tensor | None,
    sources_B: Tensor | None = None,
    in_parts: bool = False,
) -> "Tensor | Parts":
    """Return attention (B, N H) of one query per row to all keys of its source.

    Row b reads row b of keys, values and the mask, or row `sources_B[b]`.
    """
    assert q_BNH.is_contiguous() and k_BKSH.is_contiguous() and v_BKSH.is_contiguous()
    return _attention(
        q_BNH, None, k_BKSH, v_BKSH, None,
        n_heads=q_BNH.shape[1], places_B=None, rotation=None, gains=None, eps=0.0, window=None,
        mask_BS=mask_BS, slopes_N=None, slots_B=sources_B, sources_B=sources_B, lines_BS=None,
        in_parts=in_parts,
    )  # fmt: skip


def _attention(
    q_BXH: Tensor,
    new_BXH: Tensor | None,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    ends: Tensor | None,
    *,
    n_heads: int,
    places_B: Tensor | None,
    rotation: tuple[Tensor, Tensor] | None,
    gains: tuple[Tensor, Tensor] | None,
    eps: float,
    window: int | None,
    mask_BS: Tensor | None,
    slopes_N: Tensor | None,
    slots_B: Tensor | None,
    sources_B: Tensor | None,
    lines_BS: Tensor | None,
    in_parts: bool,
) -> "Tensor | Parts":
    B, X, H = q_BXH.shape
    K, S = k_BKSH.shape[1:3]
    assert mask_BS is None or mask_BS.shape[0] == 1 or mask_BS.is_contiguous()
    group, width = n_heads // K, max(16, triton.next_power_of_2(H))
    chunk, warps = _chunk(group, B * K, S)
    span = _span(B, K, S, chunk)
    parts = triton.cdiv(S, span)
    out_BN = q_BXH.new_empty(B, n_heads * H)
    made = Parts(out_BN, out_BN, out_BN)
    if parts > 1:
        queries = B * n_heads
        size = (queries, parts, H + 2)
        whole = torch.empty(size, dtype=torch.float32, device=out_BN.device).flatten()
        sums, most, total = whole.split((queries * parts * H, *(queries * parts,) * 2))
        made = Parts(sums.view(queries, parts, H), most, total)
    cos, sin = rotation if rotation is not None else (None, None)
    q_gain, k_gain = gains if gains is not None else (None, None)
    rounded, early = triton.next_power_of_2(parts), overlaps(out_BN.device)
    _attend[(B * K, parts)](
        q_BXH, new_BXH, k_BKSH, v_BKSH, mask_BS, slopes_N, q_gain, k_gain, cos, sin, ends, places_B,
        slots_B, sources_B, lines_BS, out_BN, *made,
        H**-0.5, eps, n_heads, K, H, X * H, k_BKSH.stride(0), S * H,
        S if lines_BS is None else lines_BS.shape[1], 0 if mask_BS is None else mask_BS.shape[1],
        window or 0, parts, span, int(ends is not None and len(ends) > 1),
        GROUP=group, QUERIES=max(16, triton.next_power_of_2(group)), WIDTH=width, CHUNK=chunk,
        NORM=gains is not None, TURN=rotation is not None, WINDOW=window is not None,
        PARTS=rounded, EARLY=early, num_warps=warps, launch_pdl=early,
    )  # fmt: skip
    if parts == 1:
        return out_BN
    if in_parts and B == 1 and parts <= MOST_PARTS and width == H:
        return made
    _combine[(B * n_heads,)](
        *made, out_BN, H, parts,
        PARTS=rounded, WIDTH=width, EARLY=early, num_warps=1, launch_pdl=early,
    )  # fmt: skip
    return out_BN


def _chunk(group: int, programs: int, n_places: int) -> tuple[int, int]:
    """Return the positions that a program reads at once, and its warps, as measured on an H200.

    Many programs of one query each hide each other's waiting best if they are small; those of
    several queries, if they read a long past in few pieces.
    """
    if group > 1 and programs >= 256 and n_places >= 256:
        return 128, 4
    if group > 1 or programs < 256:
        return 64, 4
    return 32, 2 if programs < 1024 else 1


def _span(batch: int, n_kv: int, n_places: int, chunk: int) -> int:
    """Return the positions of a part of the past: a small batch needs parts to fill the GPU."""
    chunks: int = triton.cdiv(n_places, chunk)
    parts = max(1, min(chunks, 256 // (batch * n_kv)))
    if batch == 1 and chunks <= 4 * MOST_PARTS:
        parts = min(parts, MOST_PARTS)
    return chunk * int(triton.cdiv(chunks, parts))
