"""Counts of every candidate, read off the manifest's own shapes.

A tensor's size is a product of sizes, so a part's count is at most linear in each of them. Counting
a part by the manifest with every size at 1 and at 2 therefore gives its count at all sizes,
exactly: no second formula to drift away from the first.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from glassformer.spec.budget import Budget, Sizes, build_block, build_spec
from glassformer.spec.inits import NormalInit
from glassformer.spec.manifest import manifest
from glassformer.spec.model import Bias
from glassformer.spec.parameters import Parameter, block_parameters


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
