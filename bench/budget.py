"""The budget solver over grids of budgets, and predicted costs against measured ones.

Rows: a grid of reasonable budgets at 0.5 % and 0.1 %, every answer built on the meta device and
counted again; the default budget and a grid around it; the time of an answer; predicted against
measured training memory and step time at three sizes. One thread; on the CPU, times are CPU time.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from bench.clock import said
from bench.footprint import optimizer_bytes, saved_bytes
from glassformer.budget.answer import Answer
from glassformer.budget.design import solve
from glassformer.budget.infeasible import InfeasibleBudget
from glassformer.budget.question import Budget
from glassformer.costs.estimates import training_memory
from glassformer.costs.timing import step_time
from glassformer.data.batch import Batch
from glassformer.lab import budget_report
from glassformer.lab.measure.machine_rates import calibrate
from glassformer.models.model import build
from glassformer.spec.model import ModelSpec
from glassformer.spec.train import TrainSpec
from glassformer.training.torch_engine import TorchEngine

VOCABULARIES = (256, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 50_257, 151_936)
BUDGETS = tuple(int(million * 1e6) for million in (0.1, 0.3, 1, 3, 5, 10, 30, 50, 100, 350))
RATIOS, EXPANSIONS, HEADS = (0.25, 0.35, 0.45), (2.0, 2.66, 3.0, 4.0), (4, 8, 12, 16)
#: Parameters, vocabulary, batch and length of what is measured.
SIZES = (("300k", 2_000, 8, 128), ("3M", 8_000, 8, 128), ("10M", 16_000, 8, 128))
PAIRS = 5
#: The source's shape, whose figures the docs hold.
design = functools.partial(budget_report.design, shape="classic")


def naive_depth(budget: Budget, ratio: float, glu: float) -> int:
    """Return the depth when one size is rounded after the other; 0 where that fails."""
    heads, tables = 1 if budget.heads == "any" else budget.heads, 1 if budget.tied else 2
    d = round(ratio * budget.params / (tables * budget.vocab) / heads) * heads
    left = budget.params - (tables * budget.vocab + budget.length + 2) * d
    return round(left / (4 * d * d + 3 * d * round(glu * d) + 4 * d)) if d and left > 0 else 0


def sane_grid() -> Iterator[Budget]:
    """Yield the budgets for which rounding one size after the other gives 1 to 64 layers."""
    for vocab, total, ratio, glu, heads, tied in itertools.product(
        VOCABULARIES, BUDGETS, RATIOS, EXPANSIONS, HEADS, (True, False)
    ):
        budget = Budget(
            shape="classic",
            vocab=vocab,
            params=total,
            heads=heads,
            tied=tied,
            embedding_ratio=ratio,
            glu_expansion=glu,
        )
        if 1 <= naive_depth(budget, ratio, glu) <= 64:
            yield budget


def source_grid(*, free_head_width: bool) -> Iterator[Budget]:
    """Yield the default budget with other ratios and expansions, tied and untied."""
    for tied, ratio, glu in itertools.product((True, False), RATIOS, EXPANSIONS):
        yield Budget(
            shape="classic",
            tied=tied,
            free_head_width=free_head_width,
            embedding_ratio=ratio,
            glu_expansion=glu,
        )


def recount(answer: Answer) -> int:
    """Count the parameters of the built model; nothing is allocated on the meta device."""
    return sum(p.numel() for p in build(answer.spec, device="meta").parameters())


def is_near(answer: Answer) -> bool:
    """Return True if the ratio is within a point and the expansion within 5 %."""
    best = answer.best
    return abs(best.ratio_drift or 0.0) <= 0.01 and abs(best.glu_drift or 0.0) <= 0.05


def row(case: str, name: str, median_ms: float | None = None) -> dict[str, object]:
    """Return a row without a ratio."""
    time_ms = None if median_ms is None else round(median_ms, 3)
    return said("budget", case, name, time_ms)


def grid_rows(budgets: list[Budget], case: str) -> Iterator[dict[str, object]]:
    """Yield rows with the number of answers within tolerance, the error, the drift and the time."""
    times, errors, ratios, glus, within, near = [], [], [], [], 0, 0
    for budget in budgets:
        began = time.process_time()
        try:
            answer = solve(budget)
        except InfeasibleBudget:
            times.append(time.process_time() - began)
            continue
        times.append(time.process_time() - began)
        assert recount(answer) == answer.best.params
        within += abs(answer.best.params - budget.params) <= budget.tolerance * budget.params
        near += is_near(answer)
        errors.append(abs(answer.best.error))
        ratios.append(abs(answer.best.ratio_drift or 0.0) * 100)
        glus.append(abs(answer.best.glu_drift or 0.0) * 100)
    share = f"{within} of {len(budgets)} within tolerance ({within / len(budgets):.2%})"
    yield row(case, f"{share}, every one counted again on the meta device")
    yield row(case, f"worst error {max(errors):.3%}; within a point and 5%: {near}")
    ninth = (np.percentile(ratios, 90), np.percentile(glus, 90))
    medians = (statistics.median(ratios), statistics.median(glus))
    yield row(
        case,
        f"drift, median and 90%: ratio {medians[0]:.2f} {ninth[0]:.2f} pp, "
        f"expansion {medians[1]:.2f} {ninth[1]:.2f} %",
    )
    yield row(
        case, f"time to answer, worst {max(times) * 1e3:.0f} ms", statistics.median(times) * 1e3
    )


def refusal_times() -> Iterator[dict[str, object]]:
    """Yield the times of certificates, and of options that make a search long."""
    cases: dict[str, tuple[str, int, dict[str, object]]] = {
        "vocabulary too large": ("100k", 16_000, {}),
        "ratio and expansion exact": (
            "10M",
            16_000,
            {"exact_ratio": True, "exact_expansion": True},
        ),
        "ratio out of reach": ("10M", 20, {"ratio_within": "1%"}),
        "multiples of 512": ("10M", 16_000, {"multiple": 512}),
        "any rank": ("10M", 16_000, {"rank": "any"}),
        "any rank, 350M": ("350M", 151_936, {"rank": "any", "heads": 16}),
        "any heads, grouped": ("350M", 16_000, {"heads": "any", "kv_heads": 2}),
        "free head width, free ratio, 350M": (
            "350M",
            256,
            {"embedding_ratio": "free", "free_head_width": True, "heads": 4},
        ),
        "any heads, ratio out of reach, 2G": ("2G", 256, {"heads": "any"}),
        "any heads and rank, 100M": ("100M", 256, {"heads": "any", "rank": "any"}),
        "one head, 1G": ("1G", 32_000, {"heads": 1}),
        "all free, 10G": (
            "10G",
            2,
            {"heads": "any", "embedding_ratio": "free", "glu_expansion": "free"},
        ),
        "alternatives ten million deep, 1G": (
            "1G",
            50_257,
            {"heads": 3, "length": 131_072, "embedding_ratio": 0.01},
        ),
        "within 1e-7, 24M": ("24276609", 4, {"glu_expansion": 3, "tolerance": 1e-7}),
        "within 1e-9, biases, 69M": (
            "68853612",
            59,
            {"bias": "all", "embedding_ratio": "free", "multiple": 3, "min_aspect": 20.0}
            | {"tolerance": 1e-9},
        ),
        "any rank, friendly multiples, 1.65G": (
            "1650827151",
            16_000,
            {"heads": 7, "rank": "any", "embedding_ratio": 0.001, "ffn_multiple": 11}
            | {"max_aspect": 40.0},
        ),
    }
    for name, (params, vocab, options) in cases.items():
        began = time.process_time()
        try:
            design(params, vocab, **options)
            outcome = "answered"
        except InfeasibleBudget:
            outcome = "refused"
        yield row("time to answer", f"{name}: {outcome}", (time.process_time() - began) * 1e3)


def batch_for(model: ModelSpec, *, batch: int, length: int) -> Batch:
    """Return a batch of random tokens and targets."""
    generator = np.random.default_rng(0)
    tokens, targets = generator.integers(0, model.vocab_size, (2, batch, length))
    return Batch(
        tokens=tokens, valid=np.ones(tokens.shape, dtype=np.bool_), targets={"next": targets}
    )


def memory_rows(device: str) -> Iterator[dict[str, object]]:
    """Yield predicted and measured training memory; on CUDA the peak too."""
    if device == "cuda":  # cuBLAS takes its workspaces at its first products, both ways
        torch.nn.Linear(8, 8, device=device)(torch.ones(8, 8, device=device)).sum().backward()
    for params, vocab, batch, length in SIZES:
        model = design(params, vocab, length=length).spec
        predicted = training_memory(model, batch=batch, length=length, device=device)
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        engine = TorchEngine.fresh(model, TrainSpec(), device=device)
        given = batch_for(model, batch=batch, length=length)
        kept = saved_bytes(engine, given)
        weights = sum(p.untyped_storage().nbytes() for p in engine.model.parameters())
        measured = weights + optimizer_bytes(engine) + kept
        yield row(
            f"memory, {params}, batch {batch} x {length}",
            f"predicted {predicted.resident:,}, measured {measured:,} "
            f"({predicted.resident / measured - 1:+.2%})",
        )
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            engine.step([given], lr=1e-3, seed=0)
            peak = torch.cuda.max_memory_allocated() - before
            yield row(
                f"peak on CUDA, {params}, batch {batch} x {length}",
                f"predicted {predicted.peak:,}, measured {peak:,} "
                f"({predicted.peak / peak - 1:+.2%})",
            )


def time_rows(device: str) -> Iterator[dict[str, object]]:
    """Yield the median ratio of predicted to measured step time; each pair is calibrated anew."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    for params, vocab, batch, length in SIZES:
        model = design(params, vocab, length=length).spec
        engine = TorchEngine.fresh(model, TrainSpec(), device=device)
        given = batch_for(model, batch=batch, length=length)
        engine.step([given], lr=1e-3, seed=0)
        shares, measured = [], []
        for _ in range(PAIRS):
            rates = calibrate(device=device, clock=clock)
            predicted = step_time(model, rates, batch=batch, length=length).total
            steps = []
            for _ in range(3):
                began = clock()
                engine.step([given], lr=1e-3, seed=0)  # asks for the loss, which waits
                steps.append(clock() - began)
            measured.append(statistics.median(steps))
            shares.append(predicted / measured[-1])
        spread = ", ".join(f"{share - 1:+.0%}" for share in shares)
        yield row(
            f"step time, {params}, batch {batch} x {length}",
            f"predicted over measured {statistics.median(shares) - 1:+.1%} ({spread})",
            statistics.median(measured) * 1e3,
        )


def run(device: str = "cpu") -> Iterator[dict[str, object]]:
    """Yield every row; on CUDA those of memory and time only."""
    torch.set_num_threads(1)
    if device == "cpu":
        grid = list(sane_grid())
        yield from grid_rows(grid, f"sane grid, 0.5%, {len(grid)} points")
        tight = [replace(budget, tolerance=0.001) for budget in grid]
        yield from grid_rows(tight, f"sane grid, 0.1%, {len(grid)} points")
        yield from grid_rows([Budget(shape="classic")], "the source's default")
        for free in (False, True):
            name = "free head width" if free else "heads divide d_model"
            yield from grid_rows(list(source_grid(free_head_width=free)), f"source's grid, {name}")
        yield from refusal_times()
    yield from memory_rows(device)
    yield from time_rows(device)
