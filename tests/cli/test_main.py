"""The command as a person or a script meets it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import glassformer as gf
from glassformer.cli.main import GROUPS, OUR_FAULT, VERBS, app, main
from glassformer.lab.recipes import recipe
from glassformer.spec.serialize import to_json
from tests.command import glass


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
    listed = [line for line in shown.splitlines() if line.startswith("  ") and line.endswith(".")]
    verbs = [line.split()[0] for line in listed if line.split()[0] in VERBS]
    assert tuple(verbs) == VERBS  # each on one line, in the order in which they are grouped
    assert [line for line in shown.splitlines() if line.endswith(":")] == [
        *(f"{title}:" for title in GROUPS),
        "Options:",
    ]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("width", [80, 120])
def test_the_help_of_a_verb_fits_and_is_in_peoples_words(verb, width):
    shown = CliRunner().invoke(app, [verb, "-h"], env={"COLUMNS": str(width)}).stdout
    assert not re.search("<(str|int|float|list|bool)", shown), "a type of Python's"
    assert "[[" not in shown and "--output" not in shown
    examples = shown.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert examples or verb == "demo"
    for line in set(shown.splitlines()) - {*examples}:
        assert len(line) <= width, line
    for line in examples:
        assert "glass" in line, "each example is one line"


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        ("generate x --max-new-words 3", "has no option --max-new-words", "'--max-new'"),
        ("train digits --lr 1e-3", "glass train has no option --lr", "train.lr=1e-3"),
        ("train digits --batch-size=4", "no option --batch-size", "train.batch_size=4"),
        ("lr-find digits --layers 3", "no option --layers", "model.decoder.layers.count=3"),
        ("train digits --step 5", "no option --step", "did you mean '--steps'?"),
        ("trian digits", "there is no command 'trian'", "did you mean 'train'?"),
        ("train reverze", "no task 'reverze'", "did you mean 'reverse'?"),
        ("train", "glass train needs TASK|CONFIG", "glass train --help"),
        ("train digits position=NoPosition", "unknown key 'position'", "'model.position'"),
        ("runs --sort zzz --runs tests/fixtures", "no column or setting", "a column: run"),
        ("evaluate x --limit y", "'--limit'", "glass evaluate --help"),
    ],
)
def test_a_guess_is_answered_in_one_voice(words, what, hint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["glass", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert ended.value.code == 2 and shown.out == ""
    first, *rest = shown.err.splitlines()
    assert first.startswith("error: ") and what in first
    assert rest[-1].startswith("hint: ") and hint in rest[-1]


def test_a_mistake_of_ours_is_three_lines_and_a_file(monkeypatch, capsys):
    def broken(*_, **__):
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("glassformer.lab.show.catalogue", broken)
    monkeypatch.setattr(sys, "argv", ["glass", "list"])
    with pytest.raises(SystemExit) as ended:
        main()
    what, where, hint = capsys.readouterr().err.splitlines()
    assert ended.value.code == OUR_FAULT
    assert "ZeroDivisionError: by nothing" in what and "our fault" in hint
    file = Path(where.removeprefix("  at: "))
    assert "in broken" in file.read_text() and "glass list" in file.read_text()
    file.unlink()


WITHOUT_TORCH = """
import os, sys
from glassformer.cli.main import main
for words in {commands}:
    sys.argv = ["glass", *words.split()]
    sys.stderr = sys.stdout = open(os.devnull, "w")
    try: main()
    except SystemExit: pass
    sys.stdout = sys.__stdout__
    print(words, *(m for m in ("torch", "numpy", "scipy", "pydantic") if m in sys.modules), sep=",")
