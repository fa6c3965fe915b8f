"""`glass train`, `evaluate`, `list` and `lr-find` as a person or a script meets them."""

import contextlib
import errno
import importlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glassformer.cli.shell.process import ending_at_once
from glassformer.lab.api import train
from glassformer.lab.recipes import RECIPES
from glassformer.lab.runs.process import stopping
from glassformer.spec.presets import PRESETS
from glassformer.store.rundir import RunDirectory
from tests.lab.runs import assert_same, outcome

#: The digits recipe at a size that trains in a blink.
SMALL = (
    "task.examples=60",
    "task.max_length=4",
    "model.d_model=8",
    "model.decoder.layers.count=1",
    "model.decoder.dropout=0.1",
    "train.batch_size=8",
    "train.checkpoint_every=10",
)
RESULT = {"run", "steps", "loss", "val_loss", "val_accuracy", "seconds"}


def started(*words: object) -> "subprocess.Popen[str]":
    """The command in a process of its own, on one thread."""
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "glassformer", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | threads,
    )


def same_end(one: Path, other: Path) -> None:
    ours, theirs = outcome(one), outcome(other)
    for found in (ours, theirs):
        del found["steps"]  # which checkpoints are still kept depends on where a run was stopped
    assert_same(ours, theirs)


def test_train_prints_one_object_with_the_promised_keys(glass, tmp_path):
    code, out, err = glass(
        *("train", "digits", "--steps", 12, "--seed", 3, "--name", "x", "--runs", tmp_path),
        *SMALL,
        "--json",
    )
    assert code == 0
    (line,) = out.splitlines()
    found = json.loads(line)
    assert set(found) == RESULT
    assert (found["run"], found["steps"]) == ("x", 12)
    assert all(isinstance(found[key], float) for key in RESULT - {"run", "steps"})
    assert "step=12/12" in err
    config = RunDirectory(tmp_path / "x").read_json("config.json")
    assert (config["train"]["steps"], config["train"]["seed"]) == (12, 3)
    assert RunDirectory(tmp_path / "x").steps() == [10, 12]


@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_evaluate_prints_what_the_page_promises(engine, glass, tmp_path):
    glass("train", "digits", "--steps=12", f"--runs={tmp_path}", f"--engine={engine}", *SMALL)
    code, out, _ = glass("evaluate", "digits", "--runs", tmp_path, "--json")
    assert code == 0
    found = json.loads(out)
    assert {"loss", "accuracy", "exact_match", "by", "oracle"} <= set(found)
    assert set(found["by"]) == {"operation", "length"}
    assert {"entropy", "excess", "legal"} <= set(found["oracle"])
    left = tmp_path / "digits" / "eval"
    assert json.loads((left / "test.json").read_text()) == found
    for line in (left / "test-errors.jsonl").read_text().splitlines():
        assert "SEP" in json.loads(line)["example"]
    code, out, _ = glass("evaluate", "digits", "--runs", tmp_path, "--split", "val")
    assert code == 0
    assert "by operation" in out


def test_evaluate_takes_a_checkpoint_by_name_or_number(glass, tmp_path):
    glass("train", "digits", "--steps=22", f"--runs={tmp_path}", *SMALL, "train.keep=9")
    found = {}
    for which in ("digits", "digits@last", "digits@22", "digits@10", tmp_path / "digits@10"):
        code, out, _ = glass("evaluate", which, "--runs", tmp_path, "--json")
        assert code == 0
        found[str(which)] = json.loads(out)["loss"]
    assert found["digits@last"] == found["digits@22"]
    assert found["digits@10"] == found[f"{tmp_path}/digits@10"] != found["digits@22"]
    code, _, err = glass("evaluate", "digits@11", "--runs", tmp_path)
    assert code == 2
    assert "no checkpoint '11'" in err
    assert "best, last, 10, 20, 22" in err


