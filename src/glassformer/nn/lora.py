"""LoRA: a layer corrected by a product of low rank, which can be merged into its weights.

A corrected layer keeps the names of its own weight and bias, so the manifest still finds them; its
factors are named as `lora_manifest` says. B starts at zero: a fresh correction changes nothing.
Over packed weights it is QLoRA (Dettmers and others, 2023).
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.nn.initialise import initialise
from glassformer.nn.linear import Linear, PackedWeight, Specified
from glassformer.nn.operations import Part
from glassformer.spec.errors import InputError
from glassformer.spec.train import LoRA, lora_manifest, lora_targets

# R rank


class LoRALinear(Part):
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
        factor = self.lora_B.weight
        return self.operations.corrected(x, low_R, self.weight, self.bias, factor, self.scale)

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
