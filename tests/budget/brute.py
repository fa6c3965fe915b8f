"""Every design of a small budget, one by one, from the rules as they are written in the docs.

A second opinion: its own count, its own limits, no search. Only for totals of a few thousand.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from glassformer.budget.question import Budget
from glassformer.budget.search import level
from glassformer.spec.model import LayerNorm, Learned, Rotary


@dataclass(frozen=True)
class Candidate:
    d_model: int
    n_heads: int
    d_head: int
    rank: int | None
    n_layers: int
    d_ff: int
    count: int
    covered: int
    next_covered: int


def decimal(value: float) -> Fraction:
    return Fraction(repr(value))


def covered(budget: Budget, d: int, rank: int | None) -> int:
    table = budget.vocab * d if rank is None else rank * (budget.vocab + d)
    head = 0 if budget.tied else budget.vocab * d
    return table + head if budget.ratio_covers == "both" else table


def outside(budget: Budget, d: int, rank: int | None) -> int:
    table = budget.vocab * d if rank is None else rank * (budget.vocab + d)
    head = 0 if budget.tied else budget.vocab * d
    places = budget.length * d if isinstance(budget.position_part, Learned) else 0
    return table + head + places + norm(budget, d)


def norm(budget: Budget, d: int) -> int:
    return 2 * d if isinstance(budget.norm_part, LayerNorm) else d


def block(budget: Budget, d: int, n_heads: int, d_head: int, f: int) -> int:
    q, kv = n_heads * d_head, (budget.kv_heads or n_heads) * d_head
    biases = {"none": 0, "qkv": q + 2 * kv, "all": q + 2 * kv + d, "no_key": q + kv + d}
    ffn = 3 * d * f + (2 * f + d if budget.bias in ("all", "no_key") else 0)
    if budget.experts is not None:
        ffn = (budget.experts + budget.shared_expert) * ffn + budget.experts * d
    return 2 * d * q + 2 * d * kv + biases[budget.bias] + ffn + 2 * norm(budget, d)


def heads(budget: Budget, d: int) -> list[tuple[int, int]]:
    even = isinstance(budget.position_part, Rotary)
    groups = budget.kv_heads or 1
    if budget.heads == "any":
        widths = range(16, 129) if d >= 16 else [d]
        pairs = [(d // h, h) for h in widths if d % h == 0 and d // h % groups == 0]
    elif budget.free_head_width:
        if d % 2:
            return []
        every = range(1, d + 4)
        pairs = [(budget.heads, h) for h in every if abs(h - Fraction(d, budget.heads)) <= 2]
    else:
        pairs = [(budget.heads, d // budget.heads)] if d % budget.heads == 0 else []
    return [(n, h) for n, h in pairs if not (even and h % 2)]


def step(budget: Budget, d: int) -> int:
    """The next width that the rules admit."""
    following = d + 1
    while following % budget.model_step or not heads_admit(budget, following):
        following += 1
    return following


def heads_admit(budget: Budget, d: int) -> bool:
    return bool(heads(budget, d)) if budget.heads != "any" else True


def candidates(budget: Budget, *, low: int, high: int) -> Iterator[Candidate]:
    """Every design with a count between the bounds that keeps every limit."""
    d = 0
    while outside(budget, d := d + 1, 1 if budget.rank == "any" else budget.rank) <= high:
        if d % budget.model_step:
            continue
        least = outside(budget, d, 1 if budget.rank == "any" else budget.rank)
        small = [
            (n, h)
            for n, h in heads(budget, d)
            if least + block(budget, d, n, h, budget.ffn_step) <= high
        ]
        ranks = range(1, d + 1) if budget.rank == "any" else [budget.rank]
        for rank in ranks if small else ():
            for n_heads, d_head in small:
                yield from _grown(budget, d, n_heads, d_head, rank, low, high)


def _grown(budget, d, n_heads, d_head, rank, low, high):
    share = covered(budget, d, rank)
    if budget.rank == "any":
        following = covered(budget, d, rank + 1)
    else:
        following = covered(budget, step(budget, d), rank)
    f = budget.ffn_step
    while outside(budget, d, rank) + block(budget, d, n_heads, d_head, f) <= high:
        for n_layers in range(budget.min_layers, (budget.max_layers or 10**6) + 1):
            count = outside(budget, d, rank) + n_layers * block(budget, d, n_heads, d_head, f)
            if count > high:
                break
            made = Candidate(d, n_heads, d_head, rank, n_layers, f, count, share, following)
            if count >= low and keeps(budget, made):
                yield made
        f += budget.ffn_step


def keeps(budget: Budget, made: Candidate) -> bool:
    """Ratio, expansion and aspect within their limits."""
    ratio, glu = budget.ratio, budget.expansion
    aspect = Fraction(made.d_model, made.n_layers)
    if aspect < decimal(budget.min_aspect):
        return False
    if budget.max_aspect is not None and aspect > decimal(budget.max_aspect):
        return False
    share = Fraction(made.covered, made.count)
    if ratio is not None and ratio.exact:
        half = Fraction(made.next_covered - made.covered, 2 * made.count)
        if abs(share - decimal(ratio.value)) > half:
            return False
    limit = None if ratio is None else ratio.within
    if limit is not None and abs(share - decimal(ratio.value)) > decimal(limit):
        return False
    if glu is not None and glu.exact:
        away = abs(made.d_ff - decimal(glu.value) * made.d_model)
        return away <= Fraction(budget.ffn_step, 2)
    if glu is not None and glu.within is not None:
        away = abs(Fraction(made.d_ff, made.d_model) / decimal(glu.value) - 1)
        return away <= decimal(glu.within)
    return True


def preference(budget: Budget, made: Candidate) -> tuple[bool, int]:
    """The first two of the solver's preferences: within a point and 5 %, then the drift's level."""
    ratio, glu = budget.ratio, budget.expansion
    away = [
        0.0 if ratio is None else abs(made.covered / made.count - ratio.value) / 0.01,
        0.0 if glu is None else abs(made.d_ff / made.d_model / glu.value - 1) / 0.05,
    ]
    return max(away) > 1.0, level(sum(away))