def test_list_tells_tasks_presets_and_runs(glass, tmp_path):
    glass("train", "digits", "--steps=3", "--name=a", f"--runs={tmp_path}", *SMALL)
    code, out, _ = glass("list", "--runs", tmp_path, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["tasks"] == [*RECIPES, "finetune"]
    assert found["presets"] == list(PRESETS)
    (run,) = found["runs"]
    assert (run["run"], run["status"], run["step"]) == ("a", "finished", 3)
    code, out, _ = glass("list", "--runs", tmp_path)
    assert "val loss" in out
    assert json.loads(glass("list", "--runs", tmp_path / "none", "--json")[1])["runs"] == []


@pytest.mark.parametrize("value", ["nan", 1.5, None])
def test_list_shows_a_run_whatever_became_of_it(value, glass, tmp_path):
    val = None if value is None else {"loss": value, "accuracy": 0.0}
    record = {"status": "diverged", "step": 3, "task": "digits", "val": val}
    RunDirectory(tmp_path / "a").write_json("run.json", record)
    code, out, _ = glass("list", "--runs", tmp_path)
    assert code == 0
    assert "diverged" in out


def test_lr_find_gives_a_number_a_range_and_a_command_that_works(glass, tmp_path):
    code, out, _ = glass("lr-find", "digits", *SMALL, "--json")
    found = json.loads(out)
    assert code == 0
    assert 1e-6 <= found["low"] <= found["lr"] * 1.05
    assert found["lr"] <= found["high"] * 1.05 <= 1.05
    words = found["command"].split()
    assert words[:3] == ["glass", "train", "digits"]
    code, _, _ = glass(*words[1:], "--steps=3", f"--runs={tmp_path}")
    assert code == 0
    assert RunDirectory(tmp_path / "digits").read_json("config.json")["train"]["lr"] == found["lr"]


def test_a_config_repeats_the_run(glass, tmp_path):
    glass("train", "digits", "--steps=12", f"--runs={tmp_path}", *SMALL)
    config = tmp_path / "digits" / "config.toml"
    code, _, _ = glass("train", config, "--name=again", f"--runs={tmp_path}")
    assert code == 0
    assert_same(outcome(tmp_path / "again"), outcome(tmp_path / "digits"))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "digit"], "did you mean 'digits'?"),
        (["train", "digits", "train.stepz=3"], "did you mean 'steps'?"),
        (["train", "digits", "task.max_lenght=3"], "did you mean 'max_length'?"),
        (["train", "digits", "train.lr"], "write path=value"),
        (["train", "digits", "train.lr=fast"], "train.lr: 'fast' is not a number"),
        (["train", "digits", "--engine", "nump"], "did you mean 'numpy'?"),
        (["train", "digits", "--device", "tpu"], "unknown device 'tpu'"),
        (["train", "digits", "--device", "cpux"], "unknown device 'cpux'"),
        (["train", "digits", "--name", "../x"], "cannot be the name of a run"),
        (["train", "digits", "--name", ""], "cannot be the name of a run"),
        (["train", "digits", "--resume", "--overwrite"], "leave out one of the two"),
        (["train", "digits", "--threads", "0"], "threads 0 is below 1"),
        (["train", "digits", "--threads", "2", "--engine", "numpy"], "OPENBLAS_NUM_THREADS=2"),
        (["train", "nowhere.toml"], "cannot be read as TOML"),
        (["train", "digits", "--seed", "-1"], "seed -1 is below 0"),
        (["train", "digits", "--resume", "--engine", "nump"], "did you mean 'numpy'?"),
        (["evaluate", "nowhere"], "no folder nowhere"),
        (["lr-find", "digit"], "did you mean 'digits'?"),
    ],
)
def test_bad_input_is_told_with_the_nearest_choice(words, message, glass, tmp_path):
    runs = [] if words[0] == "lr-find" else ["--runs", tmp_path]
    code, out, err = glass(*words, *runs)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert not list(tmp_path.iterdir())


def test_all_problems_of_a_config_are_told_at_once(glass, tmp_path):
    glass("train", "digits", "--steps=3", f"--runs={tmp_path}", *SMALL)
    config = tmp_path / "digits" / "config.toml"
    text = config.read_text()
    text = text.replace("batch_size = 8", 'batch_size = "8"').replace("seed = 0", "sead = 0")
    (tmp_path / "bad.toml").write_text(text.replace('"AdamW"', '"AdamX"'))
    code, _, err = glass("train", tmp_path / "bad.toml", f"--runs={tmp_path}")
    assert code == 2
    for problem in ("train.batch_size", "train.sead", "task.sead", "did you mean 'AdamW'?"):
        assert problem in err


