"""Parameter counts of every candidate, read off the manifest, and the widths a budget admits.

A tensor's size is a product of dimensions, so the count of a part is at most linear in each of
them. Counting a part by the manifest with every dimension at 1 and at 2 therefore determines its
count at all sizes exactly (`Law`): no second formula can disagree with the manifest.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from glassformer.budget.question import (
    HEAD_SLACK,
    HEAD_WIDTHS,
    Budget,
    Sizes,
    build_block,
    build_spec,
)
from glassformer.spec.init import NormalInit
from glassformer.spec.manifest import Parameter, block_parameters, manifest

#: With any number of heads: the preferred head width where all have the same count.
HABITUAL_HEAD = 64


class Law:
    """A count that is at most linear in each of its sizes, from counts at sizes 1 and 2."""

    def __init__(self, count: Callable[..., int], sizes: int) -> None:
        self.sizes = sizes
        corners = list(itertools.product((1, 2), repeat=sizes))
        counts = {corner: count(*corner) for corner in corners}
        self._terms: list[tuple[int, tuple[int, ...]]] = []
        for chosen in itertools.product((False, True), repeat=sizes):
            # Between 1 and 2, a size's own factor is x - 1 at corner 2 and 2 - x at corner 1.
            share = {(1, True): -1, (2, True): 1, (1, False): 2, (2, False): -1}
            term = sum(
                counts[corner] * math.prod(map(share.__getitem__, zip(corner, chosen, strict=True)))
                for corner in corners
            )
            if term:
                self._terms.append((term, tuple(i for i, own in enumerate(chosen) if own)))

    def at(self, *sizes: int) -> int:
        """Return the count at these sizes."""
        total = 0
        for term, own in self._terms:
            for i in own:
                term *= sizes[i]
            total += term
        return total

    def given(self, *last: int) -> "Law":
        """Return the law of the remaining sizes once the last ones are fixed."""
        terms: dict[tuple[int, ...], int] = {}
        free = self.sizes - len(last)
        for term, own in self._terms:
            term *= math.prod(last[i - free] for i in own if i >= free)
            rest = tuple(i for i in own if i < free)
            terms[rest] = terms.get(rest, 0) + term
        law = copy.copy(self)
        law.sizes, law._terms = free, [(term, own) for own, term in terms.items() if term]
        return law


@functools.lru_cache(maxsize=64)
def _laws(kind: Budget) -> tuple[Law, Law, Law]:
    """Laws of what is outside the blocks, of what the ratio covers of it, and of one block."""
    groups = kind.kv_heads or 1
    roles = ("embedding", "head") if kind.ratio_covers == "both" else ("embedding",)

    def around(d_model: int, rank: int, vocab: int, length: int) -> list[Parameter]:
        sizes = Sizes(
            d_model=d_model,
            n_heads=groups,
            d_head=2,
            d_ff=1,
            n_layers=1,
            rank=None if kind.rank is None else rank,
        )
        budget = replace(kind, vocab=vocab, length=length)
        return [p for p in manifest(build_spec(budget, sizes)) if p.layer is None]

    def covered(d_model: int, rank: int, vocab: int, length: int) -> int:
        return _size(p for p in around(d_model, rank, vocab, length) if p.role in roles)

    def outside(d_model: int, rank: int, vocab: int, length: int) -> int:
        return _size(around(d_model, rank, vocab, length))

    def block(d_model: int, per_group: int, d_head: int, d_ff: int, more_experts: int) -> int:
        sizes = Sizes(
            d_model=d_model, n_heads=per_group * groups, d_head=d_head, d_ff=d_ff, n_layers=1
        )
        experts = None if kind.experts is None else 1 + more_experts
        built = build_block(replace(kind, experts=experts), sizes)
        assert built.attention.head_width(d_model) == d_head
        return _size(block_parameters(built, "", d_model, init=NormalInit()))

    return Law(outside, 4), Law(covered, 4), Law(block, 5)


@functools.lru_cache(maxsize=256)
def _laws_of(kind: Budget, vocab: int, length: int, experts: int) -> tuple[Law, Law, Law]:
    """The same laws at one vocabulary, length and number of experts."""
    outside, covered, block = _laws(kind)
    return outside.given(vocab, length), covered.given(vocab, length), block.given(experts - 1)


def _kind(budget: Budget) -> Budget:
    """Return a budget with only the options that the laws depend on."""
    return Budget(
        heads=budget.kv_heads or 1,
        kv_heads=budget.kv_heads,
        tied=budget.tied,
        shape=budget.shape,
        position=budget.position,
        bias=budget.bias,
        norm=budget.norm,
        ratio_covers=budget.ratio_covers,
        experts=None if budget.experts is None else 2,
        experts_per_token=None if budget.experts is None else 1,
        shared_expert=budget.shared_expert,
        rank=None if budget.rank is None else 1,
    )


def _size(parameters: Iterable[Parameter]) -> int:
    return sum(p.size for p in parameters if p.tied_to is None)


@dataclass(frozen=True, slots=True)
class Frame:
    """A width with its heads and rank; depth and d_ff are still open.

    `outside` counts the parameters outside the blocks, `covered` those that the embedding ratio
    covers, `base` a block without feed-forward columns, and `column` one feed-forward column.
    `step` is how much the next width, or rank, would add to `covered` (0 unless the ratio is
    exact).
    """

    d_model: int
    n_heads: int
    d_head: int
    rank: int | None
    outside: int
    covered: int
    base: int
    column: int
    step: int

    def count(self, n_layers: int, d_ff: int) -> int:
        """Return the number of parameters at this depth and d_ff."""
        return self.outside + n_layers * (self.base + self.column * d_ff)

    def sizes(self, n_layers: int, d_ff: int) -> Sizes:
        """Return the sizes of the model at this depth and d_ff."""
        return Sizes(
            d_model=self.d_model,
            n_heads=self.n_heads,
            d_head=self.d_head,
            d_ff=d_ff,
            n_layers=n_layers,
            rank=self.rank,
        )


class Widths:
    """The widths that a budget admits, their frames, and frames that bound many of them."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.step = width_step(budget)
        self.fixed_rank = budget.rank if isinstance(budget.rank, int) else None
        self._is_exact = budget.exact_ratio
        self._groups = budget.kv_heads or 1
        self._outside, self._covered, self._block = _laws_of(
            _kind(budget), budget.vocab, budget.length, budget.experts or 2
        )

    # --- counts -----------------------------------------------------------------------------------

    def outside(self, d_model: int, rank: int | None) -> int:
        """Count the parameters outside the blocks."""
        return self._outside.at(d_model, rank or 1)

    def covered(self, d_model: int, rank: int | None) -> int:
        """Count the parameters that the embedding ratio covers."""
        return self._covered.at(d_model, rank or 1)

    def block(self, d_model: int, n_heads: int, d_head: int, d_ff: int) -> int:
        """Count the parameters of one block."""
        return self._block.at(d_model, n_heads // self._groups, d_head, d_ff)

    def least_count(self, d_model: int) -> int:
        """Return a lower bound of the count of every model at least this wide."""
        smallest = self.smallest(d_model)
        return smallest.count(self.budget.min_layers, self.budget.ffn_step)

    def up_to(self, fits: Callable[[int], bool]) -> range:
        """Return the widths up to the last one that fits, where none does that is wider."""
        low, high = 0, 1
        while fits(high * self.step):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle * self.step) else (low, middle)
        # With any number of heads, every group of them needs one: narrower widths have none.
        is_grouped = self.budget.heads == "any" and self._groups > 1
        narrowest = self._groups * HEAD_WIDTHS[0] if is_grouped else 1
        first = -(-narrowest // self.step) * self.step
        return range(first, low * self.step + 1, self.step)

    # --- frames -----------------------------------------------------------------------------------

    def frame(self, d_model: int, heads: tuple[int, int], rank: int | None) -> Frame:
        """Return the frame of this width, these (n_heads, d_head) and this rank."""
        one = self.block(d_model, *heads, 1)
        column = self.block(d_model, *heads, 2) - one
        covered, step = self.covered(d_model, rank), 0
        if self._is_exact:
            following = (d_model + self.step, rank)
            if self.budget.rank == "any":
                assert rank is not None
                following = (d_model, rank + 1)
            step = self.covered(*following) - covered
        return Frame(
            d_model=d_model,
            n_heads=heads[0],
            d_head=heads[1],
            rank=rank,
            outside=self.outside(d_model, rank),
            covered=covered,
            base=one - column,
            column=column,
            step=step,
        )

    def ranks(self, d_model: int) -> tuple[int | None, int | None]:
        """Return the least and the largest rank of this width."""
        return (1, d_model) if self.budget.rank == "any" else (self.fixed_rank, self.fixed_rank)

    def smallest(self, d_model: int) -> Frame:
        """Return a frame that no frame at least this wide undercuts."""
        budget, groups = self.budget, self._groups
        if budget.heads != "any":
            slack = HEAD_SLACK if budget.free_head_width else 0
            heads = budget.heads, max(1, d_model // budget.heads - slack)
        elif budget.kv_heads is None:  # all choices of heads have the same count
            heads = 1, d_model
        else:
            d_head = min(HEAD_WIDTHS[0], d_model)
            heads = groups * max(1, d_model // (d_head * groups)), d_head
        return self.frame(d_model, heads, self.ranks(d_model)[0])


def width_step(budget: Budget) -> int:
    """Return the number that divides every admitted width."""
    if budget.free_head_width:
        return math.lcm(2, budget.model_step)
    if budget.heads == "any":
        return budget.model_step
    return math.lcm(budget.head_step * budget.heads, budget.model_step)


def heads_of(budget: Budget, d_model: int) -> list[tuple[int, int]]:
    """Return every (n_heads, d_head) that a budget admits at this width."""
    if budget.heads == "any":
        pairs = list(_any_heads(d_model, budget.kv_heads or 1, budget.head_step))
        if budget.kv_heads is None and pairs:  # all have the same count
            return [min(pairs, key=lambda pair: abs(math.log(pair[1] / HABITUAL_HEAD)))]
        return pairs
    if budget.free_head_width:
        middle = d_model / budget.heads
        low, high = math.ceil(middle - HEAD_SLACK), math.floor(middle + HEAD_SLACK)
        step = budget.head_step
        return [(budget.heads, h) for h in range(max(1, low), high + 1) if h % step == 0]
    return [(budget.heads, d_model // budget.heads)]


@functools.lru_cache(maxsize=2**15)
def _any_heads(d_model: int, groups: int, step: int) -> tuple[tuple[int, int], ...]:
    least, most = HEAD_WIDTHS
    if d_model < least:
        return ((1, d_model),) if groups == 1 and d_model % step == 0 else ()
    return tuple(
        (d_model // h, h)
        for h in range(least, min(most, d_model) + 1)
        if d_model % h == 0 and h % step == 0 and d_model // h % groups == 0
    )
