"""Activations, dropout, and the error function: one rational map and one polynomial.

erfc(z) = exp(-z^2) P(s) with s = (2 - z) / (2 + z), for z >= 0. The map folds [0, inf) onto
(-1, 1], where exp(z^2) erfc(z) is smooth; P was fitted with weight exp(-z^2), and
tests/byhand/test_activation.py fits it again. exp(-z^2) is also the bell curve of GELU's slope.

ReLU, GELU (exact and tanh), SiLU and dropout: elementwise pairs.

GELU and SiLU keep their slope instead of their input: the forward has everything at hand that the
slope needs, and backward is one multiplication. Long arrays go through in pieces that stay in the
cache.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, assert_never

import numpy as np

from glassformer.byhand.pass_context import Array, Workspace, room
from glassformer.spec import model as spec

#: Coefficients of s^0, s^1, ...: error of erfc 9e-19, below float64's rounding.
DOUBLE = (
    0.25539567631050575,
    0.4271858474139564,
    0.24165819424247495,
    0.0789785810161985,
    0.003732892399065239,
    -0.006997461735531252,
    -0.0008471430235245632,
    0.000981975609630472,
    4.3557815026846194e-05,
    -0.00017434864680889863,
    2.744498745024276e-05,
    2.7792870935536852e-05,
    -1.425851124333356e-05,
    -1.2783200022062644e-06,
    4.127886480758393e-06,
    -2.0472928391623544e-06,
    4.994036030120664e-07,
    -5.2425378301282945e-08,
)
#: The same for float32: error 9e-9, below its rounding.
SINGLE = (
    0.25539581422271457,
    0.42717559516884546,
    0.24178502354427908,
    0.07831503129407104,
    0.005557579093345665,
    -0.009831623613643242,
    0.0016025721481338704,
)


def coefficients(dtype: "np.dtype[Any]") -> tuple[float, ...]:
    """Return the coefficients of P for this precision."""
    return DOUBLE if dtype == np.float64 else SINGLE


def erfc_parts(
    size: Array, *, erfc: Array, bell: Array, square: float = 1.0, factor: float = 1.0
) -> None:
    """Fill factor * erfc(z) and bell = exp(-z^2), z^2 = square * size^2, size >= 0.

    size itself is overwritten. Constants are folded into existing passes over the array.
    """
    unit = math.sqrt(square)
    np.multiply(size, size, out=bell)
    bell *= -square
    np.exp(bell, out=bell)
    size += 2.0 / unit
    s = np.divide(4.0 / unit, size, out=size)
    s -= 1.0  # (2 - z) / (2 + z) = 4 / (2 + z) - 1
    highest, *rest = (factor * c for c in reversed(coefficients(size.dtype)))
    np.multiply(s, highest, out=erfc)
    for coefficient in rest[:-1]:
        erfc += coefficient
        erfc *= s
    erfc += rest[-1]
    erfc *= bell


def erf(x: Array) -> Array:
    """2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x; error below 1e-15 in float64."""
    x = np.asarray(x)
    if not np.issubdtype(x.dtype, np.floating):
        x = x.astype(np.float64)
    z, out, bell = np.abs(x), np.empty_like(x), np.empty_like(x)
    erfc_parts(z, erfc=out, bell=bell)
    np.subtract(1.0, out, out=out)
    return np.copysign(out, x, out=out)


BELL_HEIGHT = 1.0 / math.sqrt(2.0 * math.pi)


#: Entries that pass through a chain of elementwise operations at once, to bound the scratch.
#: Measured with GELU: half of it costs 7 %, a quarter 25 %; all at once saves 5 %.
PIECE = 64 * 1024

TANH_SCALE = math.sqrt(2.0 / math.pi)
TANH_CUBIC = 0.044715


def relu_forward(x: Array, *, out: Array | None = None) -> tuple[Array, Array]:
    """max(x, 0); the result is the cache."""
    # a row of zeros, not the scalar: NumPy's vectorised loop for two arrays is the faster one
    out = np.maximum(x, np.zeros(x.shape[-1:], x.dtype), out=out)
    return out, out


def relu_backward(dout: Array, cache: Array, *, dx: Array | None = None) -> Array:
    """Return the gradient where the output was above zero."""
    # forward: out = max(x, 0)   =>   dx = dout where out > 0, else 0
    return np.multiply(dout, cache > 0, out=dx)


def relu2_forward(
    x: Array, *, out: Array | None = None, ws: Workspace | None = None
) -> tuple[Array, Array]:
    """max(x, 0)^2; the slope 2 max(x, 0) is the cache."""
    slope = np.maximum(x, np.zeros(x.shape[-1:], x.dtype), out=room(ws, x.shape, x.dtype))
    out = np.multiply(slope, slope, out=out)
    slope *= 2.0
    return out, slope


def slope_backward(dout: Array, cache: Array, *, dx: Array | None = None) -> Array:
    """Multiply by the slope: the backward of every activation whose cache is its slope."""
    # forward: out = f(x)   =>   dx = dout * f'(x)
    return np.multiply(dout, cache, out=dx)


def gelu_forward(
    x: Array, *, out: Array | None = None, ws: Workspace | None = None
) -> tuple[Array, Array]:
    """x times the probability that a standard normal is below x; the slope is the cache.

    With tail = erfc(|x| / sqrt(2)) / 2 that probability is 1 - tail for x > 0 and tail below: in
    both cases |step - tail|, where step is 1 above zero and 0 elsewhere.
    """
    out, slope = _out_and_slope(x, out, ws)
    for x_P, out_P, slope_P, (size_P, tail_P, bell_P) in _pieces(x, out, slope, 3, ws):
        np.abs(x_P, out=size_P)
        erfc_parts(size_P, erfc=tail_P, bell=bell_P, square=0.5, factor=0.5)
        step_P = np.greater(x_P, 0, out=size_P, casting="unsafe")
        step_P -= tail_P
        below_P = np.abs(step_P, out=step_P)
        # out = x below,  below' = bell / sqrt(2 pi)   =>   slope = below + x bell / sqrt(2 pi)
        bell_P *= BELL_HEIGHT
        bell_P *= x_P
        np.add(below_P, bell_P, out=slope_P)
        np.multiply(x_P, below_P, out=out_P)
    return out, slope


def gelu_tanh_forward(
    x: Array, *, out: Array | None = None, ws: Workspace | None = None
) -> tuple[Array, Array]:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); the slope is the cache."""
    out, slope = _out_and_slope(x, out, ws)
    for x_P, out_P, slope_P, (square_P, tanh_P) in _pieces(x, out, slope, 2, ws):
        np.multiply(x_P, x_P, out=square_P)
        np.multiply(square_P, TANH_SCALE * TANH_CUBIC, out=tanh_P)
        tanh_P += TANH_SCALE
        tanh_P *= x_P
        np.tanh(tanh_P, out=tanh_P)
        # out = x/2 (1 + t)  =>  slope = (1 + t)/2 + x/2 (1 - t^2) sqrt(2/pi) (1 + 3 * 0.044715 x^2)
        square_P *= 1.5 * TANH_SCALE * TANH_CUBIC
        square_P += 0.5 * TANH_SCALE
        square_P *= x_P
        np.multiply(tanh_P, tanh_P, out=slope_P)
        np.subtract(1.0, slope_P, out=slope_P)
        slope_P *= square_P
        tanh_P += 1.0
        tanh_P *= 0.5
        slope_P += tanh_P
        np.multiply(x_P, tanh_P, out=out_P)
    return out, slope