def test_a_run_that_exists_is_refused(glass, tmp_path):
    words = ("train", "digits", "--steps=3", f"--runs={tmp_path}", *SMALL)
    glass(*words)
    code, _, err = glass(*words, "--json")
    assert code == 2
    told = json.loads(err)["error"]
    assert told["what"] == "the run digits exists"
    assert all(way in told["hint"] for way in ("--resume", "--overwrite", "--name"))
    assert glass(*words, "--overwrite")[0] == 0
    assert glass(*words, "--name=other")[0] == 0
    assert glass(*words, "--resume")[0] == 0


def test_a_resumed_run_keeps_its_spec(glass, tmp_path):
    words = ("train", "digits", f"--runs={tmp_path}", *SMALL)
    glass(*words, "--steps=3")
    code, _, err = glass(*words, "--resume", "train.lr=0.5")
    assert code == 2
    assert "train.lr=0.5 changes it" in err
    code, _, err = glass("train", "reverse", "--name=digits", f"--runs={tmp_path}", "--resume")
    assert code == 2
    assert "the run digits is not one of reverse" in err
    config = tmp_path / "digits" / "config.toml"
    code, _, _ = glass("train", config, "--name=digits", f"--runs={tmp_path}", "--resume")
    assert code == 0
    (tmp_path / "other.toml").write_text(config.read_text().replace("seed = 0", "seed = 1"))
    code, _, err = glass(
        *("train", tmp_path / "other.toml", "--name=digits", f"--runs={tmp_path}", "--resume")
    )
    assert code == 2
    assert "is not one of" in err


