"""What happens around a run: two writers, a stopped process, signals, no locks, a wrong clock."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glassformer.lab import api
from glassformer.lab.runs import table
from glassformer.lab.runs.process import stopping
from glassformer.lab.runs.table import runs
from glassformer.lab.sweeps.sweep import sweep
from glassformer.spec.errors import GlassError, InputError, MachineError
from glassformer.store.rundir import RunDirectory
from tests.command import _run
from tests.lab.runs import assert_same, outcome, resumed, sample, trained
from tests.training.samples import ENGINES

LONG = ("task.examples=60", "task.max_length=4", "model.d_model=8", "train.checkpoint_every=5")
STEPS = 60


class Child:
    """`glass` in a forked process, and what it printed on stderr."""

    def __init__(self, *words: object, folder: Path) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.out, self.err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.number = os.fork()
        if self.number == 0:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
            try:
                typed = tuple(map(str, words))
                code = _run(typed, folder, None, self.out.fileno(), self.err.fileno())
            finally:
                os._exit(code)

    def send(self, number: int) -> None:
        os.kill(self.number, number)

    def end(self) -> int:
        """Wait for its end; the exit code, or minus the signal."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.number, 0)[1])
        self.err.seek(0)
        self.told = self.err.read().decode()
        self.out.close()
        self.err.close()
        return code


def training(folder: Path, *more: object, engine: str = "numpy", steps: int = STEPS) -> Child:
    words = ("train", "digits", f"--steps={steps}", f"--engine={engine}", "--name=x", *LONG)
    return Child(*words, *more, "--runs=runs", folder=folder)


