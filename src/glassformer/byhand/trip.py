"""What one pass through the model carries: memory, taps to fill, and the source of dropout.

Taps are passed in, like caches. Without a dict nothing is copied and nothing is computed.
"""

from dataclasses import dataclass

import numpy as np

from glassformer.byhand.workspace import Array, Workspace


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
