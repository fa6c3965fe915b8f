"""One decoding step without what a step does not need: no modules, masks, or copies of the past.

The weights are derived forms of a model's: query, key and value as one product, gate and up as one,
each in the fastest layout. Keys and values are written in place; a single query sees everything
before it, so there is no causal mask, a window is a slice, and only padding needs a mask, which
was made when the prompt was read. Grouped heads are rows of one product, nothing is repeated.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.generate.product import Product, joined
from glassformer.models.encoder_decoder import EncoderDecoder
from glassformer.models.model import Model
from glassformer.models.stack import StackParts
from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.block import TransformerBlock
from glassformer.nn.embedding import FactorizedTokenEmbedding, TokenEmbedding
from glassformer.nn.ffn import MLP, SwiGLU, activate
from glassformer.nn.heads import TiedHead
from glassformer.nn.linear import Linear
from glassformer.nn.norm import LayerNorm, RMSNorm
from glassformer.nn.position import RotaryPosition
from glassformer.spec import model as spec
from glassformer.spec.errors import InputError

# B batch, S positions, D d_model, N query heads, K key-value heads, G = N / K, H d_head,
# X = N + 2 K heads of one product, F d_ff, V vocab

MakeProduct = Callable[[Tensor, Tensor | None], Product]


def make_norm(part: LayerNorm | RMSNorm) -> Callable[[Tensor], Tensor]:
    """The norm as one call."""
    weight, eps, shape = part.weight.detach(), part.eps, tuple(part.weight.shape)
    if isinstance(part, LayerNorm):
        bias = part.bias.detach()
        return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
    return lambda x: torch.rms_norm(x, shape, weight, eps)


def linear_parts(part: object) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a plain linear layer; others have products of their own."""
    if type(part) is not Linear:
        raise InputError(
            f"a lean step needs plain linear layers, and found {type(part).__name__}",
            hint="use TorchStepper, which runs any model",
        )
    return part.weight.detach(), None if part.bias is None else part.bias.detach()


class HeadNorms:
    """q/k-norm of all heads at once: one normalisation, a gain for each head's kind."""

    def __init__(self, parts: list[tuple[LayerNorm | RMSNorm, int]]) -> None:
        self.kind, self.eps = type(parts[0][0]), parts[0][0].eps
        self.shape = tuple(parts[0][0].weight.shape)
        self.gain_XH = torch.cat([part.weight.detach().expand(n, -1) for part, n in parts])
        self.bias_XH = None
        if self.kind is LayerNorm:
            self.bias_XH = torch.cat([part.bias.detach().expand(n, -1) for part, n in parts])

    def __call__(self, x_BXH: Tensor) -> Tensor:
        if self.kind is LayerNorm:
            assert self.bias_XH is not None
            x_BXH = torch.layer_norm(x_BXH, self.shape, None, None, self.eps)
            return torch.addcmul(self.bias_XH, x_BXH, self.gain_XH)
        return torch.rms_norm(x_BXH, self.shape, None, self.eps) * self.gain_XH


