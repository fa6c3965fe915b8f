"""The README: short, in the field's words, and every block of it runs as it is printed."""

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib

import pytest

from glassformer.checks import catalogue
from tests.adapters import folders
from tests.command import glass
from tests.contracts.test_docs import BLOCK, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Blocks without a language: what one types into a shell, and what a program prints.
FENCES = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
PLAIN = [text for language, text in FENCES if not language]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
COMMIT = 40 * "1"

#: Written as on the right: the field's words, and sentences that have their nouns.
WORDS = {
    r"others' models|foreign models?|strangers?": "third-party models",
    r"asked|answered|wish(?:es)?|told": "requested; input, output; target; differ",
    r"silenced?": "ablate",
    r"by the clock|processor time": "wall-clock time, CPU time",
    r"in turns?|sides in turn": "interleaved",
    r"beside llama|held to|stands? beside": "compared with",
    r"guess(?:es|ing)?|read ahead": "speculative decoding, draft",
    r"in company": "batched, batch-invariant",
    r"by chance|drawn?\b": "sample",
    r"likeliest": "argmax, top-k, most probable",
    r"look(?:s|ed)? at|so many|go(?:es)? apart|turned|wholly": "attend to; X of; differ; rotated",
    r"gave way": "relaxed",
    r"recipes?": "preset",
    r"cells?": "configuration",
    r"planted|faults?": "injected bug",
    r"red|green": "fails, passes",
    r"not offered": "skipped",
    r"the door|the border|the spine|the house|rooms?": "loading; validation; core; layers",
    r"mended|anew|twins?": "fixed; again; copy",
    r"belief|shares?": "probability; attention weight",
    r"refused by name|by name": "raises an error that names X",
    r"places?": "position, index, slot, path",
    r"routines?": "kernel",
    r"exams?|exhibits?|museum": "task; bugs that shipped",
    r"others of its own|dear ones": "",
    r"laboratory|every claim": "say what it is",
}  # fmt: skip
#: Pages that hold to the words from the first line to the last.
PAGES = ("README.md", "docs/index.md", "docs/quickstart.md", "docs/comparison.md")


def prose(page: str) -> str:
    """A page without its code, its links' targets and its pictures' paths."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`]*`", "", re.sub(r"\]\([^)]*\)", "]", text))


@pytest.mark.parametrize("page", PAGES)
def test_the_words_are_those_of_the_field(page):
    text = prose(page)
    found = {
        match.group(): better
        for pattern, better in WORDS.items()
        for match in re.finditer(rf"\b(?:{pattern})\b", text, re.I)
    }
    assert not found


def test_a_word_of_the_list_is_noticed():
    text = "Faults are told apart by the clock."
    assert sum(bool(re.search(rf"\b(?:{each})\b", text, re.I)) for each in WORDS) == 3


def test_it_is_short_and_says_first_what_it_is():
    assert len(README.split()) <= 900
    first = README.split("\n\n")[1]
    assert re.match(r"\*\*glassformer\*\* is an? [\w ]*(library|program|package)", first)
    screen = README.splitlines()[:45]
    assert any(line.startswith("pip install ") for line in screen)
    assert any(re.search(r" bug +float32 ", line) for line in screen)
    assert README.count("](docs/images/") == 1
    assert "(docs/named.md)" in README


def test_the_line_that_installs_names_what_there_is():
    made, line = next(block for block in PLAIN if "pip install" in block).splitlines()
    assert made == "python3 -m venv .venv && . .venv/bin/activate"
    beside, what = shlex.split(line)[2:]
    other = tomllib.loads((ROOT / beside / "pyproject.toml").read_text(encoding="utf-8"))
    assert other["project"]["name"] == "glasscheck"
    folder, extras = re.fullmatch(r"(.*)\[(.*)\]", what).groups()
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    assert "glass" in project["project"]["scripts"]
    assert "glasscheck" in project["project"]["dependencies"]


def test_what_the_first_block_prints_is_what_is_shown():
    (block,) = BLOCK.findall(README)
    out = io.StringIO()
    names: dict[str, object] = {"__name__": "documentation"}
    with contextlib.redirect_stdout(out):
        exec(compile(block, "<README>", "exec"), names)
    printed = [without_numbers(line) for line in out.getvalue().splitlines()]
    shown = next(text for text in PLAIN if text.startswith("...")).splitlines()
    lines = [without_numbers(line) for line in shown if line != "..."]
    assert [line for line in lines if line not in printed] == []
    places = [printed.index(line) for line in lines]
    assert places == sorted(places)
    assert len({finding.name for finding in names["report"].findings}) <= 65  # as it says
    assert catalogue.SUBJECT_CHECKS


def without_numbers(line: str) -> str:
    """A line in which measured numbers, which differ between machines, are left out."""
    return re.sub(r"-?\d+\.\d+(e[-+]\d+)?", "#", line.strip())


#: What the commands are given besides, so that they take seconds: by their first words.
SHORTER = {
    "glass demo": ("--steps", "2"),
    "glass train": ("train.steps=2",),
    "glass sweep": ("train.steps=2", "--jobs", "1"),
    "glass explore": ("--port", "0", "--no-open"),
    "glass serve": ("--port", "0"),
}
SERVERS = ("explore", "serve")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model of one's own, and a Hub's cache that holds a tiny released model."""
    place = tmp_path_factory.mktemp("readme")
    (place / "mine.py").write_text(
        "import torch\n\n\nclass Model(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.embed, self.out = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)\n\n"
        "    def forward(self, tokens):\n        return self.out(self.embed(tokens))\n"
    )
    there = place / "cache" / f"models--{MODEL.replace('/', '--')}"
    folders.write_model(there / "snapshots" / COMMIT)
    (there / "refs").mkdir()
    (there / "refs" / "main").write_text(COMMIT)
    return place


def test_every_command_runs_as_it_is_printed(home):
    environment = {**os.environ, "HF_HUB_CACHE": str(home / "cache"), "HF_HUB_OFFLINE": "1"}
    lines = [line for block in PLAIN for line in block.splitlines() if line.startswith("glass ")]
    assert len(lines) >= 11
    for line in lines:
        words = shlex.split(line)[1:]
        words += SHORTER.get(f"glass {words[0]}", ())
        if words[0] in SERVERS:
            starts(words, home, environment)
            continue
        done = glass(*words, folder=home, environment=environment)
        assert done.returncode == 0, (line, done.stdout, done.stderr)


def end(process):
    """Press Ctrl-C, and again where the first fell into an import, whose lock swallows it."""
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
            return
    process.kill()
    raise AssertionError(f"{process.args} does not end")


def starts(words, home, environment):
    """A command that serves until it is ended: it prints an address."""
    command = [sys.executable, "-m", "glassformer", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=home, env=environment, **pipes) as process:
        try:
            said = []
            for text in process.stdout:
                said.append(text)
                if "http://127.0.0.1:" in text:
                    break
            else:
                raise AssertionError("".join(said))
        finally:
            end(process)
