"""The page Errors in a real browser: the matrix is Python's, a cell leads to its examples."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from glassformer.lab import api
from glassformer.lab.measure.evaluate import Evaluation, order
from glassformer.store.rundir import RunDirectory
from tests.browser.conftest import FORMS, Opener, Site


@pytest.fixture(scope="module")
def own(site: Site) -> Evaluation:
    """What Python says."""
    return api.evaluate(site.runs / "digits", split="test")


def measured(page: Page) -> None:
    """Wait until the model has answered."""
    page.wait_for_selector(".examples table, .confusion", timeout=60_000)


def wrong_cell(own: Evaluation) -> tuple[str, str, int]:
    """A cell off the diagonal with something in it."""
    table = own.confusion["operation"]
    return next(
        (asked, answered, count)
        for asked, row in table.items()
        for answered, count in row.items()
        if asked != answered and count > 1
    )


@pytest.mark.parametrize(("width", "theme"), FORMS)
def test_it_is_accessible(
    open_page: Opener, axe: Callable, shoot: Callable, own: Evaluation, width: int, theme: str
) -> None:
    asked, answered, _ = wrong_cell(own)
    route = f"errors?run=digits&target={asked}&predicted={answered}"
    page = open_page(route, width=width, theme=theme)
    measured(page)
    page.get_by_text(f"Target {asked}, predicted {answered}").first.wait_for()
    axe(page)
    shoot(page, f"errors-{width}-{theme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_every_cell_is_pythons(open_page: Opener, own: Evaluation) -> None:
    page = open_page("errors?run=digits&split=test")
    measured(page)
    for group, table in own.confusion.items():
        page.get_by_label("table by").select_option(group)
        expect(page.locator(".confusion caption")).to_contain_text(f"By {group}")
        rows, columns = order(table)
        wanted = []
        for row in rows:
            total = sum(table[row].values())
            counts = [table[row].get(column, 0) for column in columns]
            wanted.append(
                [f"{count:,}|{100 * count / total:.1f} %" if count else "·" for count in counts]
            )
        found = page.evaluate(
            "[...document.querySelectorAll('.confusion tbody tr')].map(row => "
            "[...row.querySelectorAll('.cell')].map(cell => "
            "[...cell.children].map(part => part.textContent).join('|')))"
        )
        assert found == wanted
    facts = page.locator(".facts")
    expect(facts).to_contain_text(f"{100 * own.accuracy:.2f} %")
    expect(facts).to_contain_text(f"loss{own.loss:.3f} nats")


def test_a_cell_opens_its_examples_and_back_closes_them(
    open_page: Opener, site: Site, own: Evaluation
) -> None:
    asked, answered, count = wrong_cell(own)
    _, task = api.opened(site.runs / "digits")
    rows = [i for i, pair in enumerate(own.pairs["operation"]) if pair == (asked, answered)]
    page = open_page("errors?run=digits")
    measured(page)
    expect(page.locator("#examples-title")).to_have_text(f"Wrong: the first 20 of {own.wrong}")
    page.get_by_role("button", name=f"target {asked}, predicted {answered}:").click()
    expect(page.locator("#examples-title")).to_have_text(
        f"Target {asked}, predicted {answered}: {count}"
    )
    texts = page.locator(".examples tbody .text").all_inner_texts()
    assert texts == [task.describe("test", row) for row in rows]
    page.go_back()
    expect(page.locator("#examples-title")).to_have_text(f"Wrong: the first 20 of {own.wrong}")
    page.go_forward()
    expect(page.locator("#examples-title")).to_contain_text(f"predicted {answered}")
    page.get_by_label(f"Inspect example {rows[0]}", exact=True).click()
    page.wait_for_url(re.compile(rf"#/inspect\?run=digits&split=test&row={rows[0]}"))
    page.wait_for_load_state("networkidle")


def test_a_link_restores_the_view(open_page: Opener, own: Evaluation) -> None:
    right, said = next(pair for pair in own.pairs["answer"] if pair[0] != pair[1])
    page = open_page(f"errors?run=digits&split=test&by=answer&target={right}&predicted={said}")
    measured(page)
    expect(page.get_by_label("table by")).to_have_value("answer")
    expect(page.locator('.cell[aria-pressed="true"]')).to_have_count(1)
    expect(page.locator("#examples-title")).to_contain_text(f"Target {right}, predicted {said}")
    for answer in page.locator(".examples tbody strong").all_inner_texts():
        assert answer == said


def test_the_matrix_by_keyboard(open_page: Opener) -> None:
    page = open_page("errors?run=digits")
    measured(page)
    cell = page.locator(".confusion .cell:not([disabled])").first
    cell.focus()
    page.keyboard.press("ArrowRight")
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert focused.startswith("target")
    page.keyboard.press("Enter")
    expect(page.locator('.cell[aria-pressed="true"]')).to_have_attribute("aria-label", focused)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == focused
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") != focused


def test_another_checkpoint_and_split(open_page: Opener, site: Site) -> None:
    page = open_page("errors?run=digits")
    measured(page)
    step = RunDirectory(site.runs / "digits").steps()[0]
    page.get_by_label("checkpoint").select_option(str(step))
    expect(page.locator(".facts")).to_contain_text(f"step{step}")
    page.get_by_label("split").select_option("val")
    own = api.evaluate(site.runs / f"digits@{step}", split="val")
    expect(page.locator(".facts")).to_contain_text(f"loss{own.loss:.3f} nats")
    page.locator('[data-copy="cli"]').click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == f"glass evaluate digits@{step} --split val"


def test_a_wrong_answer_stands_beside_the_right_one(open_page: Opener, own: Evaluation) -> None:
    page = open_page("errors?run=digits&split=test")
    measured(page)
    heads = page.locator(".examples thead th").all_inner_texts()
    assert heads[:4] == ["row", "input", "right answer", "predicted"]
    rows = page.locator(".examples tbody tr")
    expect(rows).to_have_count(len(own.errors))
    for at, error in enumerate(own.errors[:5]):
        expect(rows.nth(at).locator(".answer")).to_have_text(" ".join(error["target"]))
        expect(rows.nth(at).locator(".said .bad")).to_have_text(error["predicted"])


def test_a_task_without_a_matrix_shows_where_it_goes_wrong(open_page: Opener, site: Site) -> None:
    own = api.evaluate(site.runs / "reverse", split="test")
    page = open_page("errors?run=reverse")
    measured(page)
    expect(page.locator("#matrix-title")).to_have_text("Where it goes wrong")
    places = page.locator(".places tbody tr")
    for at, one in enumerate(own.tokens["positions"]):
        expect(places.nth(at)).to_contain_text(f"{100 * one['accuracy']:.2f} %")
    common = page.locator(".places > :last-child tbody tr").first.locator("code")
    first = own.tokens["confused"][0]
    expect(common).to_have_text([first["target"], first["predicted"]])
    said = own.errors[0]
    expect(page.locator(".examples .said").first).to_have_text(" ".join(said["predicted"]))
    for label, share in own.by["length"].items():
        row = page.locator("section[aria-labelledby=groups-title] tbody tr")
        row = row.filter(has=page.get_by_role("rowheader", name=label, exact=True))
        expect(row).to_contain_text(f"{100 * share:.2f} %")
