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
from playwright.sync_api import Page, expect

import glassformer as gf
from glassformer.lab.api import train
from glassformer.spec.own import forget_own_code
from tests.browser.conftest import Site, Tabs, Watch, serving
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
    with serving(runs) as site:
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
