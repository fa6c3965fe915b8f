"""From a budget to its answer: the best design, others worth knowing, and what gave way.

Every design is counted again by the manifest before it is shown. No design at all is an answer too:
`InfeasibleBudget`, with a certificate.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from glassformer.spec.budget import (
    Answer,
    Budget,
    Design,
    Exact,
    Free,
    Target,
    Wish,
    build_spec,
)
from glassformer.spec.infeasible import InfeasibleBudget, certificate
from glassformer.spec.manifest import manifest
from glassformer.spec.search import Found, Search

#: How far the alternatives that are best at one thing may leave the wishes.
RATIO_REACH, GLU_REACH = 0.05, 0.15
#: The same for a ratio that any rank can meet.
RANKED_REACH = 0.01
#: A ratio this far off is not worth wishing for.
FAR = 0.1
#: Where a wish is free: how far, as a factor, they may leave the best design's own shape.
ASPECT_REACH, EXPANSION_REACH = 2.0, 0.5


def solve(budget: Budget, *, alternatives: bool = True) -> Answer:
    """The answer to a budget; raises `InfeasibleBudget` where there is none."""
    found = Search(budget).best()
    if found is None:
        raise InfeasibleBudget(certificate(budget))
    best = design_of("best", budget, found)
    others = tuple(_distinct(best, _alternatives(budget, best))) if alternatives else ()
    return Answer(budget=budget, best=best, alternatives=others, gave_way=_gave_way(budget, best))


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


def _alternatives(budget: Budget, best: Design) -> Iterator[Design]:
    """Best at one thing each; those that the limits leave no room for are not there."""
    near = Search(_near(budget, best))
    yield from _named("exact total", budget, near.closest(budget.total))
    if isinstance(budget.embedding_ratio, Target):
        exact = replace(budget, embedding_ratio=Exact(value=budget.embedding_ratio.value))
        yield from _named("exact ratio", budget, Search(exact).best())
    if isinstance(budget.glu_expansion, Target):
        exact = replace(budget, glu_expansion=Exact(value=budget.glu_expansion.value))
        yield from _named("exact expansion", budget, Search(exact).best())
    yield from _friendly(budget)
    yield from _named("deepest", budget, near.deepest())
    yield from _named("widest", budget, near.widest())


def _named(name: str, budget: Budget, found: Found | None) -> Iterator[Design]:
    if found is not None:
        yield design_of(name, budget, found)


def _friendly(budget: Budget) -> Iterator[Design]:
    """d_model and d_ff in the largest power of two that the budget admits."""
    for multiple in (64, 32, 16, 8):
        rounded = replace(
            budget,
            width_multiple=math.lcm(multiple, budget.width_multiple),
            ffn_multiple=math.lcm(multiple, budget.ffn_multiple),
        )
        found = Search(rounded).best()
        if found is not None:
            yield design_of(f"multiples of {multiple}", budget, found)
            return


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
