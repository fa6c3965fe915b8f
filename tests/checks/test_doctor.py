"""`doctor` names planted mistakes, is silent on a healthy set-up, and leaves no trace.

One mistake of each kind; `python -m bench doctor` plants all, and examines every recipe.
"""

import json
import random
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from bench import doctor as planted
from torch import nn
from typer.testing import CliRunner

import glassformer as gf
from glassformer.checks.doctor import KINDS
from glassformer.cli.main import app
from glassformer.spec.errors import CheckFailed, InputError


def test_every_kind_is_planted_five_times():
    kinds = [plant.kind for plant in planted.PLANTS]
    assert {kind: kinds.count(kind) for kind in kinds} == {kind.name: 5 for kind in KINDS}
    assert len(KINDS) == 20


#: One of each kind that needs no other library.
ONE_EACH = {
    plant.kind: plant
    for plant in reversed(planted.PLANTS)
    if not plant.what.startswith(("Llama", "BERT", "T5", "made before"))
}


@pytest.mark.parametrize("plant", ONE_EACH.values(), ids=ONE_EACH)
def test_a_planted_mistake_is_found(plant):
    """The kind is named, with numbers as evidence and a line to paste."""
    (found,) = plant.examine(only=plant.kind).findings
    assert found.verdict in ("mistake", "warning"), f"{plant.what}: {found}"
    assert any(letter.isdigit() for letter in found.evidence) or "probabilities" in found.evidence
    assert found.fix


def test_equal_rows_that_are_excused_are_still_counted():
    """Sums modulo 7: 49 distinct rows, so every one of the validation is in the training."""
    draw = random.Random(0)

    def sums(count):
        pairs = [(draw.randrange(7), draw.randrange(7)) for _ in range(count)]
        return torch.tensor([[a, 7, b, 8, (a + b) % 7] for a, b in pairs])

    train, val = sums(600), sums(100)
    batches = [[(x[:, :-1], x[:, 1:]) for x in rows.split(16)] for rows in (train, val)]
    setup = planted.gpt(batches=batches[0], val_batches=batches[1])
    (found,) = gf.doctor(setup, only="split leak").findings
    assert found.verdict == "passed"
    rows = {tuple(row) for row in train.tolist()}
    assert len(rows) == 49 and all(tuple(row) in rows for row in val.tolist())
    assert "551 of 600 training examples are repetitions" in found.evidence
    assert "100 of 100 validation examples are among 600 of training" in found.evidence
    assert found.evidence.count("coincide by chance") == 2


