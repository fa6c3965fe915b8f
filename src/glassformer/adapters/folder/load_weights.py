"""Load weights into a model: built without memory, then filled tensor by tensor.

`ConversionReport` says what became of each tensor of a file; names and shapes are compared with the
plan before anything is read, and what does not fit is refused by name.
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
    """What became of the tensors of a file, by their names in the file.

    loaded: became parameters. missing: needed by the config and in no file. unexpected: in a file
    and not in the model. ignored: known to carry nothing. misshapen: with both shapes. tied: copies
    of a tensor that the model shares. notes: anything else about the file.
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
        """True if the file holds everything that the model needs, and nothing else."""
        return not (self.missing or self.unexpected or self.misshapen)

    def raise_if_incomplete(self, *, where: str) -> None:
        """Raise unless complete: an unexpected tensor is as suspect as a missing one."""
        if self.complete:
            return
        hint = "the weights belong to another config, or a file is truncated"
        if "lm_head.weight" in self.missing:
            hint = "the config wants an untied head; a tied one needs tie_word_embeddings true"
        raise FileError(
            f"the weights do not fit the config: {self.faults()}", where=where, hint=hint
        )

    def faults(self) -> str:
        """Return the missing, unexpected and misshapen tensors as text."""
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
    """Compare the names and shapes of a file with a plan, before any tensor is read."""
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
    """Build a model with these weights, in eval mode and in their precision, or in `dtype`.

    Names and shapes are compared before anything is allocated. A tensor that needs no conversion is
    mapped from its file, so the peak is the weights plus the largest converted tensor.
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
    """Copy weights into an existing model; its parameters stay the same objects."""
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
    # Converted tensors are copied; closing the map afterwards frees the pages that were read.
    tensor = weights.read(name, again=changes)
    for ours, part in entry.split(tensor).items():
        owner, _, leaf = ours.rpartition(".")
        value = part.to(device=device, dtype=target)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(value))


def _check_copy(model: Model, plan: Plan, weights: Weights, name: str) -> None:
    """Require that a tied tensor which the file holds twice has the same values."""
    entry = plan.entries[plan.tied[plan.full_name(name)]]
    own = dict(model.named_parameters())
    copies: dict[str, Tensor] = entry.split(weights.read(name, again=True))
    if not all(torch.equal(copies[ours].to(own[ours]), own[ours]) for ours in entry.ours):
        raise FileError(
            f"{name} differs from {entry.theirs}, and the config says that they are tied",
            where=weights.where,
            hint='if the head was trained by itself, set "tie_word_embeddings": false',
        )
