"""A run in its folder: what it writes and keeps, what it refuses, and how it ends."""

import contextlib
import errno
import getpass
import io
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest

import glassformer.store.rundir
from glassformer.lab import corpus, recipes
from glassformer.lab.api import evaluate, result_of, train
from glassformer.lab.recipes import read_config
from glassformer.lab.runs import assemble as assembling
from glassformer.lab.runs.planned import check_fit
from glassformer.lab.runs.record import load_run_spec, metrics_line
from glassformer.lab.runs.run import SPIKE, WINDOW, Alert, Evaluated, Saved, TrainingRun
from glassformer.lab.runs.table import runs
from glassformer.spec.errors import DivergedError, FileError, GlassError, InputError, MachineError
from glassformer.spec.serialize import json_numbers, override
from glassformer.store.checkpoint import verify_folder
from glassformer.store.rundir import RunDirectory, run_folder
from glassformer.store.tensors import read_tensors
from glassformer.training.fit import StepRecord
from tests.lab.runs import KEPT, assert_same, metrics, outcome, resumed, rewritten, sample, trained
from tests.planting import Call, Name, catches
from tests.training.samples import ENGINES, digits, machine

DIVERGING = ("train.optimizer=SGD", "train.clip=0", "train.label_smoothing=0")


def record(step: int, loss: float, *, applied: bool = True) -> StepRecord:
    return StepRecord(step, loss, {"answer": loss}, 0.1, 1.0, 8, 0.01, applied)


# --- what a run leaves ----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_the_loss_of_several_heads_is_the_same_quantity_in_training_and_validation(
    engine, tmp_path
):
    spec = machine(f"engine={engine}", "train.steps=4", "train.evaluate_every=4")
    run = trained(spec, tmp_path / "run")
    *steps, last = metrics(tmp_path / "run")
    for line in steps:
        assert list(line)[:4] == ["step", "loss", "objective", "nll"]
        assert line["loss"] == line["nll"]["next"] < line["objective"]
        of_heads = sum(spec.train.head_weight(head) * nll for head, nll in line["nll"].items())
        assert line["objective"] > of_heads, "and the penalty"
    assert last["val"]["loss"] == last["val"]["heads"]["next"]["loss"]
    assert result_of(run)["loss"] == steps[-1]["loss"]
    assert run.progress.recent == tuple(line["objective"] for line in steps), "spikes are of all"
    again, _ = resumed(tmp_path / "run")
    assert result_of(again)["loss"] == steps[-1]["loss"]


