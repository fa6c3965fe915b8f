"""Documentation runs: every python block of every page, and every link to a file."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
BLOCKS = [
    pytest.param(text, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    for number, text in enumerate(BLOCK.findall(page.read_text()))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "<documentation>", "exec"), {"__name__": "documentation"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_there_are_blocks():
    assert len(BLOCKS) >= 8
