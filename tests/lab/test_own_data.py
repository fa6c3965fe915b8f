"""A run from a stranger shows nothing of its reader's files; a run from here goes on as ever."""

import json
import shutil
from pathlib import Path

import pytest

import glassformer as gf
from glassformer.checks.report import Report
from glassformer.lab.api import train
from glassformer.lab.quantize import Wish, dequantize_folder, quantize_folder
from glassformer.lab.runs.record import DATA
from glassformer.spec.errors import FileError, GlassError, InputError
from glassformer.spec.quantization import QuantSpec
from glassformer.web.app.query import Query
from glassformer.web.app.workspace import Workspace
from glassformer.web.pages import errors, inspect
from glassformer.web.report.document import report_html

SECRET = "password hunter2 and more that nobody may see\n" * 40
OVERRIDES = (
    "task.tokenizer=bytes", "task.length=16", "train.batch_size=2", "train.steps=2",
    "train.evaluate_examples=4", "model.d_model=16",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mine`, trained here on a text."""
    place = tmp_path_factory.mktemp("data")
    book = place / "book.txt"
    book.write_text("so it goes, and so it goes on.\n" * 60, encoding="utf-8")
    (place / "secret.txt").write_text(SECRET, encoding="utf-8")
    train("text", name="mine", runs=place / "runs", overrides=(f"task.path={book}", *OVERRIDES))
    return place / "runs"


def received(runs: Path, record: str) -> Path:
    """The run as a stranger would send it: its text is the reader's own secret."""
    run = runs.parent / f"{record}" / "runs" / "sent"
    shutil.copytree(runs / "mine", run, dirs_exist_ok=True)
    config = json.loads((run / "config.json").read_text())
    config["task"]["path"] = str(runs.parent / "secret.txt")
    (run / "config.json").write_text(json.dumps(config))
    known = json.loads((run / "run.json").read_text())
    if record == "none":
        del known["data"]
    elif record == "odd":
        known["data"] = ["sha256"]
    elif record == "guessed":
        known["data"]["sha256"] = "0" * 64
    (run / "run.json").write_text(json.dumps(known))
    return run


@pytest.mark.parametrize("record", ["kept", "none", "odd", "guessed"])
def test_a_received_run_shows_nothing_of_a_file_that_it_only_names(runs, record, tmp_path):
    run = received(runs, record)
    wish = Wish(spec=QuantSpec())
    for look in (
        lambda: gf.evaluate(run),
        lambda: quantize_folder(str(run), tmp_path / "small", wish),
    ):
        with pytest.raises((InputError, FileError)) as refused:
            look()
        assert "hunter2" not in str(refused.value)
    assert not (tmp_path / "small").exists()
    report = report_html(str(run), certificate=Report(()))
    assert "hunter2" not in report
    assert "Not available: the " in report, "and it says why"
    lab = Workspace(run.parent)
    about = inspect.about(Query(path={"id": "sent"}), lab)
    assert about["examples"] == []
    assert "data" in about["note"]
    assert "hunter2" not in json.dumps(about)
    for ask in (
        lambda: inspect.inspect(Query(body={"run": "sent", "split": "val", "row": 0}), lab),
        lambda: errors.errors(Query(path={"id": "sent"}), lab),
    ):
        with pytest.raises(GlassError) as refused:
            ask()
        assert "hunter2" not in str(refused.value)
    # a text of one's own is looked at as before
    assert inspect.inspect(Query(body={"run": "sent", "text": "so it"}), lab)["words"]


def test_a_task_that_another_run_has_opened_is_checked_for_each(runs):
    shutil.copytree(runs / "mine", runs / "sent", dirs_exist_ok=True)
    known = json.loads((runs / "sent" / "run.json").read_text())
    known["data"]["sha256"] = "0" * 64
    (runs / "sent" / "run.json").write_text(json.dumps(known))
    lab = Workspace(runs)
    assert inspect.about(Query(path={"id": "mine"}), lab)["examples"]
    assert inspect.about(Query(path={"id": "sent"}), lab)["examples"] == []


def test_a_run_from_here_and_what_is_made_of_it_go_on(runs, tmp_path):
    mine = runs / "mine"
    loss = gf.evaluate(mine).loss
    assert "so it goes" in report_html(str(mine), certificate=Report(()))
    quantize_folder(str(mine), tmp_path / "small", Wish(spec=QuantSpec()))
    dequantize_folder(str(tmp_path / "small"), tmp_path / "large")
    for made in ("small", "large"):
        assert gf.evaluate(tmp_path / made).loss == pytest.approx(loss, abs=0.05)
        (tmp_path / made / DATA).unlink()
        with pytest.raises((InputError, FileError)):
            gf.evaluate(tmp_path / made)


def test_a_text_that_has_changed_is_told(runs):
    book = runs.parent / "book.txt"
    before = book.read_bytes()
    book.write_bytes(before + b"one more line\n")
    try:
        with pytest.raises(InputError, match="not what the run was trained on"):
            gf.evaluate(runs / "mine")
    finally:
        book.write_bytes(before)
    assert gf.evaluate(runs / "mine").loss > 0
