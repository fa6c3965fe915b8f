"""`PackedMatrix`: weights in GGUF's blocks, multiplied as they lie in the file.

A product unpacks some rows into the processor's cache at a time and gives the bits of a product
with the unpacked matrix. A model begins to decode without its weights in float32: getting that
memory takes many times as long as unpacking.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glassformer.kernels import c_library, threads

#: A matrix of the form PACKED or above is packed; PANEL numbers are unpacked at once (native.h).
PACKED, PANEL = 16, 32768
#: Inputs of a matrix at most: several rows are unpacked together.
MOST_INPUTS = PANEL // 4


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix (O, I) in blocks of one of GGUF's types; `data` has a row of bytes an output."""

    kind: int
    inputs: int
    data: NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.data), self.inputs

    def is_finite(self, *, block: int) -> bool | None:
        """Return whether all numbers are finite; None for a type that the C file does not have.

        `block` is the number of bytes of a block. Scales decide: a number is a scale times an
        integer, and a second one beside it.
        """
        found = c_library.library().glass_scales_finite(
            self.kind, self.data.ctypes.data, self.data.size // block, threads.current()
        )
        return None if found < 0 else bool(found)
