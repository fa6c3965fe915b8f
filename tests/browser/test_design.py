"""The page Design in Chromium: sliders ask, Python solves, and its numbers stand on the page."""

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from glassformer.budget.answer import Answer
from glassformer.budget.design import EXPANSIONS, RATIOS
from glassformer.budget.question import Budget
from glassformer.costs.parameter_table import allocation_lines
from glassformer.lab.budget_report import design
from glassformer.spec.options import options_of
from glassformer.spec.units import format_bytes
from tests.browser.conftest import FORMS, Opener, Watch

READY = ".design[data-ready] glass-landscape[data-ready]"
STATES = {
    "design": "design",
    "design-odd": "design?vocab=4000&embedding_ratio=0.6&tied=0&max_layers=2",
    "design-none": "design?params=10000",
}


def solved(page: Page) -> None:
    """Wait for the answer to what the sliders ask."""
    page.wait_for_selector(".design[data-ready]")
    page.wait_for_timeout(60)  # two frames: a question may just be on its way
    page.wait_for_selector(".design[data-ready]")


def wanted(**settings: Any) -> Answer:
    """Python's own answer."""
    params, vocab = settings.pop("params", 10_000_000), settings.pop("vocab", 16_000)
    return design(params, vocab, **settings)


def holds(page: Page, answer: Answer) -> None:
    """Verdict, table, alternatives and costs are these."""
    best = answer.best
    expect(page.locator("#verdict")).to_contain_text(f"{best.params:,} parameters ({best.miss})")
    expect(page.locator("#verdict")).to_contain_text(f"d_model {best.sizes.d_model} ·")
    expect(page.locator("#verdict")).to_contain_text(f"{best.sizes.n_layers} layers")
    lines = allocation_lines(answer.spec)
    rows = page.locator("#allocation tbody tr, #allocation tfoot tr")
    expect(rows).to_have_count(len(lines))
    for row, line in zip(rows.all(), lines, strict=True):
        assert row.locator("th").inner_text() == line.name
        numbers = row.locator("td.n").all_inner_texts()
        assert numbers == [f"{line.parameters:,}", f"{100 * line.share:.2f} %"]
    told = page.locator("#alternatives tbody tr").all()
    for row, one in zip(told, (best, *answer.alternatives), strict=True):
        numbers = row.locator("td.n").all_inner_texts()
        assert numbers[0] == f"{one.params:,}" and numbers[2] == str(one.sizes.d_model)
        assert numbers[5] == f"{100 * one.embedding_ratio:.2f} %"
    weights = page.locator("#costs tr", has_text="weights in float32")
    assert weights.locator("td").first.inner_text() == format_bytes(4 * best.params)


