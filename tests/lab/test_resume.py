"""A run that was stopped or killed and goes on is, bit for bit, the run that never stopped."""

import json
from pathlib import Path

import numpy as np
import pytest

from glassformer.lab.api import result_of
from glassformer.lab.measure.evaluate import evaluate
from glassformer.lab.runs.run import Progress, TrainingRun
from glassformer.spec.errors import DivergedError
from glassformer.spec.serialize import override
from glassformer.store.rundir import RunDirectory
from glassformer.store.tensors import read_tensors, tensor_bytes
from tests.lab.runs import KEPT, assert_same, killed_after, outcome, resumed, rewritten, trained
from tests.lab.runs import sample as sample_run
from tests.planting import Binary, catches
from tests.training.samples import RUNS, SINGLE, engine_of, uneven

MOMENTUM = 'train.optimizer={"kind": "SGD", "momentum": 0.9}'


def every_save_point_leads_to_the_same_end(engine: str, folder: Path, *changes: str) -> None:
    trained(sample_run(engine, KEPT, *changes), folder / "whole")
    whole = outcome(folder / "whole")
    assert len(whole["metrics"]) == 30 + 5
    for step in whole["steps"][:-1]:
        copy = killed_after(folder / "whole", step, to=folder / f"from-{step}")
        _, notes = resumed(copy)
        assert notes == [f"resuming at step {step}"]
        assert_same(outcome(copy), whole)


@pytest.mark.parametrize("engine", SINGLE)
def test_every_save_point_leads_to_the_same_end(engine, tmp_path):
    every_save_point_leads_to_the_same_end(engine, tmp_path)


@pytest.mark.parametrize("engine", ["torch", "native"])
@pytest.mark.parametrize("optimizer", [MOMENTUM, "train.optimizer=Muon"])
def test_other_optimizers_resume_exactly_too(engine, optimizer, tmp_path):
    every_save_point_leads_to_the_same_end(engine, tmp_path, optimizer, "train.checkpoint_every=9")


@pytest.mark.parametrize("name", ["machine", "reverse"])
def test_other_tasks_resume_exactly_too(name, tmp_path):
    spec = RUNS[name](KEPT, "train.steps=12")
    trained(spec, tmp_path / "whole")
    for step in (3, 7):
        copy = killed_after(tmp_path / "whole", step, to=tmp_path / f"from-{step}")
        resumed(copy)
        assert_same(outcome(copy), outcome(tmp_path / "whole"))


@pytest.mark.parametrize("engine", SINGLE)
def test_a_stop_after_any_step_costs_nothing(engine, tmp_path):
    """The state of that very step is saved, as by a signal, and the steps go on from there."""
    trained(sample_run(engine), tmp_path / "whole")
    whole = outcome(tmp_path / "whole")
    for step in (1, 2, 3, 6, 7, 13, 20, 29):
        folder = tmp_path / f"stop-{step}"
        run = trained(sample_run(engine), folder, stop_at=step)
        assert run.stopped
        assert RunDirectory(folder).steps()[-1] == step
        assert RunDirectory(folder).read_json("run.json")["status"] == "stopped"
        run, _ = resumed(folder)
        assert not run.stopped
        found = outcome(folder)
        # which checkpoints are still kept depends on the stop; what is in them does not
        for part in ("weights", "optimizer", "state", "metrics", "best", "last", "run"):
            assert found[part] == whole[part], part


@catches(
    "optimizer state dropped on load",
    "lab.runs.run:TrainingRun.resume",
    Binary("/"),
    drop=True,
    case="torch",
)
def test_many_stops_cost_nothing(tmp_path):
    trained(sample_run(), tmp_path / "whole")
    folder = tmp_path / "often"
    trained(sample_run(), folder, stop_at=4)
    for step in (5, 11, 12, 24):
        resumed(folder, stop_at=step)
    resumed(folder)
    assert outcome(folder)["weights"] == outcome(tmp_path / "whole")["weights"]
    assert outcome(folder)["metrics"] == outcome(tmp_path / "whole")["metrics"]


def test_resuming_what_is_finished_changes_nothing(tmp_path):
    first = trained(sample_run(), tmp_path / "run")
    before = outcome(tmp_path / "run")
    again, notes = resumed(tmp_path / "run")
    assert notes == ["resuming at step 30"]
    assert_same(outcome(tmp_path / "run"), before)
    assert result_of(again) == result_of(first)
    assert None not in result_of(again).values()


