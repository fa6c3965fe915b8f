"""y = x W^T + b, and its gradients: three products, each one call of BLAS."""

from typing import NamedTuple

import numpy as np

from glassformer.byhand.pass_context import Array, Workspace, room

# R rows (batch x length), I width in, O width out


class LinearCache(NamedTuple):
    """The input's rows and the weight, for backward."""

    x_RI: Array
    weight_OI: Array


def linear_forward(
    x: Array,
    *,
    weight_OI: Array,
    bias_O: Array | None = None,
    out: Array | None = None,
    ws: Workspace | None = None,
) -> tuple[Array, LinearCache]:
    """out = x W^T + b for x of shape (..., I)."""
    x_RI = x.reshape(-1, x.shape[-1])
    if out is None:
        out = room(ws, (*x.shape[:-1], weight_OI.shape[0]), x.dtype)
    out_RO = out.reshape(-1, weight_OI.shape[0])
    np.matmul(x_RI, weight_OI.T, out=out_RO)
    if bias_O is not None:
        out_RO += bias_O
    return out, LinearCache(x_RI, weight_OI)


def linear_backward(
    dout: Array,
    cache: LinearCache,
    *,
    dx: Array | None = None,
    dweight_OI: Array | None = None,
    dbias_O: Array | None = None,
    ws: Workspace | None = None,
) -> tuple[Array, Array, Array]:
    """Return dx, dweight, dbias, written into the given arrays or new ones."""
    dx, dweight_OI = linear_products(dout, cache, dx=dx, dweight_OI=dweight_OI, ws=ws)
    return dx, dweight_OI, sum_rows(dout.reshape(-1, dout.shape[-1]), out=dbias_O)


def linear_products(
    dout: Array,
    cache: LinearCache,
    *,
    dx: Array | None = None,
    dweight_OI: Array | None = None,
    ws: Workspace | None = None,
) -> tuple[Array, Array]:
    """Return dx and dweight."""
    x_RI, weight_OI = cache
    dout_RO = dout.reshape(-1, dout.shape[-1])
    if dx is None:
        dx = room(ws, (*dout.shape[:-1], x_RI.shape[1]), dout.dtype)
    # forward: out = x @ W.T + b   =>   dx = dout @ W,  dW = dout.T @ x,  db = sum of dout's rows
    np.matmul(dout_RO, weight_OI, out=dx.reshape(x_RI.shape))
    return dx, np.matmul(dout_RO.T, x_RI, out=dweight_OI)


def sum_rows(x_RO: Array, *, out: Array | None = None) -> Array:
    """Sum over the rows, as a product with ones: BLAS reads the matrix once, with both cores."""
    return np.matmul(np.ones(len(x_RO), x_RO.dtype), x_RO, out=out)


def dot_rows(x: Array, vector_D: Array) -> Array:
    """x . vector over the last axis; one matrix-vector product where the rows are contiguous."""
    out: Array
    if x.flags.c_contiguous:
        out = np.matmul(x.reshape(-1, x.shape[-1]), vector_D)
        return out.reshape(x.shape[:-1])
    out = np.matmul(x, vector_D)
    return out
