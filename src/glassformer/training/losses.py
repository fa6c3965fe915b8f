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

from glassformer.models.model import Model
from glassformer.nn.embedding import TokenEmbedding
from glassformer.nn.heads import TiedHead, read_out
from glassformer.nn.linear import Linear
from glassformer.nn.norm import as_float
from glassformer.nn.operations import Operations
from glassformer.spec.execution import (
    CHUNK,
    FUSED_PIECE,
    GPU_CLASSES,
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
) -> LossSums:
    """Return one head's weighted sums; targets and weights are (B, T), or (B,) for an answer."""
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
    if len(rows_MD) <= step:
        return _sums(model, rows_MD, head, targets_M, weights_M, label_smoothing)
    if (plain := plain_head(model, head)) is not None:
        step = min(step, max(1, CHUNK // width))
        table = model.operations
        return _in_chunks(
            *plain, rows_MD, targets_M, weights_M, label_smoothing, step=step, table=table
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
    table, many = model.operations, len(rows_MD) > step
    if table.loss_in_place and torch.compiler.is_compiling():
        # One kernel reads logits and writes their gradient once, also where all of them fit.
        many = many or len(rows_MD) * model.spec.head_size(head) >= FUSED_PIECE
    if plain is None or not many:
        return _sums(model, rows_MD, head, targets_M, weights_M, label_smoothing)
    return _in_chunks(
        *plain, rows_MD, targets_M, weights_M, label_smoothing, step=step, table=table
    )


def _in_chunks(
    weight_VD: Tensor,
    bias_V: Tensor | None,
    rows_MD: Tensor,
    targets_M: Tensor,
    weights_M: Tensor,
    label_smoothing: float,
    *,
    step: int,
    table: Operations,
) -> LossSums:
    if torch.is_autocast_enabled(rows_MD.device.type):
        dtype = torch.get_autocast_dtype(rows_MD.device.type)
        rows_MD, weight_VD = rows_MD.to(dtype), weight_VD.to(dtype)
    chunked: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLoss.apply
    trains = weight_VD.requires_grad, bias_V is not None and bias_V.requires_grad
    smoothed, nll = chunked(
        rows_MD, weight_VD, bias_V, targets_M, weights_M, label_smoothing, step, trains, table
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
    whether weight and bias are trained: the gradient of a frozen weight is not computed.
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
        table: Operations,
    ) -> tuple[Tensor, Tensor]:
        V, M = len(weight_VD), len(rows_MD)
        filling = -V % GPU_CLASSES if rows_MD.is_cuda else 0
        # A filling of nothing would copy all of it.
        weight_PD = F.pad(weight_VD, (0, 0, 0, filling)) if filling else weight_VD
        bias_P = None if bias_V is None else F.pad(bias_V, (0, filling)).to(rows_MD.dtype)
        pieces = -(-M // step)
        step = -(-M // pieces // GPU_CLASSES) * GPU_CLASSES if rows_MD.is_cuda else step
        sums, grad_rows, grad_weight, grad_bias = [], [], None, None
        for start in range(0, M, step):
            at = slice(start, start + step)
            x_CD = rows_MD[at]
            logits_CP = x_CD @ weight_PD.T
            if bias_P is not None:
                logits_CP = logits_CP + bias_P
            sums_C2, grad_CP = table.loss_rows(
                logits_CP, targets_M[at], weights_M[at], classes=V, smoothing=smoothing
            )
            sums.append(sums_C2.sum(0))
            grad_rows.append(grad_CP @ weight_PD)
            if trains[0]:
                part_PD = grad_CP.T @ x_CD
                part_PD = part_PD if pieces == 1 else as_float(part_PD)
                grad_weight = part_PD if grad_weight is None else grad_weight + part_PD
            if trains[1]:
                part_P = as_float(grad_CP).sum(0)
                grad_bias = part_P if grad_bias is None else grad_bias + part_P
        grad_weight = None if grad_weight is None else grad_weight[:V]
        ctx.save_for_backward(torch.cat(grad_rows), grad_weight, grad_bias)
        ctx.dtype, ctx.classes = weight_VD.dtype, V
        nll, smoothed = torch.stack(sums).sum(0)
        nll, smoothed = nll.clone(), smoothed.clone()
        ctx.mark_non_differentiable(nll)
        return smoothed, nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        rows, weight, bias = ctx.saved_tensors
        rows = rows * grad.to(rows.dtype)
        weight = None if weight is None else (weight * grad).to(ctx.dtype)
        bias = None if bias is None else (bias * grad)[: ctx.classes]
        return rows, weight, bias, None, None, None, None, None, None
