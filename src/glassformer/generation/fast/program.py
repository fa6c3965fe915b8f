"""A model written down for the native step: a flat list of operations, and what it cannot do.

`programs` follows a spec and gives each operation of `kernels/step.c` pointers to the weights of a
`Source`: those of a torch model, or arrays of a file. Nothing is copied but what C reads in float32
only (gains, biases, tables). `unknown_part` is the closed decision on which specs the C file can
run. Imports no torch.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, assert_never, get_args

import numpy as np
from numpy.typing import NDArray

from glassformer.kernels import tables
from glassformer.kernels.integer import IntegerTiles
from glassformer.kernels.packed import PACKED, PackedMatrix
from glassformer.spec import model as spec
from glassformer.spec.decoding import KVCache
from glassformer.spec.execution import KV_GROUP
from glassformer.spec.manifest import is_tied, manifest
from glassformer.spec.model import rotary_of
from glassformer.spec.own import OwnPosition
from glassformer.spec.position import alibi_slopes
from glassformer.store.tensors import BFLOAT16, widened

# N query heads, K key-value heads, H d_head, F d_ff, D d_model, O outputs, I inputs

PAGE = 16  # positions
#: The widest head whose keys and values the C file keeps in 8 bits: it widens some on the stack.
WIDEST_ROUNDED = 512

#: Numbers that the C file reads: float32, or bfloat16 as `store.tensors` has it.
Array = NDArray[Any]
#: A parameter as plain numbers, in blocks of a file, or quantized.
Matrix = Array | PackedMatrix | IntegerTiles

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


def unknown_part(model: spec.ModelSpec, *, kv_cache: KVCache = "float") -> str:
    """Return what a model of this spec has that the C file cannot run; empty if it can."""
    if found := _unknown(model):
        return found
    wide = max(block.attention.head_width(model.d_model) for block in model.decoder.blocks())
    if kv_cache == "int8" and wide > WIDEST_ROUNDED:
        return f"heads of {wide} numbers, and in 8 bits it keeps those of {WIDEST_ROUNDED} at most"
    if not all(block.attention.causal for block in model.decoder.blocks()):
        return "its decoder is not causal"
    for block in model.encoder.blocks() if model.encoder is not None else ():
        if block.attention.causal or block.attention.window:
            return "the native step reads a source from both sides, without a window"
    return ""


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


# --- weights --------------------------------------------------------------------------------------


class Source(Protocol):
    """The weights of a model, by the manifest's names, and its tables of positions.

    `stack` is the prefix of one side's names: empty for a decoder alone.
    """

    def array(self, name: str) -> Array | None:
        """Return a parameter; None if the model has none of that name."""

    def integer(self, layer: str) -> IntegerTiles | None:
        """Return the quantized weights of a layer or table; None if they are floats."""

    def packed(self, layer: str) -> PackedMatrix | None:
        """Return the weights of a layer or table in a file's own blocks; None if they are not."""

    def rotation(self, stack: str, layer: int) -> Array | None:
        """Return cos and sin of a layer's rotation (2, positions, pairs), or None."""

    def slopes(self, stack: str, layer: int) -> Array | None:
        """Return the slopes of a layer's heads, or None."""

    def added(self, stack: str) -> Array | None:
        """Return the rows that are added by position, or None."""


