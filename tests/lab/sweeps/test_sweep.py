"""Sweeps from the plan to the ranking: executors that agree, kills, failures, adaptive searches."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from glassformer.data.rng import Sampler
from glassformer.lab.runs import stack
from glassformer.lab.sweeps import executors
from glassformer.lab.sweeps.executors import Job, Result, read_result, run_here, train_job
from glassformer.lab.sweeps.plan import Planner, make_plan, plan_files, read_plan, run_name
from glassformer.lab.sweeps.ranking import rank
from glassformer.lab.sweeps.report import ranking_text
from glassformer.lab.sweeps.sweep import Sweep, executor, stopped_at, survivors, sweep, sweep_spec
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.serialize import from_dict, to_dict
from glassformer.spec.sweep import SweepSpec

TINY = (
    "task.examples=120",
    "task.max_length=3",
    "model.d_model=8",
    "model.decoder.layers.block.ffn.d_ff=16",
    "train.batch_size=16",
    "train.steps=6",
    "train.evaluate_every=2",
    "train.evaluate_examples=40",
    "train.checkpoint_every=2",
    "train.probes=0",
)
VARY = {"train.lr": ["1e-3", "3e-2"]}


def run(folder, *, name="s", vary=VARY, extra=(), **options):
    options = {"seeds": 2, "jobs": 1, "progress": False} | options
    paths = {text.partition("=")[0] for text in extra}
    given = [text for text in TINY if text.partition("=")[0] not in {*paths, *vary}]
    return sweep(
        "digits", vary=vary, overrides=[*given, *extra], name=name, sweeps=folder, **options
    )


def planned(*settings, **options):
    spec = sweep_spec("digits", overrides=[*TINY, *settings], options=options)
    return make_plan(spec, Planner(spec))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return run(tmp_path_factory.mktemp("sweeps"), baseline="lr=1e-3")


# --- the plan -------------------------------------------------------------------------------------


def test_seeds_are_paired():
    """Seed i draws the same rows in every cell, whatever the cell's model and rate are."""
    plan = planned("train.lr=1e-3,1e-2", "model.decoder.layers.count=1,2")
    assert len(plan.cells) == 4
    for seed in range(3):
        specs = [cell.run(seed) for cell in plan.cells]
        assert {spec.train.seed for spec in specs} == {seed}
        orders = [
            Sampler(120, batch_size=s.train.batch_size, seed=s.train.seed).rows(5) for s in specs
        ]
        assert all((order == orders[0]).all() for order in orders)


def test_a_plan_survives_its_files(tmp_path):
    plan = planned("train.lr=1e-3,1e-2", "model.position=Rotary,Learned")
    for name, text in plan_files(plan).items():
        (tmp_path / name).write_text(text)
    assert read_plan(tmp_path) == plan
    assert list(plan_files(plan)) == ["cells.jsonl", "sweep.json"]  # a kill leaves no half sweep
    with (tmp_path / "cells.jsonl").open("a") as file:  # a kill before the sweep names new cells
        file.write(f"{plan.cells[0].text}\n")
    assert read_plan(tmp_path) == plan
    with pytest.raises(InputError, match="not the folder of a sweep"):
        read_plan(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.lrr=1,2"], "did you mean 'lr'"),
        (["lr=1,2"], "did you mean 'train.lr'"),
        (["train.lr=1e-3,-1"], "lr -1"),
        (
            ["model.decoder.layers.block.attention.n_heads=4,3"],
            "1 of 2 cells cannot be run:\n  n_heads=3",
        ),
        (["model.position=Rotary,Rotari"], "did you mean 'Rotary'"),
    ],
)
def test_a_bad_cell_is_refused_before_anything_runs(settings, message):
    with pytest.raises(InputError, match=message):
        planned(*settings)


def test_a_baseline_must_be_one_cell():
    for text in ("train.lr=5", "train.steps=6"):
        with pytest.raises(InputError, match="baseline"):
            planned("train.lr=1e-3,1e-2", baseline=text)
    assert planned("train.lr=1e-3,1e-2", baseline="lr=1e-2").baseline == 1


def test_rungs_must_be_evaluations_before_the_end():
    with pytest.raises(InputError, match="no evaluation at the rung 3"):
        planned("train.lr=1e-3,1e-2", rungs=(3,))
    with pytest.raises(InputError, match="not before the last step"):
        planned("train.lr=1e-3,1e-2", rungs=(6,))


