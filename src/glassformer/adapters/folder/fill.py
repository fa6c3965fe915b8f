"""Put weights into a model: built without memory, then filled tensor by tensor."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from glassformer.adapters.folder.weights import (
    ConversionReport,
    Weights,
    compared,
    widest,
)
from glassformer.adapters.opening import check_copies, parameters
from glassformer.adapters.table import Array, Plan, Shape
from glassformer.models.model import Model, build
from glassformer.models.weights import numpy_dtype, numpy_view, tensor_view, torch_dtype
from glassformer.nn.position import make_tables
from glassformer.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """The parameters and stored buffers of a live module; tied ones under each of their names."""

    module: nn.Module
    where: str

    @property
    def shapes(self) -> dict[str, Shape]:
        """By the module's own names."""
        return {name: tuple(tensor.shape) for name, tensor in self._stored().items()}

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """By the module's own names."""
        return {name: numpy_dtype(x.dtype) for name, x in self._stored().items()}

    def _stored(self) -> dict[str, Tensor]:
        """Return parameters, and the buffers that a checkpoint of the module holds."""
        kept = set(self.module.state_dict())
        buffers = {name: b for name, b in self.module.named_buffers() if name in kept}
        # Under every name: of tied ones the first may be the head's.
        return dict(self.module.named_parameters(remove_duplicate=False)) | buffers

    def read(self, name: str, *, again: bool = False) -> Array:
        return numpy_view(self._stored()[name].detach().cpu().clone())


def filled(
    spec: ModelSpec,
    plan: Plan,
    weights: Weights,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> tuple[Model, ConversionReport]:
    """Build a model with these weights, in eval mode and in their precision, or in `dtype`.

    Names and shapes are compared before anything is allocated. A tensor that needs no conversion is
    mapped from its file, so the peak is the weights plus the largest converted tensor.
    """
    report = compared(plan, weights)
    used = {name: weights.dtypes[name] for name in report.loaded}
    target = dtype or torch_dtype(widest(used, where=weights.where))
    model = build(spec, device="meta").to(target)
    make_tables(model, device)
    for name in report.loaded:
        changes = torch_dtype(used[name]) != target or device != "cpu"
        for ours, part in parameters(plan, weights, name, changes=changes):
            owner, _, leaf = ours.rpartition(".")
            value = tensor_view(part).to(device=device, dtype=target)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value))
    check_copies(plan, weights, report)
    return model.eval(), report


def refill(model: Model, plan: Plan, weights: Weights) -> ConversionReport:
    """Copy weights into an existing model; its parameters stay the same objects."""
    report = compared(plan, weights)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name in report.loaded:
            for ours, tensor in parameters(plan, weights, name, changes=True):
                own[ours].copy_(tensor_view(tensor))
    check_copies(plan, weights, report)
    return report
