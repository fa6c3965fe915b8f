"""The functions of the front door: the same results as the commands, from Python."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import glassformer as gf
from glassformer.cli.main import app
from glassformer.data.build_task import build_task
from glassformer.spec.errors import InputError
from tests.lab.runs import sample, trained


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    trained(sample("torch", "train.steps=4"), folder)
    return folder


def test_evaluate_writes_what_the_command_writes(run):
    plain = gf.evaluate(run)
    assert not (run / "eval" / "test.json").exists(), "without `write` nothing is written"
    assert gf.evaluate(run, write=True).to_json() == plain.to_json()
    files = {path.name: path.read_bytes() for path in (run / "eval").iterdir()}
    assert {"test.json", "test-errors.jsonl"} < files.keys()
    for path in (run / "eval").iterdir():
        path.unlink()
    result = CliRunner().invoke(app, ["evaluate", str(run), "--json"])
    assert json.loads(result.stdout) == json.loads(plain.to_json())
    assert {path.name: path.read_bytes() for path in (run / "eval").iterdir()} == files


def test_evaluate_takes_a_model_and_a_task(run):
    spec = sample("torch", "train.steps=4")
    own = gf.evaluate(run)
    for task in (spec.task, build_task(spec.task)):
        for model in (gf.load(run), gf.load(run).model, run):
            assert gf.evaluate(model, task).to_json() == own.to_json()


def test_evaluate_refuses_what_it_cannot_measure(run):
    model = gf.load(run)
    with pytest.raises(InputError, match="measured on a task"):
        gf.evaluate(model)
    with pytest.raises(InputError, match="no task 'digitz'"):
        gf.evaluate(model, "digitz")
    with pytest.raises(InputError, match="only a run has a folder"):
        gf.evaluate(model, "digits", write=True)
    other = gf.build(replace(gf.preset("digits"), vocab_size=7))
    with pytest.raises(InputError, match="vocabulary of 7"):
        gf.evaluate(other, "digits")