def test_the_ranking_says_which_wishes_were_met_only_nearly():
    design = {"params": "300k", "glu_expansion": [2, 4]}
    spec = sweep_spec("fsm", overrides=["task.examples=50", "task.longer=0"], design=design)
    plan = make_plan(spec, Planner(spec))
    values = np.array([[1.0, 1.1, 1.2], [2.0, 2.1, 2.2]])
    text = ranking_text(plan, rank([cell.name for cell in plan.cells], values), {}, width=150)
    assert "glu_expansion=4 ~  " in text
    (said,) = [line for line in text.splitlines() if line.startswith("~ glu_expansion=4: ")]
    design = plan.cells[1].spec.model.decoder.layers[0].block.ffn.d_ff
    assert "requested 4, got 3.8" in said and f"d_ff {design} instead of 320" in said
    exact = replace(plan, cells=[replace(cell, notes=cell.notes[:1]) for cell in plan.cells])
    assert "~" not in ranking_text(exact, rank(["a", "b"], values), {}, width=150)


def test_designs_meet_their_budget_and_say_what_gave_way():
    design = {"params": "20k", "glu_expansion": [2, 4], "heads": 2, "tied": [True, False]}
    path = Path(__file__).parents[3] / "src/glassformer/spec/units.py"
    fixed = [f"task.path={path}", "task.tokenizer=characters", "task.length=16"]
    spec = sweep_spec("text", overrides=fixed, design=design)
    plan = make_plan(spec, Planner(spec))
    assert plan.metric == "bits_per_byte"
    assert len(plan.cells) == 4
    assert all(abs(cell.parameters / 20_000 - 1) <= 0.005 for cell in plan.cells)
    assert all("parameters" in cell.notes[0] for cell in plan.cells)
    assert any("gave way" in note for cell in plan.cells for note in cell.notes)
    assert [cell.spec.model.heads[0].tied for cell in plan.cells] == [True, False] * 2
    bad = sweep_spec("text", overrides=fixed, design={"params": ["50", "20k"], "heads": 2})
    with pytest.raises(InputError, match="infeasible"):
        make_plan(bad, Planner(bad))
    for wrong, message in (
        ({"heads": 2}, "number of parameters"),
        ({"params": 1, "vocab": 3}, "task"),
        ({"params": 1, "glu_expanson": 3}, "did you mean"),
    ):
        with pytest.raises(InputError, match=message):
            Planner(sweep_spec("text", overrides=fixed, design=wrong))


# --- running --------------------------------------------------------------------------------------


def test_what_a_sweep_leaves(done):
    assert {path.name for path in (done.path / "runs").iterdir()} >= {
        run_name(cell, seed) for cell in (0, 1) for seed in (0, 1)
    }
    ranking = json.loads((done.path / "ranking.json").read_text())
    assert [row["name"] for row in ranking["rows"]] == ["lr=3e-2", "lr=1e-3"]
    rows = list(csv.DictReader((done.path / "table.csv").read_text().splitlines()))
    assert rows[0]["train.lr"] == "3e-2"
    assert float(rows[0]["seed 0"]) == done.ranking.rows[0].seeds[0]
    page = (done.path / "report.html").read_text()
    assert "lr=3e-2" in page
    assert "<script" not in page
    assert "vs baseline" in done.text()
    again = Sweep.open(done.path)
    assert again.ranking == done.ranking


def test_processes_leave_the_same_bits_even_if_one_dies(done, tmp_path, monkeypatch):
    """Two workers, one of which is killed while it trains: its run is done again by another."""
    real, killed = executors._Worker, []

    class Fragile(real):
        def lines(self):
            found = super().lines()
            if found and not killed:
                killed.append(self)
                self.process.kill()
            return found

    monkeypatch.setattr(executors, "_Worker", Fragile)
    other = run(tmp_path, baseline="lr=1e-3", jobs=2)
    assert killed
    assert other.ranking == done.ranking
    assert (other.path / "table.csv").read_bytes() == (done.path / "table.csv").read_bytes()
    for name in ("c000-s0", "c001-s1"):
        last = f"runs/{name}/checkpoints/step-000006/model.safetensors"
        assert (done.path / last).read_bytes() == (other.path / last).read_bytes()


def test_a_run_that_comes_back_from_another_machine_is_the_same(done, tmp_path):
    """What a Ray worker does, here; `python -m bench sweep --ray` does it on a cluster."""
    spec = done.plan.cells[1].run(0)
    job = Job(name="c001-s0", folder=tmp_path / "c001-s0", spec=spec, until=4)
    for until in (4, None):
        begun = executors._packed(job.folder) if job.folder.is_dir() else b""
        given = Job(name=job.name, folder=job.folder, spec=spec, until=until)
        executors._unpack(executors.train_away(given.to_dict(), begun, "test"), job.folder)
    assert read_result("c001-s0", job.folder).scores == done.results["c001-s0"].scores
    last = "checkpoints/step-000006/model.safetensors"
    assert (job.folder / last).read_bytes() == (done.run_path(1, 0) / last).read_bytes()


