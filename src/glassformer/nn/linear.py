"""`Linear`: the only product with a weight matrix in the package, so that counting, quantization
and low-rank adapters find all of them.

`initialise` samples every parameter of a model by the manifest's rules, from a generator that the
caller passes. `LoRALinear` corrects a layer by a product of low rank, which can be merged into the
weights and unmerged. It keeps the names of its own weight and bias, so the manifest still finds
them; its factors are named as `lora_manifest` says. B starts at zero: a fresh correction changes
nothing. Over packed weights it is QLoRA (Dettmers and others, 2023).
"""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.kernels import train_kernels
from glassformer.spec.errors import InputError
from glassformer.spec.execution import GPU_JOINED, GPU_WIDTHS
from glassformer.spec.init import Constant, Gaussian, Uniform
from glassformer.spec.manifest import Parameter
from glassformer.spec.model import ModelSpec
from glassformer.spec.train import LoRA, lora_manifest, lora_targets

#: Kernels of our own for a GPU are written in Triton, and compute in these formats.
HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Linear(nn.Module):
    """y = x W^T + b, weight (out, in). Values come from `initialise`."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool) -> None:
        super().__init__()
        self.d_in = d_in
        self.d_out = d_out
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.d_in} -> {self.d_out}, bias={self.bias is not None}"


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + b; compiled for a GPU, with widths filled up by zeros, which change nothing.

    The compiler makes the filling part of the kernels before and after.
    """
    more_in, more_out = missing_widths(x, weight_OI)
    if not (more_in or more_out):
        return F.linear(x, weight_OI, bias_O)
    weight = F.pad(weight_OI, (0, more_in, 0, more_out))
    bias = None if bias_O is None else F.pad(bias_O, (0, more_out))
    return F.linear(F.pad(x, (0, more_in)), weight, bias)[..., : len(weight_OI)]


def missing_widths(x: Tensor, weight_OI: Tensor) -> tuple[int, int]:
    """Return by how much inputs and outputs are filled up; nothing outside compiled GPU code."""
    if not (torch.compiler.is_compiling() and x.is_cuda):
        return 0, 0
    d_out, d_in = weight_OI.shape[-2:]
    return -d_in % GPU_WIDTHS, -d_out % GPU_WIDTHS


