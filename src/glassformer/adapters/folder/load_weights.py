"""`ConversionReport`: what became of each tensor of a file, and the error where it does not fit.

Weights into a model: built without memory, then filled tensor by tensor as they are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glassformer.adapters.folder.weights import Weights, widest
from glassformer.adapters.table import Plan, Shape
from glassformer.models.build import build
from glassformer.models.model import Model
from glassformer.nn.position import make_tables
from glassformer.spec.errors import FileError
from glassformer.spec.model import ModelSpec

SHOWN = 6


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """Names as the file has them.

    loaded: became parameters. missing: the config asks for them, no file has them. unexpected: in
    a file, and no part of the model. ignored: known, and nothing is lost. misshapen: with both
    shapes. tied: copies of a tensor that the model shares. notes: what else became of the file.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Everything that the model needs is there, and nothing else."""
        return not (self.missing or self.unexpected or self.misshapen)

    def raise_if_incomplete(self, *, where: str) -> None:
        """Strict: a tensor too many is as suspect as one too few."""
        if self.complete:
            return
        hint = "the weights belong to another config, or a file was cut"
        if "lm_head.weight" in self.missing:
            hint = "a head of its own is asked for; a shared one needs tie_word_embeddings true"
        raise FileError(
            f"the weights do not fit the config: {self.faults()}", where=where, hint=hint
        )

    def faults(self) -> str:
        """The three kinds of misfit in words."""
        kinds = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "misshapen": self.misshapen,
        }
        return "; ".join(f"{word}: {_few(names)}" for word, names in kinds.items() if names)

    def __str__(self) -> str:
        kinds = {"ignored": self.ignored, "tied copies": self.tied}
        extra = "".join(f"; {word}: {_few(names)}" for word, names in kinds.items() if names)
        faults = self.faults()
        notes = "".join(f"; {note}" for note in self.notes)
        return f"{len(self.loaded)} tensors loaded{extra}{'; ' + faults if faults else ''}{notes}"


def _few(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def compare(plan: Plan, shapes: Mapping[str, Shape]) -> ConversionReport:
    """What a file's names and shapes are to this plan, before any tensor is read."""
    loaded, unexpected, ignored, misshapen, tied = [], [], [], [], []
    for name, shape in shapes.items():
        full = plan.full_name(name)
        if full in plan.entries:
            wanted = plan.entries[full].shape
            if shape == wanted:
                loaded.append(name)
            else:
                misshapen.append(f"{name} {shape} instead of {wanted}")
        elif full in plan.tied:
            wanted = plan.entries[plan.tied[full]].shape
            if shape == wanted:
                tied.append(name)
            else:
                misshapen.append(f"{name} {shape} instead of {wanted}")
        elif full in plan.ignored:
            ignored.append(name)
        else:
            unexpected.append(name)
    there = {plan.full_name(name) for name in shapes}
    missing = [name for name in plan.entries if name not in there]
    return ConversionReport(
        tuple(loaded),
        tuple(missing),
        tuple(unexpected),
        tuple(ignored),
        tuple(misshapen),
        tuple(tied),
    )


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
