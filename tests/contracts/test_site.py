"""The documentation as a site: it builds without a warning, asks nobody, and its links lead on."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.contracts.test_docs import PAGES, ROOT

#: Elements that a browser loads without being asked to, and the attribute that says what.
LOADED = {
    "script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "video": "src",
    "audio": "src", "embed": "src", "object": "data", "input": "src",
}  # fmt: skip
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1", re.M | re.S)


class Loads(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if named.get("rel") not in ("canonical", "next", "prev", "edit"):
            self.found.append(named.get(LOADED.get(tag, ""), "") or "")


def outside(site: Path) -> list[str]:
    """Everything that a page or a style would fetch from elsewhere."""
    found = []
    for page in site.rglob("*.html"):
        loads = Loads(page.read_text(encoding="utf-8")).found
        found += [f"{page.name}: {url}" for url in loads if re.match(r"(https?:)?//", url)]
    for style in site.rglob("*.css"):
        urls = re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^)\"']+)", style.read_text())
        found += [f"{style.name}: {url}" for url in urls]
    return found


def test_reading_it_asks_nobody(documentation):
    site = documentation
    assert not outside(site)
    assert (site / "search" / "search_index.js").is_file()  # found from a folder, too
    learn = (site / "index.html").read_text(encoding="utf-8")
    assert learn.index("learn/index.html") < learn.index("architecture.html")


def test_a_page_that_asks_somebody_is_noticed(tmp_path):
    (tmp_path / "page.html").write_text('<script src="https://cdn.example/x.js"></script>')
    (tmp_path / "style.css").write_text('@import "//fonts.example/font.css";')
    assert len(outside(tmp_path)) == 2
    assert Loads('<a href="https://example.org">read</a>').found == [""]


def test_every_page_is_in_the_navigation(documentation):
    site = documentation
    made = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    pages = {
        page.relative_to(ROOT / "docs").with_suffix("")
        for page in PAGES
        if page.is_relative_to(ROOT / "docs")
    }
    assert pages <= made
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f"{page}.md" in listed for page in pages)


# --- links --------------------------------------------------------------------------------------


def plain(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(text: str) -> set[str]:
    """The names that headings get: small letters, words joined by hyphens."""
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.+?)\s*$", text, re.M):
        words = re.sub(r"[^\w\s-]", "", title.replace("`", "").lower()).strip()
        found.add(re.sub(r"\s", "-", words))
    return found


def broken(page: Path) -> list[str]:
    """Relative links of a page that lead to no file, or to no heading of one."""
    found = []
    for target, name in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)", plain(page)):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        file = page.parent / target if target else page
        if not file.exists() or (name and name not in anchors(plain(file))):
            found.append(f"{target}#{name}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_anchor_resolves(page):
    assert not broken(page)


def test_broken_links_are_noticed(tmp_path):
    page = tmp_path / "a.md"
    page.write_text(
        "# One, two `three`\n[a](#one-two-three) [b](#two) [c](b.md) [d](a.md#one-two-three)\n"
        "[e](a.md#no) [f](https://example.org)\n```\n[g](nowhere)\n```\n"
    )
    assert broken(page) == ["#two", "b.md#", "a.md#no"]
