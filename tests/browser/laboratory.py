"""The runs that the pages are looked at with: real ones, tiny, trained once for all workers."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from glassformer.lab.api import train
from glassformer.lab.sweeps.sweep import sweep

#: A text of its own, so that the language models' tokens do not depend on the Python version.
TEXT = "the glass is clear. a head looks back at the word before it. so it goes, and so it goes.\n"

DIGITS = (
    "task.examples=3000",
    'task.operations=["FIRST","SECOND","LAST","MAX"]',
    "train.batch_size=32",
)
#: What a sweep's runs share: hardly trained, so that its ranking has ties.
SWEPT = (
    *("task.examples=300", "model.d_model=16", "train.probes=1"),
    *("train.evaluate_every=4", "train.checkpoint_every=12", "train.steps=12"),
)
SHORT = (*DIGITS, "train.evaluate_every=20", "train.checkpoint_every=20", "train.steps=40")


def shared_laboratory(factory: pytest.TempPathFactory) -> Path:
    """The folder with `runs` and `sweeps`, trained by the first worker that asks for it.

    `tests/lab/test_laboratory.py` asks while the others have other files: at the browser's tests,
    which come last, all of them would wait.
    """
    base = factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "laboratory"
    with open(shared.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "complete").exists():
            shutil.rmtree(shared, ignore_errors=True)
            train_all(shared / "runs")
            (shared / "complete").touch()
    return shared


def train_all(runs: Path) -> None:
    """digits (2 x 4 heads; three checkpoints, more snapshots), seeds of it, reverse, two texts.

    `long` is 512 tokens with 6 layers x 8 heads, hardly trained: what it says does not matter.
    """
    every = (
        "train.evaluate_every=80",
        "train.checkpoint_every=80",
        "train.steps=480",
        "train.keep=3",
    )
    train("digits", name="digits", runs=runs, overrides=(*DIGITS, *every))
    for seed in (1, 2, 3):
        train("digits", name=f"digits-seed{seed}", runs=runs, seed=seed, overrides=SHORT)
    train("reverse", name="reverse", runs=runs, overrides=(
        "task.examples=2000", "task.vocab_size=13", "task.max_length=6", "train.batch_size=32",
        "train.evaluate_every=50", "train.checkpoint_every=50", "train.steps=150", "train.keep=20",
    ))  # fmt: skip
    book = runs.parent / "book.txt"
    book.write_text(TEXT * 200, encoding="utf-8")
    text = (f"task.path={book}", "task.tokenizer=characters", "train.evaluate_examples=16")
    train("text", name="text", runs=runs, overrides=(
        *text, "task.length=32", "train.batch_size=8", "train.steps=100", "train.keep=20",
        "train.evaluate_every=50", "train.checkpoint_every=50",
    ))  # fmt: skip
    train("text", name="long", runs=runs, overrides=(
        *text, "task.length=512", "train.batch_size=2", "train.steps=2",
        "model.decoder.layers.0.count=6", "model.decoder.layers.0.block.attention.n_heads=8",
    ))  # fmt: skip
    sweep(
        "digits",
        vary={"train.lr": ["1e-3", "1e-2"], "train.batch_size": ["16", "32"]},
        overrides=SWEPT,
        seeds=2,
        baseline="lr=1e-3 batch_size=16",
        name="rates",
        sweeps=runs.parent / "sweeps",
        jobs=1,
        progress=False,
    )
