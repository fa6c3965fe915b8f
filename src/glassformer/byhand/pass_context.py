"""Memory that is taken once and used again: the buffers of a step, in the order of the step.

A step asks for the same arrays in the same order every time, so the n-th request of this step gets
the n-th buffer of the last one. After the first step nothing is allocated.

What one pass through the model carries: memory, taps to fill, and the source of dropout.

Taps are passed in, like caches. Without a dict nothing is copied and nothing is computed.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Workspace:
    """Buffers of one dtype, handed out in order; `release` goes back to a `mark`.

    What was taken after a mark may be overwritten once it is released, and everything once the
    workspace is reset: results that must live longer are copied by whoever wants them.
    """

    def __init__(self, dtype: "np.dtype[Any] | type[Any]") -> None:
        self.dtype = np.dtype(dtype)
        self._flat: list[Array] = []
        self._view: list[Array] = []
        self._next = 0

    def take(self, shape: tuple[int, ...]) -> Array:
        """The next buffer, shaped; its contents are whatever was there."""
        place = self._next
        self._next = place + 1
        if place == len(self._flat):
            self._flat.append(np.empty(math.prod(shape), self.dtype))
            self._view.append(self._flat[place].reshape(shape))
        elif self._view[place].shape != shape:
            size = math.prod(shape)
            if self._flat[place].size < size:
                # both references go first, so that old and new never stand side by side
                self._view[place] = self._flat[place] = np.empty(0, self.dtype)
                self._flat[place] = np.empty(size, self.dtype)
            self._view[place] = self._flat[place][:size].reshape(shape)
        return self._view[place]

    def mark(self) -> int:
        """A point to go back to."""
        return self._next

    def release(self, mark: int) -> None:
        """Everything taken since the mark may be used again."""
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
        """Bytes held in all."""
        return sum(flat.nbytes for flat in self._flat)


def room(ws: Workspace | None, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Array:
    """A buffer from the workspace, or a fresh array where there is none."""
    return np.empty(shape, dtype) if ws is None else ws.take(shape)


def slot(
    grads: dict[str, Array], name: str, shape: tuple[int, ...], dtype: "np.dtype[Any]"
) -> Array:
    """Where a gradient is to be written: the array that waits under that name, or a new one."""
    if name not in grads:
        grads[name] = np.empty(shape, dtype)
    return grads[name]


@dataclass(slots=True)
class Trip:
    """`taps` and `tap_grads` are filled by tap name; without `rng` nothing is dropped."""

    ws: Workspace
    taps: dict[str, Array] | None = None
    tap_grads: dict[str, Array] | None = None
    rng: np.random.Generator | None = None

    def tap(self, name: str, x: Array) -> None:
        """Keep a copy of x, if somebody asked."""
        if self.taps is not None:
            self.taps[name] = np.array(x)

    def tap_grad(self, name: str, dx: Array) -> None:
        """Keep a copy of the gradient at that tap, if somebody asked."""
        if self.tap_grads is not None:
            self.tap_grads[name] = np.array(dx)

    def keep(self, shape: tuple[int, ...], rate: float) -> Array | None:
        """A mask of 0 and 1 / (1 - rate), or None where nothing is dropped."""
        if self.rng is None or rate == 0.0:
            return None
        mask = self.ws.take(shape)
        self.rng.random(out=mask, dtype=mask.dtype)
        np.greater_equal(mask, rate, out=mask, casting="unsafe")
        mask *= 1.0 / (1.0 - rate)
        return mask
