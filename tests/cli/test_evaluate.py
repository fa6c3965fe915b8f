"""`glass evaluate MODEL --suite smallbench`: a table, JSON, what is not offered, bad wishes."""

import json
import types

import pytest

from glassformer.lab.smallbench.suite import BITS, EXAMS

LM = (
    f"task.path={types.__file__}",
    "task.vocab_size=300",
    "task.length=96",
    "train.batch_size=4",
    "train.evaluate_every=2",
    "model.decoder.layers.count=1",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    import glassformer as gf

    place = tmp_path_factory.mktemp("runs")
    gf.train("lm", steps=2, runs=place, overrides=LM)
    small = ["task.examples=100", "train.batch_size=8"]
    gf.train("parity", steps=1, runs=place, overrides=small)
    gf.train("digits", steps=1, runs=place, overrides=small)
    return place


def test_a_run_is_scored_and_keeps_the_result(glass, runs):
    command = ("evaluate", "lm", "--suite=smallbench", f"--runs={runs}", "--items=16")
    code, out, _ = glass(*command, "--json")
    assert code == 0
    found = json.loads(out)
    assert [row["exam"] for row in found["scores"]] == [BITS, *EXAMS]
    assert found["items"] == 16
    assert all(row["score"] is not None for row in found["scores"] if not row["not_offered"])
    assert json.loads((runs / "lm" / "eval" / "smallbench.json").read_text()) == found
    code, table, _ = glass(*command)
    assert "chance" in table.splitlines()[0]
    assert len(table.splitlines()) == 1 + len(found["scores"]) + 1


def test_some_exams_and_another_seed(glass, runs):
    some = ("evaluate", "lm", "--suite=smallbench", f"--runs={runs}", "--tasks=recall,fsm")
    code, out, _ = glass(*some, "--items=16", "--seed=3", "--json")
    found = json.loads(out)
    assert code == 0
    assert [row["exam"] for row in found["scores"]] == ["recall", "fsm"]
    assert found["seed"] == 3


def test_a_vocabulary_of_symbols_is_offered_nothing(glass, runs):
    code, out, _ = glass("evaluate", "parity", "--suite=smallbench", f"--runs={runs}", "--json")
    assert code == 0
    rows = json.loads(out)["scores"]
    assert all(row["score"] is None and "cannot read" in row["not_offered"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("lm", "--suite=smallbenhc"), ("no suite 'smallbenhc'", "smallbench")),
        (("lm", "--suite=smallbench", "--items=0"), ("items 0 is below 1",)),
        (("lm", "--suite=smallbench", "--tasks=cpoy"), ("no exam 'cpoy'",)),
        (("lm", "--suite=smallbench", "--limit=3"), ("--limit is no option of smallbench",)),
        (("lm", "--suite=lm-eval", "--items=3"), ("--items is no option of lm-eval",)),
        (("lm", "--items=3"), ("are a suite's", "--suite smallbench")),
        (("digits", "--suite=smallbench"), ("does not continue a text",)),
        (("nowhere", "--suite=smallbench"), ("nowhere",)),
    ],
)
def test_bad_wishes(glass, runs, arguments, words):
    code, _, err = glass("evaluate", *arguments, f"--runs={runs}")
    assert code == 2
    for word in words:
        assert word in err


def test_without_a_suite_the_options_of_none_are_asked_for(glass, runs):
    code, out, _ = glass("evaluate", "digits", f"--runs={runs}", "--json")
    assert code == 0 and 0 <= json.loads(out)["accuracy"] <= 1


def test_the_listing_shows_the_suites_and_the_recipes(glass, runs):
    found = json.loads(glass("list", f"--runs={runs}", "--json")[1])
    assert "smallbench" in found["suites"]
    assert {"lm", "lm-modern", "lm-10m"} <= set(found["tasks"])
    assert "  smallbench " in glass("list", f"--runs={runs}")[1]
