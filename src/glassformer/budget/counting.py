"""Counts of every candidate, read off the manifest's own shapes.

A tensor's size is a product of sizes, so a part's count is at most linear in each of them. Counting
a part by the manifest with every size at 1 and at 2 therefore gives its count at all sizes,
exactly: no second formula to drift away from the first.

Which widths, heads and ranks a budget admits: the frames that a search chooses from.

What every count of a budget leaves when divided by 2, 4 or 8.

A count is made of products of sizes, so what it leaves follows from what they leave. Even widths
allow no odd count, say, whatever the depth: an odd total that must be met exactly is refused so.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from glassformer.budget.question import (
    HEAD_SLACK,
    HEAD_WIDTHS,
    Budget,
    Exact,
    Sizes,
    build_block,
    build_spec,
)
from glassformer.spec.init import NormalInit
from glassformer.spec.manifest import Parameter, block_parameters, manifest, turns_keys
from glassformer.spec.model import Bias


class Law:
    """A count that is at most linear in each of its sizes, from counts at sizes 1 and 2."""

    def __init__(self, count: Callable[..., int], sizes: int) -> None:
        self.sizes = sizes
        corners = list(itertools.product((1, 2), repeat=sizes))
        counts = {corner: count(*corner) for corner in corners}
        self._terms: list[tuple[int, tuple[int, ...]]] = []
        for chosen in itertools.product((False, True), repeat=sizes):
            # Through 1 and 2, a size's own factor is x - 1 at corner 2 and 2 - x at corner 1.
            share = {(1, True): -1, (2, True): 1, (1, False): 2, (2, False): -1}
            term = sum(
                counts[corner] * math.prod(map(share.__getitem__, zip(corner, chosen, strict=True)))
                for corner in corners
            )
            if term:
                self._terms.append((term, tuple(i for i, own in enumerate(chosen) if own)))

    def at(self, *sizes: int) -> int:
        """The count at these sizes."""
        total = 0
        for term, own in self._terms:
            for i in own:
                term *= sizes[i]
            total += term
        return total

    def given(self, *last: int) -> "Law":
        """The law of the other sizes, where the last ones are these."""
        terms: dict[tuple[int, ...], int] = {}
        free = self.sizes - len(last)
        for term, own in self._terms:
            term *= math.prod(last[i - free] for i in own if i >= free)
            rest = tuple(i for i in own if i < free)
            terms[rest] = terms.get(rest, 0) + term
        law = copy.copy(self)
        law.sizes, law._terms = free, [(term, own) for own, term in terms.items() if term]
        return law

    @property
    def is_divisible(self) -> bool:
        """Whether every count is a multiple of the first size."""
        return all(0 in own for _, own in self._terms)


@dataclass(frozen=True, slots=True)
class Frame:
    """A width with its heads and rank; depth and d_ff are still open.

    `outside` counts what no block holds, `covered` what the embedding ratio covers, `base` a block
    without its feed-forward's columns, `column` one such column; `step` is how much of what is
    covered the next width, or rank, would add.
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
        """Parameters of the whole model."""
        return self.outside + n_layers * (self.base + self.column * d_ff)

    def sizes(self, n_layers: int, d_ff: int) -> Sizes:
        """With depth and d_ff."""
        return Sizes(
            d_model=self.d_model,
            n_heads=self.n_heads,
            d_head=self.d_head,
            d_ff=d_ff,
            n_layers=n_layers,
            rank=self.rank,
        )


