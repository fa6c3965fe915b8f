"""References to runs: parsing, formatting, and the checkpoint that each names."""

from pathlib import Path

import pytest

from glassformer.spec.errors import InputError
from glassformer.store.rundir import RunDirectory, RunRef

SRC = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize("text", ["digits", "runs/digits@last", "runs/digits@120", "org/name@main"])
def test_a_reference_is_written_as_it_was_read(text):
    assert str(RunRef.parse(text)) == text


def test_the_first_at_sign_separates_path_and_step():
    assert RunRef.parse("runs/a@best@3") == RunRef("runs/a", "best@3")
    assert RunRef.parse(Path("runs/a")) == RunRef("runs/a")
    assert RunRef.parse("runs/a@7").folder == Path("runs/a")


def test_best_last_and_steps_name_checkpoints(tmp_path):
    run = RunDirectory(tmp_path)
    for step in (2, 3, 5):
        run.step_folder(step).mkdir(parents=True)
    assert RunRef(str(tmp_path)).checkpoint() == run.step_folder(5)  # nothing is pointed at yet
    run.point("best", 2)
    run.point("last", 3)
    named = {name: RunRef(str(tmp_path), name).checkpoint().name for name in ("", "best", "last")}
    assert named == {"": "step-000002", "best": "step-000002", "last": "step-000003"}
    assert RunRef(str(tmp_path), "5").checkpoint() == run.step_folder(5)
    with pytest.raises(InputError, match="no checkpoint '4'"):
        RunRef(str(tmp_path), "4").checkpoint()


def test_references_are_parsed_in_one_place_only():
    files = [path for path in SRC.rglob("*.py") if 'partition("@")' in path.read_text()]
    assert [path.name for path in files] == ["rundir.py"]
