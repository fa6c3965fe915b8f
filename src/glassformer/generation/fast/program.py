"""A model written down for the native step: a flat list of operations, and what it cannot do.

`programs` reads the model's parts and gives each operation of `kernels/step.c` pointers to the
model's own weights; nothing is copied but what C reads in float32 only (gains, biases, tables).
`why_not` is the closed decision on which models the C file can run.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, assert_never, cast, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from glassformer.kernels import c_library
from glassformer.kernels.int_matmul import Int4Weight, Int8Weight
from glassformer.models.model import DecoderLM, EncoderDecoder, Model
from glassformer.models.stack import Stack, StackParts, heads_key
from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.block import TransformerBlock
from glassformer.nn.embedding import FactorizedTokenEmbedding, TiedHead, TokenEmbedding
from glassformer.nn.ffn import MLP, MixtureOfExperts, SwiGLU
from glassformer.nn.linear import Linear
from glassformer.nn.norm import LayerNorm, RMSNorm
from glassformer.nn.position import AddedPosition, ALiBiPosition, RotaryPosition
from glassformer.spec import model as spec
from glassformer.spec.own import OwnPosition

# N query heads, K key-value heads, H d_head, F d_ff, D d_model, O outputs, I inputs

PAGE = 16  # positions
DTYPES = (torch.float32, torch.bfloat16)

# --- what the C file can do -----------------------------------------------------------------------

#: The parts of a spec that the program follows, with their fields. A field that is not here must
#: have its default, and a part that is not here is not run: what was added to the spec since is
#: never passed over in silence.
FOLLOWED: dict[type, str] = {
    spec.ModelSpec: "vocab_size d_model max_seq_len decoder encoder embedding position heads "
    "source_vocab_size share_embedding",
    spec.Stack: "layers final_norm embed_norm",
    spec.Layers: "count block",
    spec.Block: "attention ffn norm placement cross residual_scale",
    spec.Attention: "n_heads n_kv_heads d_head bias qk_norm causal window scale softcap "
    "qk_norm_over qk_norm_last sinks position",
    spec.MLP: "d_ff activation bias",
    spec.SwiGLU: "d_ff bias activation",
    spec.MoE: "n_experts experts_per_token expert normalize shared shared_gate balance router_bias",
    spec.LayerNorm: "eps bias",
    spec.RMSNorm: "eps offset",
    spec.NoPosition: "",
    spec.Sinusoidal: "base",
    spec.Learned: "offset",
    spec.Rotary: "base scaling share",
    spec.ALiBi: "max_bias scaled",
    spec.PlainEmbedding: "",
    spec.ScaledEmbedding: "factor",
    spec.FactorizedEmbedding: "rank l1",
    spec.NextHead: "tied bias scale softcap",
}
#: Parts and fields that no step depends on: how a model is trained, how its tables were computed
#: (they are read, not computed again), and its other heads.
APART = (
    *get_args(spec.Init),
    spec.Dropout,
    OwnPosition,
    spec.LinearScaling,
    spec.Llama3Scaling,
    spec.YarnScaling,
    spec.LongRopeScaling,
    spec.ClassHead,
    spec.StateHead,
    spec.AnswerHead,
)

#: The modules that the program has operations for, and those that it need not run.
PARTS = {
    *(DecoderLM, EncoderDecoder, Stack, TransformerBlock, MultiHeadAttention, MLP, SwiGLU, Linear),
    MixtureOfExperts,
    *(LayerNorm, RMSNorm, TokenEmbedding, FactorizedTokenEmbedding, TiedHead, RotaryPosition),
    *(ALiBiPosition, nn.Dropout, nn.ModuleList, nn.ModuleDict),
}


@runtime_checkable
class IntegerWeights(Protocol):
    """A quantized layer or table; its weights are those of the C routines, if it uses them."""

    def c_weight(self) -> Int8Weight | Int4Weight | None:
        """Return the matrix in the layout of integer.c, or None."""


def why_not(model: Model) -> str:
    """Return the reason why this model has no native step here; empty if it has one."""
    if reason := c_library.why_not():
        return reason
    like = next(model.parameters())
    if like.device.type != "cpu":
        return f"the model is on {like.device}, and the native step runs on the CPU"
    if any(parameter.dtype not in DTYPES for parameter in model.parameters()):
        return f"its weights are {like.dtype}, and the native step reads float32 and bfloat16"
    return _unknown(model.spec) or _missing(model)


def _unknown(node: object) -> str:
    """Return the first part or field of a spec that the program does not follow, or nothing."""
    if isinstance(node, tuple):
        return next((found for each in node if (found := _unknown(each))), "")
    if not is_dataclass(node) or isinstance(node, APART):
        return ""
    kind = type(node)
    if kind not in FOLLOWED:
        return f"the native step has no {kind.__name__}"
    for each in fields(node):
        value = getattr(node, each.name)
        if isinstance(value, APART):
            continue
        known = each.name in FOLLOWED[kind].split()
        if not known and value != each.default:
            return f"the native step does not know {kind.__name__}.{each.name}"
        if known and (found := _unknown(value)):
            return found
    return ""


def _missing(model: Model) -> str:
    stacks = [model.spec.decoder] + ([model.spec.encoder] if model.spec.encoder else [])
    for stack in stacks:
        for block in stack.blocks():
            attention = block.attention
            if stack is model.spec.decoder and not attention.causal:
                return "its decoder is not causal"
            if stack is model.spec.encoder and (attention.causal or attention.window):
                return "the native step reads a source from both sides, without a window"
    for name, part in model.named_modules():
        if isinstance(part, IntegerWeights) and part.c_weight() is None:
            return f"the weights of {name} are not in the form of our C routines"
    return unknown_module(model, but=IntegerWeights)


def unknown_module(model: Model, *, but: type | None = None) -> str:
    """Return what a step that reads weights past the modules would pass over; empty if nothing.

    `but` are classes of other modules that the step knows.
    """
    for name, part in model.named_modules():
        if "position" in name.split("."):
            continue  # its table is read
        if type(part) not in PARTS and not (but is not None and isinstance(part, but)):
            return f"the step has no {type(part).__name__}, as in {name}"
        if part._forward_hooks or part._forward_pre_hooks:
            return f"a hook would not be called: {name or 'the model'} has one"
    return ""


def _stacks(model: Model) -> list[StackParts]:
    if isinstance(model, EncoderDecoder):
        return [model.encoder, model.decoder]
    return [cast(StackParts, model)]


# --- the program ----------------------------------------------------------------------------------

(EMBED, ADD_POSITION, NORM, PRODUCT, ROTATE, REMEMBER, ATTEND, ACTIVATE, ADJUST) = range(9)
(ROUTE, GATHER, SCATTER, CHOOSE) = range(9, 13)
INTEGER = 2  # of the forms of weights, after float32 and bfloat16
OWN, SOURCE = range(2)  # memories
EVERY = 1  # of the rows that a feed-forward is added to: all, not those that chose it
ACTIVATIONS: tuple[spec.Activation, ...] = ("relu", "gelu", "gelu_tanh", "silu", "relu2")
assert set(ACTIVATIONS) == set(get_args(spec.Activation))
#: Buffers: the residual stream, a norm's output, wide activations, heads, the output of an
#: activation, hidden states and logits of chosen tokens, a factorized embedding's rows, and rows of
#: an integer product before they are put where they belong. Then a second norm's output, what a
#: part adds before it is added, the weights of experts, and the rows of one expert.
(X, NORMED, WIDE, HEADS, HIDDEN, CHOSEN, FINAL, LOGITS, NARROW, APART_ROWS) = range(10)
(BESIDE, ADDED, ROUTES, EXPERT) = range(10, 14)
BUFFERS = 14


class Op(ctypes.Structure):
    """`struct op` of step.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "form", "source", "to")),
        *((name, ctypes.c_int64) for name in ("from_width", "to_width", "first", "count")),
        *((name, ctypes.c_int64) for name in ("width", "groups", "window", "layer")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_float) for name in ("number", "cap")),
        *((name, ctypes.c_int32) for name in ("onto", "gated", "causal")),
    )


