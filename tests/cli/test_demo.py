"""`glass demo` as a person and a script meet it: hardly trained here, so that it takes seconds."""

import contextlib
import io
import json
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from glassformer.cli import main as command
from glassformer.cli.verbs import demo
from glassformer.store.rundir import RunDirectory
from tests.contracts.test_docs import ROOT


def run(patch, *words):
    """The command in this process: exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    patch.setattr(sys, "argv", ["glass", *map(str, words)])
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        command.main()
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two demos in one folder, and what they printed: for people, and for scripts."""
    place = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(demo, "HELD_OUT", 20)
        words = ("demo", "--steps", 4)
        return place, (run(patch, *words), run(patch, *words, "--json"))


def test_results_are_on_stdout_and_narration_on_stderr(made):
    code, out, err = made[1][0]
    assert code == 0, out + err
    for word in (
        "trained   4 steps",
        "verified",
        "0 failed, 5 do not apply",
        "decoded   20 held-out sequences",
    ):
        assert word in out
    assert "cross-attention, layer L1, mean of its heads" in out
    assert "\x1b" not in out + err  # nobody watches a terminal
    for number, verb in enumerate(("train", "verify", "decode", "look"), 1):
        assert f"{number}/4 {verb}" in err
    assert "step=4/4" in err


def test_the_quickstart_shows_what_is_printed(made):
    """Its numbers are of a trained model; all else is the same."""
    out = re.sub(r"[\d.,]+%?", "#", made[1][0][1])
    shown = (ROOT / "docs" / "quickstart.md").read_text("utf-8").split("$ glass demo\n...\n")[1]
    lines = re.sub(r"[\d.,]+%?", "#", shown.split("\n\n        ")[0]).splitlines()
    assert len(lines) == 8
    for line in lines:
        assert re.split(r" #|  | \(", line)[0] in out, line  # the legend's shares are the run's


def test_a_second_demo_takes_another_name(made):
    place, _ = made
    for name in ("demo", "demo-2"):
        assert RunDirectory(place / "runs" / name).read_json("run.json")["status"] == "finished"


def test_json_is_one_object(made):
    code, out, _ = made[1][1]
    assert code == 0
    (line,) = out.splitlines()
    found = json.loads(line)
    assert (found["run"], found["steps"], found["examples"]) == ("demo-2", 4, 20)
    assert found["verify"]["failed"] == 0
    assert set(found["exact_match"]) == {"greedy", "beam 4"}
    assert found["attention"]["layer"] == 1  # from 0, as everywhere
    weights = found["attention"]["weights"]
    assert len(weights) == len(found["attention"]["answer"])
    for row in weights:
        assert sum(row) == pytest.approx(1.0, abs=1e-3)
    assert len(weights[0]) == len(found["attention"]["source"]) == demo.SHOWN + 1


def test_what_it_says_to_try_next_works_as_printed(made, monkeypatch):
    place, found = made
    monkeypatch.chdir(place)
    lines = found[0][1].partition("Next:\n")[2].splitlines()
    assert len(lines) == 5
    for line in lines:
        words = shlex.split(line.split("   ")[0].strip())
        assert words[0] == "glass"
        if words[1] == "explore":  # serves until it is stopped: tests/web and tests/browser run it
            assert (place / words[2]).is_dir()
            continue
        code, out, err = run(monkeypatch, *words[1:])
        assert code == 0, err
        assert out


def test_it_leaves_a_report_with_the_checks_it_made(made):
    place, found = made
    assert "report    runs/demo/report.html" in found[0][1]
    text = (place / "runs/demo/report.html").read_text()
    assert f"{json.loads(found[1][1])['verify']['passed']} checks passed, 0 failed" in text


def test_overwrite_starts_the_run_anew(tmp_path):
    assert demo.free_folder(tmp_path, "demo", overwrite=False) == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert demo.free_folder(tmp_path, "demo", overwrite=False) == tmp_path / "demo-3"
    assert demo.free_folder(tmp_path, "demo", overwrite=True) == tmp_path / "demo"


def test_commands_quote_what_a_shell_would_split(tmp_path):
    folder = tmp_path / "my runs" / "demo"
    for text, _ in demo.next_commands(folder):
        assert str(folder) in shlex.split(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", 0), "steps 0"),
        (("--name", "../up"), "cannot be the name of a run"),
        (("--seed", -1), "seed"),
    ],
)
def test_bad_input_is_three_lines_and_leaves_nothing(words, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(monkeypatch, "demo", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) <= 3
    assert not list(tmp_path.iterdir())


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    words = [sys.executable, "-m", "glassformer", "demo", "--runs", str(tmp_path / "here")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        metrics = tmp_path / "here" / "demo" / "metrics.jsonl"
        for _ in range(600):
            if metrics.exists():
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "state saved; go on with\n  glass train reverse --name demo --runs" in err
    record = RunDirectory(tmp_path / "here" / "demo").read_json("run.json")
    assert record["status"] == "stopped"
    assert RunDirectory(tmp_path / "here" / "demo").steps() == [record["step"]]
    assert out == ""
