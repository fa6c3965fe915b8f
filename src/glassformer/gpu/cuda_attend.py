"""Attention of one new query per row, for batches that decode on a Hopper GPU (`attend.cu`).

It computes what `triton_decode.attend` computes, for heads of 64 or 128 numbers in 16 bits, at most
eight queries to a key, and rows enough to fill the GPU without dividing the past. It copies the
past while the product of queries, keys and values still runs.
"""

import ctypes
import functools

import torch
from torch import Tensor

from glassformer.gpu.cuda_launch import DTYPES, Kernel, program, runs_on

# B rows, N query heads, K key-value heads, X = N + 2 K, H d_head, S positions of the cache

WIDTHS, MOST_QUERIES = (64, 128), 8
LEAST_BLOCKS = 128  # fewer leave multiprocessors idle: a past in parts fills them
WARPS, TILE, DEPTH = 4, 16, 3


class Operands(ctypes.Structure):
    """The arguments of the kernel, as attend.cu declares them; a missing tensor is null."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "fresh", "key", "value", "mask", "slopes")),
        *((name, ctypes.c_void_p) for name in ("query_gain", "key_gain", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("ends", "places", "slots", "sources", "lines")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("row", "kv_row", "kv_head")),
        *((name, ctypes.c_int) for name in ("n_heads", "n_kv", "n_places", "n_mask", "window")),
        ("end_step", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
    )


def takes(
    qkv_BXH: Tensor,
    kv_BXSH: Tensor,
    *,
    n_heads: int,
    rotation: tuple[Tensor, Tensor] | None,
    gains: tuple[Tensor, Tensor] | None,
    mask_BS: Tensor | None,
    slopes_N: Tensor | None,
) -> bool:
    """Return True if these rows are attended for here."""
    B, K, dtype = len(qkv_BXH), kv_BXSH.shape[1] // 2, qkv_BXH.dtype
    if dtype not in DTYPES or not runs_on(qkv_BXH.device):
        return False
    fits = qkv_BXH.shape[2] in WIDTHS and n_heads // K <= MOST_QUERIES and B * K >= LEAST_BLOCKS
    in_16_bits = (kv_BXSH, mask_BS, *(rotation or ()), *(gains or ()))
    of_one_type = all(one is None or one.dtype is dtype for one in in_16_bits)
    masked = mask_BS is None or (mask_BS.is_contiguous() and len(mask_BS) > 1) or B == 1
    return fits and of_one_type and masked and (slopes_N is None or slopes_N.dtype is torch.float32)


def attend(
    qkv_BXH: Tensor,
    kv_BXSH: Tensor,
    ends: Tensor,
    *,
    n_heads: int,
    places_B: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    gains: tuple[Tensor, Tensor] | None,
    eps: float,
    window: int | None,
    mask_BS: Tensor | None,
    slopes_N: Tensor | None,
    slots_B: Tensor | None,
    sources_B: Tensor | None,
    lines_BS: Tensor | None,
) -> Tensor:
    """Return attention (B, N H) of one new query per row; see `triton_decode.attend`."""
    (B, X, H), (K, S) = qkv_BXH.shape, (kv_BXSH.shape[1] // 2, kv_BXSH.shape[2])
    assert ends.dtype is places_B.dtype is torch.int64
    assert all(one is None or one.dtype is torch.int64 for one in (slots_B, sources_B))
    assert lines_BS is None or lines_BS.dtype is torch.int32
    out_BN = qkv_BXH.new_empty(B, n_heads * H)
    pointers = (
        qkv_BXH, qkv_BXH[:, n_heads:], kv_BXSH, kv_BXSH[:, K:], mask_BS, slopes_N,
        *(gains or (None, None)), *(rotation or (None, None)),
        ends, places_B, slots_B, sources_B, lines_BS, out_BN,
    )  # fmt: skip
    operands = Operands(
        *(None if one is None else one.data_ptr() for one in pointers),
        *(X * H, kv_BXSH.stride(0), S * H),
        *(n_heads, K, S if lines_BS is None else lines_BS.shape[1]),
        *(0 if mask_BS is None else mask_BS.shape[1], window or 0, int(len(ends) > 1)),
        *(H**-0.5, eps),
    )
    normed, turned = gains is not None, rotation is not None
    # Two heads in a block: one block for each multiprocessor, no two of them on one.
    heads = 2 if min(WIDTHS) == H and K % 2 == 0 and B * K >= 2 * LEAST_BLOCKS else 1
    kernel = _kernel(qkv_BXH.device, qkv_BXH.dtype, H, n_heads // K, heads, normed, turned)
    kernel(
        (B * K // heads, 1), 32 * WARPS * heads, cluster=1, arguments=(ctypes.addressof(operands),)
    )
    return out_BN


@functools.cache
def _kernel(
    device: torch.device,
    dtype: torch.dtype,
    head: int,
    group: int,
    together: int,
    normed: bool,
    turned: bool,
) -> Kernel:
    defined = {
        "HEAD": head,
        "GROUP": group,
        "TOGETHER": together,
        "DEPTH": DEPTH,
        "HALF": int(dtype is torch.float16),
        "NORMED": int(normed),
        "TURNED": int(turned),
    }
    ring = WARPS * DEPTH * 2 * TILE * (2 * head + 16)
    sums = WARPS * MOST_QUERIES * head * 4
    shared = together * (ring + sums)
    return Kernel(program("attend", defined), "attend", shared=shared, device=device)
