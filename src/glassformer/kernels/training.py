"""A training step's passes over memory in C, on NumPy arrays: forward, backward, and the update.

Each function takes float32 arrays whose rows lie together and writes its results into arrays that
it is given. A table of values has a row for each token, so attention and rotation are given how
many sequences and heads there are. Matrix products are not here: they are BLAS's.
"""

import ctypes
import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from glassformer.kernels import c_library
from glassformer.kernels.build import TRAINING, digest
from glassformer.kernels.threads import blas_libraries, product_threads
from glassformer.spec.errors import MachineError

Array = NDArray[Any]

# M rows, D width of a row, B sequences, T queries, S keys, N query heads, K key-value heads,
# H d_head, V classes, P numbers of all parameters

#: Activations and gates that there are, each with its number in train.c.
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "tanh": 5}
#: Numbers of the parameters that are updated together.
PIECE = 1 << 14
#: Where a NumPy array keeps the address of its numbers: behind a Python object's head. Asking the
#: array itself takes ten times as long, several thousand times a second.
_WORD = ctypes.sizeof(ctypes.c_void_p)
_HEAD = object.__basicsize__


def identity() -> str | None:
    """Return what the bits of the kernels depend on: variant and sources; None without them."""
    return f"{c_library.variant()} {digest(TRAINING)}" if c_library.available() else None


def _read_address(x: Array) -> int:
    return ctypes.c_size_t.from_address(id(x) + _HEAD).value


def _requested_address(x: Array) -> int:
    return int(x.ctypes.data)


def _probe() -> bool:
    """Return True if arrays have their address where NumPy's C interface says."""
    parts = [np.zeros((3, 5), np.float32), np.zeros(7, np.float32)[2:], np.zeros((0,), np.float32)]
    return _HEAD == 2 * _WORD and all(_read_address(x) == x.ctypes.data for x in parts)


address = _read_address if _probe() else _requested_address


def _or_null(x: Array | None) -> int | None:
    return None if x is None else address(x)


# --- structures, as train.c has them --------------------------------------------------------------

_POINTER, _WIDE, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_FLOAT, _DOUBLE, _BITS = ctypes.c_float, ctypes.c_double, ctypes.c_uint32


def _heads_of(name: str) -> list[tuple[str, Any]]:
    """Return the fields of a `struct heads`, flat: a structure within another is slow to make."""
    return [(f"{name}_at", _POINTER), *((f"{name}_{x}", _WIDE) for x in ("batch", "head", "row"))]


_DROP: list[tuple[str, Any]] = [
    ("seed", _BITS),
    ("salt", _BITS),
    ("limit", _NUMBER),
    ("factor", _FLOAT),
]


class Attention(ctypes.Structure):
    """An attention, forward or backward."""

    _fields_ = [
        *(
            field
            for name in ("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v")
            for field in _heads_of(name)
        ),
        ("kept", _POINTER),
        ("allow", _POINTER),
        *((name, _WIDE) for name in ("allow_batch", "allow_head", "allow_row", "allow_key")),
        *((name, _WIDE) for name in ("batch", "heads", "kv_heads", "queries", "keys", "width")),
        ("scale", _FLOAT),
        *((name, _NUMBER) for name in ("causal", "threads", "failed")),
        ("bias", _POINTER),
        *((name, _WIDE) for name in ("bias_batch", "bias_head", "bias_row")),
        *((name, _POINTER) for name in ("d_bias", "sinks", "d_sinks")),
        ("softcap", _FLOAT),
        *_DROP,
    ]


class Loss(ctypes.Structure):
    """A cross-entropy over rows of logits."""

    _fields_ = [
        ("logits", _POINTER),
        *((name, _WIDE) for name in ("row", "rows", "classes")),
        *((name, _POINTER) for name in ("targets", "weights", "sums")),
        ("smoothing", _FLOAT),
        ("threads", _NUMBER),
    ]


class Norm(ctypes.Structure):
    """A norm of rows, forward or backward."""

    _fields_ = [
        *((name, _POINTER) for name in ("x", "added", "gain", "sum", "y", "rate")),
        *((name, _POINTER) for name in ("more", "dx", "d_gain")),
        *((name, _WIDE) for name in ("rows", "width")),
        ("eps", _FLOAT),
        *((name, _NUMBER) for name in ("threads", "layer")),
        *((name, _FLOAT) for name in ("plus", "scale")),
        *((name, _POINTER) for name in ("bias", "mean", "d_bias")),
        *_DROP,
    ]