def test_early_stop_is_remembered(tmp_path: Path) -> None:
    """Killed between the last checkpoint of an early stop and its end: it does not train on."""
    spec = sample_run("torch", KEPT, "train.patience=2", "train.lr=1e-30", "train.evaluate_every=2")
    run = trained(spec, tmp_path / "whole")
    assert run.progress.step == 6, "2 is the best, 4 and 6 are not better"
    whole = outcome(tmp_path / "whole")
    for step in (2, 3, 6):
        copy = killed_after(tmp_path / "whole", step, to=tmp_path / f"from-{step}")
        resumed(copy)
        assert_same(outcome(copy), whole)


# --- every piece of the saved state matters -------------------------------------------------------


def without_tensors(kind: str):
    def leave_out(folder: Path, step: int) -> None:
        place = RunDirectory(folder).step_folder(step) / "state.safetensors"
        arrays = read_tensors(place)
        kept = {key: array for key, array in arrays.items() if key.partition(".")[0] != kind}
        assert len(kept) < len(arrays)
        rewritten(folder, step, state__safetensors=tensor_bytes(kept))

    return leave_out


def zeroed_tensors(kind: str):
    def forget(folder: Path, step: int) -> None:
        place = RunDirectory(folder).step_folder(step) / "state.safetensors"
        arrays = {
            key: np.zeros_like(array) if key.partition(".")[0] == kind else array
            for key, array in read_tensors(place).items()
        }
        rewritten(folder, step, state__safetensors=tensor_bytes(arrays))

    return forget


def fresh_weights(folder: Path, step: int) -> None:
    arrays = engine_of(sample_run()).weights()
    rewritten(folder, step, model__safetensors=tensor_bytes(arrays))


def one_fresh_weight(folder: Path, step: int) -> None:
    place = RunDirectory(folder).step_folder(step) / "model.safetensors"
    name = "blocks.0.ffn.down_proj.bias"
    arrays = read_tensors(place) | {name: engine_of(sample_run()).weights()[name]}
    rewritten(folder, step, model__safetensors=tensor_bytes(arrays))


def without_progress(field: str):
    def leave_out(folder: Path, step: int) -> None:
        place = RunDirectory(folder).step_folder(step) / "state.json"
        state = json.loads(place.read_text())
        default = getattr(Progress(), field)
        default = str(default) if default == float("inf") else default
        assert state["progress"][field] != default, "nothing was left out"
        state["progress"][field] = default
        rewritten(folder, step, state__json=json.dumps(state).encode())

    return leave_out


PIECES = {
    "torch": {
        "exp_avg": zeroed_tensors("exp_avg"),
        "exp_avg_sq": zeroed_tensors("exp_avg_sq"),
        "step": zeroed_tensors("step"),
        "exp_avg, missing": without_tensors("exp_avg"),
        "steps, missing": without_tensors("steps"),
        "steps": zeroed_tensors("steps"),
    },
    "numpy": {
        "exp_avg": zeroed_tensors("exp_avg"),
        "exp_avg_sq": zeroed_tensors("exp_avg_sq"),
        "exp_avg, missing": without_tensors("exp_avg"),
        "steps": zeroed_tensors("steps"),
    },
}
PIECES["native"] = PIECES["numpy"]
SHARED = {
    "weights": fresh_weights,
    "one weight": one_fresh_weight,
    "progress.step": without_progress("step"),
    "progress.recent": without_progress("recent"),
    "progress.metrics_bytes": without_progress("metrics_bytes"),
}
FLAT = ("train.lr=1e-30", "train.patience=9", "train.evaluate_every=2", "train.steps=19")


def goes_on_the_same(whole: Path, copy: Path) -> None:
    resumed(copy)
    assert_same(outcome(copy), outcome(whole))


@pytest.mark.parametrize(
    ("engine", "piece"),
    [(engine, piece) for engine in SINGLE for piece in {**PIECES[engine], **SHARED}],
)
def test_a_piece_left_out_is_noticed(engine, piece, tmp_path):
    step = 15
    trained(sample_run(engine, KEPT), tmp_path / "whole")
    copy = killed_after(tmp_path / "whole", step, to=tmp_path / "copy")
    {**PIECES[engine], **SHARED}[piece](copy, step)
    with pytest.raises((AssertionError, KeyError)):
        goes_on_the_same(tmp_path / "whole", copy)


