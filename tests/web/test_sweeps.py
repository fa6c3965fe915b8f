"""The handlers of the page Sweeps: what they return, hundreds of cells, and what they refuse."""

import json
import time
from pathlib import Path

import pytest

from glassformer.lab.sweeps.executors import Result
from glassformer.lab.sweeps.plan import plan_files, run_name
from glassformer.lab.sweeps.report import commands
from glassformer.lab.sweeps.sweep import sweep_spec
from glassformer.spec.errors import GlassError
from glassformer.web.app.query import Query
from glassformer.web.app.workspace import Workspace
from glassformer.web.pages.runs import list_sweeps, one_sweep
from tests.lab.sweeps.test_sweep import planned, run


def write(folder: Path, plan, *, seeds: int) -> None:
    """A sweep's folder with results that nobody trained."""
    folder.mkdir(parents=True)
    for name, text in plan_files(plan).items():
        (folder / name).write_text(text)
    lines = []
    for cell in plan.cells:
        for seed in range(seeds):
            loss = 1 + (cell.index * 7 % 13) / 10 + seed / 100 + (cell.index * seed % 3) / 50
            curve = {step: {"loss": loss + 1 / step} for step in (1, 2, 3, 4)}
            made = Result(
                name=run_name(cell.index, seed), status="finished", step=4, scores={"loss": loss},
                curve=curve,
            )  # fmt: skip
            lines.append(json.dumps(made.to_dict()) + "\n")
    (folder / "results.jsonl").write_text("".join(lines))


def asked(name):
    return Query(path={"id": name})


def texts(tree):
    """Every text of a tree of elements."""
    for each in tree[2:]:
        if isinstance(each, str):
            yield each
        else:
            yield from texts(each)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("page")
    plan = planned("train.lr=1e-3,3e-3,1e-2", "train.clip=1,2", seeds=3, baseline="lr=1e-3 clip=1")
    write(place / "sweeps" / "rates", plan, seeds=3)
    (place / "runs").mkdir()
    return place


def test_a_sweep_is_listed_and_drawn(folder):
    workspace = Workspace(folder / "runs")
    assert list_sweeps(Query(), workspace)["sweeps"] == ["rates"]
    found = one_sweep(asked("rates"), workspace)
    words = list(texts(["", {}, *found["parts"]]))
    assert "Ranking by loss" in words
    assert any("18 of 18 runs done" in word for word in words)
    assert not found["live"]
    links = json.dumps(found["parts"])
    assert "#/inspect?run=rates.c000-s0" in links
    for title in ("Two factors", "Settings", "Curves"):
        assert title in words
    assert found["cli"].startswith("glass sweep digits train.lr=1e-3,3e-3,1e-2 train.clip=1,2 ")
    assert "--seeds 3" in found["cli"]
    assert Workspace(folder / "sweeps").sweeps == (folder / "sweeps").resolve()


def test_a_run_of_a_sweep_is_a_run_like_any_other(tmp_path):
    made = run(tmp_path / "sweeps", name="s", seeds=1, extra=["train.steps=2"])
    workspace = Workspace(tmp_path / "runs")
    assert workspace.run("s.c001-s0").steps() == [2]
    assert workspace.folder("s.c000-s0") == made.run_path(0, 0).resolve()


@pytest.mark.parametrize("name", ["..", "nothing", "a/b", "rates.", ".c000-s0", "rates.../c0"])
def test_a_name_that_is_no_sweep_is_refused(folder, name):
    workspace = Workspace(folder / "runs")
    for ask in (workspace.sweep, workspace.folder):
        with pytest.raises(GlassError):
            ask(name)


def test_a_damaged_sweep_is_an_error_and_a_line_cut_short_is_not(folder, tmp_path):
    plan = planned("train.lr=1e-3,1e-2", seeds=2)
    write(tmp_path / "sweeps" / "cut", plan, seeds=2)
    file = tmp_path / "sweeps" / "cut" / "results.jsonl"
    file.write_text(file.read_text()[:-40])
    workspace = Workspace(tmp_path / "runs")
    words = list(texts(["", {}, *one_sweep(asked("cut"), workspace)["parts"]]))
    assert any("3 of 4 runs done" in word for word in words)
    (tmp_path / "sweeps" / "cut" / "sweep.json").write_text("{")
    with pytest.raises(GlassError, match="not the folder of a sweep"):
        one_sweep(asked("cut"), workspace)


def test_five_hundred_cells_are_ranked_in_a_moment(tmp_path):
    rates = ",".join(f"{i}e-5" for i in range(1, 51))
    plan = planned(f"train.lr={rates}", "train.clip=1,2,3,4,5,6,7,8,9,10")
    assert len(plan.cells) == 500
    write(tmp_path / "sweeps" / "many", plan, seeds=5)
    workspace = Workspace(tmp_path / "runs")
    began = time.process_time()
    found = one_sweep(asked("many"), workspace)
    spent = time.process_time() - began
    print(f"500 cells: {spent:.2f} s of processor time")
    assert json.dumps(found).count("#/inspect?run=many.") == 2500
    began = time.process_time()
    one_sweep(asked("many"), workspace)
    assert time.process_time() - began < 10 * spent  # the ranking is kept


def test_what_is_copied_is_what_was_typed():
    spec = sweep_spec(
        "text",
        overrides=["train.lr=log:1e-4..1e-2", "train.steps=7"],
        design={"params": "300k", "tied": [True, False], "glu_expansion": [2, 4]},
        options={"sampler": "random", "draws": 3, "rungs": (250, 500)},
    )
    found = commands(spec, "sweeps/text")
    assert found["cli"] == (
        "glass sweep text train.lr=log:0.0001..0.01 train.steps=7 --params 300k --tied,--untied "
        "--glu-expansion 2,4 --sampler random --draws 3 --rungs 250,500 --name text"
    )
    assert (
        "design={'params': '300k', 'tied': 'true,false', 'glu_expansion': '2,4'}" in found["python"]
    )
