"""LoRA: low-rank corrections of linear layers, added, merged into the weights, unmerged.

A corrected layer keeps the names of its own weight and bias, so the manifest still finds them; its
factors are named as `lora_manifest` says. B starts at zero: a fresh correction changes nothing.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.nn.init import initialise
from glassformer.nn.linear import Linear
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.train import LoRA, lora_manifest, lora_targets

# R rank


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
        low: Tensor = self.lora_B(low_R) * self.scale
        return F.linear(x, self.weight, self.bias) + low

    @torch.no_grad()
    def merged(self) -> Linear:
        """Return a plain layer of weight W + (alpha / R) B A, summed in float32 or better."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        product = self.lora_B.weight.to(wide) @ self.lora_A.weight.to(wide)
        with torch.device("meta"):
            layer = Linear(self.d_in, self.d_out, bias=False)
        weight = (self.weight.to(wide) + product * self.scale).to(self.weight.dtype)
        layer.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)
        layer.bias = self.bias
        return layer.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.d_in} -> {self.d_out}, scale={self.scale:g}, dropout={self.dropout:g}"


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
    layers = {}
    for name in targets:
        layer = model.get_submodule(name)
        if type(layer) is not Linear:
            raise InputError(
                f"{name} is a {type(layer).__name__}, and LoRA corrects plain linear layers",
                hint="fine-tune the model before it is quantized",
            )
        layers[name] = LoRALinear(layer, lora).train(layer.training)
    for name, layer in layers.items():
        _replace(model, name, layer)
    rules = tuple(lora_manifest(model.spec, lora).values())
    if not any(layer.weight.is_meta for layer in layers.values()):
        # Sampled on the CPU, so that a seed gives the same correction on every device.
        initialise(model, rules, generator=generator)
    for layer in layers.values():
        layer.to(layer.weight.device)
    return layers


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
