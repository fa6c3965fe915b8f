"""Triton kernels of a compiled training step: rotated heads, the gated unit, and GELU.

Left to torch's compiler, a rotation reads and writes numbers one by one in the backward: rotating
back the gradients of 8,192 rows of 768 took 52 us on an H200, and 7 us here.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

# B batch, T length, M = B * T, N query heads, K key-value heads, R = (N + 2 K) H, H d_head, F d_ff

#: The formats that kernels compute in.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: A program's rows and heads, or its rows and columns of a gated unit: of a narrow or a wide one.
#: On an H200 other choices took up to a sixth longer.
ROWS, HEADS = 8, 8
NARROW, WIDE = (4, 256), (2, 1_024)
#: The compiler fills rows up to a multiple of its own, and would copy them for an operation that
#: does not say that it takes any layout.
ANY_LAYOUT = (torch.Tag.flexible_layout,)


def in_rows(x: Tensor) -> Tensor:
    """Return a tensor whose rows are equally far apart in memory: as it is, or a copy."""
    apart = [x.stride(axis) == x.shape[axis + 1] * x.stride(axis + 1) for axis in range(x.ndim - 2)]
    return x if x.stride(-1) == 1 and all(apart) else x.contiguous()


@triton.jit
def _turn(
    joined_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, n_rows, length, n_heads, n_kv_heads,
    joined_row, table_batch, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None, None]
    part = tl.program_id(1)
    i = tl.arange(0, BLOCK)[None, None, :]
    of_queries = tl.cdiv(n_heads, HEADS)
    of_keys = tl.cdiv(n_kv_heads, HEADS)
    if part < of_queries:
        ptr, batch, row, head = q_ptr, q_batch, q_row, q_head
        first, count, before = part * HEADS, n_heads, 0
    elif part < of_queries + of_keys:
        ptr, batch, row, head = k_ptr, k_batch, k_row, k_head
        first, count, before = (part - of_queries) * HEADS, n_kv_heads, n_heads
    else:
        ptr, batch, row, head = v_ptr, v_batch, v_row, v_head
        first = (part - of_queries - of_keys) * HEADS
        count, before = n_kv_heads, n_heads + n_kv_heads
    h = (first + tl.arange(0, HEADS))[None, :, None]
    there = (r < n_rows) & (h < count) & (i < HALF)
    b = r // length
    t = r % length
    inside = joined_ptr + r.to(tl.int64) * joined_row + (before + h) * 2 * HALF + i
    outside = ptr + b.to(tl.int64) * batch + t * row + h * head + i
    angle = b * table_batch + t * HALF + i
    in_table = (r < n_rows) & (i < HALF) & (part < of_queries + of_keys)
    cos = tl.load(cos_ptr + angle, in_table, 1.0)  # values stay as they are
    sin = tl.load(sin_ptr + angle, in_table, 0.0)
    if BACK:
        x = tl.load(outside, there, 0.0).to(tl.float32)
        y = tl.load(outside + HALF, there, 0.0).to(tl.float32)
        element = joined_ptr.dtype.element_ty
        tl.store(inside, (x * cos + y * sin).to(element), there)
        tl.store(inside + HALF, (y * cos - x * sin).to(element), there)
    else:
        x = tl.load(inside, there, 0.0).to(tl.float32)
        y = tl.load(inside + HALF, there, 0.0).to(tl.float32)
        element = ptr.dtype.element_ty
        tl.store(outside, (x * cos - y * sin).to(element), there)
        tl.store(outside + HALF, (y * cos + x * sin).to(element), there)


def _launch_turn(
    joined_BTR: Tensor,
    heads: tuple[Tensor, Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    back: bool,
) -> None:
    (B, T, _), (_, N, _, H), K = joined_BTR.shape, heads[0].shape, heads[1].shape[1]
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape[-1] == H // 2
    strides = [x.stride(axis) for x in heads for axis in (0, 2, 1)]
    grid = (triton.cdiv(B * T, ROWS), triton.cdiv(N, HEADS) + 2 * triton.cdiv(K, HEADS))
    _turn[grid](
        joined_BTR, *heads, cos, sin, B * T, T, N, K, joined_BTR.stride(1),
        0 if cos.ndim == 2 else T * (H // 2), *strides,
        HALF=H // 2, BLOCK=triton.next_power_of_2(H // 2), ROWS=ROWS, HEADS=HEADS, BACK=back,
        num_warps=4,
    )  # fmt: skip


@torch.library.custom_op("glassformer::turned_heads", mutates_args=(), tags=ANY_LAYOUT)
def turned_heads(
    joined_BTR: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q_BNTH and k_BKTH, rotated, and v_BKTH of a product that made them side by side.

    cos and sin are (T, H/2), or (B, 1, T, H/2) where positions differ by row, in float32.
    """
    heads = _new_heads(joined_BTR, n_heads, n_kv_heads)
    _launch_turn(in_rows(joined_BTR), heads, cos.contiguous(), sin.contiguous(), back=False)
    return heads


