"""The shell: the token, other tabs, focus, the run that goes along, what is shown first."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

import glassformer as gf
from tests.browser.conftest import Opener, Site, Watch, serving


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[str, str]]]:
    """serve(folder, port): (address, token) of another server; 0 takes a free port."""
    running = ExitStack()

    def served(folder: Path, port: int = 0) -> tuple[str, str]:
        running.close()  # one at a time: a restart takes the same port
        found = running.enter_context(serving(folder, port))
        return found.url, found.token

    with running:
        yield served


def ready(page: Page) -> None:
    """Wait for Inspect."""
    page.wait_for_selector(".inspect[data-ready]:not(.busy)")


def test_a_restarted_server_is_told_and_entered(browser: Browser, site: Site, serve) -> None:
    address, token = serve(site.runs)
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{address}/#t={token}/runs?runs=digits")
    expect(page.locator("tr[data-run=digits]")).to_be_visible()
    address, fresh = serve(site.runs, int(address.rpartition(":")[2]))
    expect(page.get_by_role("heading", name="The server has a new token")).to_be_visible()
    page.wait_for_timeout(1200)  # the page in view asks every second: it must be gone
    box = page.get_by_label("Address or token")
    expect(box).to_be_focused()
    box.fill("what?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("holds no token")
    box.fill(f"{address}/#t={fresh}")
    page.keyboard.press("Enter")
    expect(page.locator("tr[data-run=digits]")).to_be_visible()
    expect(page).to_have_url(re.compile("runs=digits"))
    context.close()


def test_a_copied_link_opens_in_another_tab_of_the_same_browser(
    open_page: Opener, browser: Browser, site: Site
) -> None:
    page = open_page("runs?runs=digits")
    expect(page.locator("tr[data-run=digits]")).to_be_visible()
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator("tr[data-run=digits]")).to_be_visible()
    stranger = browser.new_context()
    closed = stranger.new_page()
    closed.goto(page.url)
    expect(closed.get_by_role("heading", name="Which explorer is this?")).to_be_visible()
    stranger.close()


def test_the_run_goes_along_and_the_focus_is_never_lost(open_page: Opener) -> None:
    page = open_page("inspect?run=reverse")
    ready(page)
    page.get_by_role("link", name="Generate").click()
    expect(page.locator("[name=run]")).to_have_value("reverse")
    expect(page.locator("#announce")).to_have_text("Generate")
    page.goto(page.url.partition("#")[0] + "#/runs?runs=digits")
    page.locator(".chart path.line").first.wait_for(state="attached")
    page.locator(".chart").focus()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    ready(page)
    expect(page.locator("main")).to_be_focused()


def test_without_runs_every_page_says_how_to_make_one(browser: Browser, tmp_path, serve) -> None:
    address, token = serve(tmp_path)
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{address}/#t={token}/inspect")
    for name in ("inspect", "model", "errors", "generate", "quantize", "runs"):
        page.goto(f"{address}/#/{name}")
        expect(page.locator("#page")).to_contain_text("glass train digits")
        expect(page.locator(".alert")).to_have_count(0)
    context.close()


def test_a_run_without_a_checkpoint_is_no_dead_end(
    open_page: Opener, watch: Watch, site: Site
) -> None:
    watch.expected.add(404)
    young = site.runs / "young"
    young.mkdir()
    try:
        for name in ("run.json", "config.json", "metrics.jsonl"):
            (young / name).write_bytes((site.runs / "digits" / name).read_bytes())
        page = open_page("errors?run=young")
        expect(page.get_by_role("alert")).to_contain_text("has no checkpoint")
        expect(page.locator("#page")).not_to_contain_text("Measuring")
        page.get_by_label("run").select_option("digits")
        expect(page.locator(".confusion")).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
    finally:
        for path in young.iterdir():
            path.unlink()
        young.rmdir()


def test_the_first_head_is_the_one_that_matters(open_page: Opener, site: Site) -> None:
    page = open_page("inspect?run=digits&text=SECOND+7+3+9&target=3")
    ready(page)
    own = gf.load(site.runs / "digits").inspect("SECOND 7 3 9", target="3").ranking()
    expect(page.locator("#head-title")).to_have_text(str(own.heads[0]))
    expect(page.locator(".ranking tr.marked th")).to_have_text(str(own.heads[0]))
    page = open_page("inspect?run=reverse&split=val&row=0&kind=cross")
    ready(page)
    expect(page.locator("#head-title")).to_have_text(re.compile(r"cross\.L\dH\d"))
    page = open_page("inspect?run=long")  # too many to try unasked
    ready(page)
    expect(page.locator("#head-title")).to_have_text("L0H0")


def test_a_new_prompt_leaves_the_old_target_behind(open_page: Opener) -> None:
    page = open_page("inspect?run=digits&text=SECOND+7+3+9&target=3")
    ready(page)
    page.locator("[name=prompt]").fill("FIRST 1 2 8")
    page.locator("[name=prompt]").press("Enter")
    expect(page.locator(".token")).to_have_text(["FIRST", "1", "2", "8", "SEP"])
    expect(page.locator("[name=target]")).to_have_value("")
    assert "target" not in page.url


def test_the_example_is_what_the_model_is_given(open_page: Opener, site: Site) -> None:
    page = open_page("generate?run=reverse")
    page.wait_for_selector(".generate[data-ready]")
    example = page.locator("[name=example] option:checked").inner_text()
    source, _, answer = example.partition(" -> ")
    assert answer.split() == source.split()[::-1], "the list shows the whole example"
    expect(page.locator("[name=prompt]")).to_have_value(source)
    page = open_page("generate?run=long")  # of 512 letters: a beginning, whole, with room after it
    page.wait_for_selector(".generate[data-ready]")
    prompt = page.locator("[name=prompt]").input_value()
    assert len(prompt) == 64 and "…" not in prompt
    assert gf.load(site.runs / "long").generate(prompt, max_new_tokens=2)


def test_beams_end_in_a_mark_that_every_font_has(open_page: Opener) -> None:
    page = open_page("generate?run=text&text=so+it&mode=beam&max_new_tokens=4")
    page.wait_for_selector("#hypotheses")
    expect(page.locator("glass-tree path.end")).to_have_count(4)
    assert "\N{BLACK SQUARE FOR STOP}" not in page.locator("glass-tree").inner_html()


def test_a_curve_is_named_where_it_ends(open_page: Opener) -> None:
    page = open_page("runs?runs=digits,digits-seed1&smooth=1")  # 480 steps, and 40
    expect(page.locator(".chart text.end")).to_have_count(2)
    for run in ("digits", "digits-seed1"):
        line = page.locator(f".chart path.line[data-run={run}]").bounding_box()
        name = page.locator(".chart text.end").get_by_text(run, exact=True).bounding_box()
        assert line and name
        assert 0 <= name["x"] - (line["x"] + line["width"]) < 16, run


def test_on_a_phone_the_bar_scrolls_to_the_page_in_view(open_page: Opener) -> None:
    page = open_page("design", width=390)
    page.wait_for_selector(".design")
    for name in ("quantize", "inspect"):
        page.evaluate("name => { location.hash = `#/${name}?run=digits` }", name)
        link = page.locator("#pages [aria-current=page]")
        expect(link).to_have_attribute("data-page", name)
        bar, own = page.locator("#pages").bounding_box(), link.bounding_box()
        assert bar and own
        assert bar["x"] - 1 <= own["x"] and own["x"] + own["width"] <= bar["x"] + bar["width"] + 1


def test_the_ranking_says_what_it_is_on_top_of(open_page: Opener) -> None:
    page = open_page("inspect?run=digits&text=SECOND+7+3+9&target=3&ablate=L1H3")
    ready(page)
    expect(page.locator(".ranking")).to_contain_text("On top of what is ablated already: L1H3.")
