"""The counts on both sides of a tolerance that some design has, and what they ask of it.

What a budget would have to be: the nearest feasible change of each single input.

Relaxing a limit only ever adds designs, so what the total, the tolerance or a limit would have to
be is found by halving. A vocabulary, a length, a rank or a number of heads is tried outwards from
the one that was asked for: one by one while near, then in growing steps and back by halving.
Whatever is named was found to work; where a try was left open, a nearer value may work too.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from glassformer.budget.effort import Effort
from glassformer.budget.question import Budget, Exact, Free, Target, Wish
from glassformer.budget.search import Found, Search
from glassformer.spec.checks import spec
from glassformer.spec.errors import InputError
from glassformer.spec.model import Learned

#: No count is looked for beyond so many times the total that was asked for.
FAR = 1_000


@spec
class Neighbours:
    """The nearest counts found below and above a tolerance; proven: there is no nearer."""

    below: int | None
    above: int | None
    is_proven: bool

    @property
    def counts(self) -> tuple[int, ...]:
        """Those that there are."""
        return tuple(count for count in (self.below, self.above) if count is not None)


def neighbours(budget: Budget, effort: Effort) -> Neighbours:
    """The nearest counts outside the tolerance that some design has."""
    low, high = budget.bounds
    return counts_around(budget, low - 1, high + 1, effort)


def counts_around(budget: Budget, most: int, least: int, effort: Effort) -> Neighbours:
    """The largest count up to `most`, and the smallest from `least` on, that some design has."""
    below, least = None, max(1, least)
    under = Search(budget, low=1, high=most, effort=effort.share(2))
    if most >= 1:
        below = under.nearest_count(most)
    over = Search(budget, low=least, high=FAR * budget.total, effort=effort.share(1))
    above = over.nearest_count(least)
    return Neighbours(below=below, above=above, is_proven=under.is_proven and over.is_proven)


def least_tolerance(budget: Budget, near: Neighbours) -> float | None:
    """The smallest tolerance that reaches one of these counts, rounded up to four digits."""
    away = [abs(count - budget.total) for count in near.counts]
    if not away or min(away) >= budget.total:
        return None
    return rounded_up(Fraction(max(1, min(away)), budget.total))


def rounded_down(share: Fraction) -> float:
    """The number of four digits before."""
    unit = Fraction(10) ** (math.floor(math.log10(share)) - 3)
    return float(math.floor(share / unit) * unit)


def rounded_up(share: Fraction) -> float:
    """The next number of four digits."""
    unit = Fraction(10) ** (math.floor(math.log10(share)) - 3)
    return float(math.ceil(share / unit) * unit)


#: Values this near are all tried, one by one.
NEAR = 16
#: One try has at most this part of the looks that its input has left.
TRY = 4
#: No limit of a wish is looked for beyond so many times its value.
WIDEST = 1e6
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


class Probe:
    """Tries other values of one input; `is_proven` until a try is left open.

    `found` is the design of the last value that worked.
    """

    def __init__(self, budget: Budget, effort: Effort) -> None:
        self.budget, self.effort = budget, effort
        self.is_proven = True
        self.found: Found | None = None

    def works(self, field: str, value: Any, *, of: int = TRY) -> bool:
        """Whether the budget is known to have an answer with this field changed.

        The try has one of so many parts of what is left.
        """
        try:
            asked = changed(self.budget, field, value)
        except InputError:  # a value that breaks a rule with the others
            return False
        search = Search(asked, effort=self.effort.share(of))
        found = search.first()
        self.found = found or self.found
        self.is_proven &= search.is_proven
        return found is not None


def nearest_total(probe: Probe, near: Neighbours) -> int | None:
    """The nearest total whose tolerance holds one of these counts."""
    budget, totals = probe.budget, []
    tolerance = Fraction(repr(budget.tolerance))
    if near.below is not None:
        totals.append((math.floor(near.below / (1 - tolerance)), near.below))
    if near.above is not None:
        totals.append((math.ceil(near.above / (1 + tolerance)), near.above))
    found = [total for total, count in totals if total >= 1 and _holds(probe, total, count)]
    return min(found, key=lambda total: (abs(total - budget.total), total), default=None)


def _holds(probe: Probe, total: int, count: int) -> bool:
    """Whether some design is within the tolerance of this total: that of this count, mostly."""
    low, high = changed(probe.budget, "total", total).bounds
    return low <= count <= high or probe.works("total", total)


@spec
class Change:
    """What one input alone would have to be, None where nothing was found; and if that is all."""

    name: str
    value: Any
    is_proven: bool


#: From a probe to an input's values, by the names of the command's options.
Ask = Callable[[Probe], dict[str, Any]]


def changes(budget: Budget, near: Neighbours, effort: Effort) -> Iterator[Change]:
    """What each input alone would have to be, by the names of the command's options."""
    total = Probe(budget, effort.share(2))
    value = nearest_total(total, near)
    yield Change(name="params", value=value, is_proven=near.is_proven and total.is_proven)
    tolerance = least_tolerance(budget, near)
    yield Change(name="tolerance", value=tolerance, is_proven=near.is_proven)
    told = []
    for ask in reversed(list(_asks(budget))):  # the last ones take few tries
        probe = Probe(budget, effort.share(2))
        found = ask(probe).items()
        told.append([Change(name=n, value=v, is_proven=probe.is_proven) for n, v in found])
    yield from itertools.chain(*reversed(told))


