"""Multi-head attention: self or cross, grouped, cached, fused or explicit.

`attend` is softmax(q k^T / sqrt(H) + bias) v. It uses PyTorch's fused kernel unless the scores or
the weights are to be read or replaced, which only the explicit path has; a parity check holds the
two together. Capped scores and sinks take the explicit path as well.
"""

import math

import torch
from torch import Tensor, nn

from glassformer.nn.cache import Cache
from glassformer.nn.linear import Linear
from glassformer.nn.mask import Mask
from glassformer.nn.norm import build_norm
from glassformer.nn.operations import TORCH, Operations, Part, per_query_head
from glassformer.nn.taps import TapsAt, tap
from glassformer.spec import model as spec

# B batch, T query length, S key length, D d_model, N query heads, K key-value heads, H d_head


def attend(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    *,
    mask: Mask,
    dropout: nn.Dropout | None = None,
    taps: TapsAt | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
    operations: Operations = TORCH,
) -> Tensor:
    """softmax(q k^T / sqrt(H) + bias) v; query head n reads key-value head n // (N / K).

    `scale` replaces 1 / sqrt(H); `softcap` c bounds what it gives, as c tanh(s / c); `sinks_N` are
    scores that take part in the softmax and have no value.
    """
    rate = 0.0 if dropout is None else dropout.p
    # Only torch's own dropout is part of the fused kernel.
    own = dropout is not None and type(dropout) is not nn.Dropout and rate > 0
    own = own or softcap is not None or sinks_N is not None
    if own or (taps is not None and (taps.wants("scores") or taps.wants("weights"))):
        out_BNTH = _attend_explicitly(
            q_BNTH,
            k_BKSH,
            v_BKSH,
            mask=mask,
            dropout=dropout,
            taps=taps,
            scale=scale,
            softcap=softcap,
            sinks_N=sinks_N,
        )
    else:
        scale = 1 / math.sqrt(q_BNTH.shape[-1]) if scale is None else scale
        out_BNTH = operations.attention(
            q_BNTH, k_BKSH, v_BKSH, mask=mask, scale=scale, dropout=rate
        )
    return out_BNTH if mask.empty is None else out_BNTH.masked_fill(mask.empty, 0.0)


