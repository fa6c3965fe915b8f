"""The command as a person or a script meets it."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import glassformer as gf
from glassformer.cli.main import VERBS, app


def glass(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glassformer", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_help_imports_no_torch():
    code = (
        "import sys; sys.argv = ['glass', '--help']\n"
        "from glassformer.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip().endswith("False False")
    assert "verify" in shown.stdout


def test_help_says_each_verb_in_one_whole_line():
    shown = CliRunner().invoke(app, ["--help"], terminal_width=80).stdout
    listed = shown.partition("Commands:\n")[2].rstrip().splitlines()
    verbs = [line.split()[0] for line in listed]
    assert len(verbs) == len(VERBS) == len(set(verbs))
    assert verbs[:5] == ["demo", "list", "show", "design", "train"]  # the way a person goes
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)
    for verb in verbs:
        shown = CliRunner().invoke(app, [verb, "--help"]).stdout
        assert "[[" not in shown, verb
        assert shown.count(f"glass {verb}") >= 2 or verb in ("demo", "list"), f"{verb}: no example"


def test_verify_prints_one_json_object():
    result = CliRunner().invoke(app, ["verify", "fsm-probe", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["failed"] == 0
    assert {"name", "group", "dtype", "worst", "tolerance", "verdict"} <= set(report["checks"][0])


def test_verify_takes_a_checkpoint(tmp_path):
    gf.save(gf.build(gf.preset("digits")), tmp_path / "model")
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "model"), "--only", "padding"])
    assert result.exit_code == 0
    assert "passed" in result.stdout


def test_a_failed_check_exits_1():
    result = CliRunner().invoke(app, ["verify", "tests.checks.foreign:leaky"])
    assert result.exit_code == 1
    assert "bug" in result.stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["verify", "nowhere"], 2, "there is no folder nowhere"),
        (["verify", "--only", "cach"], 2, "did you mean 'cache'?"),
        (["verify", "no.such.place:model"], 2, "no module named 'no'"),
        (["verify", "."], 3, "not a glassformer checkpoint"),
    ],
)
def test_bad_input_is_three_lines_and_a_code(words, code, message):
    result = glass(*words)
    assert result.returncode == code
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().split("\n")) <= 3


def test_errors_are_json_when_json_was_asked_for():
    result = glass("verify", "nowhere", "--json")
    assert json.loads(result.stderr)["error"]["what"] == "there is no folder nowhere"


def test_debug_shows_the_traceback():
    assert "Traceback" in glass("--debug", "verify", "nowhere").stderr


def test_a_saved_model_comes_back(tmp_path):
    model = gf.build(gf.preset("qwen"))
    again = gf.load(gf.save(model, tmp_path / "qwen"))
    assert gf.count_parameters(again.spec) == sum(p.numel() for p in model.parameters())
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert ours.equal(theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_comes_back_in_its_precision(tmp_path, dtype):
    model = gf.build(gf.preset("digits")).to(dtype)
    again = gf.load(gf.save(model, tmp_path / "digits"))
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.equal(theirs)
