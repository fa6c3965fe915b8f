"""Products of some rows on a Hopper GPU: a batch that decodes, 64 to 256 rows (`rows.cu`).

A product of so few rows takes little longer than a launch. So the norm before it, its bias, gate or
activation and the residual after it belong to it, and while the kernel before it still runs, it
copies its weights (programmatic dependent launch, see `triton_decode`).

An RMS norm is a factor for each row and one for each column. What adds to the residual knows both
at its end: it writes the sum also times the next norm's gain, and each tile's sum of squares
(`Gained`). The product that reads them multiplies its results by the rows' factors.

The kernel is CUDA C++, since clusters of blocks that read each other's memory are not to be had in
Triton. NVIDIA's run-time compiler makes it for each shape of tile; Triton's cache keeps the result.
"""

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from glassformer.gpu.cuda_launch import (
    DTYPES,
    Kernel,
    TensorMap,
    multiply,
    program,
    runs_on,
)
from glassformer.gpu.products import Gained

# B rows, I inputs, O outputs, P tiles of columns

ROWS, MOST_ROWS = 64, 256  # measured with 64, 128 and 256; others are the library's
MOST_OUTPUTS = 16_384  # wider products are the library's: a head over a vocabulary
EIGHT = 8  # numbers of 16 bytes: inputs and results are multiples of it
ALIGNED = 16  # bytes, of what the tensor memory accelerator copies
MULTIPROCESSORS = 132  # of an H200; with fewer the tiles still fit, and take longer
DEEP = 32  # chunks of inputs that are worth wide tiles, and many blocks that share them
LEAST_CHUNKS = 7  # of a block: fewer are not worth the exchange of sums
#: Bytes of a ring: just more than half of a multiprocessor's memory (233,472, and 1,024 of it for
#: each block), so that no two blocks of a large product share one, but the kernel before it fits.
RING = 118_000
CHUNK = TensorMap.COLUMNS  # inputs of a stage
ACTIVATIONS = {"": "NOTHING", "gate": "GATE", "relu": "RELU", "gelu": "GELU"}


class Tile(NamedTuple):
    """The rows and outputs of a tile, the blocks that share its inputs, and the stages of each.

    With a gate two outputs make one result.
    """

    rows: int
    outputs: int
    splits: int
    stages: int

    @property
    def bytes(self) -> int:
        """Shared memory of a block: the ring of stages, afterwards the sums; 1,024 to align it."""
        ring = self.stages * (self.rows + self.outputs) * CHUNK * 2
        return max(ring, self.rows * (self.outputs + 8) * 4) + 1024


