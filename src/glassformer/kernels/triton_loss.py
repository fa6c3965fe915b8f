"""Triton kernels of the loss on a GPU: cross-entropy of rows of logits, and its gradient in place.

A row that one program can hold is read once and written once. A longer one is read twice: the first
pass keeps a running maximum and sum, the second replaces each logit by its gradient. Sums are in
float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# M rows, V classes, P >= V columns in memory

#: Columns that one program holds at most, and how many one of its warps does.
HELD, HELD_BY_WARP = 16_384, 1_024
#: Columns of a piece of a longer row, the pieces that are looked at together, and the warps.
BLOCK, PIECES, WARPS = 2_048, 4, 8


@triton.jit
def _loss_row(
    logits_ptr, stride, columns, classes, targets_ptr, weights_ptr, sums_ptr, smoothing,
    SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    weight = tl.load(weights_ptr + row)
    wanted_logit = tl.load(at + target).to(tl.float32)  # before any thread writes
    i = tl.arange(0, BLOCK)
    x = tl.load(at + i, i < classes, float("-inf")).to(tl.float32)
    most = tl.max(x, 0)
    share = tl.exp(x - most)
    total = tl.sum(share, 0)
    lse = most + tl.log(total)
    nll = lse - wanted_logit
    tl.store(sums_ptr + row * 2, nll * weight)
    loss = nll
    if SMOOTH:
        mean = tl.sum(tl.where(i < classes, x, 0.0), 0) / classes
        loss = (1 - smoothing) * nll + smoothing * (lse - mean)
    tl.store(sums_ptr + row * 2 + 1, loss * weight)
    wanted = tl.where(i == target, 1.0 - smoothing, 0.0) + smoothing / classes
    gradient = tl.where(i < classes, (share * (1.0 / total) - wanted) * weight, 0.0)
    tl.store(at + i, gradient.to(logits_ptr.dtype.element_ty), i < columns)


@triton.jit
def _loss_long_row(
    logits_ptr, stride, columns, classes, targets_ptr, weights_ptr, sums_ptr, smoothing,
    SMOOTH: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    weight = tl.load(weights_ptr + row)
    wanted_logit = tl.load(at + target).to(tl.float32)  # before any thread writes
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    piece = tl.arange(0, PIECES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for number in range(tl.cdiv(classes, PIECES * BLOCK)):
        i = number * PIECES * BLOCK + piece
        x = tl.load(at + i, i < classes, float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        # A column that was empty so far has nothing to rescale: -inf - -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base[None, :]), 0)
        top = higher
        if SMOOTH:
            plain += tl.sum(tl.where(i < classes, x, 0.0), 0)
    most = tl.max(top, 0)
    lse = most + tl.log(tl.sum(total * tl.exp(top - most), 0))
    nll = lse - wanted_logit
    tl.store(sums_ptr + row * 2, nll * weight)
    loss = nll
    if SMOOTH:
        loss = (1 - smoothing) * nll + smoothing * (lse - tl.sum(plain, 0) / classes)
    tl.store(sums_ptr + row * 2 + 1, loss * weight)
    for begin in range(0, columns, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        x = tl.load(at + i, i < classes, float("-inf")).to(tl.float32)
        wanted = tl.where(i == target, 1.0 - smoothing, 0.0) + smoothing / classes
        gradient = tl.where(i < classes, (tl.exp(x - lse) - wanted) * weight, 0.0)
        tl.store(at + i, gradient.to(logits_ptr.dtype.element_ty), i < columns)


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
        warps = max(1, block // HELD_BY_WARP)
        _loss_row[(len(logits_MP),)](*given, smoothing, SMOOTH=smooth, BLOCK=block, num_warps=warps)
    else:
        _loss_long_row[(len(logits_MP),)](
            *given, smoothing, SMOOTH=smooth, BLOCK=BLOCK, PIECES=PIECES, num_warps=WARPS
        )
    return sums_M2


@loss_rows.register_fake
def _shapes(
    logits_MP: Tensor, targets_M: Tensor, weights_M: Tensor, classes: int, smoothing: float
) -> Tensor:
    return torch.empty(len(logits_MP), 2, dtype=torch.float32, device=logits_MP.device)
