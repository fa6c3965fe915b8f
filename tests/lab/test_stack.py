"""Runs that are trained as one leave what each of them leaves alone."""

import json
import math
import types
from pathlib import Path

import numpy as np
import pytest

from glassformer.lab.recipes import recipe
from glassformer.lab.runs.artifacts import probe_files
from glassformer.lab.runs.stack import Left, StackedRuns, stack_groups
from glassformer.lens.measure.probes import read_probes
from glassformer.spec.errors import DivergedError, InputError
from glassformer.spec.train import RunSpec
from glassformer.store.checkpoint import load_checkpoint
from glassformer.store.rundir import RunDirectory
from tests.lab.runs import trained
from tests.training.samples import RUNS, digits

WIDE = "train.precision=float64"
#: What each run of a stack has of its own.
OWN = (
    ("train.seed=3", "train.lr=0.01", "model.decoder.dropout=0.2"),
    ("train.seed=4", "train.steps=17", "train.clip=0.1", "train.evaluate_every=5"),
    ("train.seed=5", "train.lr=0.05", "train.patience=1", "train.label_smoothing=0.1"),
)


def stack_of(specs: list[RunSpec], folder: Path) -> StackedRuns:
    return StackedRuns(specs, [folder / str(i) for i in range(len(specs))])


def train(stack: StackedRuns, *, kill_at: int | None = None) -> dict[int, Left]:
    """Train a stack, or go on with it; return how each run left it. A kill saves nothing more."""
    left = {}
    with stack.locked():
        for run in stack.runs:
            run.resume() if (run.path / "config.json").exists() else run.prepare()
        events = stack.events()
        for i, event in events:
            if isinstance(event, Left):
                left[i] = event
            if kill_at is not None and i == 0 and event.step == kill_at:
                events.close()
                break
    return left


def files_of(folder: Path) -> set[str]:
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    return {name for name in found if "tfevents" not in name}


