"""A budget without an answer: the certificate says which bound fails, by how much, what works.

Where a search ends before it knows, that is said instead: `Undecided`, with the counts it has seen.
"""

from typing import Any

from glassformer.budget.counting import heads_of
from glassformer.budget.effort import Effort
from glassformer.budget.question import Budget, Exact, Free, Target, Wish
from glassformer.budget.relaxation import (
    LIMITS,
    Neighbours,
    changed,
    changes,
    is_limited,
    least_tolerance,
    neighbours,
    reached,
)
from glassformer.budget.search import Search
from glassformer.spec.checks import spec
from glassformer.spec.errors import CheckFailed, MachineError


@spec
class Infeasible:
    """The certificate. `nearest` holds, for each single input, a value that works, or None.

    Those in `unproven` were left open: a value nearer than the one named, or than none, may work.
    """

    budget: Budget
    bound: str
    why: str
    nearest: dict[str, Any]
    unproven: tuple[str, ...] = ()


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


class Undecided(MachineError):
    """The search ended at its limit before it found a design or knew that there is none.

    `tolerance` is the least that is known to work, None where no design at all was seen.
    """

    def __init__(self, budget: Budget, near: Neighbours, *, looks: int) -> None:
        low, high = budget.bounds
        self.budget, self.counts = budget, near.counts
        self.tolerance = least_tolerance(budget, near)
        seen = f"; designs of {_listed(budget, near.counts)} were found" if near.counts else ""
        wider = "" if self.tolerance is None else f"; or a tolerance of {show(self.tolerance)}"
        super().__init__(
            f"undecided: {looks:,} looks found no design from {low:,} to {high:,} parameters, and "
            f"did not rule one out{seen}",
            hint=f"a thorough search has no limit{wider}",
        )


def undecided(budget: Budget, effort: Effort) -> Undecided:
    """What is known where neither a design nor a proof was found."""
    looks = effort.spent
    return Undecided(budget, neighbours(budget, effort), looks=looks)


def certificate(budget: Budget, effort: Effort) -> Infeasible:
    """Why there is no answer, and the nearest feasible change of each single input."""
    near = neighbours(budget, effort.share(2))
    found = tuple(changes(budget, near, effort))
    nearest = {change.name: change.value for change in found}
    bound, why = _reason(budget, near, nearest, effort)
    return Infeasible(
        budget=budget,
        bound=bound,
        why=why,
        nearest=nearest,
        unproven=tuple(change.name for change in found if not change.is_proven),
    )


def _listed(budget: Budget, counts: tuple[int, ...]) -> str:
    away = [(n, n / budget.total - 1) for n in counts]
    shares = (f"{x:+.2%}" if abs(x) >= 5e-5 else f"{n - budget.total:+,}" for n, x in away)
    return " and ".join(f"{n:,} ({share})" for n, share in zip(counts, shares, strict=True))


def _reason(
    budget: Budget, near: Neighbours, nearest: dict[str, Any], effort: Effort
) -> tuple[str, str]:
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
    for field, option in (("embedding_ratio", "ratio_within"), ("glu_expansion", "glu_within")):
        wish, within = getattr(budget, field), nearest.get(option)
        if is_limited(wish) and within is not None:
            return field, _out_of_reach(budget, field, wish, within, effort)
    for field, (option, none) in LIMITS.items():
        if getattr(budget, field) != none and nearest[option] is not None:
            words = option.replace("_", " ")
            return option, (
                f"{words} {getattr(budget, field):g} leaves no design; "
                f"{show(nearest[option])} would"
            )
    if near.counts:
        found = "" if near.is_proven else " found"
        return "tolerance", (
            f"no design has from {low:,} to {high:,} parameters; the nearest "
            f"{f'count{found} is' if len(near.counts) == 1 else f'counts{found} are'} "
            f"{_listed(budget, near.counts)}"
        )
    if near.is_proven:
        return "limits", "no design of any size keeps these limits together"
    return "limits", f"no design from {low:,} to {high:,} parameters keeps these limits together"


def _out_of_reach(budget: Budget, field: str, wish: Wish, within: float, effort: Effort) -> str:
    """What the nearest design has instead, and how much more than the limit that is."""
    assert not isinstance(wish, Free)
    asked = changed(budget, field, Target(value=wish.value, within=within))
    found = Search(asked, effort=effort).best()
    if found is None:  # the effort is spent
        words = "an embedding ratio" if field == "embedding_ratio" else "a GLU expansion"
        return f"{words} of {wish.value:g} is out of reach; within {show(within)} of it is not"
    value = reached(found, field)
    near = f"of all designs within {budget.tolerance:.2%} of the total, the nearest has"
    if field == "embedding_ratio":
        limit = f"exactly {wish.value:.2%}" if isinstance(wish, Exact) else _limited(wish, "points")
        return (
            f"an embedding ratio of {limit} is out of reach: {near} {value:.2%}, "
            f"{abs(value - wish.value) * 100:.2f} points away"
        )
    limit = f"exactly {wish.value:g}" if isinstance(wish, Exact) else _limited(wish, "%")
    return (
        f"a GLU expansion of {limit} is out of reach: {near} {value:.3f}, "
        f"{abs(value / wish.value - 1):.2%} away"
    )


def _limited(wish: Target, unit: str) -> str:
    assert wish.within is not None
    value = f"{wish.value:.2%}" if unit == "points" else f"{wish.value:g}"
    return f"{value} within {wish.within * 100:g} {unit}"
