"""What a budget would have to be: the nearest feasible change of each single input.

Relaxing a limit only ever adds designs, so what the total, the tolerance or a limit would have to
be is found by halving. A vocabulary, a length, a rank or a number of heads is tried outwards from
the one that was asked for: one by one while near, then in growing steps and back by halving.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from glassformer.spec.budget import Budget, Exact, Free, Target, Wish
from glassformer.spec.errors import InputError
from glassformer.spec.model import Learned
from glassformer.spec.search import Search

#: Values this near are all tried, one by one.
NEAR = 16
#: No total is looked for beyond so many times the one that was asked for.
FAR = 1_000
#: Limits and what stands for none, by field, with the name of the command's option.
LIMITS: dict[str, tuple[str, Any]] = {
    "min_layers": ("min_layers", 1),
    "max_layers": ("max_layers", None),
    "min_aspect": ("min_aspect", 0.0),
    "max_aspect": ("max_aspect", None),
    "width_multiple": ("multiple", 1),
    "ffn_multiple": ("ffn_multiple", 1),
}


def changed(budget: Budget, field: str, value: Any) -> Budget:
    """The budget with one field changed by its name."""
    changes: dict[str, Any] = {field: value}
    return replace(budget, **changes)


def feasible(budget: Budget, field: str, value: Any) -> bool:
    """Whether the budget has an answer with this field changed."""
    try:
        return Search(changed(budget, field, value)).feasible()
    except InputError:  # a value that breaks a rule with the others
        return False


# --- the total and its tolerance ----------------------------------------------------------------


def neighbours(budget: Budget) -> tuple[int | None, int | None]:
    """The nearest counts below and above the tolerance that some design has."""
    low, high = budget.bounds
    return largest_count(budget, low - 1), smallest_count(budget, high + 1)


def smallest_count(budget: Budget, least: int) -> int | None:
    """The smallest count from `least` on that some design has."""
    least = max(1, least)
    return Search(budget, low=least, high=FAR * budget.total).nearest_count(least)


def largest_count(budget: Budget, most: int) -> int | None:
    """The largest count up to `most` that some design has."""
    return Search(budget, low=1, high=most).nearest_count(most) if most >= 1 else None


def nearest_total(budget: Budget, below: int | None, above: int | None) -> int | None:
    """The nearest total whose tolerance holds one of these counts."""
    tolerance, totals = Fraction(repr(budget.tolerance)), []
    if below is not None:
        totals.append(math.floor(below / (1 - tolerance)))
    if above is not None:
        totals.append(math.ceil(above / (1 + tolerance)))
    totals = [total for total in totals if total >= 1 and feasible(budget, "total", total)]
    return min(totals, key=lambda total: (abs(total - budget.total), total), default=None)


def least_tolerance(budget: Budget, below: int | None, above: int | None) -> float | None:
    """The smallest tolerance that reaches one of these counts, rounded up to four digits."""
    away = [abs(count - budget.total) for count in (below, above) if count is not None]
    if not away or min(away) >= budget.total:
        return None
    return _rounded_up(Fraction(max(1, min(away)), budget.total))


# --- everything else ----------------------------------------------------------------------------


def changes(budget: Budget, below: int | None, above: int | None) -> Iterator[tuple[str, Any]]:
    """What each input alone would have to be, by the names of the command's options."""
    yield "params", nearest_total(budget, below, above)
    yield "tolerance", least_tolerance(budget, below, above)
    yield "vocab", _outwards(budget, "vocab_size", most=2 * budget.total)
    if budget.n_heads is not None:
        yield "heads", _outwards(budget, "n_heads", most=256)
    if isinstance(budget.position, Learned):
        yield "length", _outwards(budget, "max_seq_len", most=2 * budget.total)
    yield "tied", (not budget.tied) if feasible(budget, "tied", not budget.tied) else None
    if budget.n_heads is not None and not budget.free_head_width:
        yield "free_head_width", True if feasible(budget, "free_head_width", True) else None
    if isinstance(budget.rank, int):
        yield "rank", _outwards(budget, "rank", most=10**6)
    elif budget.rank is None and not isinstance(budget.embedding_ratio, Free):
        yield "rank", "any" if feasible(budget, "rank", "any") else None
    if is_limited(budget.embedding_ratio):
        value, within = needed(budget, "embedding_ratio")
        yield "embedding_ratio", value
        yield "ratio_within", within
    if is_limited(budget.glu_expansion):
        value, within = needed(budget, "glu_expansion")
        yield "glu_expansion", value
        yield "glu_within", within
    for field, (option, none) in LIMITS.items():
        if getattr(budget, field) != none:
            yield option, relaxed(budget, field)


