"""A budget without an answer: the certificate says which bound fails, by how much, what works."""

from typing import Any

from glassformer.spec.base import spec
from glassformer.spec.budget import Budget, Exact, Free, Target, Wish
from glassformer.spec.errors import CheckFailed
from glassformer.spec.reach import (
    LIMITS,
    changed,
    changes,
    feasible,
    is_limited,
    needed,
    neighbours,
    relaxed,
)
from glassformer.spec.search import Search
from glassformer.spec.widths import heads_of


@spec
class Infeasible:
    """The certificate. `nearest` holds, for each single input, a value that works, or None."""

    budget: Budget
    bound: str
    why: str
    nearest: dict[str, Any]


class InfeasibleBudget(CheckFailed):
    """No model keeps every limit of the budget; `certificate` says why, and what would."""

    def __init__(self, certificate: Infeasible) -> None:
        works = [f"{k} {show(v)}" for k, v in certificate.nearest.items() if v is not None]
        hint = f"each of these alone would do: {', '.join(works)}" if works else ""
        super().__init__(f"infeasible: {certificate.why}", hint=hint)
        self.certificate = certificate


def show(value: Any) -> str:
    """A value of the certificate for people."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def certificate(budget: Budget) -> Infeasible:
    """Why there is no answer, and the nearest feasible change of each single input."""
    below, above = neighbours(budget)
    bound, why = _reason(budget, below, above)
    return Infeasible(
        budget=budget, bound=bound, why=why, nearest=dict(changes(budget, below, above))
    )


def _reason(budget: Budget, below: int | None, above: int | None) -> tuple[str, str]:
    low, high = budget.bounds
    widths = Search(budget).widths
    width = next(d for d in range(widths.step, 2**31, widths.step) if heads_of(budget, d))
    table, smallest = widths.covered(width), widths.least_count(width)
    room = f"the {high:,} that the total and its tolerance allow"
    if table > high:
        tables = "embedding" if budget.tied or budget.ratio_covers == "input" else "embedding, head"
        return "embedding", (
            f"{budget.vocab_size:,} tokens at the narrowest width allowed, {width}, need "
            f"{table:,} parameters for the {tables} alone: {table - high:,} more than {room}"
        )
    if smallest > high:
        layers = "one layer" if budget.min_layers == 1 else f"{budget.min_layers} layers"
        return "total", (
            f"the smallest model, {layers} of width {width}, has {smallest:,} parameters: "
            f"{smallest - high:,} more than {room}"
        )
    for field in ("embedding_ratio", "glu_expansion"):
        wish = getattr(budget, field)
        if is_limited(wish):
            _, within = needed(budget, field)
            if within is not None:
                return field, _out_of_reach(budget, field, wish, within)
    for field, (option, none) in LIMITS.items():
        if getattr(budget, field) != none and feasible(budget, field, none):
            words = option.replace("_", " ")
            return option, (
                f"{words} {getattr(budget, field):g} leaves no design; "
                f"{show(relaxed(budget, field))} would"
            )
    counts = [f"{n:,} ({n / budget.total - 1:+.2%})" for n in (below, above) if n is not None]
    if counts:
        return "tolerance", (
            f"no design has from {low:,} to {high:,} parameters; the nearest "
            f"{'count is' if len(counts) == 1 else 'counts are'} {' and '.join(counts)}"
        )
    return "limits", "no design of any size keeps these limits together"


def _out_of_reach(budget: Budget, field: str, wish: Wish, within: float) -> str:
    """What the nearest design has instead, and how much more than the limit that is."""
    assert not isinstance(wish, Free)
    found = Search(changed(budget, field, Target(value=wish.value, within=within))).best()
    assert found is not None
    near = f"of all designs within {budget.tolerance:.2%} of the total, the nearest has"
    if field == "embedding_ratio":
        share = found.frame.covered / found.frame.count(found.n_layers, found.d_ff)
        asked = f"exactly {wish.value:.2%}" if isinstance(wish, Exact) else _limited(wish, "points")
        return (
            f"an embedding ratio of {asked} is out of reach: {near} {share:.2%}, "
            f"{abs(share - wish.value) * 100:.2f} points away"
        )
    expansion = found.d_ff / found.frame.d_model
    asked = f"exactly {wish.value:g}" if isinstance(wish, Exact) else _limited(wish, "%")
    return (
        f"a GLU expansion of {asked} is out of reach: {near} {expansion:.3f}, "
        f"{abs(expansion / wish.value - 1):.2%} away"
    )


def _limited(wish: Target, unit: str) -> str:
    assert wish.within is not None
    value = f"{wish.value:.2%}" if unit == "points" else f"{wish.value:g}"
    return f"{value} within {wish.within * 100:g} {unit}"
