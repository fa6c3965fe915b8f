"""The answer to a budget: the best design, alternatives, and the wishes not fully met.

Every design is counted again by the manifest before it is shown. If there is no design, the result
is `InfeasibleBudget`, with a certificate.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from glassformer.budget.answer import Answer, Design
from glassformer.budget.infeasible import (
    InfeasibleBudget,
    Undecided,
    certificate,
    counts_around,
    least_tolerance,
    undecided,
)
from glassformer.budget.question import Budget, build_spec
from glassformer.budget.search import GLU_UNIT, RATIO_UNIT, Effort, Found, Search, Stop
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import active, manifest
from glassformer.spec.schemes import Int4
from glassformer.spec.units import parse_share

#: Evaluations for one budget, about half a second, and for its best design.
EVALUATIONS, BEST_EVALUATIONS = 60_000, 40_000
#: Evaluations for one design of a landscape.
LANDSCAPE_EVALUATIONS = 12_000
#: The wishes of a landscape: embedding ratios and GLU expansions.
RATIOS = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6)
EXPANSIONS = (1.5, 2.0, 2.66, 3.0, 3.5, 4.0, 5.0)
#: Multiples of d_model and d_ff that hardware likes.
MULTIPLES = (64, 32, 16, 8)
#: How far the alternatives "exact total", "deepest" and "widest" may be from the wishes.
RATIO_REACH, GLU_REACH = 0.05, 0.15
#: The same for a ratio that any rank can meet.
RANKED_REACH = 0.01
#: How far, as a factor, they may be from the best design's own shape where a wish is free.
ASPECT_REACH = 2.0
#: The drift of the ratio from which on the answer suggests dropping the wish.
FAR = 0.1
#: Widths are multiples that int4 takes if that adds at most this drift: FAR, in units.
ROUNDING = FAR / RATIO_UNIT
NEARER = "a nearer one, or a better one as near, is not ruled out"
NOT_FOUND = "none was found, which does not rule one out"


def ask(options: dict[str, Any], effort: Effort) -> Budget:
    """Build a budget from options by name; the refusal of a tolerance of 0 names one that works."""
    tolerance = options.get("tolerance")
    if tolerance is None or parse_share("tolerance", tolerance) != 0.0:
        return Budget.from_options(options)
    budget = Budget.from_options({**options, "tolerance": Budget().tolerance})
    counts = counts_around(budget, budget.params, budget.params, effort)
    near = least_tolerance(budget, counts)
    raise InputError(
        "a tolerance of 0 asks for one number, which whole sizes rarely meet",
        hint=("the nearest that works here is " if counts.is_proven else "one that works is ")
        + ("0.5%" if near is None else f"{(Decimal(repr(near)) * 100).normalize():f}%"),
    )


def solve(
    budget: Budget,
    *,
    alternatives: bool = True,
    thorough: bool = False,
    stop: Stop | None = None,
) -> Answer:
    """Return the answer to a budget; raise `InfeasibleBudget` if there is none.

    The search ends after a number of evaluations, and the answer says what is then not proven;
    `Undecided` is raised if it found nothing by then. A thorough search has no limit. `stop` is
    called at every evaluation; once it returns True, `SearchStopped` is raised.
    """
    effort = Effort(math.inf if thorough else EVALUATIONS, stop=stop)
    search = Search(
        budget, effort=Effort(math.inf if thorough else BEST_EVALUATIONS, parent=effort)
    )
    found = search.best()
    if found is None and not search.is_proven:
        quick = Search(budget, effort=effort.share(2))
        found = quick.first()
        if found is None and not quick.is_proven:
            raise undecided(budget, effort)
    if found is None:
        raise InfeasibleBudget(certificate(budget, effort))
    asked = budget
    nearest = _design("nearest to the wishes", budget, found)
    budget, search, found, not_proven = _settled(budget, search, found, effort)
    best = _design("best", budget, found)
    if not search.is_proven:
        not_proven.append(_not_best(found, search.least))
    others: tuple[Design, ...] = ()
    if alternatives:
        candidates = _with_nearest(tuple(_alternatives(budget, asked, best, effort)), best)
        others = tuple(_distinct(best, candidates))
        not_proven += [f"{each.name}: {each.unproven}" for each in candidates if each.unproven]
    return Answer(
        budget=asked,
        best=best,
        alternatives=others,
        gave_way=_gave_way(budget, asked, best, nearest),
        not_proven=tuple(not_proven),
    )


def _settled(
    budget: Budget, search: Search, found: Found, effort: Effort
) -> tuple[Budget, Search, Found, list[str]]:
    """Choose what was left open: a usual shape if any design has one, then the multiple."""
    doubts = []
    if budget.prefers_usual_shape:
        usual = budget.in_usual_shape()
        other = Search(usual, effort=effort.share(2))
        better = other.best()
        if better is not None:
            budget, search, found = usual, other, better
        elif not other.is_proven:
            doubts.append(f"a usual d_model / layers: {NOT_FOUND}")
    if budget.is_open:
        budget, search, found, more = _rounded(budget, search, found, effort)
        doubts += more
    return budget, search, found, doubts


def _rounded(
    budget: Budget, search: Search, found: Found, effort: Effort
) -> tuple[Budget, Search, Found, list[str]]:
    """Choose the multiple that was left open: the one that int4 needs, if a design is near."""
    rounded = budget.in_multiples(Int4.multiple)
    other = Search(rounded, effort=effort.share(2))
    better = other.best()
    if better is not None and better.drift <= found.drift + ROUNDING:
        return rounded, other, better, []
    doubt = f"widths in multiples of {Int4.multiple}: {NOT_FOUND}"
    return budget, search, found, [] if other.is_proven else [doubt]


def best_design(budget: Budget, *, effort: Effort) -> Design | None:
    """Return the best design alone, None if it is proven that there is none.

    Raise `Undecided` if none was found and none ruled out.
    """
    search = Search(budget, effort=effort)
    found = search.best()
    if found is None and not search.is_proven:
        raise undecided(budget, Effort(0))
    if found is not None:
        budget, _, found, _ = _settled(budget, search, found, effort)
    return None if found is None else _design("best", budget, found)


def _not_best(found: Found, least: float) -> str:
    return (
        f"best: nothing left unopened drifts less than {least:.3g}, and this one {found.drift:.3g} "
        "(1 is a point of the ratio, or 5% of the expansion)"
    )


def _design(
    name: str, budget: Budget, found: Found, options: dict[str, Any] | None = None
) -> Design:
    """Build a design's spec and count it by the manifest."""
    sizes = found.frame.sizes(found.n_layers, found.d_ff)
    model = build_spec(budget, sizes)
    # All layers are equal: one is counted, however many there are.
    one = manifest(build_spec(budget, replace(sizes, n_layers=1)))
    parameters = [p for p in one if p.tied_to is None]
    params = sum(p.size * (1 if p.layer is None else sizes.n_layers) for p in parameters)
    block = model.decoder.block()
    idle = sum(p.size for p in parameters if p.layer is not None and not active(block, p))
    low, high = budget.bounds
    assert params == found.frame.count(found.n_layers, found.d_ff)
    assert low <= params <= high
    table = sum(p.size for p in parameters if p.role == "embedding")
    head = sum(p.size for p in parameters if p.role == "head")
    covered = table + head if budget.ratio_covers == "both" else table
    ratio, glu = budget.ratio, budget.expansion
    expansion = sizes.d_ff / sizes.d_model
    return Design(
        name=name,
        sizes=sizes,
        spec=model,
        target=budget.params,
        params=params,
        active_params=params - sizes.n_layers * idle,
        embedding_ratio=covered / params,
        input_ratio=table / params,
        ratio_drift=None if ratio is None else covered / params - ratio.value,
        glu_drift=None if glu is None else expansion / glu.value - 1.0,
        tied=budget.tied,
        options=options or {},
    )


