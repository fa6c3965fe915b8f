"""`ConversionReport`: what became of each tensor of a file, and the error where it does not fit."""

from collections.abc import Mapping
from dataclasses import dataclass

from glassformer.adapters.table import Plan, Shape
from glassformer.spec.errors import FileError

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
