"""Ablations, sizes and hyperparameters on digits and reverse, three seeds each: docs/findings.md.

`python -m bench findings` runs what is missing in docs/findings.json and makes the page again. A
finished cell is not run again unless its settings changed or `--again` is given. Every cell has one
thread; `--jobs` of them run at once. Nothing here measures time, so a busy machine changes nothing.
"""

import argparse
import multiprocessing
import os
import platform
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.clock import said
from bench.findings import results
from bench.findings.cells import Job, jobs
from bench.findings.training import Result, learn, settings

Row = dict[str, object]


def options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark alone."""
    parser.add_argument("--jobs", type=int, default=1, help="cells at once, a thread each")
    parser.add_argument(
        "--deadline",
        type=float,
        default=None,
        help="seconds: no cell begins after it; a sweep stops and saves its runs",
    )
    parser.add_argument("--file", type=Path, default=results.FILE, help="where results are kept")
    parser.add_argument("--only", default="", help="cells whose name holds this text")
    parser.add_argument("--again", action="store_true", help="also what is finished")
    parser.add_argument(
        "--sweep",
        default="",
        choices=("300k", "3m", "rates"),
        help="no cells: a sweep at one size, or of the learning rate across widths",
    )
    parser.add_argument("--render", action="store_true", help="no cells: page and figures alone")


def run(*, asked: argparse.Namespace, quick: bool = False, device: str = "cpu") -> Iterator[Row]:
    """A row for each cell as it ends; then, unless it was a quick look, the page."""
    if asked.sweep:
        from bench.findings import allocation

        found = allocation.answer(asked.sweep, device=device, quick=quick, deadline=asked.deadline)
        if isinstance(found, str):
            yield row(f"sweep {asked.sweep}", found)
            return
        if not quick:
            allocation.keep(asked.sweep, found)
        yield row(f"sweep {asked.sweep}", f"{len(found['shapes'])} cells in {found['seconds']} s")
    elif not asked.render:
        yield from run_cells(
            list(jobs(quick=quick)),
            path=asked.file,
            at_once=asked.jobs,
            deadline=asked.deadline,
            only=asked.only,
            again=asked.again,
        )
    if quick:
        return
    from bench.findings import page

    if not (asked.render or asked.sweep) and not (asked.file.parent / page.PAGE).exists():
        yield row("page", f"none beside {asked.file.name}: nothing is made of it here")
        return
    for written in page.render(results.read(asked.file), asked.file.parent):
        yield row("page", written)


def run_cells(
    every: list[Job],
    *,
    path: Path,
    at_once: int = 1,
    deadline: float | None = None,
    only: str = "",
    again: bool = False,
) -> Iterator[Row]:
    """Run what is missing, and keep each result as soon as it is there."""
    began, found = time.monotonic(), results.read(path)
    chosen = [job for job in every if only in job.key]
    due = [job for job in chosen if again or not is_finished(found, job)]
    yield row("cells", f"{len(chosen)} asked for, {len(chosen) - len(due)} already there")
    waiting = iter(due)
    for job, result in results_of(waiting, at_once, began, deadline):
        found["results"][job.key] = result
        found["machine"] = machine()
        results.write(path, found)
        test = result["splits"]["test"]
        yield row(job.key, f"exact {test['exact']:.2%}, {result['cpu_seconds']:.0f} CPU s")
    left = sum(1 for _ in waiting)
    if left:
        yield row("cells", f"{left} not run: the deadline came first")


def is_finished(found: dict[str, Any], job: Job) -> bool:
    """Whether the file holds a result of exactly these settings."""
    there = found["results"].get(job.key)
    return there is not None and there["settings"] == settings(job)


def results_of(
    waiting: Iterator[Job], at_once: int, began: float, deadline: float | None
) -> Iterator[tuple[Job, Result]]:
    """Results in the order in which they end; after the deadline nothing new is begun."""

    def next_job() -> Job | None:
        late = deadline is not None and time.monotonic() - began > deadline
        return None if late else next(waiting, None)

    if at_once <= 1:
        while (job := next_job()) is not None:
            yield job, learn(job)
        return
    # Read by the workers' libraries when they are imported.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(at_once, mp_context=context) as pool:
        running: dict[Future[Result], Job] = {}
        while True:
            while len(running) < at_once and (job := next_job()) is not None:
                running[pool.submit(learn_named, job.key, job.quick)] = job
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result()


def learn_named(key: str, quick: bool) -> Result:
    """A job by its name: a worker makes it anew, since functions do not travel."""
    return learn(next(job for job in jobs(quick=quick) if job.key == key))


def machine() -> dict[str, str]:
    """What the results depend on beside their settings."""
    return {"python": platform.python_version(), "torch": str(torch.__version__).partition("+")[0]}


row = partial(said, "findings")
