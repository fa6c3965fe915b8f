"""The page Errors: the tables are those of `evaluate`, a cell's examples are those it counts."""

from pathlib import Path
from urllib.parse import urlencode

import pytest
from bench.extract import QUICK

import glassformer as gf
from glassformer.lab import api
from glassformer.lab.measure.evaluate import order, shares
from glassformer.web.app import limits
from tests.web.conftest import Client, Opener


def test_the_numbers_are_those_of_evaluate(client: Client, runs: Path) -> None:
    found = client.get("/api/runs/digits-0/errors?split=test&step=8")
    own = api.evaluate(runs / "digits-0@8", split="test")
    assert found["loss"] == own.loss
    assert found["accuracy"] == own.accuracy
    assert found["by"] == own.to_dict()["by"]
    assert found["examples"] == own.examples == found["of"]
    assert [table["group"] for table in found["tables"]] == list(own.confusion)
    for table in found["tables"]:
        counted = own.confusion[table["group"]]
        assert (table["rows"], table["columns"]) == order(counted)
        assert table["shares"] == shares(counted)
        assert sum(map(sum, table["counts"])) == own.examples


def test_a_cell_shows_the_examples_that_it_counts(client: Client, runs: Path) -> None:
    _, task = api.opened(runs / "digits-0@8")
    found = client.get("/api/runs/digits-0/errors?split=test&step=8")
    for table in found["tables"]:
        seen = []
        for i, asked in enumerate(table["rows"]):
            for j, answered in enumerate(table["columns"]):
                cell = {"group": table["group"], "target": asked, "predicted": answered}
                options = urlencode({"split": "test", "step": 8, **cell})
                got = client.get(f"/api/runs/digits-0/errors/cell?{options}")
                assert got["count"] == table["counts"][i][j] == len(got["examples"])
                for example in got["examples"]:
                    assert example["text"] == task.describe("test", example["row"])
                    assert example["answers"][table["group"]] == answered
                    assert asked in example["text"].split()
                seen += [example["row"] for example in got["examples"]]
        assert sorted(seen) == list(range(found["examples"]))


def test_a_machine_is_extracted_and_drawn(open_app: Opener, tmp_path: Path) -> None:
    ((recipe, overrides),) = QUICK.values()
    small = ["model.d_model=16", "train.steps=8"]
    gf.train(recipe, name="machine", runs=tmp_path, overrides=[*overrides, *small])
    client = open_app(tmp_path)
    measured = client.get("/api/runs/machine/errors")
    assert measured["is_machine"] and measured["kind"] == "process"
    assert "exact_match" not in measured and not measured["by"] and not measured["confused"]
    assert all(one["excess"] >= 0 and one["truth"] and one["model"] for one in measured["errors"])
    found = client.get("/api/runs/machine/machine")
    own = gf.extract(tmp_path / "machine")
    assert found["text"] == " ".join(own.sentences())
    tag, props, *inside = found["drawing"]
    assert tag == "svg" and props["aria-label"] == own.sentences()[0]
    assert [each[0] for each in inside].count("circle") >= own.machine.n_states


def test_a_checkpoint_is_measured_once(
    runs: Path, open_app: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = open_app(runs)
    client.get("/api/runs/digits-1/errors")

    def never(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(api, "opened", never)
    client.get("/api/runs/digits-1/errors")
    client.get("/api/runs/digits-1/errors/cell?group=operation&target=MAX&predicted=MAX")


def test_no_more_examples_than_the_limits_allow(
    runs: Path, open_app: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EVALUATED_EXAMPLES", 7)
    found = open_app(runs).get("/api/runs/quick/errors")
    assert found["examples"] == 7
    assert found["of"] > 7
    monkeypatch.setattr(limits, "EXAMPLES", 2)
    options = urlencode({"group": "operation", "target": "x", "predicted": "y"})
    assert open_app(runs).get(f"/api/runs/quick/errors/cell?{options}")["count"] == 0


def test_what_is_not_there_is_said(client: Client, runs: Path, open_app: Opener) -> None:
    assert client.ask("/api/runs/digits-0/errors?split=exam").status == 400
    assert client.ask("/api/runs/digits-0/errors?step=5").status == 404
    assert client.ask("/api/runs/digits-0/errors?stop=8").status == 400
    wrong = client.ask("/api/runs/digits-0/errors/cell?group=colour&target=a&predicted=b")
    assert wrong.status == 400
    model = open_app(runs / "digits-0" / "checkpoints" / "step-000008")
    name = model.get("/api/runs")["runs"][0]["id"]
    assert "no curves" in model.ask(f"/api/runs/{name}/errors").what
