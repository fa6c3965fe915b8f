"""A Triton kernel of the loss on a GPU: cross-entropy of rows of logits, and its gradient in place.

A row is read twice and written once: the first pass keeps a running maximum and sum, the second
replaces each logit by its gradient. Sums are in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# M rows, V classes, P >= V columns in memory

BLOCK, WARPS = 2048, 8


@triton.jit
def _loss_rows(
    logits_ptr, stride, columns, classes, targets_ptr, weights_ptr, sums_ptr, smoothing,
    SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    weight = tl.load(weights_ptr + row)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, classes, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        x = tl.load(at + i, i < classes, float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        # A column that was empty so far has nothing to rescale: -inf - -inf would be NaN.
        total = tl.where(higher == float("-inf"), 0.0, total * tl.exp(top - higher)) + tl.where(
            i < classes, tl.exp(x - higher), 0.0
        )
        top = higher
        if SMOOTH:
            plain += tl.where(i < classes, x, 0.0)
    most = tl.max(top, 0)
    lse = most + tl.log(tl.sum(tl.where(top == float("-inf"), 0.0, total * tl.exp(top - most)), 0))
    nll = lse - tl.load(at + target).to(tl.float32)
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
    _loss_rows[(len(logits_MP),)](
        logits_MP, logits_MP.stride(0), logits_MP.shape[1], classes, targets_M, weights_M, sums_M2,
        smoothing, SMOOTH=smoothing > 0, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return sums_M2


@loss_rows.register_fake
def _shapes(
    logits_MP: Tensor, targets_M: Tensor, weights_M: Tensor, classes: int, smoothing: float
) -> Tensor:
    return torch.empty(len(logits_MP), 2, dtype=torch.float32, device=logits_MP.device)
