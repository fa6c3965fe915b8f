"""Key tables: which tensor of a foreign file is which of our parameters, in both directions.

A table is data: rows of (their template, our template or templates, layout), `{}` standing for the
layer's number. Each layout can be undone, so a table that reads a folder also writes one. Nothing
here knows a family; what a spec does not have (a bias, a q/k-norm) simply matches no row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from glassformer.spec.errors import InputError
from glassformer.spec.manifest import manifest
from glassformer.spec.model import ModelSpec

Shape = tuple[int, ...]


class Layout(Protocol):
    """A way in which one of their tensors holds one or several of ours."""

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape of their tensor, given the shapes of ours."""

    def split(self, tensor: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """Return our tensors from theirs."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return their tensor from ours."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Our tensors stacked by rows, as in a fused q, k, v; a single one is the tensor itself."""

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def split(self, tensor: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return list(torch.split(tensor, [shape[0] for shape in shapes]))

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


@dataclass(frozen=True, slots=True)
class Columns:
    """`Rows`, transposed: GPT-2 keeps its matrices as (in, out)."""

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        rows, columns = Rows().stored_shape(shapes)
        return columns, rows

    def split(self, tensor: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return [part.contiguous() for part in Rows().split(tensor.T, shapes)]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return Rows().join(tensors).T.contiguous()


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Rotary halves of each head as neighbours: rows 0, d/2, 1, d/2 + 1, ... of ours."""

    d_head: int

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        return shapes[0]

    def split(self, tensor: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return [self._turned(tensor, self.d_head // 2, 2)]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return self._turned(tensors[0], 2, self.d_head // 2)

    def _turned(self, tensor: Tensor, rows: int, columns: int) -> Tensor:
        heads = tensor.reshape(-1, rows, columns, *tensor.shape[1:])
        return heads.transpose(1, 2).reshape(tensor.shape)


@dataclass(frozen=True, slots=True)
class Row:
    """Their name, ours, and how the one holds the other."""

    theirs: str
    ours: str | tuple[str, ...]
    layout: Layout = Rows()

    def names(self) -> tuple[str, ...]:
        """Our templates, as a tuple."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a family; `ignored` lists tensors that its files may hold and no model needs.

    `prefix` is what a file of the body alone leaves out at the front of each name.
    """

    rows: tuple[Row, ...]
    ignored: tuple[str, ...] = ()
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One of their tensors: its shape, and our parameters in it."""

    theirs: str
    shape: Shape
    ours: tuple[str, ...]
    shapes: tuple[Shape, ...]
    layout: Layout

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return our parameters by name."""
        return dict(zip(self.ours, self.layout.split(tensor, self.shapes), strict=True))


@dataclass(frozen=True, slots=True)
class Plan:
    """A table for one spec: every tensor that a file must hold, and those that it may.

    `tied` maps the name of a copy (`lm_head.weight`) to the tensor that it repeats.
    """

    entries: dict[str, Entry]
    tied: dict[str, str]
    ignored: frozenset[str]
    prefix: str = ""

    def full_name(self, name: str) -> str:
        """Return their name with the body's prefix, if the file leaves it out."""
        longer = self.prefix + name
        return longer if not self.knows(name) and self.knows(longer) else name

    def knows(self, name: str) -> bool:
        """Return whether a file may hold a tensor of that name."""
        return name in self.entries or name in self.tied or name in self.ignored


def make_plan(table: Table, spec: ModelSpec) -> Plan:
    """Fill a table's templates for this spec; a parameter that no row holds is an error."""
    parameters = {p.name: p for p in manifest(spec)}
    entries: dict[str, Entry] = {}
    copies: dict[str, str] = {}
    for row in table.rows:
        for theirs, ours in _filled(row, spec.n_layers):
            found = [parameters[name] for name in ours if name in parameters]
            if len(found) < len(ours):
                continue
            owner = found[0].tied_to
            if owner is not None:
                copies[theirs] = owner
                continue
            shapes = tuple(p.shape for p in found)
            shape = row.layout.stored_shape(shapes)
            entries[theirs] = Entry(theirs, shape, ours, shapes, row.layout)
    held = {name: theirs for theirs, entry in entries.items() for name in entry.ours}
    without = [p.name for p in parameters.values() if p.tied_to is None and p.name not in held]
    if without:
        raise InputError(f"the key table has no row for {', '.join(without[:5])}")
    return Plan(
        entries,
        {theirs: held[owner] for theirs, owner in copies.items()},
        frozenset(
            name.format(layer)
            for name in table.ignored
            for layer in range(spec.n_layers if "{}" in name else 1)
        ),
        table.prefix,
    )


def _filled(row: Row, n_layers: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the row for each layer, or once if it names no layer."""
    for layer in range(n_layers if "{}" in row.theirs else 1):
        yield row.theirs.format(layer), tuple(name.format(layer) for name in row.names())


def identity_plan(spec: ModelSpec) -> Plan:
    """Return the plan of our own checkpoints, whose names are ours already."""
    entries = {
        p.name: Entry(p.name, p.shape, (p.name,), (p.shape,), Rows())
        for p in manifest(spec)
        if p.tied_to is None
    }
    return Plan(entries, {}, frozenset())
