"""Triton kernels of a training step: a residual sum with the norm after it, and biased GELU.

Forward, torch's compiler does as well. Backward, a norm's gradient joins that of the stream beside
it; the compiler makes a kernel of the sum and more of its half-precision copy and of the gradients
of gain and bias, where one kernel can read everything once. GELU's backward likewise leaves the
sums over rows that are the gradient of the bias before it. Sums over rows are in float32, one for
each program; the caller adds those up.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

# M rows, D d_model, F d_ff, P programs that share the rows

#: Numbers of a row, or of several short ones, that a program holds at once, and its warps for each
#: so many numbers. Programs that share all rows, for each multiprocessor. On an H200, 32,768 rows
#: of 768 took 108 us backward, and up to 122 us with other numbers.
HELD, HELD_BY_WARP, PROGRAMS = 1_024, 512, 8


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _rows(width: int) -> dict[str, int]:
    """Return how a program is run that reads complete rows."""
    block: int = triton.next_power_of_2(width)
    held = max(HELD, block)
    return {"ROWS": held // block, "BLOCK": block, "num_warps": min(16, held // HELD_BY_WARP)}


@triton.jit
def _sum_and_norm(
    x_ptr, added_ptr, gain_ptr, bias_ptr, sum_ptr, out_ptr, mean_ptr, rate_ptr, n_rows, width, eps,
    LAYER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    there = (r < n_rows) & (c < width)
    at = r.to(tl.int64) * width + c
    x = tl.load(x_ptr + at, there, 0.0) + tl.load(added_ptr + at, there, 0.0).to(tl.float32)
    gain = tl.load(gain_ptr + c, c < width, 0.0).to(tl.float32)
    tl.store(sum_ptr + at, x, there)
    if LAYER:
        mean = (tl.sum(x, 1) / width)[:, None]
        tl.store(mean_ptr + r, mean, r < n_rows)
        x = tl.where(there, x - mean, 0.0)
    rate = tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    tl.store(rate_ptr + r, rate, r < n_rows)
    y = x * rate * gain
    if bias_ptr is not None:
        y += tl.load(bias_ptr + c, c < width, 0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), there)


@torch.library.custom_op("glassformer::sum_and_norm", mutates_args=())
def sum_and_norm(
    x: Tensor,
    added: Tensor,
    gain_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    layer: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x + added in float32, its norm in `dtype`, and each row's mean and rate.

    The norm is a LayerNorm if `layer`, else an RMSNorm, whose means are empty.
    """
    made, normed, mean, rate = shapes = _sum_shapes(x, layer, dtype)
    D = x.shape[-1]
    M, how = x.numel() // D, _rows(D)
    _sum_and_norm[(triton.cdiv(M, how["ROWS"]),)](
        x.contiguous(), added.contiguous(), gain_D, bias_D, made, normed, mean, rate, M, D, eps,
        LAYER=layer, **how,
    )  # fmt: skip
    return shapes