def _outwards(budget: Budget, field: str, *, most: int) -> int | None:
    """The nearest whole number of this field that works, smaller first where two are as near."""
    start = int(getattr(budget, field))
    for away in range(1, NEAR + 1):
        for value in (start - away, start + away):
            if 1 <= value <= most and feasible(budget, field, value):
                return value

    def above(distance: int) -> bool:
        return feasible(budget, field, start + distance)

    def below(distance: int) -> bool:
        return feasible(budget, field, start - distance)

    down = _first(below, NEAR + 1, most=start - 1, monotone=False)
    up = _first(above, NEAR + 1, most=most - start, monotone=False)
    found = [(d, v) for d, v in ((down, -1), (up, 1)) if d is not None]
    return start + math.prod(min(found)) if found else None


def _first(
    works: Callable[[int], bool], start: int, *, most: int, monotone: bool = True
) -> int | None:
    """The first number from `start` on that works: growing steps, then halving back.

    Where what works is not one unbroken range, it works and is the first of its own range.
    """
    if start > most or (monotone and not works(most)):
        return None
    bad, good = start - 1, start
    while not works(good):
        if good >= most:
            return None
        bad, good = good, min(most, good + max(1, good // (1 if monotone else 10)))
    while good - bad > 1:
        middle = (bad + good) // 2
        if works(middle):
            good = middle
        else:
            bad = middle
    return good


def is_limited(wish: Wish) -> bool:
    """Whether this wish can make a budget infeasible."""
    return isinstance(wish, Exact) or (isinstance(wish, Target) and wish.within is not None)


def needed(budget: Budget, field: str) -> tuple[float | None, float | None]:
    """The nearest value of a limited wish that works, and the nearest limit around the asked one.

    An exact wish has no limit of its own: the one that is given would have to replace it.
    """
    wish = getattr(budget, field)
    if not feasible(budget, field, Target(value=wish.value)):
        return None, None
    low, high = 0.0, 1e-6
    while not feasible(budget, field, Target(value=wish.value, within=high)):
        low, high = high, high * 2
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if feasible(budget, field, Target(value=wish.value, within=middle)):
            high = middle
        else:
            low = middle
    within = _rounded_up(Fraction(high))
    if isinstance(wish, Exact):
        found = Search(changed(budget, field, Target(value=wish.value, within=within))).best()
        assert found is not None
        value = found.d_ff / found.frame.d_model
        if field == "embedding_ratio":
            value = found.frame.covered / found.frame.count(found.n_layers, found.d_ff)
        value = round(value, 6)
        return value if feasible(budget, field, Exact(value=value)) else None, within
    scale = wish.value if field == "glu_expansion" else 1.0
    for sign in (1, -1):
        # A relative limit moves with the value, hence the second factor.
        value = round((wish.value + sign * (within - wish.within) * scale), 6)
        if feasible(budget, field, Target(value=value, within=wish.within)):
            return value, within
    return None, within


def relaxed(budget: Budget, field: str) -> float | None:
    """The nearest value of a limit, on its looser side, that works."""
    _, none = LIMITS[field]
    if not feasible(budget, field, none):
        return None
    value = getattr(budget, field)
    if field.endswith("multiple"):
        halves = [m for m in range(value - 1, 0, -1) if value % m == 0]
        return next(m for m in halves if feasible(budget, field, m))
    if field == "min_layers":
        found = _first(lambda less: feasible(budget, "min_layers", value - less), 1, most=value - 1)
        return None if found is None else value - found
    if field == "max_layers":
        return _first(lambda depth: feasible(budget, "max_layers", depth), value + 1, most=10**9)
    low, high = (0.0, value) if field == "min_aspect" else (value, value * 2)
    while field == "max_aspect" and not feasible(budget, "max_aspect", high):
        low, high = high, high * 2
    for _ in range(20):
        middle = (low + high) / 2
        works = feasible(budget, field, middle)
        if works == (field == "min_aspect"):
            low = middle
        else:
            high = middle
    if field == "max_aspect":
        return _rounded_up(Fraction(high))
    return _rounded_down(Fraction(low)) if low else 0.0


def _rounded_down(share: Fraction) -> float:
    """The number of four digits before."""
    unit = Fraction(10) ** (math.floor(math.log10(share)) - 3)
    return float(math.floor(share / unit) * unit)


def _rounded_up(share: Fraction) -> float:
    """The next number of four digits."""
    unit = Fraction(10) ** (math.floor(math.log10(share)) - 3)
    return float(math.ceil(share / unit) * unit)
