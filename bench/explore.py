"""The explorer over many runs and long texts, in Chromium, and the size of a report.

Rows: the one-file report of 2 layers x 8 heads x 128 tokens; 200 runs listed, the first time and
again; the first curve of a run of a million steps (CPU time); 512 tokens in 6 layers of 8 heads:
what a look takes, when a browser paints, when the enlarged head is drawn, when the next one is, and
how many heads were fetched for it.
"""

import json
import os
import random
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn

from bench.clock import said
from glassformer.lab.api import train
from glassformer.lab.runs.curves import read_curves
from glassformer.lens.inspection import inspect
from glassformer.models.model import build
from glassformer.spec.presets import budget_lm
from glassformer.web.app.query import Query, to_json
from glassformer.web.app.server import create_app
from glassformer.web.app.workspace import Workspace
from glassformer.web.pages.runs import list_runs
from glassformer.web.report.document import report_html

RUNS, AGAIN = 200, 9
STEPS = 1_000_000
LONG, LAYERS, HEADS = 512, 6, 8
TOKEN = "a-token-for-the-bench"
#: The page's time at which the enlarged head was drawn: in the frame in which it says so.
DRAWN = """n => new Promise(done => { const look = () => {
  const {ready = 0} = document.querySelector('.inspect')?.dataset ?? {};
  if (Number(ready) > n && document.querySelector('glass-heat canvas')) done(performance.now());
  else requestAnimationFrame(look);
}; look(); })"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
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
#: One of 512 tokens in 6 layers of 8 heads, hardly trained.
LARGE = (
    f"task.length={LONG}",
    "task.vocab_size=300",
    f"model.decoder.layers.count={LAYERS}",
    f"model.decoder.layers.block.attention.n_heads={HEADS}",
    "train.steps=1",
    "train.batch_size=1",
    "train.evaluate_examples=1",
)


def row(case: str, name: str, seconds: float | None = None) -> dict[str, object]:
    """A row that informs."""
    return said("explore", case, name, None if seconds is None else round(seconds * 1e3, 3))


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
        lab = Workspace(runs)

        def listed() -> None:
            found = list_runs(Query({}, {}, {}), lab)
            assert len(found["runs"]) == RUNS
            to_json(found)

        yield row(f"{RUNS} runs listed", "the first time", timed(listed))
        times = [timed(listed) for _ in range(AGAIN)]
        yield row(f"{RUNS} runs listed", "again", statistics.median(times))
        write_steps(Path(place) / "steps")
        began = time.process_time()
        read_curves(Path(place) / "steps")
        spent = time.process_time() - began
        yield row(f"{STEPS:,} steps", "the first curve, CPU", spent)
        yield from painted(Path(place) / "large")
    spec = budget_lm(
        vocab_size=300, d_model=64, d_ff=128, n_layers=LAYERS, n_heads=HEADS, max_seq_len=LONG
    )
    model = build(spec, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(LONG) % spec.vocab_size
    times = [timed(lambda: inspect(model, ids)) for _ in range(AGAIN)]
    yield row(f"{LONG} tokens, {LAYERS} x {HEADS} heads", "a look", statistics.median(times))


def write_steps(folder: Path) -> None:
    """The metrics of a long run, as a run writes them."""
    draw = random.Random(0)
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as log:
        for step in range(1, STEPS + 1):
            loss = 4 * draw.random()
            line = {"step": step, "loss": loss, "nll": {"next": loss}, "lr": draw.random() / 1e3}
            line |= {"grad_norm": draw.random(), "tokens": 4096, "seconds": round(draw.random(), 6)}
            log.write(json.dumps(line) + "\n")


@contextmanager
def served(runs: Path) -> Iterator[str]:
    """The explorer over a folder, in a thread of its own; its address."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        app = create_app(runs, token=TOKEN, port=port)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True
        thread.join()


def painted(runs: Path) -> Iterator[dict[str, object]]:
    """The page Inspect at a long text, opened anew each time, and its next head by key."""
    case = f"{LONG} tokens, {LAYERS} x {HEADS} heads, Chromium"
    chromium = shutil.which(os.environ.get("GLASS_CHROMIUM") or "chromium")
    if chromium is None:
        yield row(case, "not measured: apt-get install -y chromium")
        return
    from playwright.sync_api import sync_playwright

    train("lm", name="large", runs=runs, overrides=LARGE)
    found: list[tuple[float, float, float]] = []
    with served(runs) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(AGAIN):
            page = browser.new_context(viewport={"width": 1320, "height": 900}).new_page()
            maps: list[str] = []
            page.on("request", lambda asked, maps=maps: maps.append(asked.url))
            page.goto(f"{url}/#t={TOKEN}/inspect?run=large&L=2&H=3")
            drawn = page.evaluate(DRAWN, 0)
            paint = page.evaluate(PAINT)
            fetched = [sum("/attention?" in url for url in maps)]
            ready = page.evaluate("Number(document.querySelector('.inspect').dataset.ready)")
            began = page.evaluate("performance.now()")
            page.keyboard.press("]")
            after = page.evaluate(DRAWN, ready)
            fetched.append(sum("/attention?" in url for url in maps))
            assert fetched == [1, 2], f"heads fetched: {fetched}"
            found.append((paint / 1e3, drawn / 1e3, (after - began) / 1e3))
            page.context.close()
        browser.close()
    first, again = found[0], [statistics.median(each) for each in zip(*found[1:], strict=True)]
    for when, (paint, drawn, after) in (("the first time", first), ("again", again)):
        yield row(case, f"first contentful paint, {when}", paint)
        yield row(case, f"the head is drawn, {when}", drawn)
        yield row(case, f"the next head, {when}", after)
    yield row(case, f"heads fetched: 1 of {LAYERS * HEADS} to open, 1 a key")
