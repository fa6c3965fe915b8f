"""Key tables: which tensor of a foreign file is which of our parameters, in both directions.

A table is data: rows of (their template, our template or templates, layout), `{}` standing for the
layer's number and `*` for an expert's. Each layout can be undone, so a table that reads a folder
also writes one; what a spec does not have (a bias, a q/k-norm) matches no row. A `Family` is one
Hugging Face `model_type`: the table of its config's keys (`keys.py`), and that of its tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from glassformer.adapters.config import Config, block_of
from glassformer.adapters.keys import Entries, Facts, Key, read_entries, write_entries
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.manifest import manifest
from glassformer.spec.model import ModelSpec, rotary_of

if TYPE_CHECKING:  # a design asks which family computes it, without torch or NumPy
    from numpy.typing import NDArray
    from torch import Tensor

    #: Numbers as they are stored; bfloat16 as `store.tensors` has it.
    Array = NDArray[Any]
else:
    Array = Any

Shape = tuple[int, ...]


class Layout(Protocol):
    """A way in which one of their tensors holds one or several of ours."""

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape of their tensor, given the shapes of ours."""

    def split(self, stored: Array, shapes: Sequence[Shape]) -> list[Array]:
        """Return our arrays from theirs: views where they can be."""

    def join(self, tensors: "Sequence[Tensor]") -> "Tensor":
        """Return their tensor from ours."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Our tensors stacked by rows, as in a fused q, k, v; a single one is the tensor itself."""

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def split(self, stored: Array, shapes: Sequence[Shape]) -> list[Array]:
        ends = accumulate(shape[0] for shape in shapes)
        return [stored[end - shape[0] : end] for end, shape in zip(ends, shapes, strict=True)]

    def join(self, tensors: "Sequence[Tensor]") -> "Tensor":
        if len(tensors) == 1:
            return tensors[0]
        import torch

        return torch.cat(list(tensors))


