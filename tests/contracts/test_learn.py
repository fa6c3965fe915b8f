"""The learning path: quotes are the source, faults are named, every chapter has all its parts."""

import ast
import json
import re
import struct
import subprocess
import sys
import unittest.mock
import xml.etree.ElementTree as ElementTree
from contextlib import nullcontext

import nbformat
import numpy as np
import pytest
from pages import animation, notebooks
from pages.figures import FIGURES, FOLDER, PICTURES, draw
from pages.quotes import PAGES, QUOTE, BadQuote, excerpt, refresh, refreshed, source_of

from glassformer.checks.catalogue import PART_CHECKS, SUBJECT_CHECKS

LEARN = PAGES / "learn"
CHAPTERS = sorted(LEARN.glob("0*.md"))
EVERY = sorted(PAGES.rglob("*.md"))
PARTS = ("The idea", "The equation", "In code", "Run it", "Break it", "Exercises")
CHECKS = {check.name for check in (*PART_CHECKS, *SUBJECT_CHECKS)}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


def planting(page):
    """The blocks of a page that plant a fault."""
    return [block for block in BLOCK.findall(page.read_text()) if "patch.object(" in block]


def run(block):
    exec(compile(block, "<documentation>", "exec"), {"__name__": "documentation"})


# --- quotes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.name)
def test_every_quote_is_its_source(page):
    text = page.read_text()
    assert refreshed(text) == text, "run: python -m pages quotes"


def test_a_changed_line_is_noticed():
    page = (LEARN / "01-attention.md").read_text()
    assert page.count("dx *= cache") == 1
    assert refreshed(page.replace("dx *= cache", "dx *= 2 * cache")) == page


def test_only_a_page_that_changed_is_written(tmp_path):
    for name in ("01-attention.md", "02-heads.md"):
        (tmp_path / name).write_text((LEARN / name).read_text())
    stale = tmp_path / "02-heads.md"
    stale.write_text(stale.read_text().replace("flatten(2)", "flatten(3)"))
    assert refresh(tmp_path) == [stale]
    assert stale.read_text() == (LEARN / "02-heads.md").read_text()
    assert refresh(tmp_path) == []


def test_functions_methods_and_constants_can_be_quoted():
    assert source_of("glassformer/byhand/attention.py", "CALM") == "CALM = 60.0\n"
    assert source_of("glassformer/nn/norm.py", "LayerNorm.extra_repr").startswith("def extra_repr")
    assert source_of("glassformer/spec/checks.py", "spec").startswith("@")  # its decorators too


def test_an_excerpt_is_from_one_line_to_the_next():
    assert excerpt("a\n  b\n  c\nd\n", "b", "c") == "b\nc\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "<!-- source: glassformer/nn/nothing.py x -->\n```py\n```",
            "no glassformer/nn/nothing.py",
        ),
        ("<!-- source: glassformer/nn/norm.py Nothing -->\n```py\n```", "has no Nothing"),
        ("<!-- source: glassformer/nn/norm.py LayerNorm -->\ntext", "not a quote"),
        (
            '<!-- source: glassformer/nn/norm.py LayerNorm from "self" to "x" -->\n```py\n```',
            "lines hold 'self'",
        ),
        (
            '<!-- source: glassformer/nn/norm.py LayerNorm from "class" to "xyz" -->\n```py\n```',
            "no line from there on",
        ),
    ],
)
def test_a_quote_of_nothing_is_refused(text, what):
    with pytest.raises(BadQuote, match=re.escape(what)):
        refreshed(text)


# --- chapters -------------------------------------------------------------------------------------


