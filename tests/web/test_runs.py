"""The page Runs: what is listed, what is read, what a run that is no more looks like."""

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from glassformer.lab.runs import table
from glassformer.lab.runs.curves import read_curves
from glassformer.store.rundir import RunDirectory
from glassformer.web.app import limits
from glassformer.web.app.workspace import CurveReader, cursor_of
from glassformer.web.pages.runs import band
from tests.web.conftest import Client, Opener


def line(step: int, loss: float | str = 1.0) -> str:
    """A step as a run writes it."""
    return json.dumps({"step": step, "loss": loss, "nll": {"answer": loss}, "lr": 0.1,
                       "grad_norm": 1.0, "tokens": 10, "seconds": 0.5}) + "\n"  # fmt: skip


@pytest.fixture
def growing(runs: Path, tmp_path: Path) -> Path:
    """A copy of a run that says it is running."""
    run = tmp_path / "runs" / "growing"
    run.mkdir(parents=True)
    (run / "config.json").write_bytes((runs / "digits-0" / "config.json").read_bytes())
    record = json.loads((runs / "digits-0" / "run.json").read_text(encoding="utf-8"))
    (run / "run.json").write_text(
        json.dumps({**record, "status": "running", "val": None, "step": 0})
    )
    (run / "metrics.jsonl").write_text("".join(line(step) for step in range(1, 6)))
    return run


@pytest.fixture
def writer(growing: Path) -> Iterator[None]:
    """Somebody holds the run, as a training process does."""
    with RunDirectory(growing).locked():
        yield


def test_the_list_says_what_run_json_says(client: Client, runs: Path) -> None:
    listed = {run["id"]: run for run in client.get("/api/runs")["runs"]}
    assert list(listed) == ["digits-0", "digits-1", "quick"]
    record = json.loads((runs / "quick" / "run.json").read_text(encoding="utf-8"))
    quick = listed["quick"]
    assert quick["status"] == record["status"] == "finished"
    assert (quick["step"], quick["steps"], quick["task"]) == (8, 8, "digits")
    assert quick["val_loss"] == record["val"]["loss"]
    assert quick["val_accuracy"] == record["val"]["accuracy"]
    losses = read_curves(runs / "quick")["loss"].value.tolist()
    assert quick["spark"][0] == losses[0]
    assert set(quick["spark"]) <= set(losses)


def test_a_run_has_checkpoints_settings_and_splits(client: Client, runs: Path) -> None:
    run = client.get("/api/runs/digits-0")
    assert run["checkpoints"] == RunDirectory(runs / "digits-0").steps() == [4, 8, 12]
    assert run["best"] == RunDirectory(runs / "digits-0").pointed("best")
    assert run["settings"]["train.steps"] == 12
    assert run["settings"]["model.decoder.layers.0.block.attention.n_heads"] == 4
    assert run["splits"]["train"] > 0


def test_only_the_settings_that_differ(client: Client) -> None:
    found = client.get("/api/settings?runs=digits-0,digits-1")
    assert found == {
        "keys": ["train.seed"],
        "runs": {"digits-0": {"train.seed": 0}, "digits-1": {"train.seed": 1}},
    }
    assert client.get("/api/settings?runs=digits-0,quick")["keys"] == ["train.steps", "train.lr"]
    assert client.get("/api/settings?runs=digits-0")["keys"] == []


# --- curves ---------------------------------------------------------------------------------------


def test_curves_are_those_of_python(client: Client, runs: Path) -> None:
    found = client.get("/api/curves?runs=digits-0,quick&series=loss&x=tokens&smooth=4")
    for drawn in found["curves"]:
        series = read_curves(runs / drawn["run"])["loss"]
        assert drawn["x"] == series.x("tokens").tolist()
        assert drawn["y"] == series.value.tolist()
        assert drawn["step"] == series.step.tolist()
        assert drawn["smooth"]["y"] == series.smoothed(4).value.tolist()
    assert found["curves"][0]["checkpoints"] == [4, 8, 12]
    assert "val.loss" in found["names"]
    assert not any("beside" in drawn for drawn in found["curves"])


