"""The products of a fast step with what comes before and after them: norm, gate, residual.

On a GPU with Triton they are one kernel for one row; elsewhere one call after another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Protocol, assert_never, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.kernels.matmul import Product, joined
from glassformer.nn.linear import Linear
from glassformer.nn.norm import LayerNorm, RMSNorm
from glassformer.spec.errors import InputError

# B batch, I inputs, O outputs, F d_ff, N query heads, K key-value heads, X = N + K, H d_head


@dataclass(frozen=True, slots=True)
class Maker:
    """A builder of a fast step's parts: the products, and our GPU kernels where they can run."""

    product: Callable[[Tensor, Tensor | None], Product]
    gpu: ModuleType | None = None
    static: bool = False  # every step has the same shapes: it is compiled or recorded

    def projection(
        self,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        *,
        norm: LayerNorm | RMSNorm | None = None,
        gated: bool = False,
    ) -> "Projection":
        """Return a product with the norm before it and the gate after it."""
        product = self.product(weight_OI, bias_O)
        return Projection(product, norm=norm, gated=gated, gpu=self.gpu)

    def linear(
        self,
        *parts: nn.Module,
        norm: LayerNorm | RMSNorm | None = None,
        gated: bool = False,
    ) -> "Projection":
        """Return layers of one input as one product; quantized layers have their own."""
        if not any(isinstance(part, OwnProduct) for part in parts):
            plain = joined([linear_parts(part) for part in parts])
            return self.projection(*plain, norm=norm, gated=gated)
        products = [
            part.product() if isinstance(part, OwnProduct) else self.product(*linear_parts(part))
            for part in parts
        ]
        product = products[0] if len(products) == 1 else SideBySide(products)
        return Projection(product, norm=norm, gated=gated, gpu=None)


@runtime_checkable
class OwnProduct(Protocol):
    """A layer whose weights have a form of their own, as quantized ones do."""

    def product(self) -> Product:
        """Return the layer's product: x W^T + b, and residual + x W^T + b."""


@runtime_checkable
class OwnTable(Protocol):
    """A token embedding whose weights have a form of their own."""

    def product(self, bias_O: Tensor | None) -> Product:
        """Return the product of a head that is tied to the table."""


class SideBySide:
    """Several products of one input, their outputs concatenated."""

    def __init__(self, products: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self.products = products

    def __call__(self, x_BI: Tensor) -> Tensor:
        return torch.cat([product(x_BI) for product in self.products], dim=-1)


def make_norm(part: LayerNorm | RMSNorm) -> Callable[[Tensor], Tensor]:
    """Return the norm as one call."""
    weight, eps, shape = part.weight.detach(), part.eps, tuple(part.weight.shape)
    match part:
        case LayerNorm():
            bias = part.bias.detach()
            return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
        case RMSNorm():
            return lambda x: torch.rms_norm(x, shape, weight, eps)
        case _ as unreachable:
            assert_never(unreachable)


def gpu_kernels(like: Tensor) -> ModuleType | None:
    """Return our kernels for tensors like this one, or None where they cannot run."""
    if not like.is_cuda or find_spec("triton") is None:
        return None
    gpu = import_module("glassformer.kernels.triton_decode")
    return gpu if like.dtype in gpu.DTYPES else None


class Projection:
    """product(norm(x)); gated: silu(first half of it) * second half."""

    def __init__(
        self,
        product: Product | SideBySide,
        *,
        norm: LayerNorm | RMSNorm | None,
        gated: bool,
        gpu: ModuleType | None,
    ) -> None:
        self.gated = gated
        # Only projections that read one layer are added onto a residual, or run by our kernels.
        self.product = cast(Product, product)
        self.norm = None if norm is None else make_norm(norm)
        self.gpu = gpu if type(product) is Product else None
        self.fused: dict[str, object] = {"gated": gated}
        if norm is not None:
            self.fused |= {"gain_I": norm.weight.detach(), "eps": norm.eps}
            match norm:
                case LayerNorm():
                    self.fused |= {"norm": "layer", "shift_I": norm.bias.detach()}
                case RMSNorm():
                    self.fused |= {"norm": "rms", "shift_I": None}
                case _ as unreachable:
                    assert_never(unreachable)

    def __call__(self, x_BI: Tensor) -> Tensor:
        if self.gpu is not None and len(x_BI) == 1:
            product = self.product
            out_1O: Tensor = self.gpu.product(x_BI, product.weight_OI, product.bias_O, **self.fused)
            return out_1O
        wide_BO = self.product(x_BI if self.norm is None else self.norm(x_BI))
        if not self.gated:
            return wide_BO
        if self.gpu is not None:
            gated_BF: Tensor = self.gpu.gate(wide_BO)
            return gated_BF
        gate_BF, up_BF = wide_BO.chunk(2, -1)
        return F.silu(gate_BF) * up_BF

    def onto(self, residual_BO: Tensor, x_BI: Tensor) -> Tensor:
        """Return residual + product(x); the residual may be overwritten."""
        product = self.product
        if self.gpu is None:
            return product.onto(residual_BO, x_BI)
        if len(x_BI) == 1:
            weight, bias = product.weight_OI, product.bias_O
            out_1O: Tensor = self.gpu.product(x_BI, weight, bias, residual_1O=residual_BO)
            return out_1O
        residual_BO = residual_BO.addmm_(x_BI, product.weight_OI.t())
        return residual_BO if product.bias_O is None else residual_BO.add_(product.bias_O)


def linear_parts(part: object) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a plain linear layer; others have products of their own."""
    if type(part) is not Linear:
        raise InputError(
            f"a fast step needs plain linear layers, and found {type(part).__name__}",
            hint="use TorchStepper, which runs any model",
        )
    return part.weight.detach(), None if part.bias is None else part.bias.detach()


class HeadNorms:
    """q/k-norm of all heads at once: one normalisation, and the gains of queries and keys."""

    def __init__(self, parts: list[tuple[LayerNorm | RMSNorm, int]]) -> None:
        self.kind, self.eps = type(parts[0][0]), parts[0][0].eps
        self.shape = tuple(parts[0][0].weight.shape)
        self.gain_XH = torch.cat([part.weight.detach().expand(n, -1) for part, n in parts])
        self.bias_XH = None
        match parts[0][0]:
            case LayerNorm():
                shifts = [(part.bias, n) for part, n in parts if isinstance(part, LayerNorm)]
                self.bias_XH = torch.cat([bias.detach().expand(n, -1) for bias, n in shifts])
            case RMSNorm():
                pass
            case _ as unreachable:
                assert_never(unreachable)

    def __call__(self, x_BXH: Tensor) -> Tensor:
        if self.kind is LayerNorm:
            assert self.bias_XH is not None
            x_BXH = torch.layer_norm(x_BXH, self.shape, None, None, self.eps)
            return torch.addcmul(self.bias_XH, x_BXH, self.gain_XH)
        return torch.rms_norm(x_BXH, self.shape, None, self.eps) * self.gain_XH
