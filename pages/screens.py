"""Pictures of every page of the explorer after every other one, and what overlaps or is cut off.

Pages share one document and their style sheets accumulate, so a page may look right alone and
wrong after another. `walk` visits the pages in a given order in one browser tab; `FLAWS` is the
script that reads the text boxes of the page in view. The tests walk two orders;
`python -m pages screens` walks until every page has followed every other one, and keeps pictures.
`python -m pages shots` takes those of docs/images.
"""

import io
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from pages.quotes import ROOT
from pages.runs import one_thread

FOLDER = ROOT / "build" / "screens"
IMAGES = ROOT / "docs" / "images"
WIDTHS, THEMES = (1320, 390), ("light", "dark")
HEIGHT = 900
#: The longest wait for a view, in milliseconds; some measure speeds, slowly on a busy machine.
PATIENCE = 180_000
#: A view of each page, and what is there once it is complete; the runs must be in the folder.
PAGES = {
    "inspect": ("inspect?run=reverse", ".ranking table"),
    "model": ("model?run=reverse", ".way image"),
    "runs": ("runs", "path.line"),
    "sweeps": ("sweeps?sweep=rates", ".ranking table"),
    "errors": ("errors?run=reverse", ".examples table"),
    "design": ("design", "glass-landscape[data-ready]"),
    "generate": ("generate?run=text&text=the%20glass&mode=sample", ".page[data-done]"),
    "quantize": ("quantize?run=text", "#speed[data-ready]"),
}
#: More of them: `PAGE-WHAT`.
VIEWS = {
    "inspect-digits": ("inspect?run=digits", ".ranking table"),
    "inspect-text": ("inspect?run=text", ".ranking table"),
    "inspect-compared": ("inspect?run=text&with=text%40best%3Aint8", ".ranking table"),
    "inspect-long": ("inspect?run=long", "glass-heat canvas"),
    "runs-seeds": ("runs?runs=digits-seed1,digits-seed2,digits-seed3&group=seed", "path.band"),
    "errors-digits": ("errors?run=digits", ".confusion"),
    "errors-text": ("errors?run=text", ".examples table"),
    "design-none": ("design?params=1000&vocab=50000", "#why"),
    "generate-beam": ("generate?run=reverse&text=3%201%204&mode=beam", "#hypotheses"),
    "generate-digits": ("generate?run=digits&text=MAX%203%201", "#answer"),
    "quantize-digits": ("quantize?run=digits", "#speed[data-ready]"),
}
ROUTES = PAGES | VIEWS
#: Pictures of the documentation: the view, what is there once it is complete, and its height.
SHOTS = {
    "inspect": (
        "inspect?run=reverse&kind=cross&layer=1&head={second}&pos=3&ablate={heads}",
        ".ranking table",
        1010,
    ),
    "explore-design": ("design", "glass-landscape[data-ready]", 1050),
}
#: Colours of such a picture, enough for its text to look as on a screen.
COLOURS = 128
#: Counts the requests in flight, so that a walk can wait for a page to settle.
COUNTED = """
window.flying = 0;
const fetched = window.fetch;
window.fetch = async (...asked) => {
  window.flying += 1;
  try { return await fetched(...asked); } finally { setTimeout(() => { window.flying -= 1; }, 30); }
};
"""
#: The page is there, nothing is on its way, and two frames went by.
SETTLED = """async () => {
  const page = document.querySelector('.page');
  const still = () => page?.children.length && !window.flying
    && !document.querySelector('.busy, [aria-busy="true"], .waiting');
  if (!still()) return false;
  for (let i = 0; i < 2; i += 1) await new Promise(requestAnimationFrame);
  return still();
}"""
#: What is wrong with the text in view: boxes that overlap, words that are cut off.
FLAWS = """() => {
  const SLACK = 2.5; // pixels by which boxes of neighbouring lines may touch
  const flaws = [], boxes = [];
  const name = (node) => {
    const kind = node.getAttribute?.('class');
    return node.localName + (kind ? '.' + kind.trim().split(/\\s+/).join('.') : '');
  };
  const said = ({node, text}) => `${name(node)} "${text.slice(0, 40)}"`;
  const clipping = (style) => [style.overflowX, style.overflowY];
  const hidden = (node) => node.closest('.visually-hidden, [hidden], option, select')
    || !node.checkVisibility({opacityProperty: true, visibilityProperty: true});
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || !node || ['SCRIPT', 'STYLE', 'NOSCRIPT', 'TITLE', 'title'].includes(node.tagName)
      || hidden(node)) continue;
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    for (const box of range.getClientRects()) {
      if (box.width < 1 || box.height < 1) continue;
      let {left, right, top, bottom} = box, cut = null, fixed = false;
      for (let at = node; at && at !== document.documentElement; at = at.parentElement) {
        const style = getComputedStyle(at), around = at.getBoundingClientRect();
        if (style.position === 'fixed') fixed = true;
        const [x, y] = at.localName === 'svg' ? ['hidden', 'hidden'] : clipping(style);
        if (x === 'visible' && y === 'visible') continue;
        const quiet = style.textOverflow === 'ellipsis' || at.closest('.brief');
        if (x === 'hidden' || x === 'clip') {
          if (!quiet && (left < around.left - 1.5 || right > around.right + 1.5)) cut ??= at;
        }
        if (y === 'hidden' || y === 'clip') {
          if (top < around.top - 2.5 || bottom > around.bottom + 2.5) cut ??= at;
        }
        [left, right] = [Math.max(left, around.left), Math.min(right, around.right)];
        [top, bottom] = [Math.max(top, around.top), Math.min(bottom, around.bottom)];
      }
      const told = said({node, text});
      if (cut) flaws.push(`cut off by ${name(cut)}: ${told}`);
      if (right - left < 1 || bottom - top < 1) continue;
      if (right > innerWidth + 1 || left < -1) flaws.push(`outside the window: ${told}`);
      if (!fixed) boxes.push({node, text, left, right, top, bottom});
    }
  }
  boxes.sort((a, b) => a.top - b.top);
  boxes.forEach((a, i) => {
    for (let j = i + 1; j < boxes.length && boxes[j].top < a.bottom - SLACK; j += 1) {
      const b = boxes[j];
      if (a.node === b.node) continue;
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1.5 && high > SLACK) flaws.push(`${said(a)} lies on ${said(b)}`);
    }
  });
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) flaws.push('the whole page scrolls sideways');
  return [...new Set(flaws)];
}"""