class Gate(ctypes.Structure):
    """An activation or a gate, forward or backward."""

    _fields_ = [
        *((name, _POINTER) for name in ("gate", "up", "y", "d_gate", "d_up")),
        *((name, _WIDE) for name in ("rows", "width")),
        *((f"{name}_row", _WIDE) for name in ("gate", "up", "d_gate", "d_up")),
        *((name, _NUMBER) for name in ("threads", "function")),
    ]


class Sum(ctypes.Structure):
    """A sum of rows, with dropout."""

    _fields_ = [
        *((name, _POINTER) for name in ("x", "z", "y")),
        *((name, _WIDE) for name in ("rows", "width", "x_row", "z_row", "y_row")),
        ("scale", _FLOAT),
        ("threads", _NUMBER),
        *_DROP,
    ]


class Columns(ctypes.Structure):
    """A sum over rows."""

    _fields_ = [
        *((name, _POINTER) for name in ("x", "sums")),
        *((name, _WIDE) for name in ("rows", "width", "row")),
        ("threads", _NUMBER),
    ]


class Turn(ctypes.Structure):
    """A rotation of heads."""

    _fields_ = [
        *_heads_of("x"),
        *_heads_of("y"),
        *((name, _POINTER) for name in ("cos", "sin")),
        *((n, _WIDE) for n in ("batch", "sequences", "heads", "length", "width", "half")),
        *((name, _NUMBER) for name in ("back", "threads")),
    ]


class AddedRows(ctypes.Structure):
    """Rows that are added to those of a table."""

    _fields_ = [
        *((name, _POINTER) for name in ("to", "from", "index")),
        *((name, _WIDE) for name in ("rows", "width")),
        ("scale", _FLOAT),
    ]


class Adam(ctypes.Structure):
    """An update of one vector."""

    _fields_ = [
        *((name, _POINTER) for name in ("weight", "gradient", "mean", "square", "sums")),
        ("count", _WIDE),
        *((name, _DOUBLE) for name in ("lr", "beta1", "beta2", "eps", "decay", "steps")),
        ("scale", _FLOAT),
        ("threads", _NUMBER),
    ]


class Product(ctypes.Structure):
    """A matrix product."""

    _fields_ = [
        *((name, _POINTER) for name in ("gemm", "a", "b", "c")),
        *(
            (name, _WIDE)
            for name in ("rows", "columns", "deep", "a_row", "b_row", "c_row", "chunk")
        ),
        ("beta", _FLOAT),
        *((name, _NUMBER) for name in ("a_turned", "b_turned", "by_columns", "wide", "threads")),
    ]


def _rows(x: Array) -> tuple[int, int]:
    """Return how many rows there are, and how wide they are."""
    width = x.shape[-1]
    return x.size // width, width


# --- dropout --------------------------------------------------------------------------------------


class Drop(NamedTuple):
    """What is dropped: numbers whose hash, of two seeds and their index, is below `limit`."""

    seed: int
    salt: int
    limit: int
    factor: float


#: Nothing is dropped.
KEEP = Drop(0, 0, 0, 1.0)


def drop_of(rate: float, rng: np.random.Generator) -> Drop:
    """Return what one dropout of a step drops; backward is given the same."""
    seed, salt = (int(one) for one in rng.integers(0, 1 << 32, size=2, dtype=np.uint64))
    return Drop(seed, salt, round(rate * (1 << 24)), 1.0 / (1.0 - rate))


# --- attention ------------------------------------------------------------------------------------


class Attending(NamedTuple):
    """An attention that was computed, for its backward: the job, and the arrays that it reads."""

    job: Attention
    arrays: tuple[Array | None, ...]


