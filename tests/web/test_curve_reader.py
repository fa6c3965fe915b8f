"""Curves as the page keeps them: extended, replaced, and read beside each other."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from glassformer.lab.runs.curves import read_curves
from glassformer.web.app.workspace import CurveReader


def line(step: int, loss: float = 1.0) -> str:
    """A step as a run writes it."""
    return json.dumps({"step": step, "loss": loss, "tokens": 10, "seconds": 0.5}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five steps."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(map(line, range(1, 6))))
    return folder


def test_a_step_that_comes_again_replaces_what_the_page_had(run: Path) -> None:
    reader = CurveReader()
    reader.read(run)
    with (run / "metrics.jsonl").open("a") as log:
        log.write(line(3, 7.0) + line(4, 8.0))
    mine, python = reader.read(run)[0]["loss"], read_curves(run)["loss"]
    assert mine.step.tolist() == python.step.tolist() == [1, 2, 3, 4]
    assert mine.value.tolist() == python.value.tolist() == [1.0, 1.0, 7.0, 8.0]


def test_a_long_run_keeps_nobody_else_waiting(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = run.parent / "other"
    shutil.copytree(run, other)
    begun, go_on = threading.Event(), threading.Event()

    def slow(folder: Path, **options) -> object:
        if folder == run:
            begun.set()
            assert go_on.wait(30)
        return read_curves(folder, **options)

    monkeypatch.setattr("glassformer.web.app.workspace.read_curves", slow)
    reader = CurveReader()
    waiting = threading.Thread(target=reader.read, args=(run,))
    waiting.start()
    assert begun.wait(30)
    assert reader.read(other)[0].last_step == 5
    go_on.set()
    waiting.join(30)
    assert not waiting.is_alive()
