"""Do the ranking's promises hold? Thousands of simulated sweeps whose truth is known.

For each way in which runs may spread: the share of 95 % intervals that hold a cell's true mean,
and the share of sweeps in which any claim of "better" is wrong, be it with the best, with the
baseline, or between two groups. `all equal`: every cell has the same mean, so that every claim is
wrong; `four levels`: a claim is wrong between equals, or the wrong way round. The promises are kept
for the kinds named `normal`, `skewed` and `unequal`; the others show where they end.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bench.clock import said
from glassformer.lab.sweeps.ranking import Ranking, rank

SWEEPS = 2_000
#: Cells and seeds: a usual sweep, a small one, a wide one with few seeds.
SIZES = ((24, 5), (6, 5), (12, 3))
#: The standard deviation of a seed's effect on all cells; that of a run is about 1.
SHARED = 0.3
PROMISED = ("normal", "skewed", "unequal")
KINDS = (*PROMISED, "one cell spreads 5x", "exponential")

Floats = NDArray[np.float64]


def run(*, quick: bool = False) -> Iterator[dict[str, object]]:
    """A row for each kind and size."""
    for kind in KINDS:
        for cells, seeds in SIZES:
            count = 40 if quick else SWEEPS
            for levels in (1, 4):
                yield row(kind, cells, seeds, levels, sweeps=count)


def row(kind: str, cells: int, seeds: int, levels: int, *, sweeps: int) -> dict[str, object]:
    """Simulate sweeps of one kind; count the intervals that hold and the sweeps that are wrong."""
    rng = np.random.default_rng([cells, seeds, levels, KINDS.index(kind)])
    held = wrong = found = 0
    for _ in range(sweeps):
        truth = rng.permutation(np.arange(cells) % levels) * 2.0
        shared = SHARED * rng.standard_normal(seeds)  # what a seed does to all cells
        values = truth[:, None] + noise(kind, cells, seeds, rng) + shared
        made = rank([str(i) for i in range(cells)], values, baseline=0)
        held += sum(r.low <= truth[r.cell] <= r.high for r in made.rows if r.low is not None)
        claims = list(better_claims(made))
        wrong += any(truth[good] >= truth[bad] for good, bad in claims)
        found += len(claims) > 0
    title = "all equal" if levels == 1 else "four levels"
    share = held / sweeps / cells
    text = f"intervals hold {share:.1%}, wrong claims {wrong / sweeps:.1%}"
    case = f"{kind}, {cells} cells x {seeds} seeds, {title}"
    return {
        **said("ranking", case, text if levels == 1 else f"{text}, any {found / sweeps:.0%}"),
        "coverage": round(share, 4),
        "wrong": round(wrong / sweeps, 4),
        "promised": kind in PROMISED,
    }


def noise(kind: str, cells: int, seeds: int, rng: np.random.Generator) -> Floats:
    """The spread of runs around their cell's mean: mean 0."""
    plain = rng.standard_normal((cells, seeds))
    match kind:
        case "normal":
            return plain
        case "skewed":  # a gamma of shape 4: skewness 1, a tail of unlucky runs
            return (rng.gamma(4, size=(cells, seeds)) - 4) / 2
        case "unequal":  # standard deviations from 0.5 to 2
            return plain * np.linspace(0.5, 2, cells)[:, None]
        case "one cell spreads 5x":
            return plain * np.where(np.arange(cells) == 0, 5, 1)[:, None]
        case "exponential":  # skewness 2
            return rng.exponential(size=(cells, seeds)) - 1
    raise AssertionError(kind)


def better_claims(made: Ranking) -> Iterator[tuple[int, int]]:
    """Every "A is better than B" that a reader may take from a ranking, as (A, B)."""
    best = made.rows[0].cell
    first = {row.group: row.cell for row in reversed(made.rows)}
    for row in made.rows:
        if row.best is not None and row.best.is_clear:
            yield best, row.cell
        if row.baseline is not None and row.baseline.is_clear:
            pair = (row.cell, 0) if row.baseline.difference < 0 else (0, row.cell)
            yield pair
        if row.group > 1 and row.cell == first[row.group]:
            yield first[row.group - 1], row.cell