def _attend_explicitly(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    *,
    mask: Mask,
    dropout: nn.Dropout | None,
    taps: TapsAt | None,
    scale: float | None,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    k_BNSH, v_BNSH = per_query_head(k_BKSH, q_BNTH), per_query_head(v_BKSH, q_BNTH)
    added = mask.added(q_BNTH)
    if softcap is not None or (taps is not None and taps.wants("scores")):
        if scale is None:
            scores_BNTS = q_BNTH @ k_BNSH.transpose(-2, -1) / math.sqrt(q_BNTH.shape[-1])
        else:
            scores_BNTS = q_BNTH @ k_BNSH.transpose(-2, -1) * scale
        if softcap is not None:
            scores_BNTS = softcap * torch.tanh(scores_BNTS / softcap)
        if mask.bias is not None:
            scores_BNTS = scores_BNTS + mask.bias.to(scores_BNTS.dtype)
        scores_BNTS = tap(taps, "scores", scores_BNTS)
        scores_BNTS = torch.where(added == -math.inf, added, scores_BNTS)
    else:
        scores_BNTS = _masked_scores(q_BNTH, k_BNSH, added, scale)
    if sinks_N is None:
        weights_BNTS = torch.softmax(scores_BNTS, dim=-1)
    else:
        sinks_BNT1 = sinks_N[:, None, None].to(scores_BNTS.dtype).expand(*scores_BNTS.shape[:3], 1)
        weights_BNTS = torch.softmax(torch.cat((scores_BNTS, sinks_BNT1), -1), dim=-1)[..., :-1]
    if mask.empty is not None:
        weights_BNTS = weights_BNTS.masked_fill(mask.empty, 0.0)
    weights_BNTS = tap(taps, "weights", weights_BNTS)
    return (weights_BNTS if dropout is None else dropout(weights_BNTS)) @ v_BNSH


def _masked_scores(
    q_BNTH: Tensor, k_BNSH: Tensor, added: Tensor, scale: float | None = None
) -> Tensor:
    """q k^T / sqrt(H) + added, in one pass over T x S instead of three."""
    (B, N, T, H), S = q_BNTH.shape, k_BNSH.shape[2]
    scores = torch.baddbmm(
        added.expand(B, N, T, S).flatten(0, 1),
        q_BNTH.flatten(0, 1),
        k_BNSH.flatten(0, 1).transpose(1, 2),
        alpha=1 / math.sqrt(H) if scale is None else scale,
    )
    return scores.view(B, N, T, S)


def split_heads(x_BTD: Tensor, d_head: int) -> Tensor:
    """(B, T, N * H) -> (B, N, T, H), a view."""
    x_BTNH: Tensor = x_BTD.unflatten(-1, (-1, d_head))
    return x_BTNH.transpose(1, 2)


def join_heads(x_BNTH: Tensor) -> Tensor:
    """(B, N, T, H) -> (B, T, N * H)."""
    return x_BNTH.transpose(1, 2).flatten(2)


class MultiHeadAttention(Part):
    """o(attend(q(x), k(context), v(context))), context = x for self-attention.

    Order within a head: projection, q/k-norm, rotation, as Qwen3 has it; `norm_last` exchanges the
    last two. A norm over all heads comes before they are split.
    """

    def __init__(self, attention: spec.Attention, d_model: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.d_head = d_head = attention.head_width(d_model)
        q_width, kv_width = attention.n_heads * d_head, attention.kv_heads * d_head
        qv_bias = attention.bias in ("qkv", "all", "no_key")
        self.q_proj = Linear(d_model, q_width, bias=qv_bias)
        self.k_proj = Linear(d_model, kv_width, bias=attention.bias in ("qkv", "all"))
        self.v_proj = Linear(d_model, kv_width, bias=qv_bias)
        self.o_proj = Linear(q_width, d_model, bias=attention.bias in ("all", "no_key", "out"))
        norm = attention.qk_norm
        self.norm_all = attention.qk_norm_over == "all"
        self.norm_last = attention.qk_norm_last
        widths = (q_width, kv_width) if self.norm_all else (d_head, d_head)
        self.q_norm = None if norm is None else build_norm(norm, widths[0])
        self.k_norm = None if norm is None else build_norm(norm, widths[1])
        self.scale, self.softcap = attention.scale, attention.softcap
        self.sinks = nn.Parameter(torch.empty(attention.n_heads)) if attention.sinks else None
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x_BTD: Tensor,
        *,
        mask: Mask,
        context_BSD: Tensor | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        layer: int = 0,
        taps: TapsAt | None = None,
    ) -> Tensor:
        if context_BSD is None:
            layers = (self.q_proj, self.k_proj, self.v_proj)
            q_BTD, k_BTD, v_BTD = self.operations.project(x_BTD, layers)
            q_BNTH = self._by_head(q_BTD, self.q_norm, rotation)
            k_BKSH, v_BKSH = self._by_head(k_BTD, self.k_norm, rotation), self._by_head(v_BTD)
            if cache is not None:
                k_BKSH, v_BKSH = cache.extend(layer, k_BKSH, v_BKSH)
        elif cache is None:
            q_BNTH = self.queries(x_BTD)
            k_BKSH, v_BKSH = self.keys_values(context_BSD)
        else:
            q_BNTH = self.queries(x_BTD)
            if layer not in cache.cross:
                cache.cross[layer] = self.keys_values(context_BSD)
            k_BKSH, v_BKSH = cache.cross[layer]
        q_BNTH = tap(taps, "q", q_BNTH)
        k_BKSH, v_BKSH = tap(taps, "k", k_BKSH), tap(taps, "v", v_BKSH)
        dropout = self.dropout if self.training else None
        heads_BNTH = attend(
            q_BNTH,
            k_BKSH,
            v_BKSH,
            mask=mask,
            dropout=dropout,
            taps=taps,
            scale=self.scale,
            softcap=self.softcap,
            sinks_N=self.sinks,
            operations=self.operations,
        )
        heads_BNTH = tap(taps, "heads", heads_BNTH)
        return tap(taps, "out", self.o_proj(join_heads(heads_BNTH)))

    def queries(self, x_BTD: Tensor, *, rotation: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return q_BNTH, normalised and rotated."""
        return self._by_head(self.q_proj(x_BTD), self.q_norm, rotation)

    def keys_values(
        self, context_BSD: Tensor, *, rotation: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return k_BKSH, normalised and rotated, and v_BKSH."""
        k_BKSH = self._by_head(self.k_proj(context_BSD), self.k_norm, rotation)
        return k_BKSH, self._by_head(self.v_proj(context_BSD))

    def _by_head(
        self,
        x_BTD: Tensor,
        norm: nn.Module | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Split into heads (B, N, T, H), then normalise, then rotate."""
        if norm is not None and self.norm_all:
            x_BTD, norm = norm(x_BTD), None
        x_BNTH = split_heads(x_BTD, self.d_head)
        if norm is not None and not self.norm_last:
            x_BNTH = norm(x_BNTH)
        if rotation is not None:
            x_BNTH = self.operations.rotate(x_BNTH, *rotation)
        return norm(x_BNTH) if norm is not None and self.norm_last else x_BNTH
