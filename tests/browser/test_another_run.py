"""What a page shows belongs to the run that it names: from any run to any other, sound or broken.

Twelve states of a workspace are visited in turn on every page, each after a different one, once
forwards and once backwards. A view must not depend on the one before it, a run that is refused
shows no number at all, and no other run's size stands anywhere.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

import glassformer as gf
from glassformer.data.own_code import forget_own_code
from glassformer.lab.api import train
from glassformer.lab.measure import precision
from tests.browser.conftest import Site, Tabs, Watch, new_context, serving
from tests.own.test_commands import PARTS

#: The states, in an order in which what is broken stands between what is not.
STATES = (
    *("classifier", "young", "language", "corrupted", "translator", "weightless"),
    *("own", "unreadable", "stalled", "gone", "int8", "wordless"),
)
#: Those of which a page can show nothing; of the others every page but those named shows results.
REFUSED = ("young", "corrupted", "weightless", "unreadable", "gone", "wordless")
WITHOUT = {"own": ("errors",), "int8": ("errors", "quantize")}
#: Of which other state a state has the size.
ALIKE = {"young": "translator", "corrupted": "classifier", "weightless": "language"}
ALIKE |= {"stalled": "classifier", "int8": "translator"}
#: A picture needs no weights and no tokenizer; these have a specification that can be read.
PICTURED = ("young", "corrupted", "weightless", "wordless")
PAGES = ("inspect", "model", "errors", "generate", "quantize")
#: What is there when a page has drawn all that it can.
READY = {
    "inspect": ".inspect[data-ready]:not(.busy)",
    "model": ".way:not(.busy) .tokens",
    "errors": ".errors:not(.busy) .facts dt",
    "generate": ".generate[data-done]:not([data-running]) :is(#new, #answer)",
    "quantize": ".quantize[data-ready]:not(.busy)",
}
#: The text in view, without lists to choose from, refusals and measured rates.
VISIBLE = """() => {
  const walker = document.createTreeWalker(document.querySelector('#page'), NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (node.closest('select, .alert, .timing, #speed, details:not([open])')) continue;
    if (!node.checkVisibility() || !walker.currentNode.data.trim()) continue;
    texts.push(walker.currentNode.data);
  }
  return texts.join('|');
}"""


def build_workspace(runs: Path, laboratory: Path) -> None:
    """The twelve states, made of trained runs, each another model than its neighbours."""
    sources = {
        "classifier": "digits", "language": "text", "translator": "reverse",
        "young": "reverse", "corrupted": "digits", "weightless": "text",
        "unreadable": "digits-seed1", "stalled": "digits-seed2",
    }  # fmt: skip
    for name, source in sources.items():
        shutil.copytree(laboratory / source, runs / name, symlinks=True)
    shutil.rmtree(runs / "young" / "checkpoints")
    for file in (runs / "corrupted").rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 255
        file.write_bytes(data)
    for file in (runs / "weightless" / "checkpoints").rglob("*.safetensors"):
        file.unlink()
    for file in (runs / "unreadable").rglob("config.json"):
        file.write_text("{", encoding="utf-8")
    record = json.loads((runs / "stalled" / "run.json").read_text("utf-8"))
    (runs / "stalled" / "run.json").write_text(json.dumps(record | {"status": "running"}), "utf-8")
    train(f"{PARTS}:Palindromes", name="own", runs=runs, steps=2, overrides=(
        "task.options.examples=60", "model.d_model=24", "train.batch_size=4",
    ))  # fmt: skip
    forget_own_code()  # whoever opens the page has not read that file
    gf.quantize(gf.load(runs / "translator"), scheme="int8").save(runs / "int8")
    gf.save(gf.build(gf.preset("core", d_model=20, n_layers=1), seed=0), runs / "wordless")


@pytest.fixture(scope="module")
def ward(laboratory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server over the twelve states."""
    runs = tmp_path_factory.mktemp("ward") / "runs"
    build_workspace(runs, laboratory)
    with pytest.MonkeyPatch.context() as patch, serving(runs) as site:
        for name, least in (("ROUNDS", 1), ("PREFILL", 8), ("NEW", 4)):
            patch.setattr(precision, name, least)  # rates are not compared here
        yield site


