"""A transformer block: its residual lines, with norms before, after or around each part."""

from typing import Any, assert_never

from torch import Tensor, nn

from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.cache import Cache
from glassformer.nn.experts import BalanceAt, MixtureOfExperts, build_feed_forward
from glassformer.nn.mask import Mask
from glassformer.nn.norm import build_norm
from glassformer.nn.taps import TapsAt, tap, under
from glassformer.spec import model as spec

# B batch, T length, S source length, D d_model


class TransformerBlock(nn.Module):
    """A mixer, cross-attention and feed-forward, each added to the residual stream.

    Post-norm is the 2017 paper's; pre-norm keeps the residual path clean from end to end, which
    makes deep models trainable without care for the warmup.
    """

    attn: MultiHeadAttention

    def __init__(
        self, block: spec.Block, d_model: int, *, layer: int = 0, dropout: spec.Dropout
    ) -> None:
        super().__init__()
        self.layer, self.placement = layer, block.placement
        self.residual_scale = block.residual_scale
        self.dropout = nn.Dropout(dropout.residual)
        # None where no line of this placement has the norm.
        norm: Any = lambda there: build_norm(block.norm, d_model) if there else None  # noqa: E731
        self.attn_norm = norm(block.placement != "pre_ffn")
        self.leaf = block.mixer.leaf  # `attn`, where the mixer is attention
        self.add_module(self.leaf, build_mixer(block.mixer, d_model, dropout=dropout))
        self.cross_norm = norm(block.cross is not None)
        self.cross: MultiHeadAttention | None = None
        if block.cross is not None:
            self.cross = MultiHeadAttention(block.cross, d_model, dropout=dropout.attention)
        self.attn_post_norm = norm(block.placement == "sandwich")
        self.ffn_norm = norm(block.placement != "parallel_shared")
        self.ffn = build_feed_forward(block.ffn, d_model, dropout=dropout.ffn)
        self.ffn_post_norm = norm(block.placement == "sandwich")

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
    ) -> Tensor:
        """Return the stream after this block."""

        def mix(x: Tensor) -> Tensor:
            at, n, mixer = under(taps, f"{self.leaf}."), self.layer, getattr(self, self.leaf)
            out = mixer(x, mask=mask, rotation=rotation, cache=cache, layer=n, taps=at)
            return self.drop(out)

        def read(x: Tensor) -> Tensor:
            assert self.cross is not None and memory_mask is not None
            at, source, n = under(taps, "cross."), memory_BSD, self.layer
            out = self.cross(x, mask=memory_mask, context_BSD=source, cache=cache, layer=n, taps=at)
            return self.drop(out)

        def feed(x: Tensor) -> Tensor:
            at, mixture = under(taps, "ffn."), isinstance(self.ffn, MixtureOfExperts)
            out = self.ffn(x, taps=at, balance=balance) if mixture else self.ffn(x, taps=at)
            return self.drop(out)

        x = tap(taps, "resid_pre", x_BTD)
        match self.placement:
            case "pre":
                x = tap(taps, "resid_mid", x + mix(self.attn_norm(x)))
                if self.cross is not None:
                    x = tap(taps, "resid_cross", x + read(self.cross_norm(x)))
                return tap(taps, "resid_post", x + feed(self.ffn_norm(x)))
            case "post":
                x = tap(taps, "resid_mid", self.attn_norm(x + mix(x)))
                if self.cross is not None:
                    x = tap(taps, "resid_cross", self.cross_norm(x + read(x)))
                return tap(taps, "resid_post", self.ffn_norm(x + feed(x)))
            case "sandwich":
                x = tap(taps, "resid_mid", x + self.attn_post_norm(mix(self.attn_norm(x))))
                return tap(taps, "resid_post", x + self.ffn_post_norm(feed(self.ffn_norm(x))))
            case "output":
                x = tap(taps, "resid_mid", x + self.attn_norm(mix(x)))
                return tap(taps, "resid_post", x + self.ffn_norm(feed(x)))
            case "parallel":
                one, two = self.attn_norm(x), self.ffn_norm(x)
                x = tap(taps, "resid_mid", x + mix(one))
                return tap(taps, "resid_post", x + feed(two))
            case "parallel_shared":
                normed = self.attn_norm(x)
                x = tap(taps, "resid_mid", x + mix(normed))
                return tap(taps, "resid_post", x + feed(normed))
            case "pre_ffn":
                x = tap(taps, "resid_mid", x + mix(x))
                return tap(taps, "resid_post", x + feed(self.ffn_norm(x)))
            case _ as unreachable:
                assert_never(unreachable)

    def drop(self, x_BTD: Tensor) -> Tensor:
        """Apply dropout and scale to a sublayer's output, before it joins the residual stream."""
        dropped_BTD: Tensor = self.dropout(x_BTD)
        return dropped_BTD if self.residual_scale == 1.0 else dropped_BTD * self.residual_scale


def build_mixer(mixer: spec.Mixer, d_model: int, *, dropout: spec.Dropout) -> MultiHeadAttention:
    """Build what a block does between positions."""
    match mixer:
        case spec.Attention():
            return MultiHeadAttention(mixer, d_model, dropout=dropout.attention)
        case _ as unreachable:
            assert_never(unreachable)
