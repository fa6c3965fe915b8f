"""The pages on parts of one's own: their files are written, and their commands run."""

import re
import shlex
from pathlib import Path

import pytest

from tests.own.test_commands import TEXT, glass

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("own-*.md"))
SOURCES = ROOT / "src" / "glassformer"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_the_page_run(page, tmp_path):
    text = page.read_text()
    (tmp_path / "text.txt").write_text(TEXT)
    files = re.findall(r"^```py\n# (\w+\.py)\n(.*?)^```", text, re.M | re.S)
    commands = [
        line.removeprefix("glass ")
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
        for line in block.splitlines()
    ]
    assert files
    assert len(commands) >= 3
    for name, code in files:
        (tmp_path / name).write_text(code)
    for command in commands:
        glass(tmp_path, *shlex.split(command))


def test_there_is_a_page_for_each_part():
    names = {"own-task", "own-tokenizer", "own-optimizer", "own-position"}
    assert {page.stem for page in PAGES} == names


@pytest.mark.parametrize(
    ("spec", "file"),
    [
        ("DigitsTask", "digits"),
        ("SequenceTask", "seq2seq"),
        ("FsmTask", "fsm"),
        ("TranslationTask", "seq2seq"),
    ],
)
def test_a_task_takes_three_files(spec, file):
    """What the page `adding a task` says: its spec, its examples, and its case."""
    word = re.compile(rf"\b{spec}\b")
    named = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if word.search(path.read_text(encoding="utf-8"))
    }
    assert named == {"spec/tasks.py", f"data/tasks/{file}.py", "data/build_task.py"}
    page = (ROOT / "docs" / "adding-a-task.md").read_text()
    assert all(f"`{name}`" in page for name in ("spec/tasks.py", "data/build_task.py"))
