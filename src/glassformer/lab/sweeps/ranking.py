"""Rank cells by their seeds: intervals, paired comparisons, ties, main effects, crossing curves.

What makes a claim here hold:

- Seeds are paired: the effect of a seed, which all cells share, is removed before the spread of a
  cell is estimated (two-way layout without interaction; Scheffe, "The Analysis of Variance", 1959,
  chapter 4).
- Five seeds say little about a spread. The variance of each cell is moderated towards that of all
  cells by empirical Bayes (Smyth, "Linear models and empirical Bayes methods", Stat. Appl. Genet.
  Mol. Biol. 3(1), 2004, equations 4 to 7), and never taken as less than the cell's own. Cells of
  very unequal spread are recognised by it, and keep theirs.
- The best cell is chosen by the data, so every pair counts as a comparison: a claim about any pair,
  chosen afterwards or not, is corrected for all of them (Holm, "A simple sequentially rejective
  multiple test procedure", Scand. J. Statist. 6, 1979).

`python -m bench ranking` simulates thousands of sweeps: how often intervals hold the truth, and how
often a wrong "better" is claimed.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# C cells, S seeds, P pairs of cells

CONFIDENCE = 0.95
#: The power for which `seeds_needed` is computed.
POWER = 0.8
#: More seeds than this are said to be "more than" it.
MOST_SEEDS = 1_000
#: Beyond this number of degrees of freedom Student's distribution is the normal one to 3 digits.
MOST_FREEDOM = 200
#: Spreads of cells that differ less than this differ by chance: millions of degrees of freedom.
LEAST_EXCESS = 1e-6


# --- Student's distribution -----------------------------------------------------------------------


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return t with P(|T| < t) = confidence."""
    from scipy import special

    return -float(special.stdtrit(freedom, (1 - confidence) / 2))


def holm(p: Floats) -> Floats:
    """Return adjusted p-values: the i-th smallest times the number of those not yet rejected."""
    order = np.argsort(p, kind="stable")
    factors = np.arange(len(p), 0, -1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * factors))
    return adjusted


