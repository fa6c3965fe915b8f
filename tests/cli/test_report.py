"""`glass report`, and the figures of `evaluate` and `lr-find`, as people and scripts meet them."""

import csv
import json

import pytest

from glassformer.lab.api import evaluate
from glassformer.lab.runs.curves import read_curves
from tests.lab.runs import trained
from tests.training.samples import digits, machine


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the same kind, and one of another."""
    place = tmp_path_factory.mktemp("runs")
    trained(digits(), place / "one")
    trained(digits("train.seed=1"), place / "two")
    trained(machine(), place / "machine")
    return place


@pytest.fixture
def verb(glass, runs):
    """A verb over these runs."""
    return lambda verb, *words: glass(
        verb, *words, *(() if verb == "lr-find" else ("--runs", runs))
    )


def table_of(path):
    """The rows of a CSV file."""
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def test_a_report_lies_in_the_runs_folder_or_where_it_is_wanted(verb, runs, tmp_path):
    code, out, err = verb("report", "one", "--no-verify")
    assert code == 0
    text = (runs / "one" / "report.html").read_text(encoding="utf-8")
    assert str(runs / "one" / "report.html") in out
    assert f"{len(text.encode()):,} bytes" in out
    assert "Curves" in err
    found = json.loads(
        verb("report", "one@last", "--no-verify", "-o", tmp_path / "x.html", "--json")[1]
    )
    assert found == {
        "report": str(tmp_path / "x.html"),
        "bytes": (tmp_path / "x.html").stat().st_size,
    }
    assert "No checks were requested" in text


def test_curves_in_the_terminal(verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    code, out, _ = verb("report", "one", "--curves")
    assert code == 0
    assert "loss over step" in out
    assert "val.loss" in out
    assert max(map(len, out.split("\n"))) <= 70
    both = verb("report", "one", "two", "--x", "tokens", "--smooth", 5)[1]
    assert "loss over tokens trained on" in both
    assert "one" in both
    assert "two" in both
    assert "centred mean over 5 points" in both


def test_curves_as_files(verb, runs, tmp_path):
    for ending, begin in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        target = tmp_path / f"curves.{ending}"
        assert verb("report", "one", "two", "-o", target, "--linear")[0] == 0
        assert target.read_bytes().startswith(begin)
    target = tmp_path / "curves.csv"
    assert verb("report", "one", "two", "-o", target)[0] == 0
    rows = table_of(target)
    assert {row["run"] for row in rows} == {"one", "two"}
    losses = [float(row["loss"]) for row in rows if row["run"] == "one"]
    assert losses == read_curves(runs / "one")["loss"].value.tolist()
    verb("report", "one", "-o", target, "--series", "lr")
    assert table_of(target)[0].keys() == {"run", "step", "tokens", "seconds", "lr"}


def test_curves_as_json(verb, runs):
    found = json.loads(verb("report", "one", "--curves", "--json", "--series", "loss")[1])
    (one,) = found["runs"]
    assert one["run"] == "one"
    assert one["series"]["loss"]["value"] == read_curves(runs / "one")["loss"].value.tolist()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("one", "two", "-o", "x.html"), "a report is of one run"),
        (("one", "--curves", "-o", "x.html"), "a report is of one run"),
        (("one", "--x", "tokens"), "are of curves"),
        (("one", "--series", "lr"), "are of curves"),
        (("one", "--curves", "--no-verify"), "--no-verify and --device are of a report"),
        (("one", "--curves", "--x", "day"), "no axis 'day'"),
        (("one", "--curves", "--series", "los"), "no curve 'los'"),
        (("one", "-o", "x.csv", "--series", "los"), "no curve 'los'"),
        (("one", "--curves", "--smooth", 0), "a mean over 0"),
        (("one@last", "--curves"), "curves are of a whole run"),
        (("one", "-o", "x.gif"), "does not end in"),
        (("one@99",), "no checkpoint '99'"),
        (("one@²",), "no checkpoint '²'"),
        ((__file__,), "not a run"),
        (("nothing",), "no folder nothing"),
        (("nothing", "--curves"), "no folder nothing"),
    ],
)
def test_bad_input_is_told(verb, words, what):
    code, out, err = verb("report", *words)
    assert (code, out) == (2, "")
    assert what in err
    assert len(err.strip().splitlines()) <= 3


# --- evaluate and lr-find -------------------------------------------------------------------------


def test_evaluate_shows_and_writes_what_was_taken_for_what(verb, runs, tmp_path):
    target = tmp_path / "confusion.csv"
    code, out, _ = verb("evaluate", "one", "-o", target)
    assert code == 0
    assert "operation asked (rows), answered as (columns), per cent of the row" in out
    assert "right answer (rows)" in out
    table = evaluate(runs / "one").confusion
    rows = table_of(target)
    assert sum(int(row["count"]) for row in rows if row["group"] == "answer") == 6
    for row in rows:
        assert int(row["count"]) == table[row["group"]][row["asked"]].get(row["answered"], 0)
    for ending, begin in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        target = tmp_path / f"confusion.{ending}"
        assert verb("evaluate", "one", "-o", target, "--json")[0] == 0
        assert target.read_bytes().startswith(begin)


def test_a_task_without_confusion_says_so(verb, tmp_path):
    code, _, err = verb("evaluate", "machine", "-o", tmp_path / "x.png")
    assert code == 2
    assert "nothing can be confused" in err
    assert verb("evaluate", "one", "-o", "x.gif")[0] == 2
    assert (
        "of a run's own task" in verb("evaluate", "one", "--suite", "smallbench", "-o", "x.png")[2]
    )


def test_lr_find_draws_its_curve(verb, tmp_path):
    small = ("task.examples=200", "model.d_model=8", "train.batch_size=8")
    target = tmp_path / "rates.png"
    code, out, _ = verb("lr-find", "digits", *small, "-o", target)
    assert code == 0
    assert "! is the suggestion" in out
    assert "glass train digits" in out
    assert target.read_bytes().startswith(b"\x89PNG")
    target = tmp_path / "rates.csv"
    found = json.loads(verb("lr-find", "digits", *small, "-o", target, "--json")[1])
    rows = [[float(cell) for cell in row.values()] for row in table_of(target)]
    assert rows == found["curve"]
