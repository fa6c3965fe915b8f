"""Budgets without an answer: which bound fails, by how much, and the nearest change that works.

Loosening a limit only adds designs, so the total, the tolerance or a limit that would work is
found by bisection. A vocabulary, a length, a rank or a number of heads is tried outwards from the
requested one: one by one while near, then in growing steps and back by bisection. Every value that
is named was found to work; if the effort ran out, `unproven` says that a nearer one may work too.

If a search ends before it found a design or a proof that there is none, the result is `Undecided`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, assert_never

from glassformer.budget.counting import Widths, heads_of
from glassformer.budget.question import WISHES, Budget, Wish
from glassformer.budget.search import Effort, Found, Search
from glassformer.spec.checks import spec
from glassformer.spec.errors import CheckFailed, InputError, MachineError
from glassformer.spec.model import Learned
from glassformer.spec.options import options_of

#: Counts are searched up to this many times the requested total.
FAR = 1_000
#: Values this near are all tried, one by one.
NEAR = 16
#: One trial gets at most this fraction of the evaluations that its option has left.
TRY = 4
#: Limits are loosened up to this many times their value.
WIDEST = 1e6


@dataclass(frozen=True)
class Limit:
    """How an option that limits the designs is loosened.

    none: the value without a limit. values: the values in between. sign: the looser direction.
    """

    none: int | float | None
    values: Literal["divisors", "integers", "reals"]
    sign: Literal[-1, 1]


LIMITS = {
    "min_layers": Limit(1, "integers", -1),
    "max_layers": Limit(None, "integers", 1),
    "min_aspect": Limit(0.0, "reals", -1),
    "max_aspect": Limit(None, "reals", 1),
    "multiple": Limit(1, "divisors", -1),
    "ffn_multiple": Limit(1, "divisors", -1),
}


# --- the certificate ----------------------------------------------------------------------------


@spec
class Infeasible:
    """Why a budget has no answer; `nearest` has for each option a value that works, or None.

    For the options in `unproven`, a value nearer than the one named (or than none) may work.
    """

    budget: Budget
    bound: str
    why: str
    nearest: dict[str, Any]
    unproven: tuple[str, ...] = ()

    def changes(self) -> dict[str, dict[str, Any]]:
        """Return, for each option with a value that works, the options to set."""
        settings: dict[str, dict[str, Any]] = {}
        for name, value in self.nearest.items():
            if value is not None:
                settings[name] = {name: value}
                for exact, within in WISHES.values():
                    if name == within and getattr(self.budget, exact):
                        settings[name][exact] = False
        return settings

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as plain data, as `glass design --json` prints it."""
        certificate = {
            "why": self.why,
            "nearest": self.nearest,
            "unproven": list(self.unproven),
        }
        return {"infeasible": certificate}

    def text(self) -> str:
        """Return the reason and the changes that work, as options of the command line."""
        lines, changes = [f"infeasible: {self.why}"], self.changes()
        if changes:
            lines.append("any one of these changes alone makes it feasible:")
            for name, settings in changes.items():
                nearer = "  (a nearer one is not ruled out)" if name in self.unproven else ""
                lines.append(f"  {command_of(settings)}{nearer}")
        flags = {each.name: each.flag for each in options_of(Budget)}
        rest = [name for name in self.nearest if name not in changes]
        known = [flags[name] for name in rest if name not in self.unproven]
        if known:
            lines.append(f"changing only one of these does not help: {' '.join(known)}")
        unknown = [flags[name] for name in rest if name in self.unproven]
        if unknown:
            lines.append(f"not known for these, --thorough finds out: {' '.join(unknown)}")
        return "\n".join(lines)