def side_by_side(x: Tensor, parts: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Return the product of one input with each of some parts; compiled for a GPU, as one product.

    That saves launches and is worth it for small weights; with large ones, what reads a slice of
    the result loses more.
    """
    found = in_kernels(x, parts)
    if found is not None:
        return train_kernels.products(x, *found)
    plain = [part for part in parts if type(part) is Linear]
    small = sum(part.weight.numel() for part in plain) <= GPU_JOINED
    joined = joined_product(x, parts) if small else None
    if joined is None:
        return tuple(part(x) for part in parts)
    outputs: tuple[Tensor, ...] = joined.split([part.d_out for part in plain], dim=-1)
    return outputs


def in_kernels(x: Tensor, parts: Sequence[nn.Module]) -> tuple[list[Tensor], list[Any]] | None:
    """Return the weights and biases of some parts in a training step on a CPU, where one node of
    the graph is to compute all of them; None elsewhere, and for parts that are more than `Linear`.
    """
    plain = [part for part in parts if type(part) is Linear]
    if len(plain) < len(parts) or not train_kernels.in_use(x, *(part.weight for part in plain)):
        return None
    return [part.weight for part in plain], [part.bias for part in plain]


def joined_product(x: Tensor, parts: Sequence[nn.Module]) -> Tensor | None:
    """Return the products of one input with some parts, side by side, as one; None outside code
    that is compiled for a GPU, and for parts that are more than a `Linear`, such as one with a
    low-rank adapter.

    The compiler joins the weights where it casts them.
    """
    plain = [part for part in parts if type(part) is Linear]
    if not (torch.compiler.is_compiling() and x.is_cuda and len(plain) == len(parts)):
        return None
    weight = torch.cat([part.weight for part in plain])
    bias = None
    if any(part.bias is not None for part in plain):
        zeros = weight.new_zeros
        bias = torch.cat([zeros(p.d_out) if p.bias is None else p.bias for p in plain])
    return linear(x, weight, bias)


class PackedWeight(nn.Module, ABC):
    """A module whose weights are packed buffers, not parameters.

    Buffers have no version that outlives a change of form, so `loads` counts how often other
    weights were loaded: whoever keeps results of a model can tell that it has changed.
    """

    loads: int = 0
    shape: tuple[int, int]
    dtype: torch.dtype
    bias: Tensor | None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the weights."""

    @abstractmethod
    def weights(self) -> Tensor:
        """Return the float32 weights (outputs, inputs) that it stands for."""

    @abstractmethod
    def freeze(self) -> None:
        """Take part in training from now on: as it is, and passing gradients to its input."""


@torch.no_grad()
def initialise(
    module: nn.Module,
    parameters: tuple[Parameter, ...],
    *,
    generator: torch.Generator | None = None,
) -> None:
    """Initialise each named parameter in the manifest's order; the default is torch's generator.

    The order and the rules come from the spec, so that the same seed gives the same weights however
    the module was assembled.
    """
    own = dict(module.named_parameters())
    for parameter in parameters:
        if parameter.tied_to is not None:
            continue
        match parameter.init:
            case Constant(value=value):
                own[parameter.name].fill_(value)
            case Uniform(bound=bound):
                own[parameter.name].uniform_(-bound, bound, generator=generator)
            case Gaussian(std=std):
                own[parameter.name].normal_(0.0, std, generator=generator)
            case _ as unreachable:
                assert_never(unreachable)


# --- LoRA -----------------------------------------------------------------------------------------


# R rank


def missing_width(x: Tensor, low_R: Tensor) -> int:
    """Return by how much x and its image of low rank, side by side, miss a GPU's width."""
    return -(x.shape[-1] + low_R.shape[-1]) % GPU_WIDTHS


def corrected(
    x: Tensor, low_R: Tensor, weight_OI: Tensor, factor_OR: Tensor, bias_O: Tensor | None
) -> Tensor:
    """Return x W^T + b + low F^T as one product: nothing of width O is added afterwards.

    W and b are frozen. In the precision of autocast, where it is on.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    bias_O = None if bias_O is None else bias_O.to(dtype)
    operands = (x.to(dtype), low_R.to(dtype), weight_OI.to(dtype), factor_OR.to(dtype), bias_O)
    product: Callable[..., Tensor] = _Corrected.apply
    return product(*operands)


class _Corrected(torch.autograd.Function):
    """y = [x, low] [W, F]^T + b.  =>  [dx, dlow] = dy [W, F],  dF = dy^T low.

    Autograd would also compute the gradient of W, which is frozen.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        low_R: Tensor,
        weight_OI: Tensor,
        factor_OR: Tensor,
        bias_O: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(low_R, weight_OI, factor_OR)
        both = torch.cat((weight_OI, factor_OR), dim=1)
        return F.linear(torch.cat((x, low_R), dim=-1), both, bias_O)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        low_R, weight_OI, factor_OR = ctx.saved_tensors
        both = grad @ torch.cat((weight_OI, factor_OR), dim=1)
        grad_x, grad_low = both.split((weight_OI.shape[1], factor_OR.shape[1]), dim=-1)
        grad_factor = grad.flatten(0, -2).T @ low_R.flatten(0, -2)
        return grad_x, grad_low, None, grad_factor, None


class LoRALinear(nn.Module):
    """y = W x + b + (alpha / R) B A dropout(x); W and b are those of the layer it corrects."""

    def __init__(self, layer: Linear, lora: LoRA) -> None:
        super().__init__()
        self.d_in, self.d_out = layer.d_in, layer.d_out
        self.weight, self.bias = layer.weight, layer.bias
        with torch.device("meta" if layer.weight.is_meta else "cpu"):
            self.lora_A = Linear(layer.d_in, lora.rank, bias=False).to(layer.weight.dtype)
            self.lora_B = Linear(lora.rank, layer.d_out, bias=False).to(layer.weight.dtype)
        self.dropout = lora.dropout
        self.scale = lora.scale

    def forward(self, x: Tensor) -> Tensor:
        low_R = self.lora_A(F.dropout(x, self.dropout, self.training))
        frozen = not (
            self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)
        )
        if torch.compiler.is_compiling() and x.is_cuda and frozen and not missing_width(x, low_R):
            return corrected(x, low_R, self.weight, self.scale * self.lora_B.weight, self.bias)
        low: Tensor = self.lora_B(low_R) * self.scale
        return F.linear(x, self.weight, self.bias) + low

    def frozen_weight(self) -> Tensor:
        """Return W."""
        return self.weight

    @torch.no_grad()
    def merged(self) -> Linear:
        """Return a plain layer of weight W + (alpha / R) B A, summed in float32 or better."""
        full_OI = self.frozen_weight()
        wide = torch.promote_types(full_OI.dtype, torch.float32)
        product = self.lora_B.weight.to(wide) @ self.lora_A.weight.to(wide)
        with torch.device("meta"):
            layer = Linear(self.d_in, self.d_out, bias=False)
        weight = (full_OI.to(wide) + product * self.scale).to(full_OI.dtype)
        layer.weight = nn.Parameter(weight, requires_grad=full_OI.requires_grad)
        layer.bias = self.bias
        return layer.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.d_in} -> {self.d_out}, scale={self.scale:g}, dropout={self.dropout:g}"