def test_a_checkpoint_from_before_the_loss_was_kept_still_tells_it(tmp_path):
    run = trained(sample("torch", "train.steps=3"), tmp_path / "run")
    state = json.loads((run.directory.step_folder(3) / "state.json").read_text())
    told = state["progress"].pop("loss")
    rewritten(tmp_path / "run", 3, state__json=json.dumps(state).encode())
    assert told == result_of(resumed(tmp_path / "run")[0])["loss"] == run.progress.recent[-1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_leaves_what_other_tools_open(engine, tmp_path):
    run = trained(sample(engine, "train.steps=8"), tmp_path / "run")
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {
        *("run.json", "config.json", "config.toml", "metrics.jsonl", "checkpoints", "lock"),
        *("tensorboard", "probes"),
    }
    lines = metrics(tmp_path / "run")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert set(steps[0]) == {"step", "loss", "nll", "lr", "grad_norm", "tokens"}
    assert steps[0]["loss"] != steps[0]["nll"]["answer"], "smoothing is told beside the plain loss"
    assert [line["step"] for line in lines if "val" in line] == [7, 8]
    told = run.directory.read_json("run.json")
    assert (told["status"], told["step"], told["steps"]) == ("finished", 8, 8)
    assert told["val"] == lines[-1]["val"]
    folder = run.directory.step_folder(8)
    assert {path.name for path in folder.iterdir()} == {
        *("MANIFEST.json", "spec.json", "model.safetensors", "tokenizer.json"),
        *("state.json", "state.safetensors", "run.json"),
    }


def test_nothing_says_where_or_by_whom_it_was_run(tmp_path):
    place = tmp_path / "some-place"
    run = trained(sample("torch", "train.steps=3"), place / "run")
    with pytest.raises(InputError):
        trained(sample(), place / "run")
    evaluate(place / "run")
    words = {socket.gethostname(), str(place), str(Path.home()), str(Path.cwd())}
    user = getpass.getuser()
    for path in run.directory.folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not [word for word in words if word.encode() in data], path
            assert not re.search(rf"\b{re.escape(user)}\b".encode(), data), path
            if path.suffix in (".json", ".jsonl", ".toml"):
                assert not re.search(rb'"/\w', data), path


@pytest.mark.parametrize("engine", ENGINES)
def test_config_toml_repeats_the_run(engine, tmp_path):
    trained(sample(engine, "train.steps=9"), tmp_path / "one")
    again = read_config(tmp_path / "one" / "config.toml")
    assert again == load_run_spec(RunDirectory(tmp_path / "one"))
    assert again == read_config(tmp_path / "one" / "config.json")
    trained(again, tmp_path / "two")
    assert_same(outcome(tmp_path / "two"), outcome(tmp_path / "one"))
    trained(override(again, ["train.seed=1"]), tmp_path / "three")
    assert outcome(tmp_path / "three")["weights"] != outcome(tmp_path / "one")["weights"]


def test_events_tell_everything_in_order(tmp_path):
    run = TrainingRun(sample("torch", "train.steps=7"), tmp_path / "run")
    run.prepare()
    told = [(type(event), event.step) for event in run.events()]
    steps = [(StepRecord, step) for step in range(1, 8)]
    want = [*steps[:3], (Saved, 3), *steps[3:6], (Saved, 6), *steps[6:], (Evaluated, 7), (Saved, 7)]
    assert told == want


@catches("the best one is pruned", "store.rundir:RunDirectory.prune", Call("pointed"), to="None")
def test_pointers_and_pruning_keep_best_and_last(tmp_path: Path) -> None:
    """Nothing is learned, so the first evaluation is the best and its checkpoint stays."""
    spec = sample("torch", "train.lr=1e-30", "train.evaluate_every=5", "train.steps=21")
    run = trained(spec, tmp_path / "run")
    directory = run.directory
    assert directory.pointed("best") == 5
    assert directory.pointed("last") == 21
    assert directory.steps() == [5, 18, 21]
    for step in directory.steps():
        verify_folder(directory.step_folder(step))


def test_early_stop_counts_evaluations_without_a_better_one(tmp_path):
    run = trained(
        sample("torch", "train.lr=1e-30", "train.evaluate_every=2", "train.patience=3"),
        tmp_path / "run",
    )
    assert run.progress.step == 8
    assert not run.stopped
    assert run.directory.read_json("run.json")["status"] == "finished"


def test_a_run_may_go_on_for_longer_and_remembers_it(tmp_path):
    constant = 'train.schedule={"kind": "ConstantSchedule", "warmup": 5}'
    trained(sample("torch", constant, "train.steps=20"), tmp_path / "whole")
    trained(sample("torch", constant, "train.steps=10"), tmp_path / "run")
    longer = sample("torch", constant, "train.steps=20")
    resumed(tmp_path / "run", spec=longer, stop_at=14)
    resumed(tmp_path / "run")
    assert outcome(tmp_path / "run")["weights"] == outcome(tmp_path / "whole")["weights"]


# --- one writer, one run --------------------------------------------------------------------------


def hold(folder: Path, ready) -> None:
    with RunDirectory(folder).locked():
        ready.set()
        signal.pause()


def a_second_writer_is_refused(folder: Path) -> None:
    fork = multiprocessing.get_context("fork")  # a new interpreter would load torch again
    ready = fork.Event()
    holder = fork.Process(target=hold, args=(folder, ready))
    holder.start()
    assert ready.wait(60)
    try:
        with pytest.raises(MachineError) as caught, RunDirectory(folder).locked():
            pass
        assert f"another process (id {holder.pid}) is writing this run" in str(caught.value)
        assert caught.value.exit_code == 5
    finally:
        holder.kill()
        holder.join()
    with RunDirectory(folder).locked():  # a killed writer leaves no lock behind
        assert (folder / "lock").read_text() == str(os.getpid())


def test_a_second_writer_is_refused(tmp_path):
    a_second_writer_is_refused(tmp_path / "run")


@pytest.mark.parametrize("way", ["resume", "overwrite"])
def test_a_run_that_is_being_written_is_refused_before_anything_is_built(tmp_path, way):
    with RunDirectory(tmp_path / "run").locked(), pytest.raises(MachineError, match="another proc"):
        train("digits", name="run", runs=tmp_path, overrides=["model.d_model=-1"], **{way: True})


def test_a_lock_is_free_when_its_writer_is_done(tmp_path):
    for _ in range(2):
        with RunDirectory(tmp_path).locked():
            pass


def test_a_kill_between_the_last_checkpoint_and_its_pointers_is_mended(tmp_path):
    folder = tmp_path / "run"
    trained(sample("torch", "train.steps=14", "train.checkpoint_every=7", KEPT), folder)
    before, directory = outcome(folder), RunDirectory(folder)
    for name in ("last", "best"):
        directory.point(name, 7)
    assert directory.pointed("last") == 14  # every reader, before anything is written
    assert directory.pointed("best") == before["best"]
    _, notes = resumed(folder)
    assert notes == ["resuming at step 14"]
    assert (directory.checkpoints / "last").read_text() == "step-000014\n"
    assert_same(outcome(folder), before)


def test_a_folder_that_is_deleted_while_it_trains_ends_the_run(tmp_path):
    run = TrainingRun(sample("torch", "train.checkpoint_every=100"), tmp_path / "run")
    with run.directory.locked():
        run.prepare()
        events = run.events()
        next(events)
        shutil.rmtree(run.path)
        with pytest.raises(MachineError, match="deleted or replaced while it was training"):
            list(events)
    assert not run.path.exists()


def test_a_log_that_was_changed_is_told_on_resume(tmp_path):
    run = trained(sample("torch"), tmp_path / "run", stop_at=9)
    log = run.directory.metrics
    log.write_text(log.read_text().replace('"loss": 2', '"loss": 1', 1))
    _, notes = resumed(tmp_path / "run", stop_at=10)
    assert "metrics.jsonl is not what the run wrote" in notes[0]
    _, notes = resumed(tmp_path / "run")
    assert notes == ["resuming at step 10"]


def test_a_run_that_exists_is_refused_with_three_ways_out(tmp_path):
    trained(sample("torch", "train.steps=3"), tmp_path / "run")
    before = outcome(tmp_path / "run")
    with pytest.raises(InputError) as caught:
        trained(sample(), tmp_path / "run")
    assert all(way in caught.value.hint for way in ("resume=True", "overwrite=True", "name"))
    command = caught.value.in_command().hint
    assert all(way in command for way in ("--resume", "--overwrite", "--name"))
    assert_same(outcome(tmp_path / "run"), before)


def test_overwrite_leaves_nothing_of_the_old_run(tmp_path):
    trained(sample("torch", "train.steps=9"), tmp_path / "run")
    trained(sample("torch", "train.steps=4", "train.seed=5"), tmp_path / "other")
    run = TrainingRun(sample("torch", "train.steps=4", "train.seed=5"), tmp_path / "run")
    with run.directory.locked():
        run.prepare(overwrite=True)
        list(run.events())
    assert_same(outcome(tmp_path / "run"), outcome(tmp_path / "other"))


def test_what_is_no_task_is_refused_with_the_way_to_name_one(tmp_path):
    with pytest.raises(InputError, match="object is neither a task's name") as wrong:
        train(object(), runs=tmp_path)
    assert "my_task.py:MyTask" in wrong.value.hint


@pytest.mark.parametrize("name", ["..", "../up", "a/b", ".hidden", "a@b", "", "x" * 65, "a b"])
def test_names_that_lead_elsewhere_are_refused(name, tmp_path):
    with pytest.raises(InputError, match="cannot be the name of a run"):
        run_folder(tmp_path, name)
    assert run_folder(tmp_path, "mod-3.v2_x") == tmp_path / "mod-3.v2_x"


# --- checkpoints that cannot be used --------------------------------------------------------------


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@catches(
    "a damaged checkpoint is used",
    "store.rundir:RunDirectory.newest_whole",
    Name("step"),
    drop=True,
    case="flipped bit-state.safetensors",
)
@pytest.mark.parametrize("file", ["model.safetensors", "state.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["flipped bit", "truncated", "missing"])
def test_a_damaged_checkpoint_is_passed_over_with_a_note(how, file, tmp_path):
    trained(sample("torch", KEPT, "train.steps=9"), tmp_path / "run")
    whole = outcome(tmp_path / "run")
    path = RunDirectory(tmp_path / "run").step_folder(9) / file
    match how:
        case "flipped bit":
            damage(path)
        case "truncated":
            path.write_bytes(path.read_bytes()[:-1])
        case "missing":
            path.unlink()
    _, notes = resumed(tmp_path / "run")
    assert notes[0].startswith(f"step-000009: {file}" if how != "missing" else "step-000009: ")
    assert notes[-1] == "resuming at step 7"
    assert_same(outcome(tmp_path / "run"), whole)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda state: state.pop("progress"), "it has no progress"),
        (lambda state: state.update(fingerprint=[]), "it has no fingerprint"),
        (lambda state: state.update(spec=None), "it has no spec"),
        (lambda state: state["progress"].update(best_loss={}), "progress.best_loss is"),
        (lambda state: state["progress"].update(recent=["x"]), "progress.recent is"),
        (lambda state: state["progress"].update(recent=[0.0] * 10_000), "progress.recent is"),
        (lambda state: state["progress"].update(metrics_bytes=-1), "progress.metrics_bytes is -1"),
        (lambda state: state["progress"].update(val="abc"), "progress.val is"),
        (lambda state: state["progress"].update({"\x1b]0;x": 1}), "damaged: '\\\\x1b"),
    ],
)
def test_a_state_that_is_none_is_an_error_of_the_file(change, what, tmp_path):
    folder = tmp_path / "run"
    trained(sample("numpy", "train.steps=3"), folder)
    state = json.loads((RunDirectory(folder).step_folder(3) / "state.json").read_text())
    change(state)
    rewritten(folder, 3, state__json=json.dumps(state).encode())
    with pytest.raises(FileError, match=what):
        resumed(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "run.json", "checkpoints/step-000003/state.json", "checkpoints/best"]
)
@pytest.mark.parametrize("kind", ["too large", "no text", "a pipe"])
def test_a_small_file_of_a_run_that_is_none_is_refused_or_passed_over(name, kind, tmp_path):
    trained(sample("numpy", "train.steps=3"), tmp_path / "run")
    path = tmp_path / "run" / name
    path.unlink()
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b" " * 10_000_001 if kind == "too large" else b"\xff" * 9)
    directory = RunDirectory(tmp_path / "run")
    with contextlib.suppress(GlassError):
        resumed(tmp_path / "run")
    with contextlib.suppress(GlassError):
        directory.read_json("run.json")
    assert directory.pointed("best") in (3, None)
    assert len(runs(tmp_path).rows) == 1


