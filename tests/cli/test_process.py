"""Closed, full, cut off: what becomes of a command whose output has nowhere to go."""

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glassformer.cli.shell.process import check_device
from glassformer.cli.shell.terminal import (
    CUT_OFF,
    TerminalOutput,
    is_cut_off,
    open_streams,
    tell,
    trouble,
    write_file,
)
from glassformer.lab.runs.record import load_run_spec
from glassformer.lab.show import catalogue
from glassformer.spec.errors import FileError, InputError, MachineError
from glassformer.store.rundir import RunDirectory

LIST = f"{sys.executable} -m glassformer.cli.main list"


def shell(command: str) -> subprocess.CompletedProcess[str]:
    full = f"set -o pipefail; {command}"
    return subprocess.run(["bash", "-c", full], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("> /dev/full", 5, "No space left on device"),
        ("--json > /dev/full", 5, "No space left on device"),
        (">&-", 0, ""),
        ("| true", CUT_OFF, ""),
        ("2>&- | cat", 0, ""),
    ],
)
def test_an_output_that_goes_nowhere(end, code, message):
    done = shell(f"{LIST} {end}")
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_closed_stdin_has_nothing_to_read(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    open_streams()
    assert not sys.stdin.isatty() and sys.stdin.read() == sys.stdin.readline() == ""
    sys.stdin.close()


def test_a_terminal_is_shown_control_characters_and_does_not_obey_them():
    bytes_ = io.BytesIO()
    terminal = TerminalOutput(bytes_, encoding="utf-8")
    terminal.write("a\tb\n\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J \r \x9b1m")
    terminal.flush()
    shown = "a\tb\n\x1b[31mred\x1b[0m \\x1b]0;title\\x07 \\x1b[2J \\x0d \\x9b1m"
    assert bytes_.getvalue().decode() == shown
    terminal.raw = True
    terminal.write("\x1b[2J")
    terminal.flush()
    assert bytes_.getvalue().endswith(b"\x1b[2J")


def test_narration_shows_control_characters(capsys):
    tell("the file \x1b]0;x\x07 is bad")
    assert capsys.readouterr().err == "the file \\x1b]0;x\\x07 is bad\n"


def test_a_reader_who_has_gone_is_known_from_an_exit_too():
    def exits():
        try:
            raise BrokenPipeError
        except OSError:
            sys.exit(1)

    with pytest.raises(SystemExit) as caught:
        exits()
    assert is_cut_off(caught.value)
    assert not is_cut_off(SystemExit(1)) and not is_cut_off(OSError(errno.ENOSPC, "full"))
    told = trouble(PermissionError(errno.EACCES, "Permission denied", "x.txt"))
    assert told.exit_code == 5 and told.where == "x.txt"


def test_narration_that_nobody_can_read_stops_nothing(monkeypatch):
    class Full:
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stderr", Full())
    tell("step=1")


def test_a_file_is_written_whole_or_not_at_all(tmp_path, capsys):
    target = tmp_path / "x.csv"
    target.write_bytes(b"old")
    write_file(target, b"new")
    assert target.read_bytes() == b"new" and list(tmp_path.iterdir()) == [target]
    link = tmp_path / "link.csv"
    link.symlink_to(target)
    write_file(link, b"newer")
    assert link.is_symlink() and target.read_bytes() == b"newer"
    (tmp_path / "full.csv").symlink_to("/dev/full")
    with pytest.raises(MachineError, match="No space"):
        write_file(tmp_path / "full.csv", b"x")
    for place in (tmp_path / "none" / "x.csv", tmp_path, Path("/")):
        with pytest.raises(InputError, match="cannot be written"):
            write_file(place, b"x")
    assert "saved" in capsys.readouterr().err


def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "x.csv"
    target.write_bytes(b"old")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match="No space"):
        write_file(target, b"new")
    assert target.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.csv"]


def test_only_devices_that_exist_are_taken():
    check_device("cpu")
    for name in ("cpux", "cpu:3", "", "CPU", "cuda:", "cuda:x", "cuda:99999999", "mps:1"):
        with pytest.raises(InputError, match="unknown device"):
            check_device(name)


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path):
    records = {
        "good": {"status": "finished", "step": 3, "val": {"loss": 0.5, "accuracy": 0.25}},
        "nan": {"status": "diverged", "step": 3, "val": {"loss": "nan", "accuracy": 0.0}},
        "odd": {"status": ["?"], "task": 7, "val": [1]},
    }
    for name, record in records.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(record))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"status":')
    lines = catalogue(tmp_path).text().splitlines()[-4:]
    for words in ("good finished 25.0%", "nan diverged", "odd", "torn damaged"):
        assert any(all(word in line for word in words.split()) for line in lines), words


def test_a_config_that_is_no_runs_is_told_as_what_it_is(tmp_path: Path):
    with pytest.raises(InputError, match="not a run"):
        load_run_spec(RunDirectory(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(InputError, match="not a run") as caught:
        load_run_spec(RunDirectory(tmp_path))
    assert "--suite" in caught.value.hint
    (tmp_path / "run.json").write_text("{}")
    for content in (b"nope", b"{}", b"\xff\xfe"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(FileError, match=r"config\.json"):
            load_run_spec(RunDirectory(tmp_path))
