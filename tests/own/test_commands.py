"""Parts of a user's own, from outside the package: files in a folder, and `glass` as a command."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import command

PARTS = Path(__file__).with_name("parts.py")
SRC = Path(__file__).parents[2] / "src"
TEXT = "the cat sat on the mat and the dog sat on the log " * 40


def glass(folder: Path, *words: str, fails: int | None = None, **environment: str) -> str:
    """Stdout of a command in that folder; with `fails`, stderr of one that ends with this code."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("GLASS_")}
    done = command.glass(*words, folder=folder, environment={**ours, **environment})
    assert done.returncode == (fails or 0), done.stderr
    return done.stderr if fails else done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A user's folder: one file of parts, and a run on its task."""
    made = tmp_path_factory.mktemp("own")
    shutil.copy(PARTS, made / "mine.py")
    (made / "text.txt").write_text(TEXT)
    out = glass(
        made,
        "train",
        "mine.py:Palindromes",
        "task.length=5",
        "task.examples=400",
        "train.steps=30",
        "train.schedule.warmup=5",
        "train.checkpoint_every=10",
        "--json",
    )
    assert json.loads(out)["run"] == "Palindromes"
    return made


def test_the_run_names_its_code_reproducibly(folder):
    task = json.loads((folder / "runs/Palindromes/config.json").read_text())["task"]
    assert task == {
        "kind": "OwnTask",
        "source": "mine.py:Palindromes",
        "sha256": hashlib.sha256(PARTS.read_bytes()).hexdigest(),
        "options": {"length": 5, "examples": 400},
    }


def test_reading_a_run_with_own_code_takes_consent(folder):
    error = glass(folder, "evaluate", "Palindromes", fails=2)
    assert "mine.py:Palindromes, which is not run unless you allow it" in error
    assert "--own-code mine.py" in error
    found = json.loads(glass(folder, "evaluate", "Palindromes", "--own-code", "mine.py", "--json"))
    same = glass(folder, "evaluate", "Palindromes", "--json", GLASS_OWN_CODE="mine.py")
    assert found == json.loads(same)