@pytest.mark.parametrize(("width", "theme"), FORMS)
@pytest.mark.parametrize("name", STATES)
def test_every_theme_and_width(
    open_page: Opener, axe: Any, shoot: Any, name: str, width: int, theme: str
) -> None:
    page = open_page(STATES[name], width=width, theme=theme)
    page.wait_for_selector(READY if name != "design-none" else ".design[data-ready]")
    axe(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shoot(page, f"{name}-{width}-{theme}")


def test_the_numbers_are_pythons(open_page: Opener) -> None:
    page = open_page("design")
    solved(page)
    holds(page, wanted())
    page.get_by_role("button", name="Embedding ratio 45 %").click()
    page.get_by_role("button", name="GLU expansion 4.0").click()
    page.locator('[name="params-exact"]').fill("5M")
    page.locator('[name="params-exact"]').press("Enter")
    page.get_by_label("tied: the head is the token embedding").uncheck()
    solved(page)
    expect(page.locator("#verdict")).to_contain_text("embeddings 4")
    expect(page).to_have_url(re.compile(r"params=5M.*tied=0"))
    holds(page, wanted(params="5M", embedding_ratio=0.45, glu_expansion=4, tied=False))
    gave = wanted(params="5M", embedding_ratio=0.45, glu_expansion=4, tied=False).gave_way
    assert page.locator("#gave-way li").all_inner_texts() == list(gave)


def test_a_slider_by_keyboard_and_the_way_back(open_page: Opener) -> None:
    page = open_page("design")
    solved(page)
    first = page.locator("#verdict").inner_text()
    slider = page.locator('input[type="range"][name="embedding_ratio"]')
    slider.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    expect(slider).to_have_attribute("aria-valuetext", "37.0 %")
    expect(page.locator('[name="embedding_ratio-exact"]')).to_have_value("37.0 %")
    solved(page)
    holds(page, wanted(embedding_ratio=0.37))
    for _ in range(4):
        page.go_back()
    expect(page.locator("#verdict")).to_have_text(first)


def test_a_drag_asks_seldom_and_ends_with_its_last_value(open_page: Opener, watch: Watch) -> None:
    page = open_page("design")
    page.wait_for_selector(READY)
    before = sum(path.startswith("/api/design?") for path in watch.paths())
    page.evaluate(
        """async () => {
          const slider = document.querySelector('input[type=range][name=params]');
          for (let i = 0; i < 120; i += 1) {
            slider.value = 300 + 3 * i;
            slider.dispatchEvent(new Event('input', { bubbles: true }));
            if (i % 10 === 9) await new Promise(requestAnimationFrame);
          }
          slider.dispatchEvent(new Event('change', { bubbles: true }));
        }"""
    )
    last = float(f"{10_000 * 100_000 ** (657 / 1000):.3g}")
    expect(page.locator("#verdict")).to_contain_text(f"{wanted(params=last).best.params:,}")
    asked = sum(path.startswith("/api/design?") for path in watch.paths()) - before
    assert asked <= 14  # a frame each at most: 120 moves came in 12 frames


def test_the_landscape_is_a_grid_to_choose_from(open_page: Opener) -> None:
    page = open_page("design?embedding_ratio=0.35")
    page.wait_for_selector(READY)
    cell = page.locator("table.landscape tbody tr").nth(2).locator("button").nth(4)
    assert (RATIOS[4], EXPANSIONS[2]) == (0.35, 2.66)
    expect(cell).to_have_attribute("aria-pressed", "true")
    best = wanted(embedding_ratio=0.35).best
    assert cell.inner_text() == f"{best.sizes.n_layers}\N{MULTIPLICATION SIGN}{best.sizes.d_model}"
    cell.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    solved(page)
    holds(page, wanted(embedding_ratio=RATIOS[5], glu_expansion=EXPANSIONS[3]))
    expect(page).to_have_url(re.compile(r"embedding_ratio=0.4&glu_expansion=3"))


def test_every_option_of_a_budget_has_a_control(open_page: Opener) -> None:
    page = open_page("design")
    solved(page)
    page.locator("summary", has_text="More options").click()
    for option in options_of(Budget):
        if not option.name.startswith("exact_"):  # chosen together, under "keep"
            assert page.locator(f'.controls [name="{option.name}"]').count() == 1, option.name
    page.locator('.controls [name="position"]').select_option("rotary")
    page.locator('.controls [name="max_layers"]').fill("6")
    page.locator('.controls [name="max_layers"]').press("Enter")
    solved(page)
    expect(page).to_have_url(re.compile(r"position=rotary&max_layers=6"))
    holds(page, wanted(position="rotary", max_layers=6))
    page.get_by_role("button", name="Drop max layers 6").click()
    solved(page)
    holds(page, wanted(position="rotary"))


def test_without_a_design_the_changes_are_buttons(open_page: Opener) -> None:
    page = open_page("design?params=10000")
    expect(page.locator("#why")).to_contain_text("16,000 tokens at the narrowest width allowed")
    page.locator(".changes button", has_text="params").click()
    solved(page)
    expect(page.locator("#verdict")).to_contain_text("✓")
    page.go_back()
    expect(page.locator("#why")).to_be_visible()


def test_bad_values_in_a_link_are_told(open_page: Opener, watch: Watch) -> None:
    watch.expected.add(400)
    page = open_page("design?params=%3Cimg+src%3Dx%3E&heads=8")
    expect(page.locator(".found")).to_contain_text("is not a number")
    assert page.locator(".found img").count() == 0


def test_copies(open_page: Opener) -> None:
    page = open_page("design?embedding_ratio=0.25&tied=0")
    solved(page)
    expect(page.locator("#verdict")).to_contain_text("✓")
    for kind, words in (
        ("cli", "glass design --params 10000000 --vocab 16000 --embedding-ratio 0.25"),
        ("python", "gf.design(10_000_000, 16_000, embedding_ratio=0.25"),
    ):
        page.locator(f'[data-copy="{kind}"]').click()
        page.wait_for_function(
            "w => navigator.clipboard.readText().then(t => t.includes(w))", arg=words
        )
    page.locator("#config").click()
    page.wait_for_function("navigator.clipboard.readText().then(t => t.includes('[model]'))")