def test_an_older_state_lacks_fields(tmp_path):
    trained(sample("numpy", "train.steps=3"), tmp_path / "run")
    state = json.loads((RunDirectory(tmp_path / "run").step_folder(3) / "state.json").read_text())
    for field in ("metrics_sha256", "best_loss", "loss"):
        del state["progress"][field]
    rewritten(tmp_path / "run", 3, state__json=json.dumps(state).encode())
    assert resumed(tmp_path / "run")[1] == ["resuming at step 3"]


def test_a_run_of_the_earlier_numpy_engine_resumes_and_says_that_it_rounds_differently(tmp_path):
    trained(sample("numpy", "train.steps=3"), tmp_path / "run")
    state = json.loads((RunDirectory(tmp_path / "run").step_folder(3) / "state.json").read_text())
    del state["fingerprint"]["operations"]
    rewritten(tmp_path / "run", 3, state__json=json.dumps(state).encode())
    note = "not bit-exact: operations changed since the checkpoint"
    assert resumed(tmp_path / "run")[1] == [note, "resuming at step 3"]


def test_no_whole_checkpoint_means_step_0_and_says_so(tmp_path):
    trained(sample("torch", KEPT, "train.steps=6"), tmp_path / "run")
    whole = outcome(tmp_path / "run")
    for step in RunDirectory(tmp_path / "run").steps():
        damage(RunDirectory(tmp_path / "run").step_folder(step) / "model.safetensors")
    _, notes = resumed(tmp_path / "run")
    assert len(notes) == 3
    assert notes[-1] == "no whole checkpoint: starting at step 0"
    assert_same(outcome(tmp_path / "run"), whole)


