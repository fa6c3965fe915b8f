"""A model written down for the native step: a flat list of operations, and what it cannot do.

`programs` follows a spec and gives each operation of `kernels/step.c` pointers to the weights of a
`Source`: those of a torch model, or arrays of a file. Nothing is copied but what C reads in float32
only (gains, biases, tables). `unknown_part` is the closed decision on which specs the C file can
run. Imports no torch.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, assert_never, get_args

import numpy as np
from numpy.typing import NDArray

from glassformer.kernels import tables
from glassformer.kernels.integer import IntegerTiles
from glassformer.kernels.packed import PACKED, PackedMatrix
from glassformer.spec import model as spec
from glassformer.spec import program as kinds
from glassformer.spec.decoding import KVCache
from glassformer.spec.execution import KV_GROUP
from glassformer.spec.lacking import ANY, Runs
from glassformer.spec.manifest import manifest
from glassformer.spec.model import rotary_of
from glassformer.spec.own import OwnPosition
from glassformer.spec.position import alibi_slopes
from glassformer.spec.program import missing
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

ACTIVATIONS: tuple[spec.Activation, ...] = ("relu", "gelu", "gelu_tanh", "silu", "relu2")
assert set(ACTIVATIONS) == set(get_args(spec.Activation))
#: The kinds of operations that the C file runs, with their fields. Tables of positions are read and
#: not computed again: it does not matter how they were made.
RUNS: Runs = {
    kinds.Embed: {"scale": ANY},
    kinds.AddRows: {"table": ANY, "offset": ANY},
    kinds.Norm: {"form": ANY, "offset": ANY},
    kinds.Linear: {"transposed": ANY},
    kinds.Rotate: {"base": ANY, "scaling": ANY, "share": ANY},
    kinds.Bias: {"form": ANY, "causal": ANY},
    kinds.Remember: {},
    kinds.Attend: {"before": ANY, "after": {0, None}, "softcap": ANY},
    kinds.Activate: {"function": set(ACTIVATIONS)},
    kinds.Gate: {"function": {*ACTIVATIONS, "sigmoid"}},
    kinds.Adjust: {"scale": ANY, "softcap": ANY},
    kinds.Route: {"normalize": ANY, "balance": ANY},
    kinds.Gather: {},
    kinds.Scatter: {},
    kinds.Add: {"scale": ANY},
    spec.Sinusoidal: {"base": ANY, "form": ANY, "offset": ANY},
    OwnPosition: dict.fromkeys(("source", "sha256", "options", "parameters"), ANY),
    spec.ALiBi: {"max_bias": ANY, "scaled": ANY},
    spec.LinearScaling: {},
    spec.Llama3Scaling: dict.fromkeys(("low_freq_factor", "high_freq_factor"), ANY)
    | {"original_max_seq_len": ANY},
    spec.YarnScaling: dict.fromkeys(("beta_fast", "beta_slow"), ANY)
    | {"attention_factor": ANY, "truncate": ANY},
    spec.LongRopeScaling: {"attention_factor": ANY, "extended": ANY},
}
HEAD = "next"


def unknown_part(model: spec.ModelSpec, *, kv_cache: KVCache = "float") -> str:
    """Return what a model of this spec has that the C file cannot run; empty if it can."""
    if HEAD not in model.head_names():
        return "it predicts no next token"
    made = kinds.program(model).for_head(HEAD)
    if lacks := missing(made, RUNS):
        return f"the native step has no {lacks[0]}"
    for op in made.ops:
        if not isinstance(op.kind, kinds.Attend):
            continue
        if op.part.startswith("encoder.") or op.part.endswith(".cross"):
            if (op.kind.before, op.kind.after) != (None, None):
                return "the native step reads a source from both sides, without a window"
            continue
        if op.kind.after != 0:
            return "its decoder is not causal"
        wide, most = made.values[op.reads[0]].width // op.kind.heads, WIDEST_ROUNDED
        if kv_cache == "int8" and wide > most:
            return f"heads of {wide} numbers, and in 8 bits it keeps those of {most} at most"
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

    def added(self, op: kinds.Op) -> Array | None:
        """Return the rows that an operation adds by position, or None."""


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

    def added(self, op: kinds.Op) -> Array | None:
        """Return the sinusoids, or the learned rows that belong to a position."""
        assert isinstance(op.kind, kinds.AddRows)
        if op.kind.table is None:
            weight = self.array(op.weights[0])
            assert weight is not None
            return weight[op.kind.offset :]
        assert isinstance(op.kind.table, spec.Sinusoidal), "a user's position is a torch module"
        found = tables.sinusoids(self.model.max_seq_len, self.model.d_model, kind=op.kind.table)
        return found.astype(np.float32)

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


class NativeProgram:
    """Operations over buffers, the widest row of each buffer, and the size of a page in floats.

    It is lowered from a model's program: values get buffers, queries, keys and values one row, what
    is only added to the residual stream is added where it is made. `kv_cache` is the form of the
    keys and values of a sequence's own past, `cross` the places of a source's in its page.
    """

    def __init__(
        self,
        made: kinds.Program,
        source: Source,
        stack: str,
        *,
        kv_cache: KVCache = "float",
        cross: Mapping[str, int] | None = None,
    ) -> None:
        self.made, self.source, self.prefix = made, source, stack
        self.kv_cache: KVCache = kv_cache
        self.cross = cross or {}
        self.ops: list[Op] = []
        self.widths = [1] * BUFFERS
        self.page = 0
        self._kept: list[object] = []  # what the operations point to
        self._at: dict[str, int] = {}  # the buffer of each value
        #: The last operation that reads a value, by its number.
        self._last = {name: number for number, op in enumerate(made.ops) for name in op.reads}
        self._added: set[str] = set()  # values that were added where they were made

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

    def norm(self, op: kinds.Op, source: int, to: int, row: int, *, first: int = 0) -> None:
        """Add a norm of the pieces of a row, from number `first` on."""
        kind = op.kind
        assert isinstance(kind, kinds.Norm) and op.writes is not None
        gain = self.array(op.weights[0])
        bias = self.array(op.weights[1]) if len(op.weights) > 1 else None
        if kind.offset:
            gain = np.float32(1.0) + as_floats(gain)
        self.add(
            NORM,
            source,
            to,
            (row, row),
            form=int(kind.form == "rms"),
            first=first,
            count=self.made.values[op.writes].width // kind.over,
            width=kind.over,
            weight=self.floats(gain),
            bias=self.floats(bias),
            number=kind.eps,
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

    # --- lowering

    def lower(self, numbers: range) -> None:
        """Add the operations of these numbers."""
        at = numbers.start
        while at < numbers.stop:
            at += self.lower_from(at)

    def lower_from(self, at: int) -> int:
        """Add an operation and those that belong to it; return how many they are."""
        op = self.made.ops[at]
        match op.kind:
            case kinds.Embed():
                return self.embedding(at)
            case kinds.AddRows():
                table, D = self.source.added(op), self.width(op.reads[0])
                self.add(ADD_POSITION, X, X, (D, D), weight=self.floats(table))
                self.put(op, X)
            case kinds.Bias():
                pass  # the slopes of a layer's heads are read with its attention
            case kinds.Norm():
                self.stream_norm(op, at)
            case kinds.Add():
                self.join(op)
            case kinds.Linear():
                part = [one for one in self.made.ops[at:] if one.part == op.part]
                if any(isinstance(one.kind, kinds.Attend) for one in part):
                    return self.attention(part)
                if isinstance(self.made.ops[at + 1].kind, kinds.Route):
                    return self.experts(at)
                return self.dense(at, self._at[op.reads[0]])
            case _:
                raise AssertionError(f"{type(op.kind).__name__} begins no part")
        return 1

    def width(self, value: str) -> int:
        """Return the numbers of a value's row."""
        return self.made.values[value].width

    def put(self, op: kinds.Op, buffer: int) -> None:
        """Note the buffer of what an operation writes."""
        assert op.writes is not None
        self._at[op.writes] = buffer

    def destination(self, value: str) -> tuple[int, bool]:
        """Return the buffer of a part's output, and True if it is added to what is there."""
        then = self.made.ops[self._last[value]].kind
        onto = isinstance(then, kinds.Add) and then.scale == 1.0
        if onto:
            self._added.add(value)
        self._at[value] = X if onto else ADDED
        return self._at[value], onto

    def embedding(self, at: int) -> int:
        """Add the lookup of each new token, times the scale if there is one."""
        op, then = self.made.ops[at : at + 2]
        factored = isinstance(then.kind, kinds.Linear) and then.kind.transposed
        assert isinstance(op.kind, kinds.Embed) and op.writes is not None
        name, width = layer_of(op), self.width(op.writes)
        if not factored and (weight := self.source.integer(name)) is not None:
            self._kept.append(weight)
            table = {"form": INTEGER, "weight": weight.address}
        elif not factored and (blocks := self.source.packed(name)) is not None:
            table = {"form": BLOCKS, "weight": ctypes.addressof(self.matrix(blocks, None))}
        else:
            rows, half = self.kept(self.array(op.weights[0]))
            table = {"form": int(half), "weight": rows.ctypes.data}
        to = NARROW if factored else X
        self.add(EMBED, to, to, (width, width), number=op.kind.scale, **table)
        if factored:
            self.product(self.array(then.weights[0]).T, None, NARROW, X)
        self.put(then if factored else op, X)
        return 1 + factored

    def stream_norm(self, op: kinds.Op, at: int) -> None:
        """Add a norm of complete rows, in place if nothing else reads what it reads."""
        value, source = op.reads[0], self._at[op.reads[0]]
        to = source
        if self._last[value] > at:
            beside = (name for name, buffer in self._at.items() if buffer == NORMED)
            to = BESIDE if any(self._last[name] > at for name in beside) else NORMED
        self.norm(op, source, to, self.width(value))
        self.put(op, to)

    def join(self, op: kinds.Op) -> None:
        """Add what a part made to the residual stream, unless it was made there."""
        stream, added = op.reads
        assert self._at[stream] == X and isinstance(op.kind, kinds.Add)
        if added not in self._added:
            factor, width = op.kind.scale, self.width(stream)
            self.adjust(self._at[added], X, width, factor=factor, onto=True)
        self.put(op, X)

    def attention(self, part: Sequence[kinds.Op]) -> int:
        """Add attention, from queries to its output; new keys and values are remembered."""
        attend = next(op for op in part if isinstance(op.kind, kinds.Attend))
        kind, name, out = attend.kind, attend.memory, part[-1]
        assert isinstance(kind, kinds.Attend) and attend.writes is not None
        assert name is not None and attend.layer is not None and out.writes is not None
        N, K, H = kind.heads, kind.kv_heads, self.width(attend.writes) // kind.heads
        crossing = name in self.cross
        row = N * H if crossing else (N + 2 * K) * H
        places = {f"{name}.q": 0}
        if not crossing:
            places |= {f"{name}.k": N * H, f"{name}.v": (N + K) * H}
        self.projected(part, places, row)
        if not crossing:
            self.remember(OWN, K, H, row, first=N * H)
        self.add(
            ATTEND,
            WIDE,
            HEADS,
            (row, N * H),
            form=SOURCE if crossing else OWN,
            count=N,
            groups=K,
            width=H,
            layer=self.cross[name] if crossing else self.page,
            window=0 if kind.before is None else kind.before + 1,
            weight=None if crossing else self.floats(self.source.slopes(self.prefix, attend.layer)),
            bias=self.floats(self.array(attend.weights[0])) if attend.weights else None,
            number=kind.scale,
            cap=kind.softcap or 0.0,
            causal=kind.after == 0,
            rounded=not crossing and self.kv_cache == "int8",
        )
        if not crossing:
            self.page += K * head_floats(H, self.kv_cache)
        to, onto = self.destination(out.writes)
        self.linear(layer_of(out), HEADS, to, onto=onto)
        return len(part)

    def projected(self, part: Sequence[kinds.Op], places: Mapping[str, int], row: int) -> None:
        """Add queries, keys and values side by side: all products, then what follows each.

        `places` has the first number of each in a row. One rotation turns queries and keys.
        """
        chains = {
            name: [op for op in part if op.writes == name or f"{op.writes}".startswith(f"{name}.")]
            for name in places
        }
        for name, (product, *_) in chains.items():
            source = self._at[product.reads[0]]
            self.linear(layer_of(product), source, WIDE, row=row, first=places[name])
        longest = max(chains.values(), key=len)
        for step in range(1, len(longest)):
            if isinstance(longest[step].kind, kinds.Rotate):
                turned = [op[step] for op in chains.values() if len(op) > step]
                self.turn(turned, row)
                continue
            for name, chain in chains.items():
                if len(chain) > step:
                    self.norm(chain[step], WIDE, WIDE, row, first=places[name])

    def turn(self, turned: Sequence[kinds.Op], row: int) -> None:
        """Add the rotation of heads that are side by side, queries before keys."""
        first = turned[0]
        assert isinstance(first.kind, kinds.Rotate) and first.layer is not None
        table = self.source.rotation(self.prefix, first.layer)
        assert table is not None
        cos, sin = table
        self.add(
            ROTATE,
            WIDE,
            WIDE,
            (row, row),
            count=sum(op.kind.heads for op in turned if isinstance(op.kind, kinds.Rotate)),
            width=self.width(first.reads[0]) // first.kind.heads,
            groups=2 * cos.shape[1],
            weight=self.floats(cos),
            bias=self.floats(sin),
        )

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

    def dense(self, at: int, source: int, to: int | None = None, *, onto: bool = False) -> int:
        """Add a feed-forward, written to (or onto) a buffer; without one, to where it belongs."""
        count = next(
            number
            for number, op in enumerate(self.made.ops[at:])
            if isinstance(op.kind, kinds.Activate | kinds.Gate)
        )
        *into, act, down = self.made.ops[at : at + count + 2]
        assert act.writes is not None and down.writes is not None
        F = self.width(act.writes)
        for place, op in enumerate(into):
            self.linear(layer_of(op), source, WIDE, row=len(into) * F, first=place * F)
        function = getattr(act.kind, "function")  # noqa: B009  # of either kind
        form, wide = ACTIVATIONS.index(function), (len(into) * F, F)
        self.add(ACTIVATE, WIDE, HIDDEN, wide, form=form, gated=len(into) > 1)
        if to is None:
            to, onto = self.destination(down.writes)
        self.linear(layer_of(down), HIDDEN, to, onto=onto)
        return count + 2

    def experts(self, at: int) -> int:
        """Add a mixture: each expert reads the rows that chose it, one behind another."""
        ops, begin = self.made.ops, at
        router, route = ops[at : at + 2]
        kind = route.kind
        assert isinstance(kind, kinds.Route) and route.writes is not None
        end = next(
            number
            for number in range(at, len(ops))
            if isinstance(ops[number].kind, kinds.Scatter) and ops[number].reads[0] == route.writes
        )
        shared = ops[end + 1].part.endswith(".shared_expert")
        last = end
        if shared:
            last = next(n for n in range(end, len(ops)) if ops[end].writes in ops[n].reads)
        out = ops[last].writes
        assert out is not None
        to, onto = self.destination(out)
        E, D = self.width(route.writes), self.width(router.reads[0])
        source = self._at[router.reads[0]]
        if source == to:  # a post-norm block: what all experts read is kept apart
            self.adjust(X, NORMED, D)
            source = NORMED
        self.linear(layer_of(router), source, ROUTES)
        self.add(ROUTE, ROUTES, ROUTES, (E, E), count=kind.chosen, gated=kind.normalize)
        at += 2
        while at < end:
            gather = ops[at].kind
            assert isinstance(gather, kinds.Gather)
            which = {"groups": ROUTES, "count": E, "layer": gather.expert}
            self.add(GATHER, source, EXPERT, (D, D), **which)
            at += 1 + self.dense(at + 1, EXPERT, EXPERT)
            self.add(SCATTER, EXPERT, to, (D, D), onto=onto or gather.expert > 0, **which)
        gates = [op for op in ops[end:last] if isinstance(op.kind, kinds.Linear)][-1:]
        if shared and isinstance(ops[last - 1].kind, kinds.Gate):
            self.linear(layer_of(gates[0]), source, ROUTES)
            self.dense(end + 1, source, EXPERT)
            which = {"groups": ROUTES, "count": 1}
            self.add(SCATTER, EXPERT, to, (D, D), form=EVERY, onto=True, **which)
        elif shared:
            self.dense(end + 1, source, to, onto=True)
        return last + 1 - begin

    def head(self, ops: Sequence[kinds.Op], D: int) -> None:
        """Add the final norm and the logits of the chosen tokens."""
        self.add(CHOOSE, X, CHOSEN, (D, D))
        at = CHOSEN
        for number, op in enumerate(ops):
            match op.kind:
                case kinds.Norm():
                    self.norm(op, at, FINAL, D)
                    at = FINAL
                case kinds.Linear():
                    last = not any(isinstance(one.kind, kinds.Linear) for one in ops[number + 1 :])
                    bias = self.source.array(f"{op.part}.bias") if last else None
                    self.product(self.weights_of(op), bias, at, LOGITS if last else NARROW)
                    at = LOGITS if last else NARROW
                case kinds.Adjust(scale=factor, softcap=cap):
                    self.adjust(LOGITS, LOGITS, self.widths[LOGITS], factor=factor, cap=cap)
                case _:
                    raise AssertionError(f"{type(op.kind).__name__} in a head")

    def weights_of(self, op: kinds.Op) -> Matrix:
        """Return the matrix of a product: a layer's, or a factor of an embedding."""
        name, leaf = layer_of(op), op.weights[0].rpartition(".")[2]
        return self.weight(name) if leaf == "weight" else self.array(op.weights[0])


