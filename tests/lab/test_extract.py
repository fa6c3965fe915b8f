"""Extraction: the machine of a model that is exactly right, of one that errs, of a trained one."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from bench import extract as bench_extract
from typer.testing import CliRunner

import glassformer as gf
from glassformer.cli.main import app
from glassformer.data.automata.machine import counterexample
from glassformer.data.build_task import build_task
from glassformer.data.tasks.fsm import EOS, FIRST
from glassformer.lab.extract import extract_machine
from glassformer.spec.errors import InputError
from glassformer.spec.tasks import DigitsTask, FsmTask


class Perfect:
    """An engine that knows the walk: its logits are the logarithms of the true probabilities.

    `errs` are strings after which it predicts the wrong class.
    """

    def __init__(self, task, *, errs=()):
        self.task, self.errs = task, set(errs)
        self.spec = task.model()

    def logits(self, batch):
        symbols = np.where(batch.valid, batch.tokens, 0)[:, 1:] - FIRST
        states = self.task.machine.trajectories(np.where(symbols < 0, -1, symbols))
        phases = np.minimum(np.arange(states.shape[1]), self.task.spec.min_length)
        chance = self.task.walk.probabilities_MQE[phases, states]
        following = np.full((*states.shape, self.task.tokenizer.vocab_size), 1e-9)
        following[:, :, FIRST:] = np.maximum(chance[:, :, :-1], 1e-9)
        following[:, :, EOS] = np.maximum(chance[:, :, -1], 1e-9)
        kinds = np.array(self.task.machine.classes)[states]
        for row, line in enumerate(symbols):
            for place in range(states.shape[1]):
                if tuple(line[:place].tolist()) in self.errs:
                    kinds[row, place] = 1 - kinds[row, place]
        count = len(self.task.machine.class_names)
        return {"next": np.log(following), "class": np.eye(count)[kinds]}


def perfect(machine, *, errs=(), **settings):
    task = build_task(FsmTask(machine=machine, examples=1_000, **settings))
    return Perfect(task, errs=errs), task


@pytest.mark.parametrize("by", ["class", "next"])
@pytest.mark.parametrize(
    ("machine", "length"), [("parity", 16), ("mod-3", 16), ("brackets-2", 24), ("partial-5", 12)]
)
def test_a_model_that_knows_the_machine_gives_it_back(machine, length, by):
    engine, task = perfect(machine, max_length=length)
    found = extract_machine(engine, task, by=by)
    assert found.is_true_machine
    assert found.is_exact
    assert found.machine.n_states == task.machine.n_states == found.true.n_states
    assert [one.share for one in found.fidelity] == [1.0, 1.0]
    assert found.probability_error < 1e-6
    if by == "class":
        assert found.machine == task.machine.minimised()
    for state, word in enumerate(found.access):
        assert found.machine.run(word)[-1] == state


def test_states_that_predict_the_same_are_one_state_by_next():
    """Uniform parity: the next symbol does not depend on the state, so it does not show it."""
    engine, task = perfect("parity", order="uniform")
    found = extract_machine(engine, task, by="next")
    assert found.machine.n_states == 1
    assert found.is_true_machine, "the true machine has one state too, as far as `next` goes"
    assert extract_machine(engine, task).machine.n_states == 2


def test_errors_of_the_model_are_named_and_do_not_grow_the_machine():
    errs = [(0, 0, 0, 0, 0, 1, 1), (0, 0, 1, 0, 0, 0, 1), (0, 0, 0, 0, 1, 0, 1, 1, 0)]
    engine, task = perfect("parity", errs=errs)
    found = extract_machine(engine, task)
    assert found.machine.n_states == 2
    assert found.is_true_machine
    assert not found.is_exact
    assert found.disagreement.string == tuple("0000011")
    assert found.disagreement.model.startswith("odd")
    assert found.disagreement.machine.startswith("even")
    assert len(found.tried) > 1
    assert "no machine of at most 16 states explains the model" in found.text(width=200)
    assert found.is_followed and "does not follow" not in found.text()
    held_out = replace(found.fidelity[0], agreed=found.fidelity[0].strings * 6 // 10)
    poor = replace(found, fidelity=(held_out,))
    assert poor.is_true_machine and not poor.to_dict()["is_followed"]
    assert f"does not follow it reliably: on {held_out.share:.1%}" in poor.text(width=200)


def test_the_smallest_machine_is_preferred_and_the_exact_one_is_named():
    engine, task = perfect("parity", errs=[(0, 0, 0, 1)])
    found = extract_machine(engine, task)
    assert found.is_true_machine
    assert not found.is_exact
    assert found.explained_by > 2
    assert f"it takes {found.explained_by} to explain every string" in found.text(width=200)
    assert extract_machine(engine, task, most_states=found.explained_by - 1).explained_by is None


def test_a_model_of_another_machine_is_told_from_the_true_one():
    _, task = perfect("mod-3")
    other = build_task(FsmTask(machine="mod-3", examples=1_000))
    other.machine = gf_machine = type(task.machine)(
        alphabet=("0", "1"),
        transitions=((0, 1), (1, 2), (2, 2)),
        classes=(0, 1, 2),
        class_names=("0", "1", "2"),
    )
    found = extract_machine(Perfect(other), task)
    assert counterexample(found.machine, gf_machine) is None
    assert found.difference == ("1", "1", "1")
    assert found.probability_error is None
    assert "not the true machine, of 3 states: after '1 1 1' they differ" in found.text(width=200)


def test_what_cannot_be_asked_is_refused():
    engine, task = perfect("parity")
    with pytest.raises(InputError, match="no machine to compare with"):
        extract_machine(engine, build_task(DigitsTask(examples=20)))
    with pytest.raises(InputError, match="by"):
        extract_machine(engine, task, by="state")
    with pytest.raises(InputError, match="threshold"):
        extract_machine(engine, task, threshold=0.7)
    with pytest.raises(InputError, match="most_states"):
        extract_machine(engine, task, most_states=0)


# --- trained, and by the command ------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model of two states that the last symbol decides: seconds of training."""
    folder = tmp_path_factory.mktemp("runs")
    ((name, overrides),) = bench_extract.QUICK.values()
    gf.train(
        name, name="last-b", runs=folder, overrides=[*overrides, "model.d_model=16", "engine=torch"]
    )
    return folder / "last-b"