def test_without_ray_or_optuna_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MachineError, match="pip install ray"):
        run(tmp_path, jobs=None, ray="local")


def test_a_stack_ranks_as_runs_alone_do(tmp_path):
    """Trained as one: the same ranking up to rounding, and folders that every command takes."""
    done = run(tmp_path, name="alone", baseline="lr=1e-3", extra=["engine=torch"])
    stacked = run(tmp_path, baseline="lr=1e-3", jobs=None, stack=True)
    for ours, theirs in zip(stacked.ranking.rows, done.ranking.rows, strict=True):
        assert ours.name == theirs.name
        assert ours.seeds == pytest.approx(theirs.seeds, rel=1e-4)
    halved = run(tmp_path, name="h", jobs=None, stack=True, rungs=[2, 4], keep=0.5)
    assert len(halved.ranking.rows) == 1
    assert halved.results["c000-s0"].step in (2, 6)


def test_stacks_in_processes_rank_the_same_even_if_one_dies(tmp_path, monkeypatch):
    """Two shapes, each trained as one by a worker; one worker is killed while it trains."""
    real, killed = executors._Worker, []

    class Fragile(real):
        def lines(self):
            found = super().lines()
            if found and not killed:
                killed.append([*self.jobs])
                self.process.kill()
            return found

    vary = {"model.decoder.layers.block.ffn.d_ff": ["16", "24"]}
    here = run(tmp_path, name="here", vary=vary, jobs=None, stack=True)
    monkeypatch.setattr(executors, "_Worker", Fragile)
    beside = run(tmp_path, name="beside", vary=vary, jobs=2, stack=True)
    assert len(killed[0]) == 2  # seeds of one shape
    assert beside.ranking == here.ranking
    assert "2 at a time" in executor(jobs=2, ray=None, stack=True, device="cpu")[0]


def test_a_large_stack_is_divided_among_workers(tmp_path):
    cell = planned("train.lr=1e-3,1e-2").cells[0]
    jobs = [Job(name=str(i), folder=tmp_path / str(i), spec=cell.run(i)) for i in range(70)]
    for workers, sizes in ((1, [64, 6]), (3, [32, 32, 6]), (9, [8] * 8 + [6])):
        stacks = executors.stacks_of(jobs, workers=workers)
        assert sorted(map(len, stacks), reverse=True) == sizes
        assert sorted(int(job.name) for group in stacks for job in group) == [*range(70)]
    assert [*map(len, executors.stacks_of(jobs[:15], workers=8))] == [15]


def test_a_stack_that_fails_is_tried_in_halves(tmp_path, monkeypatch):
    real, sizes = stack.StackedRuns, []

    def small(specs, folders, **options):
        sizes.append(len(specs))
        if len(specs) > 2:
            raise RuntimeError("CUDA out of memory")
        return real(specs, folders, **options)

    monkeypatch.setattr(stack, "StackedRuns", small)
    cell = planned("train.lr=1e-3,1e-2", "train.seed=0").cells[0]
    jobs = [Job(name=str(i), folder=tmp_path / str(i), spec=cell.run(i)) for i in range(4)]
    updates = [*executors.run_stacked(jobs)]
    (told,) = [u.text for u in updates if isinstance(u, executors.Told)]
    assert "4 runs" in told and "CUDA out of memory" in told
    found = [u for u in updates if isinstance(u, Result)]
    assert [one.status for one in found] == ["finished"] * 4
    assert sizes == [4, 2, 2]


