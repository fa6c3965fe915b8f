"""A machine of one's own: from a file or a value, refused with the reason, and out of a model."""

import json
import re

import numpy as np
import pytest

import glassformer as gf
from glassformer.data.automata.machine import counterexample
from glassformer.data.build_task import build_task
from glassformer.data.tasks.fsm import Fsm
from glassformer.lab.recipes import plan_run, read_config
from glassformer.spec.errors import InputError
from glassformer.spec.machines import machine_of
from glassformer.spec.serialize import from_json, to_json
from glassformer.spec.tasks import FsmTask
from glassformer.spec.train import RunSpec

OWN = {
    "states": {"even": {"class": "even", "end": 0.1}, "odd": {"class": "odd", "end": 0.2}},
    "edges": [
        ["even", "0", "even", 0.4],
        ["even", "1", "odd", 0.5],
        ["odd", "0", "odd", 0.3],
        ["odd", "1", "even", 0.5],
    ],
}
SMALL = ["task.examples=400", "task.longer=0"]


def changed(**fields):
    return {**json.loads(json.dumps(OWN)), **fields}


def planned(folder, data, *more: str):
    file = folder / "own.json"
    file.write_text(json.dumps(data))
    return plan_run("fsm", [f"task.machine={file}", *SMALL, *more])


def test_the_walk_has_the_probabilities_of_the_file(tmp_path):
    plan = planned(tmp_path, OWN, "task.examples=3000", "task.max_length=40")
    task = plan.task
    assert isinstance(task, Fsm) and task.name == "own"
    assert task.machine.class_names == ("even", "odd")
    after = task.walk.after(1)
    assert after == pytest.approx(np.array([[0.4, 0.5, 0.1], [0.3, 0.5, 0.2]]))
    # before a string may end, its symbols share all probability
    assert task.walk.after(0)[0] == pytest.approx([4 / 9, 5 / 9, 0.0])
    batch = task.batch("train", np.arange(1_000))
    inside = batch.valid & (np.arange(batch.tokens.shape[1]) > 0)
    for state, shares in enumerate(after):
        told = batch.targets["next"][inside & (batch.targets["state"] == state)]
        seen = [np.mean(told == token) for token in (3, 4, 2)]
        assert seen == pytest.approx(shares, abs=0.05)


def test_a_run_keeps_the_machine_and_not_the_file(tmp_path):
    plan = planned(tmp_path, OWN)
    (tmp_path / "own.json").unlink()
    again = from_json(RunSpec, to_json(plan.spec))
    assert again == plan.spec
    assert build_task(again.task).facts()["sha256"] == plan.task.facts()["sha256"]


@pytest.mark.parametrize("written", ["text", "file", "value"])
def test_every_way_to_name_a_machine_gives_the_same_run(tmp_path, written):
    plan = planned(tmp_path, OWN)
    data = json.loads(to_json(plan.spec))
    if written == "text":
        other = plan_run("fsm", [f"task.machine={json.dumps(OWN)}", *SMALL]).spec
    else:
        data["task"]["machine"] = str(tmp_path / "own.json") if written == "file" else OWN
        (tmp_path / "run.json").write_text(json.dumps(data))
        other = read_config(tmp_path / "run.json")
    assert gf.override(other, "task.machine.name=own") == plan.spec


def test_edges_without_probabilities_are_weighed_by_the_seed():
    bare = {"edges": [edge[:3] for edge in OWN["edges"]]}
    table = machine_of(bare)
    assert (table.ends, table.classes, table.probabilities) == (
        (True, True),
        ("accept", "accept"),
        (),
    )
    first, second = (
        Fsm(FsmTask(machine=table, machine_seed=seed, examples=400, longer=0)) for seed in (0, 1)
    )
    assert not np.array_equal(first.walk.after(1), second.walk.after(1))
    named = machine_of({"edges": [{"from": "p", "symbol": "a", "to": "q"}], "states": ["p", "q"]})
    assert named.transitions == ((1,), (-1,))


def test_what_was_extracted_can_be_trained_on(tmp_path):
    run = gf.train(
        "fsm",
        name="first",
        runs=tmp_path,
        overrides=["task.machine=regex:[ab]*b", "task.examples=400", "task.longer=0"],
        steps=30,
        progress=False,
    )
    found = gf.extract(run.path)
    file = found.save(tmp_path / "found.json")
    plan = plan_run("fsm", [f"task.machine={file}", *SMALL])
    assert plan.task.name == "found"
    same = found.machine
    assert counterexample(same, plan.task.machine) is None
    can = np.array(
        [
            [*(t >= 0 for t in row), end]
            for row, end in zip(same.transitions, same.ends, strict=True)
        ]
    )
    shares = np.where(can, np.maximum(found.probabilities, 1e-6), 0)
    shares /= shares.sum(axis=1, keepdims=True)
    assert plan.task.walk.after(9) == pytest.approx(shares, abs=1e-5)
    assert found.table().probabilities == plan.spec.task.machine.probabilities


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "a machine is a JSON object"),
        ({}, "this describes no machine"),
        (changed(edgs=1), "unknown key 'edgs'"),
        (changed(start="evne"), "there is no state 'evne'"),
        (changed(edges=[["even", "0"]]), "edge 1 is"),
        (changed(edges=[["even", "0", "even", 1.4]]), "edge 1 has the probability 1.4"),
        (changed(edges=[["even", "0", "odd", 0.5], ["even", "1", "odd"]]), "has no probability"),
        (changed(edges=[["even", "0", "odd", 0.5]] * 2), "two edges for '0'"),
        (changed(edges=[["even", "0", "odd", 0.5]]), "add up to 0.6, not 1"),
        (changed(states={"even": {"ends": 1}, "odd": {}}), "unknown key 'ends'"),
        (changed(alphabet=["0", "2"]), "'1' is not in the alphabet"),
        ({"edges": []}, "there is no state ''"),
        ({"states": {"p": {"end": False}}, "edges": [["p", "a", "p"]]}, "ever ends"),
        ({"states": {"p": {"end": 0.5}}, "edges": [["p", "a", "p"]]}, "and edges have none"),
        (
            {"edges": [["p", "a", "p", 0.5], ["p", "b", "q", 0.2], ["q", "a", "q", 1.0]]},
            "state 0 leads to state 1, from which no string can end",
        ),
    ],
)
def test_a_machine_that_cannot_be_is_refused_with_the_reason(tmp_path, data, message):
    with pytest.raises(InputError, match=re.escape(message)):
        planned(tmp_path, data)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nosuch\.json cannot be read"):
        plan_run("fsm", [f"task.machine={tmp_path / 'nosuch.json'}"])
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        plan_run("fsm", [f"task.machine={tmp_path / 'bad.json'}"])
    with pytest.raises(InputError, match="is a file, not a machine"):
        build_task(FsmTask(machine="own.json"))
