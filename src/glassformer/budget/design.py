"""From a budget to its answer: the best design, others worth knowing, and what gave way.

Every design is counted again by the manifest before it is shown. No design at all is an answer too:
`InfeasibleBudget`, with a certificate.

`design`: a parameter budget in numbers as people write them, and its answer.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal

from glassformer.budget.effort import Effort
from glassformer.budget.infeasible import InfeasibleBudget, certificate, undecided
from glassformer.budget.question import (
    Answer,
    Budget,
    Design,
    Exact,
    Free,
    Target,
    Wish,
    build_spec,
)
from glassformer.budget.relaxation import counts_around, least_tolerance
from glassformer.budget.search import Found, Search
from glassformer.spec.checks import one_of
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import manifest
from glassformer.spec.model import (
    ALiBi,
    Bias,
    LayerNorm,
    Learned,
    NoPosition,
    Norm,
    Position,
    RMSNorm,
    Rotary,
    Sinusoidal,
)
from glassformer.spec.units import parse_count, parse_share

#: Looks for one question, about half a second of them, and for its best design.
LOOKS, BEST_LOOKS = 60_000, 40_000
#: What is not known of an exact total.
NEARER = "a nearer one, or a better one as near, is not ruled out"
#: What hardware likes d_model and d_ff to be multiples of.
MULTIPLES = (64, 32, 16, 8)
#: How far the alternatives that are best at one thing may leave the wishes.
RATIO_REACH, GLU_REACH = 0.05, 0.15
#: The same for a ratio that any rank can meet.
RANKED_REACH = 0.01
#: A ratio this far off is not worth wishing for.
FAR = 0.1
#: Where a wish is free: how far, as a factor, they may leave the best design's own shape.
ASPECT_REACH, EXPANSION_REACH = 2.0, 0.5


def solve(budget: Budget, *, alternatives: bool = True, thorough: bool = False) -> Answer:
    """The answer to a budget; raises `InfeasibleBudget` where there is none.

    A search ends after so many looks, and its answer tells what is then not proven; `Undecided`
    where nothing was found by then. A thorough one goes on to the end.
    """
    effort = Effort() if thorough else Effort(LOOKS)
    search = Search(budget, effort=Effort(math.inf if thorough else BEST_LOOKS, whole=effort))
    found = search.best()
    if found is None and not search.is_proven:
        quick = Search(budget, effort=effort.share(2))
        found = quick.first()
        if found is None and not quick.is_proven:
            raise undecided(budget, effort)
    if found is None:
        raise InfeasibleBudget(certificate(budget, effort))
    best = design_of("best", budget, found)
    open_ends = [] if search.is_proven else [_not_best(found, search.least)]
    others: tuple[Design, ...] = ()
    if alternatives:
        sought = _with_nearest(tuple(_alternatives(budget, best, effort)), best)
        others = tuple(_distinct(best, (each.design for each in sought if each.design)))
        open_ends += [f"{each.name}: {each.unproven}" for each in sought if each.unproven]
    return Answer(
        budget=budget,
        best=best,
        alternatives=others,
        gave_way=_gave_way(budget, best),
        not_proven=tuple(open_ends),
    )


def _not_best(found: Found, least: float) -> str:
    """What is known of the designs that were not looked at."""
    return (
        f"best: nothing left unopened drifts less than {least:.3g}, and this one {found.drift:.3g} "
        "(1 is a point of the ratio, or 5% of the expansion)"
    )


def design_of(name: str, budget: Budget, found: Found) -> Design:
    """What was found, built as a spec and counted by the manifest."""
    sizes = found.frame.sizes(found.n_layers, found.d_ff)
    model = build_spec(budget, sizes)
    # Every layer is the same one: a hundred thousand of them are counted as fast as one.
    one = manifest(build_spec(budget, replace(sizes, n_layers=1)))
    parameters = [p for p in one if p.tied_to is None]
    params = sum(p.size * (1 if p.layer is None else sizes.n_layers) for p in parameters)
    low, high = budget.bounds
    assert params == found.frame.count(found.n_layers, found.d_ff)
    assert low <= params <= high
    table = sum(p.size for p in parameters if p.role == "embedding")
    head = sum(p.size for p in parameters if p.role == "head")
    covered = table + head if budget.ratio_covers == "both" else table
    ratio, glu = budget.embedding_ratio, budget.glu_expansion
    expansion = sizes.d_ff / sizes.d_model
    return Design(
        name=name,
        sizes=sizes,
        spec=model,
        target=budget.total,
        params=params,
        embedding_ratio=covered / params,
        input_ratio=table / params,
        ratio_drift=None if isinstance(ratio, Free) else covered / params - ratio.value,
        glu_drift=None if isinstance(glu, Free) else expansion / glu.value - 1.0,
    )


# --- alternatives -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sought:
    """An alternative, if there is one, and what the search for it has left open."""

    name: str
    design: Design | None
    unproven: str


#: A search that is to be done, and what is not known if it ends too early.
Seek = tuple[str, Budget, Callable[[Search], Found | None], str]


def _alternatives(budget: Budget, best: Design, effort: Effort) -> Iterator[Sought]:
    """Best at one thing each; those that the limits leave no room for are not there."""
    seeks = list(_seeks(budget, best))
    for left, (name, asked, seek, doubt) in zip(range(len(seeks), 0, -1), seeks, strict=True):
        if name == "deepest":
            yield from _friendly(budget, effort.share(2))
        search = Search(asked, effort=effort.share(left))
        found = seek(search)
        made = None if found is None else design_of(name, budget, found)
        if search.is_proven:
            doubt = ""
        elif found is None:
            doubt = "none was found, which does not rule one out"
        yield Sought(name, made, doubt)


def _with_nearest(sought: tuple[Sought, ...], best: Design) -> tuple[Sought, ...]:
    """An exact total that was not proven is at least the nearest of all that were found."""
    total, *others = sought
    if not total.unproven:
        return sought
    made = [*(each.design for each in sought if each.design is not None), best]
    nearest = min(made, key=lambda design: abs(design.params - design.target))
    design = nearest.renamed(total.name)
    return (Sought(total.name, design, NEARER), *others)


def _seeks(budget: Budget, best: Design) -> Iterator[Seek]:
    near, target = _near(budget, best), budget.total
    better = "a better one is not ruled out"
    yield "exact total", near, lambda search: search.closest(target), NEARER
    ratio, glu = budget.embedding_ratio, budget.glu_expansion
    if isinstance(ratio, Target):
        exact = replace(budget, embedding_ratio=Exact(value=ratio.value))
        yield "exact ratio", exact, Search.best, better
    if isinstance(glu, Target):
        exact = replace(budget, glu_expansion=Exact(value=glu.value))
        yield "exact expansion", exact, Search.best, better
    yield "deepest", near, Search.deepest, "a deeper one is not ruled out"
    yield "widest", near, Search.widest, "a wider one is not ruled out"


def _friendly(budget: Budget, effort: Effort) -> Iterator[Sought]:
    """d_model and d_ff in the largest power of two that the budget admits."""
    doubt = ""
    for multiple in MULTIPLES:
        rounded = replace(
            budget,
            width_multiple=math.lcm(multiple, budget.width_multiple),
            ffn_multiple=math.lcm(multiple, budget.ffn_multiple),
        )
        search = Search(rounded, effort=effort.share(2))
        found, name = search.best(), f"multiples of {multiple}"
        if not search.is_proven:
            doubt = doubt or f"a better one of multiples of {multiple} is not ruled out"
        if found is not None:
            yield Sought(name, design_of(name, budget, found), doubt)
            return
    if doubt:
        yield Sought("multiples", None, "none was found, which does not rule one out")


def _near(budget: Budget, best: Design) -> Budget:
    """The same budget with limits, so that "deepest" is not a thousand layers of width 8."""
    ratio, glu, low, high = (
        budget.embedding_ratio,
        budget.glu_expansion,
        budget.min_aspect,
        budget.max_aspect,
    )
    if isinstance(ratio, Free) or budget.rank == "any":
        low = max(low, best.aspect / ASPECT_REACH)
        high = min(math.inf if high is None else high, best.aspect * ASPECT_REACH)
    if isinstance(glu, Free):
        glu = Target(value=best.glu_expansion, within=EXPANSION_REACH)
    return replace(
        budget,
        embedding_ratio=_limited(ratio, RANKED_REACH if budget.rank == "any" else RATIO_REACH),
        glu_expansion=_limited(glu, GLU_REACH),
        min_aspect=low,
        max_aspect=high,
    )


def _limited(wish: Wish, within: float) -> Wish:
    if isinstance(wish, Target) and (wish.within is None or wish.within > within):
        return Target(value=wish.value, within=within)
    return wish


def _distinct(best: Design, designs: Iterator[Design]) -> Iterator[Design]:
    """Each design once, under all of its names; the best one is not repeated."""
    names: dict[object, list[str]] = {}
    first: dict[object, Design] = {}
    for design in designs:
        names.setdefault(design.sizes, []).append(design.name)
        first.setdefault(design.sizes, design)
    for sizes, design in first.items():
        if sizes != best.sizes:
            yield design.renamed(", ".join(names[sizes]))


# --- what gave way ------------------------------------------------------------------------------


def _gave_way(budget: Budget, best: Design) -> tuple[str, ...]:
    lines = []
    ratio, glu, sizes = budget.embedding_ratio, budget.glu_expansion, best.sizes
    if best.ratio_drift is not None and abs(best.ratio_drift) >= 5e-5:
        assert not isinstance(ratio, Free)
        lines.append(
            f"embedding ratio: asked {ratio.value:.2%}, got {best.embedding_ratio:.2%} "
            f"({best.ratio_drift * 100:+.2f} points)"
            + ("; 'free' would drop this wish" if abs(best.ratio_drift) > FAR else "")
        )
    if best.glu_drift is not None:
        assert not isinstance(glu, Free)
        multiple = budget.ffn_multiple
        if abs(sizes.d_ff - glu.value * sizes.d_model) > multiple / 2:
            lines.append(
                f"GLU expansion: asked {glu.value:g}, got {best.glu_expansion:.3f} "
                f"({best.glu_drift:+.1%}), d_ff {sizes.d_ff} instead of "
                f"{round(glu.value * sizes.d_model / multiple) * multiple}"
            )
    return tuple(lines)


POSITIONS: dict[str, Position] = {
    "learned": Learned(),
    "rotary": Rotary(),
    "sinusoidal": Sinusoidal(),
    "alibi": ALiBi(),
    "none": NoPosition(),
}
NORMS: dict[str, Norm] = {"layernorm": LayerNorm(), "rmsnorm": RMSNorm()}


def _wish(
    name: str, value: float | str, *, exact: bool, within: float | str | None, within_name: str
) -> Wish:
    if value == "free":
        if exact or within is not None:
            raise InputError(
                f"{name} is free, and yet limited", hint="give it a value, or drop the limit"
            )
        return Free()
    number = parse_share(name, value)
    if exact:
        if within is not None:
            raise InputError(f"{name} is exact, and {within_name} too", hint="give one of them")
        return Exact(value=number)
    return Target(value=number, within=None if within is None else parse_share(within_name, within))


def design(
    params: int | float | str,
    vocab: int | float | str,
    *,
    tolerance: float | str = 0.005,
    heads: int | Literal["any"] = 8,
    tied: bool = True,
    length: int = 512,
    position: str = "learned",
    bias: Bias = "none",
    norm: str = "layernorm",
    embedding_ratio: float | str = 0.35,
    exact_ratio: bool = False,
    ratio_within: float | str | None = None,
    ratio_covers: Literal["both", "input"] = "both",
    glu_expansion: float | str = 2.66,
    exact_expansion: bool = False,
    glu_within: float | str | None = None,
    multiple: int = 1,
    ffn_multiple: int | None = None,
    kv_heads: int | None = None,
    free_head_width: bool = False,
    rank: int | Literal["any"] | None = None,
    min_layers: int = 1,
    max_layers: int | None = None,
    min_aspect: float = 0.0,
    max_aspect: float | None = None,
    thorough: bool = False,
) -> Answer:
    """Solve a parameter budget: `design("10M", 16_000).spec` is a model of that size.

    Numbers may be texts (`"10M"`, `"0.5%"`); the ratio and the expansion may be `"free"`.
    A search ends after a while and says what it has not proven; a `thorough` one goes on.
    """
    one_of("position", position, POSITIONS)
    one_of("norm", norm, NORMS)
    budget = Budget(
        vocab_size=parse_count("vocab", vocab),
        total=parse_count("params", params),
        tolerance=_tolerance(tolerance),
        n_heads=None if heads == "any" else heads,
        tied=tied,
        max_seq_len=length,
        position=POSITIONS[position],
        bias=bias,
        norm=NORMS[norm],
        embedding_ratio=_wish(
            "embedding_ratio",
            embedding_ratio,
            exact=exact_ratio,
            within=ratio_within,
            within_name="ratio_within",
        ),
        glu_expansion=_wish(
            "glu_expansion",
            glu_expansion,
            exact=exact_expansion,
            within=glu_within,
            within_name="glu_within",
        ),
        ratio_covers=ratio_covers,
        width_multiple=multiple,
        ffn_multiple=multiple if ffn_multiple is None else ffn_multiple,
        n_kv_heads=kv_heads,
        free_head_width=free_head_width,
        rank=rank,
        min_layers=min_layers,
        max_layers=max_layers,
        min_aspect=min_aspect,
        max_aspect=max_aspect,
    )
    if parse_share("tolerance", tolerance) == 0.0:
        effort = Effort() if thorough else Effort(LOOKS)
        counts = counts_around(budget, budget.total, budget.total, effort)
        near = least_tolerance(budget, counts)
        raise InputError(
            "a tolerance of 0 asks for one number, which whole sizes rarely meet",
            hint=("the nearest that works here is " if counts.is_proven else "one that works is ")
            + ("0.5%" if near is None else f"{(Decimal(repr(near)) * 100).normalize():f}%"),
        )
    return solve(budget, thorough=thorough)


def _tolerance(tolerance: float | str) -> float:
    """As asked; 0 is let through to the door, which knows the nearest that works."""
    return parse_share("tolerance", tolerance) or 0.005
