"""Cases that two processes run together; each returns what `test_distributed` judges.

Both run all cases in one process group, since importing torch is what costs.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glassformer.checks.rows.processes import PRESETS, gap_of
from glassformer.data.build_task import build_task
from glassformer.lab.measure.evaluate import evaluate
from glassformer.lab.runs.assemble import Peers
from glassformer.lab.runs.run import TrainingRun
from glassformer.models.model import build
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import stored
from glassformer.spec.train import RunSpec
from glassformer.training.distributed import DistributedEngine, Ranks
from glassformer.training.fit import StepRecord, fit
from glassformer.training.torch_engine import TorchEngine
from tests.planting import Call, Fault, Name, mutate, planted
from tests.training.samples import RUNS, digits, machine, uneven

#: 10 rows a batch and 48 or 64 examples: the last batch of an epoch is short, 5 rows a rank or 4.
EXACT = ("train.precision=float64", "train.steps=7", "train.batch_size=10")
EXPERTS = (
    'model.decoder.layers.block.ffn={"kind": "MoE", "n_experts": 4, "experts_per_token": 2, '
    '"balance": 0.5, "expert": {"kind": "MLP", "d_ff": 13}}'
)


def engine_of(run: RunSpec, ranks: Ranks | None, *, sharded: bool = False):
    model = build(run.model, generator=torch.Generator().manual_seed(run.train.seed))
    if run.train.precision == "float64":
        model.double()
    if ranks is None:
        return TorchEngine(model, run.train)
    return DistributedEngine(model, run.train, ranks, sharded=sharded)


def trained(run: RunSpec, ranks: Ranks | None, *, sharded: bool = False):
    engine = engine_of(run, ranks, sharded=sharded)
    return engine, list(fit(engine, build_task(run.task), run.train))


def gap(run: RunSpec, ranks: Ranks, *, sharded: bool = False) -> float:
    """The worst difference of losses, norms, weights and moments from those of one process.

    Not of weights whose gradient is 0 by theory: it is all rounding, which Adam makes large.
    """
    alone, wanted = trained(run, None)
    ours, found = trained(run, ranks, sharded=sharded)
    idle = {name for name, p in stored(run.model).items() if p.zero_gradient}
    theirs, mine = ({**e.state(), **e.weights()} for e in (alone, ours))
    assert theirs.keys() == mine.keys()
    pairs = [(theirs[name], mine[name]) for name in theirs if name not in idle]
    for a, b in zip(wanted, found, strict=True):
        pairs.append((np.array(numbers(a)), np.array(numbers(b))))
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def numbers(record: StepRecord) -> list[float]:
    return [record.objective, record.grad_norm, record.tokens, *record.nll.values()]


def equal(ranks: Ranks, folder: Path) -> dict[str, float]:
    """Every kind of head, an encoder, a penalty, experts; two batches a step; sharded or not."""
    several = "train.accumulate=2"
    cases = {
        "digits": digits(*EXACT),
        "machine, 2 batches": machine(*EXACT, several),
        "reverse": RUNS["reverse"](*EXACT),
        "experts, 2 batches": machine(*EXACT, several, EXPERTS, "model.decoder.layers.count=2"),
    }
    found = {name: gap(run, ranks) for name, run in cases.items()}
    for name in ("machine, 2 batches", "reverse", "experts, 2 batches"):
        found[f"{name}, sharded"] = gap(cases[name], ranks, sharded=True)
    return found


def narrow(ranks: Ranks, folder: Path) -> dict[str, float]:
    """In float32, where one process computes by C kernels."""
    exact = tuple(word.replace("float64", "float32") for word in EXACT)
    runs = {"machine": machine(*exact, EXPERTS), "reverse": RUNS["reverse"](*exact)}
    return {
        f"{name}, sharded {sharded}": gap(run, ranks, sharded=sharded)
        for name, run in runs.items()
        for sharded in (False, True)
    }


FAULTS = (
    Fault(
        "each rank divides by its own tokens",
        mutate(
            "training.distributed:DistributedEngine.step",
            Name("batches"),
            to="[self.ranks.share(batch) for batch in {it}]",
        ),
        "",
    ),
    Fault(
        "gradients are not summed",
        mutate(
            "training.distributed:DistributedEngine._sum_gradients", Call("sum"), to="{args[0]}"
        ),
        "",
    ),
)


def faults(ranks: Ranks, folder: Path) -> dict[str, float]:
    """The same comparison with a fault planted."""
    run = machine(*EXACT, "train.steps=2", EXPERTS)
    found = {}
    for fault in FAULTS:
        with planted(fault):
            found[fault.name] = gap(run, ranks)
    return found


def row(ranks: Ranks, folder: Path) -> dict[str, float]:
    """What the row of `glass verify` sees with each fault planted, and without one."""
    found = {"": max(gap_of(name, torch.float64, ranks, sharded=False) for name in PRESETS)}
    for fault in FAULTS:
        with planted(fault):
            found[fault.name] = max(
                gap_of(name, torch.float64, ranks, sharded=False) for name in PRESETS
            )
    return found


def idle(ranks: Ranks, folder: Path) -> dict[str, float]:
    """A batch of one row: rank 1 has nothing to do, and takes part."""
    found = {}
    for name, run in {"answer": digits(*EXACT), "experts": machine(*EXACT, EXPERTS)}.items():
        batch = build_task(run.task).batch("train", np.arange(1))
        for sharded in (False, True):
            engines = engine_of(run, None), engine_of(run, ranks, sharded=sharded)
            one, two = (numbers(e.step([batch], lr=0.01, seed=0)) for e in engines)
            found[f"{name}{', sharded' if sharded else ''}"] = worst(one, two)
    return found


def worst(a: list[Any], b: list[Any]) -> float:
    return float(np.abs(np.array(a) - np.array(b)).max())


def not_finite(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """A row of rank 1 spoils the step; no rank changes anything."""
    run, found = digits("train.batch_size=10"), {}
    for sharded in (False, True):
        engine, batch = engine_of(run, ranks, sharded=sharded), uneven(run, 10)
        engine.step([batch], lr=0.01, seed=0)
        before = engine.weights() | engine.state()
        weights = np.ones(10, np.float32)
        weights[1] = 3e38  # times a loss above 1 it is no longer a number of float32
        result = engine.step([replace(batch, weights=weights)], lr=0.01, seed=0)
        after = engine.weights() | engine.state()
        same = all(before[name].tobytes() == after[name].tobytes() for name in after)
        found["sharded" if sharded else "copies"] = (result.applied, same)
    return found


def dropout(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The same bits each time and on each rank, but not those of one process."""
    run = digits("train.steps=4", "model.decoder.dropout=0.3")
    (first, one), (_, again), (_, alone) = (trained(run, each) for each in (ranks, ranks, None))
    mine = np.concatenate([array.ravel() for array in first.weights().values()])
    every = ranks.gather_rows(mine[None])
    return {
        "again": [r.loss for r in one] == [r.loss for r in again],
        "ranks": bool((every[0] == every[1]).all()),
        "alone": [r.loss for r in one] == [r.loss for r in alone],
    }


