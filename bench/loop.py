"""What the loop costs beside its steps, at the digits recipe: CPU time measured inside one run.

Four parts of the same run: `engine.submit`; making batches (sampler and task); evaluation and
checkpoints, which happen as often as they are asked for; and everything else: records, metrics, the
watch for spikes, the narration, which every step pays. The issue's bar is on the last.
"""

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.clock import said
from glassformer.lab.api import Narrator
from glassformer.lab.recipes import recipe
from glassformer.lab.runs.run import TrainingRun
from glassformer.training.fit import StepRecord

STEPS, SETTLE = 600, 150


class Meter:
    """CPU seconds by part; what a part calls is not counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, its CPU time added to that part."""

        def watched(*arguments: Any, **options: Any) -> Any:
            began, before = time.process_time(), sum(self.seconds.values())
            result = call(*arguments, **options)
            inside = sum(self.seconds.values()) - before
            passed = time.process_time() - began - inside
            self.seconds[part] = self.seconds.get(part, 0.0) + passed
            return result

        return watched


def measure(engine: str) -> tuple[dict[str, float], float]:
    """CPU seconds of the parts and of the whole loop, after the first steps."""
    meter = Meter()
    spec = recipe("digits", [f"train.steps={STEPS}", f"engine={engine}"])
    with TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        run = TrainingRun(spec, Path(name) / "run")
        run.engine.submit = meter.watch("step", run.engine.submit)  # type: ignore[method-assign]
        run.task.batch = meter.watch("batches", run.task.batch)  # type: ignore[method-assign]
        run._evaluate = meter.watch("looking", run._evaluate)  # type: ignore[method-assign]
        run._snapshot = meter.watch("saving", run._snapshot)  # type: ignore[method-assign]
        run.prepare()
        narrator = Narrator("loop", steps=STEPS, start=0)
        began = time.process_time()
        for event in run.events():
            narrator.see(event)
            if isinstance(event, StepRecord) and event.step == SETTLE:
                meter.seconds.clear()
                began = time.process_time()
        return dict(meter.seconds), time.process_time() - began


def run() -> Iterator[dict[str, object]]:
    """Rows a part: milliseconds a step, and its share of steps, batches and the loop itself."""
    torch.set_num_threads(1)
    for engine in ("torch", "numpy"):
        seconds, whole = measure(engine)
        aside = seconds.pop("looking", 0.0) + seconds.pop("saving", 0.0)
        seconds["records, metrics, watch, narration"] = whole - aside - sum(seconds.values())
        for part, spent in seconds.items():
            yield said(
                "loop",
                f"digits, {engine}",
                f"{part}: {spent / (whole - aside):.2%}",
                round(spent / (STEPS - SETTLE) * 1e3, 4),
            )
        yield said(
            "loop",
            f"digits, {engine}",
            f"evaluation and checkpoints: {aside / whole:.2%} of all",
            round(aside / (STEPS - SETTLE) * 1e3, 4),
        )
