"""One decoding step without what a step does not need: no modules, masks, or copies of the past.

The weights are derived forms of a model's: query, key and value as one product, gate and up as one,
each in the fastest layout.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from glassformer.generate.lean_attention import LeanAttention, LeanCross
from glassformer.generate.projection import Maker, OwnProduct, Projection, make_norm
from glassformer.models.encoder_decoder import EncoderDecoder
from glassformer.models.model import Model
from glassformer.models.stack import StackParts
from glassformer.nn.block import TransformerBlock
from glassformer.nn.embedding import FactorizedTokenEmbedding, TokenEmbedding
from glassformer.nn.ffn import MLP, SwiGLU, activate
from glassformer.nn.heads import TiedHead
from glassformer.nn.norm import LayerNorm, RMSNorm
from glassformer.nn.position import LearnedPosition, RotaryPosition, SinusoidalPosition
from glassformer.spec import model as spec

# B batch, S positions, D d_model, H d_head, F d_ff, V vocab,
# X heads of the product that makes queries, keys and values


class LeanFeed:
    """The feed-forward half; gate and up are one product."""

    def __init__(
        self, part: MLP | SwiGLU, make: Maker, *, norm: LayerNorm | RMSNorm | None
    ) -> None:
        self.down = make.linear(part.down_proj)
        if isinstance(part, SwiGLU):
            self.activation = ""
            self.up = make.linear(part.gate_proj, part.up_proj, norm=norm, gated=True)
        else:
            self.activation = part.activation
            self.up = make.linear(part.up_proj, norm=norm)

    def hidden(self, x_BD: Tensor) -> Tensor:
        """(B, F)."""
        wide = self.up(x_BD)
        return activate(wide, self.activation) if self.activation else wide


class LeanBlock:
    """The three residual lines of a block, for one new token a row.

    Norms before a part belong to the part's first product; those after it stand here.
    """

    def __init__(self, part: TransformerBlock, block: spec.Block, make: Maker) -> None:
        pre = part.pre
        self.attention = LeanAttention(
            part.attn, block.attention, make, norm=part.attn_norm if pre else None
        )
        self.feed = LeanFeed(part.ffn, make, norm=part.ffn_norm if pre else None)
        self.attn_norm = _same if pre else make_norm(part.attn_norm)
        self.ffn_norm = _same if pre else make_norm(part.ffn_norm)
        self.cross, self.cross_norm = None, _same
        if part.cross is not None and part.cross_norm is not None and block.cross is not None:
            self.cross = LeanCross(
                part.cross, block.cross, make, norm=part.cross_norm if pre else None
            )
            self.cross_norm = _same if pre else make_norm(part.cross_norm)

    def __call__(
        self,
        x_BD: Tensor,
        kv_BXSH: Tensor,
        end: "int | Tensor",
        *,
        rotation: tuple[Tensor, Tensor] | None,
        places_B: Tensor | None,
        mask_B11S: Tensor | None,
        cross: tuple[Tensor, Tensor] | None,
        cross_mask_B11S: Tensor | None,
    ) -> Tensor:
        own, feed = self.attention, self.feed
        heads = own.heads(
            x_BD, kv_BXSH, end, rotation=rotation, places_B=places_B, mask_B11S=mask_B11S
        )
        x_BD = self.attn_norm(own.out.onto(x_BD, heads))
        if self.cross is not None:
            assert cross is not None
            heads = self.cross.heads(x_BD, cross, mask_B11S=cross_mask_B11S)
            x_BD = self.cross_norm(self.cross.out.onto(x_BD, heads))
        return self.ffn_norm(feed.down.onto(x_BD, feed.hidden(x_BD)))


def _same(x_BD: Tensor) -> Tensor:
    return x_BD


class LeanModel:
    """A whole decoder as one function of the new tokens; see `step`."""

    def __init__(self, model: Model, *, make: Maker) -> None:
        parts: StackParts = model.decoder if isinstance(model, EncoderDecoder) else model
        self.embed = parts.embed
        self.blocks = [
            LeanBlock(part, block, make)
            for part, block in zip(parts.blocks, parts.stack.blocks(), strict=True)
        ]
        dtype = next(model.parameters()).dtype
        self.places_SD = _places(parts.position, dtype)
        self.turns = {int(w): _both_halves(r, dtype) for w, r in parts.rotary.items()}
        for block in self.blocks:
            block.attention.table = self.turns.get(block.attention.d_head)
        self.head = _make_head(model, make, norm=parts.final_norm)

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
        turned_by_kernels = isinstance(end, Tensor) and all(
            block.attention.gpu is not None for block in self.blocks
        )
        rotations = {
            width: (cos[at], sin[at]) if places_B is None else (cos[at][:, None], sin[at][:, None])
            for width, (cos, sin) in ({} if turned_by_kernels else self.turns).items()
        }
        for layer, block in enumerate(self.blocks):
            x_BD = block(
                x_BD,
                kvs[layer],
                end,
                rotation=rotations.get(block.attention.d_head),
                places_B=places_B,
                mask_B11S=mask_B11S,
                cross=crosses[layer] if crosses else None,
                cross_mask_B11S=cross_mask_B11S,
            )
        return self.head(x_BD)

    def _embedded(self, tokens_B: Tensor, at: "int | Tensor") -> Tensor:
        embed = self.embed
        if type(embed) is TokenEmbedding:
            x_BD = embed.weight.detach().index_select(0, tokens_B)
            scale = 1.0 if embed.scale is None else embed.scale
        elif isinstance(embed, FactorizedTokenEmbedding):
            x_BD, scale = embed.u.detach().index_select(0, tokens_B) @ embed.v.detach(), 1.0
        else:
            x_BD, scale = embed(tokens_B), 1.0
        if self.places_SD is not None:
            return torch.add(self.places_SD[at], x_BD, alpha=scale)
        return x_BD if scale == 1.0 else x_BD * scale


def _places(part: SinusoidalPosition | LearnedPosition | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the embedding at each position."""
    match part:
        case SinusoidalPosition():
            return part.table.to(dtype)
        case LearnedPosition():
            return part.weight.detach().to(dtype)
    return None


def _both_halves(part: RotaryPosition, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (S, H), so that turned = x * cos + (x, halves exchanged) * sin."""
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
    if isinstance(embed, OwnProduct):
        return Projection(embed.product(bias), norm=norm, gated=False, gpu=None)
    narrow = make.projection(embed.v.detach(), None, norm=norm)
    wide = make.projection(embed.u.detach(), bias)
    return lambda x: wide(narrow(x))