class Counts:
    """The laws of one kind of model: everything but depth, which multiplies a block."""

    def __init__(self, budget: Budget) -> None:
        self._groups = budget.n_kv_heads or 1
        kind = (budget.tied, budget.position, budget.bias, budget.norm, budget.ratio_covers)
        rank = None if budget.rank is None else 1
        laws = _given_laws(kind, budget.n_kv_heads, rank, budget.vocab_size, budget.max_seq_len)
        self._outside, self._covered, self._block = laws

    def remainder(self, rank: int | None) -> int | None:
        """What every count leaves when divided by its d_model, if it is the same for all."""
        if not self._block.is_divisible:
            return None
        return self.outside(0, rank)

    def covered(self, d_model: int, rank: int | None) -> int:
        """What the embedding ratio covers, of a model this wide."""
        return self._covered.at(d_model, rank or 1)

    def outside(self, d_model: int, rank: int | None) -> int:
        """What no block holds, of a model this wide."""
        return self._outside.at(d_model, rank or 1)

    def block(self, d_model: int, n_heads: int, d_head: int, d_ff: int) -> int:
        """One block of these sizes."""
        return self._block.at(d_model, n_heads // self._groups, d_head, d_ff)

    def frame(
        self, d_model: int, n_heads: int, d_head: int, *, rank: int | None, step: int
    ) -> Frame:
        """Everything about this width that a search asks for."""
        one = self.block(d_model, n_heads, d_head, 1)
        column = self.block(d_model, n_heads, d_head, 2) - one
        return Frame(
            d_model=d_model,
            n_heads=n_heads,
            d_head=d_head,
            rank=rank,
            outside=self.outside(d_model, rank),
            covered=self.covered(d_model, rank),
            base=one - column,
            column=column,
            step=step,
        )


#: Tied or not, position, bias, norm, and what the ratio covers.
Kind = tuple[bool, Any, Bias, Any, Literal["both", "input"]]


@functools.lru_cache(maxsize=256)
def _given_laws(
    kind: Kind, groups: int | None, rank: int | None, vocab: int, length: int
) -> tuple[Law, Law, Law]:
    """The laws of a kind of model at one vocabulary and length."""
    tied, position, bias, norm, covers = kind
    budget = Budget(
        n_heads=groups or 1,
        n_kv_heads=groups,
        tied=tied,
        position=position,
        bias=bias,
        norm=norm,
        ratio_covers=covers,
        rank=rank,
    )
    outside, covered, block = _laws(budget)
    return outside.given(vocab, length), covered.given(vocab, length), block


@functools.lru_cache(maxsize=64)
def _laws(kind: Budget) -> tuple[Law, Law, Law]:
    """What stands outside the blocks, what of it the ratio covers, and one block."""
    groups = kind.n_kv_heads or 1
    roles = ("embedding", "head") if kind.ratio_covers == "both" else ("embedding",)

    def around(d_model: int, rank: int, vocab: int, length: int) -> list[Parameter]:
        budget = replace(kind, vocab_size=vocab, max_seq_len=length)
        sizes = Sizes(
            d_model=d_model,
            n_heads=groups,
            d_head=2,
            d_ff=1,
            n_layers=1,
            rank=None if kind.rank is None else rank,
        )
        return [p for p in manifest(build_spec(budget, sizes)) if p.layer is None]

    def covered(d_model: int, rank: int, vocab: int, length: int) -> int:
        return _size(p for p in around(d_model, rank, vocab, length) if p.role in roles)

    def outside(d_model: int, rank: int, vocab: int, length: int) -> int:
        return _size(around(d_model, rank, vocab, length))

    def block(d_model: int, per_group: int, d_head: int, d_ff: int) -> int:
        sizes = Sizes(
            d_model=d_model, n_heads=per_group * groups, d_head=d_head, d_ff=d_ff, n_layers=1
        )
        built = build_block(kind, sizes)
        assert built.attention.head_width(d_model) == d_head
        return _size(block_parameters(built, "", d_model, init=NormalInit()))

    return Law(outside, 4), Law(covered, 4), Law(block, 4)


def _size(parameters: Iterable[Parameter]) -> int:
    return sum(p.size for p in parameters if p.tied_to is None)


#: With any number of heads, the head width that is taken where the count does not care.
HABITUAL_HEAD = 64


def width_step(budget: Budget) -> int:
    """Every width is a multiple of this."""
    if budget.free_head_width:
        return math.lcm(2, budget.width_multiple)
    if budget.n_heads is None:
        return budget.width_multiple
    turned = 2 if turns_keys(budget.position) else 1  # rotary turns pairs
    return math.lcm(turned * budget.n_heads, budget.width_multiple)


def heads_of(budget: Budget, d_model: int) -> list[tuple[int, int]]:
    """(n_heads, d_head) that this width may have."""
    even = 2 if turns_keys(budget.position) else 1
    if budget.free_head_width:
        assert budget.n_heads is not None
        middle = d_model / budget.n_heads
        low, high = math.ceil(middle - HEAD_SLACK), math.floor(middle + HEAD_SLACK)
        return [(budget.n_heads, h) for h in range(max(1, low), high + 1) if h % even == 0]
    if budget.n_heads is not None:
        return [(budget.n_heads, d_model // budget.n_heads)]
    found = list(_any_heads(d_model, budget.n_kv_heads or 1, even))
    if budget.n_kv_heads is None and found:  # the count is the same for all of them
        return [min(found, key=lambda pair: abs(math.log(pair[1] / HABITUAL_HEAD)))]
    return found


@functools.lru_cache(maxsize=2**15)
def _any_heads(d_model: int, groups: int, even: int) -> tuple[tuple[int, int], ...]:
    least, most = HEAD_WIDTHS
    if d_model < least:
        return ((1, d_model),) if groups == 1 and d_model % even == 0 else ()
    return tuple(
        (d_model // h, h)
        for h in range(least, min(most, d_model) + 1)
        if d_model % h == 0 and h % even == 0 and d_model // h % groups == 0
    )


class Widths:
    """The widths of a budget, their frames, and the frames that stand at the ends of many."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.counts = Counts(budget)
        self.step = width_step(budget)
        self.fixed_rank = budget.rank if isinstance(budget.rank, int) else None

    def least_count(self, d_model: int) -> int:
        """No model this wide or wider has fewer parameters."""
        budget, counts = self.budget, self.counts
        block = counts.block(d_model, *self._least_heads(d_model), budget.ffn_multiple)
        return counts.outside(d_model, self.fixed_rank or 1) + budget.min_layers * block

    def within(self, most: int) -> range:
        """The widths that can have a model of at most so many parameters."""
        low, high = 0, 1
        while self.least_count(high * self.step) <= most:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self.least_count(middle * self.step) <= most:
                low = middle
            else:
                high = middle
        first = -(-self._narrowest() // self.step) * self.step
        return range(first, low * self.step + 1, self.step)

    def _narrowest(self) -> int:
        """With any number of heads, groups need a head each: no width below has any."""
        groups = self.budget.n_kv_heads or 1
        return groups * HEAD_WIDTHS[0] if self.budget.n_heads is None and groups > 1 else 1

    def ranks(self, d_model: int) -> tuple[int | None, int | None]:
        """The least and the largest rank of this width."""
        return (1, d_model) if self.budget.rank == "any" else (self.fixed_rank, self.fixed_rank)

    def covered(self, d_model: int) -> int:
        """What the ratio covers at this width; rank 1 where the rank is open."""
        return self.counts.covered(d_model, self.fixed_rank)

    # --- frames -----------------------------------------------------------------------------------

    def frame(self, d_model: int, pair: tuple[int, int], rank: int | None) -> Frame:
        """The frame of this width, these heads and this rank."""
        counts, step = self.counts, 0
        if isinstance(self.budget.embedding_ratio, Exact):  # nothing else asks for it
            following = (d_model + self.step, rank)
            if self.budget.rank == "any":
                assert rank is not None
                following = (d_model, rank + 1)
            step = counts.covered(*following) - counts.covered(d_model, rank)
        return counts.frame(d_model, *pair, rank=rank, step=step)

    def smallest(self, d_model: int, rank: int | None) -> Frame:
        """No frame this wide or wider, of this rank or more, counts less."""
        return self.frame(d_model, self._least_heads(d_model), rank)

    def largest(self, d_model: int, rank: int | None) -> Frame:
        """No frame this wide or narrower, of this rank or less, counts more."""
        return self.frame(d_model, self._most_heads(d_model), rank)

    def _least_heads(self, d_model: int) -> tuple[int, int]:
        budget = self.budget
        if budget.n_heads is None:
            groups, d_head = budget.n_kv_heads or 1, min(HEAD_WIDTHS[0], d_model)
            if budget.n_kv_heads is None:  # the count is the same for all of them
                return 1, d_model
            return groups * max(1, d_model // (d_head * groups)), d_head
        slack = HEAD_SLACK if budget.free_head_width else 0
        return budget.n_heads, max(1, d_model // budget.n_heads - slack)

    def _most_heads(self, d_model: int) -> tuple[int, int]:
        budget = self.budget
        if budget.n_heads is None:
            if budget.n_kv_heads is None:
                return 1, d_model
            groups = budget.n_kv_heads
            d_head = max(1, min(HEAD_WIDTHS[1], d_model // groups))
            return groups * -(-d_model // (d_head * groups)), d_head
        slack = HEAD_SLACK if budget.free_head_width else 0
        return budget.n_heads, d_model // budget.n_heads + slack


MODULI = (2, 4, 8)


def can_count(widths: Widths, *, low: int, high: int) -> bool:
    """False only where no design, of any size, has a count from `low` to `high`."""
    for modulus in MODULI:
        if high - low + 1 < modulus:
            asked = {count % modulus for count in range(low, high + 1)}
            if not any(left in asked for left in _reached(widths, modulus)):
                return False
    return True


def _reached(widths: Widths, modulus: int) -> Iterator[int]:
    """What counts leave, each at least once: every size goes through all that it can leave."""
    budget, counts, every = widths.budget, widths.counts, range(modulus)
    ranks = every if budget.rank == "any" else (widths.fixed_rank,)
    for d_model, heads, d_head in _frames(widths, modulus):
        outside = {counts.outside(d_model, rank) % modulus for rank in _nonzero(ranks, modulus)}
        blocks = {
            counts.block(d_model, heads, d_head, budget.ffn_multiple * f) % modulus for f in every
        }
        inside = {n_layers * block % modulus for n_layers in every for block in blocks}
        yield from {(out + within) % modulus for out in outside for within in inside}


def _nonzero(ranks: range | tuple[int | None], modulus: int) -> Iterator[int | None]:
    """A rank that leaves nothing stands for the modulus itself: no rank is 0."""
    return (modulus if rank == 0 else rank for rank in ranks)


def _frames(widths: Widths, modulus: int) -> Iterator[tuple[int, int, int]]:
    """A width, a number of heads and their width, for all that the three leave together."""
    budget, step, every = widths.budget, widths.step, range(modulus)
    even = 2 if turns_keys(budget.position) else 1
    groups, d_heads = budget.n_kv_heads or 1, range(0, even * modulus, even)
    for d_model in range(0, step * modulus, step):
        if budget.n_heads is None and budget.n_kv_heads is None:
            yield d_model, 1, d_model  # the count is the same for all of them
        elif budget.n_heads is None:
            for each in every:
                for d_head in d_heads:
                    if (groups * each * d_head - d_model) % modulus == 0:
                        yield d_model, groups * each, d_head
        elif budget.free_head_width:
            for d_head in d_heads:
                yield d_model, budget.n_heads, d_head
        else:
            yield d_model, budget.n_heads, d_model // budget.n_heads