def command_of(settings: dict[str, Any]) -> str:
    """Return a change of options as words of the command line; None drops an option."""
    options = {each.name: each for each in options_of(Budget)}
    words = []
    for name, value in settings.items():
        option = options[name]
        if value is None:
            words.append(f"without {option.flag}")
        elif option.typed is not bool:
            words.append(f"{option.flag} {show(value).replace(',', '')}")
        elif value != option.default:
            words.append(option.flag)
        elif len(settings) > 1:
            words.append(f"instead of {option.flag}")
        else:
            words.append(f"without {option.flag}")
    return (", " if None in settings.values() else " ").join(words)


def show(value: Any) -> str:
    """Return a value of the certificate as text."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


class InfeasibleBudget(CheckFailed):
    """No model keeps every limit of the budget; `certificate` says why, and what would work."""

    def __init__(self, certificate: Infeasible) -> None:
        works = [f"{k} {show(v)}" for k, v in certificate.nearest.items() if v is not None]
        hint = f"each of these alone would do: {', '.join(works)}" if works else ""
        super().__init__(f"infeasible: {certificate.why}", hint=hint)
        self.certificate = certificate


class Undecided(MachineError):
    """The search reached its limit before it found a design or a proof that there is none.

    `counts` are the nearest counts found, and `tolerance` the least that is known to work.
    """

    def __init__(self, budget: Budget, near: "Neighbours", *, evaluations: int) -> None:
        low, high = budget.bounds
        self.budget, self.counts = budget, near.counts
        self.tolerance = least_tolerance(budget, near)
        seen = f"; designs of {_listed(budget, near.counts)} were found" if near.counts else ""
        wider = "" if self.tolerance is None else f"; or a tolerance of {show(self.tolerance)}"
        super().__init__(
            f"undecided: {evaluations:,} evaluations found no design from {low:,} to {high:,} "
            f"parameters, and did not rule one out{seen}",
            hint=f"a thorough search has no limit{wider}",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what is known as plain data, as `glass design --json` prints it."""
        known = {"why": self.what, "counts": list(self.counts), "tolerance": self.tolerance}
        return {"undecided": known}


def undecided(budget: Budget, effort: Effort) -> Undecided:
    """Return the error for a search that found neither a design nor a proof."""
    evaluations = effort.spent
    return Undecided(budget, neighbours(budget, effort), evaluations=evaluations)


def certificate(budget: Budget, effort: Effort) -> Infeasible:
    """Return why there is no answer, and the nearest feasible change of each single option."""
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


# --- the reason ---------------------------------------------------------------------------------