def test_validation_comes_beside_training(client: Client, runs: Path) -> None:
    found = client.get("/api/curves?runs=digits-0,quick&series=loss&x=tokens&beside=val&smooth=4")
    for drawn in found["curves"]:
        series = read_curves(runs / drawn["run"])["val.loss"]
        assert drawn["beside"]["x"] == series.x("tokens").tolist()
        assert drawn["beside"]["y"] == series.value.tolist()
        assert drawn["beside"]["step"] == series.step.tolist()
        assert "smooth" not in drawn["beside"], "what was measured, not a mean of it"
    alone = client.get("/api/curves?runs=digits-0&series=val.loss&beside=val")
    assert "beside" not in alone["curves"][0], "validation has no validation"
    assert client.ask("/api/curves?runs=digits-0&beside=test").status == 400


def test_what_has_not_grown_is_not_sent_again(growing: Path, open_app: Opener) -> None:
    client = open_app(growing.parent)
    first = client.get("/api/curves?runs=growing")["curves"][0]
    assert first["step"] == [1, 2, 3, 4, 5]
    again = client.get(f"/api/curves?runs=growing&seen={first['cursor']}")
    assert (again["curves"], again["unchanged"]) == ([], ["growing"])
    with (growing / "metrics.jsonl").open("a") as file:
        file.write(line(6) + line(7)[:20])  # the last line is still being written
    grown = client.get(f"/api/curves?runs=growing&seen={first['cursor']}")["curves"][0]
    assert grown["step"] == [1, 2, 3, 4, 5, 6]
    assert grown["cursor"] != first["cursor"]
    whole = client.get("/api/curves?runs=growing&x=time")["curves"][0]
    assert whole["x"] == [0.5 * step for step in whole["step"]]


def test_a_run_that_was_cut_back_is_read_anew(growing: Path) -> None:
    reader, path = CurveReader(), growing / "metrics.jsonl"
    before, cursor = reader.read(growing)
    assert cursor == cursor_of(path, before.next)
    # A resumed run: back to step 2, then past the old size again, line for line equally long.
    path.write_text("".join(line(step, 1.0 if step < 3 else 2.0) for step in range(1, 8)))
    after, _ = reader.read(growing)
    assert after["loss"].value.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    path.write_text(line(1))
    assert reader.read(growing)[0]["loss"].step.tolist() == [1]


def test_seeds_become_a_mean_and_a_band(client: Client, runs: Path) -> None:
    found = client.get("/api/curves?runs=digits-0,digits-1,quick&series=val.loss&group=seed")
    assert [one["runs"] for one in found["bands"]] == [["digits-0", "digits-1"]]
    values = np.stack(
        [read_curves(runs / name)["val.loss"].value for name in ("digits-0", "digits-1")]
    )
    assert found["bands"][0]["step"] == [4, 8, 12]
    for name, numbers in (
        ("mean", values.mean(0)),
        ("low", values.min(0)),
        ("high", values.max(0)),
    ):
        assert found["bands"][0][name] == numbers.tolist()


def test_a_band_covers_the_steps_that_all_have(runs: Path) -> None:
    long, short = read_curves(runs / "digits-0")["loss"], read_curves(runs / "quick")["loss"]
    made = band([long, short], axis="step", most=4, span=1)
    assert made["step"][0] == 1
    assert made["step"][-1] == 8
    assert len(made["x"]) == 4


