"""Choices: made once, kept, written and read on request, never a routine that cannot run."""

import json

import pytest
import torch

from glassformer.kernels import matmul
from glassformer.kernels.matmul import ROUTINES, Choices, candidates
from glassformer.spec.errors import FileError, MachineError
from tests.kernels.checks import single


def test_candidates_are_what_can_run():
    assert candidates(single(64, 64)) == ROUTINES
    assert candidates(single(64, 64), compiled=True) == ("linear", "columns", "transposed")
    assert candidates(single(64, 64).double()) == ("linear", "columns", "transposed")
    assert candidates(single(3, 5)) == ("linear",)
    assert candidates(torch.zeros(64, 64, device="meta")) == ("linear",)
    assert "transposed" not in candidates(torch.zeros(1, 1).expand(1 << 13, 1 << 12))


def test_a_choice_is_made_once(monkeypatch):
    choices, calls = Choices(), []
    real = matmul.fastest
    monkeypatch.setattr(matmul, "fastest", lambda *a, **k: calls.append(1) or real(*a, **k))
    found = choices.of(single(128, 64))
    assert len(found) == 3
    assert set(found) <= set(ROUTINES)
    assert choices.of(single(128, 64, seed=1)) == found
    assert len(calls) == 1
    assert "c" not in choices.of(single(128, 64), compiled=True)
    assert len(calls) == 2


def test_choices_travel_through_a_file_that_the_caller_names(tmp_path):
    first, second, path = Choices(), Choices(), tmp_path / "choices.json"
    first.of(single(128, 64))
    first.write(path)
    assert second.read(path) == 1
    assert second.known == first.known
    content = json.loads(path.read_text())
    content["machine"]["torch"] = "0"
    path.write_text(json.dumps(content))
    assert Choices().read(path) == 0  # another machine's: tried anew here
    assert [p.name for p in tmp_path.iterdir()] == ["choices.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1, "machine": {}, "choices": {"a": 1}}', "\x00"]
)
def test_other_files_are_refused(text, tmp_path):
    path = tmp_path / "choices.json"
    path.write_text(text)
    with pytest.raises(FileError, match="not a file of choices"):
        Choices().read(path)


def test_routines_that_cannot_run_are_refused(tmp_path):
    path = tmp_path / "choices.json"
    for names in (["c"] * 3, ["linear"] * 2, ["gone"] * 3):
        known = {"64x64 float64, 1 threads, linear/columns": names}
        content = {"format": 1, "machine": matmul.machine(), "choices": known}
        path.write_text(json.dumps(content))
        with pytest.raises(FileError, match="no choice for"):
            Choices().read(path)
    with pytest.raises(FileError):
        Choices().read(tmp_path / "none.json")
    with pytest.raises(MachineError, match="cannot write"):
        Choices().write(tmp_path / "none" / "choices.json")
