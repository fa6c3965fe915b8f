"""Losses on hidden states and a head: masked, smoothed, weighted by token, in chunks if large.

Only the rows that count are projected to logits. Sums are returned, not means, so that batches can
be combined with every token weighted equally.

`head_loss` picks the rows by a mask, whose count only the data tells. `fixed_loss` is the same sum
with shapes that are known beforehand, as a compiled and recorded step needs them. Where the logits
are large and one product makes them, their gradient is taken chunk by chunk in the forward, so that
they are never all there and nothing is computed twice; other heads compute each chunk again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from glassformer.kernels import train_kernels
from glassformer.models.model import Model
from glassformer.nn.embedding import TokenEmbedding
from glassformer.nn.heads import TiedHead, read_out
from glassformer.nn.linear import HAS_TRITON, TRITON_DTYPES, Linear
from glassformer.nn.norm import as_float
from glassformer.spec.execution import (
    CHUNK,
    FUSED_PIECE,
    GPU_CLASSES,
    KERNEL_CHUNK,
    KERNEL_PIECE,
    PIECE,
    RECORDED_PIECE,
)
from glassformer.spec.model import NextHead

# B batch, T length, D d_model, M rows that count, V logits


class LossSums(NamedTuple):
    """Sums over the rows that count: what is differentiated, and the plain log-likelihood."""

    smoothed: Tensor
    nll: Tensor


def head_loss(
    model: Model,
    hidden_BTD: Tensor,
    head: str,
    targets: Tensor,
    weights: Tensor,
    *,
    valid_BT: Tensor | None = None,
    label_smoothing: float = 0.0,
    share: float = 1.0,
) -> LossSums:
    """Return one head's weighted sums; targets and weights are (B, T), or (B,) for an answer.

    `share` is by what the caller will multiply them: a gradient that is made at once has it in it.
    """
    kind = model.spec.head(head)
    if kind.readout is not None:
        rows = read_out(hidden_BTD, valid_BT, readout=kind.readout)
    else:
        rows = hidden_BTD.flatten(0, 1)
    counted = weights.flatten() > 0
    rows_MD, targets_M, weights_M = (
        rows[counted],
        targets.flatten()[counted],
        weights.flatten()[counted],
    )
    width = model.spec.head_size(head)
    step = max(1, PIECE // width)
    ours = train_kernels.in_use(rows_MD) and len(rows_MD) * width >= KERNEL_PIECE
    if len(rows_MD) <= step and not ours:
        return _sums(model, rows_MD, head, targets_M, weights_M, label_smoothing)
    plain = plain_head(model, head)
    if plain is None and len(rows_MD) <= step:
        return _sums(model, rows_MD, head, targets_M, weights_M, label_smoothing)
    if plain is not None:
        step = min(step, max(1, (KERNEL_CHUNK if ours else CHUNK) // width))
        return _in_chunks(
            *plain, rows_MD, targets_M, weights_M, label_smoothing, step=step, share=share
        )
    pieces = []
    for start in range(0, len(rows_MD), step):
        at = slice(start, start + step)
        arguments = (model, rows_MD[at], head, targets_M[at], weights_M[at], label_smoothing)
        pieces.append(checkpoint(_sums, *arguments, use_reentrant=False))
    return LossSums(
        torch.stack([piece.smoothed for piece in pieces]).sum(),
        torch.stack([piece.nll for piece in pieces]).sum(),
    )


def _sums(
    model: Model, rows_MD: Tensor, head: str, targets_M: Tensor, weights_M: Tensor, smoothing: float
) -> LossSums:
    logits_MV = model.project(rows_MD, head)
    logits_MV = as_float(logits_MV)  # half precision would round the loss itself
    if not smoothing:
        nll = (F.cross_entropy(logits_MV, targets_M, reduction="none") * weights_M).sum()
        return LossSums(nll, nll.detach())
    logp_MV = F.log_softmax(logits_MV, dim=-1)
    nll_M = -logp_MV.gather(1, targets_M[:, None])[:, 0]
    # The target distribution is (1 - eps) on the label and eps spread over the whole vocabulary.
    smoothed_M = (1 - smoothing) * nll_M - smoothing * logp_MV.mean(1)
    return LossSums((smoothed_M * weights_M).sum(), (nll_M.detach() * weights_M).sum())


def fixed_loss(
    model: Model,
    hidden_BTD: Tensor,
    head: str,
    targets_M: Tensor,
    weights_M: Tensor,
    *,
    rows_M: Tensor | None = None,
    valid_BT: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> LossSums:
    """Return one head's weighted sums over the rows `rows_M`, or all of them.

    A row of weight 0 fills the shape up and adds nothing; its target is any class.
    """
    kind = model.spec.head(head)
    if kind.readout is not None:
        rows_MD = read_out(hidden_BTD, valid_BT, readout=kind.readout)
    else:
        rows_MD = hidden_BTD.flatten(0, 1)
    if rows_M is not None:
        rows_MD = rows_MD[rows_M]
    step = max(1, RECORDED_PIECE // model.spec.head_size(head))
    plain = plain_head(model, head)
    many = len(rows_MD) > step or _by_one_kernel(rows_MD, model.spec.head_size(head))
    if plain is None or not many:
        return _sums(model, rows_MD, head, targets_M, weights_M, label_smoothing)
    return _in_chunks(*plain, rows_MD, targets_M, weights_M, label_smoothing, step=step)


def _by_one_kernel(rows_MD: Tensor, classes: int) -> bool:
    """Return True if logits and their gradient are to share memory although they all fit: one
    kernel of ours then reads and writes them once. Only in compiled code, which has Triton loaded.
    """
    ours = HAS_TRITON and rows_MD.is_cuda and rows_MD.dtype in TRITON_DTYPES
    return ours and torch.compiler.is_compiling() and len(rows_MD) * classes >= FUSED_PIECE


def _in_chunks(
    weight_VD: Tensor,
    bias_V: Tensor | None,
    rows_MD: Tensor,
    targets_M: Tensor,
    weights_M: Tensor,
    label_smoothing: float,
    *,
    step: int,
    share: float = 1.0,
) -> LossSums:
    if torch.is_autocast_enabled(rows_MD.device.type):
        dtype = torch.get_autocast_dtype(rows_MD.device.type)
        rows_MD, weight_VD = rows_MD.to(dtype), weight_VD.to(dtype)
    chunked: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLoss.apply
    trains = weight_VD.requires_grad, bias_V is not None and bias_V.requires_grad
    smoothed, nll = chunked(
        rows_MD, weight_VD, bias_V, targets_M, weights_M, label_smoothing, step, trains, share
    )
    return LossSums(smoothed, nll.detach())


def plain_head(model: Model, head: str) -> tuple[Tensor, Tensor | None] | None:
    """Return the weight (V, D) and bias of a head that is one product, or None for another."""
    if head in model.transforms or head not in model.heads:
        return None
    part, embed, kind = model.heads[head], model.output_embedding(), model.spec.head(head)
    if isinstance(kind, NextHead) and (kind.scale != 1.0 or kind.softcap is not None):
        return None
    if type(part) is Linear:
        return part.weight, part.bias
    if isinstance(part, TiedHead) and type(embed) is TokenEmbedding:
        return embed.weight, part.bias
    return None


class _ChunkedLoss(torch.autograd.Function):
    """sum_m weight_m * loss(rows_m W^T + b), with the gradient made in the forward.

    On a GPU the classes are filled up to a multiple that its matrix units take. `trains` says
    whether weight and bias are trained: the gradient of a frozen weight is not computed. On a CPU
    the gradient is made for a sum that is multiplied by `share`, and a weight's may be written to
    the parameter itself: an embedding that is the head adds to it later.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_M: Tensor,
        weights_M: Tensor,
        smoothing: float,
        step: int,
        trains: tuple[bool, bool],
        share: float,
    ) -> tuple[Tensor, Tensor]:
        V, M = len(weight_VD), len(rows_MD)
        filling = -V % GPU_CLASSES if rows_MD.is_cuda else 0
        # A filling of nothing would copy all of it.
        weight_PD = F.pad(weight_VD, (0, 0, 0, filling)) if filling else weight_VD
        bias_P = None if bias_V is None else F.pad(bias_V, (0, filling)).to(rows_MD.dtype)
        pieces = -(-M // step)
        step = -(-M // pieces // GPU_CLASSES) * GPU_CLASSES if rows_MD.is_cuda else step
        sums, grad_rows, grad_weight, grad_bias = [], [], None, None
        in_place = train_kernels.in_use(rows_MD, weight_PD)
        share = share if in_place and share else 1.0
        ctx.weight = weight_VD if in_place and train_kernels.writes(weight_VD) else None
        if in_place:
            weights_M = weights_M * share
            spare_VD = None if ctx.weight is None else train_kernels.gradient_memory(weight_VD)
        buffer_CP = rows_MD.new_empty(min(step, M), V) if in_place else None
        for start in range(0, M, step):
            at = slice(start, start + step)
            x_CD = rows_MD[at]
            if buffer_CP is None:
                logits_CP = x_CD @ weight_PD.T
            else:
                logits_CP = torch.mm(x_CD, weight_PD.T, out=buffer_CP[: len(x_CD)])
            if bias_P is not None:
                logits_CP = logits_CP + bias_P
            sums_C2, grad_CP = loss_and_gradient(
                logits_CP, targets_M[at], weights_M[at], classes=V, smoothing=smoothing
            )
            sums.append(sums_C2.sum(0))
            grad_rows.append(grad_CP @ weight_PD)
            if trains[0] and in_place and grad_weight is not None:
                grad_weight.addmm_(grad_CP.T, x_CD)
            elif trains[0] and in_place:
                grad_weight = torch.mm(grad_CP.T, x_CD, out=spare_VD)
            elif trains[0]:
                part_PD = grad_CP.T @ x_CD
                part_PD = part_PD if pieces == 1 else as_float(part_PD)
                grad_weight = part_PD if grad_weight is None else grad_weight + part_PD
            if trains[1]:
                part_P = as_float(grad_CP).sum(0)
                grad_bias = part_P if grad_bias is None else grad_bias + part_P
        grad_weight = None if grad_weight is None else grad_weight[:V]
        ctx.save_for_backward(torch.cat(grad_rows), grad_weight, grad_bias)
        ctx.dtype, ctx.classes, ctx.share = weight_VD.dtype, V, share
        nll, smoothed = torch.stack(sums).sum(0)
        if in_place:
            nll, smoothed = nll / share, smoothed / share
        nll, smoothed = nll.clone(), smoothed.clone()
        ctx.mark_non_differentiable(nll)
        return smoothed, nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        rows, weight, bias = ctx.saved_tensors
        if ctx.share != 1.0:
            grad = grad / ctx.share
        if not (rows.device.type == "cpu" and float(grad) == 1.0):
            rows = rows * grad.to(rows.dtype)
            weight = None if weight is None else (weight * grad).to(ctx.dtype)
            bias = None if bias is None else bias * grad
        if ctx.weight is not None and weight is not None:
            train_kernels.add_gradient(ctx.weight, weight)
            weight = None
        return (
            rows,
            weight,
            None if bias is None else bias[: ctx.classes],
            None,
            None,
            None,
            None,
            None,
            None,
        )


def loss_and_gradient(
    logits_CP: Tensor, targets_C: Tensor, weights_C: Tensor, *, classes: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return (C, 2), each row's weighted plain and smoothed loss, and the gradient of the logits.

    On a GPU, and in a training step on a CPU, one kernel writes the gradient over the logits.
    """
    if train_kernels.in_use(logits_CP) and logits_CP.shape[1] == classes:
        weights_C = weights_C.to(torch.float32)
        return train_kernels.loss_rows(logits_CP, targets_C, weights_C, smoothing), logits_CP
    if logits_CP.is_cuda and logits_CP.dtype in TRITON_DTYPES and HAS_TRITON:
        from glassformer.kernels.triton_loss import loss_rows

        sums_C2 = loss_rows(logits_CP, targets_C, weights_C, classes, smoothing)
        return sums_C2, logits_CP
    logp_CV = F.log_softmax(as_float(logits_CP[:, :classes]), -1)
    weight_C1, target_C1 = weights_C[:, None].to(logp_CV.dtype), targets_C[:, None]
    nll_C = -logp_CV.gather(1, target_C1)[:, 0]
    smoothed_C = nll_C
    if smoothing:
        smoothed_C = (1 - smoothing) * nll_C - smoothing * logp_CV.mean(1)
    grad_CV = logp_CV.exp_().mul_(weight_C1)
    if smoothing:
        grad_CV -= weight_C1 * (smoothing / classes)
    grad_CV.scatter_add_(1, target_C1, (smoothing - 1) * weight_C1)
    grad_CP = F.pad(grad_CV, (0, logits_CP.shape[1] - classes)).to(logits_CP.dtype)
    return torch.stack((nll_C, smoothed_C), 1) * weight_C1, grad_CP
