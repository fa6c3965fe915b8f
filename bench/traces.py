"""Loss traces of every recipe, this tree against another revision: the same bits, or not.

Each recipe is trained for a few steps by both source trees, one thread, the same seed; losses,
gradient norms and evaluations of every step are compared as written. Then this tree evaluates and
resumes the runs that the other revision wrote. `--against REV` names the revision (a commit that
git knows; by default the last one), `--only` and `--engine` some of the cases.
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.clock import said

ROOT = Path(__file__).parents[1]
SMALL = ("digits", "copy", "reverse", "sort", "parity", "mod-3", "brackets", "fsm")
LARGE = ("translate", "text", "lm", "lm-modern", "lm-10m")
BY_HAND = ("digits", "copy", "parity")
STEPS = {"lm-10m": 3}
KEYS = ("step", "loss", "objective", "grad_norm", "lr")


def options(parser: argparse.ArgumentParser) -> None:
    """Which revision to compare with, and which recipes."""
    parser.add_argument("--against", default="HEAD~1", help="a revision that git knows")
    parser.add_argument("--only", nargs="+", choices=SMALL + LARGE, help="these recipes alone")
    parser.add_argument("--engine", choices=("torch", "numpy"), help="this engine alone")


def run(*, asked: argparse.Namespace, quick: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a row for each recipe: identical, or the first step that differs."""
    with TemporaryDirectory() as folder:
        base = Path(folder)
        other = check_out(asked.against, base / "tree")
        recipes = SMALL[:2] if quick else SMALL + LARGE
        cases = [(name, "torch") for name in recipes]
        cases += [(name, "numpy") for name in recipes if name in BY_HAND]
        cases = [
            (name, engine)
            for name, engine in cases
            if name in (asked.only or recipes) and engine == (asked.engine or engine)
        ]
        for name, engine in cases:
            before = train(other, name, engine, base / "before")
            after = train(ROOT / "src", name, engine, base / "after")
            yield row(f"{name}, {engine}", compare(trace(before), trace(after)))
            yield row(f"{name}, {engine}", take_up(before))


def check_out(revision: str, folder: Path) -> Path:
    """Write the sources of a revision to a folder; return its `src`."""
    packed = subprocess.run(
        ["git", "archive", revision, "src"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    for library in (ROOT / "src/glassformer/kernels").glob("*.so"):
        shutil.copy(library, folder / "src/glassformer/kernels")
    return folder / "src"


def glass(source: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `glass` of a source tree on one thread."""
    one = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "glassformer", *words],
        env={**os.environ, **one},
        capture_output=True,
        text=True,
    )


def train(source: Path, recipe: str, engine: str, runs: Path) -> Path:
    """Train a recipe for a few steps; return the run's folder."""
    steps = STEPS.get(recipe, 12)
    each = max(steps // 2, 1)
    name = f"{recipe}-{engine}"
    words = ["--name", name, "--runs", str(runs), "--seed", "3", "--engine", engine]
    words += ["--steps", str(steps), f"train.evaluate_every={each}"]
    if engine == "torch":
        words += ["--threads", "1"]
    done = glass(source, "train", recipe, *words, f"train.checkpoint_every={each}")
    assert done.returncode == 0, done.stderr
    return runs / name


def trace(run: Path) -> list[dict[str, Any]]:
    """Return what metrics.jsonl says of every step, without times."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key in KEYS or "val" in key}
        for line in lines
    ]


def compare(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Say that two traces are identical, or where they part."""
    for number, (one, two) in enumerate(zip(before, after, strict=False)):
        if one != two:
            return f"DIFFERENT at line {number + 1}"
    return f"identical, {len(before)} lines" if len(before) == len(after) else "DIFFERENT length"


def take_up(run: Path) -> str:
    """Evaluate a run of the other revision, take away its last checkpoint, and resume it here."""
    evaluated = glass(ROOT / "src", "evaluate", str(run), "--json")
    if evaluated.returncode:
        return f"NOT evaluated: {evaluated.stderr.strip()}"
    written = trace(run)
    shutil.rmtree(max((run / "checkpoints").glob("step-*")))
    recipe, _, engine = run.name.rpartition("-")
    words = ["--name", run.name, "--runs", str(run.parent), "--engine", engine, "--resume"]
    if engine == "torch":
        words += ["--threads", "1"]
    resumed = glass(ROOT / "src", "train", recipe, *words)
    if resumed.returncode:
        return f"NOT resumed: {resumed.stderr.strip()}"
    return f"evaluated, resumed: {compare(written, trace(run))}"


row = partial(said, "traces")