def _sum_shapes(
    x: Tensor, layer: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    rate = x.new_empty(*x.shape[:-1], 1)
    return (
        made,
        torch.empty_like(made, dtype=dtype),
        torch.empty_like(rate) if layer else x.new_empty(0),
        rate,
    )


sum_and_norm.register_fake(
    lambda x, added, gain_D, bias_D, eps, layer, dtype: _sum_shapes(x, layer, dtype)
)


@triton.jit
def _norm_back(
    grad_ptr, x_ptr, gain_ptr, mean_ptr, rate_ptr, beside_ptr, out_ptr, half_ptr, part_ptr,
    n_rows, width, LAYER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # forward: y = n gain + bias, n = (x - mean) rate, rate = (var + eps)^-1/2
    # =>  dn = dy gain,  dx = rate (dn - n mean(dn n) - mean(dn))
    #     dgain = sum(dy n),  dbias = sum(dy)
    # RMS: without mean(dn) and dbias. The gradient of the stream beside it is added to dx.
    c = tl.arange(0, BLOCK)[None, :]
    gain = tl.load(gain_ptr + c, c < width, 0.0).to(tl.float32)
    gain_sum = tl.zeros((1, BLOCK), tl.float32)
    bias_sum = tl.zeros((1, BLOCK), tl.float32)
    for first in range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS):
        r = first + tl.arange(0, ROWS)[:, None]
        there = (r < n_rows) & (c < width)
        at = r.to(tl.int64) * width + c
        grad = tl.load(grad_ptr + at, there, 0.0).to(tl.float32)
        x = tl.load(x_ptr + at, there, 0.0).to(tl.float32)
        dx = tl.load(beside_ptr + at, there, 0.0).to(tl.float32)
        rate = tl.load(rate_ptr + r, r < n_rows, 0.0)
        if LAYER:
            x = tl.where(there, x - tl.load(mean_ptr + r, r < n_rows, 0.0), 0.0)
        n = x * rate
        dn = grad * gain
        inner = dn - n * (tl.sum(dn * n, 1) / width)[:, None]
        if LAYER:
            inner -= (tl.sum(dn, 1) / width)[:, None]
            bias_sum += tl.sum(grad, 0)[None, :]
        dx += inner * rate
        gain_sum += tl.sum(grad * n, 0)[None, :]
        tl.store(out_ptr + at, dx, there)
        if half_ptr is not None:
            tl.store(half_ptr + at, dx.to(half_ptr.dtype.element_ty), there)
    sums = part_ptr + tl.program_id(0) * (2 if LAYER else 1) * width + c
    tl.store(sums, gain_sum, c < width)
    if LAYER:
        tl.store(sums + width, bias_sum, c < width)


@torch.library.custom_op("glassformer::norm_backward", mutates_args=())
def norm_backward(
    grad: Tensor,
    x: Tensor,
    gain_D: Tensor,
    mean: Tensor,
    rate: Tensor,
    beside: Tensor,
    half: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of x (..., D), the same in half precision, and (P, 1 or 2, D), which add
    up to the gradients of gain and bias.

    `grad` is that of the norm's output, `beside` that of x itself. The norm is an RMSNorm if `mean`
    is empty, else a LayerNorm. Without `half` the second result is empty.
    """
    made, copy, parts = shapes = _norm_shapes(x, mean, half)
    D = x.shape[-1]
    _norm_back[(len(parts),)](
        grad.contiguous(), x.contiguous(), gain_D, mean, rate.contiguous(), beside.contiguous(),
        made, copy if half is not None else None, parts, x.numel() // D, D,
        LAYER=mean.numel() > 0, **_rows(D),
    )  # fmt: skip
    return shapes


def _norm_shapes(
    x: Tensor, mean: Tensor, half: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    kinds = 2 if mean.numel() else 1
    parts = x.new_empty(PROGRAMS * _multiprocessors(x.device), kinds, x.shape[-1])
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    copy = x.new_empty(0) if half is None else torch.empty_like(made, dtype=half)
    return made, copy, parts


norm_backward.register_fake(
    lambda grad, x, gain_D, mean, rate, beside, half: _norm_shapes(x, mean, half)
)


def _keep_sum(ctx, inputs, output) -> None:
    x, added, gain_D, bias_D = inputs[:4]
    made, _, mean, rate = output
    ctx.save_for_backward(made, gain_D, mean, rate)
    ctx.half = None if added.dtype == x.dtype else added.dtype
    ctx.biased = bias_D is not None


def _back_through_norm(ctx, beside, grad, *_):
    x, gain_D, mean, rate = ctx.saved_tensors
    made, copy, parts = norm_backward(grad, x, gain_D, mean, rate, beside, ctx.half)
    sums = parts.sum(0).to(gain_D.dtype)
    bias = sums[1] if ctx.biased else None
    return made, made if ctx.half is None else copy, sums[0], bias, None, None, None


sum_and_norm.register_autograd(_back_through_norm, setup_context=_keep_sum)


# --- GELU -----------------------------------------------------------------------------------------

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


def _keep_operands(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _back_through_gelu(ctx, grad):
    wide, bias_F = ctx.saved_tensors
    grad_wide, parts = biased_gelu_backward(wide, bias_F, grad)
    return grad_wide, None if bias_F is None else parts.sum(0).to(bias_F.dtype)


biased_gelu.register_autograd(_back_through_gelu, setup_context=_keep_operands)
