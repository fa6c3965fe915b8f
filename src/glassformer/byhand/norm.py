"""LayerNorm and RMSNorm over the last axis."""

from typing import NamedTuple

import numpy as np

from glassformer.byhand.linear import dot_rows, sum_rows
from glassformer.byhand.pass_context import Array, Workspace, room

# D width of the normalised axis


class NormCache(NamedTuple):
    """Normalised values, one over the spread of each row, and the gain."""

    unit: Array
    rstd: Array
    weight_D: Array


def layer_norm_forward(
    x: Array,
    *,
    weight_D: Array,
    bias_D: Array | None,
    eps: float = 1e-5,
    unit: Array | None = None,
    out: Array | None = None,
    ws: Workspace | None = None,
) -> tuple[Array, NormCache]:
    """unit = (x - mean) / sqrt(var + eps), out = unit * weight + bias. `unit` may be x itself.

    Without a bias the last term is left out.
    """
    width = x.shape[-1]
    if unit is None:
        unit = room(ws, x.shape, x.dtype)
    np.subtract(x, _mean(x)[..., None], out=unit)
    rstd = 1.0 / np.sqrt(np.vecdot(unit, unit) / width + eps)
    unit *= rstd[..., None]
    if out is None:
        out = room(ws, x.shape, x.dtype)
    np.multiply(unit, weight_D, out=out)
    if bias_D is not None:
        out += bias_D
    return out, NormCache(unit, rstd, weight_D)


def layer_norm_backward(
    dout: Array,
    cache: NormCache,
    *,
    dx: Array | None = None,
    dweight_D: Array | None = None,
    dbias_D: Array | None = None,
    ws: Workspace | None = None,
) -> tuple[Array, Array, Array]:
    """Return dx, dweight, dbias; dx may be dout itself."""
    unit, rstd, weight_D = cache
    width = unit.shape[-1]
    mark = 0 if ws is None else ws.mark()
    work = room(ws, unit.shape, unit.dtype)
    # forward: out = unit * weight + bias   =>   dweight = sum dout * unit,  dbias = sum dout
    np.multiply(dout, unit, out=work)
    dweight_D = sum_rows(work.reshape(-1, width), out=dweight_D)
    dbias_D = sum_rows(dout.reshape(-1, width), out=dbias_D)
    # forward: unit = (x - mean(x)) * rstd, and both mean and rstd depend on every x of the row
    #   =>   with dunit = dout * weight:  dx = rstd (dunit - mean(dunit) - unit mean(dunit * unit))
    pull = dot_rows(work, weight_D)
    pull /= width
    mean = dot_rows(dout, weight_D)
    mean /= width
    dx = np.multiply(dout, weight_D, out=dx)
    dx -= mean[..., None]
    np.multiply(unit, pull[..., None], out=work)
    dx -= work
    dx *= rstd[..., None]
    if ws is not None:
        ws.release(mark)
    return dx, dweight_D, dbias_D


def rms_norm_forward(
    x: Array,
    *,
    weight_D: Array,
    eps: float = 1e-6,
    unit: Array | None = None,
    out: Array | None = None,
    ws: Workspace | None = None,
) -> tuple[Array, NormCache]:
    """unit = x / sqrt(mean(x^2) + eps), out = unit * weight. `unit` may be x itself."""
    rstd = 1.0 / np.sqrt(np.vecdot(x, x) / x.shape[-1] + eps)
    if unit is None:
        unit = room(ws, x.shape, x.dtype)
    np.multiply(x, rstd[..., None], out=unit)
    if out is None:
        out = room(ws, x.shape, x.dtype)
    np.multiply(unit, weight_D, out=out)
    return out, NormCache(unit, rstd, weight_D)


def rms_norm_backward(
    dout: Array,
    cache: NormCache,
    *,
    dx: Array | None = None,
    dweight_D: Array | None = None,
    ws: Workspace | None = None,
) -> tuple[Array, Array]:
    """Return dx, dweight; dx may be dout itself."""
    unit, rstd, weight_D = cache
    width = unit.shape[-1]
    mark = 0 if ws is None else ws.mark()
    work = room(ws, unit.shape, unit.dtype)
    # forward: out = unit * weight   =>   dweight = sum dout * unit
    np.multiply(dout, unit, out=work)
    dweight_D = sum_rows(work.reshape(-1, width), out=dweight_D)
    # forward: unit = x * rstd, rstd = (mean(x^2) + eps)^(-1/2)
    #   =>   with dunit = dout * weight:  dx = rstd (dunit - unit mean(dunit * unit))
    pull = dot_rows(work, weight_D)
    pull /= width
    dx = np.multiply(dout, weight_D, out=dx)
    np.multiply(unit, pull[..., None], out=work)
    dx -= work
    dx *= rstd[..., None]
    if ws is not None:
        ws.release(mark)
    return dx, dweight_D


def _mean(x: Array) -> Array:
    """Return the mean over the last axis, as a product with 1/D."""
    return dot_rows(x, np.full(x.shape[-1], 1.0 / x.shape[-1], x.dtype))