class LeanAttention:
    """Self-attention of one new token: q, k and v by one product, written and read in place."""

    def __init__(
        self, part: MultiHeadAttention, attention: spec.Attention, make: MakeProduct
    ) -> None:
        self.d_head, self.window = part.d_head, attention.window
        self.n_heads, self.n_kv_heads = attention.n_heads, attention.kv_heads
        self.qkv = make(*joined([linear_parts(p) for p in (part.q_proj, part.k_proj, part.v_proj)]))
        self.out = make(*linear_parts(part.o_proj))
        self.norms = None
        if part.q_norm is not None and part.k_norm is not None:
            self.norms = HeadNorms([(part.q_norm, self.n_heads), (part.k_norm, self.n_kv_heads)])

    def heads(
        self,
        x_BD: Tensor,
        kv_BXSH: Tensor,
        end: "int | Tensor",
        *,
        rotation: tuple[Tensor, Tensor] | None,
        mask_B11S: Tensor | None,
    ) -> Tensor:
        """What the heads read, (B, N * H); position end - 1 of the cache is written.

        As a number, `end` is a slice of the cache; as a tensor it is a mask over all of it, which
        reads more but has one shape for every step, as a compiled step needs.
        """
        B, N, K = x_BD.shape[0], self.n_heads, self.n_kv_heads
        qkv_BXH = self.qkv(x_BD).view(B, N + 2 * K, self.d_head)
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
        self, part: MultiHeadAttention, attention: spec.Attention, make: MakeProduct
    ) -> None:
        self.d_head = part.d_head
        self.n_heads, self.n_kv_heads = attention.n_heads, attention.kv_heads
        self.query = make(*linear_parts(part.q_proj))
        self.out = make(*linear_parts(part.o_proj))
        self.norm = None if part.q_norm is None else make_norm(part.q_norm)

    def heads(self, x_BD: Tensor, kv: tuple[Tensor, Tensor], *, mask_B11S: Tensor | None) -> Tensor:
        """What the heads read, (B, N * H)."""
        B, N, K = x_BD.shape[0], self.n_heads, self.n_kv_heads
        q_BNH = self.query(x_BD).view(B, N, self.d_head)
        q_BNH = q_BNH if self.norm is None else self.norm(q_BNH)
        q_BKGH = q_BNH.view(B, K, N // K, self.d_head)
        heads_BKGH = F.scaled_dot_product_attention(q_BKGH, *kv, attn_mask=mask_B11S)
        return heads_BKGH.reshape(B, N * self.d_head)


class LeanFeed:
    """The feed-forward half; gate and up are one product."""

    def __init__(self, part: MLP | SwiGLU, make: MakeProduct) -> None:
        self.down = make(*linear_parts(part.down_proj))
        if isinstance(part, SwiGLU):
            self.d_ff, self.activation = part.gate_proj.d_out, ""
            self.up = make(*joined([linear_parts(part.gate_proj), linear_parts(part.up_proj)]))
        else:
            self.d_ff, self.activation = part.up_proj.d_out, part.activation
            self.up = make(*linear_parts(part.up_proj))

    def hidden(self, x_BD: Tensor) -> Tensor:
        """(B, F)."""
        wide = self.up(x_BD)
        if self.activation:
            return activate(wide, self.activation)
        return F.silu(wide[:, : self.d_ff]) * wide[:, self.d_ff :]


class LeanBlock:
    """The three residual lines of a block, for one new token a row."""

    def __init__(self, part: TransformerBlock, block: spec.Block, make: MakeProduct) -> None:
        self.pre = part.pre
        self.attention = LeanAttention(part.attn, block.attention, make)
        self.feed = LeanFeed(part.ffn, make)
        self.attn_norm, self.ffn_norm = make_norm(part.attn_norm), make_norm(part.ffn_norm)
        self.cross = self.cross_norm = None
        if part.cross is not None and part.cross_norm is not None and block.cross is not None:
            self.cross = LeanCross(part.cross, block.cross, make)
            self.cross_norm = make_norm(part.cross_norm)

    def __call__(
        self,
        x_BD: Tensor,
        kv_BXSH: Tensor,
        end: "int | Tensor",
        *,
        rotation: tuple[Tensor, Tensor] | None,
        mask_B11S: Tensor | None,
        cross: tuple[Tensor, Tensor] | None,
        cross_mask_B11S: Tensor | None,
    ) -> Tensor:
        own, feed = self.attention, self.feed
        y_BD = self.attn_norm(x_BD) if self.pre else x_BD
        heads = own.heads(y_BD, kv_BXSH, end, rotation=rotation, mask_B11S=mask_B11S)
        x_BD = own.out.onto(x_BD, heads)
        x_BD = x_BD if self.pre else self.attn_norm(x_BD)
        if self.cross is not None:
            assert self.cross_norm is not None and cross is not None
            y_BD = self.cross_norm(x_BD) if self.pre else x_BD
            x_BD = self.cross.out.onto(
                x_BD, self.cross.heads(y_BD, cross, mask_B11S=cross_mask_B11S)
            )
            x_BD = x_BD if self.pre else self.cross_norm(x_BD)
        y_BD = self.ffn_norm(x_BD) if self.pre else x_BD
        x_BD = feed.down.onto(x_BD, feed.hidden(y_BD))
        return x_BD if self.pre else self.ffn_norm(x_BD)


class LeanModel:
    """A whole decoder as one function of the new tokens; see `step`."""

    def __init__(self, model: Model, *, make: MakeProduct) -> None:
        parts: StackParts = model.decoder if isinstance(model, EncoderDecoder) else model
        self.embed = parts.embed
        self.blocks = [
            LeanBlock(part, block, make)
            for part, block in zip(parts.blocks, parts.stack.blocks(), strict=True)
        ]
        self.final_norm = None if parts.final_norm is None else make_norm(parts.final_norm)
        dtype = next(model.parameters()).dtype
        self.places_SD = None
        if parts.position is not None:
            table = getattr(parts.position, "table", None)
            self.places_SD = (parts.position.weight if table is None else table).detach().to(dtype)
        self.turns = {int(w): _both_halves(r, dtype) for w, r in parts.rotary.items()}
        self.head = _make_head(model, make)

    def step(
        self,
        tokens_B: Tensor,
        kvs: list[Tensor],
        end: "int | Tensor",
        *,
        places_B: Tensor | None,
        mask_B11S: Tensor | None,
        crosses: list[tuple[Tensor, Tensor]],
        cross_mask_B11S: Tensor | None,
    ) -> Tensor:
        """Logits (B, V) after one more token; it becomes position end - 1 of the cache.

        `places_B` says where rows stand if not all at end - 1, as padded ones do.
        """
        at = end - 1 if places_B is None else places_B
        x_BD = self._embedded(tokens_B, at)
        rotations = {
            width: (cos[at], sin[at]) if places_B is None else (cos[at][:, None], sin[at][:, None])
            for width, (cos, sin) in self.turns.items()
        }
        for layer, block in enumerate(self.blocks):
            x_BD = block(
                x_BD,
                kvs[layer],
                end,
                rotation=rotations.get(block.attention.d_head),
                mask_B11S=mask_B11S,
                cross=crosses[layer] if crosses else None,
                cross_mask_B11S=cross_mask_B11S,
            )
        return self.head(x_BD if self.final_norm is None else self.final_norm(x_BD))

    def _embedded(self, tokens_B: Tensor, at: "int | Tensor") -> Tensor:
        embed = self.embed
        if isinstance(embed, TokenEmbedding):
            x_BD = embed.weight.detach().index_select(0, tokens_B)
            scale = 1.0 if embed.scale is None else embed.scale
        else:
            assert isinstance(embed, FactorizedTokenEmbedding)
            x_BD, scale = embed.u.detach().index_select(0, tokens_B) @ embed.v.detach(), 1.0
        if self.places_SD is not None:
            return torch.add(self.places_SD[at], x_BD, alpha=scale)
        return x_BD if scale == 1.0 else x_BD * scale


def _both_halves(part: RotaryPosition, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (S, H), so that turned = x * cos + (x, halves exchanged) * sin."""
    cos, sin = part.table.to(dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _make_head(model: Model, make: MakeProduct) -> Callable[[Tensor], Tensor]:
    part = model.heads["next"]
    if not isinstance(part, TiedHead):
        return make(*linear_parts(part))
    bias = None if part.bias is None else part.bias.detach()
    embed = model.output_embedding()
    if isinstance(embed, TokenEmbedding):
        return make(embed.weight.detach(), bias)
    narrow, wide = make(embed.v.detach(), None), make(embed.u.detach(), bias)
    return lambda x: wide(narrow(x))
