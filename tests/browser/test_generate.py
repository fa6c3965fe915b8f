"""The page Generate in Chromium: tokens as they come, with Python's numbers, until stopped."""

import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Page, expect

import glassformer as gf
from glassformer.generation.beam import beam_search
from glassformer.generation.streaming import Generated, generate_batch
from glassformer.serve.app import create_app
from glassformer.serve.engine import Engine, Served
from glassformer.spec.decoding import BeamSpec, DecodeSpec
from glassformer.web.app.relay import Relay
from tests.browser.conftest import FORMS, Opener, Site, Watch
from tests.browser.hostile import HOSTILE

STATES = {
    "generate": "generate?run=text&text=the+glass&mode=sample&max_new_tokens=20",
    "generate-beam": "generate?run=text&text=so+it&mode=beam&max_new_tokens=8",
    "generate-answer": "generate?run=digits&text=SECOND+7+3+9",
    "generate-reverse": "generate?run=reverse&text=3+1+2",
}


def done(page: Page) -> None:
    """Wait until a generation has ended."""
    page.wait_for_selector(".generate[data-done]:not([data-running])")


def numbers(text: str) -> str:
    """A real minus is a hyphen for Python."""
    return text.strip().replace("\N{MINUS SIGN}", "-")


def made(site: Site, prompt: str, **settings: Any) -> Generated:
    """Python's own continuation."""
    model = gf.load(site.runs / "text")
    spec = DecodeSpec(eos=model.end_ids(), **settings)
    (one,) = generate_batch(
        model.stepper(), model.prompt(prompt), spec=spec, tokenizer=model.tokenizer
    )
    return one


@pytest.mark.parametrize(("width", "theme"), FORMS)
@pytest.mark.parametrize("name", STATES)
def test_every_theme_and_width(
    open_page: Opener, axe: Any, shoot: Any, name: str, width: int, theme: str
) -> None:
    page = open_page(STATES[name], width=width, theme=theme)
    done(page)
    page.wait_for_selector("#new, #answer, #hypotheses")
    axe(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shoot(page, f"{name}-{width}-{theme}")


def test_the_numbers_are_pythons(open_page: Opener, site: Site) -> None:
    page = open_page(
        "generate?run=text&text=the+glass&mode=sample&max_new_tokens=12&seed=4&temperature=1.5"
    )
    done(page)
    own = made(site, "the glass", max_new_tokens=12, seed=4, temperature=1.5)
    expect(page.locator("#new")).to_have_text(own.text)
    page.locator("summary").click()
    rows = page.locator("#tokens-table tbody tr")
    expect(rows).to_have_count(len(own.tokens))
    for row, token, logprob in zip(rows.all(), own.tokens, own.logprobs, strict=True):
        _, found, _, shown = row.locator("td").all_inner_texts()
        assert int(found) == token and numbers(shown) == f"{logprob:.4f}"
    expect(page.locator("#speed")).to_contain_text("tokens/s with the KV cache")
    page.locator("#measure").click()
    expect(page.locator("#speed")).to_contain_text("without")


def test_keyboard_alternatives_branch_and_back(open_page: Opener, site: Site) -> None:
    page = open_page("generate?run=text")
    page.wait_for_selector(".generate[data-ready]")
    page.keyboard.press("/")
    page.keyboard.press("Control+a")
    page.keyboard.type("so it")
    page.keyboard.press("Enter")
    done(page)
    expect(page).to_have_url(re.compile("text=so"))
    first = page.locator("#new").inner_text()
    page.locator(".spoken button").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    third = page.locator(".spoken button").nth(2)
    expect(third).to_be_focused()
    expect(third).to_have_attribute("aria-pressed", "true")
    expect(third).to_have_attribute("aria-label", re.compile(r"probability \d\.\d{4}"))
    table = page.locator("#alternatives")
    expect(page.locator(".beside")).to_contain_text("Position 3")
    branch = table.locator("button").first
    branch.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".branch")).to_contain_text("3 tokens are given")
    done(page)
    expect(page.locator("#new")).not_to_have_text(first)
    forced = tuple(map(int, re.findall(r"\d+", page.url.split("forced=")[1].replace("%2C", ","))))
    own = made(site, "so it", max_new_tokens=64, forced=forced)
    expect(page.locator("#new")).to_have_text(own.text)
    page.go_back()
    expect(page.locator("#new")).to_have_text(first)


def test_the_tree_and_its_hypotheses(open_page: Opener, site: Site) -> None:
    page = open_page("generate?run=text&text=so+it&mode=beam&max_new_tokens=6&width=3")
    page.wait_for_selector("#hypotheses")
    model = gf.load(site.runs / "text")
    spec = BeamSpec(width=3, max_new_tokens=6, eos=model.end_ids())
    (found,) = beam_search(model.stepper(), model.prompt("so it"), spec=spec, record=True)
    expect(page.locator("glass-tree .node")).to_have_count(len(found.tree))
    rows = page.locator("#hypotheses tbody tr").all()
    for row, one in zip(rows, found.hypotheses, strict=True):
        score, logprob, _ = row.locator("td").all_inner_texts()
        assert (numbers(score), numbers(logprob)) == (f"{one.score:.4f}", f"{one.logprob:.4f}")
    assert page.locator("glass-tree .node.first").count() == len(found.hypotheses[0].tokens)