def test_the_command_that_began_a_run_resumes_it(glass, tmp_path):
    """From a config with settings of its own, which must all be given again."""
    glass("train", "digits", "--steps=2", f"--runs={tmp_path}", *SMALL)
    config = tmp_path / "digits" / "config.toml"
    words = ("train", config, "--name=x", f"--runs={tmp_path}", "train.lr=0.5", "model.d_model=16")
    assert glass(*words, "--steps=3")[0] == 0
    assert glass(*words, "--steps=4", "--resume")[0] == 0
    assert RunDirectory(tmp_path / "x").read_json("run.json")["step"] == 4
    for other in (words[:-1], (*words, "train.clip=9")):
        code, _, err = glass(*other, "--resume")
        assert code == 2 and "is not one of" in err
        (hint,) = re.findall(r"hint: glass (resume .*) resumes it", err)
        assert glass(*shlex.split(hint))[0] == 0


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        (("train", "digits", *SMALL), 2),
        (("train", "digits", *SMALL, "--resume", "train.lr=0.5"), 2),
        (("train", "reverse", "--name=digits", "--resume"), 2),
        (("train", "digits", *SMALL, "--resume", "--overwrite"), 2),
        (("evaluate", "digits@7"), 2),
        (("runs", "tag", "digits", "a/b"), 2),
        (("runs", "rename", "digits", "other"), 2),
        (("report", "digits", "-o", "x.txt"), 2),
        (("train", "digits", "--resume"), 3),
    ],
)
def test_a_refused_command_changes_no_file_of_a_run(words, exit_code, run_of_two, glass, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(run_of_two, runs)
    shutil.copytree(run_of_two / "digits", runs / "other")
    if exit_code == 3:  # found while the run is locked
        (runs / "digits" / "probes" / "link").symlink_to(tmp_path)
        (runs / "digits" / "alerts.jsonl").symlink_to(tmp_path / "elsewhere")
    for path in [runs, *runs.rglob("*")]:
        os.utime(path, (0, 0), follow_symlinks=False)
    assert glass(*words, "--runs", runs)[0] == exit_code
    changed = [p for p in [runs, *runs.rglob("*")] if os.lstat(p).st_mtime != 0]
    assert changed == []


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    train("digits", steps=2, runs=runs, overrides=SMALL, progress=False)
    return runs


def test_a_run_that_never_began_is_to_be_given_its_settings_again(glass, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    words = ("train", "digits", "--steps=3", f"--runs={tmp_path}", *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        code, _, err = glass(*words)
    assert code == 5 and "give the same command again" in err and "--resume" not in err
    assert glass(*words)[0] == 0
    assert not list((tmp_path / "digits").glob(".*"))


def test_resume_with_nothing_there_starts_at_step_0_and_says_so(glass, tmp_path):
    code, _, err = glass(
        *("train", "digits", "--steps=3", f"--runs={tmp_path}", "--resume"), *SMALL
    )
    assert code == 0
    assert "starting at step 0" in err


def test_resuming_what_is_finished_gives_the_same_result(glass, tmp_path):
    words = ("train", "digits", "--steps=12", f"--runs={tmp_path}", *SMALL, "--json")
    first, again = (json.loads(glass(*words, *more)[1]) for more in ((), ("--resume",)))
    first.pop("seconds"), again.pop("seconds")
    assert first == again


def test_divergence_is_exit_4_with_the_last_good_checkpoint(glass, tmp_path):
    code, out, err = glass(
        *("train", "digits", "--steps=30", f"--runs={tmp_path}"),
        *SMALL,
        *("train.checkpoint_every=1", "train.optimizer=SGD", "train.clip=0", "train.lr=1e30"),
        'train.schedule={"kind": "ConstantSchedule"}',
    )
    assert code == 4
    assert "the last good checkpoint is step" in err
    assert "alert at step" in err
    assert len(err[err.index("error:") :].strip().splitlines()) <= 3
    assert out == ""


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "engine"), [(signal.SIGINT, 130, "torch"), (signal.SIGTERM, 143, "numpy")]
)
def test_a_signal_saves_the_state_and_resume_goes_on(number, code, engine, glass, tmp_path):
    words = ("train", "digits", "--steps=160", f"--engine={engine}", *SMALL, "--json")
    words += ("train.checkpoint_every=10",)
    child = started(*words, "--name=stopped", f"--runs={tmp_path}")
    os.setpriority(os.PRIO_PROCESS, child.pid, 15)  # we are to see its first checkpoint in time
    directory = RunDirectory(tmp_path / "stopped")
    while child.poll() is None and not directory.steps():
        time.sleep(0.002)
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    assert "state saved; go on with --resume" in err
    step = json.loads(out)["steps"]
    assert directory.pointed("last") == step < 160
    assert directory.read_json("run.json")["status"] == "stopped"
    assert (
        f"resuming at step {step}"
        in glass(*words, "--name=stopped", f"--runs={tmp_path}", "--resume")[2]
    )
    glass(*words, "--name=whole", f"--runs={tmp_path}")
    same_end(tmp_path / "stopped", tmp_path / "whole")


def in_fork(work) -> int:
    """Run a call in a forked process; return its exit code, minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            work()
        finally:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_ctrl_c_ends_a_run_that_has_not_begun_whoever_would_swallow_the_exception():
    def work() -> None:
        with ending_at_once(), contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)

    assert in_fork(work) == -signal.SIGINT
    found = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with ending_at_once():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, found)


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_traceback():
    def work() -> None:
        sys.modules.pop("glassformer.__main__", None)
        importlib.import_module("glassformer.__main__")
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)

    assert in_fork(work) == -signal.SIGINT


def test_the_second_signal_ends_at_once():
    asked: list[bool] = []
    with stopping(lambda: asked.append(True)) as caught:
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked == [True]
        assert caught == [signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_signals_are_given_back_after_the_run(glass, tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    glass("train", "digits", "--steps=3", f"--runs={tmp_path}", *SMALL)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_freed_memory_is_kept_where_the_c_library_can():
    from glassformer.cli.shell.process import keep_freed_memory

    assert keep_freed_memory() == ("glibc" in platform.libc_ver()[0])


def test_resume_goes_on_with_a_run_by_its_name(glass, tmp_path):
    glass("train", "digits", "--steps=6", "--name=x", f"--runs={tmp_path}", *SMALL)
    code, out, err = glass("resume", "x", "--steps=9", f"--runs={tmp_path}", "--json")
    assert code == 0, err
    assert json.loads(out)["steps"] == 9
    assert "resuming at step 6" in err
    code, _, err = glass("resume", "y", f"--runs={tmp_path}")
    assert code == 2 and "there is no folder y" in err
    (tmp_path / "empty").mkdir()
    code, _, err = glass("resume", "empty", f"--runs={tmp_path}")
    assert code == 2 and "is no run that can be resumed" in err


def test_training_a_run_prints_what_goes_on_with_it(glass, tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/config.json").write_text("{}")
    code, _, err = glass("train", "demo", f"--runs={tmp_path}")
    assert code == 2 and "'demo' is a run, not a task" in err and "glass resume demo" in err
