"""One decoding step without what a step does not need: no modules, no copies of the past.

The weights are derived from the model's: query, key and value as one product, gate and up as one.
A single query attends to everything before it: there is no causal mask, and what it may not see of
the memory is masked, so that every step has one shape, as a recorded one needs. Grouped heads are
rows of one product, nothing is repeated.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, assert_never, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.gpu.derived_products import (
    FastFeedForward,
    FastMixtureOfExperts,
    HeadNorms,
    Maker,
    OwnTable,
    Projection,
    make_norm,
)
from glassformer.gpu.products import Gained, plain_rows
from glassformer.models.model import EncoderDecoder, Model
from glassformer.models.stack import StackParts
from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.block import TransformerBlock
from glassformer.nn.embedding import FactorizedTokenEmbedding, TokenEmbedding
from glassformer.nn.experts import MixtureOfExperts
from glassformer.nn.ffn import MLP, SwiGLU
from glassformer.nn.heads import TiedHead
from glassformer.nn.norm import LayerNorm, RMSNorm
from glassformer.nn.position import RotaryPosition, added_rows, heads_key
from glassformer.spec import lacking
from glassformer.spec import model as spec
from glassformer.spec import program as kinds
from glassformer.spec.errors import InputError
from glassformer.spec.lacking import ANY, Runs, every_field
from glassformer.spec.program import everything_but, missing

# B batch, S positions, D d_model, N query heads, K key-value heads, G = N / K, H d_head,
# X = N + 2 K heads of one product


class Lines(NamedTuple):
    """Rows of a batch whose past lies in other rows of the memory, as the past of beams does.

    The padding and the source of row b are those of row `sources_B[b]` of the prompts; its position
    s lies in row `lines_BS[b, s]` of the memory. What is new is written to row b.
    """

    sources_B: Tensor
    lines_BS: Tensor


class Places(ABC):
    """Rows of several sequences, each token with its own place in memory; see `fast.slots`.

    With `turns`, queries and keys arrive as the product made them: a kernel normalises and rotates.
    """

    turns = False

    @abstractmethod
    def attend(self, own: "FastAttention", qkv_BXH: Tensor, kv_BXSH: Tensor) -> Tensor:
        """Write the rows' keys and values; return their heads' outputs (B, N * H)."""

    @abstractmethod
    def last(self, x_BD: Tensor) -> Tensor:
        """Return the rows whose logits are read."""


#: What the derived step computes: tables of positions are read, however they were made.
RUNS: Runs = {
    **everything_but(spec.RelativeBias, kinds.Adjust, kinds.ReadOut),
    kinds.AddRows: {"table": ANY, "offset": ANY},
    kinds.Norm: {"form": ANY},
    kinds.Rotate: {"base": ANY, "scaling": ANY},
    kinds.Attend: {"before": ANY, "after": ANY},
    kinds.Gate: {"function": ("silu", "sigmoid")},
    kinds.Add: {},
}


#: How a block may be put together, which no single operation says: a field that is not named must
#: have its default.
BLOCKS: Runs = {
    spec.Stack: dict.fromkeys(("final_norm", "embed_norm", "dropout"), ANY),
    spec.Dropout: every_field(spec.Dropout),
    spec.Block: dict.fromkeys(("attention", "ffn", "norm", "cross"), ANY)
    | {"placement": ("pre", "post")},
    spec.Attention: dict.fromkeys(("n_kv_heads", "d_head", "bias", "qk_norm"), ANY)
    | dict.fromkeys(("causal", "window"), ANY),
    spec.LayerNorm: {"eps": ANY},
    spec.RMSNorm: {"eps": ANY},
    spec.MLP: every_field(spec.MLP),
    spec.SwiGLU: dict.fromkeys(("bias", "activation"), ANY),
    spec.MoE: dict.fromkeys(("normalize", "shared", "shared_gate", "balance"), ANY),
}


def lacks(model: spec.ModelSpec) -> str:
    """Return what of a model the derived step does not compute; empty if it computes all.

    The encoder is the model's own.
    """
    made = kinds.program(model).for_head("next")
    ops = tuple(op for op in made.ops if not op.part.startswith("encoder."))
    for lack in (*missing(replace(made, ops=ops), RUNS), *lacking.lacks(model.decoder, BLOCKS)):
        return lack
    for layer, block in enumerate(model.decoder.blocks()):
        for lack in lacking.lacks(_with_default_scale(block, model.d_model), BLOCKS):
            return f"{lack} (blocks.{layer})"
    return ""


def _with_default_scale(block: spec.Block, d_model: int) -> spec.Block:
    """Return a block whose attention does not spell out the scale that it has anyway."""
    own = block.mixer
    if (
        not isinstance(own, spec.Attention)
        or own.scale is None
        or not math.isclose(own.scale, own.head_width(d_model) ** -0.5)
    ):
        return block
    return replace(block, mixer=replace(own, scale=None))


class FastAttention:
    """Self-attention of one new token: q, k and v by one product, the cache written in place."""

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
        # The model sets these: cos and sin of every position, or ALiBi's slope of each head.
        self.table: tuple[Tensor, Tensor] | None = None
        self.slopes_N: Tensor | None = None

    def heads(
        self,
        x_BD: "Tensor | Gained",
        kv_BXSH: Tensor,
        end: "Tensor | Places",
        *,
        rotation: tuple[Tensor, Tensor] | None,
        positions_B: Tensor | None,
        mask_B11S: Tensor | None,
        lines: Lines | None,
    ) -> Tensor:
        """Return the heads' outputs (B, N * H); write position end - 1 of the cache.

        The complete cache is masked, which has one shape for every step. Our GPU kernel reads `end`
        from memory, and only that much of the cache; it alone knows `lines`.
        """
        B, N, K = len(plain_rows(x_BD)), self.n_heads, self.n_kv_heads
        qkv_BXH = self.qkv(x_BD).view(B, N + 2 * K, self.d_head)
        if self.gpu is not None and isinstance(end, Tensor):
            heads: Tensor = self.gpu.attend(
                qkv_BXH,
                kv_BXSH,
                end,
                n_heads=N,
                places_B=positions_B,
                rotation=self.table,
                gains=self.gains,
                eps=0.0 if self.norms is None else self.norms.eps,
                window=self.window,
                mask_BS=None if mask_B11S is None else mask_B11S[:, 0, 0],
                slopes_N=self.slopes_N,
                sources_B=None if lines is None else lines.sources_B,
                lines_BS=None if lines is None else lines.lines_BS,
                in_parts=self.out.gpu is not None,
            )
            return heads
        if isinstance(end, Places) and end.turns:
            return end.attend(self, qkv_BXH, kv_BXSH)
        turned_BXH = qkv_BXH[:, : N + K]
        if self.norms is not None:
            turned_BXH = turned_BXH.copy_(self.norms(turned_BXH))
        if rotation is not None:
            cos, sin = rotation  # both halves; sin with the first half's sign turned
            swapped_BXH = turned_BXH.roll(self.d_head // 2, -1)
            turned_BXH.mul_(cos).addcmul_(swapped_BXH, sin)
        if isinstance(end, Places):
            return end.attend(self, qkv_BXH, kv_BXSH)
        past_BXSH = kv_BXSH.index_copy_(2, end - 1, qkv_BXH[:, N:, None])
        mask = self._until(end, kv_BXSH, mask_B11S)
        if self.slopes_N is not None:
            mask = mask + self.bias(end, past_BXSH.shape[2], past_BXSH.dtype)
        q_BKGH = qkv_BXH[:, :N].view(B, K, N // K, self.d_head)
        heads_BKGH = F.scaled_dot_product_attention(
            q_BKGH, past_BXSH[:, :K], past_BXSH[:, K:], attn_mask=mask
        )
        return heads_BKGH.reshape(B, N * self.d_head)

    def bias(self, end: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Return ALiBi's bias (1, K, G, S) of all columns; the query is column end - 1.

        Padding stands before the prompt, so columns are as far apart as the positions they hold.
        """
        assert self.slopes_N is not None
        column_S = torch.arange(columns, device=self.slopes_N.device)
        distance_S = (end - 1 - column_S).to(self.slopes_N.dtype)
        bias_NS = -self.slopes_N[:, None] * distance_S
        return bias_NS.view(1, self.n_kv_heads, -1, columns).to(dtype)

    def _until(self, end_1: Tensor, kv_BXSH: Tensor, mask_B11S: Tensor | None) -> Tensor:
        """Return a mask to add to scores over the complete cache: -inf outside of what is read."""
        column_S = torch.arange(kv_BXSH.shape[2], device=kv_BXSH.device)
        seen_S = column_S < end_1
        if self.window is not None:
            seen_S = seen_S & (column_S >= end_1 - self.window)
        mask_S = torch.zeros_like(column_S, dtype=kv_BXSH.dtype).masked_fill(~seen_S, -math.inf)
        return mask_S[None, None, None] if mask_B11S is None else mask_B11S + mask_S


