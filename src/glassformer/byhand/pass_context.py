"""The context of one pass through the model: reusable memory, taps to fill, the rng of dropout.

A step requests the same arrays in the same order every time, so the n-th request of this step gets
the n-th buffer of the last one: after the first step nothing is allocated. Taps are passed in, like
caches; without a dict nothing is copied and nothing is computed.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Workspace:
    """Buffers of one dtype, handed out in order; `release` goes back to a `mark`.

    Buffers taken after a mark may be overwritten once it is released, and all of them once the
    workspace is reset: results that must live longer are copied by the caller.
    """

    def __init__(self, dtype: "np.dtype[Any] | type[Any]") -> None:
        self.dtype = np.dtype(dtype)
        self._flat: list[Array] = []
        self._view: list[Array] = []
        self._next = 0

    def take(self, shape: tuple[int, ...]) -> Array:
        """Return the next buffer in this shape; its contents are undefined."""
        index = self._next
        self._next = index + 1
        return self.at(index, shape)

    def at(self, index: int, shape: tuple[int, ...]) -> Array:
        """Return the buffer of this number in this shape; its contents are undefined."""
        while index >= len(self._flat):
            self._flat.append(np.empty(0, self.dtype))
            self._view.append(self._flat[-1])
        if self._view[index].shape != shape:
            size = math.prod(shape)
            if self._flat[index].size < size:
                # both references go first, so that old and new are never allocated at once
                self._view[index] = self._flat[index] = np.empty(0, self.dtype)
                self._flat[index] = np.empty(size, self.dtype)
            self._view[index] = self._flat[index][:size].reshape(shape)
        return self._view[index]

    def mark(self) -> int:
        """Return a point to release to."""
        return self._next

    def release(self, mark: int) -> None:
        """Free everything taken since the mark."""
        self._next = mark

    def reset(self) -> None:
        """Start the next step."""
        self._next = 0

    @property
    def taken_bytes(self) -> int:
        """Bytes of the arrays in use now."""
        return sum(view.nbytes for view in self._view[: self._next])

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(flat.nbytes for flat in self._flat)


def room(ws: Workspace | None, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Array:
    """Return a buffer from the workspace, or a new array without one."""
    return np.empty(shape, dtype) if ws is None else ws.take(shape)


@dataclass(slots=True)
class PassContext:
    """`taps` and `tap_grads` are filled by tap name; without `rng` nothing is dropped."""

    ws: Workspace
    taps: dict[str, Array] | None = None
    tap_grads: dict[str, Array] | None = None
    rng: np.random.Generator | None = None

    def tap(self, name: str, x: Array) -> None:
        """Copy x, if taps are read."""
        if self.taps is not None:
            self.taps[name] = np.array(x)

    def tap_grad(self, name: str, dx: Array) -> None:
        """Copy the gradient at that tap, if they are read."""
        if self.tap_grads is not None:
            self.tap_grads[name] = np.array(dx)

    def keep(self, shape: tuple[int, ...], rate: float) -> Array | None:
        """Return a dropout mask of 0 and 1 / (1 - rate), or None where nothing is dropped."""
        if self.rng is None or rate == 0.0:
            return None
        mask = self.ws.take(shape)
        self.rng.random(out=mask, dtype=mask.dtype)
        np.greater_equal(mask, rate, out=mask, casting="unsafe")
        mask *= 1.0 / (1.0 - rate)
        return mask