@pytest.fixture
def tab(ward: Site, tabs: Tabs) -> Iterator[Page]:
    """A tab on that server; what the server refuses is no fault here, an exception is."""
    watch = Watch(origin=ward.url, expected={400, 403, 404, 422})
    page = tabs.take("light")
    page.set_viewport_size({"width": 1320, "height": 900})
    watch.follow(page)
    page.goto(ward.at("design"))
    page.wait_for_selector(".design")
    yield page
    watch.leave(page)
    tabs.give_back(page, "light")
    assert not watch.faults, "\n".join(watch.faults)


def visit(page: Page, name: str, run: str) -> None:
    """Go there as a link does, and wait for all that will be drawn, or for the refusal."""
    page.evaluate(
        "route => { document.querySelector('.page')?.setAttribute('data-before', '');"
        " location.hash = route; }",
        f"#/{name}?run={run}",
    )
    page.wait_for_selector(".page:not([data-before])")
    if name == "generate":
        page.wait_for_selector(".generate[data-ready], .alert")
        if not page.locator(".alert").count():
            page.locator("#go").click()
    page.wait_for_selector(f"{READY[name]}, .alert")
    if name == "inspect":
        page.wait_for_selector(READY[name])


def copied(page: Page, kind: str) -> str:
    """What the button puts into the clipboard; nothing where there is nothing to copy."""
    page.evaluate("navigator.clipboard.writeText('')")
    page.locator(f"[data-copy={kind}]").click()
    expect(page.locator("#toast")).to_be_visible()
    return str(page.evaluate("navigator.clipboard.readText()"))


@pytest.mark.parametrize("name", PAGES)
def test_no_view_shows_another_runs_numbers(name: str, ward: Site, tab: Page) -> None:
    kinds = {
        run: f"{gf.load(ward.runs / run).get_num_parameters():,}"
        for run in ("classifier", "language", "translator", "own", "wordless")
    }
    assert len(set(kinds.values())) == len(kinds), "each is of another size"
    sizes = {run: kinds[ALIKE.get(run, run)] for run in STATES if ALIKE.get(run, run) in kinds}
    seen: dict[str, str] = {}
    for run in (*STATES, *STATES[-2::-1]):
        visit(tab, name, run)
        text = re.sub(r"[\d.]+ ms", "a moment", tab.evaluate(VISIBLE))
        refused = run in REFUSED or name in WITHOUT.get(run, ())
        assert bool(tab.locator(".alert").count()) is refused, (run, text)
        expect(tab.locator("#page [name=run], #page #errors-run").first).to_have_value(run)
        for other, size in kinds.items():
            assert size not in text or size == sizes.get(run), f"{run} shows the size of {other}"
        if refused and not (name == "model" and run in PICTURED):
            assert not any(sign.isdigit() for sign in text), f"{run} is refused and shows {text}"
        first = run not in seen
        assert seen.setdefault(run, text) == text, f"{run} after another run"
        if first:
            for kind in ("cli", "python"):
                words = copied(tab, kind)
                assert "null" not in words and "undefined" not in words, words
                assert not words or run in words, words
                if name not in ("model", "generate"):  # a picture, a question: they hold
                    assert bool(words) is not refused or kind == "cli", words
            assert "null" not in tab.url


@pytest.mark.parametrize("name", PAGES)
def test_a_view_that_waits_shows_nothing_of_the_run_before(name: str, tab: Page) -> None:
    visit(tab, name, "classifier")
    held: list[Route] = []
    free: list[bool] = []

    def hold(route: Route) -> None:
        if free:
            route.continue_()
        else:
            held.append(route)

    tab.route(re.compile(r"language|/api/(inspect|generate|quantize)$"), hold)
    try:
        tab.evaluate("route => { location.hash = route }", f"#/{name}?run=language")
        expect(tab.locator("#page [name=run], #page #errors-run").first).to_have_value("language")
        while not held:
            tab.wait_for_timeout(20)
        assert not any(sign.isdigit() for sign in tab.evaluate(VISIBLE))
        for kind in ("cli", "python"):
            assert "classifier" not in copied(tab, kind)
    finally:
        free.append(True)
        for route in held:
            route.continue_()
        tab.wait_for_selector(".generate[data-ready]" if name == "generate" else READY[name])
        tab.unroute_all(behavior="ignoreErrors")


