"""The report as a file: opened from the disk with the network off, in both themes and widths."""

import pytest

from glassformer.adapters.load import load
from glassformer.web.report.document import report_html
from tests.browser.conftest import FORMS, HEIGHTS, THEMES, Watch

RUNS = ("digits", "reverse", "text")


@pytest.fixture(scope="module")
def files(laboratory, tmp_path_factory):
    """A report of each kind of run."""
    place = tmp_path_factory.mktemp("reports")
    for name in RUNS:
        (place / f"{name}.html").write_text(report_html(str(laboratory / name)), encoding="utf-8")
    return place


@pytest.fixture
def open_file(browser, files):
    """open_file("digits", width=390, theme="dark"): guarded like the pages, and offline."""
    contexts, watch = [], Watch(origin=files.as_uri())

    def opened(name, *, width=1320, theme="light"):
        context = browser.new_context(
            viewport={"width": width, "height": HEIGHTS[width]}, color_scheme=theme, offline=True
        )
        contexts.append(context)
        page = context.new_page()
        watch.follow(page)
        page.goto((files / f"{name}.html").as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not watch.faults, "\n".join(watch.faults)


@pytest.mark.parametrize(
    ("name", "width", "theme"),
    [
        *(("digits", width, theme) for width, theme in FORMS),
        ("reverse", 390, "dark"),
        ("text", 1320, "light"),
    ],
)
def test_it_opens_offline_and_is_for_everyone(open_file, axe, shoot, name, width, theme):
    page = open_file(name, width=width, theme=theme)
    axe(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.title() == f"Run {name}"
    shoot(page, f"report-{name}-{width}-{theme}")


def test_it_follows_the_readers_theme(open_file):
    ink = {}
    for theme in THEMES:
        page = open_file("digits", theme=theme)
        ink[theme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ink["light"] != ink["dark"]


def test_a_step_is_chosen_by_keyboard_without_a_script(open_file):
    page = open_file("digits")
    radios = page.locator("input[type=radio]")
    steps = [
        place.removeprefix("at-") for place in radios.evaluate_all("all => all.map(r => r.id)")
    ]
    shown = page.locator(".at:visible")
    assert shown.count() == 1
    assert f"step {steps[-1]}" in shown.inner_text()
    radios.last.focus()
    page.keyboard.press("ArrowLeft")
    assert shown.count() == 1
    assert f"step {steps[-2]}" in shown.inner_text()


def test_paper_shows_every_step(open_file):
    page = open_file("digits")
    page.emulate_media(media="print")
    assert page.locator(".at:visible").count() == page.locator(".at").count() > 1
    assert page.locator("nav:visible").count() == 0


def test_the_answer_on_the_page_is_the_models_own(open_file, laboratory):
    page = open_file("digits")
    text = page.locator("section[aria-labelledby=lens] p").first.inner_text()
    asked = text.partition(": ")[2].partition(" SEP")[0]
    _, word, share = load(laboratory / "digits").eval().inspect(asked).next(None, 1)[0]
    row = page.get_by_role("table", name="predictions at position").locator("tbody tr").first
    assert row.inner_text().split() == [word, f"{share:.2%}"]