def until_saved(folder: Path, child: Child) -> None:
    end = time.monotonic() + 60
    while not RunDirectory(folder / "runs" / "x").steps():
        assert time.monotonic() < end
        assert os.waitid(os.P_PID, child.number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        time.sleep(0.001)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("whole")
    assert training(folder).end() == 0
    return ending(folder)


def ending(folder: Path) -> dict:
    found = outcome(folder / "runs" / "x")
    del found["steps"]  # which checkpoints are kept depends on where a run was stopped
    return found


def test_of_two_that_begin_at_once_one_trains_and_the_other_is_refused(whole, tmp_path):
    children = [training(tmp_path) for _ in range(2)]
    codes = sorted(child.end() for child in children)
    assert codes in ([0, 5], [0, 2])  # refused by the lock; or by the run that is there already
    assert_same(ending(tmp_path), whole)


def test_a_stopped_process_keeps_its_run_and_goes_on(whole, tmp_path):
    child = training(tmp_path)
    until_saved(tmp_path, child)
    child.send(signal.SIGSTOP)
    for way in ("--resume", "--overwrite"):
        other = training(tmp_path, way)
        assert other.end() == 5
        assert f"another process (id {child.number}) is writing this run" in other.told
    child.send(signal.SIGCONT)
    assert child.end() == 0
    assert_same(ending(tmp_path), whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_sent_twice_ends_a_run_that_goes_on_to_the_same_bits(number, whole, tmp_path):
    child = training(tmp_path)
    until_saved(tmp_path, child)
    child.send(number)
    child.send(number)
    assert child.end() in (128 + number, 130)
    assert "Traceback" not in child.told
    assert training(tmp_path, "--resume").end() == 0
    assert_same(ending(tmp_path), whole)


def test_a_folder_that_is_deleted_ends_the_run_and_is_not_made_again(tmp_path):
    child = training(tmp_path, steps=100_000)
    until_saved(tmp_path, child)
    while (tmp_path / "runs" / "x").exists():
        shutil.rmtree(tmp_path / "runs" / "x", ignore_errors=True)
    assert child.end() == 5
    assert "deleted or replaced while it was training" in child.told
    assert not (tmp_path / "runs" / "x").exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lock_that_is_deleted_lets_no_second_writer_mix_its_files(engine, tmp_path):
    spec = sample(engine, "train.steps=8", "train.checkpoint_every=2")
    run = api.TrainingRun(spec, tmp_path / "x")
    with run.directory.locked():
        run.prepare()
        events = run.events()
        next(events)
        (tmp_path / "x" / "lock").unlink()
        with pytest.raises(MachineError, match="deleted or replaced"):
            list(events)
    resumed(tmp_path / "x")
    trained(spec, tmp_path / "whole")
    assert_same(outcome(tmp_path / "x"), outcome(tmp_path / "whole"))


def test_without_locks_nothing_is_written_and_runs_are_still_listed(tmp_path, monkeypatch):
    trained(sample("numpy", "train.steps=3"), tmp_path / "x")
    seen = {p: p.lstat().st_mtime_ns for p in tmp_path.rglob("*")}

    def none(handle: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(MachineError, match="the file system has no locks") as caught:
        resumed(tmp_path / "x")
    assert caught.value.exit_code == 5 and "runs" in caught.value.hint
    assert [row["status"] for row in runs(tmp_path).rows] == ["finished"]
    assert {p: p.lstat().st_mtime_ns for p in tmp_path.rglob("*")} == seen


@pytest.mark.parametrize("engine", ENGINES)
def test_a_clock_set_back_changes_no_bit_and_no_status(engine, tmp_path, monkeypatch):
    spec = sample(engine, "train.steps=8", "train.checkpoint_every=2")
    trained(spec, tmp_path / "whole")
    trained(spec, tmp_path / "x", stop_at=4)
    ahead = time.time()
    for path in (tmp_path / "x").rglob("*"):
        os.utime(path, (ahead + 1e6, ahead + 1e6))
    monkeypatch.setattr(time, "time", lambda: ahead - 1e6)
    run = api.TrainingRun(spec, tmp_path / "x")
    with run.directory.locked():
        run.resume()
        events = run.events()
        next(events)
        assert table.current_status(run.directory, "running") == ("running", "")
        list(events)
    assert_same(outcome(tmp_path / "x"), outcome(tmp_path / "whole"))
    assert {row["status"] for row in runs(tmp_path).rows} == {"finished"}
    assert all(row["seconds"] is None or row["seconds"] >= 0 for row in runs(tmp_path).rows)


# --- sweeps ---------------------------------------------------------------------------------------


def sweeping(place: Path, *, resume: bool = True) -> None:
    sweep(
        "digits",
        vary={"train.lr": [1e-3, 3e-3]},
        overrides=[*LONG, "engine=numpy", "train.steps=20"],
        seeds=1,
        sweeps=place,
        name="x",
        jobs=1,
        stack=False,
        progress=False,
        resume=resume,
    )


@contextlib.contextmanager
def fork(work: Callable[[], object]) -> Iterator[int]:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except GlassError as error:
            code = error.exit_code
        finally:
            os._exit(code)
    yield child


def test_of_two_sweepers_one_is_refused(tmp_path):
    with fork(lambda: sweeping(tmp_path)) as one, fork(lambda: sweeping(tmp_path)) as other:
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in (one, other)]
    assert 0 in codes and set(codes) <= {0, 5}  # the second may come when the first has ended
    assert len((tmp_path / "x" / "results.jsonl").read_text().splitlines()) == 2


def test_a_refused_sweep_changes_no_file(tmp_path):
    sweeping(tmp_path)
    seen = {p: p.lstat().st_mtime_ns for p in tmp_path.rglob("*")}
    with pytest.raises(InputError, match="the sweep x exists"):
        sweeping(tmp_path, resume=False)
    assert {p: p.lstat().st_mtime_ns for p in tmp_path.rglob("*")} == seen


def test_a_sweep_that_is_stopped_keeps_its_folder_and_one_that_is_killed_goes_on(tmp_path):
    with fork(lambda: sweeping(tmp_path)) as child:
        while not list(tmp_path.glob("x/runs/*/metrics.jsonl")):
            time.sleep(0.001)
        os.kill(child, signal.SIGSTOP)
        with pytest.raises(MachineError, match=f"id {child}"):
            sweeping(tmp_path)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    sweeping(tmp_path)
    lines = (tmp_path / "x" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["finished"] * 2


def test_a_second_signal_while_it_is_saved_leaves_the_checkpoint_before(tmp_path):
    """The second one raises wherever it comes: also in the middle of a write."""
    spec = sample("numpy", "train.steps=8", "train.checkpoint_every=2")
    trained(spec, tmp_path / "whole")
    real, calls = os.fsync, 0

    def fsync(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 40:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        real(handle)

    run = api.TrainingRun(spec, tmp_path / "x")
    os.fsync = fsync
    try:
        with run.directory.locked(), stopping(run.request_stop):
            run.prepare()
            with pytest.raises(KeyboardInterrupt):
                list(run.events())
    finally:
        os.fsync = real
    assert calls >= 40
    resumed(tmp_path / "x")
    assert_same(outcome(tmp_path / "x"), outcome(tmp_path / "whole"))
    assert not [p for p in (tmp_path / "x").rglob(".*") if "tmp" in p.name]
