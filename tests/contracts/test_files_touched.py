"""Adding a page or a check touches few files: the ones that its docs page names, counted here."""

import functools
import re

from glasscheck.catalogue import SUBJECT_CHECKS
from glassformer.checks.catalogue import OWN_CHECKS, PART_CHECKS
from tests.contracts.test_docs import ROOT
from tests.contracts.test_house import HOUSE

WEB = HOUSE / "web"
#: A page's name as a module, a route, a file or a style: not the English word, not `spec.errors`.
PAGE = re.compile(
    r"""["'`/#]errors\b|(?<!spec)\.errors\b|pages import .*\berrors\b|\berrors\.(?:ROUTES|js|css)"""
)


@functools.cache
def texts(folder):
    """The text of every source file below, by its path."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".js", ".css")]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


def spelled(folder, pattern):
    return {name for name, text in texts(folder).items() if pattern.search(text)}


def named_in(page):
    """Paths that a docs page lists as `path`, with NAME for the new part."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return set(re.findall(r"^\d\. `([\w./-]+)`", text, re.MULTILINE))


def test_a_page_is_spelled_in_at_most_six_files():
    package = set()
    for part in ("app", "pages", "static"):
        package |= spelled(WEB / part, PAGE)
    docs = {"docs/explore.md"}
    assert package | docs == {
        name.replace("NAME", "errors") for name in named_in("adding-a-page.md")
    }
    assert len(package | docs) <= 6


def test_a_check_is_spelled_in_at_most_three_files():
    """Its name in the catalogue, its function in one module of rows, its planted fault."""
    needed = named_in("adding-a-check.md")
    assert len(needed) <= 3
    catalogue, faults = "src/glassformer/checks/catalogue.py", "tests/checks/faults.py"
    # The adapters' certificate has rows of its own; the table of executors refers to rows.
    own = {f"src/glassformer/checks/{name}.py" for name in ("adapter", "executors")}
    assert {catalogue, faults} < needed
    beside = "glasscheck/src/glasscheck/catalogue.py"
    for check in (*PART_CHECKS, *OWN_CHECKS, *SUBJECT_CHECKS):
        place = beside if check in SUBJECT_CHECKS else catalogue
        name = re.compile(re.escape(f'"{check.name}"'))
        files = spelled(HOUSE, name) | spelled((ROOT / beside).parent, name)
        assert files - own == {place}, check.name
        home = check.run.__module__.rpartition(".rows.")[2]
        run = re.compile(rf"\b{home}\.{check.run.__name__}\b")
        assert place in spelled((ROOT / place).parent, run), check.name
