"""The counts on both sides of a tolerance that some design has, and what they ask of it."""

import math
from fractions import Fraction

from glassformer.spec.base import spec
from glassformer.spec.budget import Budget
from glassformer.spec.patience import Effort
from glassformer.spec.search import Search

#: No count is looked for beyond so many times the total that was asked for.
FAR = 1_000


@spec
class Neighbours:
    """The nearest counts found below and above a tolerance; proven: there is no nearer."""

    below: int | None
    above: int | None
    is_proven: bool

    @property
    def counts(self) -> tuple[int, ...]:
        """Those that there are."""
        return tuple(count for count in (self.below, self.above) if count is not None)


def neighbours(budget: Budget, effort: Effort) -> Neighbours:
    """The nearest counts outside the tolerance that some design has."""
    low, high = budget.bounds
    return counts_around(budget, low - 1, high + 1, effort)


def counts_around(budget: Budget, most: int, least: int, effort: Effort) -> Neighbours:
    """The largest count up to `most`, and the smallest from `least` on, that some design has."""
    below, least = None, max(1, least)
    under = Search(budget, low=1, high=most, effort=effort.share(2))
    if most >= 1:
        below = under.nearest_count(most)
    over = Search(budget, low=least, high=FAR * budget.total, effort=effort.share(1))
    above = over.nearest_count(least)
    return Neighbours(below=below, above=above, is_proven=under.is_proven and over.is_proven)


def least_tolerance(budget: Budget, near: Neighbours) -> float | None:
    """The smallest tolerance that reaches one of these counts, rounded up to four digits."""
    away = [abs(count - budget.total) for count in near.counts]
    if not away or min(away) >= budget.total:
        return None
    return rounded_up(Fraction(max(1, min(away)), budget.total))


def rounded_down(share: Fraction) -> float:
    """The number of four digits before."""
    unit = Fraction(10) ** (math.floor(math.log10(share)) - 3)
    return float(math.floor(share / unit) * unit)


def rounded_up(share: Fraction) -> float:
    """The next number of four digits."""
    unit = Fraction(10) ** (math.floor(math.log10(share)) - 3)
    return float(math.ceil(share / unit) * unit)