# --- the landscape ------------------------------------------------------------------------------


def drift(design: Design) -> float:
    """Return the drift from both wishes; 1 is a point of the ratio, or 5 % of the expansion."""
    return abs(design.ratio_drift or 0.0) / RATIO_UNIT + abs(design.glu_drift or 0.0) / GLU_UNIT


def neighbour(
    budget: Budget, ratio: float, expansion: float, *, stop: Stop | None = None
) -> Design | None:
    """Return the best design of the same budget with two other wishes, None if there is none.

    Raise `Undecided` if the search reached its limit, and `SearchStopped` if `stop` ended it.
    """
    wished = replace(
        budget,
        embedding_ratio=ratio,
        exact_ratio=False,
        ratio_within=None,
        glu_expansion=expansion,
        exact_expansion=False,
        glu_within=None,
    )
    return best_design(wished, effort=Effort(LANDSCAPE_EVALUATIONS, stop=stop))


def landscape(budget: Budget) -> list[list[Design | None]]:
    """Return the best design for each pair of wishes: a row per expansion, a column per ratio.

    None where a hard limit admits none, or where the search reached its limit.
    """

    def cell(ratio: float, expansion: float) -> Design | None:
        try:
            return neighbour(budget, ratio, expansion)
        except Undecided:
            return None

    return [[cell(ratio, expansion) for ratio in RATIOS] for expansion in EXPANSIONS]


