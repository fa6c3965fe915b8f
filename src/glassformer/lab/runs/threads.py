"""The number of threads of a run: as requested, as before, or as many as its work is worth.

The number is no part of a run's spec, but its last bits depend on it: it is recorded with every
checkpoint, and a run that is resumed takes the same number.
"""

import os
from pathlib import Path

import torch

from glassformer.costs.estimates import flops
from glassformer.data.task import Task
from glassformer.kernels.threads import FLOPS, WEIGHTS, threads_for
from glassformer.lab.runs.record import read_state
from glassformer.spec.checks import at_least
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.manifest import count_parameters
from glassformer.spec.model import ModelSpec
from glassformer.spec.train import RunSpec
from glassformer.store.rundir import RunDirectory


def check_threads(threads: int | None, *, engine: str = "torch") -> None:
    """Refuse a number of threads that cannot be taken; None leaves the choice to the run."""
    if threads is None:
        return
    at_least("threads", threads)
    here = os.cpu_count() or 1
    if threads > here:
        raise InputError(f"threads {threads} is more than this machine has", hint=f"{here} at most")
    if engine != "torch":
        raise InputError(
            "NumPy decides on its threads before it starts",
            hint=f"set OPENBLAS_NUM_THREADS={threads} and leave out the option",
        )


def threads_of_run(
    spec: RunSpec, task: Task, *, asked: int | None = None, device: str = "cpu"
) -> int:
    """Return the requested number, else what a batch is worth; torch's own for a GPU's host."""
    check_threads(asked, engine=spec.engine)
    if asked is not None:
        return asked
    if spec.engine != "torch" or not device.startswith("cpu"):
        return torch.get_num_threads()
    length = max(1, round(float(task.lengths("train").mean())))
    return threads_for(flops(spec.model, length=length).training * spec.train.batch_size, FLOPS)


def threads_of_decoding(model: ModelSpec, *, asked: int | None = None, device: str = "cpu") -> int:
    """Return the requested number, else what reading every weight once is worth."""
    check_threads(asked)
    if asked is not None:
        return asked
    if not device.startswith("cpu"):
        return torch.get_num_threads()
    return threads_for(count_parameters(model), WEIGHTS)


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
