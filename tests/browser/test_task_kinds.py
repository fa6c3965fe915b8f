"""What the pages show of texts and random machines, and of classes that are not tokens.

Their examples are predictions that are far off, not mistakes; a class that is no token is called by
its number.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.extract import QUICK
from playwright.sync_api import Page, expect

import glassformer as gf
from glassformer.lab import api
from tests.browser.conftest import Opener, Site, Tabs, Watch, serving
from tests.own.test_tasks import COUNTED

ROWS = ".examples tbody tr"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server over a run of a random machine, and one whose classes are not its tokens."""
    place = tmp_path_factory.mktemp("kinds")
    ((name, overrides),) = QUICK.values()
    small = ("model.d_model=16", "train.steps=8")
    gf.train(name, name="machine", runs=place / "runs", overrides=[*overrides, *small])
    (place / "sums.py").write_text(COUNTED.replace("0123456", "abcdefg"), encoding="utf-8")
    gf.train(
        f"{place / 'sums.py'}:Sums",
        name="sums",
        runs=place / "runs",
        overrides=["train.schedule.warmup=1"],
        steps=2,
    )
    with serving(place / "runs") as site:
        yield site


@pytest.fixture
def tab(house: Site, tabs: Tabs) -> Iterator[Page]:
    """A tab on that server."""
    watch = Watch(origin=house.url)
    page = tabs.take("light")
    page.set_viewport_size({"width": 1320, "height": 900})
    watch.follow(page)
    yield page
    watch.leave(page)
    tabs.give_back(page, "light")
    assert not watch.faults, "\n".join(watch.faults)


def heads(page: Page) -> list[str]:
    return page.locator(".examples thead th").all_inner_texts()[1:-1]


def test_a_text_lists_what_it_expected_least(open_page: Opener, site: Site) -> None:
    own = api.evaluate(site.runs / "text")
    page = open_page("errors?run=text")
    expect(page.locator("#examples-title")).to_have_text("Least expected")
    expect(page.locator("#matrix-title")).to_have_text("By position")
    assert heads(page) == ["text before", "followed by", "most probable", "p of what followed"]
    expect(page.locator(ROWS)).to_have_count(len(own.errors))
    facts = page.locator(".facts")
    expect(facts).to_contain_text(f"loss{own.loss:.3f} nats")
    expect(facts).to_contain_text("perplexity")
    for word in ("exact match", "wrong"):
        expect(facts).not_to_contain_text(word)
    link = page.locator(ROWS).first.get_by_role("link")
    expect(link).to_have_attribute(
        "href", f"#/inspect?run=text&split=val&row={own.errors[0]['row']}"
    )


def test_a_random_machine_is_held_to_the_true_distribution(tab: Page, house: Site) -> None:
    own = api.evaluate(Path(house.runs) / "machine")
    tab.goto(house.at("errors?run=machine"))
    expect(tab.locator("#examples-title")).to_have_text("Farthest from the truth")
    assert heads(tab) == ["input", "the truth", "the model", "too many"]
    expect(tab.locator(ROWS)).to_have_count(len(own.errors))
    cells = tab.locator(ROWS).first.locator("td, th")
    for column, name in ((2, "truth"), (3, "model")):
        for share in own.errors[0][name].values():
            expect(cells.nth(column)).to_contain_text(f"{100 * share:.1f} %")
    facts = tab.locator(".facts")
    expect(facts).to_contain_text("above the machine's own entropy")
    expect(facts).to_contain_text(f"in {own.wrong:,} strings")
    expect(facts).not_to_contain_text("exact match")


def test_a_class_that_is_no_token_is_called_by_its_number(tab: Page, house: Site) -> None:
    task = api.opened(house.runs / "sums")[1]
    batch = task.batch("val", [4])
    right = int(batch.targets["answer"][0])
    tab.goto(house.at("inspect?run=sums&split=val&row=4"))
    expect(tab.locator("glass-bars .word.target")).to_have_text(f"answer {right}")
    expect(tab.locator("glass-bars tbody tr")).to_have_count(3)
    expect(tab.get_by_label("Target (optional)")).to_have_value(str(right))
