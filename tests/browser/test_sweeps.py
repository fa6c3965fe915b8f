"""The page Sweeps in a browser: the ranking, from a cell to its run, a sweep that runs."""

import json
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from glassformer.store.rundir import RunDirectory
from tests.browser.conftest import FORMS, Opener, Site


def drawn(page: Page) -> None:
    """Wait for the ranking and the pictures below it."""
    page.wait_for_selector(".ranking table")
    page.wait_for_selector("section[aria-label=Curves] svg")


@pytest.mark.parametrize(("width", "theme"), FORMS)
def test_it_is_accessible(
    open_page: Opener, axe: Callable, shoot: Callable, width: int, theme: str
) -> None:
    page = open_page("sweeps", width=width, theme=theme)
    drawn(page)
    axe(page)
    shoot(page, f"sweeps-{width}-{theme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_from_the_ranking_to_a_run_and_its_inside(open_page: Opener) -> None:
    page = open_page("sweeps?sweep=rates")
    drawn(page)
    expect(page.locator(".ranking tbody tr")).to_have_count(4)
    expect(page.locator(".progress")).to_contain_text("8 of 8 runs done")
    expect(page.locator(".ranking")).to_contain_text("seeds")
    page.locator('[data-copy="cli"]').click()
    expect(page.locator("#toast")).to_contain_text("glass sweep digits train.lr=1e-3,1e-2")
    page.locator('[data-copy="python"]').click()
    expect(page.locator("#toast")).to_contain_text("gf.sweep('digits'")
    name = page.locator(".ranking tbody tr").first.locator("th").inner_text()
    page.get_by_role("link", name=f"Inspect {name}, seed 1").click()
    page.wait_for_selector(".page.inspect .ranking table")
    assert "run=rates.c00" in page.url
    page.locator('[data-copy="cli"]').click()
    expect(page.locator("#toast")).to_contain_text("sweeps/rates/runs/c00")


def test_a_sweep_that_runs_is_looked_at_again(open_page: Opener, site: Site) -> None:
    folder = site.runs.parent / "sweeps" / "rates"
    file = folder / "results.jsonl"
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    try:
        with RunDirectory(folder).locked():
            file.write_text("".join(lines[:5]))
            (folder / "progress.json").write_text(json.dumps({"running": ["c003-s0"], "left": 75}))
            page = open_page("sweeps?sweep=rates")
            expect(page.locator(".progress")).to_contain_text("5 of 8 runs done · 1 running")
            file.write_text("".join(lines[:7]))
            expect(page.locator(".progress")).to_contain_text("7 of 8 runs done")
    finally:
        file.write_text(whole)
    expect(page.locator(".progress")).to_contain_text("8 of 8 runs done")


def test_without_a_sweep_it_says_how_to_make_one(open_page: Opener, site: Site) -> None:
    folder = site.runs.parent / "sweeps"
    beside = folder.with_name("elsewhere")
    folder.rename(beside)
    try:
        page = open_page("sweeps")
        expect(page.locator(".empty")).to_contain_text("glass sweep digits")
    finally:
        beside.rename(folder)
