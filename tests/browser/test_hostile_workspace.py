"""Names, tokens, examples and prompts that want to be something else, shown on the pages."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

import glassformer as gf
from glassformer.data.tokenizers.vocab import Vocab
from glassformer.lab.api import train
from glassformer.lens.show.text import shown
from tests.browser.conftest import Site, Tabs, Watch, serving
from tests.browser.hostile import HOSTILE
from tests.browser.test_another_run import PAGES, READY, visit

#: Names that a run may have, and that a script could take for something of its own.
NAMES = ("__proto__", "constructor", "null", "-dash", "toString")
#: Names of folders that no run has: the page lists none of them.
FOREIGN = ("<img src=x onerror=hack()>", "=1+1", "\u202egnp.exe", "a b", "x'\"`${1}")
TOKENS = (
    "<script>window.hacked=1</script>", "<img/src=x/onerror=window.hacked=1>", "'\"`${hacked=1}",
    "\u202egnirts", "\u2066x", "\u05d0\u05d1\u05d2", "\x1b[31m", "\x00", "\ufeff", "a\u0301\u0301",
    "__proto__", "constructor", "&lt;b&gt;", "{{hacked}}", "=1+1", "null",
)  # fmt: skip
COUNT = "document.querySelectorAll('script, iframe, object, embed, base, meta, #page img').length"


@pytest.fixture(scope="module")
def wild(laboratory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Runs under odd names, a run trained on markup, and a model whose every token is odd."""
    runs = tmp_path_factory.mktemp("wild") / "runs"
    for name in (*NAMES, *FOREIGN):
        shutil.copytree(laboratory / "digits-seed1", runs / name, symlinks=True)
    book = runs.parent / "book.txt"
    book.write_text("\n".join(text for text in HOSTILE if len(text) < 200) * 4, encoding="utf-8")
    train("text", name="markup", runs=runs, steps=3, overrides=(
        f"task.path={book}", "task.tokenizer=characters", "task.length=32", "train.batch_size=4",
        "model.d_model=16", "train.evaluate_examples=8",
    ))  # fmt: skip
    spec = gf.preset("core", d_model=16, n_layers=1, vocab_size=len(TOKENS))
    gf.build(spec, seed=0).with_tokenizer(Vocab(TOKENS)).save(runs / "tokens")
    with serving(runs) as site:
        yield site


@pytest.fixture
def tab(wild: Site, tabs: Tabs) -> Iterator[Page]:
    """A tab on that server, in which nothing may run that is not ours."""
    watch = Watch(origin=wild.url, expected={400, 404})
    page = tabs.take("light")
    page.set_viewport_size({"width": 1320, "height": 900})
    watch.follow(page)
    opened: list[str] = []
    page.on("dialog", lambda dialog: (opened.append(dialog.message), dialog.dismiss()))
    page.goto(wild.at("design"))
    page.wait_for_selector(".design")
    nodes = page.evaluate(COUNT)
    yield page
    assert not opened, opened
    assert page.evaluate("window.hacked === undefined")
    assert page.evaluate(COUNT) <= nodes
    watch.leave(page)
    tabs.give_back(page, "light")
    assert not watch.faults, "\n".join(watch.faults)


@pytest.mark.parametrize("name", PAGES)
def test_odd_names_and_markup_are_text_on_every_page(name: str, tab: Page) -> None:
    for run in ("__proto__", "constructor", "markup", "tokens"):
        visit(tab, name, run)
        expect(tab.locator("#page [name=run], #page #errors-run").first).to_have_value(run)
        assert bool(tab.locator(".alert").count()) is (name == "errors" and run == "tokens")
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_runs_lists_names_that_runs_have_and_no_other(tab: Page) -> None:
    tab.evaluate("location.hash = '#/runs'")
    rows = tab.locator(".runs-table tbody tr")
    expect(rows).to_have_count(len(NAMES) + 2)
    assert {row.get_attribute("data-run") for row in rows.all()} == {*NAMES, "markup", "tokens"}
    tab.evaluate("names => { location.hash = '#/runs?runs=' + names }", ",".join(NAMES[:3]))
    expect(tab.locator(".chart path.line[data-run='__proto__']").first).to_be_attached()


def test_tokens_are_shown_as_what_they_are(tab: Page) -> None:
    for start in range(0, len(TOKENS), 4):
        words = TOKENS[start : start + 4]
        tab.evaluate(
            "text => { document.querySelector('.page').setAttribute('data-before', '');"
            " location.hash = '#/inspect?' + new URLSearchParams({run: 'tokens', text}) }",
            " ".join(words),
        )
        expect(tab.locator("glass-tokens:not([hidden]) .token")).to_have_text(
            [shown(word) for word in words]
        )
    tab.wait_for_selector(READY["inspect"])
    chips = tab.locator("glass-bars tbody th").all_inner_texts()
    assert set(chips) <= {shown(word) for word in TOKENS}