@dataclass(frozen=True, slots=True)
class Columns:
    """`Rows`, transposed: GPT-2 keeps its matrices as (in, out). A vector stays as it is."""

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        return Rows().stored_shape(shapes)[::-1]

    def split(self, stored: Array, shapes: Sequence[Shape]) -> list[Array]:
        return Rows().split(stored.T, shapes)

    def join(self, tensors: "Sequence[Tensor]") -> "Tensor":
        return Rows().join(tensors).t().contiguous()


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Rotary halves of each head as neighbours: rows 0, d/2, 1, d/2 + 1, ... of ours.

    Of a head that is rotated in part, only its first `turned` rows (None: all) are reordered.
    """

    d_head: int
    turned: int | None = None

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        return shapes[0]

    def split(self, stored: Array, shapes: Sequence[Shape]) -> list[Array]:
        return [stored[self._order(len(stored), (self.turned or self.d_head) // 2, 2)]]

    def join(self, tensors: "Sequence[Tensor]") -> "Tensor":
        (tensor,) = tensors
        return tensor[self._order(len(tensor), 2, (self.turned or self.d_head) // 2)]

    def _order(self, count: int, rows: int, columns: int) -> Array:
        """Return which row comes where, of heads whose first rows * columns are turned."""
        import numpy as np

        order = np.arange(count).reshape(-1, self.d_head)
        first = order[:, : rows * columns].reshape(-1, rows, columns)
        order[:, : rows * columns] = first.swapaxes(1, 2).reshape(len(order), -1)
        return order.reshape(-1)


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """q, k and v in one tensor, by key-value head: its query heads, its key, its value.

    With a key for every query head these are triples of q, k and v (GPT-NeoX, Bloom).
    """

    d_head: int

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        return Rows().stored_shape(shapes)

    def split(self, stored: Array, shapes: Sequence[Shape]) -> list[Array]:
        groups = shapes[1][0] // self.d_head
        by_group = stored.reshape(groups, -1, self.d_head, *stored.shape[1:])
        parts = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def join(self, tensors: "Sequence[Tensor]") -> "Tensor":
        import torch

        groups, rest = len(tensors[1]) // self.d_head, tensors[0].shape[1:]
        parts = [tensor.reshape(groups, -1, self.d_head, *rest) for tensor in tensors]
        return torch.cat(parts, dim=1).reshape(-1, *rest)


@dataclass(frozen=True, slots=True)
class Experts:
    """The matrices of all experts in one tensor (experts, ...), `per` of each stacked by rows.

    `transposed`: each is stored as (in, out). `alternating`: the rows of an expert's matrices take
    turns instead of following each other, as gate and up do in gpt-oss.
    """

    per: int = 1
    transposed: bool = False
    alternating: bool = False

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        rows = sum(shape[0] for shape in shapes[: self.per])
        rest = shapes[0][1:]
        each = (*rest, rows) if self.transposed else (rows, *rest)
        return (len(shapes) // self.per, *each)

    def split(self, stored: Array, shapes: Sequence[Shape]) -> list[Array]:
        parts = []
        for expert in stored:
            rows = expert.T if self.transposed and expert.ndim > 1 else expert
            if self.alternating:
                parts += [rows[first :: self.per] for first in range(self.per)]
            else:
                parts += Rows().split(rows, shapes[: self.per])
        return parts

    def join(self, tensors: "Sequence[Tensor]") -> "Tensor":
        import torch

        made = []
        for first in range(0, len(tensors), self.per):
            own = list(tensors[first : first + self.per])
            rows = torch.stack(own, 1).flatten(0, 1) if self.alternating else torch.cat(own)
            made.append(rows.T if self.transposed and rows.ndim > 1 else rows)
        return torch.stack(made)


#: A layout, or what finds the one of a spec.
AnyLayout = Layout | Callable[[ModelSpec], Layout]


def turned(spec: ModelSpec) -> Interleaved:
    """Return the layout of q and k where neighbouring rows are a rotary pair."""
    attention = block_of(spec.decoder).attention
    width, rotary = attention.head_width(spec.d_model), rotary_of(attention, spec.position)
    return Interleaved(width, width if rotary is None else rotary.width(width))


def by_head(spec: ModelSpec) -> HeadGroups:
    """Return the layout of q, k and v that are stored head by head."""
    return HeadGroups(block_of(spec.decoder).attention.head_width(spec.d_model))


@dataclass(frozen=True, slots=True)
class Row:
    """Their name, ours, and how the one holds the other."""

    theirs: str
    ours: str | tuple[str, ...]
    layout: AnyLayout = Rows()

    def names(self) -> tuple[str, ...]:
        """Our templates, as a tuple."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours


def named(
    parts: Mapping[str, str | tuple[str, ...]],
    *,
    layer: str = "",
    layout: AnyLayout = Rows(),  # noqa: B008
) -> tuple[Row, ...]:
    """Return the rows of the weight and the bias of each part: its name there, and ours.

    With `layer`, the front of their names of a layer's parts, ours are those of a block.
    """
    block = "blocks.{}." if layer else ""
    return tuple(
        Row(
            f"{layer}{theirs}.{leaf}",
            tuple(f"{block}{one}.{leaf}" for one in ([ours] if isinstance(ours, str) else ours)),
            layout,
        )
        for theirs, ours in parts.items()
        for leaf in ("weight", "bias")
    )


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a family; `ignored` lists tensors that its files may hold and no model needs.

    `prefix` is what a file of the body alone leaves out at the front of each name; `older` are
    endings of names that older files have, and today's in their place.
    """

    rows: tuple[Row, ...]
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    older: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """One of their tensors: its shape, and our parameters in it."""

    theirs: str
    shape: Shape
    ours: tuple[str, ...]
    shapes: tuple[Shape, ...]
    layout: Layout

    @property
    def copies(self) -> bool:
        """Whether our parameters are copies; of stacked rows they are views."""
        return not isinstance(self.layout, Rows)

    def split(self, stored: Array) -> dict[str, Array]:
        """Return our parameters by name, each of them one behind another in memory."""
        import numpy as np

        parts = self.layout.split(stored, self.shapes)
        return dict(zip(self.ours, map(np.ascontiguousarray, parts), strict=True))


@dataclass(frozen=True, slots=True)
class Plan:
    """A table for one spec: every tensor that a file must hold, and those that it may.

    `tied` maps the name of a copy (`lm_head.weight`) to the tensor that it repeats.
    """

    entries: dict[str, Entry]
    tied: dict[str, str]
    ignored: frozenset[str]
    prefix: str = ""
    older: Mapping[str, str] = field(default_factory=dict)

    def full_name(self, name: str) -> str:
        """Return their name as it is today, with the body's prefix if the file leaves it out."""
        for ending, now in self.older.items():
            if name.endswith(ending):
                name = name.removesuffix(ending) + now
        longer = self.prefix + name
        return longer if not self.knows(name) and self.knows(longer) else name

    def knows(self, name: str) -> bool:
        """Return whether a file may hold a tensor of that name."""
        return name in self.entries or name in self.tied or name in self.ignored