class PackedLoRALinear(LoRALinear):
    """The same over packed weights, such as quantized ones, which keep their few bytes."""

    def __init__(self, layer: PackedWeight, lora: LoRA) -> None:
        nn.Module.__init__(self)
        self.d_out, self.d_in = layer.shape
        self.packed = layer
        self.bias = None  # the packed layer adds its own
        self.lora_A = Linear(self.d_in, lora.rank, bias=False).to(layer.dtype)
        self.lora_B = Linear(lora.rank, self.d_out, bias=False).to(layer.dtype)
        self.dropout = lora.dropout
        self.scale = lora.scale

    def forward(self, x: Tensor) -> Tensor:
        low_R = self.lora_A(F.dropout(x, self.dropout, self.training))
        low: Tensor = self.lora_B(low_R) * self.scale
        full: Tensor = self.packed(x)
        return full + low

    def frozen_weight(self) -> Tensor:
        """Return W, unpacked."""
        return self.packed.weights()

    @torch.no_grad()
    def merged(self) -> Linear:
        """Return a plain layer of weight W + (alpha / R) B A."""
        layer = super().merged()
        bias = self.packed.bias
        layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return layer


class Specified(nn.Module):
    """A module that a spec describes."""

    spec: ModelSpec


def apply_lora(
    model: Specified, lora: LoRA, *, generator: torch.Generator | None = None
) -> dict[str, LoRALinear]:
    """Freeze the model, add a correction to every target, and return these layers by name."""
    if corrected_layers(model):
        raise InputError("the model has LoRA layers already", hint="merge(model) first")
    targets = lora_targets(model.spec, lora)
    model.requires_grad_(False)
    layers: dict[str, LoRALinear] = {}
    for name in targets:
        layer = model.get_submodule(name)
        if isinstance(layer, PackedWeight):
            layers[name] = PackedLoRALinear(layer, lora)
        elif type(layer) is Linear:
            layers[name] = LoRALinear(layer, lora)
        else:
            raise InputError(
                f"{name} is a {type(layer).__name__}, and LoRA corrects linear layers",
                hint="other targets: lora.targets",
            )
        layers[name].train(layer.training)
    for part in model.modules():
        if isinstance(part, PackedWeight):
            part.freeze()
    for name, layer in layers.items():
        _replace(model, name, layer)
    rules = tuple(lora_manifest(model.spec, lora).values())
    if not any(part.is_meta for part in model.parameters()):
        # Sampled on the CPU, so that a seed gives the same correction on every device.
        initialise(model, rules, generator=generator)
    for layer in layers.values():
        layer.to(_device_of(layer))
    return layers


def _device_of(layer: LoRALinear) -> torch.device:
    """Return where the weights are that a correction belongs to."""
    return layer.packed.device if isinstance(layer, PackedLoRALinear) else layer.weight.device


def corrected_layers(model: Specified) -> dict[str, LoRALinear]:
    """Return the layers that have a correction, by name."""
    return {name: part for name, part in model.named_modules() if isinstance(part, LoRALinear)}


def lora_parameters(model: Specified) -> dict[str, nn.Parameter]:
    """Return the factors by the manifest's names: the only parameters that train."""
    return {
        f"{name}.{leaf}.weight": getattr(layer, leaf).weight
        for name, layer in corrected_layers(model).items()
        for leaf in ("lora_A", "lora_B")
    }


def merge(model: Specified) -> dict[str, LoRALinear]:
    """Replace every corrected layer by a plain one with the summed weights; `unmerge` undoes it.

    The returned layers hold the old weights: keep them to unmerge bit for bit, or drop them.
    """
    layers = corrected_layers(model)
    if not layers:
        raise InputError("the model has no LoRA layers to merge")
    for name, layer in layers.items():
        _replace(model, name, layer.merged())
    return layers


def unmerge(model: Specified, layers: Mapping[str, LoRALinear]) -> None:
    """Put back the corrected layers that `merge` replaced."""
    for name, layer in layers.items():
        _replace(model, name, layer)


def _replace(model: Specified, name: str, layer: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, nn.ModuleDict):
        module[leaf] = layer
    else:
        setattr(module, leaf, layer)
