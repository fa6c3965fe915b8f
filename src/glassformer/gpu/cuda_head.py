"""The likeliest tokens of some rows on a Hopper GPU: a head whose logits are not kept (`head.cu`).

A batch that decodes greedily needs one token of each row. So the product with the vocabulary's
weights finds the best logits itself, in parts, and nothing of the vocabulary's size is written. The
norm before the head belongs to it, as in `cuda_rows`. `triton_choose` puts the parts together.
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

# B rows, I inputs, V vocab, P parts of the vocabulary

LEAST_ROWS, MOST_ROWS = 33, 128  # with 64 and 128 faster than the library, with 256 slower
ROWS, OUTPUTS = 64, 128  # of a block; of a tile
GROUPS = 2  # of warps, which look at logits by turns
THREADS = 128 * GROUPS + 32
MOST_INPUTS = 1_408  # whose rows leave room for three stages of weights
LEAST_OUTPUTS = 8_192  # a tile for half of the multiprocessors; smaller ones were not measured
MEMORY = 231_000  # bytes of shared memory, of the 232,448 that a block may have
CHUNK = TensorMap.COLUMNS


class Found(NamedTuple):
    """Largest logits, sums of exponentials and best open tokens of parts of the vocabulary."""

    most_BP: Tensor
    total_BP: Tensor
    best_BP: Tensor


class Operands(ctypes.Structure):
    """The arguments of the kernel, as head.cu declares them; a missing tensor is null."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("squares", "bias", "flags")),
        *((name, ctypes.c_void_p) for name in ("most", "total", "best")),
        *((name, ctypes.c_int) for name in ("n_rows", "n_out", "n_squares")),
        ("share", ctypes.c_float),
        ("eps", ctypes.c_float),
    )


def reads(weight_VI: Tensor) -> bool:
    """Return True if the likeliest tokens by these weights can be found here."""
    if weight_VI.dtype not in DTYPES or not runs_on(weight_VI.device):
        return False
    vocab, inputs = weight_VI.shape
    fits = inputs <= MOST_INPUTS and inputs % 8 == 0 and vocab >= LEAST_OUTPUTS and vocab % 2 == 0
    return fits and weight_VI.is_contiguous() and weight_VI.data_ptr() % 16 == 0


def takes(rows: int) -> bool:
    """Return True if the tokens of so many rows are found here."""
    return LEAST_ROWS <= rows <= MOST_ROWS


def find(
    x_BI: "Tensor | Gained",
    weight_VI: Tensor,
    bias_V: Tensor | None,
    flags_V: Tensor,
    *,
    eps: float = 0.0,
) -> Found:
    """Return what is likeliest by the logits x W^T + b, x the norm of rows that are `Gained`.

    `flags_V` are those of `triton_choose`.
    """
    (V, n_in), squares_PB = weight_VI.shape, None
    if isinstance(x_BI, Gained):
        _, x_BI, squares_PB = x_BI
    B = len(x_BI)
    assert x_BI.is_contiguous() and takes(B) and len(flags_V) == V + 1
    blocks = 1 if B <= ROWS else 2
    given = squares_PB is not None, bias_V is not None
    kernel, clusters = _kernel(x_BI.device, x_BI.dtype, -(-n_in // CHUNK), blocks, *given)
    parts = clusters * GROUPS
    most_BP, total_BP = torch.empty(2, B, parts, dtype=torch.float32, device=x_BI.device)
    best_BP = torch.empty(B, parts, dtype=torch.int64, device=x_BI.device)
    pointers = (squares_PB, bias_V, flags_V, most_BP, total_BP, best_BP)
    operands = Operands(
        *(None if one is None else one.data_ptr() for one in pointers),
        *(B, V, 0 if squares_PB is None else len(squares_PB), 1 / n_in, eps),
    )
    maps = TensorMap(x_BI, ROWS), TensorMap(weight_VI, OUTPUTS // blocks)
    kernel(
        (clusters * blocks, 1),
        THREADS,
        cluster=blocks,
        arguments=(maps[0].address, maps[1].address, ctypes.addressof(operands)),
    )
    return Found(most_BP, total_BP, best_BP)


@functools.cache
def _kernel(
    device: torch.device, dtype: torch.dtype, chunks: int, blocks: int, normed: bool, biased: bool
) -> tuple[Kernel, int]:
    """Return the kernel, and how many clusters of it run at once."""
    rows = chunks * ROWS * CHUNK * 2
    stages = (MEMORY - 1_024 - rows) // (OUTPUTS * CHUNK * 2)
    defined = {"BLOCKS": blocks, "CHUNKS": chunks, "STAGES": stages}
    defined |= {"OUTPUTS": OUTPUTS, "GROUPS": GROUPS}
    flags = {"HALF": dtype is torch.float16, "NORMED": normed, "BIASED": biased}
    text = program(
        "head", defined | {key: int(on) for key, on in flags.items()}, multiply(OUTPUTS, dtype)
    )
    shared = 1_024 + rows + stages * OUTPUTS * CHUNK * 2
    kernel = Kernel(text, "likeliest", shared=shared, device=device)
    return kernel, kernel.clusters_at_once(THREADS, cluster=blocks)
