"""Timing on a machine that others use too: every side in turn, many rounds, medians, ratios."""

import gc
import importlib.util
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import torch

Row = dict[str, object]
Sides = dict[str, Callable[[], object]]


def interleave(
    sides: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    inner: int,
    warmup: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Milliseconds a call for each side and round; the order turns round by round."""
    for side in sides.values():
        for _ in range(warmup):
            side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = clock()
            for _ in range(inner):
                sides[name]()
            times[name].append((clock() - start) / inner * 1e3)
    return times


def rows(
    times: Mapping[str, list[float]], *, bench: str, case: str, baseline: str
) -> Iterator[Row]:
    """One row a side; `ratio` is the median over rounds of its time over the baseline's."""
    for name, values in times.items():
        shares = [ours / theirs for ours, theirs in zip(values, times[baseline], strict=True)]
        ratio = round(statistics.median(shares), 3)
        yield said(bench, case, name, round(statistics.median(values), 4), ratio=ratio)


def said(
    bench: str,
    case: str,
    name: str,
    ms: float | None = None,
    *,
    ratio: float | None = None,
    of_limit: float | None = None,
) -> Row:
    """Return a row of a benchmark; one without a time and a ratio only informs."""
    row = {"bench": bench, "case": case, "name": name}
    return {**row, "median_ms": ms, "ratio": ratio, "of_limit": of_limit}


def installed(name: str) -> bool:
    """Is there such a peer here?"""
    return importlib.util.find_spec(name) is not None


def bandwidth(device: str) -> float:
    """Bytes a second, reading: the faster of a sum and a product with itself, of a large array."""
    data = torch.ones(1 << (26 if device == "cpu" else 28), device=device)
    best = 0.0
    for read in (torch.sum, lambda x: torch.dot(x[: len(x) // 2], x[len(x) // 2 :])):
        times = []
        for _ in range(9):
            begin = time.perf_counter()
            float(read(data))  # reading the result waits for it
            times.append(time.perf_counter() - begin)
        best = max(best, data.nbytes / statistics.median(times))
    return best


def growth(call: Callable[[int], None], *, times: int, warmup: int) -> str:
    """What so many calls add to the process's memory, to Python's, and to the live tensors.

    Of Python's it is what repeats: the least of four blocks, for all of them. It adapts its code
    now and then, some kilobytes each; a leak grows in every block.
    """
    for number in range(warmup):
        call(number)
    gc.collect()
    tensors, resident = live_tensors(), resident_bytes()
    tracemalloc.start()
    held, block = [tracemalloc.get_traced_memory()[0]], max(1, times // 4)
    for number in range(times):
        call(number)
        if (number + 1) % block == 0:
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    python = min(after - before for before, after in pairwise(held)) * times // block
    more = (resident_bytes() - resident) // 1024
    return (
        f"growth: {live_tensors() - tensors} tensors, {max(0, python) // 1024} KiB of Python, "
        f"{max(0, more)} KiB resident"
    )


def live_tensors() -> int:
    """Tensors that somebody still holds."""
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def resident_bytes() -> int:
    """Return the bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