class _Floating(ctypes.Structure):
    """`struct floating` of native.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs")),
        ("bfloat16", ctypes.c_int32),
    )


class Program:
    """Operations over buffers, the widest row of each buffer, and the size of a page."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.widths = [1] * BUFFERS
        self.page = 0
        self._kept: list[object] = []  # what the operations point to

    def compiled(self) -> ctypes.Array[Op]:
        """Return the operations as C reads them."""
        return (Op * len(self.ops))(*self.ops)

    def add(self, kind: int, source: int, to: int, widths: tuple[int, int], **rest: Any) -> None:
        """Add an operation that reads one buffer and writes one, with rows of these widths."""
        self.widths[source] = max(self.widths[source], widths[0])
        self.widths[to] = max(self.widths[to], widths[1])
        op = Op(kind=kind, source=source, to=to, from_width=widths[0], to_width=widths[1])
        for name, value in rest.items():
            setattr(op, name, value)
        self.ops.append(op)

    def floats(self, tensor: Tensor | None) -> int | None:
        """Return the address of numbers as float32, which are kept as long as this program."""
        if tensor is None:
            return None
        wide = tensor.detach().float().contiguous()
        self._kept.append(wide)
        return wide.data_ptr()

    def norm(
        self,
        part: LayerNorm | RMSNorm,
        source: int,
        to: int,
        row: int,
        *,
        first: int = 0,
        count: int = 1,
    ) -> None:
        """Add a norm of `count` pieces of a row, from number `first` on."""
        match part:
            case LayerNorm():
                form, gain, bias = 0, part.weight.detach(), self.floats(part.bias)
            case RMSNorm():
                form, gain, bias = 1, part.weight.detach(), None
                if part.offset:
                    gain = 1.0 + gain.float()
            case _ as unreachable:
                assert_never(unreachable)
        self.add(
            NORM,
            source,
            to,
            (row, row),
            form=form,
            first=first,
            count=count,
            width=len(part.weight),
            weight=self.floats(gain),
            bias=bias,
            number=part.eps,
        )

    def product(
        self,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        source: int,
        to: int,
        *,
        first: int = 0,
        row: int = 0,
        onto: bool = False,
    ) -> None:
        """Add x W^T + b, written to (or onto) a row of `row` numbers from number `first` on."""
        weight = weight_OI.detach().contiguous()
        outputs, inputs = weight.shape
        half = weight.dtype == torch.bfloat16
        matrix = _Floating(weight.data_ptr(), self.floats(bias_O), outputs, inputs, half)
        self._kept += (weight, matrix)
        self.add(
            PRODUCT,
            source,
            to,
            (inputs, row or outputs),
            form=int(half),
            first=first,
            width=outputs,
            weight=ctypes.addressof(matrix),
            onto=onto,
        )

    def integer(
        self,
        part: IntegerWeights,
        bias_O: Tensor | None,
        source: int,
        to: int,
        *,
        first: int = 0,
        row: int = 0,
        onto: bool = False,
    ) -> None:
        """Add a quantized layer's product; its rows pass through a buffer of their own."""
        weight = part.c_weight()
        assert weight is not None
        outputs, inputs = weight.shape
        self.widths[APART_ROWS] = max(self.widths[APART_ROWS], outputs)
        self._kept.append(weight)
        self.add(
            PRODUCT,
            source,
            to,
            (inputs, row or outputs),
            form=INTEGER,
            first=first,
            width=outputs,
            groups=APART_ROWS,
            weight=weight.address,
            bias=self.floats(bias_O),
            onto=onto,
        )

    def linear(self, part: nn.Module, source: int, to: int, **rest: Any) -> None:
        """Add a layer's product."""
        if isinstance(part, IntegerWeights):
            self.integer(part, getattr(part, "bias", None), source, to, **rest)
            return
        assert type(part) is Linear
        self.product(part.weight, part.bias, source, to, **rest)

    def adjust(
        self,
        source: int,
        to: int,
        width: int,
        *,
        factor: float = 1.0,
        cap: float | None = None,
        onto: bool = False,
    ) -> None:
        """Add a factor and a cap, c tanh(x / c), from one buffer to (or onto) another."""
        self.add(ADJUST, source, to, (width, width), number=factor, cap=cap or 0.0, onto=onto)

    # --- the parts of a model

    def embedding(self, embed: nn.Module, width: int) -> None:
        """Add the lookup of each new token, times the scale if there is one."""
        if isinstance(embed, IntegerWeights):
            weight = embed.c_weight()
            assert weight is not None
            self._kept.append(weight)
            self.add(
                EMBED,
                X,
                X,
                (width, width),
                form=INTEGER,
                weight=weight.address,
                number=getattr(embed, "multiplier", None) or 1.0,
            )
            return
        table = embed.weight if isinstance(embed, TokenEmbedding) else None
        scale, to = 1.0, X
        if isinstance(embed, FactorizedTokenEmbedding):
            table, to = embed.u, NARROW
        elif isinstance(embed, TokenEmbedding) and embed.scale is not None:
            scale = embed.scale
        assert table is not None
        rows = table.detach().contiguous()
        self._kept.append(rows)
        half = int(rows.dtype == torch.bfloat16)
        size = (rows.shape[1], rows.shape[1])
        self.add(EMBED, to, to, size, form=half, weight=rows.data_ptr(), number=scale)
        if isinstance(embed, FactorizedTokenEmbedding):
            self.product(embed.v.t(), None, NARROW, X)
        assert width == self.widths[X]

    def position(self, model: spec.ModelSpec, parts: StackParts) -> None:
        """Add the table of positions, where there is one to be added."""
        part = parts.position
        match model.position:
            case spec.Sinusoidal():
                assert part is not None and not isinstance(part, AddedPosition)
                table = cast(Tensor, part.table)
            case spec.Learned(offset=offset):
                assert part is not None and not isinstance(part, AddedPosition)
                table = cast(Tensor, part.weight)[offset:]
            case OwnPosition():
                assert isinstance(part, AddedPosition)
                table = part.table(model.max_seq_len, torch.float32)
            case spec.NoPosition() | spec.Rotary() | spec.ALiBi() | spec.RelativeBias():
                return
            case _ as unreachable:
                assert_never(unreachable)
        width = (model.d_model, model.d_model)
        self.add(ADD_POSITION, X, X, width, weight=self.floats(table))

    def heads(
        self,
        part: MultiHeadAttention,
        attention: spec.Attention,
        parts: StackParts,
        source: int,
        turn: str | None,
    ) -> None:
        """Add self-attention from queries to heads; new keys and values are remembered."""
        N, K, H = attention.n_heads, attention.kv_heads, part.d_head
        row = (N + 2 * K) * H
        self.linear(part.q_proj, source, WIDE, row=row)
        self.linear(part.k_proj, source, WIDE, row=row, first=N * H)
        self.linear(part.v_proj, source, WIDE, row=row, first=(N + K) * H)
        if not part.norm_last:
            self.qk_norm(part, N, K, row)
        if turn is not None:
            cos, sin = cast(RotaryPosition, parts.rotary[turn]).table
            self.add(
                ROTATE,
                WIDE,
                WIDE,
                (row, row),
                count=N + K,
                width=H,
                groups=2 * cos.shape[1],
                weight=self.floats(cos),
                bias=self.floats(sin),
            )
        if part.norm_last:
            self.qk_norm(part, N, K, row)
        slopes = None
        if parts.alibi:
            slopes = self.floats(cast(ALiBiPosition, parts.alibi[heads_key(N, H)]).table)
        self.remember(OWN, K, H, row, first=N * H)
        self.add(
            ATTEND,
            WIDE,
            HEADS,
            (row, N * H),
            form=OWN,
            count=N,
            groups=K,
            width=H,
            layer=self.page,
            window=attention.window or 0,
            weight=slopes,
            bias=self.floats(part.sinks),
            number=_scale(part),
            cap=part.softcap or 0.0,
            causal=attention.causal,
        )
        self.page += 2 * PAGE * K * H

    def qk_norm(self, part: MultiHeadAttention, N: int, K: int, row: int, first: int = 0) -> None:
        """Add the norms of N heads of queries, and of K of keys behind them, if there are any."""
        for norm, heads in ((part.q_norm, N), (part.k_norm, K)):
            if norm is not None and heads:
                count = 1 if part.norm_all else heads
                self.norm(norm, WIDE, WIDE, row, first=first, count=count)
            first += heads * part.d_head

    def remember(self, memory: int, K: int, H: int, row: int, *, first: int) -> None:
        """Add the writing of keys and values, which are side by side in a row."""
        width = (row, row)
        self.add(
            REMEMBER, WIDE, WIDE, width, form=memory, first=first, count=K, width=H, layer=self.page
        )

    def cross(
        self, part: MultiHeadAttention, attention: spec.Attention, source: int, layer: int
    ) -> None:
        """Add cross-attention from queries to heads, over the source's memory."""
        N, K, H = attention.n_heads, attention.kv_heads, part.d_head
        self.linear(part.q_proj, source, WIDE)
        self.qk_norm(part, N, 0, N * H)
        self.add(
            ATTEND,
            WIDE,
            HEADS,
            (N * H, N * H),
            form=SOURCE,
            count=N,
            groups=K,
            width=H,
            layer=layer,
            number=_scale(part),
            cap=part.softcap or 0.0,
        )

    def feed(self, part: nn.Module, source: int, to: int, *, onto: bool) -> None:
        """Add a feed-forward, written to (or onto) a buffer."""
        match part:
            case SwiGLU():
                F = part.gate_proj.d_out
                self.linear(part.gate_proj, source, WIDE, row=2 * F)
                self.linear(part.up_proj, source, WIDE, row=2 * F, first=F)
                form = ACTIVATIONS.index(part.activation)
                self.add(ACTIVATE, WIDE, HIDDEN, (2 * F, F), form=form, gated=True)
            case MLP():
                F = part.up_proj.d_out
                self.linear(part.up_proj, source, WIDE)
                form = ACTIVATIONS.index(part.activation)
                self.add(ACTIVATE, WIDE, HIDDEN, (F, F), form=form)
            case MixtureOfExperts():
                self.experts(part, source, to, onto=onto)
                return
            case _:
                raise AssertionError(f"a feed-forward of class {type(part).__name__}")
        self.linear(part.down_proj, HIDDEN, to, onto=onto)

    def experts(self, part: MixtureOfExperts, source: int, to: int, *, onto: bool) -> None:
        """Add a mixture: each expert reads the rows that chose it, one behind another."""
        E, D = part.n_experts, self.widths[X]
        if source == to:  # a post-norm block: what all experts read is kept apart
            self.adjust(X, NORMED, D)
            source = NORMED
        self.linear(part.gate, source, ROUTES)
        count = part.experts_per_token
        self.add(ROUTE, ROUTES, ROUTES, (E, E), count=count, gated=part.normalize)
        for number, expert in enumerate(part.experts):
            which = {"groups": ROUTES, "count": E, "layer": number}
            self.add(GATHER, source, EXPERT, (D, D), **which)
            self.feed(expert, EXPERT, EXPERT, onto=False)
            self.add(SCATTER, EXPERT, to, (D, D), onto=onto or number > 0, **which)
        if part.shared_expert is not None and part.shared_expert_gate is not None:
            self.linear(part.shared_expert_gate, source, ROUTES)
            self.feed(part.shared_expert, source, EXPERT, onto=False)
            which = {"groups": ROUTES, "count": 1}
            self.add(SCATTER, EXPERT, to, (D, D), form=EVERY, onto=True, **which)
        elif part.shared_expert is not None:
            self.feed(part.shared_expert, source, to, onto=True)

    def stack(self, model: spec.ModelSpec, parts: StackParts, cross_layers: Sequence[int]) -> None:
        """Add embedding, positions and blocks."""
        self.embedding(parts.embed, model.d_model)
        self.position(model, parts)
        if parts.embed_norm is not None:
            self.norm(parts.embed_norm, X, X, model.d_model)
        for layer, block in enumerate(parts.stack.blocks()):
            part = cast(TransformerBlock, parts.blocks[layer])
            self.block(part, block, parts, layer, cross_layers[layer] if cross_layers else 0)

    def block(
        self, part: TransformerBlock, block: spec.Block, parts: StackParts, layer: int, memory: int
    ) -> None:
        """Add `TransformerBlock.forward`, line by line."""
        turn = parts.turns[layer]
        first, then = part.attn_norm, part.ffn_norm
        match block.placement:
            case "pre" | "post":
                pre = block.placement == "pre"
                self.heads(part.attn, block.attention, parts, self._normed(first, pre), turn)
                self._join(part.attn.o_proj, first, part, post=not pre)
                if part.cross is not None and block.cross is not None:
                    source = self._normed(part.cross_norm, pre)
                    self.cross(part.cross, block.cross, source, memory)
                    self._join(part.cross.o_proj, part.cross_norm, part, post=not pre)
                self._feed_and_join(part, self._normed(then, pre), then, post=not pre)
            case "sandwich" | "output":
                around = block.placement == "sandwich"
                outer = (part.attn_post_norm, part.ffn_post_norm) if around else (first, then)
                self.heads(part.attn, block.attention, parts, self._normed(first, around), turn)
                self.linear(part.attn.o_proj, HEADS, ADDED)
                self._add_normed(outer[0])
                self.feed(part.ffn, self._normed(then, around), ADDED, onto=False)
                self._add_normed(outer[1])
            case "parallel" | "parallel_shared":
                source = beside = self._normed(first, True)
                if then is not None:
                    beside = BESIDE
                    self.norm(then, X, BESIDE, len(then.weight))
                self.heads(part.attn, block.attention, parts, source, turn)
                self.linear(part.attn.o_proj, HEADS, X, onto=True)
                self.feed(part.ffn, beside, X, onto=True)
            case "pre_ffn":
                self.heads(part.attn, block.attention, parts, X, turn)
                self.linear(part.attn.o_proj, HEADS, X, onto=True)
                self.feed(part.ffn, self._normed(then, True), X, onto=True)
            case _ as unreachable:
                assert_never(unreachable)

    def _normed(self, norm: LayerNorm | RMSNorm | None, wanted: bool) -> int:
        """Return the buffer that a part reads: normalised first where the block says so."""
        if not wanted:
            return X
        assert norm is not None
        self.norm(norm, X, NORMED, len(norm.weight))
        return NORMED

    def _join(
        self,
        out: nn.Module,
        norm: LayerNorm | RMSNorm | None,
        part: TransformerBlock,
        *,
        post: bool,
    ) -> None:
        """Add a part's output to the residual stream, times the block's factor."""
        scaled = part.residual_scale != 1.0
        self.linear(out, HEADS, ADDED if scaled else X, onto=not scaled)
        self._finish(norm, part, post=post)

    def _feed_and_join(
        self, part: TransformerBlock, source: int, norm: LayerNorm | RMSNorm | None, *, post: bool
    ) -> None:
        scaled = part.residual_scale != 1.0
        self.feed(part.ffn, source, ADDED if scaled else X, onto=not scaled)
        self._finish(norm, part, post=post)

    def _finish(
        self, norm: LayerNorm | RMSNorm | None, part: TransformerBlock, *, post: bool
    ) -> None:
        assert norm is not None
        width = len(norm.weight)
        if part.residual_scale != 1.0:
            self.adjust(ADDED, X, width, factor=part.residual_scale, onto=True)
        if post:
            self.norm(norm, X, X, width)

    def _add_normed(self, norm: LayerNorm | RMSNorm | None) -> None:
        """Normalise what a part gave, then add it to the residual stream."""
        assert norm is not None
        width = len(norm.weight)
        self.norm(norm, ADDED, ADDED, width)
        self.adjust(ADDED, X, width, onto=True)

    def head(self, model: Model, parts: StackParts) -> None:
        """Add the final norm and the logits of the chosen tokens."""
        D = model.spec.d_model
        self.add(CHOOSE, X, CHOSEN, (D, D))
        final = CHOSEN
        if parts.final_norm is not None:
            final = FINAL
            self.norm(parts.final_norm, CHOSEN, FINAL, D)
        part, head = model.heads["next"], model.spec.head("next")
        assert isinstance(head, spec.NextHead)
        if not isinstance(part, TiedHead):
            self.linear(part, final, LOGITS)
        elif isinstance(embed := model.output_embedding(), IntegerWeights):
            self.integer(embed, part.bias, final, LOGITS)
        elif isinstance(embed, FactorizedTokenEmbedding):
            self.product(embed.v, None, final, NARROW)
            self.product(embed.u, part.bias, NARROW, LOGITS)
        else:
            self.product(embed.weight, part.bias, final, LOGITS)
        if head.scale != 1.0 or head.softcap is not None:
            size = self.widths[LOGITS]
            self.adjust(LOGITS, LOGITS, size, factor=head.scale, cap=head.softcap)