def test_the_machine_of_a_trained_model(run):
    found = gf.extract(run)
    assert found.is_true_machine
    assert found.machine.n_states == 2
    assert found.fidelity[0].share == 1.0
    model = gf.load(run)
    again = gf.extract(model, FsmTask(machine="regex:[ab]*b", examples=2000, longer=0))
    assert again.to_dict() == found.to_dict()


def test_the_command_prints_and_writes_it(run, tmp_path):
    def glass(*arguments):
        return CliRunner().invoke(app, ["extract", str(run), *arguments])

    shown = glass("-o", str(tmp_path / "m.svg"))
    assert shown.exit_code == 0, shown.output
    assert "computes a machine of 2 states" in shown.stdout
    drawn = ET.fromstring((tmp_path / "m.svg").read_text())
    words = "".join(drawn.itertext())
    assert {"reject", "accept"} <= set(words.split()) or "accept" in words
    assert len(drawn.findall("{http://www.w3.org/2000/svg}circle")) == 3, "one double circle"
    data = json.loads(glass("--json", "-o", str(tmp_path / "m.json")).stdout)
    assert data == json.loads((tmp_path / "m.json").read_text())
    assert data["is_true_machine"]
    assert data["machine"]["classes"] == ["reject", "accept"]
    glass("-o", str(tmp_path / "m.dot"))
    assert "1 [shape=doublecircle" in (tmp_path / "m.dot").read_text()
    wrong = glass("-o", "m.png")
    assert "not end in .svg, .json or .dot" in str(wrong.exception)


def test_the_machine_that_was_extracted_is_trained_on_as_the_command_says(run, tmp_path):
    file, runs = tmp_path / "m.json", str(tmp_path / "runs")
    shown = CliRunner().invoke(app, ["extract", str(run), "-o", str(file)])
    command = f"glass train fsm task.machine={file}"
    assert command in shown.stderr
    few = ["--steps", "2", "task.examples=50", "task.longer=0", "--runs", runs]
    trained = CliRunner().invoke(app, [*command.split()[1:], *few])
    assert trained.exit_code == 0, trained.output
    machine = gf.load_config(tmp_path / "runs" / "fsm").task.machine
    assert machine == gf.load_machine(file) and machine.probabilities
    file.write_text(file.read_text().replace('"transitions"', '"transition"'))
    refused = CliRunner().invoke(app, [*command.split()[1:], *few, "--name", "again"])
    assert "transition" in str(refused.exception)
    assert not (tmp_path / "runs" / "again").exists()


def test_a_notebook_shows_the_drawing(run):
    bundle = gf.extract(run)._repr_mimebundle_()
    assert bundle["text/html"].count("<svg") == 1
    assert bundle["text/plain"] == gf.extract(run).text()
