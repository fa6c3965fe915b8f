"""Losses on hidden states and a head: masked, smoothed, weighted by token, in chunks if large.

Only the rows that count are projected to logits. Sums are returned, not means, so that batches can
be combined with every token weighted equally.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from glassformer.models.model import Model
from glassformer.nn.embedding import read_out
from glassformer.nn.norm import as_float
from glassformer.spec.execution import PIECE

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