def silu_forward(
    x: Array, *, out: Array | None = None, ws: Workspace | None = None
) -> tuple[Array, Array]:
    """x sigmoid(x), with sigmoid (1 + tanh(x/2))/2, which cannot overflow; cache: the slope."""
    out, slope = _out_and_slope(x, out, ws)
    for x_P, out_P, slope_P, (sigmoid_P,) in _pieces(x, out, slope, 1, ws):
        np.multiply(x_P, 0.5, out=sigmoid_P)
        np.tanh(sigmoid_P, out=sigmoid_P)
        sigmoid_P += 1.0
        sigmoid_P *= 0.5
        # out = x s  =>  slope = s + x s (1 - s)
        np.subtract(1.0, sigmoid_P, out=slope_P)
        slope_P *= x_P
        slope_P += 1.0
        slope_P *= sigmoid_P
        np.multiply(x_P, sigmoid_P, out=out_P)
    return out, slope


def tanh_forward(x: Array, *, out: Array | None = None) -> tuple[Array, Array]:
    """tanh(x); the result is the cache."""
    out = np.tanh(x, out=out)
    return out, out


def tanh_backward(dout: Array, cache: Array, *, dx: Array | None = None) -> Array:
    """Multiply by the slope, which the result says."""
    # forward: out = tanh(x)   =>   dx = dout (1 - out^2)
    return np.multiply(dout, 1.0 - cache**2, out=dx)


def sigmoid_forward(x: Array) -> tuple[Array, Array]:
    """1 / (1 + exp(-x)) as (1 + tanh(x/2))/2, which cannot overflow; cache: the slope."""
    out = 0.5 * (1.0 + np.tanh(0.5 * x))
    # out = s  =>  slope = s (1 - s)
    return out, out * (1.0 - out)