def test_there_is_a_chapter_for_each_of_the_eight_outcomes_after_the_whole_model():
    index = (LEARN / "index.md").read_text()
    assert len(CHAPTERS) == 1 + 8
    listed = re.findall(r"^\| \d \| \[[^]]+\]\((\d\d-\w+\.md)\)", index, re.M)
    assert listed == [page.name for page in CHAPTERS]


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.name)
def test_a_chapter_has_all_its_parts(page):
    text = page.read_text()
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert [heading for heading in headings if heading in PARTS] == list(PARTS)
    quoted = {found["file"].split("/")[1] for found in QUOTE.finditer(text)}
    assert "byhand" in quoted and len(quoted) > 1, quoted
    assert re.findall(r"!\[[^]]+\]\(\.\./images/learn/([\w-]+)\.(?:png|svg)\)", text), "no figure"
    answers = re.findall(r"<details.*?</details>", text, re.S)
    assert len(answers) >= 3
    assert all(re.search(r"^ *assert ", "".join(BLOCK.findall(answer)), re.M) for answer in answers)


@pytest.mark.parametrize("page", [*CHAPTERS, LEARN / "index.md"], ids=lambda page: page.name)
def test_the_check_is_red_because_of_the_planted_fault(page, monkeypatch):
    """That it is red with the fault is what the block asserts; without, the assertion must fail."""
    (block,) = planting(page)
    constants = (node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Constant))
    assert {node.value for node in constants} & CHECKS, "no check is named"
    monkeypatch.setattr(unittest.mock.patch, "object", lambda *_: nullcontext())
    with pytest.raises(AssertionError):
        run(block)


# --- the first day --------------------------------------------------------------------------------


def test_the_first_day_prints_a_loss_that_falls_and_loads_no_torch():
    block = BLOCK.findall((LEARN / "first-day.md").read_text())[0]
    assert "range(100)" in block
    block += "\nimport sys\nassert 'torch' not in sys.modules\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


# --- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_there_small_and_shown_once(name):
    picture = (FOLDER / f"{name}.png").read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert picture[:4] == b"\x89PNG" and width > 300 and height > 150
    assert len(picture) < 60_000
    assert b"Software" not in picture
    shown = [page for page in CHAPTERS if f"images/learn/{name}.png" in page.read_text()]
    assert len(shown) == 1


def test_a_figure_drawn_twice_has_the_same_bytes(tmp_path):
    for name in ("attention", "masks"):
        first, second = (draw(name, folder=tmp_path / place).read_bytes() for place in "ab")
        assert first == second


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_the_spec_draws(name):
    assert (FOLDER / f"{name}.svg").read_text("utf-8") == PICTURES[name]() + "\n"


def test_the_moving_picture_is_small_moves_and_has_no_script():
    film = animation.PATH.read_text("utf-8")
    assert len(film.encode()) < 500_000
    assert "@keyframes" in film and "prefers-reduced-motion" in film and "<script" not in film
    frames = [animation.Frame(step, 1.0, ("1",), np.eye(2)) for step in (1, 2)]
    drawn = animation.picture(animation.Film(("1", "EOS"), ("1", "EOS"), tuple(frames), (2.0, 1.0)))
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


# --- notebooks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", notebooks.chapters(), ids=lambda page: page.name)
def test_a_notebook_is_its_chapter(page):
    written = (notebooks.FOLDER / f"{page.stem}.ipynb").read_text("utf-8")
    assert written == notebooks.notebook(page), "run: python -m pages notebooks"
    found = nbformat.reads(written, as_version=4)
    nbformat.validate(found)
    code = ["".join(cell.source) for cell in found.cells if cell.cell_type == "code"]
    assert len(code) == len(BLOCK.findall(page.read_text()))
    for cell in code:
        compile(cell, page.name, "exec")


def test_a_notebook_is_executed_as_a_kernel_does(tmp_path):
    done = notebooks.execute(notebooks.FOLDER / "00-model.ipynb")
    assert (done.failure, done.shown) == ("", 2)
    cells = [{"cell_type": "code", "source": ["x = 1\n"]}]
    for source, reason in (("x / 0", "cell 2 of 2"), ("display(x)", "int draws nothing")):
        book = tmp_path / "broken.ipynb"
        book.write_text(json.dumps({"cells": [*cells, {"cell_type": "code", "source": [source]}]}))
        assert reason in notebooks.execute(book).failure


def test_a_picture_that_a_chapter_prints_is_drawn_in_its_notebook():
    text = notebooks.notebook(LEARN / "00-model.md")
    assert "display(gf.diagram(spec))" in text and "display(seen.token_path(8))" in text
