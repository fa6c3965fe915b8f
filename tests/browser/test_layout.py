"""No text lies on another and none is cut off: on every page, after every other one was visited.

`python -m pages screens` walks every pair of pages and keeps a picture of each view.
"""

import itertools
from collections.abc import Iterator

import pytest
from pages.screens import COUNTED, FLAWS, PAGES, ROUTES, every_pair, walk
from playwright.sync_api import Browser, Page

from tests.browser.conftest import Site, Watch

FORWARD, EVERY = list(PAGES), list(ROUTES)
#: What makes text unreadable, and the words with which the walk reports it.
FAULTS = {
    ".page.errors h2 { margin-bottom: -24px; }": "lies on",
    ".page.errors .facts { height: 4px; overflow: hidden; }": "cut off",
    ".page.errors h2 { margin-left: 3000px; }": "outside the window",
}


@pytest.fixture
def tab(site: Site, browser: Browser, watch: Watch) -> Iterator[Page]:
    """One tab for a whole walk: its style sheets accumulate."""
    page = browser.new_page(reduced_motion="reduce")
    page.add_init_script(COUNTED)
    watch.follow(page)
    page.goto(site.at(""))
    page.wait_for_selector(".page")
    yield page
    page.close()
    assert not watch.faults, "\n".join(watch.faults)


@pytest.mark.parametrize("order", [FORWARD, EVERY[::-1]], ids=["forward", "backward"])
def test_no_text_lies_on_another_and_none_is_cut_off(tab: Page, order: list[str]) -> None:
    found = walk(tab, order)
    assert not found, "\n".join(f"{view}: {flaw}" for view, all_ in found.items() for flaw in all_)
    sheets = tab.evaluate("[...document.styleSheets].map(sheet => sheet.href.split('/').at(-1))")
    assert set(sheets) >= {f"{name}.css" for name in PAGES}, "all of them apply to all pages"


def test_the_walk_finds_what_is_wrong(tab: Page) -> None:
    assert not walk(tab, ["errors"])
    for rule, words in FAULTS.items():
        tab.evaluate(
            "rule => { const sheet = new CSSStyleSheet(); sheet.replaceSync(rule);"
            " document.adoptedStyleSheets = [sheet]; }",
            rule,
        )
        assert any(words in flaw for flaw in tab.evaluate(FLAWS)), rule


def test_a_walk_of_every_pair_has_every_pair_once() -> None:
    trail = every_pair(FORWARD)
    pairs = list(itertools.pairwise(trail))
    assert len(pairs) == len(set(pairs)) == len(FORWARD) * (len(FORWARD) - 1)