QKV = ("attn.q_proj", "attn.k_proj", "attn.v_proj")


def decoder_table(
    body: str,
    layer: str,
    *,
    outer: Mapping[str, str],
    parts: Mapping[str, str | tuple[str, ...]],
    layouts: Mapping[str, AnyLayout] | None = None,
    head: str = "lm_head",
    ignored: tuple[str, ...] = (),
    buffers: tuple[str, ...] = (),
    alone: bool = False,
    more: tuple[Row, ...] = (),
) -> Table:
    """Return the names of a decoder: of its body under a prefix, of its layers, of its head.

    `layouts` are those of parts that are not stored as ours are; `more` are rows beside these.
    `ignored` are names in a layer that carry nothing, `buffers` complete ones. `alone`: a file may
    be the body's, and leave the prefix out.
    """
    layer, layouts = f"{body}{layer}.{{}}.", layouts or {}
    own = (
        row
        for theirs, ours in parts.items()
        for row in named({theirs: ours}, layer=layer, layout=layouts.get(theirs, Rows()))
    )
    return Table(
        rows=(
            *named({**{body + name: ours for name, ours in outer.items()}, head: "heads.next"}),
            *own,
            *more,
        ),
        ignored=(*buffers, *(layer + name for name in ignored)),
        prefix=body if alone else "",
    )


def make_plan(table: Table, spec: ModelSpec) -> Plan:
    """Fill a table's templates for this spec; a parameter that no row holds is an error."""
    parameters = {p.name: p for p in manifest(spec)}
    deepest = max(stack.n_layers for stack in spec.stacks().values())
    experts = max((mixture.n_experts for mixture in spec.mixtures().values()), default=0)
    entries: dict[str, Entry] = {}
    copies: dict[str, str] = {}
    for row in table.rows:
        layout = row.layout(spec) if callable(row.layout) else row.layout
        for theirs, ours in _filled(row, deepest, experts):
            found = [parameters[name] for name in ours if name in parameters]
            if not found or len(found) < len(ours):
                continue
            owner = found[0].tied_to
            if owner is not None:
                copies[theirs] = owner
                continue
            shapes = tuple(p.shape for p in found)
            entries[theirs] = Entry(theirs, layout.stored_shape(shapes), ours, shapes, layout)
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
            for layer in range(deepest if "{}" in name else 1)
        ),
        table.prefix,
        table.older,
    )