"""
LIGHT = (
    *("--help", "list", "runs", "trian", "train reverze", "train digits --lr 1", "completion zsh"),
    *("compare a b", "show qwen", "help train", "evaluate nothing", "inspect nothing x"),
    *("generate nothing x", "verify nothing", "quantize nothing", "convert nothing --to hf -o x"),
)


def test_lists_typos_and_help_need_no_torch():
    script = WITHOUT_TORCH.format(commands=LIGHT)
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert shown.stdout.splitlines() == list(LIGHT), shown.stdout + shown.stderr


TYPOS = (
    *(
        "train nosuch",
        "train nosuch.toml",
        "train reverse --name a/b",
        "train ran",
        "resume nosuch",
    ),
    *("train reverse --device nosuch", "train reverse --threads 0", "train reverse --engine nump"),
    *("train reverse --steps 0", "train reverse train.lr=-1", "train reverse train.schedule=WSD"),
    *("train reverse train.optimizer=Adam", "train reverse task.lenth=3", "train reverse modl.x=1"),
    *(
        "train reverse model.d_model=7",
        "train reverse model.position=rope",
        "train reverse model=1",
    ),
    *("train reverse model.heads.0.num_classes=3", "train reverse train.optimizer.beta3=1"),
    *("train fsm task.machine=nosuch", "train fsm task.machine=regex:(a", "train nosuch.py:X"),
    *("train fsm task.machine=nosuch.json", "train reverse --name ran", "resume ran --steps 0"),
    *("lr-find nosuch", "lr-find reverse -o x.bad", "lr-find reverse task.lenth=3"),
    *("doctor nosuch", "doctor reverse -o x.bad", "doctor reverse task.lenth=3"),
    *("sweep nosuch", "sweep nosuch.toml", "sweep reverse --seeds 0", "sweep reverse train.lr=1,a"),
    *("sweep reverse train.lrr=1,2", "sweep reverse model.n_layers=1,2", "sweep fsm task.x=1,2"),
    *("sweep fsm task.machine=nosuch,parity", "sweep reverse --name a/b train.lr=1e-3,1e-2"),
    *("evaluate ran --split nosuch", "evaluate ran -o x.bad", "evaluate ran --device nosuch"),
    *(
        "evaluate ran --suite nosuch",
        "extract nosuch",
        "extract ran -o x.bad",
        "extract ran --by x",
    ),
    *("show reverse model.d_model=7", "show nosuch", "embed nosuch x", "serve nosuch"),
    *("serve ran --host 0.0.0.0 --port 0", "finetune ran nosuch.jsonl", "explore --port 99999"),
)


def test_every_kind_of_typo_is_found_before_torch_is_imported(tmp_path):
    """In one process, so that the first verb that imports torch is seen in all rows after it."""
    run = tmp_path / "runs" / "ran"
    run.mkdir(parents=True)
    (run / "config.json").write_text(to_json(recipe("fsm")))
    (run / "run.json").write_text(json.dumps({"task": "fsm", "status": "finished", "step": 1}))
    shown = subprocess.run(
        [sys.executable, "-c", REFUSED.format(commands=TYPOS)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    lines = shown.stdout.splitlines()
    wrong = [line for line in lines if not line.endswith(" 2 False")]
    assert not wrong and len(lines) == len(TYPOS), (wrong, shown.stderr)


REFUSED = """
import os, sys
from glassformer.cli.main import main
for words in {commands}:
    sys.argv = ["glass", *words.split()]
    sys.stderr = sys.stdout = open(os.devnull, "w")
    code = 0
    try: main()
    except SystemExit as ended: code = ended.code
    sys.stdout = sys.__stdout__
    print(words, code, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("glass tra", "train"),
        ("glass train rev", "reverse"),
        ("glass train digits --th", "--threads"),
    ],
)
def test_a_shell_completes(typed, offered):
    words = typed.split(" ")
    asked = {"_GLASS_COMPLETE": "complete_bash", "COMP_WORDS": typed}
    done = subprocess.run(
        [sys.executable, "-m", "glassformer"],
        capture_output=True,
        text=True,
        env={**os.environ, **asked, "COMP_CWORD": str(len(words) - 1)},
    )
    assert offered in done.stdout.split()


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


def test_an_argument_typed_as_an_option_is_told_its_place():
    refused = glass("generate", "demo", "--prompt", "x")
    assert refused.returncode == 2
    assert "hint: no dashes: glass generate MODEL PROMPT" in refused.stderr
