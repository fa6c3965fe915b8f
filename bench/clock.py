"""Timing on a machine that others use too: every side in turn, many rounds, medians, ratios."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping


def interleave(
    sides: Mapping[str, Callable[[], object]], *, rounds: int, inner: int, warmup: int = 5
) -> dict[str, list[float]]:
    """Milliseconds a call for each side and round; the order turns round by round."""
    for side in sides.values():
        for _ in range(warmup):
            side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            for _ in range(inner):
                sides[name]()
            times[name].append((time.perf_counter() - start) / inner * 1e3)
    return times


def rows(
    times: Mapping[str, list[float]], *, bench: str, case: str, baseline: str
) -> Iterator[dict[str, object]]:
    """One row a side; `ratio` is the median over rounds of its time over the baseline's."""
    for name, values in times.items():
        shares = [ours / theirs for ours, theirs in zip(values, times[baseline], strict=True)]
        yield {
            "bench": bench,
            "case": case,
            "name": name,
            "median_ms": round(statistics.median(values), 4),
            "ratio": round(statistics.median(shares), 3),
            "of_limit": None,
        }
