"""The page Quantize in Chromium: three precisions on one text, each number Python's own."""

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import glassformer as gf
from glassformer.lab.measure import precision
from glassformer.lab.measure.precision import Prompted, in_precisions, prompted
from tests.browser.conftest import FORMS, Opener, Site, Watch

TEXT = "the glass is clear"
LINK = f"quantize?run=text&text={TEXT.replace(' ', '+')}"
STATES = {
    "quantize": LINK,
    "quantize-answer": "quantize?run=digits&text=SECOND+7+3+9",
    "quantize-reverse": "quantize?run=reverse&text=3+1+2",
}


@pytest.fixture(autouse=True)
def timed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are of two rounds instead of five: what the page shows is the subject."""
    monkeypatch.setattr(precision, "ROUNDS", 2)


def measured(page: Page) -> None:
    """Compared, and the speed measured too."""
    page.wait_for_selector(".quantize[data-ready] #speed[data-ready]")


def own(site: Site) -> Prompted:
    """Python's comparison."""
    model = gf.load(site.runs / "text")
    return prompted(model, in_precisions(model), TEXT)


def short(value: float) -> str:
    """Three figures, as the page writes them."""
    if value == 0:
        return "0"
    if value < 1e-3:
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(power)}"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


@pytest.mark.parametrize(("width", "theme"), FORMS)
@pytest.mark.parametrize("name", STATES)
def test_every_theme_and_width(
    open_page: Opener, axe: Any, shoot: Any, name: str, width: int, theme: str
) -> None:
    page = open_page(STATES[name], width=width, theme=theme)
    measured(page)
    axe(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shoot(page, f"{name}-{width}-{theme}")


def test_the_numbers_are_pythons(open_page: Opener, site: Site) -> None:
    page = open_page(LINK + "&pos=5")
    measured(page)
    found = own(site)
    for name, one in found.against.items():
        mean = sum(one.there) / len(one.there)
        expect(page.locator("#verdict")).to_contain_text(
            f"{name} KL {short(mean)} nats a position, worst {short(max(one.there))}"
        )
    told = ", ".join(f"{name} {short(one.there[5])} nats" for name, one in found.against.items())
    expect(page.locator("#told")).to_contain_text(told)
    rows = page.locator("#answers tbody tr").all()
    for row, (_, shares) in zip(rows, found.answers[5].items(), strict=True):
        shown = [f"{share:.4f}" if share >= 5e-5 else short(share) for share in shares]
        assert row.locator("td.n").all_inner_texts() == shown
    sizes = page.locator("#sizes tbody tr").all()
    for row, one in zip(sizes, found.precisions, strict=True):
        assert row.locator("td").first.inner_text().startswith(f"{one.file_bytes:,} B")
    layers = page.locator("#layers tbody tr").all()
    errors = [one.layers for one in found.against.values()]
    for row, path in zip(layers, errors[0], strict=True):
        assert row.locator("th").inner_text() == path
        shown = row.locator("td.n").all_inner_texts()
        assert shown == [f"{100 * each[path]:.2f} %" for each in errors]
    page.locator('[name="way"]').select_option("back")
    back = ", ".join(f"{name} {short(one.back[5])} nats" for name, one in found.against.items())
    expect(page.locator("#told")).to_contain_text(back)


def test_by_keyboard_and_back(open_page: Opener, site: Site) -> None:
    page = open_page(LINK + "&pos=2")
    measured(page)
    page.locator(".words button[aria-pressed=true]").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".words button").nth(3)).to_be_focused()
    expect(page.locator("#next-title")).to_contain_text("at position 3")
    expect(page).to_have_url(re.compile("pos=3"))
    page.locator("h1").click()
    page.keyboard.press("w")
    found = own(site)
    far = [max(at) for at in zip(*(one.there for one in found.against.values()), strict=True)]
    expect(page.locator("#next-title")).to_contain_text(f"at position {far.index(max(far))},")
    page.locator('[name="prompt"]').fill("so it goes")
    page.locator('[name="prompt"]').press("Enter")
    expect(page.locator(".words button")).to_have_count(len("so it goes"))
    page.go_back()
    expect(page.locator(".words button")).to_have_count(len(TEXT))
    expect(page.locator('[name="prompt"]')).to_have_value(TEXT)


def test_the_worst_lead_to_inspect(open_page: Opener) -> None:
    page = open_page(LINK)
    measured(page)
    link = page.locator(".worst-list a").last
    assert "with=text%40best%3Afp8" in (link.get_attribute("href") or "")
    link.click()
    page.wait_for_selector(".inspect[data-ready]:not(.busy)")
    expect(page.locator("h1")).to_have_text("Inspect")
    expect(page.locator(".inspect")).to_contain_text("fp8")


def test_speed_says_which_is_slower(open_page: Opener) -> None:
    page = open_page(LINK)
    measured(page)
    said = page.locator("#speed tbody td:last-child").all_inner_texts()
    assert all(re.search(r"(slower|faster): [\d.]+\W$", each) for each in said if each)
    expect(page.locator("#speed")).to_contain_text("Medians of 2 rounds")


def test_refusals_and_copies(open_page: Opener, watch: Watch) -> None:
    watch.expected.add(400)
    page = open_page("quantize?run=digits&text=NINTH+7")
    expect(page.locator("#alerts [role=alert]")).to_contain_text("not in the vocabulary")
    page.locator('[name="prompt"]').fill("FIRST 1 2 3")
    page.locator("#go").click()
    measured(page)
    expect(page.locator("#alerts [role=alert]")).to_have_count(0)
    page.locator('[data-copy="python"]').click()
    said = page.evaluate("navigator.clipboard.readText()")
    assert 'prompted(model, in_precisions(model), "FIRST 1 2 3")' in said
    page.locator('[data-copy="cli"]').click()
    assert "glass quantize runs/digits --scheme int8" in page.evaluate(
        "navigator.clipboard.readText()"
    )