class Counting(nn.Module):
    """A model with a mask and labels, for set-ups of batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(41, 16)
        self.head = nn.Linear(16, 41)

    def forward(self, input_ids, attention_mask=None, labels=None):
        x = self.table(input_ids)
        x = x if attention_mask is None else x * attention_mask[..., None]
        logits = self.head(x.cumsum(1))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def test_labels_of_another_row_and_a_token_taken_for_pad():
    ids = torch.randint(0, 41, (8, 12), generator=torch.Generator().manual_seed(1))
    ids[:, 4] = 0
    full = torch.ones_like(ids)

    def found(kind, **batch):
        setup = {"model": Counting(), "batches": [{"input_ids": ids, **batch}] * 3}
        (row,) = gf.doctor(setup, only=kind).findings
        return row

    assert found("target shift", labels=ids).verdict == "passed"
    torn = found("target shift", labels=ids.roll(1, 0))
    assert torn.verdict == "mistake" and "of another row" in torn.evidence
    assert found("loss mask", labels=ids, attention_mask=full).verdict == "passed"
    holes = found("loss mask", labels=ids, attention_mask=(ids != 0).long())
    assert holes.verdict == "mistake" and "all of them the id 0" in holes.evidence


@pytest.mark.parametrize("what", ["own task, not shifted", "own optimizer drops a group"])
def test_a_mistake_in_a_users_part_is_found(what):
    """In a task and in an optimizer of a file."""
    (plant,) = [plant for plant in planted.PLANTS if plant.what.endswith(what)]
    assert planted.alarms(plant.examine(only=plant.kind)) == [plant.kind]


def test_a_healthy_setup_passes_and_comes_back_as_it_was():
    """Weights, gradients, modes, the optimizer, the schedule, and the random generators."""
    setup = planted.gpt()
    setup.model.train()
    setup.model.norm.eval()
    for q in setup.model.parameters():
        q.grad = torch.ones_like(q)
    weights = {n: q.detach().clone() for n, q in setup.model.named_parameters()}
    modes = [part.training for part in setup.model.modules()]
    state = json.dumps(setup.optimizer.state_dict(), default=str)
    rates = json.dumps(setup.schedule.state_dict(), default=str)
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    drawn = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    found = gf.doctor(setup)
    assert not planted.alarms(found), found
    assert not found.of("raised"), found
    assert found.passed >= 16, found
    for name, q in setup.model.named_parameters():
        assert torch.equal(q, weights[name])
        assert torch.equal(q.grad, torch.ones_like(q))
    assert [part.training for part in setup.model.modules()] == modes
    assert json.dumps(setup.optimizer.state_dict(), default=str) == state
    assert json.dumps(setup.schedule.state_dict(), default=str) == rates
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert np.random.get_state()[1].tolist() == drawn[1]
    assert random.getstate() == drawn[2]


def test_what_is_missing_is_not_offered():
    """A bare model has nothing that could pass; each part adds kinds."""
    model = planted.Gpt()
    bare = gf.doctor(model)
    assert bare.passed == bare.failed == 0
    assert len(bare.of("not offered")) == 20
    whole = planted.gpt()
    some = gf.doctor({"model": model, "batches": whole.batches, "loss": whole.loss}, quick=True)
    seen = {f.kind: f.verdict for f in some.findings}
    assert seen["target shift"] == "passed"
    assert seen["optimizer coverage"] == seen["warmup"] == "not offered"
    assert "learning rate" not in seen  # quick


def test_time_limits_and_wrong_arguments():
    """After the time limit nothing begins; an unknown kind is refused with the nearest."""
    setup = planted.gpt()
    late = gf.doctor(setup, seconds=1e-9)
    assert {f.verdict for f in late.findings} == {"not offered"}
    assert "time limit" in late.findings[0].evidence
    with pytest.raises(InputError, match="no kind 'warmpu'"):
        gf.doctor(setup, only="warmpu")
    with pytest.raises(InputError, match="no sequence"):
        gf.doctor({"model": setup.model, "sequence": 1})
    with pytest.raises(InputError, match="is no training set-up"):
        gf.doctor(nn.Linear)


def test_the_report_in_every_format():
    """Text, JSON, Markdown, JUnit, and an exception."""
    found = gf.doctor(planted.gpt(ahead=0), only="loss")
    assert found.failed == 1
    assert "mistake  target shift" in str(found)
    assert "fix: " in str(found)
    data = found.to_dict()
    assert data["mistakes"] == 1 and data["findings"][1]["kind"] == "target shift"
    assert "| mistake | target shift |" in found.markdown()
    suite = ElementTree.fromstring(found.junit())
    assert suite.attrib["failures"] == "1" and suite.attrib["tests"] == "4"
    with pytest.raises(CheckFailed, match="target shift"):
        found.raise_if_failed()


def test_the_command(tmp_path, monkeypatch):
    """A task with overrides, a factory of a file; exit 1 for a mistake, 2 for a wrong name."""
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    words = ["doctor", "copy", "task.examples=200", "train.steps=40", "train.schedule.warmup=900"]
    done = runner.invoke(app, [*words, "--only", "optimizer", "-o", "found.md", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["mistakes"] == 1
    assert "| mistake | warmup |" in (tmp_path / "found.md").read_text()
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\ndef setup():\n    return {'model': nn.Embedding(3, 2)}\n"
    )
    done = runner.invoke(app, ["doctor", "mine.py:setup"])
    assert done.exit_code == 0 and "not examined" in done.stdout
    assert runner.invoke(app, ["doctor", "mine.py:other"]).exit_code != 0
