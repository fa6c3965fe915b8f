"""A Triton kernel for products of some rows on a GPU: a batch that decodes, 64 to 256 rows.

A product of so few rows takes little longer than a launch. So the norm before it, its bias, gate or
activation and the residual after it belong to it, and while the kernel before it still runs, it
brings its weights into the cache (programmatic dependent launch, see `triton_decode`).

An RMS norm is a factor for each row and one for each column. What adds to the residual knows both
at its end: it writes the sum also times the next norm's gain, and each tile's sum of squares
(`Gained`). The product that reads them multiplies its results by the rows' factors.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glassformer.kernels.matmul import Gained
from glassformer.kernels.triton_decode import await_inputs, overlaps

# B rows, I inputs, O outputs, P tiles of columns

DTYPES = (torch.float16, torch.bfloat16)
#: Rows in whole tiles: 64 and 128 were measured on a GPU, a tile that is partly filled was not. The
#: library is faster with 8 rows.
ROWS, MOST_ROWS = 64, 256
MOST_OUTPUTS = 16_384  # wider products are the library's: a head over a vocabulary
MOST_TILES = 1_024  # of a product whose inputs several programs share
LEAST_INPUTS = 64  # a chunk of inputs; their number is a multiple of it


@triton.jit
def _fetch_ahead(w_ptr, o, first, n_in: tl.constexpr, FETCH: tl.constexpr):
    """Bring some inputs' weights of these outputs into the second-level cache, see `_fetch`."""
    at = (w_ptr + o.to(tl.int64) * n_in + first).to(tl.int64)
    tl.inline_asm_elementwise(FETCH, "=r,l", [at], tl.int32, is_pure=False, pack=1)


def _fetch(span: int, outputs: int) -> str:
    """Return the instruction that fetches inputs of one output, for a thread of each output."""
    return (
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; "
        f"setp.lt.u32 p, t, {outputs}; mov.u32 $0, 0; "
        f"@p cp.async.bulk.prefetch.L2.global [$1], {2 * span}; }}"
    )


@triton.jit
def _product_of_rows(
    x_ptr, squares_ptr, w_ptr, bias_ptr, residual_ptr, gain_ptr, out_ptr, gained_ptr, made_ptr,
    part_ptr, count_ptr, n_rows, n_out, n_squares, eps,
    n_in: tl.constexpr, ACTIVATION: tl.constexpr, SQUARES: tl.constexpr, SPLITS: tl.constexpr,
    SPAN: tl.constexpr, FETCH: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # Gate and up of an output are neighbours: one product makes both.
    OUTPUTS: tl.constexpr = 2 * BLOCK_O if ACTIVATION == "gate" else BLOCK_O
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    wide = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    n_wide = 2 * n_out if ACTIVATION == "gate" else n_out
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    split = tl.program_id(2)
    i = tl.arange(0, BLOCK_I)
    first = split * SPAN
    # Rows and outputs outside are read as the last one, and not written.
    row = tl.minimum(b, n_rows - 1)
    out = tl.minimum(wide, n_wide - 1)
    at = w_ptr + out.to(tl.int64)[:, None] * n_in + i[None, :]
    if FETCH != "":
        _fetch_ahead(w_ptr, out, first, n_in, FETCH=FETCH)
    await_inputs(EARLY)
    from_x = x_ptr + row[:, None] * n_in + i[None, :]
    # What the end needs is loaded before the loop: by then it has arrived.
    real = o < n_out
    inside = (b < n_rows)[:, None] & real[None, :]
    place = b[:, None] * n_out + o[None, :]
    squares = tl.zeros((1, BLOCK_B), tl.float32)
    if SQUARES > 0:
        p = tl.arange(0, SQUARES)[:, None]
        of_rows = (p < n_squares) & (b < n_rows)[None, :]
        squares = tl.load(squares_ptr + p * n_rows + b[None, :], of_rows, 0.0)
    residual = tl.zeros((BLOCK_B, BLOCK_O), x_ptr.dtype.element_ty)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + place, inside, 0.0)
    acc = tl.zeros((BLOCK_B, OUTPUTS), tl.float32)
    for begin in range(first, tl.minimum(first + SPAN, n_in), BLOCK_I):
        x = tl.load(from_x + begin)
        weight = tl.load(at + begin)
        acc = tl.dot(x, tl.trans(weight), acc)
    last = True
    if SPLITS > 1:  # whoever comes last adds the parts, in one order
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        n_tiles = tl.num_programs(0) * tl.num_programs(1)
        inner = tl.arange(0, BLOCK_B)[:, None] * BLOCK_O + tl.arange(0, BLOCK_O)[None, :]
        size: tl.constexpr = BLOCK_B * BLOCK_O
        tl.store(part_ptr + (split * n_tiles + tile) * size + inner, acc)
        tl.debug_barrier()
        last = tl.atomic_add(count_ptr + tile, 1) == SPLITS - 1
        if last:
            acc = tl.zeros((BLOCK_B, BLOCK_O), tl.float32)
            for other in tl.static_range(SPLITS):
                from_part = part_ptr + (other * n_tiles + tile) * size + inner
                acc += tl.load(from_part, cache_modifier=".cg")
            tl.store(count_ptr + tile, 0)
    if last:
        if SQUARES > 0:
            rate = tl.rsqrt(tl.sum(squares, 0) / n_in + eps)[:, None]
            acc *= rate
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + wide, wide < n_wide, 0.0).to(tl.float32)[None, :]
        if ACTIVATION == "gate":
            gate, up = tl.split(tl.reshape(acc, (BLOCK_B, BLOCK_O, 2)))
            result = gate * tl.sigmoid(gate) * up
        elif ACTIVATION == "relu":
            result = tl.maximum(acc, 0.0)
        elif ACTIVATION == "gelu":
            result = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
        else:
            result = acc
        if residual_ptr is not None:
            result += residual.to(tl.float32)
        made = result.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, made, inside)
        if gain_ptr is not None:
            shown = tl.where(inside, made.to(tl.float32), 0.0)
            gain = tl.load(gain_ptr + o, real, 0.0).to(tl.float32)
            tl.store(gained_ptr + place, (shown * gain[None, :]).to(made.dtype), inside)
            to_made = made_ptr + tl.program_id(0) * n_rows + b
            tl.store(to_made, tl.sum(shown * shown, 1), b < n_rows)


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Return True for a GPU with the shared memory that the tiles need: Hopper's, Blackwell's."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def takes(x_BI: Tensor) -> bool:
    """Return True if a product of so many rows is ours; they must lie together."""
    return len(x_BI) in range(ROWS, MOST_ROWS + 1, ROWS) and x_BI.is_contiguous()


