"""Weights into a model: built without memory, then filled tensor by tensor as they are read."""

import torch
from torch import Tensor, nn

from glassformer.adapters.report import ConversionReport, compare
from glassformer.adapters.table import Plan
from glassformer.adapters.weights import Weights, widest
from glassformer.models.build import build
from glassformer.models.model import Model
from glassformer.nn.position import make_tables
from glassformer.spec.errors import FileError
from glassformer.spec.model import ModelSpec


def filled(
    spec: ModelSpec,
    plan: Plan,
    weights: Weights,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> tuple[Model, ConversionReport]:
    """A model of these weights, in eval mode, in their own precision unless another is asked for.

    Names and shapes are compared before anything is allocated. A tensor that needs no change is
    used where it lies, so the peak is the weights themselves and the largest changed tensor.
    """
    report = compare(plan, weights.shapes)
    report.raise_if_incomplete(where=weights.where)
    used = {name: weights.dtypes[name] for name in report.loaded}
    target = dtype or widest(used, where=weights.where)
    model = build(spec, device="meta").to(target)
    make_tables(model, device)
    for name in report.loaded:
        changes = used[name] != target or device != "cpu"
        _set(model, plan, weights, name, target=target, device=device, changes=changes)
    for name in report.tied:
        _check_copy(model, plan, weights, name)
    return model.eval(), report


def refill(model: Model, plan: Plan, weights: Weights) -> ConversionReport:
    """The same into a model that exists: its parameters stay the objects that they are."""
    report = compare(plan, weights.shapes)
    report.raise_if_incomplete(where=weights.where)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name in report.loaded:
            parts = plan.entries[plan.full_name(name)].split(weights.read(name, again=True))
            for ours, tensor in parts.items():
                own[ours].copy_(tensor)
    for name in report.tied:
        _check_copy(model, plan, weights, name)
    return report


def _set(
    model: Model,
    plan: Plan,
    weights: Weights,
    name: str,
    *,
    target: torch.dtype,
    device: str,
    changes: bool,
) -> None:
    entry = plan.entries[plan.full_name(name)]
    # What is changed is copied; a map that is closed again keeps no pages of what was read.
    tensor = weights.read(name, again=changes)
    for ours, part in entry.split(tensor).items():
        owner, _, leaf = ours.rpartition(".")
        value = part.to(device=device, dtype=target)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(value))


def _check_copy(model: Model, plan: Plan, weights: Weights, name: str) -> None:
    """A tied tensor that the file holds a second time must be the same one."""
    entry = plan.entries[plan.tied[plan.full_name(name)]]
    own = dict(model.named_parameters())
    copies: dict[str, Tensor] = entry.split(weights.read(name, again=True))
    if not all(torch.equal(copies[ours].to(own[ours]), own[ours]) for ours in entry.ours):
        raise FileError(
            f"{name} differs from {entry.theirs}, and the config says that they are one",
            where=weights.where,
            hint='if the head was trained by itself, set "tie_word_embeddings": false',
        )
