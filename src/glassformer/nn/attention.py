"""Multi-head attention: self or cross, grouped, cached, fused or explicit.

`attend` is softmax(q k^T / sqrt(H) + bias) v. It uses PyTorch's fused kernel unless the scores or
the weights are to be read or replaced, which only the explicit path has; a parity check holds the
two together. Capped scores and sinks take the explicit path as well.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.kernels import train_kernels
from glassformer.nn.cache import Cache
from glassformer.nn.linear import (
    HAS_TRITON,
    TRITON_DTYPES,
    Linear,
    in_kernels,
    joined_product,
    side_by_side,
)
from glassformer.nn.mask import Mask, Packed
from glassformer.nn.norm import build_norm
from glassformer.nn.position import rotate
from glassformer.nn.taps import TapsAt, tap
from glassformer.spec import model as spec
from glassformer.spec.execution import GPU_HEAD_BYTES


class _PackedKernel:
    """torch's attention of packed sequences, once a batch of them is there.

    Its module imports torch's compiler, which takes seconds of every start. `groups` is how a
    release is told of fewer key-value heads; where it cannot be told, its kernel sees it.
    """

    def __init__(self) -> None:
        self.call: Callable[..., Any] | None = None
        self.groups: dict[str, bool] = {}

    def load(self) -> None:
        """Import it, if this torch has it; 2.10's has neither window nor scale."""
        if self.call is not None:
            return
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            return
        known = inspect.signature(varlen_attn).parameters
        if "window_size" in known:
            self.groups = {"enable_gqa": True} if "enable_gqa" in known else {}
            self.call = varlen_attn


PACKED = _PackedKernel()
#: What the kernel of packed sequences takes: these formats, widths of a head in these steps.
HALF, PACKED_HEADS, PACKED_MOST = (torch.bfloat16, torch.float16), 8, 256

# B batch, T query length, S key length, D d_model, N query heads, K key-value heads, H d_head,
# M tokens of all rows


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
) -> Tensor:
    """softmax(q k^T / sqrt(H) + bias) v; query head n reads key-value head n // (N / K).

    `scale` replaces 1 / sqrt(H); `softcap` c bounds what it gives, as c tanh(s / c); `sinks_N` are
    scores that take part in the softmax and have no value.
    """
    # Only torch's own dropout is part of the fused kernel.
    own = dropout is not None and type(dropout) is not nn.Dropout and dropout.p > 0
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
        out_BNTH = _attend_fused(q_BNTH, k_BKSH, v_BKSH, mask=mask, dropout=dropout, scale=scale)
    return out_BNTH if mask.empty is None else out_BNTH.masked_fill(mask.empty, 0.0)