def test_what_needs_no_code_runs_without_consent(folder):
    # Once as a program that starts from nothing: no test has imported anything for it.
    done = subprocess.run(
        [sys.executable, "-m", "glassformer", "list"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert "Palindromes" in done.stdout
    shown = json.loads(glass(folder, "inspect", "Palindromes", "a b c b a", "--json"))
    assert "yes" in json.dumps(shown)


def test_a_resumed_run_goes_on_and_a_changed_file_is_told(folder):
    out = glass(folder, "train", "mine.py:Palindromes", "--resume", "--steps", "40", "--json")
    assert json.loads(out)["steps"] == 40
    kept = (folder / "mine.py").read_text()
    (folder / "mine.py").write_text(kept + "\n# another thought\n")
    try:
        error = glass(folder, "train", "mine.py:Palindromes", "--resume", "--steps", "50", fails=2)
        assert "mine.py is not the file that this was made with" in error
        error = glass(folder, "evaluate", "Palindromes", "--own-code", "mine.py", fails=2)
        assert "it has changed since" in error
    finally:
        (folder / "mine.py").write_text(kept)
    glass(folder, "evaluate", "Palindromes", "--own-code", "mine.py")


def test_a_config_file_repeats_the_run(folder):
    words = ("train", "runs/Palindromes/config.toml", "--name", "again", "--json")
    assert "not run unless you allow it" in glass(folder, *words, fails=2)
    glass(folder, *words, "--own-code", "mine.py")
    old, new = (folder / "runs" / name for name in ("Palindromes", "again"))
    assert (new / "config.json").read_text() == (old / "config.json").read_text()
    hashes = [json.loads((run / "run.json").read_text())["data"]["sha256"] for run in (old, new)]
    assert hashes[0] == hashes[1]


def test_a_report_is_made_of_it(folder):
    glass(folder, "report", "Palindromes", "--own-code", "mine.py", "-o", "report.html")
    assert "Palindromes" in (folder / "report.html").read_text()


def test_a_tokenizer_of_ones_own_reads_and_writes(folder):
    glass(
        folder,
        "train",
        "text",
        "task.path=text.txt",
        "task.tokenizer=mine.py:Words",
        "task.tokenizer.options.least=2",
        "task.length=8",
        "train.steps=20",
        "train.batch_size=8",
        "train.schedule.warmup=5",
        "--name",
        "words",
    )
    assert "not run unless" in glass(folder, "generate", "words", "the cat", fails=3)
    out = glass(folder, "generate", "words", "the cat", "--own-code", "mine.py", "--json")
    assert set(json.loads(out)["text"].split()) <= set(TEXT.split()) | {"?"}
    glass(folder, "evaluate", "words", "--own-code", "mine.py")


def test_an_optimizer_of_ones_own_trains_and_resumes_to_the_same_bits(folder):
    common = (
        "train",
        "copy",
        "task.examples=200",
        "train.optimizer=mine.py:Lion",
        "train.optimizer.options.beta1=0.8",
        "train.lr=1e-4",
        "train.checkpoint_every=3",
        "--json",
    )
    whole = json.loads(glass(folder, *common, "--steps", "6", "--name", "whole"))
    glass(folder, *common, "--steps", "6", "--name", "halves", "train.keep=9")
    shutil.rmtree(folder / "runs/halves/checkpoints/step-000006")
    again = json.loads(
        glass(folder, *common, "--steps", "6", "--name", "halves", "train.keep=9", "--resume")
    )
    assert again["loss"] == whole["loss"]
    assert again["val_loss"] == whole["val_loss"]
    error = glass(folder, *common, "--engine", "numpy", "--name", "n", fails=2)
    assert "the NumPy engine has no OwnOptimizer" in error


@pytest.mark.parametrize("engine", ["native", "torch", "numpy"])
def test_a_schedule_of_ones_own_sets_the_rate_of_every_engine(folder, engine):
    common = (
        "train",
        "copy",
        "task.examples=200",
        "train.schedule=mine.py:Trapezoid",
        "train.schedule.options.warmup=4",
        "train.lr=1e-3",
        "train.checkpoint_every=3",
        "train.keep=9",
        "train.evaluate_every=1",
        "--engine",
        engine,
        "--json",
    )
    shutil.rmtree(folder / "runs", ignore_errors=True)
    whole = json.loads(glass(folder, *common, "--steps", "8", "--name", "whole"))
    assert _rates(folder / "runs/whole") == pytest.approx(
        [1e-3 * share for share in (0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25)]
    )
    glass(folder, *common, "--steps", "8", "--name", "halves")
    shutil.rmtree(folder / "runs/halves/checkpoints/step-000008")
    assert "not run unless" in glass(folder, "resume", "halves", fails=2)
    again = json.loads(glass(folder, "resume", "halves", "--own-code", "mine.py", "--json"))
    assert (again["loss"], again["val_loss"]) == (whole["loss"], whole["val_loss"])
    assert _rates(folder / "runs/halves") == _rates(folder / "runs/whole")


def _rates(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [one["lr"] for one in map(json.loads, lines) if "lr" in one]


def test_a_schedule_that_gives_no_rate_is_refused_with_its_step(folder):
    error = glass(folder, "train", "copy", "train.schedule=mine.py:Trapezoid",
        "train.schedule.options.fall=-1.0", fails=2)  # fmt: skip
    assert "mine.py:Trapezoid: the share of step 0 is" in error
    error = glass(folder, "train", "copy", "train.schedule=mine.py:Palindromes", fails=2)
    assert "'Palindromes' object has no attribute 'share'" in error
    assert not (folder / "runs/copy").exists()


def test_a_position_of_ones_own_trains_counts_and_decodes(folder):
    glass(
        folder,
        "train",
        "lm",
        "task.path=text.txt",
        "task.tokenizer=characters",
        "task.length=16",
        "model.position=mine.py:Stripes",
        "model.position.options.reach=4.0",
        "train.steps=4",
        "train.batch_size=4",
        "--name",
        "stripes",
    )
    model = json.loads((folder / "runs/stripes/config.json").read_text())["model"]
    declared = {one["name"]: one["shape"] for one in model["position"]["parameters"]}
    assert declared == {"stripe": [2, 64], "slope": [1, 64]}
    assert "not run unless" in glass(folder, "generate", "stripes", "the", fails=2)
    words = ("generate", "stripes", "the ", "--own-code", "mine.py", "--json")
    cached = json.loads(glass(folder, *words, "--max-new", "8"))
    plain = json.loads(glass(folder, *words, "--max-new", "8", "--no-cache"))
    assert cached["tokens"] == plain["tokens"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("mine.py:Missing", "there is no class Missing in mine.py"),
        ("mine.py:Words", "mine.py:Words is no task"),
        ("nowhere.py:Task", "there is no file nowhere.py"),
        ("broken.py:Task", "broken.py:Task failed: SyntaxError"),
        ("no.such.module:Task", "there is no module no.such.module"),
    ],
)
def test_a_source_that_is_no_task_is_refused(folder, source, message):
    (folder / "broken.py").write_text("class Task(:\n")
    assert message in glass(folder, "train", source, fails=2)
