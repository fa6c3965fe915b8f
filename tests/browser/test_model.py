"""The page Model in a real browser: the picture, its parts as buttons, one token's way."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from glassformer.lens.show.diagram import diagram
from glassformer.spec.presets import PRESETS, preset
from tests.browser.conftest import FORMS, Opener


def drawn(page: Page) -> None:
    """Wait for the picture and the way."""
    page.wait_for_selector(".picture svg")
    page.wait_for_selector(".way:not(.busy) image", timeout=60_000)


@pytest.mark.parametrize(("width", "theme"), FORMS)
def test_it_is_accessible(
    open_page: Opener, axe: Callable, shoot: Callable, width: int, theme: str
) -> None:
    page = open_page("model?run=reverse&part=decoder.blocks.0.cross", width=width, theme=theme)
    drawn(page)
    axe(page)
    shoot(page, f"model-{width}-{theme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_click_and_a_key_open_a_part(open_page: Opener) -> None:
    page = open_page("model?run=digits")
    drawn(page)
    expect(page.locator(".part h2")).to_have_text("Self-attention")
    page.get_by_role("button", name="Feed-forward").click()
    expect(page.locator(".part h2")).to_have_text("Feed-forward")
    expect(page.locator('.picture [aria-pressed="true"]')).to_have_attribute(
        "data-part", "blocks.0.ffn"
    )
    page.get_by_label("Layer", exact=True).focus()
    page.get_by_label("Layer", exact=True).select_option("1")
    expect(page.locator(".part h3 code").first).to_have_text("blocks.1.ffn")
    expect(page.get_by_label("Layer", exact=True)).to_be_focused()
    page.get_by_role("button", name="Answer head").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".part h2")).to_have_text("Answer head")
    expect(page.get_by_role("button", name="Answer head")).to_be_focused()
    page.go_back()
    expect(page.locator(".part h3 code").first).to_have_text("blocks.1.ffn")


def test_a_token_is_followed_and_a_head_leads_to_inspect(open_page: Opener) -> None:
    page = open_page("model?run=digits")
    drawn(page)
    page.locator("[name=prompt]").fill("SECOND 7 3 9")
    page.locator("[name=prompt]").press("Enter")
    expect(page.locator(".tokens button")).to_have_text(["SECOND", "7", "3", "9", "SEP"])
    page.get_by_role("button", name="position 2, token 3").click()
    expect(page.locator(".way h2")).to_have_text("One token's way: position 2, token '3'")
    page.locator('[data-copy="python"]').click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert 'inspect("SECOND 7 3 9").token_path(2)' in copied
    page.get_by_role("link", name="L0H2").click()
    page.wait_for_url(re.compile(r"#/inspect\?run=digits&L=0&H=2"))
    page.wait_for_selector(".inspect[data-ready]:not(.busy)")


def test_no_word_of_a_picture_leaves_its_box(browser) -> None:
    page = browser.new_page()
    for name in PRESETS:
        for layout in ("wide", "narrow"):
            page.set_content(diagram(preset(name), layout=layout, title=name).svg())
            outside = page.evaluate(
                """() => [...document.querySelectorAll('[data-part]')].flatMap(part => {
                  const box = part.querySelector('.box').getBoundingClientRect();
                  const words = [...part.querySelectorAll('text')];
                  const spans = words.map(word => word.getBoundingClientRect());
                  const wide = spans.some(s => s.left < box.left + 4 || s.right > box.right - 4);
                  return wide || spans[0].right > spans[1].left ? [part.dataset.part] : [];
                })"""
            )
            assert not outside, (name, layout)
    page.close()