def attention_forward(
    q_MQ: Array,
    k_RK: Array,
    v_RK: Array,
    *,
    out_MQ: Array,
    kept: Array,
    sequences: int,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
    allow: Array | None = None,
    bias: Array | None = None,
    sinks_N: Array | None = None,
    softcap: float | None = None,
    drop: Drop = KEEP,
) -> Attending:
    """Write softmax(scale q k^T + bias) v; query head n reads key-value head n // (N / K).

    Rows are tokens, sequence by sequence, each with its heads side by side. `kept` (M, N, 2) is for
    backward. `allow` (bool) and `bias` broadcast to (B, N, T, S); a query that may attend to
    nothing has zeros. `softcap` c: a scaled score s becomes c tanh(s / c). `sinks_N` are scores
    that take part in the softmax and have no value. `drop` is of the weights.
    """
    queries, keys = len(q_MQ) // sequences, len(k_RK) // sequences
    width = q_MQ.shape[1] // heads
    job = Attention()
    for name, x, length in (("q", q_MQ, queries), ("out", out_MQ, queries), ("k", k_RK, keys)):
        _place(job, name, x, length, width)
    _place(job, "v", v_RK, keys, width)
    job.kept = address(kept)
    if allow is not None:
        allow = np.broadcast_to(allow, (sequences, heads, queries, keys))
        job.allow = allow.ctypes.data
        job.allow_batch, job.allow_head, job.allow_row, job.allow_key = allow.strides
    if bias is not None:
        bias = np.broadcast_to(bias, (sequences, heads, queries, keys))
        assert bias.strides[3] == 4 or keys == 1
        job.bias = bias.ctypes.data
        job.bias_batch, job.bias_head, job.bias_row = (one // 4 for one in bias.strides[:3])
    if sinks_N is not None:
        job.sinks = address(sinks_N)
    job.batch, job.heads, job.kv_heads = sequences, heads, kv_heads
    job.queries, job.keys, job.width = queries, keys, width
    job.scale, job.causal, job.threads = scale, causal, product_threads()
    job.softcap = softcap or 0.0
    job.seed, job.salt, job.limit, job.factor = drop
    _call("glass_attention_forward", job)
    return Attending(job, (q_MQ, k_RK, v_RK, out_MQ, kept, allow, bias, sinks_N))


def attention_backward(
    d_out_MQ: Array,
    made: Attending,
    *,
    d_q_MQ: Array,
    d_k_RK: Array,
    d_v_RK: Array,
    d_bias: Array | None = None,
    d_sinks_BN: Array | None = None,
) -> None:
    """Write the gradients; `d_bias` (B, N, T, S) and `d_sinks_BN` are zeros before."""
    job = made.job
    for name, x, length in (
        ("d_out", d_out_MQ, job.queries),
        ("d_q", d_q_MQ, job.queries),
        ("d_k", d_k_RK, job.keys),
        ("d_v", d_v_RK, job.keys),
    ):
        _place(job, name, x, length, job.width)
    job.d_bias, job.d_sinks = _or_null(d_bias), _or_null(d_sinks_BN)
    _call("glass_attention_backward", job)


def _place(job: Attention, name: str, x: Array, length: int, width: int) -> None:
    """Write where an array's heads are."""
    row, one = x.strides
    assert one == 4 or x.shape[1] == 1
    setattr(job, f"{name}_at", address(x))
    setattr(job, f"{name}_batch", length * row // 4)
    setattr(job, f"{name}_head", width)
    setattr(job, f"{name}_row", row // 4)


def _call(name: str, job: ctypes.Structure) -> None:
    if getattr(c_library.library(), name)(ctypes.byref(job)):
        raise MachineError("no memory for attention's weights", hint="smaller batches")


# --- norms ----------------------------------------------------------------------------------------


def norm_forward(
    x: Array,
    gain_D: Array,
    *,
    out: Array,
    rate_M: Array,
    eps: float,
    mean_M: Array | None = None,
    bias_D: Array | None = None,
    plus: float = 0.0,
    added: Array | None = None,
    total: Array | None = None,
    scale: float = 1.0,
    drop: Drop = KEEP,
) -> None:
    """Write LayerNorm where there is `mean_M`, else RMSNorm: (x - mean) rate (gain + plus) + bias.

    With `added`, x is x + scale drop(added), which is written to `total`. `rate_M` and `mean_M` are
    for backward. A row is as wide as the gain.
    """
    width = len(gain_D)
    job = Norm(
        address(x), _or_null(added), address(gain_D), _or_null(total), address(out),
        address(rate_M), None, None, None, x.size // width, width, eps, product_threads(),
        mean_M is not None, plus, scale, _or_null(bias_D), _or_null(mean_M), None, *drop,
    )  # fmt: skip
    c_library.library().glass_norm_forward(ctypes.byref(job))


def norm_backward(
    d_out: Array,
    x: Array,
    gain_D: Array,
    *,
    rate_M: Array,
    dx: Array,
    d_gain_D: Array,
    mean_M: Array | None = None,
    d_bias_D: Array | None = None,
    plus: float = 0.0,
    more: Array | None = None,
) -> None:
    """Write dx, to which `more` is added, and the gradients of gain and bias.

    `x` is what was normalised: the sum, where there was one. dx may be `more` or d_out itself.
    """
    width = len(gain_D)
    rows = x.size // width
    pieces = c_library.library().glass_norm_pieces(rows)
    sums = np.empty((1 if d_bias_D is None else 2, pieces, width), np.float32)
    job = Norm(
        address(x), None, address(gain_D), None, address(d_out), address(rate_M), _or_null(more),
        address(dx), address(sums), rows, width, 0.0, product_threads(), mean_M is not None, plus,
        1.0, None, _or_null(mean_M), None if d_bias_D is None else address(sums[1]),
    )  # fmt: skip
    c_library.library().glass_norm_backward(ctypes.byref(job))
    d_gain_D[...] = sums[0, 0]
    if d_bias_D is not None:
        d_bias_D[...] = sums[1, 0]


# --- activations, gates, sums ---------------------------------------------------------------------


def activation_forward(x: Array, function: str, *, out: Array) -> None:
    """Write f(x); `out` may be x."""
    _gate("glass_gate_forward", function, x, None, out, None, None)


def activation_backward(d_out: Array, x: Array, function: str, *, dx: Array) -> None:
    """Write d_out f'(x); `dx` may be d_out or x."""
    _gate("glass_gate_backward", function, x, None, d_out, dx, None)


def gate_forward(gate: Array, up: Array, function: str, *, out: Array) -> None:
    """Write f(gate) up; gate and up may be columns of a joined table."""
    _gate("glass_gate_forward", function, gate, up, out, None, None)


def gate_backward(
    d_out: Array, gate: Array, up: Array, function: str, *, d_gate: Array, d_up: Array
) -> None:
    """Write d_out up f'(gate) and d_out f(gate)."""
    _gate("glass_gate_backward", function, gate, up, d_out, d_gate, d_up)


def _gate(
    name: str,
    function: str,
    gate: Array,
    up: Array | None,
    y: Array,
    d_gate: Array | None,
    d_up: Array | None,
) -> None:
    rows, width = _rows(y)
    job = Gate(
        *(address(gate), _or_null(up), address(y), _or_null(d_gate), _or_null(d_up), rows, width),
        *(0 if x is None else _row(x) for x in (gate, up, d_gate, d_up)),
        *(product_threads(), ACTIVATIONS[function]),
    )
    getattr(c_library.library(), name)(ctypes.byref(job))


def _row(x: Array) -> int:
    """Return the distance between rows, in numbers."""
    return x.strides[-2] // 4 if x.ndim > 1 else x.size


def add(x: Array | None, z: Array, *, out: Array, scale: float = 1.0, drop: Drop = KEEP) -> None:
    """Write x + scale drop(z), or without x scale drop(z). z may be one row for all; out may be x.

    So this is a residual sum, a bias, a dropout, and the backward of each. Tables may be columns of
    wider ones.
    """
    rows, width = _rows(out)
    strides = 0 if x is None else _row(x), _row(z) if z.size == out.size else 0, _row(out)
    job = Sum(
        *(_or_null(x), address(z), address(out), rows, width, *strides, scale, product_threads()),
        *drop,
    )
    c_library.library().glass_sum(ctypes.byref(job))


def columns_sum(x_MD: Array, *, out_D: Array) -> None:
    """Write the sum over the rows, which may be columns of a table: a bias's gradient."""
    rows, width = _rows(x_MD)
    if not rows:  # an expert that nobody chose
        out_D.fill(0.0)
        return
    sums = np.empty((c_library.library().glass_norm_pieces(rows), width), np.float32)
    job = Columns(address(x_MD), address(sums), rows, width, _row(x_MD), product_threads())
    c_library.library().glass_columns_sum(ctypes.byref(job))
    out_D[...] = sums[0]


def add_rows(to_VD: Array, from_MD: Array, index_M: Array, *, scale: float = 1.0) -> None:
    """Add scale times row m to row index[m] of a table: an embedding's gradient."""
    assert index_M.dtype == np.int64
    rows, width = _rows(from_MD)
    job = AddedRows(address(to_VD), address(from_MD), address(index_M), rows, width, scale)
    c_library.library().glass_add_rows(ctypes.byref(job))


# --- rotation -------------------------------------------------------------------------------------


def rotate(
    x_MQ: Array, cos: Array, sin: Array, *, out_MQ: Array, heads: int, back: bool = False
) -> None:
    """Write each head rotated by angles, or back by them: pairs (x[i], x[i + R]), R = len(cos row).

    `cos` and `sin` have a row for each token, or for each of one sequence's, which then all have.
    What is behind the first 2 R numbers of a head stays. `out_MQ` may be x.
    """
    half, width = cos.shape[-1], x_MQ.shape[1] // heads
    length = cos.size // half
    sequences = len(x_MQ) // length
    job = Turn(
        address(x_MQ), length * x_MQ.strides[0] // 4, width, x_MQ.strides[0] // 4,
        address(out_MQ), length * out_MQ.strides[0] // 4, width, out_MQ.strides[0] // 4,
        address(cos), address(sin), 0, sequences, heads, length, width, half, back,
        product_threads(),
    )  # fmt: skip
    c_library.library().glass_turn(ctypes.byref(job))


# --- the loss -------------------------------------------------------------------------------------


def cross_entropy(
    logits_MV: Array, targets_M: Array, weights_M: Array, *, smoothing: float = 0.0
) -> tuple[float, float]:
    """Return the sums of weighted smoothed and plain losses; logits become their gradient."""
    assert targets_M.dtype == np.int64 and weights_M.dtype == np.float32
    rows, classes = logits_MV.shape
    sums_M2 = np.empty((rows, 2), np.float32)
    job = Loss(
        address(logits_MV), logits_MV.strides[0] // 4, rows, classes, address(targets_M),
        address(weights_M), address(sums_M2), smoothing, product_threads(),
    )  # fmt: skip
    c_library.library().glass_loss(ctypes.byref(job))
    plain, smoothed = sums_M2.sum(axis=0, dtype=np.float64).tolist()
    return smoothed, plain


# --- the update -----------------------------------------------------------------------------------


def norm_of(gradient_P: Array) -> float:
    """Return the norm of a vector, its squares summed in float64."""
    sums = np.empty(-(-gradient_P.size // PIECE), np.float64)
    job = Adam(None, address(gradient_P), None, None, address(sums), gradient_P.size)
    job.threads = product_threads()
    return math.sqrt(c_library.library().glass_squares(ctypes.byref(job)))


def adamw(
    weight_P: Array,
    gradient_P: Array,
    mean_P: Array,
    square_P: Array,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float = 0.0,
    scale: float = 1.0,
) -> None:
    """Make update number `step`, from 1 on, by gradients times `scale`, in one pass."""
    job = Adam(
        *(address(weight_P), address(gradient_P), address(mean_P), address(square_P), None),
        *(weight_P.size, lr, *betas, eps, decay, step, scale, product_threads()),
    )
    c_library.library().glass_adam(ctypes.byref(job))


# --- matrix products ------------------------------------------------------------------------------

#: FLOPs of a product that is worth more than one thread, and of a chunk: rows or columns.
SHARED, CHUNKS, FEWEST = 4_000_000, 8, 128


@functools.cache
def _gemm() -> tuple[int, int] | None:
    """Return the address of cblas_sgemm in NumPy's OpenBLAS, and 1 if its integers are wide."""
    for library in blas_libraries():
        for name in ("scipy_cblas_sgemm64_", "cblas_sgemm64_", "scipy_cblas_sgemm", "cblas_sgemm"):
            if (found := getattr(library, name, None)) is not None:
                return ctypes.cast(found, ctypes.c_void_p).value or 0, "64" in name
    return None


def product(a_MK: Array, b_KN: Array, *, out: Array, add: bool = False) -> Array:
    """Write a @ b, or add it, and return it: each thread computes chunks, as many as it comes to.

    The number of threads changes no bit. A thread that another program holds up keeps nobody
    waiting but for the chunk that it has begun, and the threads are those of all other passes;
    NumPy's own would spin beside them.
    """
    (rows, deep), columns = a_MK.shape, b_KN.shape[1]
    gemm, shared = _gemm(), 2 * rows * deep * columns >= SHARED
    if gemm is None or not (shared or (add and rows * deep)):
        found: Array = np.add(out, a_MK @ b_KN, out=out) if add else np.matmul(a_MK, b_KN, out=out)
        return found
    by_columns = columns > rows
    cut = columns if by_columns else rows
    chunk = max(FEWEST, -(-cut // CHUNKS)) if shared else cut  # whatever the number of threads
    (a_row, a_turned), (b_row, b_turned) = _leading(a_MK), _leading(b_KN)
    job = Product(
        gemm[0], address(a_MK), address(b_KN), address(out), rows, columns, deep, a_row, b_row,
        _leading(out)[0], chunk, float(add), a_turned, b_turned, by_columns, gemm[1],
        product_threads(),
    )  # fmt: skip
    c_library.library().glass_product(ctypes.byref(job))
    return out


def _leading(x: Array) -> tuple[int, int]:
    """Return the distance between rows, or 1 and that between columns of a transposed matrix."""
    row, one = (stride // x.itemsize for stride in x.strides)
    turned = one != 1 and x.shape[1] > 1
    assert not turned or row == 1 or x.shape[0] == 1
    return max(one if turned else row, x.shape[0] if turned else x.shape[1]), int(turned)
