"""Difficult random budgets, and the time that each takes to answer or to refuse.

Sampled from a seed: any total from 10 k to 10 G with any options, and four kinds of budgets in
which few regions can be pruned. Times are CPU time, with alternatives and certificates.
"""

import argparse
import contextlib
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench.budget import row
from glassformer.budget.design import solve
from glassformer.budget.infeasible import InfeasibleBudget
from glassformer.budget.question import WISHES, Budget
from glassformer.budget.search import SearchStopped
from glassformer.spec.errors import GlassError, InputError

SEED = 6
#: How many of all options at once, and of each kind.
MIXED, EACH = 600, 50
#: What the total may be off by, where all options are mixed.
TOLERANCES = (1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 5e-3, 5e-3, 0.05, 0.5, 0.9)
#: Seconds by which answers are counted.
MARKS = (0.05, 0.2, 1.0)


def _between(draw: random.Random, low: float, high: float) -> int:
    """Sample a whole number from a log-uniform distribution."""
    return round(low * (high / low) ** draw.random())


def _wish(
    draw: random.Random, name: str, values: tuple[float, ...], limits: tuple[float, ...]
) -> dict[str, Any]:
    """Sample the options of one wish: in most cases a target, else free, exact or limited."""
    value, (exact, within) = draw.choice(values), WISHES[name]
    return draw.choice(
        [{name: value}] * 3
        + [{name: "free"}, {name: value, exact: True}, {name: value, within: draw.choice(limits)}]
    )


def mixed(draw: random.Random) -> Budget:
    """Sample any budget, with several options at a time."""
    heads = draw.choice(["any", 1, 3, 4, 7, 8, 12, 16, 64])
    groups = draw.choice([None, None, 1, 2])
    options: dict[str, Any] = {  # in the order in which they are drawn
        "ffn_multiple": lambda: draw.choice([3, 11, 64]),
        "free_head_width": lambda: heads != "any",
        "max_aspect": lambda: draw.choice([40.0, 200.0]),
        "max_layers": lambda: draw.choice([100, 300]),
        "min_aspect": lambda: draw.choice([0.1, 20.0]),
        "min_layers": lambda: draw.choice([2, 24, 100]),
        "rank": lambda: draw.choice(["any", "any", 7, 64]),
        "ratio_covers": lambda: "input",
        "multiple": lambda: draw.choice([3, 8, 64]),
    }
    chosen = {name: value() for name, value in options.items() if draw.random() < 0.2}
    return Budget(
        shape="classic",
        params=_between(draw, 1e4, 1e10),
        vocab=_between(draw, 2, 3e5),
        tolerance=draw.choice(TOLERANCES),
        heads=heads,
        kv_heads=groups if heads == "any" or groups is None or heads % groups == 0 else None,
        tied=draw.random() < 0.5,
        length=_between(draw, 1, 131_072),
        position=draw.choice(["learned", "learned", "rotary", "none"]),
        bias=draw.choice(["none", "none", "qkv", "all", "no_key"]),
        norm=draw.choice(["layernorm", "rmsnorm"]),
        **_wish(draw, "embedding_ratio", (0.001, 0.01, 0.1, 0.35, 0.6, 0.9), (1e-4, 0.01, 0.1)),
        **_wish(draw, "glu_expansion", (0.5, 1.0, 2.66, 4.0, 8.0), (1e-4, 0.01, 0.2)),
        **{"ffn_multiple": 1} | chosen,
    )


def ranked(draw: random.Random) -> Budget:
    """Sample a budget of a billion and more with any rank and a tiny wished ratio."""
    return replace(
        mixed(draw),
        params=_between(draw, 1e9, 1e10),
        tolerance=draw.choice([1e-4, 5e-3, 0.05]),
        rank="any",
        embedding_ratio=draw.choice([0.0001, 0.001, 0.01]),
        exact_ratio=False,
        ratio_within=None,
    )


def tight(draw: random.Random) -> Budget:
    """Sample a tolerance of a few parameters, with counts that share no divisor."""
    base = replace(
        mixed(draw),
        params=_between(draw, 1e7, 1e10),
        tolerance=draw.choice([1e-10, 1e-9, 1e-8, 1e-7]),
        bias=draw.choice(["qkv", "all", "no_key"]),
    )
    return replace(
        base,
        free_head_width=base.heads != "any" and draw.random() < 0.5,
        rank=None if base.ratio is None else draw.choice([None, "any"]),
    )


def expanded(draw: random.Random) -> Budget:
    """Sample an expansion limited to a hundredth of a per cent, with any number of heads."""
    value, within = draw.choice([2.0, 2.66, 2.7, 3.14159, 8 / 3]), draw.choice([1e-5, 1e-4])
    return replace(
        mixed(draw),
        heads="any",
        free_head_width=False,
        kv_heads=draw.choice([None, 2]),
        glu_expansion=value,
        exact_expansion=False,
        glu_within=within,
        tolerance=draw.choice([1e-6, 1e-4, 5e-3]),
    )


def wide(draw: random.Random) -> Budget:
    """Sample a tolerance of half the total and more."""
    return replace(mixed(draw), tolerance=draw.choice([0.5, 0.7, 0.9, 0.99]))


KINDS = {
    "mixed": mixed,
    "any rank, tiny ratio": ranked,
    "a few parameters": tight,
    "expansion within 1e-4": expanded,
    "half the total": wide,
}


def stress_set() -> Iterator[tuple[str, Budget]]:
    """Yield every budget with its kind; one that breaks a rule is sampled again."""
    for name, kind in KINDS.items():
        draw, made = random.Random(f"{SEED} {name}"), 0
        while made < (MIXED if name == "mixed" else EACH):
            with contextlib.suppress(InputError):
                budget = kind(draw)
                made += 1
                yield name, budget


def outcome(budget: Budget, seconds: float = math.inf) -> tuple[str, float]:
    """Return `answered`, `refused` or another word, and the CPU time; stop after `seconds`."""
    began = time.process_time()
    try:
        answer = solve(budget, stop=lambda: time.process_time() - began > seconds)
        ended = "proven" if not answer.not_proven else "answered"
    except InfeasibleBudget:
        ended = "refused"
    except SearchStopped:
        ended = "given up"
    except GlassError:
        ended = "left open"
    return ended, time.process_time() - began


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--patience", type=float, help="seconds after which one is given up")
    parser.add_argument("--each", action="store_true", help="a row for every question")


def run(*, asked: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield the distribution of times and outcomes, by kind and of all."""
    found: dict[str, list[tuple[str, float]]] = {}
    for number, (name, budget) in enumerate(stress_set()):
        ended, seconds = outcome(budget, asked.patience or math.inf)
        found.setdefault(name, []).append((ended, seconds))
        if asked.each:
            yield row(name, f"{number}: {ended}", seconds * 1e3)
    every = [each for kind in found.values() for each in kind]
    for name, kind in (*found.items(), ("all", every)):
        times = sorted(seconds for _, seconds in kind)
        slow = ", ".join(f"{sum(t > mark for t in times)} over {mark:g} s" for mark in MARKS)
        ends = sorted({ended for ended, _ in kind})
        counts = ", ".join(f"{sum(e == end for e, _ in kind)} {end}" for end in ends)
        yield row(
            f"stress: {name}",
            f"{len(kind)} questions: {counts}; {slow}; worst {times[-1]:.2f} s",
            statistics.median(times) * 1e3,
        )