def layer_of(op: kinds.Op) -> str:
    """Return the name of the layer whose weights an operation reads."""
    return op.weights[0].rpartition(".")[0]


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
) -> tuple[NativeProgram, NativeProgram | None, int]:
    """Return the decoder's program, the encoder's or None, and the size of a page of a source.

    The encoder's ends with the keys and values that cross-attention reads, layer by layer.
    """
    made = kinds.program(model).for_head(HEAD)
    attends = [op for op in made.ops if isinstance(op.kind, kinds.Attend)]
    cross: dict[str, int] = {}
    page = 0
    for op in attends:
        if op.memory is not None and op.memory.endswith(".cross"):
            assert isinstance(op.kind, kinds.Attend) and op.writes is not None
            cross[op.memory] = page
            H = made.values[op.writes].width // op.kind.heads
            page += 2 * PAGE * op.kind.kv_heads * H
    both = model.encoder is not None
    begin = sum(op.part.startswith("encoder.") for op in made.ops)
    own = [number for number, op in enumerate(made.ops) if op.layer is not None]
    decoder = NativeProgram(
        made, source, "decoder." if both else "", kv_cache=kv_cache, cross=cross
    )
    decoder.lower(range(begin, own[-1] + 1))
    decoder.head(made.ops[own[-1] + 1 :], model.d_model)
    if not both:
        return decoder, None, 0
    encoder = NativeProgram(made, source, "encoder.")
    encoder.lower(range(begin))
    own_page = encoder.page
    for op in attends:
        if op.memory is not None and op.memory in cross:
            part = [one for one in made.ops if one.part == op.part]
            assert isinstance(op.kind, kinds.Attend) and op.writes is not None
            K, H = op.kind.kv_heads, made.values[op.writes].width // op.kind.heads
            places = {f"{op.memory}.k": 0, f"{op.memory}.v": K * H}
            encoder.projected(part, places, 2 * K * H)
            encoder.page = cross[op.memory]
            encoder.remember(SOURCE, K, H, 2 * K * H, first=0)
    encoder.page = own_page
    return decoder, encoder, page
