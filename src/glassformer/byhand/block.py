"""A transformer block: its residual lines, with norms before, after or around, and their backward.

pre: x = x + part(norm(x)).  post: x = norm(x + part(x)).  Parts: attention, cross-attention, ffn.
sandwich: x = x + norm'(part(norm(x))).  output: x = x + norm(part(x)).
parallel: x = x + attention(norm(x)) + ffn(norm'(x)); parallel_shared has one norm for both.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

import numpy as np

from glassformer.byhand.attention import HeadsCache, Past, multi_head_backward, multi_head_forward
from glassformer.byhand.ffn import (
    Experts,
    FeedCache,
    MoECache,
    SwiGLUCache,
    feed_backward,
    feed_forward,
    moe_backward,
    moe_forward,
    swiglu_backward,
    swiglu_forward,
)
from glassformer.byhand.norm import NormCache, norm_backward, norm_forward
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


PartOf = HeadsCache | FeedCache | SwiGLUCache | MoECache


class PartCache(NamedTuple):
    """One residual line: the norm before the part or around the sum, and the one of its output."""

    name: str
    norm: NormCache | None
    out_norm: NormCache | None
    keep: Array | None
    part: PartOf


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
    """Return the residual stream after this block, in place unless norms come after the sum."""
    ws, lines = pass_context.ws, []

    def normed(x: Array, name: str, *, unit: Array | None = None) -> tuple[Array, NormCache]:
        return norm_forward(x, norm=block.norm, params=params.norms, name=name, unit=unit, ws=ws)

    def run(x: Array, name: str) -> tuple[Array, PartOf, Array | None]:
        out, part = _part_forward(x, name, block, params, pass_context, setting, dropout, at)
        return out, part, _drop(out, pass_context, dropout.residual)

    pass_context.tap(f"{at}resid_pre", x_BTD)
    if block.placement in ("parallel", "parallel_shared"):
        into, attn_norm = normed(x_BTD, "attn_norm")
        outs = [run(into, "attn")]
        ffn_norm = None
        if block.placement == "parallel":
            into, ffn_norm = normed(x_BTD, "ffn_norm")
        outs.append(run(into, "ffn"))
        for name, own, (out, part, keep) in zip(
            ("attn", "ffn"), (attn_norm, ffn_norm), outs, strict=True
        ):
            x_BTD += out
            pass_context.tap(f"{at}{RESIDUAL_TAPS[name]}", x_BTD)
            lines.append(PartCache(name, own, None, keep, part))
        return x_BTD, BlockCache(block, lines, at)
    for name in ("attn", "ffn") if block.cross is None else ("attn", "cross", "ffn"):
        norm: NormCache | None = None
        out_norm: NormCache | None = None
        match block.placement:
            case "pre":
                into, norm = normed(x_BTD, f"{name}_norm")
                out, part, keep = run(into, name)
                if block.residual_scale != 1.0:
                    out *= block.residual_scale
                x_BTD += out
            case "pre_ffn" if name == "attn":
                out, part, keep = run(x_BTD, name)
                x_BTD = np.add(x_BTD, out, out=out)  # the part keeps its input, x
            case "pre_ffn":
                into, norm = normed(x_BTD, f"{name}_norm")
                out, part, keep = run(into, name)
                x_BTD += out
            case "post":
                out, part, keep = run(x_BTD, name)
                out += x_BTD
                x_BTD, norm = normed(out, f"{name}_norm", unit=out)
            case "sandwich":
                into, norm = normed(x_BTD, f"{name}_norm")
                out, part, keep = run(into, name)
                out, out_norm = normed(out, f"{name}_post_norm")
                x_BTD += out
            case "output":
                out, part, keep = run(x_BTD, name)
                out, out_norm = normed(out, f"{name}_norm")
                x_BTD = np.add(x_BTD, out, out=out)  # the part keeps its input, x
            case "parallel" | "parallel_shared":
                raise AssertionError("two parts of one input have no line of their own")
            case _ as unreachable:
                assert_never(unreachable)
        pass_context.tap(f"{at}{RESIDUAL_TAPS[name]}", x_BTD)
        lines.append(PartCache(name, norm, out_norm, keep, part))
    return x_BTD, BlockCache(block, lines, at)


def block_backward(
    d_BTD: Array,
    cache: BlockCache,
    *,
    grads: BlockArrays,
    pass_context: PassContext,
    dmemory_BSD: Array | None = None,
    dbalance: float = 0.0,
    dbias: Array | None = None,
) -> Array:
    """Return the gradient of the residual stream before this block, in place; add to dmemory.

    `dbalance` is the slope of the objective in this block's load-balancing loss; `dbias`, that of
    self-attention's bias where it is learned, is added to.
    """
    ws, block = pass_context.ws, cache.block

    def unnormed(d: Array, norm: NormCache | None, name: str, *, dx: Array) -> Array:
        assert norm is not None
        return norm_backward(d, norm, norm=block.norm, grads=grads.norms, name=name, dx=dx, ws=ws)

    def back(d: Array, line: PartCache) -> Array:
        dout = d if line.keep is None else np.multiply(d, line.keep, out=ws.take(d.shape))
        return _part_backward(
            dout, line.part, line.name, grads, pass_context, dmemory_BSD, dbalance, dbias
        )

    if block.placement in ("parallel", "parallel_shared"):
        # forward: x' = x + attention(norm(x)) + ffn(norm'(x))
        #   =>   both parts get dx', and dx = dx' + norm'(attention') + norm'(ffn')
        attn, ffn = cache.lines
        mark = ws.mark()
        for line in (ffn, attn):
            pass_context.tap_grad(f"{cache.at}{RESIDUAL_TAPS[line.name]}", d_BTD)
        dinto = back(d_BTD, ffn)
        dattn = back(d_BTD, attn)
        if block.placement == "parallel":
            d_BTD += unnormed(dinto, ffn.norm, "ffn_norm", dx=dinto)
        else:
            dattn += dinto
        d_BTD += unnormed(dattn, attn.norm, "attn_norm", dx=dattn)
        ws.release(mark)
        pass_context.tap_grad(f"{cache.at}resid_pre", d_BTD)
        return d_BTD
    for line in reversed(cache.lines):
        mark, name = ws.mark(), line.name
        pass_context.tap_grad(f"{cache.at}{RESIDUAL_TAPS[name]}", d_BTD)
        match block.placement:
            case "pre":
                # forward: x' = x + keep * part(norm(x))   =>   dx = dx' + norm'(part'(keep * dx'))
                dout = d_BTD
                if block.residual_scale != 1.0:
                    dout = np.multiply(d_BTD, block.residual_scale, out=ws.take(d_BTD.shape))
                dnormed = back(dout, line)
                d_BTD += unnormed(dnormed, line.norm, f"{name}_norm", dx=dnormed)
            case "pre_ffn" if name == "attn":
                # forward: x' = x + keep * part(x)   =>   dx = dx' + part'(keep * dx')
                dinto = back(d_BTD, line)
                d_BTD += dinto
            case "pre_ffn":
                dnormed = back(d_BTD, line)
                d_BTD += unnormed(dnormed, line.norm, f"{name}_norm", dx=dnormed)
            case "post":
                # forward: x' = norm(s), s = x + keep * part(x)
                #   =>   ds = norm'(dx'),  dx = ds + part'(keep * ds)
                unnormed(d_BTD, line.norm, f"{name}_norm", dx=d_BTD)
                d_BTD += back(d_BTD, line)
            case "sandwich":
                # forward: x' = x + norm2(keep * part(norm1(x)))
                #   =>   dx = dx' + norm1'(part'(keep * norm2'(dx')))
                dout = ws.take(d_BTD.shape)
                dout = unnormed(d_BTD, line.out_norm, f"{name}_post_norm", dx=dout)
                dnormed = back(dout, line)
                d_BTD += unnormed(dnormed, line.norm, f"{name}_norm", dx=dnormed)
            case "output":
                # forward: x' = x + norm(keep * part(x))   =>   dx = dx' + part'(keep * norm'(dx'))
                dout = ws.take(d_BTD.shape)
                d_BTD += back(unnormed(d_BTD, line.out_norm, f"{name}_norm", dx=dout), line)
            case "parallel" | "parallel_shared":
                raise AssertionError("two parts of one input have no line of their own")
            case _ as unreachable:
                assert_never(unreachable)
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
) -> tuple[Array, PartOf]:
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
                ffn=block.ffn,
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
    part: PartOf,
    name: str,
    grads: BlockArrays,
    pass_context: PassContext,
    dmemory_BSD: Array | None,
    dbalance: float,
    dbias: Array | None,
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
            own = name == "attn"
            dx, dcontext = multi_head_backward(
                dout_BTD,
                part,
                grads=grads.attn if own else grads.cross,
                pass_context=pass_context,
                dbias=dbias if own else None,
            )
            if dcontext is not None and dmemory_BSD is not None:
                # every decoder layer reads the same memory, so its gradients add up
                dmemory_BSD += dcontext
            return dx
        case _ as unreachable:
            assert_never(unreachable)