def _attend_fused(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    *,
    mask: Mask,
    dropout: nn.Dropout | None,
    scale: float | None,
) -> Tensor:
    T, H = q_BNTH.shape[2:]
    if mask.packed is not None and mask.bias is None and (dropout is None or dropout.p == 0.0):
        dtype = _kernel_dtype(q_BNTH)
        if PACKED.call is not None and dtype in HALF and H % PACKED_HEADS == 0 and H <= PACKED_MOST:
            parts = (x.to(dtype) for x in (q_BNTH, k_BKSH, v_BKSH))
            return _attend_packed(*parts, packed=mask.packed, scale=scale)
    if q_BNTH.is_cuda and q_BNTH.dtype != torch.float64 and T > 1:
        # The fused kernels need heads of a certain multiple, those for float32 also a key for
        # every query head; otherwise all T x S weights are materialised. Padding a head with
        # zeros changes nothing.
        if q_BNTH.dtype == torch.float32:
            k_BKSH, v_BKSH = per_query_head(k_BKSH, q_BNTH), per_query_head(v_BKSH, q_BNTH)
        if missing := -H % (GPU_HEAD_BYTES // q_BNTH.element_size()):
            q_BNTH, k_BKSH, v_BKSH = (F.pad(x, (0, missing)) for x in (q_BNTH, k_BKSH, v_BKSH))
    if _by_kernel(q_BNTH, k_BKSH, v_BKSH, mask=mask, dropout=dropout):
        return train_kernels.attention(
            q_BNTH,
            k_BKSH,
            v_BKSH,
            allow=mask.allow,
            causal=mask.causal,
            scale=1 / math.sqrt(H) if scale is None else scale,
        )
    out_BNTH = F.scaled_dot_product_attention(
        q_BNTH,
        k_BKSH,
        v_BKSH,
        attn_mask=mask.allow if mask.bias is None else mask.added(q_BNTH),
        dropout_p=0.0 if dropout is None else dropout.p,
        is_causal=mask.causal and mask.bias is None,
        scale=1 / math.sqrt(H) if scale is None else scale,
        enable_gqa=q_BNTH.shape[1] != k_BKSH.shape[1],
    )
    return out_BNTH[..., :H]


def _by_kernel(*parts: Tensor, mask: Mask, dropout: nn.Dropout | None) -> bool:
    """Return True in a training step on a CPU, unless weights are dropped or have a bias."""
    whole = mask.bias is None and (dropout is None or dropout.p == 0.0)
    return whole and train_kernels.in_use(*parts)


def _kernel_dtype(x: Tensor) -> torch.dtype | None:
    """Return what a fused kernel would compute in on this GPU; None elsewhere."""
    if not x.is_cuda:
        return None
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


def _attend_packed(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *, packed: Packed, scale: float | None
) -> Tensor:
    """Attention within each run alone: what the mask excludes is not computed."""
    assert PACKED.call is not None
    B, _, T, H = q_BNTH.shape
    out_MNH = PACKED.call(
        *(x.transpose(1, 2).flatten(0, 1) for x in (q_BNTH, k_BKSH, v_BKSH)),
        packed.runs_R,
        packed.runs_R,
        T,
        T,
        scale=1 / math.sqrt(H) if scale is None else scale,
        window_size=(packed.left, packed.right),
        **PACKED.groups,
    )
    out_BTNH: Tensor = out_MNH.unflatten(0, (B, T))
    return out_BTNH.transpose(1, 2)


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


def per_query_head(kv_BKSH: Tensor, q_BNTH: Tensor) -> Tensor:
    """Repeat each key-value head for every query head of its group."""
    group = q_BNTH.shape[1] // kv_BKSH.shape[1]
    return kv_BKSH if group == 1 else kv_BKSH.repeat_interleave(group, dim=1)


def split_heads(x_BTD: Tensor, d_head: int) -> Tensor:
    """(B, T, N * H) -> (B, N, T, H), a view."""
    x_BTNH: Tensor = x_BTD.unflatten(-1, (-1, d_head))
    return x_BTNH.transpose(1, 2)


def join_heads(x_BNTH: Tensor) -> Tensor:
    """(B, N, T, H) -> (B, T, N * H)."""
    return x_BNTH.transpose(1, 2).flatten(2)


class MultiHeadAttention(nn.Module):
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
        if cache is None and taps is None:
            found_BTD = self._at_once(x_BTD, context_BSD, mask, rotation)
            if found_BTD is not None:
                return found_BTD
        if context_BSD is None:
            turned = self._turned(x_BTD, rotation)
            if turned is not None:
                q_BNTH, k_BKSH, v_BKSH = turned
            else:
                q_BTD, *kv = side_by_side(x_BTD, (self.q_proj, self.k_proj, self.v_proj))
                q_BNTH = self._by_head(q_BTD, self.q_norm, rotation)
                k_BKSH, v_BKSH = self._by_head(kv[0], self.k_norm, rotation), self._by_head(kv[1])
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

    def _at_once(
        self,
        x_BTD: Tensor,
        context_BSD: Tensor | None,
        mask: Mask,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> Tensor | None:
        """Return the result as one part of a training step on a CPU; None elsewhere, and where
        heads are more than rotated, or weights more than a softmax.
        """
        dropped = self.training and self.dropout.p > 0.0
        if self.q_norm is not None or self.k_norm is not None or dropped:
            return None
        if self.softcap is not None or self.sinks is not None:
            return None
        if mask.bias is not None:
            return None
        found = in_kernels(x_BTD, (self.q_proj, self.k_proj, self.v_proj, self.o_proj))
        if found is None or (context_BSD is not None and not train_kernels.in_use(context_BSD)):
            return None
        return train_kernels.attention_layer(
            x_BTD,
            context_BSD,
            *found,
            d_head=self.d_head,
            rotation=None if context_BSD is not None else rotation,
            allow=mask.allow,
            empty=mask.empty,
            causal=mask.causal,
            scale=1 / math.sqrt(self.d_head) if self.scale is None else self.scale,
        )

    def _turned(
        self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return rotated queries and keys, and values, by one product and one kernel; None outside
        code that is compiled for a GPU, and where heads are more than rotated.
        """
        if not HAS_TRITON or rotation is None or 2 * rotation[0].shape[-1] != self.d_head:
            return None
        if self.q_norm is not None or self.k_norm is not None:
            return None
        joined_BTR = joined_product(x_BTD, (self.q_proj, self.k_proj, self.v_proj))
        if joined_BTR is None or joined_BTR.dtype not in TRITON_DTYPES:
            return None
        from glassformer.kernels.triton_step import turned_heads

        N, K = (part.d_out // self.d_head for part in (self.q_proj, self.k_proj))
        cos, sin = (table.float() for table in rotation)
        heads: tuple[Tensor, Tensor, Tensor] = turned_heads(joined_BTR, cos, sin, N, K)
        return heads

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
            x_BNTH = rotate(x_BNTH, *rotation)
        return norm(x_BNTH) if norm is not None and self.norm_last else x_BNTH