def _filled(row: Row, n_layers: int, n_experts: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the row for each layer, or once if it names none; and for each expert that it names."""
    every = [str(expert) for expert in range(n_experts)]
    for layer in range(n_layers if "{}" in row.theirs else 1):
        theirs, ours = row.theirs.format(layer), [name.format(layer) for name in row.names()]
        if "*" in theirs:
            for one in every:
                yield theirs.replace("*", one), tuple(name.replace("*", one) for name in ours)
        elif any("*" in name for name in ours):
            yield theirs, tuple(name.replace("*", one) for one in every for name in ours)
        else:
            yield theirs, tuple(ours)


def identity_plan(spec: ModelSpec) -> Plan:
    """Return the plan of our own checkpoints, whose names are ours already."""
    entries = {
        p.name: Entry(p.name, p.shape, (p.name,), (p.shape,), Rows())
        for p in manifest(spec)
        if p.tied_to is None
    }
    return Plan(entries, {}, frozenset())


#: A table, or a function to the table of a spec: layouts may depend on heads, rows on experts.
Names = Table | Callable[[ModelSpec], Table]


@dataclass(frozen=True, slots=True)
class Family:
    """The rules to read and write folders of one `model_type`.

    `keys` are the config's keys, `fixed` the facts that every model of the family has: `keys.py`
    tells what both hold. Keys that are not there must be `harmless` or have their `idle` value;
    `defaults` are transformers' values of keys that a config may leave out. `written`: whether
    specs are exported to it. `live` is the table of a transformers module, where its names are not
    those of its files. `remote_code`: released folders refer to code of their own, which is not
    needed; `older` is the name that this code has for the architecture. `encodes`: an
    encoder-decoder.
    """

    model_type: str
    architecture: str
    table: Names
    keys: Entries
    fixed: Facts = field(default_factory=dict)
    written: bool = True
    harmless: tuple[str, ...] = ()
    idle: Mapping[str, Any] = field(default_factory=dict)
    remote_code: bool = False
    older: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    live: Names | None = None
    encodes: bool = False
    #: Other architectures of this model_type that are read, by families of their own.
    others: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name for people: `Llama`, `GPT2`."""
        return self.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")

    def key_of(self, *fields: str) -> str | None:
        """Return the config's key of the first of these fields that has one of its own."""
        keys = {key.fields[0]: name for name, key in self.keys.items() if isinstance(key, Key)}
        return next((keys[field] for field in fields if field in keys), None)

    @staticmethod
    def of(families: "Sequence[Family]", config: Config) -> "Family | None":
        """Return the family of a config's model_type, and of its architecture if there are several.

        A live module may have no architecture in its config: its class is one.
        """
        kind = str(config.any("model_type", default=""))
        own = [family for family in families if family.model_type == kind]
        named = config.data.get("architectures") or [config.where]
        exact = [one for one in own if isinstance(named, list) and one.architecture in named]
        if exact or not own:
            return next(iter(exact), None)
        return replace(own[0], others=tuple(one.architecture for one in own[1:]))

    def plan(self, spec: ModelSpec, *, live: bool = False) -> Plan:
        """Return the plan of a spec's files, or of a live module of transformers."""
        names = self.table if self.live is None or not live else self.live
        return make_plan(names if isinstance(names, Table) else names(spec), spec)

    def spec_of(self, config: Config) -> ModelSpec:
        """Return the spec that a config describes; an unknown key is refused by name."""
        config = config.with_defaults(self.defaults)
        named = config.data.get("architectures") or [self.architecture]
        known = {self.architecture, self.older}
        if not isinstance(named, list) or not any(isinstance(n, str) and n in known for n in named):
            raise FileError(
                f"config.json names the architecture {str(named)[:80]}",
                where=config.where,
                hint=f"of model_type '{self.model_type}', "
                f"{', '.join((self.architecture, *self.others))} can be read",
            )
        try:
            spec = read_entries(self.keys, self.fixed, config)
        except InputError as error:
            raise FileError(
                f"{config.file}: {error.what}", where=config.where, hint=error.hint
            ) from error
        harmless = (*self.harmless, "auto_map") if self.remote_code else self.harmless
        config.finish(harmless=harmless, idle=self.idle)
        return spec

    def config_of(self, spec: ModelSpec, *, dtype: str = "float32") -> dict[str, Any]:
        """Return the complete config.json of a spec, readable by transformers 4.x and 5.x."""
        assert self.written, "a family that is read only"
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **write_entries(self.keys, spec),
            "dtype": dtype,
            "torch_dtype": dtype,
        }