class ArraySource:
    """A `Source` of plain, packed and quantized arrays by the manifest's names; tied ones once."""

    def __init__(self, model: spec.ModelSpec, arrays: Mapping[str, Matrix]) -> None:
        self.model, self.arrays = model, arrays
        self.owners = {p.name: p.tied_to for p in manifest(model) if p.tied_to is not None}
        self._rotations: dict[tuple[spec.Rotary, int], Array] = {}

    def array(self, name: str) -> Array | None:
        """Return a parameter, under any of its names."""
        found = self.arrays.get(self.owners.get(name, name))
        assert not isinstance(found, PackedMatrix | IntegerTiles), name
        return found

    def integer(self, layer: str) -> IntegerTiles | None:
        """Return the quantized weights of a layer or table."""
        found = self._weight(layer)
        return found if isinstance(found, IntegerTiles) else None

    def packed(self, layer: str) -> PackedMatrix | None:
        """Return the weights of a layer or table as they are packed."""
        found = self._weight(layer)
        return found if isinstance(found, PackedMatrix) else None

    def _weight(self, layer: str) -> Matrix | None:
        name = f"{layer}.weight"
        return self.arrays.get(self.owners.get(name, name))

    def rotation(self, stack: str, layer: int) -> Array | None:
        """Return cos and sin of a layer's rotation; layers of one kind share a table."""
        attention = self._attention(stack, layer)
        rotary, width = rotary_of(attention, self.model.position), self._width(attention)
        if rotary is None:
            return None
        if (rotary, width) not in self._rotations:
            self._rotations[rotary, width] = tables.rotations(
                rotary, self.model.max_seq_len, width, dtype=np.float32
            )
        return self._rotations[rotary, width]

    def slopes(self, stack: str, layer: int) -> Array | None:
        """Return the slopes of a layer's heads."""
        if not isinstance(self.model.position, spec.ALiBi):
            return None
        attention = self._attention(stack, layer)
        found = alibi_slopes(self.model.position, attention.n_heads, self._width(attention))
        return np.array(found, dtype=np.float32)

    def added(self, stack: str) -> Array | None:
        """Return the sinusoids, or the learned rows that belong to a position."""
        match self.model.position:
            case spec.Sinusoidal() as kind:
                found = tables.sinusoids(self.model.max_seq_len, self.model.d_model, kind=kind)
                return found.astype(np.float32)
            case spec.Learned(offset=offset):
                weight = self.array(f"{stack}position.weight")
                assert weight is not None
                return weight[offset:]
            case OwnPosition():
                raise AssertionError("a user's position is a torch module")
            case spec.NoPosition() | spec.Rotary() | spec.ALiBi() | spec.RelativeBias():
                return None
            case _ as unreachable:
                assert_never(unreachable)

    def _attention(self, stack: str, layer: int) -> spec.Attention:
        side = self.model.encoder if stack == "encoder." else self.model.decoder
        assert side is not None
        return list(side.blocks())[layer].attention

    def _width(self, attention: spec.Attention) -> int:
        return attention.head_width(self.model.d_model)


def as_floats(array: Array) -> NDArray[np.float32]:
    """Return numbers as float32, one behind another; the same memory where they are."""
    if array.dtype == BFLOAT16:
        return widened(array)
    return np.ascontiguousarray(array, dtype=np.float32)


# --- the program ----------------------------------------------------------------------------------

(EMBED, ADD_POSITION, NORM, PRODUCT, ROTATE, REMEMBER, ATTEND, ACTIVATE, ADJUST) = range(9)
(ROUTE, GATHER, SCATTER, CHOOSE) = range(9, 13)
INTEGER, BLOCKS = 2, 3  # of the forms of weights, after float32 and bfloat16
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
        *((name, ctypes.c_int32) for name in ("onto", "gated", "causal", "rounded")),
    )


