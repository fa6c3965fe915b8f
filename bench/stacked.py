"""Many small models trained as one, against one after another and processes beside each other.

On a CPU: 8 seeds of `digits`. On a GPU: 64 seeds of `lm`'s shape, the complete loop with
evaluation, logging and checkpoints, against the plain engine and the bare stacked step.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from glassformer.data.build_task import build_task
from glassformer.data.rng import Sampler
from glassformer.kernels.threads import taking
from glassformer.lab.recipes import recipe
from glassformer.lab.runs.process import threads_of_run
from glassformer.lab.runs.run import TrainingRun
from glassformer.lab.runs.stack import StackedRuns
from glassformer.lab.sweeps.executors import Job, Told, run_processes, stacks_of
from glassformer.lab.sweeps.sweep import GPU_STACKS
from glassformer.spec.serialize import override
from glassformer.spec.train import RunSpec
from glassformer.training.fit import StepRecord
from glassformer.training.stacked import StackedEngine
from glassformer.training.stacked_batches import Joint
from glassformer.training.torch_engine import TorchEngine

SEEDS, GPU_SEEDS, ROUNDS = 8, 64, 3
#: Steps of a GPU run that compile and record; the clock starts after them.
WARM = 5


def run(*, device: str = "cpu", quick: bool = False) -> Iterator[dict[str, Any]]:
    """Yield rows for one device."""
    yield from (_gpu(quick) if device == "cuda" else _cpu(quick))


def row(case: str, name: str, ms: float | None, ratio: float | None, of_limit: float | None = None):
    """A row as every benchmark prints it."""
    return {
        "bench": "stacked",
        "case": case,
        "name": name,
        "median_ms": ms,
        "ratio": ratio,
        "of_limit": of_limit,
    }


# --- a CPU ----------------------------------------------------------------------------------------


def _cpu(quick: bool) -> Iterator[dict[str, Any]]:
    steps, rounds = (20, 1) if quick else (300, ROUNDS)
    specs = [
        recipe("digits", [f"train.steps={steps}", f"train.seed={seed}"]) for seed in range(SEEDS)
    ]
    ways = {"one after another": _in_turn, "two processes": _processes, "stacked": _stacked}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                way(specs, Path(folder))
                times[name].append(time.perf_counter() - began)
    whole = median(times["one after another"])
    for name, seconds in times.items():
        ms = 1_000 * median(seconds) / (SEEDS * steps)
        case = f"digits, {SEEDS} seeds, {steps} steps: a model's step"
        yield row(case, name, ms, median(seconds) / whole)


def _train_alone(job: tuple[RunSpec, Path]) -> None:
    spec, folder = job
    run = TrainingRun(spec, folder)
    with run.directory.locked(), taking(threads_of_run(spec, run.task)):
        run.prepare()
        for _ in run.events():
            pass


def _in_turn(specs: list[RunSpec], folder: Path) -> None:
    for i, spec in enumerate(specs):
        _train_alone((spec, folder / str(i)))


def _processes(specs: list[RunSpec], folder: Path) -> None:
    jobs = [(spec, folder / str(i)) for i, spec in enumerate(specs)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(_train_alone, jobs, chunksize=1)


def _stacked(specs: list[RunSpec], folder: Path) -> None:
    stack = StackedRuns(specs, [folder / str(i) for i in range(len(specs))])
    with stack.locked(), taking(stack.threads):
        for run in stack.runs:
            run.prepare()
        for _ in stack.events():
            pass


# --- a GPU ----------------------------------------------------------------------------------------


def _gpu(quick: bool) -> Iterator[dict[str, Any]]:
    seeds, steps = (4, 60) if quick else (GPU_SEEDS, 2_000)
    base = recipe("lm", ["train.precision=bf16", "train.compile=on", f"train.steps={steps}"])
    case = f"lm, {seeds} seeds: a model's step"
    plain = _plain_step(base, steps=20 if quick else 100)
    yield row(case, "plain engine, alone", plain, None)
    specs = [override(base, [f"train.seed={seed}"]) for seed in range(seeds)]
    bare = _bare_step(specs, 20 if quick else 200) / seeds
    yield row(case, "bare stacked step", bare, bare / plain)
    with tempfile.TemporaryDirectory() as folder:
        spent = _complete(specs, Path(folder))
    for name, ms in spent.items():
        limit = bare / ms if name == "complete loop" else None
        yield row(case, name, ms, ms / plain, limit)
    workers = min(GPU_STACKS, (os.cpu_count() or 1) // 2)
    with tempfile.TemporaryDirectory() as folder:
        ms = _divided(specs, Path(folder), workers=workers)
    yield row(case, f"complete loop, divided among {workers} processes", ms, ms / plain, bare / ms)


def _plain_step(spec: RunSpec, *, steps: int) -> float:
    """Return the milliseconds of a step of one model, operation by operation."""
    spec = override(spec, ["train.compile=off"])
    engine, task = TorchEngine.fresh(spec.model, spec.train, device="cuda"), build_task(spec.task)
    sampler = Sampler(task.sizes()["train"], batch_size=spec.train.batch_size, seed=0)
    for step in range(WARM + steps):
        if step == WARM:
            torch.cuda.synchronize()
            began = time.perf_counter()
        engine.step([task.batch("train", sampler.rows(step))], lr=1e-3, seed=step)
    torch.cuda.synchronize()
    return 1_000 * (time.perf_counter() - began) / steps


def _bare_step(specs: list[RunSpec], steps: int) -> float:
    """Return the milliseconds of a stacked step alone: the same batch again and again."""
    engine, task = StackedEngine(specs, device="cuda"), build_task(specs[0].task)
    size = specs[0].train.batch_size
    samplers = [
        Sampler(task.sizes()["train"], batch_size=size, seed=seed) for seed in range(len(specs))
    ]
    rows = torch.cat([torch.from_numpy(sampler.rows(0)) for sampler in samplers]).numpy()
    work = Joint([task.batch("train", rows)], [1e-4] * len(specs), engine.slots)
    for _ in range(WARM):
        engine.submit(work)()
    (graph,) = engine.steps.graphs.values()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        graph.replay()
    torch.cuda.synchronize()
    return 1_000 * (time.perf_counter() - began) / steps


def _complete(specs: list[RunSpec], folder: Path) -> dict[str, float]:
    """Return milliseconds of a model's step: of the complete loop, and of it without looking."""
    stack = StackedRuns(specs, [folder / str(i) for i in range(len(specs))], device="cuda")
    with stack.locked():
        for run in stack.runs:
            run.prepare()
        began, steps = 0.0, 0.0
        first = time.perf_counter()
        for i, event in stack.events():
            if isinstance(event, StepRecord) and i == len(specs) - 1:
                if event.step == WARM:
                    began = time.perf_counter()
                elif event.step > WARM:
                    steps += event.seconds * len(specs)
        torch.cuda.synchronize()
        end = time.perf_counter()
    done = (specs[0].train.steps - WARM) * len(specs)
    return {
        "complete loop": 1_000 * (end - began) / done,
        "its steps, without evaluation and saving": 1_000 * steps / done,
        "complete loop with compiling": 1_000 * (end - first) / done,
    }


def _divided(specs: list[RunSpec], folder: Path, *, workers: int) -> float:
    """Return milliseconds of a model's step where stacks share the GPU, once all of them train."""
    jobs = [
        Job(name=str(i), folder=folder / str(i), spec=spec, device="cuda")
        for i, spec in enumerate(specs)
    ]
    reached = dict.fromkeys((job.name for job in jobs), 0)
    began, steps = 0.0, 0
    for update in run_processes(stacks_of(jobs, workers=workers), count=workers):
        if isinstance(update, Told):
            raise RuntimeError(update.text)
        reached[update.name] = update.step
        if not began and min(reached.values()) >= WARM:
            began = time.perf_counter()
            steps = sum(specs[int(name)].train.steps - step for name, step in reached.items())
    return 1_000 * (time.perf_counter() - began) / steps