def settle(page: Any) -> None:
    """Wait until nothing changes any more."""
    until = time.monotonic() + PATIENCE / 1000
    while time.monotonic() < until:
        if page.evaluate(SETTLED):
            return
        page.wait_for_timeout(25)
    raise TimeoutError(f"{page.url} does not settle")


def visit(page: Any, name: str) -> None:
    """Go to a page in the tab as it is, and wait until it is complete."""
    go(page, *ROUTES[name])


def go(page: Any, route: str, complete: str) -> None:
    """Go to an address of the explorer, and wait until what `complete` selects is there."""
    page.evaluate("route => { location.hash = `#/${route}`; }", route)
    page.wait_for_selector(f".page.{route.partition('?')[0]}")
    page.wait_for_selector(complete)
    settle(page)


def forms(page: Any) -> Iterator[tuple[int, str]]:
    """Show the view in both widths and both themes, one after the other."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": HEIGHT})
        for theme in THEMES:
            page.evaluate("async t => (await import('/static/js/theme.js')).choose(t)", theme)
            settle(page)
            yield width, theme


def walk(
    page: Any, order: Sequence[str], *, keep: Callable[[str], None] | None = None
) -> dict[str, list[str]]:
    """Visit the pages in this order; return the flaws of each view, by its name.

    `keep` is called with the name of each view while it is shown.
    """
    found: dict[str, list[str]] = {}
    before = "start"
    for name in order:
        visit(page, name)
        for width, theme in forms(page):
            view = f"{name}-after-{before}-{width}-{theme}"
            if keep is not None:
                keep(view)
            if flaws := page.evaluate(FLAWS):
                found[view] = flaws
        before = name
    return found


def every_pair(names: Sequence[str]) -> list[str]:
    """Return a walk in which every name follows every other one, each pair once."""
    left = {(a, b) for a in names for b in names if a != b}
    path = [names[0]]
    trail: list[str] = []
    while path:  # Hierholzer: an Euler circuit of the complete directed graph
        steps = [pair for pair in sorted(left) if pair[0] == path[-1]]
        if steps:
            left.discard(steps[0])
            path.append(steps[0][1])
        else:
            trail.append(path.pop())
    return trail[::-1]


@contextmanager
def explorer(runs: Path) -> Iterator[str]:
    """Serve a folder of runs; yield the address that opens it, token and all."""
    import uvicorn

    from glassformer.web.app.server import create_app

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    port, token = listening.getsockname()[1], secrets.token_urlsafe(16)
    app = create_app(runs, token=token, port=port)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}/#t={token}/"
    server.should_exit = True
    thread.join(timeout=10)


@contextmanager
def opened(runs: Path) -> Iterator[Any]:
    """Open the explorer over a folder of runs in a browser; yield the page."""
    from playwright.sync_api import sync_playwright

    with explorer(runs) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(reduced_motion="reduce")
        page.set_default_timeout(PATIENCE)
        page.add_init_script(COUNTED)
        page.goto(address)
        page.wait_for_selector(".page")
        yield page


def draw(runs: Path | None = None) -> dict[str, list[str]]:
    """Walk every pair of pages, in both widths and themes; return the flaws, keep the pictures."""
    from tests.browser.laboratory import train_all

    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        if runs is None:
            runs = Path(place) / "runs"
            train_all(runs)
        with opened(runs) as page:

            def keep(view: str) -> None:
                page.screenshot(path=FOLDER / f"{view}.png", full_page=True)

            return walk(page, [*every_pair(list(PAGES)), *VIEWS], keep=keep)


# --- the pictures of docs/images ------------------------------------------------------------------


def shoot(runs: Path | None = None, *, folder: Path = IMAGES) -> Iterator[tuple[Path, str]]:
    """Train `reverse`, and take the pictures of the documentation: yield each, and its caption.

    runs: a folder that has that run already.
    """
    from glassformer.budget.design import solve
    from glassformer.budget.question import Budget
    from glassformer.lab.api import train
    from glassformer.lab.plots.figures import design_chart
    from glassformer.lens.show.chart_figure import figure_bytes

    with tempfile.TemporaryDirectory() as place:
        if runs is None:
            runs = Path(place) / "runs"
            with one_thread():
                train("reverse", runs=runs)
        heads, caption = _two_heads(runs / "reverse")
        words = {"heads": ",".join(heads), "second": heads[1][-1]}
        with opened(runs) as page:
            for name, (route, complete, height) in SHOTS.items():
                page.set_viewport_size({"width": WIDTHS[0], "height": height})
                page.evaluate("async t => (await import('/static/js/theme.js')).choose(t)", "light")
                go(page, route.format(**words), complete)
                path = folder / f"{name}.png"
                path.write_bytes(_fewer_colours(page.screenshot()))
                yield path, caption if name == "inspect" else ""
    path = folder / "design.png"
    path.write_bytes(figure_bytes(design_chart(solve(Budget())), "png", dpi=90))
    yield path, ""


def _two_heads(run: Path) -> tuple[list[str], str]:
    """Return the two heads of the last cross-attention that replace each other best, in words."""
    from glassformer.adapters.load import load
    from glassformer.lab.api import opened as engine_of

    task = engine_of(run)[1]
    names = task.tokenizer.names
    batch = task.batch("val", np.array([0]))
    source = [names[token] for token in batch.source.tokens[0]]
    target = [names[token] for token in batch.targets["next"][0]]
    seen = load(run).inspect(
        " ".join(source[:-1]), target=" ".join(word for word in target if word != "EOS")
    )
    one = {f"cross.L1H{head}": seen.ablate(f"cross.L1H{head}").after.loss for head in range(4)}
    both = {pair: seen.ablate(*pair).after.loss for pair in combinations(one, 2)}
    pair = max(both, key=lambda pair: both[pair] - max(one[head] for head in pair))
    worst = max(one[head] for head in pair)
    return list(pair), (
        f"loss {seen.loss:.4f}; ablating {pair[0]} or {pair[1]} at most {worst:.4f}, both "
        f"{both[pair]:.2f}"
    )


def _fewer_colours(png: bytes) -> bytes:
    """Return a PNG with a palette: a quarter of the size, and no difference to the eye."""
    from PIL import Image

    small = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS).save(small, "PNG", optimize=True)
    return small.getvalue()