class _Floating(ctypes.Structure):
    """`struct floating` of native.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs")),
        ("form", ctypes.c_int32),
    )


class Program:
    """Operations over buffers, the widest row of each buffer, and the size of a page in floats.

    `stack` is the prefix of the names of the side that is written, `kv_cache` the form of the keys
    and values of a sequence's own past.
    """

    def __init__(
        self, model: spec.ModelSpec, source: Source, stack: str, kv_cache: KVCache = "float"
    ) -> None:
        self.model, self.source, self.prefix = model, source, stack
        self.kv_cache: KVCache = kv_cache
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

    def array(self, name: str) -> Array:
        """Return a parameter that the spec says is there."""
        found = self.source.array(name)
        assert found is not None, name
        return found

    def floats(self, array: Array | None) -> int | None:
        """Return the address of numbers as float32, which are kept as long as this program."""
        if array is None:
            return None
        wide = as_floats(array)
        self._kept.append(wide)
        return wide.ctypes.data

    def kept(self, array: Array) -> tuple[Array, bool]:
        """Return numbers one behind another, kept like these, and whether they are bfloat16."""
        array = np.ascontiguousarray(array)
        self._kept.append(array)
        return array, array.dtype == BFLOAT16

    def norm(
        self,
        norm: spec.Norm,
        name: str,
        source: int,
        to: int,
        row: int,
        *,
        first: int = 0,
        count: int = 1,
    ) -> None:
        """Add a norm of `count` pieces of a row, from number `first` on."""
        gain, bias = self.array(f"{name}.weight"), None
        match norm:
            case spec.LayerNorm():
                form, bias = 0, self.source.array(f"{name}.bias")
            case spec.RMSNorm():
                form = 1
                if norm.offset:
                    gain = np.float32(1.0) + as_floats(gain)
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
            width=len(gain),
            weight=self.floats(gain),
            bias=self.floats(bias),
            number=norm.eps,
        )

    def product(
        self,
        weight_OI: Matrix,
        bias_O: Array | None,
        source: int,
        to: int,
        *,
        first: int = 0,
        row: int = 0,
        onto: bool = False,
    ) -> None:
        """Add x W^T + b, written to (or onto) a row of `row` numbers from number `first` on.

        Weights in a file's own blocks give the bits of the unpacked ones; rows of a quantized layer
        pass through a buffer of their own.
        """
        outputs, inputs = weight_OI.shape
        if isinstance(weight_OI, np.ndarray | PackedMatrix):
            matrix = self.matrix(weight_OI, bias_O)
            reads: dict[str, Any] = {
                "form": min(matrix.form, 1),
                "weight": ctypes.addressof(matrix),
            }
        else:
            self.widths[APART_ROWS] = max(self.widths[APART_ROWS], outputs)
            self._kept.append(weight_OI)
            reads = {"form": INTEGER, "weight": weight_OI.address, "groups": APART_ROWS}
            reads |= {"bias": self.floats(bias_O)}
        size = (inputs, row or outputs)
        self.add(PRODUCT, source, to, size, first=first, width=outputs, onto=onto, **reads)

    def matrix(self, weight_OI: Array | PackedMatrix, bias_O: Array | None) -> _Floating:
        """Return what C reads of a matrix; all of it is kept as long as this program."""
        if isinstance(weight_OI, PackedMatrix):
            data, form = weight_OI.data, PACKED + weight_OI.kind
        else:
            data, form = self.kept(weight_OI)
        made = _Floating(data.ctypes.data, self.floats(bias_O), *weight_OI.shape, form)
        self._kept += (data, made)
        return made

    def weight(self, name: str) -> Matrix:
        """Return a layer's weight as it is stored."""
        for stored in (self.source.integer(name), self.source.packed(name)):
            if stored is not None:
                return stored
        return self.array(f"{name}.weight")

    def linear(self, name: str, source: int, to: int, **rest: Any) -> None:
        """Add a layer's product."""
        self.product(self.weight(name), self.source.array(f"{name}.bias"), source, to, **rest)

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

    def embedding(self) -> None:
        """Add the lookup of each new token, times the scale if there is one."""
        name, D, scale, to, leaf = f"{self.prefix}embed", self.model.d_model, 1.0, X, "weight"
        match self.model.embedding:
            case spec.ScaledEmbedding() as scaled:
                scale = scaled.scale(D)
            case spec.FactorizedEmbedding():
                to, leaf = NARROW, "u"
            case spec.PlainEmbedding():
                pass
            case _ as unreachable:
                assert_never(unreachable)
        if (weight := self.source.integer(name)) is not None:
            self._kept.append(weight)
            table = {"form": INTEGER, "weight": weight.address}
            self.add(EMBED, X, X, (D, D), number=scale, **table)
            return
        if (blocks := self.source.packed(name)) is not None:
            matrix = self.matrix(blocks, None)
            table = {"form": BLOCKS, "weight": ctypes.addressof(matrix)}
            self.add(EMBED, X, X, (D, D), number=scale, **table)
            return
        rows, half = self.kept(self.array(f"{name}.{leaf}"))
        size = (rows.shape[1], rows.shape[1])
        self.add(EMBED, to, to, size, form=int(half), weight=rows.ctypes.data, number=scale)
        if to == NARROW:
            self.product(self.array(f"{name}.v").T, None, NARROW, X)
        assert self.widths[X] == D

    def position(self) -> None:
        """Add the table of positions, where there is one to be added."""
        table, D = self.source.added(self.prefix), self.model.d_model
        if table is not None:
            self.add(ADD_POSITION, X, X, (D, D), weight=self.floats(table))

    def heads(self, name: str, attention: spec.Attention, layer: int, source: int) -> None:
        """Add self-attention from queries to heads; new keys and values are remembered."""
        N, K, H = attention.n_heads, attention.kv_heads, attention.head_width(self.model.d_model)
        row = (N + 2 * K) * H
        self.linear(f"{name}.q_proj", source, WIDE, row=row)
        self.linear(f"{name}.k_proj", source, WIDE, row=row, first=N * H)
        self.linear(f"{name}.v_proj", source, WIDE, row=row, first=(N + K) * H)
        if not attention.qk_norm_last:
            self.qk_norm(name, attention, N, K, row)
        turn = self.source.rotation(self.prefix, layer)
        if turn is not None:
            cos, sin = turn
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
        if attention.qk_norm_last:
            self.qk_norm(name, attention, N, K, row)
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
            weight=self.floats(self.source.slopes(self.prefix, layer)),
            bias=self.floats(self.source.array(f"{name}.sinks")),
            number=_scale(attention, H),
            cap=attention.softcap or 0.0,
            causal=attention.causal,
            rounded=self.kv_cache == "int8",
        )
        self.page += K * head_floats(H, self.kv_cache)

    def qk_norm(
        self, name: str, attention: spec.Attention, N: int, K: int, row: int, first: int = 0
    ) -> None:
        """Add the norms of N heads of queries, and of K of keys behind them, if there are any."""
        if attention.qk_norm is None:
            return
        for letter, heads in (("q", N), ("k", K)):
            if heads:
                count = 1 if attention.qk_norm_over == "all" else heads
                self.norm(
                    attention.qk_norm,
                    f"{name}.{letter}_norm",
                    WIDE,
                    WIDE,
                    row,
                    first=first,
                    count=count,
                )
            first += heads * attention.head_width(self.model.d_model)

    def remember(self, memory: int, K: int, H: int, row: int, *, first: int) -> None:
        """Add the writing of keys and values, which are side by side in a row."""
        self.add(
            REMEMBER,
            WIDE,
            WIDE,
            (row, row),
            form=memory,
            first=first,
            count=K,
            width=H,
            layer=self.page,
            rounded=memory == OWN and self.kv_cache == "int8",
        )

    def cross(self, name: str, attention: spec.Attention, source: int, layer: int) -> None:
        """Add cross-attention from queries to heads, over the source's memory."""
        N, K, H = attention.n_heads, attention.kv_heads, attention.head_width(self.model.d_model)
        self.linear(f"{name}.q_proj", source, WIDE)
        self.qk_norm(name, attention, N, 0, N * H)
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
            number=_scale(attention, H),
            cap=attention.softcap or 0.0,
        )

    def feed(self, name: str, ffn: spec.FeedForward, source: int, to: int, *, onto: bool) -> None:
        """Add a feed-forward, written to (or onto) a buffer."""
        match ffn:
            case spec.SwiGLU(d_ff=F):
                self.linear(f"{name}.gate_proj", source, WIDE, row=2 * F)
                self.linear(f"{name}.up_proj", source, WIDE, row=2 * F, first=F)
                form = ACTIVATIONS.index(ffn.activation)
                self.add(ACTIVATE, WIDE, HIDDEN, (2 * F, F), form=form, gated=True)
            case spec.MLP(d_ff=F):
                self.linear(f"{name}.up_proj", source, WIDE)
                form = ACTIVATIONS.index(ffn.activation)
                self.add(ACTIVATE, WIDE, HIDDEN, (F, F), form=form)
            case spec.MoE():
                self.experts(name, ffn, source, to, onto=onto)
                return
            case _ as unreachable:
                assert_never(unreachable)
        self.linear(f"{name}.down_proj", HIDDEN, to, onto=onto)

    def experts(self, name: str, ffn: spec.MoE, source: int, to: int, *, onto: bool) -> None:
        """Add a mixture: each expert reads the rows that chose it, one behind another."""
        E, D = ffn.n_experts, self.widths[X]
        if source == to:  # a post-norm block: what all experts read is kept apart
            self.adjust(X, NORMED, D)
            source = NORMED
        self.linear(f"{name}.gate", source, ROUTES)
        count = ffn.experts_per_token
        self.add(ROUTE, ROUTES, ROUTES, (E, E), count=count, gated=ffn.normalize)
        for number in range(E):
            which = {"groups": ROUTES, "count": E, "layer": number}
            self.add(GATHER, source, EXPERT, (D, D), **which)
            self.feed(f"{name}.experts.{number}", ffn.expert, EXPERT, EXPERT, onto=False)
            self.add(SCATTER, EXPERT, to, (D, D), onto=onto or number > 0, **which)
        if ffn.shared is None:
            return
        if not ffn.shared_gate:
            self.feed(f"{name}.shared_expert", ffn.shared, source, to, onto=True)
            return
        self.linear(f"{name}.shared_expert_gate", source, ROUTES)
        self.feed(f"{name}.shared_expert", ffn.shared, source, EXPERT, onto=False)
        which = {"groups": ROUTES, "count": 1}
        self.add(SCATTER, EXPERT, to, (D, D), form=EVERY, onto=True, **which)

    def stack(self, stack: spec.Stack, cross_layers: Sequence[int]) -> None:
        """Add embedding, positions and blocks."""
        self.embedding()
        self.position()
        if stack.embed_norm is not None:
            self.norm(stack.embed_norm, f"{self.prefix}embed_norm", X, X, self.model.d_model)
        for layer, block in enumerate(stack.blocks()):
            self.block(block, layer, cross_layers[layer] if cross_layers else 0)

    def block(self, block: spec.Block, layer: int, memory: int) -> None:
        """Add `TransformerBlock.forward`, line by line."""
        name = f"{self.prefix}blocks.{layer}"
        first, then, attn, ffn = (
            f"{name}.{part}" for part in ("attn_norm", "ffn_norm", "attn", "ffn")
        )
        match block.placement:
            case "pre" | "post":
                pre = block.placement == "pre"
                self.heads(attn, block.attention, layer, self._normed(block, first, pre))
                self._join(f"{attn}.o_proj", first, block, post=not pre)
                if block.cross is not None:
                    cross, between = f"{name}.cross", f"{name}.cross_norm"
                    self.cross(cross, block.cross, self._normed(block, between, pre), memory)
                    self._join(f"{cross}.o_proj", between, block, post=not pre)
                scaled, source = block.residual_scale != 1.0, self._normed(block, then, pre)
                self.feed(ffn, block.ffn, source, ADDED if scaled else X, onto=not scaled)
                self._finish(then, block, post=not pre)
            case "sandwich" | "output":
                around = block.placement == "sandwich"
                outer = (first, then)
                if around:
                    outer = (f"{name}.attn_post_norm", f"{name}.ffn_post_norm")
                self.heads(attn, block.attention, layer, self._normed(block, first, around))
                self.linear(f"{attn}.o_proj", HEADS, ADDED)
                self._add_normed(block, outer[0])
                self.feed(ffn, block.ffn, self._normed(block, then, around), ADDED, onto=False)
                self._add_normed(block, outer[1])
            case "parallel" | "parallel_shared":
                source = beside = self._normed(block, first, True)
                if block.placement == "parallel":
                    beside = BESIDE
                    self.norm(block.norm, then, X, BESIDE, self.model.d_model)
                self.heads(attn, block.attention, layer, source)
                self.linear(f"{attn}.o_proj", HEADS, X, onto=True)
                self.feed(ffn, block.ffn, beside, X, onto=True)
            case "pre_ffn":
                self.heads(attn, block.attention, layer, X)
                self.linear(f"{attn}.o_proj", HEADS, X, onto=True)
                self.feed(ffn, block.ffn, self._normed(block, then, True), X, onto=True)
            case _ as unreachable:
                assert_never(unreachable)

    def _normed(self, block: spec.Block, name: str, wanted: bool) -> int:
        """Return the buffer that a part reads: normalised first where the block says so."""
        if not wanted:
            return X
        self.norm(block.norm, name, X, NORMED, self.model.d_model)
        return NORMED

    def _join(self, out: str, norm: str, block: spec.Block, *, post: bool) -> None:
        """Add the output projection of an attention to the residual stream."""
        scaled = block.residual_scale != 1.0
        self.linear(out, HEADS, ADDED if scaled else X, onto=not scaled)
        self._finish(norm, block, post=post)

    def _finish(self, norm: str, block: spec.Block, *, post: bool) -> None:
        width = self.model.d_model
        if block.residual_scale != 1.0:
            self.adjust(ADDED, X, width, factor=block.residual_scale, onto=True)
        if post:
            self.norm(block.norm, norm, X, X, width)

    def _add_normed(self, block: spec.Block, norm: str) -> None:
        """Normalise what a part gave, then add it to the residual stream."""
        width = self.model.d_model
        self.norm(block.norm, norm, ADDED, ADDED, width)
        self.adjust(ADDED, X, width, onto=True)

    def head(self, stack: spec.Stack) -> None:
        """Add the final norm and the logits of the chosen tokens."""
        D, name = self.model.d_model, "heads.next"
        self.add(CHOOSE, X, CHOSEN, (D, D))
        final = CHOSEN
        if stack.final_norm is not None:
            final = FINAL
            self.norm(stack.final_norm, f"{self.prefix}final_norm", CHOSEN, FINAL, D)
        head = self.model.head("next")
        assert isinstance(head, spec.NextHead)
        bias, embed = self.source.array(f"{name}.bias"), f"{self.prefix}embed"
        if not is_tied(head):
            self.linear(name, final, LOGITS)
        elif isinstance(self.model.embedding, spec.FactorizedEmbedding):
            self.product(self.array(f"{embed}.v"), None, final, NARROW)
            self.product(self.array(f"{embed}.u"), bias, NARROW, LOGITS)
        else:
            self.product(self.weight(embed), bias, final, LOGITS)
        if head.scale != 1.0 or head.softcap is not None:
            size = self.widths[LOGITS]
            self.adjust(LOGITS, LOGITS, size, factor=head.scale, cap=head.softcap)


