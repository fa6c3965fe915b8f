"""`LargePages`: memory for weights that are read again at every step.

A processor remembers where a few thousand pages are, and a decoding step passes over more: on pages
of 2 MB instead of 4 KB the products of a model of 135 million parameters take three quarters of the
time. Linux gives such pages to memory that requests them; elsewhere, on a kernel built without
them, and for what is mapped from a file, pages are as they come. To get them has a price of its
own: in a virtual machine that gives its free memory back to the host about what `WORTH` steps save.
"""

import contextlib
import math
import mmap

import numpy as np
from numpy.typing import NDArray

PAGE = 1 << 21  # bytes
WORTH = 100  # decoding steps
#: Arrays share a piece of memory of this size, which is freed with the last of them.
PIECE = 32 * PAGE
ALIGNED = 64  # bytes: a line of the cache


Floats = NDArray[np.float32]


def empty(shape: tuple[int, ...]) -> Floats:
    """Return an array that is not filled and begins with a line of the cache."""
    count = math.prod(shape)
    raw = np.empty(4 * count + ALIGNED, dtype=np.uint8)
    begin = -raw.ctypes.data % ALIGNED
    return raw[begin : begin + 4 * count].view(np.float32).reshape(shape)


class LargePages:
    """Float32 arrays one behind another, in pieces of memory that request large pages."""

    def __init__(self) -> None:
        self._piece: mmap.mmap | None = None
        self._at = self._end = 0

    def empty(self, shape: tuple[int, ...]) -> Floats:
        """Return an array that is not filled."""
        count = math.prod(shape)
        size = -(-4 * count // ALIGNED) * ALIGNED
        if not hasattr(mmap, "MADV_HUGEPAGE") or count == 0:
            return empty(shape)
        if self._piece is None or self._at + size > self._end:
            self._begin(max(PIECE, size))
        assert self._piece is not None
        made = np.frombuffer(self._piece, dtype=np.float32, count=count, offset=self._at)
        self._at += size
        return made.reshape(shape)

    def _begin(self, size: int) -> None:
        """Map a piece of memory; it begins with the first complete page."""
        piece = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them: pages are as they come
            piece.madvise(mmap.MADV_HUGEPAGE)
        begin = np.frombuffer(piece, dtype=np.uint8, count=1).ctypes.data
        self._at = -begin % PAGE
        self._piece, self._end = piece, self._at + size
