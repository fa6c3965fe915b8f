"""Keys, values and attention of the native step alone, over pages of one sequence."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from glassformer.generation.native.arrays import Pages, Rows, _Step
from glassformer.generation.native.lowering import (
    ATTEND,
    BUFFERS,
    HEADS,
    OWN,
    PAGE,
    REMEMBER,
    WIDE,
    Op,
    head_floats,
)
from glassformer.kernels import c_library
from glassformer.spec.decoding import KVCache
from glassformer.spec.execution import KV_GROUP

# T tokens, N query heads, K key-value heads, H d_head, G groups of a head


def attended(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    *,
    kv_cache: KVCache,
    window: int = 0,
    cap: float = 0.0,
    at_once: int = 1 << 20,
) -> tuple[Tensor, "np.ndarray"]:
    """Return causal attention (T, N H) and the pages, read `at_once` tokens at a time."""
    (T, N, H), K = q_TNH.shape, k_TKH.shape[1]
    row = (N + 2 * K) * H
    rounded = kv_cache == "int8"
    shared = {"form": OWN, "width": H, "rounded": rounded}
    remember = Op(kind=REMEMBER, source=WIDE, to=WIDE, first=N * H, count=K, **shared)
    remember.from_width = remember.to_width = row
    attend = Op(kind=ATTEND, source=WIDE, to=HEADS, count=N, groups=K, causal=1, **shared)
    attend.from_width, attend.to_width = row, N * H
    attend.number, attend.window, attend.cap = H**-0.5, window, cap
    ops = (Op * 2)(remember, attend)
    pages = Pages(K * head_floats(H, kv_cache))
    rows = Rows(pages, 1)
    rows.reserve(T)
    wide = torch.cat((q_TNH, k_TKH, v_TKH), 1).flatten(1).contiguous()
    out = torch.full((T, N * H), torch.nan)
    for begin in range(0, T, at_once):
        count = min(at_once, T - begin)
        numbers = np.arange(begin, begin + count), np.zeros(count, dtype=np.int64)
        buffers = (ctypes.c_void_p * BUFFERS)()
        buffers[WIDE], buffers[HEADS] = wide[begin:].data_ptr(), out[begin:].data_ptr()
        step = _Step(ops=ctypes.addressof(ops), n_ops=2, buffers=ctypes.addressof(buffers))
        step.memory[0], step.table[0] = pages.address, rows.table.ctypes.data
        step.table_width[0], step.length[0] = rows.table.shape[1], rows.length.ctypes.data
        step.position, step.row = (array.ctypes.data for array in numbers)
        step.n_new, step.threads = count, 1
        assert c_library.library().glass_step(ctypes.addressof(step)) == 0
    rows.length[:] = -(-T // PAGE) * PAGE
    return out, pages.numbers[rows.used(0)]


def codes_and_scales(pages: "np.ndarray", T: int, K: int, H: int) -> list[tuple[Tensor, Tensor]]:
    """Return the codes (T, K, H) and scales (T, K, G) of keys, then of values, in 8-bit pages."""
    G, count = -(-H // KV_GROUP), len(pages)
    sides = pages.reshape(count, K, 2, -1)
    codes = np.ascontiguousarray(sides[..., : PAGE * H // 4]).view(np.int8)
    scales = sides[..., PAGE * H // 4 :].reshape(count, K, 2, G, PAGE).transpose(0, 4, 1, 3, 2)
    keys = codes[:, :, 0].reshape(count, K, H, PAGE).transpose(0, 3, 1, 2)
    values = codes[:, :, 1].reshape(count, K, PAGE, H).transpose(0, 2, 1, 3)
    found = []
    for number, side in enumerate((keys, values)):
        flat = side.reshape(count * PAGE, K, H)[:T]
        steps = scales[..., number].reshape(count * PAGE, K, G)[:T]
        found.append((torch.from_numpy(flat.copy()), torch.from_numpy(steps.copy())))
    return found