@pytest.mark.parametrize("step", [0, 1, 3, 5])
def test_a_sweep_that_is_cut_off_goes_on_to_the_same_ranking(done, tmp_path, step):
    """`python -m bench sweep` kills drivers for real; here one stops existing between two steps."""
    spec = done.plan.cells[1].run(0)
    job = Job(name="c001-s0", folder=tmp_path / "s" / "runs" / "c001-s0", spec=spec)
    training = train_job(job)
    for update in training:
        if update.step == step:
            break
    training.close()
    resumed = run(tmp_path, baseline="lr=1e-3")
    assert resumed.ranking == done.ranking
    lines = (resumed.path / "results.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["name"] for line in lines) == sorted(resumed.results)


def test_a_run_that_fails_or_diverges_is_a_result(tmp_path):
    vary = {"train.lr": ["1e-3", "1e30"]}
    made = run(tmp_path, vary=vary, extra=["train.clip=0", "train.steps=8"], seeds=1)
    assert made.results["c001-s0"].status == "diverged"
    assert [row.name for row in made.ranking.rows] == ["lr=1e-3"]
    assert made.ranking.incomplete[0][2].startswith("1 diverged of 1 seeds")
    spec = made.plan.cells[0].run(0)
    broken = Job(name="x", folder=tmp_path / "x", spec=spec, device="cuda:77")
    (*_, failed) = run_here([broken])
    assert failed.status == "failed"
    assert read_result("x", tmp_path / "x").why == failed.why
    assert [*run_here([broken])] == [failed]  # it is not begun again


def test_a_sweep_is_not_overwritten_or_mixed(done):
    folder = done.path.parent
    with pytest.raises(InputError, match="exists"):
        run(folder, baseline="lr=1e-3")
    with pytest.raises(InputError, match="seeds differs"):
        run(folder, baseline="lr=1e-3", seeds=3, resume=True)
    same = sweep(done.path, jobs=1, progress=False)  # by its folder
    assert same.ranking == done.ranking


def test_complete_runs_by_name(tmp_path):
    plan = planned("train.lr=1e-3,1e-2")
    named = {"slow": plan.cells[0].spec, "fast": plan.cells[1].spec}
    made = sweep(named, seeds=1, jobs=1, sweeps=tmp_path, progress=False, baseline="run=slow")
    assert {row.name for row in made.ranking.rows} == {"slow", "fast"}


def test_results_and_jobs_travel_as_json(done, tmp_path):
    one = done.results["c000-s1"]
    assert Result.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    job = Job(name="a", folder=tmp_path, spec=done.plan.cells[0].spec, until=4)
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job
    assert from_dict(SweepSpec, to_dict(done.plan.sweep)) == done.plan.sweep


# --- adaptive -------------------------------------------------------------------------------------


def test_successive_halving_stops_the_worse_and_ranks_the_survivors(tmp_path):
    vary = {"train.lr": ["1e-5", "1e-2", "1e-4", "3e-2"]}
    made = run(tmp_path, vary=vary, rungs=[2, 4], keep=0.5, seeds=1)
    stopped = stopped_at(made.plan, made.results)
    assert sorted(stopped.values()) == [2, 2, 4]
    assert {made.results[run_name(c, 0)].step for c, rung in stopped.items() if rung == 2} == {2}
    assert len(made.ranking.rows) == 1
    assert "survivors" in made.text()
    assert "stopped at step 2" in made.text()
    alone = Job(
        name="alone",
        folder=tmp_path / "alone",
        spec=made.plan.cells[made.ranking.rows[0].cell].run(0),
    )
    (*_, result) = run_here([alone])
    assert result.scores["loss"] == made.ranking.rows[0].mean  # going on changes nothing


def test_survivors_wait_for_every_run_and_drop_the_diverged():
    plan = planned("train.lr=1e-3,1e-2,1e-1", seeds=1, rungs=(2,), keep=0.4)
    results = {
        run_name(c, 0): Result(name="", status="stopped", step=2, curve={2: {"loss": loss}})
        for c, loss in enumerate((3.0, 2.0))
    }
    assert survivors(plan, results, plan.cells, 2) is None
    results[run_name(2, 0)] = Result(name="", status="diverged", curve={2: {"loss": 0.1}})
    assert [cell.index for cell in survivors(plan, results, plan.cells, 2)] == [0, 1]


def test_optuna_chooses_and_a_resumed_search_asks_the_same(tmp_path):
    pytest.importorskip("optuna")
    options = {
        "vary": {"train.lr": "log:1e-4..1e-1", "train.clip": ["0", "1"]},
        "sampler": "tpe",
        "draws": 4,
        "seeds": 1,
        "extra": ["train.steps=2"],
    }
    made = run(tmp_path, **options)
    assert len(made.plan.cells) == 4
    assert "tpe sampler" in made.text()
    again = run(tmp_path, resume=True, **options)
    assert again.plan.cells == made.plan.cells
    assert again.ranking == made.ranking
    with pytest.raises(InputError, match="did you mean"):
        run(tmp_path, name="t", **{**options, "vary": {"train.lrr": "1..2"}})


def test_a_stopped_job_goes_on_from_its_rung(tmp_path):
    spec = planned("train.lr=1e-3,1e-2").cells[0].run(0)
    job = Job(name="a", folder=tmp_path / "a", spec=spec, until=4)
    steps = [update.step for update in train_job(job)]
    assert steps == [0, 1, 2, 3, 4]
    assert read_result("a", job.folder).status == "stopped"
    rest = Job(name="a", folder=job.folder, spec=spec)
    assert [update.step for update in train_job(rest)] == [0, 5, 6]
    assert np.isfinite(read_result("a", job.folder).scores["loss"])