def test_a_run_that_is_deleted_under_the_page_leaves_no_number(ward: Site, tab: Page) -> None:
    for name, change in (
        ("inspect", "&text=FIRST+1+2"),
        ("model", "&text=FIRST+1+2"),
        ("errors", "&split=val"),
    ):
        shutil.copytree(ward.runs / "stalled", ward.runs / "doomed", symlinks=True)
        visit(tab, name, "doomed")
        assert any(sign.isdigit() for sign in tab.evaluate(VISIBLE))
        shutil.rmtree(ward.runs / "doomed")
        tab.evaluate("more => { location.hash += more }", change)
        expect(tab.locator(".alert")).to_be_visible()
        if name == "model":  # the picture was drawn of that run, and no answer has denied it
            expect(tab.locator(".way")).to_have_text("")
        else:
            assert not any(sign.isdigit() for sign in tab.evaluate(VISIBLE))
            assert not copied(tab, "python")
        visit(tab, name, "classifier")
        expect(tab.locator(".alert")).to_have_count(0)


def test_two_browsers_on_one_server_keep_to_their_runs(
    ward: Site, tab: Page, browser: Browser
) -> None:
    alone = {}
    for run in ("classifier", "translator"):
        visit(tab, "inspect", run)
        alone[run] = tab.evaluate(VISIBLE)
    contexts = [new_context(browser, theme) for theme in ("light", "dark")]
    try:
        pages = dict(zip(alone, (context.new_page() for context in contexts), strict=True))
        for page in pages.values():
            page.set_viewport_size({"width": 1320, "height": 900})
            page.goto(ward.at("design"))
            page.wait_for_selector(".design")
        for _ in range(2):  # both at once, then each the other's run, then back
            for run in (*alone, *reversed(alone)):
                for page in pages.values():
                    page.evaluate("route => { location.hash = route }", f"#/inspect?run={run}")
        for run, page in pages.items():
            page.evaluate("route => { location.hash = route }", f"#/inspect?run={run}")
        for run, page in pages.items():
            page.wait_for_function("run => location.hash.includes('run=' + run)", arg=run)
            page.wait_for_selector(READY["inspect"])
            assert page.evaluate(VISIBLE) == alone[run]
        assert "dark" in pages["translator"].evaluate("localStorage.getItem('glass-theme')")
    finally:
        for context in contexts:
            context.close()


def test_a_restart_under_an_open_page_shows_the_new_servers_run(
    laboratory: Path, tmp_path: Path, browser: Browser
) -> None:
    for folder, source in (("before", "digits"), ("after", "reverse")):
        shutil.copytree(laboratory / source, tmp_path / folder / "one", symlinks=True)
    context = new_context(browser, "light")
    page = context.new_page()
    try:
        with serving(tmp_path / "before") as old:
            page.goto(old.at("inspect?run=one"))
            page.wait_for_selector(READY["inspect"])
            first = page.locator("#parameters").inner_text()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("[")
        expect(page.get_by_role("alert")).to_contain_text("does not answer")
        assert not any(sign.isdigit() for sign in page.evaluate(VISIBLE))
        with serving(tmp_path / "after", int(old.url.rpartition(":")[2])) as new:
            page.evaluate("location.hash = '#/model?run=one'")
            box = page.get_by_label("Address or token")
            expect(box).to_be_focused()
            box.fill(new.token)
            page.keyboard.press("Enter")
            page.wait_for_selector(READY["model"])
            assert first not in page.evaluate(VISIBLE)
            size = gf.load(tmp_path / "after" / "one").get_num_parameters()
            expect(page.locator(".picture")).to_contain_text(f"{size:,}")
    finally:
        context.close()