def _reason(
    budget: Budget, near: "Neighbours", nearest: dict[str, Any], effort: Effort
) -> tuple[str, str]:
    low, high = budget.bounds
    widths = Widths(budget)
    width = next(d for d in range(widths.step, 2**31, widths.step) if heads_of(budget, d))
    table, smallest = widths.covered(width, widths.fixed_rank), widths.least_count(width)
    most = f"the {high:,} that the total and its tolerance allow"
    if table > high:
        tables = "embedding" if budget.tied or budget.ratio_covers == "input" else "embedding, head"
        return "embedding", (
            f"{budget.vocab:,} tokens at the narrowest width allowed, {width}, need "
            f"{table:,} parameters for the {tables} alone: {table - high:,} more than {most}"
        )
    if smallest > high:
        layers = "one layer" if budget.min_layers == 1 else f"{budget.min_layers} layers"
        return "total", (
            f"the smallest model, {layers} of width {width}, has {smallest:,} parameters: "
            f"{smallest - high:,} more than {most}"
        )
    for name, wish in (("embedding_ratio", budget.ratio), ("glu_expansion", budget.expansion)):
        within = nearest.get(WISHES[name][1])
        if wish is not None and wish.is_limited and within is not None:
            return name, _out_of_reach(budget, name, wish, within, effort)
    for name in LIMITS:
        if nearest.get(name) is not None:
            return name, (
                f"{name.replace('_', ' ')} {getattr(budget, name):g} leaves no design; "
                f"{show(nearest[name])} would"
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


def _out_of_reach(budget: Budget, name: str, wish: Wish, within: float, effort: Effort) -> str:
    """Return what the nearest design has instead, and how far that is from the wish."""
    found = Search(_with_limit(budget, name, within), effort=effort).best()
    is_ratio = name == "embedding_ratio"
    words = "an embedding ratio" if is_ratio else "a GLU expansion"
    if found is None:  # the effort is spent
        return f"{words} of {wish.value:g} is out of reach; within {show(within)} of it is not"
    value, wished = reached(found, name), f"{wish.value:.2%}" if is_ratio else f"{wish.value:g}"
    if wish.within is None:
        limit = f"exactly {wished}"
    else:
        limit = f"{wished} within {wish.within * 100:g} {'points' if is_ratio else '%'}"
    away = (
        f"{value:.2%}, {abs(value - wish.value) * 100:.2f} points away"
        if is_ratio
        else f"{value:.3f}, {abs(value / wish.value - 1):.2%} away"
    )
    return (
        f"{words} of {limit} is out of reach: of all designs within {budget.tolerance:.2%} of the "
        f"total, the nearest has {away}"
    )


def _listed(budget: Budget, counts: tuple[int, ...]) -> str:
    away = [(n, n / budget.params - 1) for n in counts]
    shares = (f"{x:+.2%}" if abs(x) >= 5e-5 else f"{n - budget.params:+,}" for n, x in away)
    return " and ".join(f"{n:,} ({share})" for n, share in zip(counts, shares, strict=True))


# --- counts outside the tolerance ---------------------------------------------------------------


@spec
class Neighbours:
    """The nearest counts found below and above a tolerance; if proven, none is nearer."""

    below: int | None
    above: int | None
    is_proven: bool

    @property
    def counts(self) -> tuple[int, ...]:
        """The counts that were found."""
        return tuple(count for count in (self.below, self.above) if count is not None)


def neighbours(budget: Budget, effort: Effort) -> Neighbours:
    """Return the nearest counts outside the tolerance that some design has."""
    low, high = budget.bounds
    return counts_around(budget, low - 1, high + 1, effort)


def counts_around(budget: Budget, most: int, least: int, effort: Effort) -> Neighbours:
    """Return the largest count up to `most` and the smallest from `least` that some design has."""
    below, least = None, max(1, least)
    under = Search(budget, low=1, high=most, effort=effort.share(2))
    if most >= 1:
        below = under.nearest(most)
    over = Search(budget, low=least, high=FAR * budget.params, effort=effort.share(1))
    above = over.nearest(least)
    return Neighbours(
        below=None if below is None else below.count,
        above=None if above is None else above.count,
        is_proven=under.is_proven and over.is_proven,
    )


def least_tolerance(budget: Budget, near: Neighbours) -> float | None:
    """Return the smallest tolerance that admits one of these counts, rounded up to four digits."""
    away = [abs(count - budget.params) for count in near.counts]
    if not away or min(away) >= budget.params:
        return None
    return rounded(Fraction(max(1, min(away)), budget.params), math.ceil)


def rounded(share: Fraction, way: Callable[[Fraction], int]) -> float:
    """Round to four digits, with `math.floor` down or with `math.ceil` up."""
    unit = Fraction(10) ** (math.floor(math.log10(share)) - 3)
    return float(way(share / unit) * unit)


# --- the nearest change of each option ----------------------------------------------------------


class Probe:
    """Trials of other values of an option; `is_proven` until a trial is left undecided.

    `found` is the design of the last value that worked.
    """

    def __init__(self, budget: Budget, effort: Effort) -> None:
        self.budget, self.effort = budget, effort
        self.is_proven = True
        self.found: Found | None = None

    def works(self, options: dict[str, Any], *, parts: int = TRY) -> bool:
        """Return True if a design was found with these options changed.

        A trial gets one of `parts` shares of the evaluations that are left.
        """
        try:
            budget = replace(self.budget, **options)
        except InputError:  # a value that breaks a rule together with the others
            return False
        search = Search(budget, effort=self.effort.share(parts))
        found = search.first()
        self.found = found or self.found
        self.is_proven &= search.is_proven
        return found is not None


@spec
class Change:
    """A value with which an option alone makes the budget feasible; None if none was found."""

    name: str
    value: Any
    is_proven: bool


#: Returns values that work, by option.
Trial = Callable[[Probe], dict[str, Any]]


def changes(budget: Budget, near: Neighbours, effort: Effort) -> Iterator[Change]:
    """Yield the nearest value that works of every option that could make the budget feasible."""
    total = Probe(budget, effort.share(2))
    value = nearest_total(total, near)
    yield Change(name="params", value=value, is_proven=near.is_proven and total.is_proven)
    tolerance = least_tolerance(budget, near)
    yield Change(name="tolerance", value=tolerance, is_proven=near.is_proven)
    found = []
    for trial in reversed(list(_trials(budget))):  # the last ones take few evaluations
        probe = Probe(budget, effort.share(2))
        values = trial(probe).items()
        found.append([Change(name=n, value=v, is_proven=probe.is_proven) for n, v in values])
    yield from itertools.chain(*reversed(found))


def _trials(budget: Budget) -> Iterator[Trial]:
    yield lambda probe: {"vocab": _outwards(probe, "vocab", most=2 * budget.params)}
    if budget.heads != "any":
        yield lambda probe: {"heads": _outwards(probe, "heads", most=256)}
    if isinstance(budget.position_part, Learned):
        yield lambda probe: {"length": _outwards(probe, "length", most=2 * budget.params)}
    yield lambda probe: _single(probe, "tied", not budget.tied)
    if budget.heads != "any" and not budget.free_head_width:
        yield lambda probe: _single(probe, "free_head_width", True)
    if budget.experts is not None:
        yield lambda probe: {"experts": _outwards(probe, "experts", most=1024)}
    if isinstance(budget.rank, int):
        yield lambda probe: {"rank": _outwards(probe, "rank", most=10**6)}
    elif budget.rank is None and budget.ratio is not None:
        yield lambda probe: _single(probe, "rank", "any")
    if budget.ratio is not None and budget.ratio.is_limited:
        yield lambda probe: wish_in_reach(probe, "embedding_ratio")
    if budget.expansion is not None and budget.expansion.is_limited:
        yield lambda probe: wish_in_reach(probe, "glu_expansion")
    for name, limit in LIMITS.items():
        if getattr(budget, name) not in (None, limit.none):
            yield functools.partial(_loosened, name=name)


def nearest_total(probe: Probe, near: Neighbours) -> int | None:
    """Return the nearest total whose tolerance admits one of these counts."""
    budget, totals = probe.budget, []
    tolerance = Fraction(repr(budget.tolerance))
    if near.below is not None:
        totals.append((math.floor(near.below / (1 - tolerance)), near.below))
    if near.above is not None:
        totals.append((math.ceil(near.above / (1 + tolerance)), near.above))

    def works(total: int, count: int) -> bool:
        low, high = replace(budget, params=total).bounds
        return low <= count <= high or probe.works({"params": total})

    found = [total for total, count in totals if total >= 1 and works(total, count)]
    return min(found, key=lambda total: (abs(total - budget.params), total), default=None)


def _single(probe: Probe, name: str, value: Any) -> dict[str, Any]:
    """Try the only other value there is."""
    return {name: value if probe.works({name: value}, parts=1) else None}


def _outwards(probe: Probe, name: str, *, most: int) -> int | None:
    """Return the nearest whole number that works, the smaller of two equally near."""
    start = int(getattr(probe.budget, name))
    for away in range(1, NEAR + 1):
        for value in (start - away, start + away):
            if 1 <= value <= most and probe.works({name: value}):
                return value

    def first(sign: int, farthest: int) -> int | None:
        def works(away: int) -> bool:
            return probe.works({name: start + sign * away})

        return _first(works, NEAR + 1, most=farthest, is_monotone=False)

    down, up = first(-1, start - 1), first(1, most - start)
    found = [(away, sign) for away, sign in ((down, -1), (up, 1)) if away is not None]
    return start + math.prod(min(found)) if found else None


def _first(
    works: Callable[[int], bool], start: int, *, most: int, is_monotone: bool = True
) -> int | None:
    """Return the first number from `start` that works: growing steps, then bisection.

    If the numbers that work are not one unbroken range, the result is the first of some range.
    """
    if start > most or (is_monotone and not works(most)):
        return None
    bad, good = start - 1, start
    while not works(good):
        if good >= most:
            return None
        bad, good = good, min(most, good + max(1, good // (1 if is_monotone else 10)))
    while good - bad > 1:
        middle = (bad + good) // 2
        if works(middle):
            good = middle
        else:
            bad = middle
    return good


def _with_limit(budget: Budget, name: str, within: float | None) -> Budget:
    """Return the budget with a wish that has this limit instead of its own."""
    exact, limit = WISHES[name]
    changed: dict[str, Any] = {exact: False, limit: within}
    return replace(budget, **changed)


def wish_in_reach(probe: Probe, name: str) -> dict[str, float | None]:
    """Return the nearest value of a limited wish that works, and the least limit around its own.

    An exact wish has no limit of its own: the returned one would replace `exact`.
    """
    budget, (exact, limit) = probe.budget, WISHES[name]
    wish = budget.ratio if name == "embedding_ratio" else budget.expansion
    assert wish is not None

    def reaches(within: float | None) -> bool:
        return probe.works({exact: False, limit: within})

    low, high = 0.0, 1e-6
    if not reaches(None):
        return {name: None, limit: None}
    while not reaches(high):
        low, high = high, high * 2
        if high > WIDEST:
            return {name: None, limit: None}
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    within = rounded(Fraction(high), math.ceil)
    if wish.within is None:
        search = Search(_with_limit(budget, name, within), effort=probe.effort.share(2))
        found = search.best() or probe.found
        assert found is not None
        values = [round(reached(found, name), 6)]
    else:
        # A relative limit moves with the value, hence the second factor.
        scale = wish.value if name == "glu_expansion" else 1.0
        more = (within - wish.within) * scale
        values = [round(wish.value + more, 6), round(wish.value - more, 6)]
    working = (value for value in values if probe.works({name: value}))
    return {name: next(working, None), limit: within}


def reached(found: Found, name: str) -> float:
    """Return the ratio, or the expansion, of a design."""
    if name == "embedding_ratio":
        return found.frame.covered / found.count
    return found.d_ff / found.frame.d_model


def _loosened(probe: Probe, *, name: str) -> dict[str, Any]:
    return {name: loosened(probe, name)}


def loosened(probe: Probe, name: str) -> int | float | None:
    """Return the nearest looser value of a limit that works."""
    limit, value = LIMITS[name], getattr(probe.budget, name)

    def works(value: int | float | None) -> bool:
        return probe.works({name: value})

    if not works(limit.none):
        return None
    match limit.values:
        case "divisors":
            divisors = (m for m in range(value - 1, 0, -1) if value % m == 0)
            return next((m for m in divisors if works(m)), 1)
        case "integers":
            most = value - 1 if limit.sign < 0 else 10**9 - value
            away = _first(lambda away: works(value + limit.sign * away), 1, most=most)
            return limit.none if away is None else int(value + limit.sign * away)
        case "reals":
            bad, good = value, 0.0 if limit.sign < 0 else 2 * value
            while good and not works(good):
                bad, good = good, good * 2
                if good > WIDEST * value:
                    return None
            for _ in range(20):
                middle = (bad + good) / 2
                bad, good = (bad, middle) if works(middle) else (middle, good)
            way = math.floor if limit.sign < 0 else math.ceil
            return rounded(Fraction(good), way) if good else 0.0
        case _ as unreachable:
            assert_never(unreachable)
