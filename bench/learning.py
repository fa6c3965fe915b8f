"""What the recipes learn, measured on unseen examples, with the CPU seconds it took.

Reverse, copy and translate (also decoded whole, greedily and with beams), digits with both engines,
and a table of finite-state machines with the number of layers that each needed. Run whole by `make
figures`; rows have no ratio.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from bench.clock import said
from glassformer.data.build_task import build_task
from glassformer.data.task import Task
from glassformer.generation.stepper import TorchStepper
from glassformer.lab.measure.evaluate import Evaluation, evaluate
from glassformer.lab.measure.scores import decode_split
from glassformer.lab.recipes import recipe
from glassformer.lab.runs.run import TrainingRun
from glassformer.spec.tasks import DigitsTask
from glassformer.training.torch_engine import TorchEngine

SEQUENCES = ("reverse", "copy", "translate")
DIGITS = ("engine=torch", "engine=numpy")
#: The hard operation alone, on all numbers of two and three digits: a setting that learns it.
SUM = (
    'task.operations=["SUM"]',
    "task.max_length=3",
    "task.examples=1100",
    "train.steps=8000",
    "train.optimizer.weight_decay=1.0",
    "model.decoder.dropout=0.0",
)
TWO, THREE = "model.decoder.layers.count=2", "model.decoder.layers.count=3"
MANY = "task.examples=60000"
#: Recipe, overrides. One-layer rows have fewer steps than the others: they do not isolate depth.
MACHINES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("parity", ("train.steps=3000",)),
    ("parity", ("train.steps=5000", TWO)),
    ("mod-3", ("train.steps=3000",)),
    ("mod-3", ("train.steps=5000", TWO)),
    ("brackets", ("train.steps=3000",)),
    ("brackets", ("train.steps=6000", TWO)),
    ("fsm", ("task.machine=random-3", "train.steps=3000")),
    ("fsm", ("task.machine=random-3", "train.steps=5000", TWO)),
    ("fsm", ("task.machine=random-4", "train.steps=5000", TWO)),
    ("fsm", ("task.machine=random-5", "train.steps=3000")),
    ("fsm", ("task.machine=random-5", MANY, "train.steps=6000", THREE)),
    (
        "fsm",
        (
            "task.machine=random-6",
            "task.examples=200000",
            "train.steps=8000",
            "train.batch_size=256",
            THREE,
        ),
    ),
    ("fsm", ("task.machine=random-8", "train.steps=5000", THREE)),
)


#: Further examples that no split of the task holds: the recipe was chosen by its own test split.
FRESH = DigitsTask(examples=40_000, seed=777)


def learn(name: str, overrides: tuple[str, ...]) -> tuple[TrainingRun, Evaluation, float]:
    """Train a recipe in a temporary folder; the run, its test split, CPU seconds of training."""
    with tempfile.TemporaryDirectory() as place:
        run = TrainingRun(recipe(name, ("engine=torch", *overrides)), Path(place) / "run")
        run.prepare()
        began = time.process_time()
        for _ in run.events():
            pass
        seconds = time.process_time() - began
        return run, evaluate(run.engine, run.task), seconds


def decoded(run: TrainingRun, beams: int | None) -> str:
    """Whole answers to the held-out sources, decoded from the source alone."""
    assert isinstance(run.engine, TorchEngine)
    model = run.engine.model
    found = decode_split(TorchStepper(model.eval()), run.task, beams=beams)
    return f"{found.right} of {found.examples} wholly right, {found.exact_match:.2%}"


def prompts(task: Task, split: str) -> list[tuple[int, ...]]:
    """Every prompt of a split, without its padding."""
    batch = task.batch(split, np.arange(task.sizes()[split]))
    return [tuple(row[real]) for row, real in zip(batch.tokens, batch.valid, strict=True)]


def fresh_digits(run: TrainingRun) -> dict[str, tuple[int, int]]:
    """Right answers and all, by operation, on examples that the run's task does not hold."""
    held = {prompt for split in run.task.sizes() for prompt in prompts(run.task, split)}
    task, found = build_task(FRESH), {}
    rows = np.array([i for i, p in enumerate(prompts(task, "train")) if p not in held])
    for part in np.array_split(rows, 100):
        batch = task.batch("train", part)
        right = run.engine.logits(batch)["answer"].argmax(-1) == batch.targets["answer"]
        for operation, good in zip(task.groups("train", part)["operation"], right, strict=True):
            before = found.get(operation, (0, 0))
            found[operation] = (before[0] + int(good), before[1] + 1)
    return dict(sorted(found.items()))


def row(case: str, text: str, seconds: float) -> dict[str, object]:
    """A row that informs."""
    return said("learning", case, f"{text}, {seconds:.0f} CPU s")


def run() -> Iterator[dict[str, object]]:
    """Every learning figure."""
    for name in SEQUENCES:
        trained, found, seconds = learn(name, ())
        yield row(name, f"loss {found.loss:.4f}, exact {found.exact_match:.2%}", seconds)
        for way, beams in (("greedy", None), ("beam 4", 4)):
            began = time.process_time()
            text = decoded(trained, beams)
            yield row(name, f"decoded, {way}: {text}", time.process_time() - began)
    for engine in DIGITS:
        trained, _, seconds = learn("digits", (engine,))
        counts = fresh_digits(trained)
        shares = " ".join(f"{op} {right}/{all_}" for op, (right, all_) in counts.items())
        yield row(f"digits, {engine}", shares, seconds)
    _, found, seconds = learn("digits", SUM)
    yield row("digits, SUM alone", f"{found.accuracy:.2%}", seconds)
    torch.set_num_threads(1)  # one core is as fast for models this small
    for name, overrides in MACHINES:
        _, found, seconds = learn(name, overrides)
        truth = f"excess {found.oracle['excess']:.4f}, legal {found.oracle['legal']:.5f}"
        yield row(" ".join((name, *overrides)), truth, seconds)
