"""Which widths, heads and ranks a budget admits: the frames that a search goes through."""

import heapq
import math
from collections.abc import Callable, Iterator

from glassformer.spec.budget import HEAD_SLACK, HEAD_WIDTHS, Budget
from glassformer.spec.counting import Counts, Frame
from glassformer.spec.model import Rotary

#: With any number of heads, the head width that is taken where the count does not care.
HABITUAL_HEAD = 64


def width_step(budget: Budget) -> int:
    """Every width is a multiple of this."""
    if budget.free_head_width:
        return math.lcm(2, budget.width_multiple)
    if budget.n_heads is None:
        return budget.width_multiple
    turned = 2 if isinstance(budget.position, Rotary) else 1  # rotary turns pairs
    return math.lcm(turned * budget.n_heads, budget.width_multiple)


def heads_of(budget: Budget, d_model: int) -> list[tuple[int, int]]:
    """(n_heads, d_head) that this width may have."""
    even = 2 if isinstance(budget.position, Rotary) else 1
    if budget.free_head_width:
        assert budget.n_heads is not None
        middle = d_model / budget.n_heads
        low, high = math.ceil(middle - HEAD_SLACK), math.floor(middle + HEAD_SLACK)
        return [(budget.n_heads, h) for h in range(max(1, low), high + 1) if h % even == 0]
    if budget.n_heads is not None:
        return [(budget.n_heads, d_model // budget.n_heads)]
    groups, (least, most) = budget.n_kv_heads or 1, HEAD_WIDTHS
    if d_model < least:
        return [(1, d_model)] if groups == 1 and d_model % even == 0 else []
    found = [
        (d_model // h, h)
        for h in range(least, min(most, d_model) + 1)
        if d_model % h == 0 and h % even == 0 and d_model // h % groups == 0
    ]
    if budget.n_kv_heads is None and found:  # the count is the same for all of them
        return [min(found, key=lambda pair: abs(math.log(pair[1] / HABITUAL_HEAD)))]
    return found


class Widths:
    """The frames of a budget, those first whose share of embeddings can come nearest the wish."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.counts = Counts(budget)
        self.step = width_step(budget)
        self.fixed_rank = budget.rank if isinstance(budget.rank, int) else None

    def least_count(self, d_model: int) -> int:
        """No model this wide or wider has fewer parameters."""
        budget, counts = self.budget, self.counts
        groups, (least, _) = budget.n_kv_heads or 1, HEAD_WIDTHS
        if budget.n_heads is None:
            d_head = min(least, d_model)
            pair = (groups * max(1, d_model // (d_head * groups)), d_head)
        else:
            pair = (budget.n_heads, max(1, d_model // budget.n_heads - HEAD_SLACK))
            if not budget.free_head_width:
                pair = (budget.n_heads, d_model // budget.n_heads)
        block = counts.block(d_model, *pair, budget.ffn_multiple)
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
        return range(self.step, low * self.step + 1, self.step)

    def frames(self, d_model: int, drift: Callable[[int], float]) -> Iterator[Frame]:
        """What this width may be; ranks by the drift of what the ratio covers, the least first."""
        pairs = heads_of(self.budget, d_model)
        for rank in self._ranks(d_model, drift):
            for n_heads, d_head in pairs:
                yield self.counts.frame(
                    d_model, n_heads, d_head, rank=rank, step=self._covered_step(d_model, rank)
                )

    def covered(self, d_model: int) -> int:
        """What the ratio covers at this width; rank 1 where the rank is open."""
        return self.counts.covered(d_model, self.fixed_rank)

    def _covered_step(self, d_model: int, rank: int | None) -> int:
        counts = self.counts
        if self.budget.rank == "any":
            assert rank is not None
            return counts.covered(d_model, rank + 1) - counts.covered(d_model, rank)
        return counts.covered(d_model + self.step, rank) - counts.covered(d_model, rank)

    def _ranks(self, d_model: int, drift: Callable[[int], float]) -> Iterator[int | None]:
        """The rank that was given; or every one up to d_model."""
        if self.budget.rank != "any":
            yield self.fixed_rank
            return

        def away(rank: int) -> float:
            return drift(self.counts.covered(d_model, rank))

        low, high = 1, d_model  # the drift falls to its least and rises again
        while low < high:
            middle = (low + high) // 2
            if away(middle) <= away(middle + 1):
                high = middle
            else:
                low = middle + 1
        yield from heapq.merge(range(low, 0, -1), range(low + 1, d_model + 1), key=away)