class FastCrossAttention:
    """Cross-attention of one new token; keys and values were computed with the prompt."""

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
        self.gpu = make.gpu

    def heads(
        self,
        x_BD: "Tensor | Gained",
        kv: tuple[Tensor, Tensor],
        *,
        mask_B11S: Tensor | None,
        lines: Lines | None,
    ) -> Tensor:
        """Return the heads' outputs (B, N * H)."""
        B, N, K = len(plain_rows(x_BD)), self.n_heads, self.n_kv_heads
        q_BNH = self.query(x_BD).view(B, N, self.d_head)
        q_BNH = q_BNH if self.norm is None else self.norm(q_BNH)
        if self.gpu is not None:
            heads: Tensor = self.gpu.attend_source(
                q_BNH,
                *kv,
                mask_BS=None if mask_B11S is None else mask_B11S[:, 0, 0],
                sources_B=None if lines is None else lines.sources_B,
                in_parts=self.out.gpu is not None,
            )
            return heads
        q_BKGH = q_BNH.view(B, K, N // K, self.d_head)
        heads_BKGH = F.scaled_dot_product_attention(q_BKGH, *kv, attn_mask=mask_B11S)
        return heads_BKGH.reshape(B, N * self.d_head)


# B batch, S positions, D d_model, H d_head, F d_ff, V vocab,
# X heads of the product that makes queries, keys and values


class FastBlock:
    """The three residual lines of a block, for one new token per row.

    A norm before a part belongs to the part's first product; a norm after it is applied here.
    """

    def __init__(self, part: TransformerBlock, block: spec.Block, make: Maker) -> None:
        pre = part.placement == "pre"
        assert part.attn_norm is not None, "`lacks` refuses blocks without one"
        assert part.ffn_norm is not None, "`lacks` refuses blocks without one"
        self.attention = FastAttention(
            part.attn, block.attention, make, norm=part.attn_norm if pre else None
        )
        self.feed = _make_feed(part.ffn, make, norm=part.ffn_norm if pre else None)
        self.attn_norm = _same if pre else _after(make.norm(part.attn_norm))
        self.ffn_norm = _same if pre else _after(make.norm(part.ffn_norm))
        self.cross: FastCrossAttention | None = None
        self.cross_norm: Rows = _same
        if part.cross is not None and part.cross_norm is not None and block.cross is not None:
            self.cross = FastCrossAttention(
                part.cross, block.cross, make, norm=part.cross_norm if pre else None
            )
            self.cross_norm = _same if pre else _after(make.norm(part.cross_norm))

    def products(self) -> list[Projection | None]:
        """Return the products in their order, those that read the residual and those that add.

        None stands for parts that are not one product.
        """
        pairs: list[Projection | None] = [self.attention.qkv, self.attention.out]
        if self.cross is not None:
            pairs += [self.cross.query, self.cross.out]
        if isinstance(self.feed, FastFeedForward):
            return [*pairs, self.feed.up, self.feed.down]
        return [*pairs, None, None]

    def __call__(
        self,
        x_BD: "Tensor | Gained",
        kv_BXSH: Tensor,
        end: "Tensor | Places",
        *,
        rotation: tuple[Tensor, Tensor] | None,
        positions_B: Tensor | None,
        mask_B11S: Tensor | None,
        cross: tuple[Tensor, Tensor] | None,
        cross_mask_B11S: Tensor | None,
        lines: Lines | None,
        last: Callable[[Tensor], Tensor] | None = None,
    ) -> "Tensor | Gained":
        """Return the rows after this block, or those of them that `last` selects."""
        own = self.attention
        heads = own.heads(
            x_BD,
            kv_BXSH,
            end,
            rotation=rotation,
            positions_B=positions_B,
            mask_B11S=mask_B11S,
            lines=lines,
        )
        if last is not None:
            x_BD, heads = last(plain_rows(x_BD)), last(heads)
        x_BD = self.attn_norm(own.out.onto(x_BD, heads))
        if self.cross is not None:
            assert cross is not None
            heads = self.cross.heads(x_BD, cross, mask_B11S=cross_mask_B11S, lines=lines)
            x_BD = self.cross_norm(self.cross.out.onto(x_BD, heads))
        return self.ffn_norm(self.feed.onto(x_BD))


def _make_feed(
    part: MLP | SwiGLU | MixtureOfExperts, make: Maker, *, norm: LayerNorm | RMSNorm | None
) -> FastFeedForward | FastMixtureOfExperts:
    match part:
        case MLP() | SwiGLU():
            return FastFeedForward(part, make, norm=norm)
        case MixtureOfExperts():
            return FastMixtureOfExperts(part, make, norm=norm)
        case _ as unreachable:
            assert_never(unreachable)


#: What is done to rows after a part.
Rows = Callable[["Tensor | Gained"], "Tensor | Gained"]


def _same(x_BD: "Tensor | Gained") -> "Tensor | Gained":
    return x_BD


def _after(norm: Callable[[Tensor], Tensor]) -> Rows:
    return lambda x_BD: norm(plain_rows(x_BD))


class FastModel:
    """A complete decoder as one function of the new tokens; see `step`."""

    def __init__(self, model: Model, *, make: Maker) -> None:
        if reason := lacks(model.spec):
            raise InputError(
                f"the recorded step has no {reason}", hint="TorchStepper runs any model"
            )
        parts = cast(StackParts, model.decoder if isinstance(model, EncoderDecoder) else model)
        self.embed = parts.embed
        self.blocks = [
            FastBlock(cast(TransformerBlock, part), block, make)
            for part, block in zip(parts.blocks, parts.stack.blocks(), strict=True)
        ]
        dtype = next(model.parameters()).dtype
        self.embed_norm = parts.embed_norm
        self.positions_SD = added_rows(parts.position, model.spec.max_seq_len, dtype)
        rotary = ((int(w), cast(RotaryPosition, r)) for w, r in parts.rotary.items())
        self.turns = {width: _both_halves(part, dtype) for width, part in rotary}
        for block in self.blocks:
            block.attention.table = self.turns.get(block.attention.d_head)
            block.attention.slopes_N = _slopes(parts, block.attention)
        self.head = _make_head(model, make, norm=parts.final_norm)
        products = [product for block in self.blocks for product in block.products()]
        last = self.head if isinstance(self.head, Projection) else None
        if last is not None:
            last.find_tokens()
        for adder, reader in zip(products[1::2], [*products[2::2], last], strict=True):
            if adder is not None and reader is not None:
                adder.prepare(reader)

    def finder(self, rows: int) -> "Projection | None":
        """Return the head if it can find the likeliest tokens of so many rows by itself."""
        if not isinstance(self.head, Projection) or self.head.finder is None:
            return None
        return self.head if self.head.finder.takes(rows) else None

    @property
    def all_attend_by_kernels(self) -> bool:
        """True if every layer's attention is one of our GPU kernels."""
        return all(block.attention.gpu is not None for block in self.blocks)

    def step(
        self,
        tokens_B: Tensor,
        kvs: list[Tensor],
        end: "Tensor | Places",
        *,
        positions_B: Tensor,
        mask_B11S: Tensor | None,
        crosses: list[tuple[Tensor, Tensor]],
        cross_mask_B11S: Tensor | None,
        lines: Lines | None = None,
        head: Callable[["Tensor | Gained"], Tensor] | None = None,
    ) -> Tensor:
        """Return logits (B, V) after one more token, which becomes position end - 1 of the cache.

        Another `head` is given the rows that the model's head would read, before their norm.
        `positions_B` are the positions of the rows; `lines` say where their past lies, for our GPU
        kernels.
        """
        embedded_BD = self._embedded(tokens_B, positions_B)
        if self.embed_norm is not None:
            embedded_BD = self.embed_norm(embedded_BD)
        x_BD: Tensor | Gained = embedded_BD
        by_kernels = end.turns if isinstance(end, Places) else self.all_attend_by_kernels
        rotations = {
            width: (cos[positions_B][:, None], sin[positions_B][:, None])
            for width, (cos, sin) in ({} if by_kernels else self.turns).items()
        }
        # Of the last layer only keys and values of all rows are needed.
        last = end.last if isinstance(end, Places) else None
        for layer, block in enumerate(self.blocks):
            x_BD = block(
                x_BD,
                kvs[layer],
                end,
                rotation=rotations.get(block.attention.d_head),
                positions_B=positions_B,
                mask_B11S=mask_B11S,
                cross=crosses[layer] if crosses else None,
                cross_mask_B11S=cross_mask_B11S,
                lines=lines,
                last=last if block is self.blocks[-1] else None,
            )
        return self.head(plain_rows(x_BD)) if head is None else head(x_BD)

    def _embedded(self, tokens_B: Tensor, positions_B: Tensor) -> Tensor:
        embed = self.embed
        if type(embed) is TokenEmbedding:
            x_BD = embed.weight.detach().index_select(0, tokens_B)
            scale = 1.0 if embed.scale is None else embed.scale
        elif isinstance(embed, FactorizedTokenEmbedding):
            x_BD, scale = embed.u.detach().index_select(0, tokens_B) @ embed.v.detach(), 1.0
        else:
            x_BD, scale = embed(tokens_B), 1.0
        if self.positions_SD is not None:
            return torch.add(self.positions_SD[positions_B], x_BD, alpha=scale)
        return x_BD if scale == 1.0 else x_BD * scale


def _slopes(parts: StackParts, attention: FastAttention) -> Tensor | None:
    """Return ALiBi's slope of each head of a layer, if the model has such positions."""
    if not parts.alibi:
        return None
    part = parts.alibi[heads_key(attention.n_heads, attention.d_head)]
    return cast(Tensor, part.table)


def _both_halves(part: RotaryPosition, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin (S, H), so that turned = x * cos + (x, halves exchanged) * sin."""
    cos, sin = part.table.to(dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _make_head(
    model: Model, make: Maker, *, norm: LayerNorm | RMSNorm | None
) -> Callable[[Tensor], Tensor]:
    part = model.heads["next"]
    if not isinstance(part, TiedHead):
        return make.linear(part, norm=norm)
    bias = None if part.bias is None else part.bias.detach()
    embed = model.output_embedding()
    if type(embed) is TokenEmbedding:
        return make.projection(embed.weight.detach(), bias, norm=norm)
    if isinstance(embed, OwnTable):
        return Projection(embed.product(bias), norm=norm, activation="", gpu=None)
    assert isinstance(embed, FactorizedTokenEmbedding)
    narrow = make.projection(embed.v.detach(), None, norm=norm)
    wide = make.projection(embed.u.detach(), bias)
    return lambda x: wide(narrow(x))
