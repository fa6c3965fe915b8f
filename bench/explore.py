"""The explorer over many runs and long texts, and the size of a report; what the server computes.

Rows: 200 runs listed, the first time and again; a look at 512 tokens in 6 layers of 8 heads; the
one-file report of 2 layers x 8 heads x 128 tokens. How fast a browser paints is not in here.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from glassformer.lab.session import train
from glassformer.lens.look import look
from glassformer.models.build import build
from glassformer.spec.presets import budget_lm
from glassformer.web.lab import Lab
from glassformer.web.query import Query, to_json
from glassformer.web.report import report_html
from glassformer.web.runs import list_runs

RUNS, AGAIN = 200, 9
LONG, LAYERS, HEADS = 512, 6, 8
#: A text run of 2 layers x 8 heads over 128 tokens, just begun.
SMALL = (
    "task.length=128",
    "task.vocab_size=300",
    "model.decoder.layers.count=2",
    "model.decoder.layers.block.attention.n_heads=8",
    "train.steps=2",
    "train.batch_size=2",
    "train.evaluate_examples=4",
)


def row(case: str, name: str, seconds: float | None = None) -> dict[str, object]:
    """A row that informs."""
    time_ms = None if seconds is None else round(seconds * 1e3, 3)
    shared = {"ratio": None, "of_limit": None}
    return {"bench": "explore", "case": case, "name": name, "median_ms": time_ms, **shared}


def timed(work: Callable[[], object]) -> float:
    """Seconds by the clock."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def run() -> Iterator[dict[str, object]]:
    """Every figure."""
    with tempfile.TemporaryDirectory() as place:
        runs = Path(place) / "runs"
        made = train("lm", name="run-000", runs=runs, overrides=SMALL).directory.folder
        size = len(report_html(str(made)).encode())
        yield row("report", f"2 layers x 8 heads x 128 tokens: {size:,} bytes")
        for number in range(1, RUNS):
            shutil.copytree(made, runs / f"run-{number:03d}")
        lab = Lab(runs)

        def listed() -> None:
            found = list_runs(Query({}, {}, {}), lab)
            assert len(found["runs"]) == RUNS
            to_json(found)

        yield row(f"{RUNS} runs listed", "the first time", timed(listed))
        times = [timed(listed) for _ in range(AGAIN)]
        yield row(f"{RUNS} runs listed", "again", statistics.median(times))
    spec = budget_lm(
        vocab_size=300, d_model=64, d_ff=128, n_layers=LAYERS, n_heads=HEADS, max_seq_len=LONG
    )
    model = build(spec, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(LONG) % spec.vocab_size
    times = [timed(lambda: look(model, ids)) for _ in range(AGAIN)]
    yield row(f"{LONG} tokens, {LAYERS} x {HEADS} heads", "a look", statistics.median(times))
