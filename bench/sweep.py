"""Sweeps that are killed, and sweeps on Ray: the same ranking as one that nothing disturbed.

`kills`: a driver gets SIGKILL at a random moment, another one goes on; the ranking and the bytes of
every run's last weights must be those of the sweep that never died, with no run lost or doubled.
`Ray`: a cluster of two nodes on this machine; the same table bit for bit, also if a worker is
killed while it trains (`--ray`, which takes minutes).
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.clock import said
from glassformer.lab.sweeps.sweep import Sweep, sweep

KILLS = {"one after another": 8, "stacked": 8, "two processes": 4}
HOW: dict[str, dict[str, Any]] = {
    "one after another": {"jobs": 1},
    "stacked": {"stack": True},
    "two processes": {"jobs": 2},
}
TINY = (
    *("task.examples=200", "task.max_length=4", "model.d_model=16", "model.decoder.dropout=0.1"),
    *("train.batch_size=16", "train.steps=24", "train.evaluate_every=6", "train.probes=0"),
    *("train.checkpoint_every=3", "train.evaluate_examples=60"),
)

Row = dict[str, object]
Outcome = tuple[dict[str, Any], dict[str, str]]


def options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark alone."""
    parser.add_argument("--only", default="", help="executors whose name holds this text")
    parser.add_argument("--ray", action="store_true", help="a Ray cluster of two nodes as well")


def run(*, asked: argparse.Namespace, quick: bool = False) -> Iterator[Row]:
    """A row for each executor."""
    for how, kills in KILLS.items():
        if asked.only not in how:
            continue
        yield kill_row(how, 2 if quick else kills)
    if asked.ray:
        yield from ray_rows()


def swept(folder: str, options: dict[str, Any]) -> None:
    """What `glass sweep --resume` does: go on if there is something to go on with, to the end."""
    sweep(
        "digits",
        vary={"train.lr": ["1e-3", "3e-3", "1e-2"]},
        overrides=TINY,
        seeds=2,
        name="s",
        sweeps=folder,
        resume=True,
        progress=False,
        **options,
    )


def outcome(folder: Path) -> Outcome:
    """The ranking, and the SHA-256 of every run's last weights."""
    made = Sweep.open(folder / "s")
    hashes = {}
    for path in sorted((folder / "s" / "runs").glob("c*")):
        weights = path / "checkpoints" / "step-000024" / "model.safetensors"
        hashes[path.name] = hashlib.sha256(weights.read_bytes()).hexdigest()
    return made.ranking.to_dict(), hashes


class Drivers:
    """Processes that sweep, from a fork server with everything imported, on one thread."""

    def __init__(self) -> None:
        os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["bench.sweep", "torch._dynamo"])

    def start(self, folder: Path, how: str) -> BaseProcess:
        """A driver in that folder."""
        child = self.context.Process(target=swept, args=(str(folder), HOW[how]))
        child.start()
        return child

    def finish(self, folder: Path, how: str) -> float:
        """Sweep there to the end; seconds."""
        began = time.perf_counter()
        child = self.start(folder, how)
        child.join()
        if child.exitcode != 0:
            raise RuntimeError(f"the sweep in {folder.name} ended with {child.exitcode}")
        return time.perf_counter() - began


def kill_row(how: str, kills: int) -> Row:
    """Kill drivers at random moments; each sweep goes on to the end."""
    chance, drivers = random.Random(how), Drivers()
    equal = done = tried = 0
    worst = 0.0
    with TemporaryDirectory() as name:
        place = Path(name)
        drivers.finish(place / "warm", how)
        seconds = drivers.finish(place / "whole", how)
        whole = outcome(place / "whole")
        while done < kills:
            tried += 1
            folder = place / f"killed-{tried}"
            child = drivers.start(folder, how)
            child.join(chance.uniform(0.05, seconds))
            if child.exitcode == 0:
                continue  # it was done before the kill came
            child.kill()
            child.join()
            done += 1
            drivers.finish(folder, how)
            lines = (folder / "s" / "results.jsonl").read_text().splitlines()
            names = [json.loads(line)["name"] for line in lines]
            found = outcome(folder)
            worst = max(worst, difference(found, whole))
            equal += found == whole and len(names) == len(set(names)) == 6
    text = f"{equal} of {kills} equal" + (f", scores differ by {worst:.1e}" if worst else "")
    return row(f"{kills} SIGKILLs, {how}", text, seconds)


def difference(ours: Outcome, theirs: Outcome) -> float:
    """The largest relative difference of a run's score; infinite if the order is another one."""
    rows = [made[0]["rows"] for made in (ours, theirs)]
    if [r["name"] for r in rows[0]] != [r["name"] for r in rows[1]]:
        return math.inf
    pairs = zip(
        (v for r in rows[0] for v in r["seeds"]),
        (v for r in rows[1] for v in r["seeds"]),
        strict=True,
    )
    return max(abs(a / b - 1) for a, b in pairs)


def ray_rows() -> Iterator[Row]:
    """Two nodes, then one worker of them killed while it trains."""
    import ray
    from ray.cluster_utils import Cluster

    with TemporaryDirectory() as name:
        place = Path(name)
        drivers = Drivers()
        drivers.finish(place / "here", "one after another")
        whole = outcome(place / "here")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            for case, killed in (("two nodes", False), ("two nodes, a worker killed", True)):
                folder = place / case.replace(" ", "-")
                began = time.perf_counter()
                killer = multiprocessing.get_context("fork").Process(target=kill_worker)
                if killed:
                    killer.start()
                swept(str(folder), {"ray": cluster.address})
                if killed:
                    killer.join()
                same = outcome(folder) == whole
                nodes = len([n for n in ray.nodes() if n["Alive"]])
                text = f"{'the same' if same else 'ANOTHER'} table, {nodes} nodes"
                if killed:
                    text += f", worker killed: {'yes' if killer.exitcode == 0 else 'NO'}"
                yield row(f"Ray, {case}", text, time.perf_counter() - began)
        finally:
            ray.shutdown()
            cluster.shutdown()


def kill_worker() -> None:
    """Kill the first Ray worker that trains, as soon as there is one."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if entry.read_bytes().startswith(b"ray::train_away"):
                    time.sleep(0.5)
                    os.kill(int(entry.parent.name), signal.SIGKILL)
                    return
            except OSError:
                continue
        time.sleep(0.05)
    raise SystemExit(1)


def row(case: str, text: str, seconds: float) -> Row:
    """A row that informs; the time is that of the sweep without a kill."""
    return said("sweep", case, text, round(seconds * 1e3, 1))
