"""What every count of a budget leaves when divided by 2, 4 or 8.

A count is made of products of sizes, so what it leaves follows from what they leave. Even widths
allow no odd count, say, whatever the depth: an odd total that must be met exactly is refused so.
"""

from collections.abc import Iterator

from glassformer.spec.model import Rotary
from glassformer.spec.widths import Widths

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
    even = 2 if isinstance(budget.position, Rotary) else 1
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