@pytest.mark.parametrize("change", ["train.lr=0.5", "train.seed=3", "train.clip=2"])
def test_a_checkpoint_of_another_spec_is_refused(change, tmp_path):
    trained(sample("torch", "train.steps=3"), tmp_path / "run")
    with pytest.raises(InputError, match="another run's spec"):
        resumed(tmp_path / "run", spec=sample("torch", change))


def test_a_checkpoint_of_another_model_or_of_other_data_is_refused(tmp_path):
    trained(sample("torch", "train.steps=3"), tmp_path / "run")
    with pytest.raises(InputError, match="another model"):
        resumed(tmp_path / "run", spec=sample("torch", "model.decoder.layers.count=2"))
    run = TrainingRun(sample("torch", "train.steps=3"), tmp_path / "run")
    run.facts["sha256"] = "other"
    with pytest.raises(InputError, match="the data changed"):
        run.resume()


def test_another_machine_is_told(tmp_path):
    trained(sample("torch", "train.steps=3"), tmp_path / "run")
    run = TrainingRun(sample("torch", "train.steps=6"), tmp_path / "run", device="cpu:0")
    assert run.resume()[0] == "not bit-exact: device changed since the checkpoint"


# --- a full disk ----------------------------------------------------------------------------------


class FullDisk:
    """`os.fsync` of the n-th call on fails as a full disk does."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.real = os.fsync

    def __call__(self, handle: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.real(handle)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """The same run to its end, and stopped after 6 steps."""
    folder = tmp_path_factory.mktemp("two-runs")
    trained(sample("torch", KEPT), folder / "whole")
    trained(sample("torch", KEPT), folder / "stopped", stop_at=6)
    return folder


@pytest.mark.parametrize("after", range(0, 40, 3))
def test_a_full_disk_is_told_and_harms_nothing(after, two_runs, tmp_path, monkeypatch):
    """Whichever write fails: the error says so, and the run goes on to the same bits later."""
    shutil.copytree(two_runs / "stopped", tmp_path / "run", symlinks=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", FullDisk(after))
        with pytest.raises(MachineError) as caught:
            resumed(tmp_path / "run")
    assert caught.value.exit_code == 5
    assert "No space left on device" in str(caught.value)
    directory = RunDirectory(tmp_path / "run")
    assert directory.newest_whole()[1] == []
    assert directory.newest_whole()[0] >= 6
    assert not list(directory.checkpoints.glob(".tmp-*"))
    resumed(tmp_path / "run")
    assert_same(outcome(tmp_path / "run"), outcome(two_runs / "whole"))


def test_a_log_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    run = TrainingRun(sample("torch", "train.steps=3"), tmp_path / "run")
    run.prepare()
    append = RunDirectory.append

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_full(directory: RunDirectory, path: Path):
        return Full() if path.name == "metrics.jsonl" else append(directory, path)

    monkeypatch.setattr(RunDirectory, "append", open_full)
    with pytest.raises(MachineError, match="No space left on device"):
        list(run.events())


def test_a_folder_that_is_not_ours_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(MachineError, match="Not a directory") as caught,
        RunDirectory(tmp_path / "file" / "run").locked(),
    ):
        pass
    assert "yours to write to" in caught.value.hint and "room" not in caught.value.hint


def test_a_run_in_a_read_only_folder_is_not_told_to_make_room(tmp_path, monkeypatch):
    def read_only(path: Path, data: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(glassformer.store.rundir, "replace_file", read_only)
    with pytest.raises(MachineError, match="Read-only file system") as caught:
        RunDirectory(tmp_path).write("eval/val.json", "{}")
    assert "yours to write to" in caught.value.hint and "room" not in caught.value.hint


# --- what is not finite ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("engine", ENGINES)
def test_three_steps_in_a_row_that_are_not_finite_end_the_run(engine, tmp_path):
    spec = sample(engine, KEPT, "train.checkpoint_every=1", "train.lr=1e30", *DIVERGING)
    with pytest.raises(DivergedError) as caught:
        trained(spec, tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    ended = directory.read_json("run.json")
    good = directory.steps()[-1]
    assert caught.value.exit_code == 4
    assert f"the last good checkpoint is step {good}" in str(caught.value)
    assert "train.lr" in caught.value.hint
    assert ended["status"] == "diverged"
    for step in directory.steps():  # read_tensors refuses NaN and infinity
        verify_folder(directory.step_folder(step))
        read_tensors(directory.step_folder(step) / "model.safetensors")
        read_tensors(directory.step_folder(step) / "state.safetensors")
    alerts = [json.loads(line) for line in directory.alerts.read_text().splitlines()]
    assert [alert["kind"] for alert in alerts] == ["not finite"] * 3
    assert [alert["step"] for alert in alerts] == [good - 1, good, good + 1]
    last = json.loads(directory.metrics.read_text().splitlines()[-1])
    assert last["step"] == good + 1
    assert last["loss"] in ("nan", "inf", "-inf") or last["grad_norm"] in ("nan", "inf")


def alerts_of(run: TrainingRun, records: list[StepRecord]) -> list[Alert]:
    return [alert for one in records for alert in run._watch(one)]


def test_counts_start_again_after_a_good_step(tmp_path: Path) -> None:
    run = TrainingRun(digits(), tmp_path / "run")
    run.prepare()
    bad, good = record(1, math.nan, applied=False), record(1, 2.0)
    assert len(alerts_of(run, [bad, bad, good, bad, bad])) == 4
    with pytest.raises(DivergedError, match="none was saved"):
        alerts_of(run, [bad])


def test_spikes_are_told(tmp_path: Path) -> None:
    """Six deviations above the mean of the last 128 losses, and only above, and only then."""
    run = TrainingRun(digits(), tmp_path / "run")
    run.prepare()
    calm = [record(i, 2.0 + 0.1 * (-1) ** i) for i in range(WINDOW)]
    assert alerts_of(run, [*calm[:-1], record(0, 50.0)]) == [], "not before the window is full"
    run.progress.recent = ()
    assert alerts_of(run, calm) == []
    edge = 2.0 + SPIKE * 0.1
    assert alerts_of(run, [record(200, edge - 0.01)]) == []
    run.progress.recent = tuple(one.loss for one in calm)
    assert alerts_of(run, [record(200, -50.0)]) == []
    run.progress.recent = tuple(one.loss for one in calm)
    (alert,) = alerts_of(run, [record(201, edge + 0.01)])
    assert (alert.step, alert.kind) == (201, "spike")
    told = json.loads(run.directory.alerts.read_text())
    assert told == {"step": 201, "kind": "spike", "message": alert.message}


def test_losses_that_never_change_are_no_spikes(tmp_path):
    run = TrainingRun(digits(), tmp_path / "run")
    run.prepare()
    assert alerts_of(run, [record(i, 0.0) for i in range(2 * WINDOW)]) == []


def test_what_is_not_finite_is_written_as_text():
    line = json.loads(metrics_line(record(1, math.nan, applied=False)))
    assert (line["loss"], line["nll"]["answer"]) == ("nan", "nan")
    values = {"a": [math.inf, 1], "b": {"c": (-math.inf, 2.5, True, None)}}
    assert json_numbers(values) == {"a": ["inf", 1], "b": {"c": ["-inf", 2.5, True, None]}}


# --- a model that does not fit its task -----------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (digits("model.vocab_size=19"), "the task has 20 tokens"),
        (digits("model.max_seq_len=5"), "max_seq_len of 5"),
        (machine("task=DigitsTask", "model.vocab_size=20"), "no answers for the head 'next'"),
        (digits("task=SequenceTask"), "needs an encoder-decoder"),
        (machine("model.heads.2.num_states=2"), "answers for the head 'state', the model 2"),
    ],
)
def test_a_model_that_cannot_take_the_task_is_refused(spec, message):
    with pytest.raises(InputError, match=message):
        check_fit(spec.model, recipes.build_task(spec.task))


# --- from Python ----------------------------------------------------------------------------------


def test_training_and_evaluating_are_one_call_each(tmp_path):
    import glassformer as gf

    run = gf.train(sample("torch", "train.steps=9"), name="mine", runs=tmp_path, seed=2)
    assert run.spec.train.seed == 2
    assert set(result_of(run)) == {"run", "steps", "loss", "val_loss", "val_accuracy"}
    found = gf.evaluate(tmp_path / "mine", split="val")
    assert found.loss == pytest.approx(result_of(run)["val_loss"], abs=1e-6)
    assert gf.evaluate(f"{tmp_path}/mine@last").split == "test"
    model = gf.load(tmp_path / "mine")
    assert model.spec == run.spec.model
    with pytest.raises(InputError, match="exists"):
        train(sample("torch", "train.steps=9"), name="mine", runs=tmp_path)


def test_checkpoints_are_found_by_name_and_number(tmp_path):
    run = trained(sample("torch", KEPT, "train.steps=9"), tmp_path / "run")
    for which, step in (("", run.progress.best_step), ("@last", 9), ("@3", 3), ("@6", 6)):
        weights = read_tensors(run.directory.step_folder(step) / "model.safetensors")
        assert evaluate(f"{tmp_path}/run{which}").loss == evaluate(f"{tmp_path}/run@{step}").loss
        assert weights
    with pytest.raises(InputError, match="no checkpoint '4'") as caught:
        evaluate(f"{tmp_path}/run@4")
    assert "best, last, 3, 6" in caught.value.hint
    damage(run.directory.step_folder(3) / "model.safetensors")
    with pytest.raises(FileError, match="SHA-256 differs"):
        evaluate(f"{tmp_path}/run@3")


def test_a_task_is_built_once_for_its_recipe_and_its_run(tmp_path, monkeypatch):
    built = []

    def counted(before):
        def build(spec, **more):
            built.append(spec)
            return before(spec, **more)

        return build

    monkeypatch.setattr(corpus, "build_task", counted(corpus.build_task))
    plan = recipes.plan_run("parity", ["task.examples=200", "train.steps=1"])
    run = TrainingRun(plan, tmp_path / "parity")
    assert run.task is plan.task
    assert built == [plan.spec.task]
    assert assembling.assemble(plan.spec).task.facts() == plan.task.facts()