def lines_of(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def numbers_in(value: object) -> list[float]:
    """Every number of a JSON value, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for one in value for number in numbers_in(one)]
    return [float(value)] if isinstance(value, int | float) else []


@pytest.mark.parametrize("name", RUNS)
def test_a_stack_leaves_what_its_runs_leave_alone(name, tmp_path):
    specs = [RUNS[name](WIDE, *own) for own in OWN]
    left = train(stack_of(specs, tmp_path))
    for i, spec in enumerate(specs):
        alone, own = tmp_path / f"alone-{i}", tmp_path / str(i)
        run = trained(spec, alone)
        assert left[i] == Left(run.progress.step)
        assert files_of(own) == files_of(alone)
        ours, theirs = lines_of(own), lines_of(alone)
        assert [sorted(line) for line in ours] == [sorted(line) for line in theirs]
        assert np.allclose(numbers_in(ours), numbers_in(theirs), rtol=0, atol=1e-10)
        step = RunDirectory(alone).pointed("best")
        assert RunDirectory(own).pointed("best") == step
        weights = [load_checkpoint(RunDirectory(f).step_folder(step))[1] for f in (own, alone)]
        assert all(np.allclose(weights[0][key], weights[1][key], atol=1e-9) for key in weights[1])
        for file in probe_files(RunDirectory(alone)).values():
            seen = [read_probes(each / "probes" / file.name) for each in (own, alone)]
            assert (seen[0].step, seen[0].words) == (seen[1].step, seen[1].words)
            assert np.allclose(seen[0].norms_BRT, seen[1].norms_BRT, rtol=1e-6)
            assert np.allclose(seen[0].losses_BT, seen[1].losses_BT, rtol=1e-5, atol=1e-6)
            assert np.array_equal(seen[0].lens_ids, seen[1].lens_ids)
            maps = [probes.attention for probes in seen]
            assert all(np.array_equal(maps[0][key], maps[1][key]) for key in maps[1])
        told = [RunDirectory(folder).read_json("run.json") for folder in (own, alone)]
        assert told[0]["status"] == told[1]["status"] == "finished"
        assert told[0]["step"] == told[1]["step"]


def test_one_that_diverges_leaves_and_disturbs_no_other(tmp_path):
    good = [digits("train.seed=1"), digits("train.seed=2")]
    wild = digits("train.seed=3", "train.lr=1e30", "train.clip=0", "train.schedule.warmup=0")
    left = train(stack_of([good[0], wild, good[1]], tmp_path / "with"))
    train(stack_of(good, tmp_path / "without"))
    assert isinstance(left[1].error, DivergedError)
    assert RunDirectory(tmp_path / "with" / "1").read_json("run.json")["status"] == "diverged"
    for there, here in (("0", "0"), ("2", "1")):
        ours, theirs = lines_of(tmp_path / "with" / there), lines_of(tmp_path / "without" / here)
        assert np.allclose(numbers_in(ours), numbers_in(theirs), rtol=0, atol=1e-5)
        assert all(math.isfinite(number) for number in numbers_in(ours))


def test_a_killed_stack_goes_on_to_the_same_bits(tmp_path):
    """Some runs are ahead of others after a kill, and one has ended."""
    specs = [
        digits(*own, f"train.checkpoint_every={every}")
        for own, every in zip(OWN, (3, 7, 4), strict=True)
    ]
    specs.append(digits("train.seed=6", "train.steps=8"))
    train(stack_of(specs, tmp_path / "whole"))
    for step in (2, 11):
        train(stack_of(specs, tmp_path / "killed"), kill_at=step)
    assert RunDirectory(tmp_path / "killed" / "3").read_json("run.json")["status"] == "finished"
    train(stack_of(specs, tmp_path / "killed"))
    for i, spec in enumerate(specs):
        ours, theirs = tmp_path / "killed" / str(i), tmp_path / "whole" / str(i)
        assert files_of(ours) == files_of(theirs)
        assert lines_of(ours) == lines_of(theirs)
        last = RunDirectory(theirs).pointed("last")
        assert last == spec.train.steps or spec.train.patience
        weights = [RunDirectory(f).step_folder(last) / "model.safetensors" for f in (ours, theirs)]
        assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_stop_saves_every_run(tmp_path):
    stack = stack_of([digits(*own) for own in OWN[:2]], tmp_path)
    with stack.locked():
        for run in stack.runs:
            run.prepare()
        for _, event in stack.events():
            stack.stop_requested |= event.step == 4
    for run in stack.runs:
        assert run.stopped and RunDirectory(run.path).steps()[-1] == run.progress.step
        assert RunDirectory(run.path).read_json("run.json")["status"] == "stopped"


def test_runs_of_one_shape_are_one_stack():
    specs = [
        digits("train.seed=1"),
        digits("model.d_model=16"),
        digits("train.lr=0.5", "model.decoder.dropout=0.3"),
        digits("train.optimizer=Muon"),
        digits("engine=numpy"),
        digits("train.optimizer=Muon"),
    ]
    assert stack_groups(specs) == [[0, 2], [1], [3], [4], [5]]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("model.d_model=16", "differ in what decides shapes"),
        ("train.batch_size=4", "differ in what decides shapes"),
        ("train.optimizer=Muon", "a stack has no Muon"),
        (
            "train.gradient_checkpointing=true",
            "a stack has no TrainSpec gradient_checkpointing=True",
        ),
    ],
)
def test_what_cannot_be_stacked_is_refused(other, message, tmp_path):
    with pytest.raises(InputError, match=message):
        stack_of([digits(), digits(other)], tmp_path)


def test_the_samples_of_a_stack_are_those_of_its_runs(tmp_path):
    size = (f"task.path={types.__file__}", "task.vocab_size=300", "task.length=24")
    short = ("train.steps=2", "train.evaluate_every=2", "train.evaluate_examples=4")
    few = ("train.batch_size=2", "train.probes=0", WIDE)
    specs = [recipe("text", [*size, *short, *few, f"train.seed={seed}"]) for seed in (1, 2)]
    train(stack_of(specs, tmp_path))
    for i, spec in enumerate(specs):
        trained(spec, tmp_path / f"alone-{i}")
        ours, theirs = (tmp_path / name / "samples" for name in (str(i), f"alone-{i}"))
        assert [file.name for file in ours.iterdir()] == ["step-000002.jsonl"]
        assert (ours / "step-000002.jsonl").read_text() == (
            theirs / "step-000002.jsonl"
        ).read_text()


def test_a_stack_is_made_again_only_when_a_run_leaves_it(tmp_path):
    specs = [digits("train.seed=1", "train.steps=9"), digits("train.seed=2", "train.steps=5")]
    stack = stack_of(specs, tmp_path)
    made = []
    install = stack.engine._install
    stack.engine._install = lambda *given: (made.append(given[0]), install(*given))[1]
    train(stack)
    assert made == [[0]]