def evaluation(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """27 examples in two processes; by losses alone, and against an oracle's distribution."""
    found = {}
    for name, make in {"digits": digits, "machine": machine}.items():
        run = make(*EXACT)
        task = build_task(run.task)
        for sharded in (False, True):
            engines = engine_of(run, None), engine_of(run, ranks, sharded=sharded)
            one, two = (evaluate(e, task, split="train", examples=27) for e in engines)
            values = [[e.loss, e.accuracy, *e.oracle.values()] for e in (one, two)]
            found[f"{name}{sharded}"] = (worst(*values), one.by == two.by)
    return found


def refusals(ranks: Ranks, folder: Path) -> dict[str, str]:
    """Ranks that cannot work together say which and why."""
    found = {}
    facts = {"a package": bytes(32), "data": bytes([ranks.rank]) * 32}
    for name, check in {
        "data": lambda: ranks.check_equal(facts),
        "size": lambda: ranks.check_batch(9),
    }.items():
        try:
            check()
        except InputError as error:
            found[name] = f"{error.what} | {error.hint}"
    return found


def crossing(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """A run that stops on two ranks, goes on alone, and ends on two, sharded or not."""
    run = digits(*EXACT, "train.steps=9", "train.checkpoint_every=4", "train.evaluate_every=3")
    alone = [numbers(record) for record in trained(run, None)[1]]
    found: dict[str, Any] = {}
    for sharded in (False, True):
        place, peers = folder / f"crossing-{sharded}", Peers(ranks, sharded=sharded)
        ours: list[list[float]] = []
        for step, group in ((3, peers), (6, None), (9, peers)):
            if group is None and not ranks.writes:
                ours += [[]] * 3
                ranks.any(False)  # wait for rank 0
                continue
            made = TrainingRun(run, place, peers=group)
            made.resume() if step > 3 else made.prepare()
            ranks.any(False) if group is not None else None
            for event in made.events():
                if isinstance(event, StepRecord):
                    ours.append(numbers(event))
                    # of two ranks only one is asked to stop, the one that does not write
                    made.stop_requested |= event.step >= step - 1 and (
                        ranks.rank == 1 or group is None
                    )
            found[f"{sharded}, step {step}"] = (made.progress.step, made.stopped)
            if group is None:
                ranks.any(False)
        found[f"{sharded}, gap"] = worst(alone, ours) if ranks.writes else 0.0
    return found


CASES: tuple[Callable[[Ranks, Path], Any], ...] = (
    equal,
    narrow,
    faults,
    row,
    idle,
    not_finite,
    dropout,
    evaluation,
    refusals,
    crossing,
)


def main(rank: int, folder: Path) -> None:
    """Run every case; write what each rank found."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    ranks = Ranks.join(rank=rank, size=2, local_rank=rank, local_size=2, meeting=meeting)
    found = {}
    for case in CASES:
        found[case.__name__] = case(ranks, folder)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    ranks.leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
