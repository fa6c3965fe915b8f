"""Much at once: many runs, long logs, long prompts, many clients; seconds and peak memory.

Rows: 500 runs listed by `glass runs`; the curves of a run of a million steps; a prompt of 50,000
tokens read by a small model, and its first token; 200 clients of the explorer at once. Each is
measured in a process of its own; megabytes are the most that the process held.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.attack_files import make_models
from bench.attack_server import CROWD, Server, crowd
from bench.clock import said
from bench.explore import STEPS, write_steps

RUNS, PROMPT = 500, 50_000


def run(*, quick: bool = False) -> Iterator[dict[str, object]]:
    """A row for each load."""
    import torch

    torch.set_num_threads(1)  # children are forked
    count, steps, prompt = (20, STEPS, 2_000) if quick else (RUNS, STEPS, PROMPT)
    world = make_models()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for number in range(count):
            shutil.copytree(world / "runs" / "digits", place / "runs" / f"run-{number:03d}")
        write_steps(place / "steps")
        yield measured(f"{count} runs listed", lambda: _list(place / "runs"))
        yield measured(f"curves of {steps:,} steps", lambda: _curves(place / "steps"))
        yield measured(f"a prompt of {prompt:,} tokens", lambda: _prompt(prompt))
        server = Server(place / "runs")
        try:
            found = crowd(server)
            told = f"{found.detail} of {CROWD}, {server.megabytes():.0f} MB"
            yield row(f"{CROWD} clients at once, {count} runs", told, found.seconds)
        finally:
            server.end()


def row(case: str, name: str, seconds: float) -> dict[str, object]:
    """A row that informs."""
    return said("load", case, name, seconds * 1e3)


def measured(case: str, work: Callable[[], None]) -> dict[str, object]:
    """Do the work in a forked process; return its seconds and the most memory that it held."""
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status, usage = os.wait4(child, 0)
    assert status == 0, f"{case}: exit {os.waitstatus_to_exitcode(status)}"
    seconds = time.perf_counter() - began
    cpu = usage.ru_utime + usage.ru_stime
    return row(case, f"at most {usage.ru_maxrss / 1024:.0f} MB, {cpu:.2f} s of CPU", seconds)


def _list(runs: Path) -> None:
    from glassformer.lab.runs.table import runs as table

    str(table(runs))


def _curves(folder: Path) -> None:
    from glassformer.lab.runs.curves import read_curves

    read_curves(folder)


def _prompt(count: int) -> None:
    import glassformer as gf

    spec = gf.preset("qwen", d_model=64, n_layers=2, vocab_size=300, max_seq_len=count + 16)
    model = gf.build(spec, seed=0)
    model.generate([number % 300 for number in range(count)], max_new_tokens=1)
