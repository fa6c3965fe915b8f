"""A transformer block: its residual lines, with the norm before or after, and their backward.

pre: x = x + part(norm(x)).  post: x = norm(x + part(x)).  Parts: attention, cross-attention, ffn.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

import numpy as np

from glassformer.byhand.attention import HeadsCache, Past, multi_head_backward, multi_head_forward
from glassformer.byhand.ffn import (
    FeedCache,
    SwiGLUCache,
    feed_backward,
    feed_forward,
    swiglu_backward,
    swiglu_forward,
)
from glassformer.byhand.moe import Experts, MoECache, moe_backward, moe_forward
from glassformer.byhand.norm import NormCache, has_shift, norm_backward, norm_forward
from glassformer.byhand.pass_context import Array, PassContext
from glassformer.spec import model as spec

# B batch, T query length, S key length, D d_model

#: The tap after each part's residual line.
RESIDUAL_TAPS = {"attn": "resid_mid", "cross": "resid_cross", "ffn": "resid_post"}


@dataclass(slots=True)
class BlockArrays:
    """Parameters of one block, or their gradients: by leaf name within each part.

    `experts` has those of a mixture's experts, each by leaf name; `ffn` its router.
    """

    attn: dict[str, Array] = field(default_factory=dict)
    cross: dict[str, Array] = field(default_factory=dict)
    ffn: dict[str, Array] = field(default_factory=dict)
    norms: dict[str, Array] = field(default_factory=dict)
    experts: Experts = field(default_factory=dict)


@dataclass(slots=True)
class Setting:
    """A block's other inputs: mask, bias of scores, rotations, the encoder's memory, the past."""

    allow: Array | None = None
    bias: Array | None = None
    rotation: tuple[Array, Array] | None = None
    memory_BSD: Array | None = None
    memory_allow: Array | None = None
    memory_ready: tuple[Array, Array] | None = None
    past: Past | None = None
    valid_BT: Array | None = None


class PartCache(NamedTuple):
    """One residual line."""

    name: str
    norm: NormCache
    keep: Array | None
    part: HeadsCache | FeedCache | SwiGLUCache | MoECache


class BlockCache(NamedTuple):
    """The cache of a block for its backward."""

    block: spec.Block
    lines: list[PartCache]
    at: str

    @property
    def balance(self) -> float:
        """The load-balancing loss of its mixture of experts, or 0."""
        part = self.lines[-1].part
        return part.loss if isinstance(part, MoECache) else 0.0


def block_forward(
    x_BTD: Array,
    *,
    block: spec.Block,
    params: BlockArrays,
    pass_context: PassContext,
    setting: Setting,
    dropout: spec.Dropout,
    at: str = "",
) -> tuple[Array, BlockCache]:
    """Return the residual stream after this block. A pre-norm block updates x in place."""
    ws, lines = pass_context.ws, []
    pass_context.tap(f"{at}resid_pre", x_BTD)
    for name in ("attn", "ffn") if block.cross is None else ("attn", "cross", "ffn"):
        norm_name = f"{name}_norm"
        if block.placement == "pre":
            normed, norm = norm_forward(
                x_BTD, norm=block.norm, params=params.norms, name=norm_name, ws=ws
            )
            out, part = _part_forward(
                normed, name, block, params, pass_context, setting, dropout, at
            )
            keep = _drop(out, pass_context, dropout.residual)
            x_BTD += out
        else:
            out, part = _part_forward(
                x_BTD, name, block, params, pass_context, setting, dropout, at
            )
            keep = _drop(out, pass_context, dropout.residual)
            out += x_BTD
            x_BTD, norm = norm_forward(
                out, norm=block.norm, params=params.norms, name=norm_name, unit=out, ws=ws
            )
        pass_context.tap(f"{at}{RESIDUAL_TAPS[name]}", x_BTD)
        lines.append(PartCache(name, norm, keep, part))
    return x_BTD, BlockCache(block, lines, at)


def block_backward(
    d_BTD: Array,
    cache: BlockCache,
    *,
    grads: BlockArrays,
    pass_context: PassContext,
    dmemory_BSD: Array | None = None,
    dbalance: float = 0.0,
) -> Array:
    """Return the gradient of the residual stream before this block, in place; add to dmemory.

    `dbalance` is the slope of the objective in this block's load-balancing loss.
    """
    ws, block = pass_context.ws, cache.block
    biased = has_shift(block.norm)
    for name, norm, keep, part in reversed(cache.lines):
        mark = ws.mark()
        norm_name = f"{name}_norm"
        pass_context.tap_grad(f"{cache.at}{RESIDUAL_TAPS[name]}", d_BTD)
        if block.placement == "pre":
            # forward: x' = x + keep * part(norm(x))   =>   dx = dx' + norm'(part'(keep * dx'))
            dout = d_BTD if keep is None else np.multiply(d_BTD, keep, out=ws.take(d_BTD.shape))
            dnormed = _part_backward(dout, part, name, grads, pass_context, dmemory_BSD, dbalance)
            norm_backward(
                dnormed, norm, grads=grads.norms, name=norm_name, biased=biased, dx=dnormed, ws=ws
            )
            d_BTD += dnormed
        else:
            # forward: x' = norm(s), s = x + keep * part(x)
            #   =>   ds = norm'(dx'),  dx = ds + part'(keep * ds)
            norm_backward(
                d_BTD, norm, grads=grads.norms, name=norm_name, biased=biased, dx=d_BTD, ws=ws
            )
            dout = d_BTD if keep is None else np.multiply(d_BTD, keep, out=ws.take(d_BTD.shape))
            d_BTD += _part_backward(dout, part, name, grads, pass_context, dmemory_BSD, dbalance)
        ws.release(mark)
    pass_context.tap_grad(f"{cache.at}resid_pre", d_BTD)
    return d_BTD


def _drop(out_BTD: Array, pass_context: PassContext, rate: float) -> Array | None:
    keep = pass_context.keep(out_BTD.shape, rate)
    if keep is not None:
        out_BTD *= keep
    return keep


def _part_forward(
    x_BTD: Array,
    name: str,
    block: spec.Block,
    params: BlockArrays,
    pass_context: PassContext,
    setting: Setting,
    dropout: spec.Dropout,
    at: str,
) -> tuple[Array, HeadsCache | FeedCache | SwiGLUCache | MoECache]:
    if name == "attn":
        return multi_head_forward(
            x_BTD,
            attention=block.attention,
            params=params.attn,
            pass_context=pass_context,
            rotation=setting.rotation,
            allow=setting.allow,
            bias=setting.bias,
            past=setting.past,
            dropout=dropout.attention,
            at=f"{at}attn.",
        )
    if name == "cross":
        assert block.cross is not None
        return multi_head_forward(
            x_BTD,
            attention=block.cross,
            params=params.cross,
            pass_context=pass_context,
            context_BSD=setting.memory_BSD,
            ready=setting.memory_ready,
            allow=setting.memory_allow,
            dropout=dropout.attention,
            at=f"{at}cross.",
        )
    match block.ffn:
        case spec.SwiGLU():
            return swiglu_forward(
                x_BTD,
                params=params.ffn,
                pass_context=pass_context,
                dropout=dropout.ffn,
                at=f"{at}ffn.",
            )
        case spec.MLP() as ffn:
            return feed_forward(
                x_BTD,
                ffn=ffn,
                params=params.ffn,
                pass_context=pass_context,
                dropout=dropout.ffn,
                at=f"{at}ffn.",
            )
        case spec.MoE():
            return moe_forward(
                x_BTD,
                ffn=block.ffn,
                params=params.ffn,
                experts=params.experts,
                pass_context=pass_context,
                valid_BT=setting.valid_BT,
                dropout=dropout.ffn,
                at=f"{at}ffn.",
            )
        case _ as unreachable:
            assert_never(unreachable)


def _part_backward(
    dout_BTD: Array,
    part: HeadsCache | FeedCache | SwiGLUCache | MoECache,
    name: str,
    grads: BlockArrays,
    pass_context: PassContext,
    dmemory_BSD: Array | None,
    dbalance: float,
) -> Array:
    match part:
        case FeedCache():
            return feed_backward(dout_BTD, part, grads=grads.ffn, pass_context=pass_context)
        case SwiGLUCache():
            return swiglu_backward(dout_BTD, part, grads=grads.ffn, pass_context=pass_context)
        case MoECache():
            return moe_backward(
                dout_BTD,
                part,
                grads=grads.ffn,
                experts=grads.experts,
                pass_context=pass_context,
                dloss=dbalance,
            )
        case HeadsCache():
            mine = grads.attn if name == "attn" else grads.cross
            dx, dcontext = multi_head_backward(
                dout_BTD, part, grads=mine, pass_context=pass_context
            )
            if dcontext is not None and dmemory_BSD is not None:
                # every decoder layer reads the same memory, so its gradients add up
                dmemory_BSD += dcontext
            return dx
        case _ as unreachable:
            assert_never(unreachable)