def _scale(part: MultiHeadAttention) -> float:
    """Return the factor of an attention's scores."""
    return 1 / math.sqrt(part.d_head) if part.scale is None else part.scale


def programs(model: Model) -> tuple[Program, Program | None, int]:
    """Return the decoder's program, the encoder's or None, and the size of a page of a source.

    The encoder's ends with the keys and values that cross-attention reads, layer by layer.
    """
    decoder, cross_layers, page = Program(), [], 0
    *_, parts = _stacks(model)
    for layer, block in enumerate(parts.stack.blocks()):
        cross_layers.append(page)
        if block.cross is not None:
            part = cast(TransformerBlock, parts.blocks[layer]).cross
            assert part is not None
            page += 2 * PAGE * block.cross.kv_heads * part.d_head
    decoder.stack(model.spec, parts, cross_layers)
    decoder.head(model, parts)
    if not isinstance(model, EncoderDecoder):
        return decoder, None, 0
    encoder, D = Program(), model.spec.d_model
    encoder.stack(model.spec, model.encoder, ())
    own_page, last = encoder.page, X
    if model.encoder.final_norm is not None:
        encoder.norm(model.encoder.final_norm, X, NORMED, D)
        last = NORMED
    for layer, block in enumerate(parts.stack.blocks()):
        part = cast(TransformerBlock, parts.blocks[layer]).cross
        if part is None or block.cross is None:
            continue
        K, H = block.cross.kv_heads, part.d_head
        encoder.linear(part.k_proj, last, WIDE, row=2 * K * H)
        encoder.linear(part.v_proj, last, WIDE, row=2 * K * H, first=K * H)
        encoder.qk_norm(part, 0, K, 2 * K * H)
        encoder.page = cross_layers[layer]
        encoder.remember(SOURCE, K, H, 2 * K * H, first=0)
    encoder.page = own_page
    return decoder, encoder, page