class Operands(ctypes.Structure):
    """The arguments of the kernel, as rows.cu declares them; a missing tensor is null."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("squares", "bias", "residual", "gain")),
        *((name, ctypes.c_void_p) for name in ("out", "gained", "made")),
        *((name, ctypes.c_int) for name in ("n_rows", "n_in", "n_out", "n_squares")),
        ("share", ctypes.c_float),
        ("eps", ctypes.c_float),
    )


def reads(weight_OI: Tensor) -> bool:
    """Return True if products of some rows by these weights are ours."""
    if weight_OI.dtype not in DTYPES or not runs_on(weight_OI.device):
        return False
    (n_out, n_in), gated = weight_OI.shape, 2 * EIGHT
    fits = n_out <= MOST_OUTPUTS and n_in % EIGHT == 0 and n_out % gated == 0
    return fits and weight_OI.is_contiguous() and weight_OI.data_ptr() % ALIGNED == 0


def takes(x_BI: Tensor) -> bool:
    """Return True if a product of so many rows is ours; they must lie together."""
    return ROWS <= len(x_BI) <= MOST_ROWS and x_BI.is_contiguous()


def product_of_rows(
    x_BI: "Tensor | Gained",
    weight_OI: Tensor,
    bias_O: Tensor | None,
    *,
    eps: float = 0.0,
    activation: str = "",
    residual_BO: Tensor | None = None,
    gain_O: Tensor | None = None,
    tile: Tile | None = None,
) -> "Tensor | Gained":
    """Return activation(x W^T + b) + residual of some rows; of rows that are `Gained`, their norm.

    With `gain_O` the result is `Gained` for the norm with that gain.
    """
    n_wide, n_in = weight_OI.shape
    n_out = n_wide // 2 if activation == "gate" else n_wide
    squares_PB = None
    if isinstance(x_BI, Gained):
        _, x_BI, squares_PB = x_BI
    B = len(x_BI)
    assert weight_OI.is_contiguous() and x_BI.is_contiguous()
    assert n_in % EIGHT == 0 and n_out % EIGHT == 0
    assert residual_BO is None or residual_BO.is_contiguous()
    tile = tile_of(B, n_in, n_wide) if tile is None else tile
    tiles, blocks_of_rows = -(-n_wide // tile.outputs), -(-B // tile.rows)
    out_BO, gained_BO, made_PB = x_BI.new_empty(B, n_out), None, None
    if gain_O is not None:
        gained_BO = torch.empty_like(out_BO)
        made_PB = torch.empty(tiles, B, dtype=torch.float32, device=x_BI.device)
    given = (squares_PB, bias_O, residual_BO, gain_O)
    kernel = _kernel(
        x_BI.device, x_BI.dtype, tile, activation, tuple(one is not None for one in given)
    )
    operands = Operands(
        *(None if one is None else one.data_ptr() for one in (*given, out_BO, gained_BO, made_PB)),
        *(B, n_in, n_out, 0 if squares_PB is None else len(squares_PB), 1 / n_in, eps),
    )
    maps = TensorMap(x_BI, tile.rows), TensorMap(weight_OI, tile.outputs)
    kernel(
        (tiles * tile.splits, blocks_of_rows),
        3 * tile.rows + 32,
        cluster=tile.splits,
        arguments=(maps[0].address, maps[1].address, ctypes.addressof(operands)),
    )
    if gained_BO is None or made_PB is None:
        return out_BO
    return Gained(out_BO, gained_BO, made_PB)


@functools.cache
def tile_of(rows: int, n_in: int, n_wide: int) -> Tile:
    """Return the tile of a product: each multiprocessor is given one, as far as they go.

    A product that is too small for all of them divides its inputs among the blocks of clusters.
    """
    tall, chunks = 64 if rows <= 64 else 128, -(-n_in // CHUNK)
    outputs = 16 * -(-n_wide * -(-rows // tall) // (16 * MULTIPROCESSORS))
    splits = 1
    if outputs <= 32:
        tall, deep = 64, chunks >= DEEP and rows > 64
        for outputs in (64,) if deep else (32, 64):
            blocks, splits = -(-n_wide // outputs) * -(-rows // tall), 1
            while splits * blocks < 0.6 * MULTIPROCESSORS and chunks >= 2 * splits * LEAST_CHUNKS:
                splits *= 2
            if splits * blocks <= MULTIPROCESSORS:
                break
    outputs = min(outputs, 160)  # whose sums are kept in registers
    stages = min(-(-chunks // splits), -(-RING // ((tall + outputs) * CHUNK * 2)))
    return Tile(tall, outputs, min(splits, 8), stages)


@functools.cache
def _kernel(
    device: torch.device, dtype: torch.dtype, tile: Tile, activation: str, given: tuple[bool, ...]
) -> Kernel:
    """Return the kernel for a tile and the operands that are given, in the order of rows.cu."""
    named = dict(zip(("NORMED", "BIASED", "ONTO", "GAINED"), map(int, given), strict=True))
    sizes = {name.upper(): number for name, number in tile._asdict().items()}
    half = int(dtype is torch.float16)
    defined = named | sizes | {"HALF": half, "ACTIVATION": ACTIVATIONS[activation]}
    text = program("rows", defined, multiply(tile.outputs, dtype))
    return Kernel(text, "product_of_rows", shared=tile.bytes, device=device)