def _scale(attention: spec.Attention, d_head: int) -> float:
    """Return the factor of an attention's scores."""
    return 1 / math.sqrt(d_head) if attention.scale is None else attention.scale


def head_floats(H: int, kv_cache: KVCache) -> int:
    """Return the room that a head's keys and values take in a page, in floats (`room_of` in C)."""
    match kv_cache:
        case "float":
            return 2 * PAGE * H
        case "int8":
            return 2 * PAGE * (H + 4 * -(-H // KV_GROUP)) // 4
        case _ as unreachable:
            assert_never(unreachable)


def programs(
    model: spec.ModelSpec, source: Source, *, kv_cache: KVCache = "float"
) -> tuple[Program, Program | None, int]:
    """Return the decoder's program, the encoder's or None, and the size of a page of a source.

    The encoder's ends with the keys and values that cross-attention reads, layer by layer.
    """
    both, cross_layers, page = model.encoder is not None, [], 0
    decoder = Program(model, source, "decoder." if both else "", kv_cache)
    for block in model.decoder.blocks():
        cross_layers.append(page)
        if block.cross is not None:
            page += 2 * PAGE * block.cross.kv_heads * block.cross.head_width(model.d_model)
    decoder.stack(model.decoder, cross_layers)
    decoder.head(model.decoder)
    if model.encoder is None:
        return decoder, None, 0
    encoder = Program(model, source, "encoder.")
    encoder.stack(model.encoder, ())
    own_page, last = encoder.page, X
    if model.encoder.final_norm is not None:
        encoder.norm(model.encoder.final_norm, "encoder.final_norm", X, NORMED, model.d_model)
        last = NORMED
    for layer, block in enumerate(model.decoder.blocks()):
        if block.cross is None:
            continue
        name = f"decoder.blocks.{layer}.cross"
        K, H = block.cross.kv_heads, block.cross.head_width(model.d_model)
        encoder.linear(f"{name}.k_proj", last, WIDE, row=2 * K * H)
        encoder.linear(f"{name}.v_proj", last, WIDE, row=2 * K * H, first=K * H)
        encoder.qk_norm(name, block.cross, 0, K, 2 * K * H)
        encoder.page = cross_layers[layer]
        encoder.remember(SOURCE, K, H, 2 * K * H, first=0)
    encoder.page = own_page
    return decoder, encoder, page