# --- alternatives -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """An alternative, if one was found, and what the search for it left open."""

    name: str
    design: Design | None
    unproven: str


@dataclass(frozen=True)
class Goal:
    """What an alternative is best at: how it is searched for, and what may be left unproven.

    `options` are those that request it by itself.
    """

    name: str
    budget: Budget
    search: Callable[[Search], Found | None]
    doubt: str
    options: dict[str, Any]


def _alternatives(
    budget: Budget, asked: Budget, best: Design, effort: Effort
) -> Iterator[Candidate]:
    """Yield alternatives that are best at one thing each, as far as the limits admit them."""
    goals = list(_goals(budget, asked, best))
    for left, goal in zip(range(len(goals), 0, -1), goals, strict=True):
        if goal.name == "deepest":
            yield from _friendly(budget, effort.share(2))
        search = Search(goal.budget, effort=effort.share(left))
        found = goal.search(search)
        made = None if found is None else _design(goal.name, budget, found, goal.options)
        doubt = goal.doubt if found is not None else NOT_FOUND
        yield Candidate(goal.name, made, "" if search.is_proven else doubt)


def _goals(budget: Budget, asked: Budget, best: Design) -> Iterator[Goal]:
    near, target = _near(budget, best), budget.params
    better = "a better one is not ruled out"
    yield Goal("exact total", near, lambda search: search.closest(target), NEARER, {})
    for name, wish, option in (
        ("exact ratio", budget.ratio, "exact_ratio"),
        ("exact expansion", budget.expansion, "exact_expansion"),
    ):
        if wish is not None and not wish.exact:
            within = {"exact_ratio": "ratio_within", "exact_expansion": "glu_within"}[option]
            changed: dict[str, Any] = {option: True, within: None}
            wished = _any_shape(budget, asked) if option == "exact_ratio" else budget
            yield Goal(name, replace(wished, **changed), Search.best, better, {option: True})
    if budget.multiple != asked.multiple:
        any_width = replace(budget, multiple=1, ffn_multiple=asked.ffn_multiple)
        yield Goal("any width", any_width, Search.best, better, {"multiple": 1})
    yield Goal("deepest", near, Search.deepest, "a deeper one is not ruled out", {})
    yield Goal("widest", near, Search.widest, "a wider one is not ruled out", {})


def _any_shape(budget: Budget, asked: Budget) -> Budget:
    """Return the budget with the limits of the shape that were requested, and no others."""
    limits = ("min_aspect", "max_aspect", "min_layers")
    return replace(budget, **{name: getattr(asked, name) for name in limits})


def _friendly(budget: Budget, effort: Effort) -> Iterator[Candidate]:
    """Yield the best design with d_model and d_ff in the largest multiple that is feasible."""
    doubt = ""
    for multiple in MULTIPLES:
        search = Search(budget.in_multiples(multiple), effort=effort.share(2))
        found, name = search.best(), f"multiples of {multiple}"
        if not search.is_proven:
            doubt = doubt or f"a better one of multiples of {multiple} is not ruled out"
        if found is not None:
            yield Candidate(name, _design(name, budget, found, {"multiple": multiple}), doubt)
            return
    if doubt:
        yield Candidate("multiples", None, NOT_FOUND)


