"""One cell: train it, and measure what is told about it. A function of the job alone."""

import hashlib
import json
import math
import time
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from bench.findings.cells import Job
from bench.findings.insides import insides
from bench.findings.surgery import operate
from glassformer.data.build_task import build_task
from glassformer.data.task import Task
from glassformer.lab.measure.evaluate import evaluate
from glassformer.models.model import build
from glassformer.spec.checks import shorthands_of
from glassformer.spec.manifest import count_parameters
from glassformer.training.fit import fit
from glassformer.training.torch_engine import TorchEngine

#: The number of steps in a row that were not finite after which a run ends.
GIVE_UP = 20
#: Examples of the training split that are looked at, to tell what was learned from what was kept.
SEEN = 2_000

Result = dict[str, Any]


def learn(job: Job) -> Result:
    """Scores of the job on examples that it never saw, and the CPU seconds of its training."""
    torch.set_num_threads(1)
    spec = job.run()
    task = build_task(spec.task)
    generator = torch.Generator().manual_seed(spec.train.seed)
    model = build(spec.model, generator=generator)
    operate(model, job.cell.without)
    engine = TorchEngine(model, spec.train)
    began, bad, steps = time.process_time(), 0, 0
    for record in fit(engine, task, spec.train):
        steps, bad = record.step, 0 if record.applied else bad + 1
        if bad == GIVE_UP:
            break
    seconds = time.process_time() - began
    result: Result = {
        "settings": settings(job),
        "parameters": count_parameters(spec.model),
        "cpu_seconds": round(seconds, 2),
        "steps": steps,
        "diverged": bad == GIVE_UP,
        **measured(engine, task),
    }
    if job.cell.group == "baseline":
        result["insides"] = insides(engine, task)
    return result


def settings(job: Job) -> str:
    """A hash of everything that decides a result: another one makes it stale."""
    text = json.dumps([unusual(job.run()), sorted(job.cell.without)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def unusual(value: Any) -> Any:
    """A spec by the fields that differ from their defaults: a new field changes nothing old."""
    if is_dataclass(value):
        keys = {held: key for key, held in shorthands_of(type(value)).items()}
        named = ((field, getattr(value, field.name)) for field in fields(value))
        told = {
            keys.get((field.name, type(own).__name__), field.name): unusual(own)
            for field, own in named
            if own != field.default
        }
        return {"kind": type(value).__name__, **told}
    return [unusual(each) for each in value] if isinstance(value, tuple) else value


def measured(engine: TorchEngine, task: Task) -> Result:
    """The test split as a whole and by group, the longer one, and the training split."""
    found: Result = {"splits": {}}
    for split in ("test", "longer", "train"):
        if split not in task.sizes():
            continue
        examples = SEEN if split == "train" else None
        with np.errstate(invalid="ignore", over="ignore"):
            got = evaluate(engine, task, split=split, examples=examples)
        found["splits"][split] = {
            "examples": got.examples,
            "exact": got.exact_match,
            "loss": got.loss if math.isfinite(got.loss) else None,
            "by": {name: dict(shares) for name, shares in got.by.items()},
        }
    if "longer" in task.sizes():
        found["places"] = places(engine, task)
    return found


def places(engine: TorchEngine, task: Task) -> list[float]:
    """Share of right tokens at each place of the answers of the longer split, the end included."""
    rows = np.arange(task.sizes()["longer"])
    right, all_ = np.zeros(64), np.zeros(64)
    for part in np.array_split(rows, max(1, len(rows) // 250)):
        batch = task.batch("longer", part)
        good = engine.logits(batch)["next"].argmax(-1) == batch.targets["next"]
        width = good.shape[1]
        right[:width] += (good & batch.valid).sum(axis=0)
        all_[:width] += batch.valid.sum(axis=0)
    return [round(float(r / a), 4) for r, a in zip(right, all_, strict=True) if a]
