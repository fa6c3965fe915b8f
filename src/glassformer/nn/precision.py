"""The precision in which sums are taken: float32 at least."""

import torch
from torch import Tensor


def as_float(x: Tensor) -> Tensor:
    """Return a float64 tensor as it is, and any other in float32."""
    return x if x.dtype == torch.float64 else x.float()