def _near(budget: Budget, best: Design) -> Budget:
    """Return the budget with limits, so that "deepest" is not a thousand layers of width 8."""
    changed: dict[str, Any] = {}
    if budget.ratio is None or budget.rank == "any":
        most = math.inf if budget.max_aspect is None else budget.max_aspect
        changed["min_aspect"] = max(budget.min_aspect, best.aspect / ASPECT_REACH)
        changed["max_aspect"] = min(most, best.aspect * ASPECT_REACH)
    if budget.ratio is not None and not budget.exact_ratio:
        reach = RANKED_REACH if budget.rank == "any" else RATIO_REACH
        changed["ratio_within"] = min(budget.ratio_within or reach, reach)
    if budget.expansion is None:
        changed |= {"glu_expansion": best.glu_expansion, "glu_within": GLU_REACH}
    elif not budget.exact_expansion:
        changed["glu_within"] = min(budget.glu_within or GLU_REACH, GLU_REACH)
    return replace(budget, **changed)


def _with_nearest(candidates: tuple[Candidate, ...], best: Design) -> tuple[Candidate, ...]:
    """Replace an exact total that is not proven by the nearest of all designs that were found."""
    total, *others = candidates
    if not total.unproven:
        return candidates
    made = [*(each.design for each in candidates if each.design is not None), best]
    nearest = min(made, key=lambda design: abs(design.params - design.target))
    return (Candidate(total.name, nearest.renamed(total.name), NEARER), *others)


def _distinct(best: Design, candidates: tuple[Candidate, ...]) -> Iterator[Design]:
    """Yield each design once, under all of its names; the best one is not repeated."""
    equal: dict[object, list[Design]] = {}
    for candidate in candidates:
        if candidate.design is not None and candidate.design.sizes != best.sizes:
            equal.setdefault(candidate.design.sizes, []).append(candidate.design)
    for designs in equal.values():
        options = next((each.options for each in designs if each.options), {})
        names = ", ".join(each.name for each in designs)
        yield replace(designs[0], name=names, options=options)


# --- wishes that gave way -----------------------------------------------------------------------


def _gave_way(budget: Budget, asked: Budget, best: Design, nearest: Design) -> tuple[str, ...]:
    lines = []
    ratio, glu, sizes = budget.ratio, budget.expansion, best.sizes
    is_shaped = asked.prefers_usual_shape and budget.max_aspect != asked.max_aspect
    if ratio is not None and best.ratio_drift is not None and abs(best.ratio_drift) >= 5e-5:
        source = "usual" if asked.embedding_ratio == "usual" else "requested"
        lines.append(
            f"embedding ratio: {source} {ratio.value:.2%}, got {best.embedding_ratio:.2%} "
            f"({best.ratio_drift * 100:+.2f} points)"
        )
        if is_shaped and not budget.min_aspect <= nearest.aspect <= (budget.max_aspect or math.inf):
            layers = f"{nearest.sizes.n_layers} layer{'s' if nearest.sizes.n_layers > 1 else ''}"
            lines[-1] += (
                f", for a usual shape; requesting {ratio.value:g} gives {layers} of width "
                f"{nearest.sizes.d_model}"
            )
        elif abs(best.ratio_drift) > FAR:
            lines[-1] += "; 'free' would drop this wish"
    if glu is not None and best.glu_drift is not None:
        wished, step = glu.value * sizes.d_model, budget.ffn_step
        if abs(sizes.d_ff - wished) > step / 2:
            lines.append(
                f"GLU expansion: requested {glu.value:g}, got {best.glu_expansion:.3f} "
                f"({best.glu_drift:+.1%}), d_ff {sizes.d_ff} instead of "
                f"{round(wished / step) * step}"
            )
    if lines and budget.multiple != asked.multiple:
        lines.append(
            f"widths are multiples of {budget.multiple}, so that int4 can hold the weights; "
            "multiple 1 is nearer, without int4 ('any width')"
        )
    return tuple(lines)