# --- the spread of a cell -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """The variance of each cell around its mean and the seeds' effects, and how well it is known.

    `freedom` of Student's distribution for a comparison of two cells: at most that of all cells
    pooled, which their unequal spread lowers.
    """

    variance: Floats
    freedom: int


def cell_spread(values_CS: Floats) -> Spread:
    """Estimate the variance of each cell from the residuals of cell + seed, moderated."""
    cells, seeds = values_CS.shape
    own = seeds - 1
    residual_CS = (
        values_CS
        - values_CS.mean(1, keepdims=True)
        - values_CS.mean(0, keepdims=True)
        + values_CS.mean()
    )
    # the seed effect is estimated from the cells too: of C cells, a share 1/C of each is lost
    found = (residual_CS**2).sum(1) / own * cells / (cells - 1)
    before, typical = _prior(found, own)
    pooled = (cells - 1) * own
    if math.isinf(before):
        return Spread(np.maximum(found, typical), min(MOST_FREEDOM, pooled))
    moderated = (before * typical + own * found) / (before + own)
    freedom = max(own, min(MOST_FREEDOM, pooled, math.floor(before + own)))
    return Spread(np.maximum(found, moderated), freedom)


def _prior(variances: Floats, freedom: int) -> tuple[float, float]:
    """Return the prior's degrees of freedom and variance: Smyth 2004, section 6.2.

    log(s^2) of equal variances has a known mean and spread; what it varies more than that is the
    cells' own. With two cells there is one estimate, which is exact as it is.
    """
    from scipy import optimize, special

    known = variances[variances > 0]
    if len(variances) < 3 or len(known) < 2:
        return 0.0, float(variances.mean())
    logs = np.log(known)
    shifted = logs - special.digamma(freedom / 2) + math.log(freedom / 2)
    excess = float(shifted.var(ddof=1)) - float(special.polygamma(1, freedom / 2))
    if excess <= LEAST_EXCESS:
        return math.inf, math.exp(float(shifted.mean()))
    ends = math.log(1e-8), math.log(2 / LEAST_EXCESS)  # trigamma(x) falls as 1 / x or faster
    half = optimize.brentq(lambda log: special.polygamma(1, math.exp(log)) - excess, *ends)
    before = 2 * math.exp(half)
    typical = float(shifted.mean()) + special.digamma(before / 2) - math.log(before / 2)
    return before, math.exp(typical)


def seeds_needed(
    variance: float, difference: float, *, comparisons: int, freedom_per_seed: float
) -> int | None:
    """Return the seeds with which a difference is seen with 80 % probability; None if too many.

    n = (t(1 - a/2) + t(power))^2 variance / difference^2 with a corrected for the comparisons, and
    the degrees of freedom that n seeds give (Chow, Shao and Wang, "Sample Size Calculations in
    Clinical Research", 2008, section 3.2). `variance` is that of one pair's difference.
    """

    def enough(seeds: int) -> bool:
        freedom = min(MOST_FREEDOM, max(1, math.floor(freedom_per_seed * (seeds - 1))))
        reach = t_quantile(freedom, 1 - (1 - CONFIDENCE) / comparisons)
        reach += t_quantile(freedom, 2 * POWER - 1)
        return seeds >= reach**2 * variance / difference**2

    if not enough(MOST_SEEDS):
        return None
    return bisect.bisect_left(range(MOST_SEEDS), True, lo=2, key=enough)


# --- the ranking ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A cell minus another: the mean over seeds, its simultaneous 95 % interval, Holm's p."""

    difference: float
    low: float
    high: float
    p: float

    @property
    def is_clear(self) -> bool:
        """True if the two are told apart."""
        return self.p <= 1 - CONFIDENCE


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """A cell's place: `rank` from 1, `group` of cells not told apart from its first."""

    cell: int
    name: str
    rank: int
    group: int
    seeds: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None
    spread: float | None
    best: Comparison | None
    baseline: Comparison | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks `first` to `last`: cells that are not told apart from the first of them."""

    first: int
    last: int
    needed: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """The mean of all cells with one value of a factor, minus the mean of all cells."""

    factor: str
    value: str
    effect: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """The best cell was behind another one until a step."""

    ahead: str
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """The cells in order, the best first, and what can be said about them.

    `incomplete` are cells without all seeds, with the reason: they are listed, not ranked.
    """

    metric: str
    unit: str
    smaller_is_better: bool
    seeds: int
    difference: float
    rows: tuple[Ranked, ...]
    groups: tuple[Group, ...]
    effects: tuple[Effect, ...] = ()
    crossings: tuple[Crossing, ...] = ()
    incomplete: tuple[tuple[int, str, str], ...] = ()
    baseline: str = ""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as `ranking.json` has it."""
        plain = asdict(self)
        plain["groups"] = [
            {**asdict(group), "text": self.group_text(group)} for group in self.groups
        ]
        plain["incomplete"] = [
            {"cell": cell, "name": name, "why": why} for cell, name, why in self.incomplete
        ]
        return plain

    def group_text(self, group: Group) -> str:
        """Return what a group means: a tie and the seeds that would resolve it, or a clear place.

        One cell: `1: told apart from every other` or from all below.
        """
        plural = "s" if self.seeds > 1 else ""
        if group.first == group.last:
            if len(self.rows) == 1:
                return f"1: one cell, {self.seeds} seed{plural}"
            if self.seeds < 2:
                return f"{group.first}: one seed, so that nothing is known about the spread"
            return f"{group.first}: told apart from those before and after it"
        head = f"{group.first}-{group.last}: "
        if self.seeds < 2:
            return head + "one seed, so that nothing is known about the spread"
        head += f"no difference seen with {self.seeds} seeds"
        size = f"{self.difference:g}{f' {self.unit}' if self.unit else ''}"
        if group.needed is None:
            return f"{head}; more than {MOST_SEEDS:,} seeds would be needed to see {size}"
        if group.needed <= self.seeds:
            return f"{head}, which would have shown {size}"
        return f"{head}; about {group.needed} seeds would be needed to see {size}"


def rank(
    names: Sequence[str],
    values_CS: Floats,
    *,
    metric: str = "loss",
    unit: str = "nats",
    smaller_is_better: bool = True,
    baseline: int | None = None,
    difference: float = 0.01,
    cells: Sequence[int] | None = None,
) -> Ranking:
    """Rank cells that all have the same seeds: a row of `values_CS` each."""
    numbers = list(range(len(names))) if cells is None else list(cells)
    count, seeds = values_CS.shape
    sign = 1.0 if smaller_is_better else -1.0
    means = values_CS.mean(1)
    order = np.argsort(sign * means, kind="stable")
    pairs = _Pairs(values_CS) if count > 1 and seeds > 1 else None
    margin = t_quantile(seeds - 1) / math.sqrt(seeds) if seeds > 1 else None
    spread = values_CS.std(1, ddof=1) if seeds > 1 else np.full(count, math.nan)
    versus = None if pairs is None or baseline is None else pairs.against(numbers.index(baseline))
    groups = _groups(order, pairs, difference=difference)
    number_of = {
        int(cell): index for index, (first, last, _) in enumerate(groups)
        for cell in order[first : last + 1]
    }  # fmt: skip
    rows = []
    for place, cell in enumerate(order):
        half = None if margin is None else margin * float(spread[cell])
        mean = float(means[cell])
        rows.append(
            Ranked(
                cell=numbers[cell],
                name=names[cell],
                rank=place + 1,
                group=number_of[int(cell)] + 1,
                seeds=tuple(float(v) for v in values_CS[cell]),
                mean=mean,
                low=None if half is None else mean - half,
                high=None if half is None else mean + half,
                spread=None if half is None else float(spread[cell]),
                best=None if pairs is None or place == 0 else pairs.pair(int(cell), int(order[0])),
                baseline=None if versus is None or numbers[cell] == baseline else versus[int(cell)],
            )
        )
    return Ranking(
        metric=metric,
        unit=unit,
        smaller_is_better=smaller_is_better,
        seeds=seeds,
        difference=difference,
        rows=tuple(rows),
        groups=tuple(
            Group(first=first + 1, last=last + 1, needed=needed) for first, last, needed in groups
        ),
        baseline="" if baseline is None else names[numbers.index(baseline)],
    )


class _Pairs:
    """All pairs of cells: differences, their standard errors and Holm's p-values."""

    def __init__(self, values_CS: Floats) -> None:
        self.cells, self.seeds = values_CS.shape
        self.means = values_CS.mean(1)
        self.spread = cell_spread(values_CS)
        self.left, self.right = np.triu_indices(self.cells, 1)
        self.count = len(self.left)
        self.p = holm(self._plain(self.left, self.right))
        self.reach = t_quantile(self.spread.freedom, 1 - (1 - CONFIDENCE) / self.count)

    def _error(self, a: Any, b: Any) -> Any:
        return np.sqrt((self.spread.variance[a] + self.spread.variance[b]) / self.seeds)

    def _plain(self, a: Any, b: Any) -> Floats:
        """Return uncorrected p-values; without any spread there is nothing to judge by."""
        from scipy import special

        error = self._error(a, b)
        gap = np.abs(self.means[a] - self.means[b])
        t = np.divide(gap, error, out=np.zeros_like(gap), where=error > 0)
        return np.where(error > 0, 2 * special.stdtr(self.spread.freedom, -t), 1.0)

    def p_of(self, a: int, b: int) -> float:
        """Return Holm's p-value of a pair among all pairs."""
        a, b = min(a, b), max(a, b)
        return float(self.p[a * self.cells - a * (a + 1) // 2 + b - a - 1])  # row a of a triangle

    def pair(self, cell: int, other: int) -> Comparison:
        """Return a cell minus another, corrected for all pairs."""
        return self._comparison(cell, other, self.reach, self.p_of(cell, other))

    def _comparison(self, cell: int, other: int, reach: float, p: float) -> Comparison:
        gap = float(self.means[cell] - self.means[other])
        half = reach * float(self._error(cell, other))
        return Comparison(difference=gap, low=gap - half, high=gap + half, p=p)

    def against(self, baseline: int) -> dict[int, Comparison]:
        """Return every cell minus a baseline that was stated before, corrected for their number."""
        others = np.array([cell for cell in range(self.cells) if cell != baseline])
        adjusted = holm(self._plain(others, np.full(len(others), baseline)))
        reach = t_quantile(self.spread.freedom, 1 - (1 - CONFIDENCE) / len(others))
        return {
            int(cell): self._comparison(int(cell), baseline, reach, float(p))
            for cell, p in zip(others, adjusted, strict=True)
        }


def _groups(
    order: NDArray[np.intp], pairs: _Pairs | None, *, difference: float
) -> list[tuple[int, int, int | None]]:
    """Cut the order into groups: a new one begins with the first cell told apart from its first."""
    if not len(order):
        return []
    if pairs is None:
        return [(0, len(order) - 1, None)]
    groups: list[tuple[int, int, int | None]] = []
    first = 0
    for place in range(1, len(order) + 1):
        ended = place == len(order) or (
            pairs.p_of(int(order[first]), int(order[place])) <= 1 - CONFIDENCE
        )
        if ended:
            needed = None
            if place - 1 > first:
                members = order[first:place]
                variance = 2 * float(pairs.spread.variance[members].mean())
                needed = seeds_needed(
                    variance,
                    difference,
                    comparisons=pairs.count,
                    freedom_per_seed=pairs.spread.freedom / (pairs.seeds - 1),
                )
            groups.append((first, place - 1, needed))
            first = place
    return groups


# --- factors and curves ---------------------------------------------------------------------------


def main_effects(
    settings: Sequence[Mapping[str, str]], values_CS: Floats, factors: Sequence[str]
) -> tuple[Effect, ...]:
    """Return the main effects of a complete grid, paired by seed; none where it is not complete.

    For each seed: the mean of the cells with a value, minus the mean of all cells. The interval is
    Student's over seeds, each by itself (Montgomery, "Design and Analysis of Experiments", ch. 5).
    """
    count, seeds = values_CS.shape
    levels = {factor: list(dict.fromkeys(s[factor] for s in settings)) for factor in factors}
    if seeds < 2 or count < 2 or count != math.prod(len(values) for values in levels.values()):
        return ()
    centred_CS = values_CS - values_CS.mean(0, keepdims=True)
    margin = t_quantile(seeds - 1) / math.sqrt(seeds)
    found = []
    for factor in factors:
        if len(levels[factor]) < 2:
            continue
        for value in levels[factor]:
            chosen = [i for i, s in enumerate(settings) if s[factor] == value]
            by_seed = centred_CS[chosen].mean(0)
            mean, half = float(by_seed.mean()), margin * float(by_seed.std(ddof=1))
            found.append(
                Effect(factor=factor, value=value, effect=mean, low=mean - half, high=mean + half)
            )
    return tuple(found)


def crossings(
    ranking: Ranking, curves: Mapping[int, Mapping[int, float]], *, most: int
) -> tuple[Crossing, ...]:
    """Return for cells below the best until which evaluation their mean was ahead of its mean."""
    if not ranking.rows:
        return ()
    best = curves.get(ranking.rows[0].cell, {})
    sign = 1.0 if ranking.smaller_is_better else -1.0
    found = []
    for row in ranking.rows[1 : most + 1]:
        other = curves.get(row.cell, {})
        steps = sorted(best.keys() & other.keys())
        ahead = [step for step in steps if sign * (other[step] - best[step]) < 0]
        if ahead and ahead[-1] != steps[-1]:
            found.append(Crossing(ahead=row.name, step=ahead[-1]))
    return tuple(found)