def test_alerts_and_numbers_that_are_not_finite(growing: Path, open_app: Opener) -> None:
    with (growing / "metrics.jsonl").open("a") as file:
        file.write(line(6, "nan") + line(7, "inf"))
    alert = {"step": 6, "kind": "not finite", "message": "loss nan <script>"}
    (growing / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
    client = open_app(growing.parent)
    answer = client.ask("/api/curves?runs=growing")
    assert b"NaN" not in answer.body
    drawn = answer.json["curves"][0]
    assert drawn["y"][-2:] == [None, None]
    assert drawn["alerts"] == [alert]


def test_at_most_twenty_runs(client: Client) -> None:
    names = ",".join(f"run-{number}" for number in range(limits.PICKED_RUNS + 1))
    assert client.ask(f"/api/curves?runs={names}").status == 413
    assert client.ask("/api/curves?runs=").status == 400
    assert client.ask("/api/curves?runs=digits-0&series=lss").status == 400


# --- status ---------------------------------------------------------------------------------------


def status(client: Client) -> tuple[str, str]:
    run = client.get("/api/runs")["runs"][0]
    return run["status"], run["why"]


@pytest.mark.usefixtures("writer")
def test_a_run_that_is_written_is_running(growing: Path, open_app: Opener) -> None:
    client = open_app(growing.parent)
    assert status(client) == ("running", "")
    run = client.get("/api/runs")["runs"][0]
    assert (run["step"], run["val_loss"]) == (5, None)
    val = {"step": 6, "val": {"loss": 0.25, "accuracy": 0.5}}
    with (growing / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(val) + "\n")
    run = client.get("/api/runs")["runs"][0]
    assert (run["step"], run["val_loss"], run["val_accuracy"]) == (6, 0.25, 0.5)


def test_a_run_whose_process_is_gone_is_stalled(growing: Path, open_app: Opener) -> None:
    client = open_app(growing.parent)
    assert status(client) == ("stalled", "its process is gone")
    with RunDirectory(growing).locked():
        assert status(client)[0] == "running"
    assert status(client)[0] == "stalled"


@pytest.mark.usefixtures("writer")
def test_a_run_that_is_silent_is_stalled(growing: Path, open_app: Opener) -> None:
    ago = time.time() - table.SILENCE_SECONDS - 5
    for name in ("metrics.jsonl", "run.json", "lock"):
        os.utime(growing / name, (ago, ago))
    found, why = status(open_app(growing.parent))
    assert found == "stalled"
    assert "nothing written for 65 s" in why


def test_asking_whether_it_is_held_never_stops_a_writer(growing: Path) -> None:
    directory = RunDirectory(growing)
    (growing / "lock").touch()
    with (growing / "lock").open() as asker:
        fcntl.flock(asker, fcntl.LOCK_SH)
        assert not directory.held(), "who asks is no writer"
        done = threading.Timer(0.02, lambda: fcntl.flock(asker, fcntl.LOCK_UN))
        done.start()
        with directory.locked():
            assert directory.held()
        done.join()


# --- damaged and many -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [b"", b"[]", b"{", b"\xff", b"null", b"[" * 100_000, b'{"status": ' + b" " * (5 << 20) + b"1}"],
)
def test_a_damaged_record_is_shown_as_such(record: bytes, growing: Path, open_app: Opener) -> None:
    (growing / "run.json").write_bytes(record)
    client = open_app(growing.parent)
    assert client.get("/api/runs")["runs"][0]["status"] == "damaged"
    assert client.get("/api/runs/growing")["status"] == "damaged"


@pytest.mark.parametrize(
    "record",
    [
        {"status": ["x"], "step": "many", "val": 7, "task": {"a": 1}, "data": "none"},
        {
            "status": "<b>",
            "step": 1e400,
            "steps": True,
            "val": {"loss": "nan"},
            "data": {"sizes": 3},
        },
        {"step": 10**400, "steps": -(10**400), "val": {"loss": 10**400}, "data": {"sizes": [1]}},
        {},
    ],
)
def test_a_record_of_wrong_types_does_no_harm(
    record: dict, growing: Path, open_app: Opener
) -> None:
    (growing / "run.json").write_text(json.dumps(record))
    (growing / "metrics.jsonl").write_bytes(b'{"step": 99999999999999999999, "loss": 1.2.3,\n' * 9)
    client = open_app(growing.parent)
    assert client.get("/api/runs")["runs"][0]["val_loss"] is None
    client.get("/api/runs/growing")
    assert client.ask("/api/curves?runs=growing").status == 400


def test_a_listing_opens_three_files_a_run(
    growing: Path, open_app: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(200):
        run = growing.parent / f"run-{number:03d}"
        run.mkdir()
        for name in ("run.json", "config.json", "metrics.jsonl"):
            (run / name).write_bytes((growing / name).read_bytes())
    client = open_app(growing.parent)
    opened, read = [], []
    real_open, real_pread = os.open, os.pread
    monkeypatch.setattr(os, "open", lambda *a, **k: opened.append(a[0]) or real_open(*a, **k))
    monkeypatch.setattr(os, "pread", lambda *a: read.append(a[1]) or real_pread(*a))
    assert len(client.get("/api/runs")["runs"]) == 201
    assert len(opened) <= 3 * 201
    assert sum(read) <= 201 * (table.TAIL_BYTES + table.SPARKS * table.SPARK_BYTES)
