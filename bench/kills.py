"""SIGKILL at random moments, then `--resume`: the end must be that of the run that never died.

Every trial is a fresh run in a child process, killed once and resumed by another child. Half of the
kills come at a random time, half as soon as a checkpoint is seen half-written. Children come from
a fork server that has torch imported, on one thread.
"""

import hashlib
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.clock import said
from glassformer.lab.runs.record import load_run_spec
from glassformer.lab.runs.run import TrainingRun
from glassformer.spec import presets
from glassformer.spec.serialize import from_json, override, to_json
from glassformer.spec.tasks import DigitsTask
from glassformer.spec.train import RunSpec, TrainSpec
from glassformer.store.rundir import RunDirectory

KILLS = 20
STEPS = 60


def sample(engine: str = "torch") -> RunSpec:
    """Small, with dropout, clipping and a schedule, over several epochs; saves every other step."""
    run = RunSpec(
        model=presets.digits(d_model=16, n_heads=2, n_layers=1, d_ff=32),
        task=DigitsTask(examples=200, max_length=4),
        train=TrainSpec(
            steps=STEPS, batch_size=16, accumulate=2, evaluate_every=7, checkpoint_every=2
        ),
    )
    return override(run, ["model.decoder.dropout=0.1", f"engine={engine}"])


def train(text: str, folder: Path) -> None:
    """What `glass train --resume` does: go on if there is something to go on with, to the end."""
    import torch

    torch.set_num_threads(1)
    directory = RunDirectory(folder)
    exists = (folder / "config.json").is_file()
    spec = load_run_spec(directory) if exists else from_json(RunSpec, text)
    run = TrainingRun(spec, folder)
    with run.directory.locked():
        if exists:
            run.resume()
        else:
            run.prepare()
        for _ in run.events():
            pass


def outcome(folder: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The SHA-256 of the last weights, moments and every probe; the metrics without their clock."""
    directory = RunDirectory(folder)
    last = directory.pointed("last")
    assert last is not None, "a run that ended has saved"
    saved = sorted(directory.step_folder(last).glob("*.safetensors"))
    assert len(saved) == 2, "the weights, or the factors of LoRA, and the optimizer's moments"
    files = [*saved, *folder.glob("probes/step-*")]
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    for line in lines:
        line.pop("seconds", None)
    return hashes, lines


class Children:
    """Processes that train, from a fork server on one thread."""

    def __init__(self, spec: RunSpec) -> None:
        self.text = to_json(spec)
        threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        before = {name: os.environ.get(name) for name in threads}
        os.environ.update(dict.fromkeys(threads, "1"))
        try:  # the server keeps the environment in which it was started
            self.context = multiprocessing.get_context("forkserver")
            # torch imports its compiler with the first optimizer: a second, before any step
            self.context.set_forkserver_preload(["bench.kills", "torch._dynamo"])
            warm = self.context.Process(target=os.getpid)
            warm.start()
            warm.join()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def start(self, folder: Path) -> BaseProcess:
        """A child that trains in that folder."""
        child = self.context.Process(target=train, args=(self.text, folder))
        child.start()
        return child

    def finish(self, folder: Path) -> float:
        """Train there to the end; seconds."""
        began = time.perf_counter()
        child = self.start(folder)
        child.join()
        if child.exitcode != 0:
            raise RuntimeError(f"the run in {folder.name} ended with {child.exitcode}")
        return time.perf_counter() - began


def half_written(folder: Path) -> bool:
    """Whether a checkpoint is being written, or was when the writer died."""
    return any((folder / "checkpoints").glob(".tmp-*"))


def kill(child: BaseProcess, folder: Path, *, chance: random.Random, seconds: float) -> None:
    """At a random time; or after a random time, as soon as a checkpoint is half-written."""
    write = chance.random() < 0.5
    end = time.perf_counter() + chance.uniform(0.0, seconds)
    while time.perf_counter() < end and child.is_alive():
        time.sleep(0.001)
    while write and child.is_alive() and not half_written(folder):
        pass
    child.kill()
    child.join()


def trials(
    count: int, *, engine: str = "torch", seed: int = 0, within: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Each kill that met a living run: where it fell, and whether the end is the same."""
    chance = random.Random(seed)
    children = Children(sample(engine))
    with TemporaryDirectory(dir=within) as name:
        place = Path(name)
        children.finish(place / "warm")
        seconds = children.finish(place / "whole")
        whole = outcome(place / "whole")
        done = tried = 0
        while done < count:
            tried += 1
            folder = place / f"killed-{tried}"
            child = children.start(folder)
            kill(child, folder, chance=chance, seconds=seconds)
            if child.exitcode == 0:
                continue  # it was done before the kill came
            done += 1
            saved = RunDirectory(folder).newest_whole()[0]
            during = half_written(folder)
            again = children.finish(folder)
            yield {
                "saved": saved,
                "during_write": during,
                "equal": outcome(folder) == whole and not half_written(folder),
                "seconds": again,
            }


def run(*, kills: int = KILLS) -> Iterator[dict[str, object]]:
    """A row for each engine: how many of the kills led to the same bits."""
    for engine in ("torch", "native", "numpy"):
        yield row(engine, list(trials(kills, engine=engine)))
    from bench import power  # which trains as this does

    for engine in ("torch", "numpy"):
        yield power.row(engine)


def row(engine: str, found: list[dict[str, Any]]) -> dict[str, object]:
    """The trials of one engine; the time is that of going on after the kill."""
    equal = sum(trial["equal"] for trial in found)
    during = sum(trial["during_write"] for trial in found)
    early = sum(trial["saved"] is None for trial in found)
    middle = statistics.median(trial["seconds"] for trial in found)
    return said(
        "kills",
        f"{engine}, {during} in a write, {early} before any",
        f"{equal} of {len(found)} equal",
        round(middle * 1e3, 1),
    )
