"""Where a language model's parameters are, line by line: every line adds up, to the unit.

Counted by the manifest; percentages are of the actual total. The component table of any model is in
`table`; this one has the lines of source 001: token, position, head, a layer's parts, final norm.
"""

from collections import Counter

from glassformer.spec.base import spec
from glassformer.spec.budget import Answer, Budget, Design
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import manifest
from glassformer.spec.model import ModelSpec, NextHead


@spec
class Allocation:
    """Parameters of a decoder by place; `per_layer` is one layer's, by part."""

    token: int
    position: int
    head: int
    per_layer: dict[str, int]
    n_layers: int
    final_norm: int
    tied: bool

    @property
    def backbone(self) -> int:
        """All layers."""
        return self.n_layers * sum(self.per_layer.values())

    @property
    def total(self) -> int:
        """Everything."""
        return self.token + self.position + self.head + self.backbone + self.final_norm


def allocate(model: ModelSpec) -> Allocation:
    """The allocation of a decoder whose layers are alike."""
    if model.encoder is not None or len(model.decoder.layers) > 1:
        raise InputError(
            "a table by layer needs one stack of equal layers",
            hint="spec.table.format_table shows any model",
        )
    outside: Counter[str] = Counter()
    layer = {"attention": 0, "ffn": 0, "norm": 0}
    for parameter in manifest(model):
        if parameter.tied_to is not None:
            continue
        if parameter.layer is None:
            outside[parameter.role] += parameter.size
        elif parameter.layer == 0:
            layer[parameter.role] += parameter.size
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
    """One line of the table; those of a layer's parts are `indented`, and part of the line above.

    The lines that are not indented add up to `total`, the last one.
    """

    name: str
    parameters: int
    share: float
    note: str = ""
    indented: bool = False


def allocation_lines(model: ModelSpec) -> tuple[Line, ...]:
    """The table as values: everything outside the layers, the layers and their parts, the total."""
    found = allocate(model)
    layers = found.n_layers
    parts = {"attention": "attention", "feed-forward": "ffn", "norms": "norm"}
    rows = [
        ("token embedding", found.token, "", False),
        ("position embedding", found.position, "" if found.position else "none learned", False),
        ("head", found.head, "tied: the token embedding again" if found.tied else "", False),
        ("layers", found.backbone, f"{layers} x {sum(found.per_layer.values()):,}", False),
    ]
    for name, part in parts.items():
        each = found.per_layer[part]
        rows.append((name, layers * each, f"{layers} x {each:,}", True))
    rows += [("final norm", found.final_norm, "", False), ("total", found.total, "", False)]
    return tuple(
        Line(name=name, parameters=count, share=count / found.total, note=note, indented=indented)
        for name, count, note, indented in rows
    )


def format_allocation(model: ModelSpec) -> str:
    """The table as text."""
    lines = [f"{'component':<20}{'parameters':>15}{'share':>10}"]
    for line in allocation_lines(model):
        name = f"  {line.name}" if line.indented else line.name
        text = f"{name:<20}{line.parameters:>15,}{line.share:>10.2%}   {line.note}"
        lines.append(text.rstrip())
    lines.insert(-1, "-" * 45)
    return "\n".join(lines)


def format_dimensions(design: Design, budget: Budget) -> str:
    """The count beside the target, and the two shares that were wished for."""
    lines = [
        f"{design.params - design.target:+,} from the target of {design.target:,} "
        f"({design.error:+.2%}; {budget.tolerance * 100:g}% is allowed)"
    ]
    line = f"embedding ratio {design.embedding_ratio:.2%}"
    if not budget.tied and budget.ratio_covers == "both":
        line += f" with the head, {design.input_ratio:.2%} without"
    elif not budget.tied:
        line += " without the head"
    lines.append(f"{line}   GLU expansion {design.glu_expansion:.3f}")
    if budget.n_kv_heads is not None:
        lines.append(f"{budget.n_kv_heads} heads for keys and values")
    return "\n".join(lines)


def format_alternatives(answer: Answer) -> str:
    """One line each: what it is best at, and its numbers."""
    header = f"{'':<26}{'parameters':>12}{'off':>9}{'d_model':>9}{'d_ff':>7}{'layers':>8}"
    lines = [f"{header}{'ratio':>9}{'GLU':>7}"]
    for design in (answer.best, *answer.alternatives):
        sizes = design.sizes
        lines.append(
            f"{design.name:<26}{design.params:>12,}{design.miss:>9}{sizes.d_model:>9}"
            f"{sizes.d_ff:>7}{sizes.n_layers:>8}{design.embedding_ratio:>9.2%}"
            f"{design.glu_expansion:>7.2f}"
        )
    return "\n".join(lines)
