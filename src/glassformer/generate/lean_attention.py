"""Attention of one new token over keys and values that lie in place.

A single query sees everything before it: there is no causal mask, a window is a slice, and only
padding needs a mask, which was made when the prompt was read. Grouped heads are rows of one
product, nothing is repeated.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.generate.projection import HeadNorms, Maker, make_norm
from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.norm import LayerNorm, RMSNorm
from glassformer.spec import model as spec

# B batch, S positions, D d_model, N query heads, K key-value heads, G = N / K, H d_head,
# X = N + 2 K heads of one product


class LeanAttention:
    """Self-attention of one new token: q, k and v by one product, written and read in place."""

    def __init__(
        self,
        part: MultiHeadAttention,
        attention: spec.Attention,
        make: Maker,
        *,
        norm: LayerNorm | RMSNorm | None,
    ) -> None:
        self.d_head, self.window = part.d_head, attention.window
        self.n_heads, self.n_kv_heads = attention.n_heads, attention.kv_heads
        self.qkv = make.linear(part.q_proj, part.k_proj, part.v_proj, norm=norm)
        self.out = make.linear(part.o_proj)
        self.norms = self.gains = None
        if part.q_norm is not None and part.k_norm is not None:
            self.norms = HeadNorms([(part.q_norm, self.n_heads), (part.k_norm, self.n_kv_heads)])
            self.gains = (part.q_norm.weight.detach(), part.k_norm.weight.detach())
        fusible = self.norms is None or self.norms.kind is RMSNorm
        self.gpu = make.gpu if fusible else None
        self.table: tuple[Tensor, Tensor] | None = None  # of every place; the model sets it

    def heads(
        self,
        x_BD: Tensor,
        kv_BXSH: Tensor,
        end: "int | Tensor",
        *,
        rotation: tuple[Tensor, Tensor] | None,
        places_B: Tensor | None,
        mask_B11S: Tensor | None,
    ) -> Tensor:
        """What the heads read, (B, N * H); position end - 1 of the cache is written.

        As a number, `end` is a slice of the cache; as a tensor it is a mask over all of it, which
        reads more but has one shape for every step, as a compiled or recorded step needs. Our GPU
        kernel reads the number itself, from memory, and no more than it says.
        """
        B, N, K = x_BD.shape[0], self.n_heads, self.n_kv_heads
        qkv_BXH = self.qkv(x_BD).view(B, N + 2 * K, self.d_head)
        if self.gpu is not None and isinstance(end, Tensor):
            return self.gpu.attend(
                qkv_BXH,
                kv_BXSH,
                end,
                n_heads=N,
                places_B=places_B,
                rotation=self.table,
                gains=self.gains,
                eps=0.0 if self.norms is None else self.norms.eps,
                window=self.window,
                mask_BS=None if mask_B11S is None else mask_B11S[:, 0, 0],
            )
        turned_BXH = qkv_BXH[:, : N + K]
        if self.norms is not None:
            turned_BXH = turned_BXH.copy_(self.norms(turned_BXH))
        if rotation is not None:
            cos, sin = rotation  # both halves; sin with the first half's sign turned
            swapped_BXH = turned_BXH.roll(self.d_head // 2, -1)
            turned_BXH.mul_(cos).addcmul_(swapped_BXH, sin)
        if isinstance(end, int):
            kv_BXSH[:, :, end - 1] = qkv_BXH[:, N:]
            begin = 0 if self.window is None else max(0, end - self.window)
            past_BXSH = kv_BXSH[:, :, begin:end]
            mask = None if mask_B11S is None else mask_B11S[..., begin:end]
        else:
            past_BXSH = kv_BXSH.index_copy_(2, end - 1, qkv_BXH[:, N:, None])
            mask = self._until(end, kv_BXSH, mask_B11S)
        q_BKGH = qkv_BXH[:, :N].view(B, K, N // K, self.d_head)
        heads_BKGH = F.scaled_dot_product_attention(
            q_BKGH, past_BXSH[:, :K], past_BXSH[:, K:], attn_mask=mask
        )
        return heads_BKGH.reshape(B, N * self.d_head)

    def _until(self, end_1: Tensor, kv_BXSH: Tensor, mask_B11S: Tensor | None) -> Tensor:
        """To be added to scores over the whole cache: -inf from `end` on and before a window."""
        column_S = torch.arange(kv_BXSH.shape[2], device=kv_BXSH.device)
        seen_S = column_S < end_1
        if self.window is not None:
            seen_S = seen_S & (column_S >= end_1 - self.window)
        mask_S = torch.zeros_like(column_S, dtype=kv_BXSH.dtype).masked_fill(~seen_S, -math.inf)
        return mask_S[None, None, None] if mask_B11S is None else mask_B11S + mask_S


class LeanCross:
    """Cross-attention of one new token: keys and values are those of the prompt's forward."""

    def __init__(
        self,
        part: MultiHeadAttention,
        attention: spec.Attention,
        make: Maker,
        *,
        norm: LayerNorm | RMSNorm | None,
    ) -> None:
        self.d_head = part.d_head
        self.n_heads, self.n_kv_heads = attention.n_heads, attention.kv_heads
        self.query = make.linear(part.q_proj, norm=norm)
        self.out = make.linear(part.o_proj)
        self.norm = None if part.q_norm is None else make_norm(part.q_norm)

    def heads(self, x_BD: Tensor, kv: tuple[Tensor, Tensor], *, mask_B11S: Tensor | None) -> Tensor:
        """What the heads read, (B, N * H)."""
        B, N, K = x_BD.shape[0], self.n_heads, self.n_kv_heads
        q_BNH = self.query(x_BD).view(B, N, self.d_head)
        q_BNH = q_BNH if self.norm is None else self.norm(q_BNH)
        q_BKGH = q_BNH.view(B, K, N // K, self.d_head)
        heads_BKGH = F.scaled_dot_product_attention(q_BKGH, *kv, attn_mask=mask_B11S)
        return heads_BKGH.reshape(B, N * self.d_head)
