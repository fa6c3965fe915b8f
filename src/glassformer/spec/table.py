"""The parameter table: what each component costs, by the manifest, to the unit."""

from collections import Counter

from glassformer.spec.base import spec
from glassformer.spec.manifest import manifest
from glassformer.spec.model import ModelSpec

COMPONENTS = {
    "embedding": "token embedding",
    "position": "position embedding",
    "attention": "attention",
    "cross_attention": "cross-attention",
    "ffn": "feed-forward",
    "norm": "norms",
    "final_norm": "final norm",
    "head": "heads",
}


@spec
class Row:
    """A component, its parameters in all layers, and its share of the actual total."""

    component: str
    parameters: int
    share: float


def parameter_table(model: ModelSpec) -> tuple[Row, ...]:
    """One row for each component that the model has, then the total; tied weights count once."""
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
    """The table as text."""
    lines = [f"{'component':<20}{'parameters':>14}{'share':>9}"]
    for row in parameter_table(model):
        lines.append(f"{row.component:<20}{row.parameters:>14,}{row.share:>9.2%}")
    return "\n".join(lines)