def activate_forward(
    x: Array,
    function: spec.Activation | Literal["tanh", "sigmoid"],
    *,
    out: Array | None = None,
    ws: Workspace | None = None,
) -> tuple[Array, Array]:
    """Apply the function of that name; the cache is what `activate_backward` needs."""
    match function:
        case "relu":
            return relu_forward(x, out=out)
        case "gelu":
            return gelu_forward(x, out=out, ws=ws)
        case "gelu_tanh":
            return gelu_tanh_forward(x, out=out, ws=ws)
        case "silu":
            return silu_forward(x, out=out, ws=ws)
        case "relu2":
            return relu2_forward(x, out=out, ws=ws)
        case "tanh":
            return tanh_forward(x, out=out)
        case "sigmoid":
            return sigmoid_forward(x)
        case _ as unreachable:
            assert_never(unreachable)


def activate_backward(
    dout: Array,
    cache: Array,
    function: spec.Activation | Literal["tanh"],
    *,
    dx: Array | None = None,
) -> Array:
    """Return dx, which may be written into dout itself."""
    if function == "tanh":
        return tanh_backward(dout, cache, dx=dx)
    backward = relu_backward if function == "relu" else slope_backward
    return backward(dout, cache, dx=dx)


class GateCache(NamedTuple):
    """f(gate), its slope, what it multiplies, and where that is inside its limits."""

    opened: Array
    slope: Array
    up: Array
    inside: Array | None = None


def gate_forward(
    gate: Array,
    up: Array,
    *,
    function: spec.GateActivation | Literal["sigmoid"],
    ws: Workspace | None = None,
) -> tuple[Array, GateCache]:
    """f(gate) * up. A gate of width 1 multiplies the complete row."""
    opened, slope = activate_forward(gate, function, ws=ws)
    out = np.multiply(opened, up, out=room(ws, up.shape, up.dtype))
    return out, GateCache(opened, slope, up)


def clamped_gate_forward(
    gate: Array, up: Array, *, limit: float, slope: float, ws: Workspace | None = None
) -> tuple[Array, GateCache]:
    """g sigmoid(slope g) (u + 1) with g = min(gate, limit), u = up within both limits.

    What lies outside passes no gradient on.
    """
    # g sigmoid(a g) = silu(a g) / a   =>   its slope is silu'(a g)
    below, inside = gate <= limit, np.abs(up) <= limit
    bounded = np.minimum(gate, limit, out=room(ws, gate.shape, gate.dtype))
    bounded *= slope
    opened, bent = silu_forward(bounded, ws=ws)
    opened /= slope
    bent *= below
    raised = np.clip(up, -limit, limit, out=room(ws, up.shape, up.dtype))
    raised += 1.0
    out = np.multiply(opened, raised, out=room(ws, up.shape, up.dtype))
    return out, GateCache(opened, bent, raised, inside)


def gate_backward(
    dout: Array, cache: GateCache, *, dgate: Array | None = None, dup: Array | None = None
) -> tuple[Array, Array]:
    """Return dgate and dup, written into the given arrays or new ones."""
    # forward: out = f(gate) * up   =>   dup = dout * f(gate),  dgate = dout * up * f'(gate)
    dup = np.multiply(dout, cache.opened, out=dup)
    if cache.inside is not None:
        dup *= cache.inside
    if cache.opened.shape[-1] != dout.shape[-1]:  # one gate for the complete row
        dgate = np.sum(dout * cache.up, axis=-1, keepdims=True, out=dgate)
    else:
        dgate = np.multiply(dout, cache.up, out=dgate)
    return slope_backward(dgate, cache.slope, dx=dgate), dup


def dropout_forward(x: Array, *, keep: Array, out: Array | None = None) -> tuple[Array, Array]:
    """x times a mask of 0 and 1 / (1 - rate); the mask is passed in, and is the cache."""
    return np.multiply(x, keep, out=out), keep


def dropout_backward(dout: Array, cache: Array, *, dx: Array | None = None) -> Array:
    """Apply the same mask to the gradient."""
    # forward: out = x * keep   =>   dx = dout * keep
    return np.multiply(dout, cache, out=dx)


Forward = Callable[..., tuple[Array, Array]]


def _out_and_slope(x: Array, out: Array | None, ws: Workspace | None) -> tuple[Array, Array]:
    slope = room(ws, x.shape, x.dtype)
    return (room(ws, x.shape, x.dtype) if out is None else out), slope


def _pieces(
    x: Array, out: Array, slope: Array, scratch: int, ws: Workspace | None
) -> Iterator[tuple[Array, Array, Array, list[Array]]]:
    """Yield pieces of x, out and slope with scratch arrays; x may be out, or part of an array."""
    mark = 0 if ws is None else ws.mark()
    columns = x.shape[-1]
    x_RC, out_RC, slope_RC = (a.reshape(-1, columns) for a in (x, out, slope))
    rows = max(1, min(len(x_RC), PIECE // columns))
    buffers = [room(ws, (rows, columns), x.dtype) for _ in range(scratch)]
    for start in range(0, len(x_RC), rows):
        here = slice(start, start + rows)
        count = len(x_RC[here])
        yield x_RC[here], out_RC[here], slope_RC[here], [b[:count] for b in buffers]
    if ws is not None:
        ws.release(mark)