class Tile(NamedTuple):
    """The rows, outputs and inputs that a program reads at once, and how it is run."""

    rows: int
    outputs: int
    inputs: int
    splits: int  # programs that share the inputs of one tile
    warps: int
    stages: int


def product_of_rows(
    x_BI: "Tensor | Gained",
    weight_OI: Tensor,
    bias_O: Tensor | None,
    *,
    eps: float = 0.0,
    activation: str = "",
    residual_BO: Tensor | None = None,
    gain_O: Tensor | None = None,
    counts: Tensor | None = None,
    tile: Tile | None = None,
) -> "Tensor | Gained":
    """Return activation(x W^T + b) + residual of some rows; of rows that are `Gained`, their norm.

    With `gain_O` the result is `Gained` for the norm with that gain. `counts` are zeros, and zeros
    again afterwards, for products whose inputs several programs share.
    """
    n_in, squares, n_squares = weight_OI.shape[1], None, 0
    n_out = weight_OI.shape[0] // 2 if activation == "gate" else weight_OI.shape[0]
    if isinstance(x_BI, Gained):
        _, x_BI, squares = x_BI
        n_squares = len(squares)
    B = len(x_BI)
    assert weight_OI.is_contiguous() and x_BI.is_contiguous() and n_in % LEAST_INPUTS == 0
    assert residual_BO is None or residual_BO.is_contiguous()
    tile = tile_of(B, n_in, n_out, gated=activation == "gate") if tile is None else tile
    assert n_in % tile.inputs == 0
    grid = triton.cdiv(n_out, tile.outputs), triton.cdiv(B, tile.rows), tile.splits
    out_BO = x_BI.new_empty(B, n_out)
    gained_BO, made_PB, parts = None, None, None
    if gain_O is not None:
        gained_BO = torch.empty_like(out_BO)
        made_PB = torch.empty(grid[0], B, dtype=torch.float32, device=x_BI.device)
    if tile.splits > 1:
        assert counts is not None and len(counts) >= grid[0] * grid[1] and activation != "gate"
        size = grid[0] * grid[1] * tile.splits * tile.rows * tile.outputs
        parts = torch.empty(size, dtype=torch.float32, device=x_BI.device)
    early = overlaps(x_BI.device)
    span = triton.cdiv(triton.cdiv(n_in, tile.inputs), tile.splits) * tile.inputs
    whole = span * tile.splits == n_in
    wide = 2 * tile.outputs if activation == "gate" else tile.outputs
    assert wide <= 32 * tile.warps or not early, "a thread fetches the weights of one output"
    _product_of_rows[grid](
        x_BI, squares, weight_OI, bias_O, residual_BO, gain_O, out_BO, gained_BO, made_PB,
        parts, counts if tile.splits > 1 else None, B, n_out, n_squares, eps,
        n_in=n_in, ACTIVATION=activation,
        SQUARES=triton.next_power_of_2(n_squares) if n_squares else 0, SPLITS=tile.splits,
        SPAN=span, FETCH=_fetch(span, wide) if early and whole else "",
        BLOCK_B=tile.rows, BLOCK_O=tile.outputs, BLOCK_I=tile.inputs, EARLY=early,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=early,
    )  # fmt: skip
    if gained_BO is None or made_PB is None:
        return out_BO
    return Gained(out_BO, gained_BO, made_PB)


#: For two products side by side, for more outputs than inputs, for as many, and for many inputs.
GATED = Tile(128, 64, 64, 1, 4, 5)
WIDE = Tile(64, 16, 128, 1, 4, 4)
EQUAL = Tile(64, 16, 128, 1, 4, 6)
DEEP = Tile(64, 64, 128, 4, 4, 4)


def tile_of(rows: int, n_in: int, n_out: int, *, gated: bool) -> Tile:
    """Return the tile of a product: the best of some for 128 rows of a 0.5 B model on an H200."""
    if gated:
        tile = GATED
    elif n_in >= 2048:
        tile = DEEP
    else:
        tile = WIDE if n_out > n_in else EQUAL
    few = min(tile.rows, max(64, triton.next_power_of_2(rows)))
    chunk = tile.inputs if n_in % tile.inputs == 0 else LEAST_INPUTS
    tiles = triton.cdiv(n_out, tile.outputs) * triton.cdiv(rows, few)
    splits = tile.splits if tiles * tile.splits <= MOST_TILES else 1
    return tile._replace(rows=few, inputs=chunk, splits=splits)
