"""Which widths, heads and ranks a budget admits: the frames that a search chooses from."""

import functools
import math

from glassformer.spec.budget import HEAD_SLACK, HEAD_WIDTHS, Budget, Exact
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