def test_momentum_left_out_is_noticed(tmp_path):
    trained(sample_run("torch", KEPT, MOMENTUM), tmp_path / "whole")
    copy = killed_after(tmp_path / "whole", 15, to=tmp_path / "copy")
    without_tensors("momentum_buffer")(copy, 15)
    with pytest.raises(AssertionError):
        goes_on_the_same(tmp_path / "whole", copy)


@pytest.mark.parametrize(
    ("field", "step"), [("stale", 18), ("best_loss", 18), ("best_step", 18), ("val", 19)]
)
def test_what_evaluations_left_behind_is_noticed(field, step, tmp_path):
    """Nothing is learned here, so the first evaluation stays the best one."""
    trained(sample_run("torch", KEPT, *FLAT), tmp_path / "whole")
    copy = killed_after(tmp_path / "whole", step, to=tmp_path / "copy")
    without_progress(field)(copy, step)
    with pytest.raises(AssertionError):
        goes_on_the_same(tmp_path / "whole", copy)


def diverging(engine: str):
    return sample_run(
        engine,
        KEPT,
        "train.checkpoint_every=1",
        "train.optimizer=SGD",
        "train.clip=0",
        "train.lr=1e30",
        "train.label_smoothing=0",
    )


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("engine", SINGLE)
def test_steps_that_could_not_be_applied_are_counted_across_a_stop(engine, tmp_path):
    with pytest.raises(DivergedError) as caught:
        trained(diverging(engine), tmp_path / "whole")
    whole = outcome(tmp_path / "whole")
    last = whole["steps"][-1]
    assert whole["state"]["progress"]["unapplied"] == 2
    copy = killed_after(tmp_path / "whole", last, to=tmp_path / "copy")
    with pytest.raises(DivergedError) as again:
        resumed(copy)
    assert str(again.value) == str(caught.value)
    assert_same(outcome(copy), whole)

    forgetful = killed_after(tmp_path / "whole", last, to=tmp_path / "forgetful")
    without_progress("unapplied")(forgetful, last)
    without_alerts = killed_after(tmp_path / "whole", last, to=tmp_path / "alerts")
    without_progress("alerts_bytes")(without_alerts, last)
    for folder in (forgetful, without_alerts):
        with pytest.raises(DivergedError):
            resumed(folder)
        with pytest.raises(AssertionError):
            assert_same(outcome(folder), whole)


def test_the_list_of_pieces_is_whole(tmp_path):
    """A new piece of state must come with a test that notices its loss."""
    tested = {piece.partition(".")[2] for piece in SHARED if piece.startswith("progress.")} | {
        "stale",
        "best_loss",
        "best_step",
        "val",
        "unapplied",
        "alerts_bytes",
        "metrics_sha256",  # test_run: a log that was changed is told on resume
        "loss",
    }
    assert tested == set(Progress.__dataclass_fields__)
    for engine in SINGLE:
        run = trained(sample_run(engine, "train.steps=3"), tmp_path / engine)
        kinds = {key.partition(".")[0] for key in run.engine.state()}
        assert kinds == {piece for piece in PIECES[engine] if "missing" not in piece}


# --- from one engine to the other -----------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), [("torch", "numpy"), ("numpy", "torch")])
def test_a_checkpoint_of_one_engine_evaluates_in_the_other(one, other, tmp_path):
    spec = sample_run(one, "train.precision=float64", "train.steps=6")
    run = trained(spec, tmp_path / "run")
    reader = TrainingRun(override(spec, [f"engine={other}"]), tmp_path / "unused").engine
    folder = run.directory.step_folder(6)
    reader.load_weights(read_tensors(folder / "model.safetensors"))
    batch = uneven(spec, 12)
    want, found = run.engine.logits(batch)["answer"], reader.logits(batch)["answer"]
    assert np.abs(want - found).max() <= 1e-13
    here, there = evaluate(run.engine, run.task), evaluate(reader, run.task)
    assert here.loss == pytest.approx(there.loss, rel=1e-13)
    assert (here.accuracy, here.by) == (there.accuracy, there.by)