def _asks(budget: Budget) -> Iterator[Ask]:
    yield lambda probe: {"vocab": _outwards(probe, "vocab_size", most=2 * budget.total)}
    if budget.n_heads is not None:
        yield lambda probe: {"heads": _outwards(probe, "n_heads", most=256)}
    if isinstance(budget.position, Learned):
        yield lambda probe: {"length": _outwards(probe, "max_seq_len", most=2 * budget.total)}
    yield lambda probe: {"tied": _only(probe, "tied", not budget.tied)}
    if budget.n_heads is not None and not budget.free_head_width:
        yield lambda probe: {"free_head_width": _only(probe, "free_head_width", True)}
    if isinstance(budget.rank, int):
        yield lambda probe: {"rank": _outwards(probe, "rank", most=10**6)}
    elif budget.rank is None and not isinstance(budget.embedding_ratio, Free):
        yield lambda probe: {"rank": _only(probe, "rank", "any")}
    for field, within in (("embedding_ratio", "ratio_within"), ("glu_expansion", "glu_within")):
        if is_limited(getattr(budget, field)):
            yield functools.partial(_needed, field=field, within=within)
    for field, (_, none) in LIMITS.items():
        if getattr(budget, field) != none:
            yield functools.partial(_relaxed, field=field)


def _only(probe: Probe, field: str, value: Any) -> Any:
    """The one other value that there is, if it works."""
    return value if probe.works(field, value, of=1) else None


def _needed(probe: Probe, *, field: str, within: str) -> dict[str, Any]:
    return dict(zip((field, within), needed(probe, field), strict=True))


def _relaxed(probe: Probe, *, field: str) -> dict[str, Any]:
    return {LIMITS[field][0]: relaxed(probe, field)}


def _outwards(probe: Probe, field: str, *, most: int) -> int | None:
    """The nearest whole number of this field that works, smaller first where two are as near."""
    start = int(getattr(probe.budget, field))
    for away in range(1, NEAR + 1):
        for value in (start - away, start + away):
            if 1 <= value <= most and probe.works(field, value):
                return value

    def above(distance: int) -> bool:
        return probe.works(field, start + distance)

    def below(distance: int) -> bool:
        return probe.works(field, start - distance)

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


def needed(probe: Probe, field: str) -> tuple[float | None, float | None]:
    """The nearest value of a limited wish that works, and the nearest limit around the asked one.

    An exact wish has no limit of its own: the one that is given would have to replace it.
    """
    wish = getattr(probe.budget, field)

    def reaches(within: float | None) -> bool:
        return probe.works(field, Target(value=wish.value, within=within))

    low, high = 0.0, 1e-6
    if not reaches(None):
        return None, None
    while not reaches(high):
        low, high = high, high * 2
        if high > WIDEST:
            return None, None
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    within = rounded_up(Fraction(high))
    if isinstance(wish, Exact):
        asked = changed(probe.budget, field, Target(value=wish.value, within=within))
        found = Search(asked, effort=probe.effort.share(2)).best() or probe.found
        assert found is not None
        value = round(reached(found, field), 6)
        return value if probe.works(field, Exact(value=value)) else None, within
    scale = wish.value if field == "glu_expansion" else 1.0
    for sign in (1, -1):
        # A relative limit moves with the value, hence the second factor.
        value = round((wish.value + sign * (within - wish.within) * scale), 6)
        if probe.works(field, Target(value=value, within=wish.within)):
            return value, within
    return None, within


def reached(found: Found, field: str) -> float:
    """The ratio, or the expansion, of what was found."""
    if field == "embedding_ratio":
        return found.frame.covered / found.count
    return found.d_ff / found.frame.d_model


def relaxed(probe: Probe, field: str) -> float | None:
    """The nearest value of a limit, on its looser side, that works."""
    _, none = LIMITS[field]
    if not probe.works(field, none):
        return None
    value = getattr(probe.budget, field)
    if field.endswith("multiple"):
        halves = [m for m in range(value - 1, 0, -1) if value % m == 0]
        return next((m for m in halves if probe.works(field, m)), 1)
    if field == "min_layers":
        found = _first(lambda less: probe.works("min_layers", value - less), 1, most=value - 1)
        return 1 if found is None else int(value - found)
    if field == "max_layers":
        return _first(lambda depth: probe.works("max_layers", depth), value + 1, most=10**9)
    low, high = (0.0, value) if field == "min_aspect" else (value, value * 2)
    while field == "max_aspect" and not probe.works("max_aspect", high):
        low, high = high, high * 2
        if high > WIDEST * value:
            return None
    for _ in range(20):
        middle = (low + high) / 2
        works = probe.works(field, middle)
        if works == (field == "min_aspect"):
            low = middle
        else:
            high = middle
    if field == "max_aspect":
        return rounded_up(Fraction(high))
    return rounded_down(Fraction(low)) if low else 0.0
