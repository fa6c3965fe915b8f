"""Triton kernels of the loss on a GPU: cross-entropy of rows of logits, and its gradient in place.

A row that one program can hold is read once and written once. A longer one is read twice: the first
pass keeps a running maximum and sum, the second replaces each logit by its gradient. Sums are in
float32.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# M rows, V classes, P >= V columns in memory

#: Columns that one program holds at most, and how many one of its warps does. With so few registers
#: for each thread a multiprocessor runs two programs: one computes while the other reads or writes.
HELD, HELD_BY_WARP, REGISTERS = 16_384, 1_024, 64
LOG2E = 1 / math.log(2)
#: Columns of a piece of a longer row, the pieces that are looked at together, and the warps: of
#: 50,257 classes, 4,736 rows took 329 us on an H200, and 353 to 415 us with other numbers.
BLOCK, PIECES, WARPS = 4_096, 2, 16


@triton.jit
def _finish(
    at, sums_ptr, row, target, weight, logit, lse, mean, classes, smoothing, SMOOTH: tl.constexpr
):
    """Write a row's losses, and the gradient of its target over that of any other class."""
    nll = lse - logit
    loss = nll
    if SMOOTH:
        loss = (1 - smoothing) * nll + smoothing * (lse - mean)
    tl.store(sums_ptr + row * 2, nll * weight)
    tl.store(sums_ptr + row * 2 + 1, loss * weight)
    wanted = 1.0 - smoothing + smoothing / classes
    tl.debug_barrier()  # every other column is written
    tl.store(at + target, ((tl.exp(logit - lse) - wanted) * weight).to(at.dtype.element_ty))


@triton.jit
def _loss_row(
    logits_ptr, stride, columns, classes, targets_ptr, weights_ptr, sums_ptr, smoothing,
    SMOOTH: tl.constexpr, BLOCK: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    weight = tl.load(weights_ptr + row)
    logit = tl.load(at + target).to(tl.float32)  # before any thread writes
    i = tl.arange(0, BLOCK)
    x = tl.load(at + i, i < classes, float("-inf")).to(tl.float32)
    most = tl.max(x, 0)
    mean = 0.0
    if SMOOTH:
        mean = tl.sum(tl.where(i < classes, x, 0.0), 0) / classes
    share = tl.exp2(x * LOG2E - most * LOG2E)
    total = tl.sum(share, 0)
    gradient = share * (weight / total)  # 0 in the filling
    if SMOOTH:
        gradient -= tl.where(i < classes, weight * smoothing / classes, 0.0)
    tl.store(at + i, gradient.to(logits_ptr.dtype.element_ty), i < columns)
    lse = most + tl.log(total)
    _finish(at, sums_ptr, row, target, weight, logit, lse, mean, classes, smoothing, SMOOTH)


@triton.jit
def _loss_long_row(
    logits_ptr, stride, columns, classes, targets_ptr, weights_ptr, sums_ptr, smoothing,
    SMOOTH: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    weight = tl.load(weights_ptr + row)
    logit = tl.load(at + target).to(tl.float32)  # before any thread writes
    # Powers of two: one instruction less for each number.
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    piece = tl.arange(0, PIECES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for number in range(tl.cdiv(classes, PIECES * BLOCK)):
        i = number * PIECES * BLOCK + piece
        x = tl.load(at + i, i < classes, float("-inf")).to(tl.float32)
        if SMOOTH:
            plain += tl.sum(tl.where(i < classes, x, 0.0), 0)
        higher = tl.maximum(top, tl.max(x, 0) * LOG2E)
        # A column that was empty so far has nothing to rescale: -inf - -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(x * LOG2E - base[None, :]), 0)
        top = higher
    most = tl.max(top, 0)
    sum_of_all = tl.sum(total * tl.exp2(top - most), 0)
    log2_sum = most + tl.log2(sum_of_all)
    for begin in range(0, columns, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        x = tl.load(at + i, i < classes, float("-inf")).to(tl.float32)
        gradient = tl.exp2(x * LOG2E - log2_sum) * weight  # 0 in the filling
        if SMOOTH:
            gradient -= tl.where(i < classes, weight * smoothing / classes, 0.0)
        tl.store(at + i, gradient.to(logits_ptr.dtype.element_ty), i < columns)
    lse, mean = log2_sum / LOG2E, tl.sum(plain, 0) / classes
    _finish(at, sums_ptr, row, target, weight, logit, lse, mean, classes, smoothing, SMOOTH)


@torch.library.custom_op("glassformer::loss_rows", mutates_args=("logits_MP",))
def loss_rows(
    logits_MP: Tensor, targets_M: Tensor, weights_M: Tensor, classes: int, smoothing: float
) -> Tensor:
    """Replace logits by the gradient of the weighted loss; return (M, 2): plain and smoothed loss.

    Columns from `classes` on are filling: they are not read, and their gradient is 0.
    """
    assert logits_MP.stride(1) == 1
    sums_M2 = torch.empty(len(logits_MP), 2, dtype=torch.float32, device=logits_MP.device)
    columns, smooth = logits_MP.shape[1], smoothing > 0
    given = logits_MP, logits_MP.stride(0), columns, classes, targets_M, weights_M, sums_M2
    if columns <= HELD:
        block = triton.next_power_of_2(columns)
        _loss_row[(len(logits_MP),)](
            *given, smoothing, SMOOTH=smooth, BLOCK=block, LOG2E=LOG2E,
            num_warps=max(1, block // HELD_BY_WARP), maxnreg=REGISTERS,
        )  # fmt: skip
    else:
        _loss_long_row[(len(logits_MP),)](
            *given, smoothing, SMOOTH=smooth, BLOCK=BLOCK, PIECES=PIECES, LOG2E=LOG2E,
            num_warps=WARPS,
        )  # fmt: skip
    return sums_M2


@loss_rows.register_fake
def _shapes(
    logits_MP: Tensor, targets_M: Tensor, weights_M: Tensor, classes: int, smoothing: float
) -> Tensor:
    return torch.empty(len(logits_MP), 2, dtype=torch.float32, device=logits_MP.device)
