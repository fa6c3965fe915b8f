"""What a run has to do with its process: how many threads it takes, and how a signal stops it.

The number of threads is as requested, as before, or as many as the work is worth. It is no part
of a run's spec, but its last bits depend on it: it is recorded with every checkpoint, and a run
that is resumed takes the same number.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from glassformer.costs.estimates import flops
from glassformer.data.task import Task
from glassformer.kernels.threads import FLOPS, check_threads, current, threads_for
from glassformer.lab.runs.record import read_state
from glassformer.spec.errors import FileError
from glassformer.spec.train import RunSpec
from glassformer.store.rundir import RunDirectory


def threads_of_run(
    spec: RunSpec, task: Task, *, asked: int | None = None, device: str = "cpu"
) -> int:
    """Return the requested number, else what a batch is worth; torch's own for a GPU's host."""
    check_threads(asked, engine=spec.engine)
    if asked is not None:
        return asked
    if spec.engine == "numpy" or not device.startswith("cpu"):
        return current()
    length = max(1, round(float(task.lengths("train").mean())))
    return threads_for(flops(spec.model, length=length).training * spec.train.batch_size, FLOPS)


def recorded_threads(folder: Path) -> int | None:
    """Return the number of a run's newest checkpoint, if this machine has as many threads."""
    directory = RunDirectory(folder)
    for step in reversed(directory.steps()):
        try:
            had = read_state(directory.step_folder(step))["fingerprint"]["threads"]
        except (FileError, KeyError, TypeError):
            continue  # damaged; resuming reports it
        return had if isinstance(had, int) and 1 <= had <= (os.cpu_count() or 1) else None
    return None


@contextlib.contextmanager
def stopping(
    ask: Callable[[], None] = lambda: None, *, only: int | None = None
) -> Iterator[list[int]]:
    """Collect the first signal, and call `ask`; a second one ends the work at once.

    The signals are Ctrl-C, a request to terminate and a closed terminal, or `only` one of them.
    """
    caught: list[int] = []

    def notice(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        ask()

    wanted = [signal.SIGINT, signal.SIGTERM] if only is None else [only]
    if only is None and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        wanted.append(signal.SIGHUP)  # nohup ignores a closed terminal
    try:
        before = {number: signal.signal(number, notice) for number in wanted}
    except ValueError:  # not the main thread, which alone receives signals
        yield caught
        return
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
