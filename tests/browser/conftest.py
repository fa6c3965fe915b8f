"""A real browser on a real server over real runs.

Without Chromium these tests are skipped; with CHROMIUM=install in the environment they fail.

open_page(route, width=1320, theme="light") gives a Playwright page under three guards: no error on
the console, no exception, no request to another origin. axe(page) holds it to WCAG 2.2 AA, and
shoot(page, name) keeps a picture in build/screens to look at.
"""

import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    expect,
    sync_playwright,
)

from glassformer.web.app.server import create_app
from glassformer.web.app.workspace import Workspace
from tests.browser.laboratory import shared_laboratory

#: Milliseconds that are waited for a page: no claim of ours, but a busy machine may need them.
PATIENCE = 60_000
expect.set_options(timeout=PATIENCE)
SCREENS = Path(__file__).parents[2] / "build" / "screens"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
WIDTHS, THEMES = (1320, 390), ("light", "dark")
#: Layout depends on the width and contrast on the theme: two forms show every one of both.
FORMS = tuple(zip(WIDTHS, THEMES, strict=True))
HEIGHTS = {1320: 900, 390: 844}
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")

Opener = Callable[..., Page]


@dataclass(frozen=True)
class Site:
    """The explorer at work: its address, its token, and the folder of its runs."""

    url: str
    token: str
    runs: Path
    workspace: Workspace

    def at(self, route: str) -> str:
        """The address that opens a route, token and all."""
        return f"{self.url}/#t={self.token}/{route}"


def chromium() -> str | None:
    """Debian's browser, or the one that GLASS_CHROMIUM names."""
    return shutil.which(os.environ.get("GLASS_CHROMIUM") or "chromium")


NO_CHROMIUM = "no Chromium to open the pages with: `make chromium` installs it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a browser where there is none, unless it was to be installed."""
    if chromium() or os.environ.get("CHROMIUM") == "install":
        return
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason=NO_CHROMIUM))


@pytest.fixture(scope="session")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny runs: trained once for all workers, a copy for each."""
    shared = shared_laboratory(tmp_path_factory)
    runs = tmp_path_factory.mktemp("explorer") / "runs"
    for name in ("runs", "sweeps"):
        shutil.copytree(shared / name, runs.parent / name, symlinks=True)
    return runs


@contextmanager
def serving(runs: Path, port: int = 0) -> Iterator[Site]:
    """The server in a thread of its own; port 0 takes a free one."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    port, token = listening.getsockname()[1], secrets.token_urlsafe(16)
    app = create_app(runs, token=token, port=port)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    url = f"http://127.0.0.1:{port}"
    yield Site(url=url, token=token, runs=runs, workspace=app.state.workspace)
    server.should_exit = True
    thread.join(timeout=10)


@pytest.fixture(scope="session")
def site(laboratory: Path) -> Iterator[Site]:
    """The server over the laboratory."""
    with serving(laboratory) as site:
        yield site


# Of the package, not the session: Playwright's event loop must be gone when others start theirs.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One browser for all pages."""
    path = chromium()
    if path is None:
        pytest.fail(NO_CHROMIUM)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


def new_context(browser: Browser, theme: str) -> BrowserContext:
    """A browser context of its own: storage, permissions, the theme that is chosen at first."""
    context = browser.new_context(
        reduced_motion="reduce", permissions=["clipboard-read", "clipboard-write"]
    )
    context.set_default_timeout(PATIENCE)
    context.add_init_script(
        f"localStorage.getItem('glass-theme') ?? localStorage.setItem('glass-theme', '{theme}')"
    )
    return context


@dataclass
class Tabs:
    """A tab for each theme, used by test after test: a new window takes longer than most tests."""

    browser: Browser
    kept: dict[str, Page] = field(default_factory=dict)

    def take(self, theme: str) -> Page:
        """The kept tab, empty, while nobody else has it; else one in a context of its own."""
        return self.kept.pop(theme, None) or new_context(self.browser, theme).new_page()

    def give_back(self, page: Page, theme: str) -> None:
        """Empty the tab and its storage; close it where there is one already."""
        if theme in self.kept or page.is_closed():
            page.context.close()
            return
        for other in page.context.pages:
            if other is not page:
                other.close()
        page.evaluate("localStorage.clear(); sessionStorage.clear()")
        page.goto("about:blank")
        self.kept[theme] = page


@pytest.fixture(scope="package")
def tabs(browser: Browser) -> Tabs:
    """The tabs of this browser."""
    return Tabs(browser)


@dataclass
class Watch:
    """What a page must not do, and each request that it made."""

    origin: str
    faults: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    #: Statuses that a test expects the server to answer with: Chromium logs them as errors.
    expected: set[int] = field(default_factory=set)

    def follow(self, page: Page) -> None:
        """Listen to everything."""
        page.on("console", self._said)
        page.on("pageerror", self._raised)
        page.on("request", self._asked)

    def leave(self, page: Page) -> None:
        """Listen no longer."""
        page.remove_listener("console", self._said)
        page.remove_listener("pageerror", self._raised)
        page.remove_listener("request", self._asked)

    def _raised(self, error: Exception) -> None:
        self.faults.append(f"exception: {error}")

    def _said(self, message: ConsoleMessage) -> None:
        expected = any(f"status of {status}" in message.text for status in self.expected)
        if message.type in ("error", "warning") and not expected:
            self.faults.append(f"console {message.type}: {message.text}")

    def _asked(self, request: Request) -> None:
        self.requests.append(request)
        if not request.url.startswith((self.origin + "/", "data:", "blob:")):
            self.faults.append(f"request to {request.url}")

    def paths(self) -> list[str]:
        """The path of every request, in order, without the origin."""
        return [request.url.removeprefix(self.origin) for request in self.requests]


@pytest.fixture
def watch(site: Site) -> Watch:
    """The guards of this test's pages: `watch.paths()`, `watch.expected`."""
    return Watch(origin=site.url)


@pytest.fixture
def open_page(site: Site, tabs: Tabs, watch: Watch) -> Iterator[Opener]:
    """open_page("inspect?run=digits", width=390, theme="dark"); guarded to the end of the test."""
    taken: list[tuple[Page, str]] = []

    def opened(route: str = "", *, width: int = 1320, theme: str = "light") -> Page:
        page = tabs.take(theme)
        taken.append((page, theme))
        page.set_viewport_size({"width": width, "height": HEIGHTS.get(width, 900)})
        watch.follow(page)
        page.goto(site.at(route))
        return page

    yield opened
    for page, theme in taken:
        watch.leave(page)
        tabs.give_back(page, theme)
    assert not watch.faults, "\n".join(watch.faults)


@pytest.fixture(scope="session")
def axe() -> Callable[[Page], None]:
    """Hold a page to WCAG 2.2 AA and axe's own good habits."""
    checker = Axe()

    def check(page: Page) -> None:
        found = checker.run(page, options={"runOnly": {"type": "tag", "values": list(RULES)}})
        told = [
            f"{rule['id']}: {rule['help']}: " + "; ".join(node["html"] for node in rule["nodes"])
            for rule in found.response["violations"]
        ]
        assert not told, "\n".join(told)

    return check


@pytest.fixture(scope="session")
def shoot() -> Callable[[Page, str], Path]:
    """A picture of the whole page in build/screens."""
    SCREENS.mkdir(parents=True, exist_ok=True)

    def taken(page: Page, name: str) -> Path:
        path = SCREENS / f"{name}.png"
        page.screenshot(path=path, full_page=True)
        return path

    return taken
