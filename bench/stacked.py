"""Many small models trained as one, against one after another and processes beside each other.

On a CPU: 8 seeds of `digits`, by the executors of `glass sweep`, from their start to the last file;
a row as soon as it is measured. On a GPU: 64 seeds of `lm`'s shape, the complete loop with
evaluation, logging and checkpoints, against the plain engine and the bare stacked step.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.clock import said
from glassformer.data.build_task import build_task
from glassformer.data.rng import Sampler
from glassformer.gpu.training_graphs import Graphs
from glassformer.lab.recipes import recipe
from glassformer.lab.runs.stack import StackedRuns
from glassformer.lab.sweeps.executors import (
    Job,
    Told,
    Update,
    run_here,
    run_processes,
    run_stacked,
    stacks_of,
)
from glassformer.lab.sweeps.sweep import GPU_STACKS
from glassformer.spec.serialize import override
from glassformer.spec.train import RunSpec
from glassformer.training.fit import StepRecord
from glassformer.training.stacked import StackedEngine
from glassformer.training.stacked_batches import Work, rows_of
from glassformer.training.torch_engine import TorchEngine

SEEDS, GPU_SEEDS = 8, 64
#: Steps of a CPU run: 6 s alone. The two seconds that a process takes to start are in the figures.
CPU_STEPS = 300
#: Steps of a GPU run that compile and record; the clock starts after them.
WARM = 5


def run(*, device: str = "cpu", quick: bool = False) -> Iterator[dict[str, Any]]:
    """Yield rows for one device."""
    yield from (_gpu(quick) if device == "cuda" else _cpu(quick))


def row(case: str, name: str, ms: float | None, ratio: float | None, of_limit: float | None = None):
    """A row as every benchmark prints it."""
    return said("stacked", case, name, ms, ratio=ratio, of_limit=of_limit)


# --- a CPU ----------------------------------------------------------------------------------------


#: How `glass sweep` executes runs on a CPU: `--jobs 1`, as it is, and `--stack`.
WAYS: dict[str, Callable[[list[Job]], Iterator[Update]]] = {
    "one after another": run_here,
    "two processes": lambda jobs: run_processes([[job] for job in jobs], count=2),
    "stacked": run_stacked,
    "stacked, half of them in each of two processes": lambda jobs: run_processes(
        [jobs[: len(jobs) // 2], jobs[len(jobs) // 2 :]], count=2
    ),
}


def _cpu(quick: bool) -> Iterator[dict[str, Any]]:
    steps = 20 if quick else CPU_STEPS
    case = f"digits, {SEEDS} seeds, {steps} steps: a model's step"
    first = 0.0
    for name, way in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            jobs = [
                Job(
                    name=str(seed),
                    folder=Path(folder) / str(seed),
                    spec=recipe("digits", [f"train.steps={steps}", f"train.seed={seed}"]),
                )
                for seed in range(SEEDS)
            ]
            began = time.perf_counter()
            for update in way(jobs):
                if isinstance(update, Told):
                    raise RuntimeError(update.text)
            seconds = time.perf_counter() - began
        first = first or seconds
        yield row(case, name, 1_000 * seconds / (SEEDS * steps), seconds / first)


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
    engine, task = (
        TorchEngine.fresh(spec.model, spec.train, device="cuda", graphs=Graphs),
        build_task(spec.task),
    )
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
    engine, task = StackedEngine(specs, device="cuda", graphs=Graphs), build_task(specs[0].task)
    size = specs[0].train.batch_size
    samplers = [
        Sampler(task.sizes()["train"], batch_size=size, seed=seed) for seed in range(len(specs))
    ]
    rows = torch.cat([torch.from_numpy(sampler.rows(0)) for sampler in samplers]).numpy()
    batch = task.batch("train", rows)
    parts = [rows_of(batch, i * size, (i + 1) * size) for i in range(len(specs))]
    work = {i: Work([part], 1e-4, 0) for i, part in enumerate(parts)}
    for _ in range(WARM):
        engine.submit(work)()
    (graph,) = engine.steps.launcher.graphs.values()
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
