"""One word for a model means the same in every verb, and one that means nothing is told alike."""

from pathlib import Path

import pytest

from glassformer.cli.shell.resolve import find_model, find_run
from glassformer.spec.errors import InputError


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("reverse", "digits", "digits-int4"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


def asked(text: str, runs: Path, **more) -> InputError:
    with pytest.raises(InputError) as caught:
        find_model(text, runs=runs, **more)
    return caught.value


def test_a_folder_comes_before_a_run_of_its_name(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_model("digits@7", runs=runs) == find_run("digits@7", runs) == f"{runs}/digits@7"
    (tmp_path / "digits").mkdir()
    assert find_model("digits@7", runs=runs) == find_run("digits@7", runs) == "digits@7"


def test_an_unknown_name_is_told_with_where_it_was_looked_for_and_what_there_is(runs):
    error = asked("revers@last", runs)
    assert error.what == "there is no folder revers"
    assert str(runs) in error.where and "here" in error.where
    assert error.hint == "did you mean 'reverse'?"
    assert asked("xyzzy", runs).hint == "there are: digits, digits-int4, reverse"
    with pytest.raises(InputError, match="no folder revers"):
        find_run("revers", runs)


def test_what_lies_beside_a_path_is_a_neighbour_too(runs, tmp_path):
    assert asked(f"{runs}/digts", runs).hint == f"did you mean '{runs}/digits'?"
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "qwen.gguf").touch()
    error = asked(f"{tmp_path}/models/qwem.gguf", runs)
    assert error.what.startswith("there is no file")
    assert error.hint == f"did you mean '{tmp_path}/models/qwen.gguf'?"


def test_where_there_are_no_runs_it_is_told_how_they_are_made(tmp_path):
    assert "glass train" in asked("reverse", tmp_path / "none").hint


def test_presets_can_be_meant_too(runs):
    assert asked("qwne", runs, also=["qwen", "core"]).hint == "did you mean 'qwen'?"


def test_a_name_of_the_cache_may_be_a_mistyped_path(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = asked("runs/digts", Path("runs"), cache=tmp_path / "cache")
    assert "not in the local cache" in error.what and "nor is there a folder" in error.what
    assert error.hint == "did you mean 'runs/digits'?"
    assert "--download" in asked("Org/Model-7B", Path("runs"), cache=tmp_path / "cache").hint


@pytest.mark.parametrize("text", ["", "@last", "x" * 5000, "no/such/folder", "a\nb"])
def test_names_that_cannot_be_are_refused_too(text, runs):
    assert len(str(asked(text, runs))) < 600


def test_many_runs_are_not_all_listed(tmp_path):
    for number in range(40):
        (tmp_path / f"run-{number:02d}").mkdir()
        (tmp_path / f"run-{number:02d}" / "run.json").touch()
    hint = asked("xyzzy", tmp_path).hint
    assert hint.count("run-") == 12 and "glass list" in hint
