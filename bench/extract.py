"""Machines extracted from trained models, five seeds each: equal to the true one, and how faithful.

Parity, mod 3 and brackets of depth 2. A row names the states found, whether no string tells the
machine from the true one, and the share of held-out strings on which it agrees with the model. Run
whole by `make figures`; rows have no ratio.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from bench.clock import said
from glassformer.lab.extract import FOLLOWED, Extraction, extract_machine
from glassformer.lab.recipes import recipe
from glassformer.lab.runs.run import TrainingRun

TWO, SMALL = "model.decoder.layers.count=2", "train.batch_size=64"
#: Recipe and overrides, by machine; parity is the hardest to learn.
MACHINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "parity": ("parity", ("train.steps=5000", TWO)),
    "mod-3": ("mod-3", ("train.steps=3000", TWO, SMALL)),
    "brackets-2": (
        "brackets",
        ("task.machine=brackets-2", "task.max_length=32", "train.steps=1500", SMALL),
    ),
}
#: Two states that the last symbol decides: learned in seconds.
QUICK = {
    "[ab]*b": (
        "parity",
        (
            "task.machine=regex:[ab]*b",
            "task.examples=2000",
            "task.longer=0",
            "train.steps=150",
            "train.lr=0.01",
            "train.batch_size=32",
        ),
    )
}
SEEDS = 5


def options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--only", default="", help="one of the machines")
    parser.add_argument("--seeds", type=int, default=SEEDS)


def extracted(name: str, overrides: tuple[str, ...], seed: int) -> tuple[Extraction, float]:
    """Train a recipe in a temporary folder; return its machine and CPU seconds of both."""
    with tempfile.TemporaryDirectory() as place:
        began = time.process_time()
        run = TrainingRun(recipe(name, (*overrides, f"train.seed={seed}")), Path(place) / "run")
        run.prepare()
        for _ in run.events():
            pass
        return extract_machine(run.engine, run.task), time.process_time() - began


row = partial(said, "extract")


def run(*, asked: argparse.Namespace, quick: bool = False) -> Iterator[dict[str, object]]:
    """Every machine with every seed, then how many of the seeds gave the true one."""
    torch.set_num_threads(1)  # one core is as fast for models this small
    for case, (name, overrides) in (QUICK if quick else MACHINES).items():
        if asked.only not in ("", case):
            continue
        true, followed, shares = 0, 0, []
        for seed in range(1 if quick else asked.seeds):
            found, seconds = extracted(name, overrides, seed)
            true += found.is_true_machine
            followed += found.is_true_machine and found.is_followed
            shares.append(found.fidelity[0].share)
            verdict = "the true machine" if found.is_true_machine else "not the true machine"
            verdict += "" if found.is_followed else " (which the model does not follow reliably)"
            yield row(
                f"{case}, seed {seed}",
                f"{found.machine.n_states} states, {verdict}, fidelity {shares[-1]:.2%}, "
                f"{seconds:.0f} CPU s",
            )
        worst = f"fidelity at least {min(shares):.2%}"
        yield row(
            case,
            f"the true machine from {true} of {len(shares)} seeds, followed on {FOLLOWED:.0%} of "
            f"the strings by {followed}, {worst}",
        )
