"""Models trained by two processes beside the same models trained by one.

Both processes are children of the one that checks, so that it never joins a group itself; they meet
in a file of a temporary folder, and the first one writes what it found there.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from glasscheck.measure import TOLERANCE, Measure, NotOffered
from glassformer.checks.rows.own_models import preset_run, uneven_batch
from glassformer.models.model import build
from glassformer.spec.manifest import stored
from glassformer.spec.train import RunSpec
from glassformer.training.distributed import DistributedEngine, Ranks
from glassformer.training.torch_engine import TorchEngine

#: A decoder of three heads, one with a penalty, an encoder-decoder, experts with a balance loss.
PRESETS = ("fsm-probe", "fsm-factorized", "seq2seq", "moe")
SIZE, STEPS, ROWS = 2, 3, 4
#: Seconds after which the processes are ended.
PATIENCE = 120.0


def processes_are_one(dtype: torch.dtype) -> Measure:
    """Two processes share every batch, with a copy of the weights each, and with half of them."""
    if not torch.distributed.is_available():
        raise NotOffered("this torch has no processes that train together")
    with TemporaryDirectory() as folder:
        name = str(dtype).removeprefix("torch.")
        command = [sys.executable, "-m", __name__, folder, name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        children = [
            subprocess.Popen(
                [*command, str(rank)], env=environment, stdout=subprocess.DEVNULL, stderr=-1
            )
            for rank in range(SIZE)
        ]
        try:
            said = [child.communicate(timeout=PATIENCE)[1].decode() for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        for child, text in zip(children, said, strict=True):
            if child.returncode:
                last = text.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
                return Measure(float("inf"), 0.0, note=last[0])
        worst, note = Path(folder, "found").read_text().split(" ", 1)
    return Measure(float(worst), TOLERANCE[dtype], f"{SIZE} processes, {len(PRESETS)} models", note)


def _train(run: RunSpec, ranks: Ranks | None, *, sharded: bool = False) -> list[np.ndarray]:
    """Return losses, norms and weights after some steps, without those that are all rounding."""
    model = build(run.model, generator=torch.Generator().manual_seed(run.train.seed))
    model = model.double() if run.train.precision == "float64" else model
    engine = (
        TorchEngine(model, run.train)
        if ranks is None
        else DistributedEngine(model, run.train, ranks, sharded=sharded)
    )
    rng, found = np.random.default_rng(85), []
    for step in range(STEPS):
        batch = uneven_batch(run.model, rng, rows=ROWS)
        result = engine.step([batch], lr=run.train.learning_rate(step), seed=step)
        found.append(np.array([result.loss, result.grad_norm, *result.nll.values()]))
    weights = engine.weights()
    idle = {name for name, p in stored(run.model).items() if p.zero_gradient}
    return found + [weights[name] for name in sorted(weights) if name not in idle]


def gap_of(name: str, dtype: torch.dtype, ranks: Ranks, *, sharded: bool) -> float:
    """Return how far the processes are from one, of a preset's small model; the same in each."""
    run = preset_run(name, dtype)
    pairs = zip(_train(run, None), _train(run, ranks, sharded=sharded), strict=True)
    return float(np.max([np.abs(a - b).max() for a, b in pairs]))  # NaN, if there is one


def _main(folder: str, precision: str, rank: int) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.join(
        rank=rank, size=SIZE, local_rank=rank, local_size=SIZE, meeting=f"file://{folder}/meeting"
    )
    worst, note = 0.0, ""
    for name in PRESETS:
        for sharded in (False, True):
            gap = gap_of(name, getattr(torch, precision), ranks, sharded=sharded)
            if not gap <= worst:
                worst, note = gap, f"{name}{', sharded' if sharded else ''}"
    if ranks.writes:
        Path(folder, "found").write_text(f"{worst} {note}")
    ranks.leave()


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
