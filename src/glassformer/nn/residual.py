"""The residual stream in a training step: sums are made together with their norm, in code that is
compiled for a GPU and by the C kernels of a CPU.

A block then leaves what it adds last to the next norm, in a `Pending` that is passed in like a
cache. One kernel of ours then computes both, and another both backward (`kernels/triton_norm`,
`kernels/train_parts.h`).
"""

import torch
from torch import Tensor

from glassformer.kernels import train_kernels
from glassformer.nn.linear import HAS_TRITON, TRITON_DTYPES
from glassformer.nn.norm import LayerNorm, RMSNorm

# B batch, T length, D d_model


class Pending:
    """What is still to be added to the stream. Not a dataclass, see `BalanceLosses`."""

    def __init__(self) -> None:
        self.added_BTD: Tensor | None = None

    def onto(self, x_BTD: Tensor) -> Tensor:
        """Return the stream with it."""
        added_BTD, self.added_BTD = self.added_BTD, None
        return x_BTD if added_BTD is None else x_BTD + added_BTD

    def normed(self, x_BTD: Tensor, norm: LayerNorm | RMSNorm) -> tuple[Tensor, Tensor]:
        """Return the stream with it, and its norm, in autocast's precision."""
        if self.added_BTD is not None and _by_kernel(x_BTD, self.added_BTD, norm):
            added_BTD, self.added_BTD = self.added_BTD, None
            return train_kernels.sum_and_norm(x_BTD, added_BTD, norm.weight, eps=norm.eps)
        plain = type(norm) is LayerNorm or (type(norm) is RMSNorm and not norm.offset)
        ours = plain and x_BTD.is_cuda and norm.weight.dtype in TRITON_DTYPES
        if self.added_BTD is None or not ours:
            x_BTD = self.onto(x_BTD)
            return x_BTD, norm(x_BTD)
        from glassformer.kernels.triton_norm import sum_and_norm

        added_BTD, self.added_BTD = self.added_BTD, None
        kind = x_BTD.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BTD.dtype
        layer = isinstance(norm, LayerNorm)
        bias_D = norm.bias if isinstance(norm, LayerNorm) else None
        x_BTD, normed_BTD, _, _ = sum_and_norm(
            x_BTD, added_BTD, norm.weight, bias_D, norm.eps, layer, dtype
        )
        return x_BTD, normed_BTD


def _by_kernel(x_BTD: Tensor, added_BTD: Tensor, norm: LayerNorm | RMSNorm) -> bool:
    """Return True in a training step on a CPU, for RMSNorm: torch has a kernel for the other."""
    rms = type(norm) is RMSNorm and not norm.offset
    return rms and train_kernels.in_use(x_BTD, added_BTD, norm.weight)


def defers_sums(x_BTD: Tensor) -> bool:
    """Return True in code that is compiled to train on a GPU, for a stream in float32, and in a
    training step on a CPU.
    """
    if train_kernels.in_use(x_BTD):
        return True
    compiled = HAS_TRITON and torch.compiler.is_compiling() and torch.is_grad_enabled()
    return compiled and x_BTD.is_cuda and x_BTD.dtype == torch.float32
