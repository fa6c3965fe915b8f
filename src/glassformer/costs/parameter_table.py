"""Parameter tables, counted by the manifest; shares are of the actual total.

`parameter_table` has a row per component and takes any model. `allocation_lines` is for a decoder
of equal layers, and also shows one layer: token embedding, position, head, the layers with their
parts, final norm. In both, tied weights count once and the rows add up exactly.
"""

from collections import Counter

from glassformer.spec.checks import spec
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import count_active_parameters, count_parameters, manifest
from glassformer.spec.model import ModelSpec, NextHead


@spec
class Allocation:
    """Parameters of a decoder by component; `per_layer` has those of one layer, by part."""

    token: int
    position: int
    head: int
    per_layer: dict[str, int]
    n_layers: int
    final_norm: int
    tied: bool

    @property
    def backbone(self) -> int:
        """Parameters of all layers."""
        return self.n_layers * sum(self.per_layer.values())

    @property
    def total(self) -> int:
        """Parameters of the whole model."""
        return self.token + self.position + self.head + self.backbone + self.final_norm


def allocate(model: ModelSpec) -> Allocation:
    """Count the parameters of a decoder with equal layers, by component."""
    if model.encoder is not None or len(model.decoder.layers) > 1:
        raise InputError(
            "a table by layer needs one stack of equal layers",
            hint="costs.parameter_table.format_table shows any model",
        )
    outside: Counter[str] = Counter()
    layer = {"attention": 0, "ffn": 0, "norm": 0}
    for parameter in manifest(model):
        if parameter.tied_to is not None:
            continue
        if parameter.layer is None:
            outside[parameter.role] += parameter.size
        elif parameter.layer == 0:
            part = "ffn" if parameter.role == "router" else parameter.role
            layer[part] += parameter.size
    heads = [head for head in model.heads if isinstance(head, NextHead)]
    return Allocation(
        token=outside["embedding"],
        position=outside["position"],
        head=outside["head"],
        per_layer=layer,
        n_layers=model.n_layers,
        final_norm=outside["final_norm"],
        tied=bool(heads) and heads[0].tied,
    )


@spec
class Line:
    """One line of the table. The parts of the layers are `indented`: the line above includes them.

    The lines that are not indented add up to the last one, `total`.
    """

    name: str
    parameters: int
    share: float
    note: str = ""
    indented: bool = False


def allocation_lines(model: ModelSpec) -> tuple[Line, ...]:
    """Return the table as values: embeddings and head, the layers and their parts, the total."""
    counts = allocate(model)
    layers = counts.n_layers
    parts = {"attention": "attention", "feed-forward": "ffn", "norms": "norm"}
    rows = [
        ("token embedding", counts.token, "", False),
        ("position embedding", counts.position, "" if counts.position else "none learned", False),
        ("head", counts.head, "tied: the token embedding again" if counts.tied else "", False),
        ("layers", counts.backbone, f"{layers} x {sum(counts.per_layer.values()):,}", False),
    ]
    for name, part in parts.items():
        each = counts.per_layer[part]
        rows.append((name, layers * each, f"{layers} x {each:,}", True))
    rows += [("final norm", counts.final_norm, "", False), ("total", counts.total, "", False)]
    return tuple(
        Line(name=name, parameters=count, share=count / counts.total, note=note, indented=indented)
        for name, count, note, indented in rows
    )


def format_allocation(model: ModelSpec) -> str:
    """Return the allocation table as text."""
    lines = [f"{'component':<20}{'parameters':>15}{'share':>10}"]
    for line in allocation_lines(model):
        name = f"  {line.name}" if line.indented else line.name
        text = f"{name:<20}{line.parameters:>15,}{line.share:>10.2%}   {line.note}"
        lines.append(text.rstrip())
    lines.insert(-1, "-" * 45)
    return "\n".join(lines)


COMPONENTS = {
    "embedding": "token embedding",
    "position": "position embedding",
    "attention": "attention",
    "cross_attention": "cross-attention",
    "ffn": "feed-forward",
    "router": "routers",
    "norm": "norms",
    "final_norm": "final norm",
    "head": "heads",
}


@spec
class Row:
    """A component, its parameters in all layers, and its share of the total."""

    component: str
    parameters: int
    share: float


def parameter_table(model: ModelSpec) -> tuple[Row, ...]:
    """Return a row for each component of the model, then the total; tied weights count once."""
    sizes: Counter[str] = Counter()
    for parameter in manifest(model):
        sizes[parameter.role] += parameter.size if parameter.tied_to is None else 0
    total = sum(sizes.values())
    rows = [
        Row(component=label, parameters=sizes[role], share=sizes[role] / total)
        for role, label in COMPONENTS.items()
        if role in sizes
    ]
    return (*rows, Row(component="total", parameters=total, share=1.0))


def format_table(model: ModelSpec) -> str:
    """Return the component table as text."""
    lines = [f"{'component':<20}{'parameters':>14}{'share':>9}"]
    for row in parameter_table(model):
        lines.append(f"{row.component:<20}{row.parameters:>14,}{row.share:>9.2%}")
    if model.mixtures():
        used = count_active_parameters(model)
        share = used / count_parameters(model)
        lines.append(f"{'active for a token':<20}{used:>14,}{share:>9.2%}")
    return "\n".join(lines)
