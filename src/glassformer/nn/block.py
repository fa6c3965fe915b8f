"""A transformer block: its residual lines, with norms before, after or around each part."""

from typing import assert_never

from torch import Tensor, nn

from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.cache import Cache
from glassformer.nn.experts import BalanceAt, MixtureOfExperts, build_feed_forward
from glassformer.nn.mask import Mask
from glassformer.nn.norm import build_norm
from glassformer.nn.residual import Pending
from glassformer.nn.taps import TapsAt, tap, under
from glassformer.spec import model as spec

# B batch, T length, S source length, D d_model


class TransformerBlock(nn.Module):
    """pre: x + part(norm(x)).  post: norm(x + part(x)).  Parts: attention, cross-attention, ffn.

    Post-norm is the 2017 paper's; pre-norm keeps the residual path clean from end to end, which
    makes deep models trainable without care for the warmup. sandwich: x + norm'(part(norm(x))).
    output: x + norm(part(x)).  parallel: x + attention(norm(x)) + ffn(norm'(x)), or one norm.
    """

    def __init__(
        self, block: spec.Block, d_model: int, *, layer: int = 0, dropout: spec.Dropout
    ) -> None:
        super().__init__()
        self.layer = layer
        self.placement = block.placement
        self.pre = block.placement == "pre"
        self.residual_scale = block.residual_scale
        self.dropout = nn.Dropout(dropout.residual)
        bare = block.placement == "pre_ffn"
        self.attn_norm = None if bare else build_norm(block.norm, d_model)
        self.attn = MultiHeadAttention(block.attention, d_model, dropout=dropout.attention)
        self.cross_norm = self.cross = None
        if block.cross is not None:
            self.cross_norm = build_norm(block.norm, d_model)
            self.cross = MultiHeadAttention(block.cross, d_model, dropout=dropout.attention)
        self.attn_post_norm = self.ffn_post_norm = self.ffn_norm = None
        if block.placement == "sandwich":
            self.attn_post_norm = build_norm(block.norm, d_model)
        if block.placement != "parallel_shared":
            self.ffn_norm = build_norm(block.norm, d_model)
        self.ffn = build_feed_forward(block.ffn, d_model, dropout=dropout.ffn)
        if block.placement == "sandwich":
            self.ffn_post_norm = build_norm(block.norm, d_model)

    def forward(
        self,
        x_BTD: Tensor,
        *,
        mask: Mask,
        memory_BSD: Tensor | None = None,
        memory_mask: Mask | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        taps: TapsAt | None = None,
        balance: BalanceAt | None = None,
        pending: Pending | None = None,
    ) -> Tensor:
        """Return the stream after this block, without what it leaves in `pending`."""

        def attend(x: Tensor) -> Tensor:
            out = self.attn(
                x,
                mask=mask,
                rotation=rotation,
                cache=cache,
                layer=self.layer,
                taps=under(taps, "attn."),
            )
            return self.drop(out)

        def read(x: Tensor) -> Tensor:
            assert self.cross is not None and memory_BSD is not None and memory_mask is not None
            out = self.cross(
                x,
                context_BSD=memory_BSD,
                mask=memory_mask,
                cache=cache,
                layer=self.layer,
                taps=under(taps, "cross."),
            )
            return self.drop(out)

        def feed(x: Tensor) -> Tensor:
            if isinstance(self.ffn, MixtureOfExperts):
                return self.drop(self.ffn(x, taps=under(taps, "ffn."), balance=balance))
            return self.drop(self.ffn(x, taps=under(taps, "ffn.")))

        if pending is not None and self.pre:
            assert taps is None and self.attn_norm is not None and self.ffn_norm is not None
            x, normed = pending.normed(x_BTD, self.attn_norm)
            pending.added_BTD = attend(normed)
            if self.cross_norm is not None:
                x, normed = pending.normed(x, self.cross_norm)
                pending.added_BTD = read(normed)
            x, normed = pending.normed(x, self.ffn_norm)
            pending.added_BTD = feed(normed)
            return x
        x = tap(taps, "resid_pre", x_BTD if pending is None else pending.onto(x_BTD))
        if self.attn_norm is None:
            assert self.placement == "pre_ffn" and self.ffn_norm is not None
            x = tap(taps, "resid_mid", x + attend(x))
            normed = self.ffn_norm(x)
            return tap(taps, "resid_post", x + feed(normed))
        if self.placement == "parallel_shared":
            shared = self.attn_norm(x)
            x = tap(taps, "resid_mid", x + attend(shared))
            return tap(taps, "resid_post", x + feed(shared))
        assert self.ffn_norm is not None
        match self.placement:
            case "pre":
                x = tap(taps, "resid_mid", x + attend(self.attn_norm(x)))
                if self.cross_norm is not None:
                    x = tap(taps, "resid_cross", x + read(self.cross_norm(x)))
                return tap(taps, "resid_post", x + feed(self.ffn_norm(x)))
            case "post":
                x = tap(taps, "resid_mid", self.attn_norm(x + attend(x)))
                if self.cross_norm is not None:
                    x = tap(taps, "resid_cross", self.cross_norm(x + read(x)))
                return tap(taps, "resid_post", self.ffn_norm(x + feed(x)))
            case "sandwich":
                assert self.attn_post_norm is not None and self.ffn_post_norm is not None
                x = tap(taps, "resid_mid", x + self.attn_post_norm(attend(self.attn_norm(x))))
                return tap(taps, "resid_post", x + self.ffn_post_norm(feed(self.ffn_norm(x))))
            case "output":
                x = tap(taps, "resid_mid", x + self.attn_norm(attend(x)))
                return tap(taps, "resid_post", x + self.ffn_norm(feed(x)))
            case "parallel":
                one, two = self.attn_norm(x), self.ffn_norm(x)
                x = tap(taps, "resid_mid", x + attend(one))
                return tap(taps, "resid_post", x + feed(two))
            case "pre_ffn":
                raise AssertionError("a block without a norm of its attention was run above")
            case _ as unreachable:
                assert_never(unreachable)

    def drop(self, x_BTD: Tensor) -> Tensor:
        """Apply dropout and scale to a sublayer's output, before it joins the residual stream."""
        dropped_BTD: Tensor = self.dropout(x_BTD)
        return dropped_BTD if self.residual_scale == 1.0 else dropped_BTD * self.residual_scale
