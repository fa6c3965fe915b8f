"""`glass sweep` as a person meets it: the table, the plan, refusals, going on by the folder."""

import json

import pytest

from glassformer.lab.recipes import recipe
from glassformer.spec.serialize import to_json
from tests.command import glass
from tests.lab.sweeps.test_sweep import TINY


def test_a_sweep_prints_its_ranking_and_goes_on_by_its_folder(tmp_path):
    words = ("sweep", "digits", *TINY, "train.lr=1e-3,3e-2", "--seeds", "2", "--jobs", "1")
    made = glass(*words, folder=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "lr=3e-2" in made.stdout
    assert "no difference seen with 2 seeds" in made.stdout or "told apart" in made.stdout
    assert "2 cells, 2 seeds: 4 runs" in made.stderr
    assert "4/4 runs done" in made.stderr
    assert "report.html" in made.stderr
    again = glass("sweep", "sweeps/digits", "--json", folder=tmp_path)
    rows = json.loads(again.stdout)["rows"]
    assert [row["rank"] for row in rows] == [1, 2]
    twice = glass(*words, folder=tmp_path)
    assert twice.returncode == 2
    assert "--resume goes on with it" in twice.stderr


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    made = glass("sweep", "digits", *TINY, "train.lr=1e-3,3e-2", "--dry-run", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "2 cells x 5 seeds = 10 runs" in made.stdout
    assert "parameters" in made.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.lrr=1,2"], "did you mean 'lr'?"),
        (["train.lr="], "a list of values is empty"),
        (["train.lr=1..2"], "--sampler random --draws 20"),
        (["train.lr=1,2", "--rungs", "1,x"], "not a number"),
        (["train.lr=1,2", "--jobs", "0"], "jobs 0 is below 1"),
        (["train.seed=1..2000000", "--sampler", "random", "--draws", "1000000"], "--yes"),
        (["--embedding-ratio", "0.3"], "--params 300k"),
        (["train.lr=1,2", "--resume", "--overwrite"], "leave out one"),
        (["train.lr=1,2", "--ray", "auto", "--jobs", "2"], "either --ray, or --jobs and --stack"),
    ],
)
def test_bad_input_is_an_error_before_anything_runs(tmp_path, words, message):
    made = glass("sweep", "digits", *words, folder=tmp_path)
    assert made.returncode == 2
    assert message in made.stderr
    assert "Traceback" not in made.stderr
    assert not list(tmp_path.iterdir())


def test_a_design_that_does_not_exist_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    text = ("sweep", "text", "task.path=a.txt", "task.tokenizer=characters", "task.length=8")
    made = glass(*text, "--params", "20,20k", "--tied,--untied", "--dry-run", folder=tmp_path)
    assert made.returncode == 2
    assert "2 of 4 cells cannot be run" in made.stderr
    assert "infeasible" in made.stderr
    good = glass(*text, "--params", "20k", "--heads", "2", "--tied,--untied", "--dry-run",
                 "--json", folder=tmp_path)  # fmt: skip
    plan = json.loads(good.stdout)
    assert [cell["settings"]["tied"] for cell in plan["cells"]] == ["true", "false"]


def test_two_configs_make_one_sweep(tmp_path):
    for name, width in (("one", 8), ("two", 12)):
        spec = recipe("digits", [*TINY, f"model.d_model={width}"])
        (tmp_path / f"{name}.json").write_text(to_json(spec))
    words = ("sweep", "one.json", "two.json", "train.seed=1", "--dry-run", "--json")
    made = glass(*words, folder=tmp_path)
    assert made.returncode == 0, made.stderr
    assert [cell["name"] for cell in json.loads(made.stdout)["cells"]] == ["one", "two"]
    refused = glass("sweep", "digits", "one.json", folder=tmp_path)
    assert refused.returncode == 2 and "several things to sweep" in refused.stderr