def test_stop_ends_the_work_on_the_other_side(open_page: Opener) -> None:
    page = open_page("generate?run=long&text=the&max_new_tokens=480&cache=0")
    page.wait_for_selector(".spoken button:nth-child(3)")
    page.keyboard.press("Escape")
    done(page)
    expect(page.locator(".timing")).to_contain_text("stopped here")
    page.wait_for_timeout(400)  # the token that was being made ends, and with it the job
    page.evaluate("location.hash = '#/generate?run=digits&text=SECOND+7+3+9'")
    expect(page.locator("#answer")).to_be_visible(timeout=5_000)


def test_a_model_that_answers(open_page: Opener, site: Site) -> None:
    page = open_page("generate?run=digits&text=SECOND+7+3+9")
    model = gf.load(site.runs / "digits")
    expect(page.locator("#answer")).to_have_text(model.answer("SECOND 7 3 9"))
    expect(page.locator(".what")).to_contain_text("gives one answer")
    share = model.inspect("SECOND 7 3 9").next(None, 1)[0][2]
    expect(page.locator("#alternatives td.n").first).to_have_text(f"{share:.4f}")


def test_refusals_stand_where_the_text_would(open_page: Opener, watch: Watch) -> None:
    watch.expected.add(400)
    page = open_page("generate?run=digits&text=NINTH+7")
    expect(page.locator(".what [role=alert]")).to_contain_text("not in the vocabulary")
    for text in HOSTILE[:6]:
        page.locator('[name="prompt"]').fill(text)
        page.locator("#go").click()
        expect(page.locator(".what [role=alert]")).to_be_visible()
    assert page.evaluate("window.hacked === undefined")


def test_copies(open_page: Opener, watch: Watch) -> None:
    watch.expected.add(400)  # the model does not know the sign that must be quoted
    page = open_page("generate?run=text&text=it%27s&mode=sample&max_new_tokens=5&seed=2&top_k=3")
    page.wait_for_selector(".generate[data-done]")
    page.locator('[data-copy="cli"]').click()
    said = page.evaluate("navigator.clipboard.readText()")
    assert said.startswith("glass generate runs/text 'it'\\''s' --max-new 5")
    assert "--temperature 1" in said and "--top-k 3" in said and "--seed 2" in said
    page.locator('[data-copy="python"]').click()
    assert 'model.generate("it\'s", max_new_tokens=5' in page.evaluate(
        "navigator.clipboard.readText()"
    )


# --- a model of a server --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(site: Site) -> Iterator[str]:
    """`glass serve` of the run `text` on a socket, with the explorer pointed at it."""
    engine = Engine([Served("helper", gf.load(site.runs / "text"), slots=2)], threads=1)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(create_app(engine), lifespan="off", log_level="critical")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    site.workspace.relay = Relay(address)
    yield address
    site.workspace.relay = None
    server.should_exit = True
    thread.join(10)
    engine.stop()
    assert engine.join(10)


def test_a_server_shows_its_probabilities(
    open_page: Opener, site: Site, served: str, axe: Any
) -> None:
    page = open_page("generate?run=text")
    page.wait_for_selector(".generate[data-ready]")
    page.locator('[name="run"]').select_option(label=f"helper ({served})")
    expect(page.locator('[name="cached"]')).to_have_count(0)
    expect(page.locator('[name="mode"] option')).to_have_count(2)
    page.locator('[name="prompt"]').fill("the glass")
    page.locator('[name="mode"]').select_option("sample")
    done(page)
    page.locator('[name="max_new_tokens"]').fill("12")
    page.locator('[name="seed"]').fill("4")
    page.locator("#go").click()
    expect(page.locator(".what")).to_contain_text(served)
    done(page)
    own = made(site, "the glass", max_new_tokens=12, seed=4, temperature=1.0)
    expect(page.locator("#new")).to_have_text(own.text)
    page.locator("summary").click()
    rows = page.locator("#tokens-table tbody tr").all()
    for row, logprob in zip(rows, own.logprobs, strict=True):
        assert numbers(row.locator("td").all_inner_texts()[-1]) == f"{logprob:.4f}"
    expect(page.locator("#alternatives tbody tr")).not_to_have_count(0)
    expect(page.locator("#alternatives button")).to_have_count(0)
    axe(page)
    page.locator('[data-copy="cli"]').click()
    said = page.evaluate("navigator.clipboard.readText()")
    assert said.startswith(f"curl {served}/completions") and '"seed":4' in said


def test_a_server_that_has_gone_leaves_the_page(
    open_page: Opener, site: Site, served: str, watch: Watch
) -> None:
    """What it cannot reach it names; the models here stay."""
    watch.expected.add(502)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    before, site.workspace.relay = site.workspace.relay, Relay(f"http://127.0.0.1:{port}/v1")
    try:
        page = open_page("generate?run=text&text=so+it&max_new_tokens=4")
        done(page)
        expect(page.locator("#new")).to_be_visible()
        page.evaluate("location.hash = '#/generate?run=server:helper&text=so'")
        expect(page.locator(".what [role=alert]")).to_contain_text("no server answers")
    finally:
        site.workspace.relay = before