def _new_heads(joined_BTR: Tensor, n_heads: int, n_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    B, T, R = joined_BTR.shape
    H = R // (n_heads + 2 * n_kv_heads)
    q, k, v = (joined_BTR.new_empty(B, T, n, H) for n in (n_heads, n_kv_heads, n_kv_heads))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


turned_heads.register_fake(
    lambda joined_BTR, cos, sin, n_heads, n_kv_heads: _new_heads(joined_BTR, n_heads, n_kv_heads)
)


@torch.library.custom_op("glassformer::joined_heads", mutates_args=(), tags=ANY_LAYOUT)
def joined_heads(
    q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Return gradients side by side again, rotated back: the transpose of `turned_heads`."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q_BNTH, k_BKTH, v_BKTH))
    joined_BTR = _new_joined(q_BNTH, k_BKTH)
    _launch_turn(joined_BTR, (q, k, v), cos.contiguous(), sin.contiguous(), back=True)
    return joined_BTR


def _new_joined(q_BNTH: Tensor, k_BKTH: Tensor) -> Tensor:
    B, N, T, H = q_BNTH.shape
    return q_BNTH.new_empty(B, T, (N + 2 * k_BKTH.shape[1]) * H)


joined_heads.register_fake(lambda q_BNTH, k_BKTH, v_BKTH, cos, sin: _new_joined(q_BNTH, k_BKTH))


def _keep_table(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _turn_back(ctx, *gradients):
    return joined_heads(*gradients, *ctx.saved_tensors), None, None, None, None


turned_heads.register_autograd(_turn_back, setup_context=_keep_table)


# --- the gated unit -------------------------------------------------------------------------------


@triton.jit
def _gate(
    gate_ptr, up_ptr, hidden_ptr, d_gate_ptr, d_up_ptr, n_rows, width, gate_row, up_row, hidden_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    there = (r < n_rows) & (c < width)
    gate = tl.load(gate_ptr + r * gate_row + c, there, 0.0).to(tl.float32)
    up = tl.load(up_ptr + r * up_row + c, there, 0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    if BACK:
        grad = tl.load(hidden_ptr + r * hidden_row + c, there, 0.0).to(tl.float32)
        element = d_gate_ptr.dtype.element_ty
        slope = share * (1.0 + gate * (1.0 - share))
        tl.store(d_gate_ptr + r * width + c, (grad * up * slope).to(element), there)
        tl.store(d_up_ptr + r * width + c, (grad * gate * share).to(element), there)
    else:
        hidden = (gate * share * up).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + r * hidden_row + c, hidden, there)


def _launch_gate(
    gate: Tensor, up: Tensor, hidden: Tensor, grads: tuple[Tensor | None, Tensor | None]
) -> None:
    width = hidden.shape[-1]
    n_rows = hidden.numel() // width
    rows, columns = NARROW if width < WIDE[1] else WIDE
    grid = (triton.cdiv(n_rows, rows), triton.cdiv(width, columns))
    _gate[grid](
        gate, up, hidden, *grads, n_rows, width, gate.stride(-2), up.stride(-2), hidden.stride(-2),
        ROWS=rows, COLUMNS=columns, BACK=grads[0] is not None, num_warps=4,
    )  # fmt: skip


@torch.library.custom_op("glassformer::gated", mutates_args=(), tags=ANY_LAYOUT)
def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    hidden = _new_like(gate)
    _launch_gate(in_rows(gate), in_rows(up), hidden, (None, None))
    return hidden


def _new_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


gated.register_fake(lambda gate, up: _new_like(gate))


@torch.library.custom_op("glassformer::gated_backward", mutates_args=(), tags=ANY_LAYOUT)
def gated_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    made = _new_like(gate), _new_like(up)
    _launch_gate(in_rows(gate), in_rows(up), in_rows(grad), made)
    return made


gated_backward.register_fake(lambda gate, up, grad: (_new_like(gate), _new_like(up)))


def _keep_operands(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _ungate(ctx, grad):
    return gated_backward(*ctx.saved_tensors, grad)


gated.register_autograd(_ungate, setup_context=_keep_operands)


# --- GELU -----------------------------------------------------------------------------------------


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


#: Columns and rows that a program reads at once, its warps, and the programs that share the rows of
#: one block of columns, for each multiprocessor: forward, and backward, where a program holds more.
#: On an H200, 32,768 rows of 3,072 took 115 and 175 us, and 155 and 183 us with other numbers.
COLUMNS = 1_024
GELU, GELU_BACK = (4, 2, 16), (1, 4, 4)


@triton.jit
def _normal(x):
    """The standard normal distribution's share below x, and its density there.

    By Abramowitz and Stegun 7.1.26: within 1.5e-7, and the exponential serves both.
    """
    density = tl.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741
                  + t * (-1.453152027 + t * 1.061405429))))  # fmt: skip
    tail = 0.5 * series * density
    return tl.where(x < 0, tail, 1.0 - tail), density * 0.3989422804014327


@triton.jit
def _biased_gelu(
    wide_ptr, bias_ptr, hidden_ptr, grad_ptr, part_ptr, n_rows, width, wide_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    bias = tl.zeros((1, COLUMNS), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + c, c < width, 0.0).to(tl.float32)
    sums = tl.zeros((1, COLUMNS), tl.float32)
    for first in range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS):
        r = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        there = (r < n_rows) & (c < width)
        x = tl.load(wide_ptr + r * wide_row + c, there, 0.0).to(tl.float32) + bias
        share, density = _normal(x)
        if BACK:
            grad = tl.load(hidden_ptr + r * width + c, there, 0.0).to(tl.float32)
            dx = grad * (share + x * density)
            sums += tl.sum(dx, 0)[None, :]
            tl.store(grad_ptr + r * width + c, dx.to(grad_ptr.dtype.element_ty), there)
        else:
            tl.store(hidden_ptr + r * width + c, (x * share).to(hidden_ptr.dtype.element_ty), there)
    if BACK:
        tl.store(part_ptr + tl.program_id(0) * width + c, sums, c < width)


def _launch_gelu(
    wide: Tensor, bias_F: Tensor | None, hidden: Tensor, grad: Tensor | None, parts: Tensor | None
) -> None:
    width = wide.shape[-1]
    wide = wide.reshape(-1, width)
    wide = wide if wide.stride(-1) == 1 else wide.contiguous()
    rows, warps, programs = GELU if parts is None else GELU_BACK
    programs *= _multiprocessors(wide.device)
    if parts is None:
        programs = min(programs, triton.cdiv(len(wide), rows))
    _biased_gelu[(programs, triton.cdiv(width, COLUMNS))](
        wide, bias_F, hidden, grad, parts, len(wide), width, wide.stride(0),
        ROWS=rows, COLUMNS=COLUMNS, BACK=parts is not None, num_warps=warps,
    )  # fmt: skip


@torch.library.custom_op("glassformer::biased_gelu", mutates_args=())
def biased_gelu(wide: Tensor, bias_F: Tensor | None) -> Tensor:
    """Return gelu(wide + bias), exact, within 3e-7."""
    hidden = torch.empty_like(wide, memory_format=torch.contiguous_format)
    _launch_gelu(wide, bias_F, hidden, None, None)
    return hidden


biased_gelu.register_fake(
    lambda wide, bias_F: torch.empty_like(wide, memory_format=torch.contiguous_format)
)


@torch.library.custom_op("glassformer::biased_gelu_backward", mutates_args=())
def biased_gelu_backward(
    wide: Tensor, bias_F: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `wide`, and (P, F), which add up to the gradient of the bias."""
    made, parts = _gelu_shapes(wide)
    _launch_gelu(wide, bias_F, grad.contiguous(), made, parts)
    return made, parts


def _gelu_shapes(wide: Tensor) -> tuple[Tensor, Tensor]:
    programs = GELU_BACK[2] * _multiprocessors(wide.device)
    parts = wide.new_empty(programs, wide.shape[-1], dtype=torch.float32)
    return torch.empty_like(wide, memory_format=torch.contiguous_format), parts


biased_gelu_backward.register_fake(lambda wide, bias_F, grad: _gelu_shapes(wide))


def _back_through_gelu(ctx, grad):
    wide, bias_F = ctx.saved_tensors
    grad_wide, parts = biased_gelu_backward(wide, bias_F, grad)
    return grad_wide, None if bias_F is None else parts.sum(0).to(bias_F.dtype)


biased_gelu.register_autograd(_back_through_gelu, setup_context=_keep_operands)
