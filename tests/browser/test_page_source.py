"""What the page is made of: plain files, few lines, no way for text to become markup."""

import re
from pathlib import Path

import pytest

STATIC = Path(__file__).parents[2] / "src" / "glassformer" / "web" / "static"
SCRIPTS = sorted((STATIC / "js").glob("*.js"))
SHEETS = sorted(path for path in STATIC.glob("*.css") if path.name != "app.css")
#: A limit to notice growth by. A page takes 300 to 700 lines; there are seven, with a table that
#: sorts, a picture of the model and a beam tree. Whoever needs more looks for duplicates first.
#: The last 20 are those that draw, name and copy validation beside training.
LINES, WIDE = 4_520, 120
FORBIDDEN = (
    r"\binnerHTML\b", r"\bouterHTML\b", r"\binsertAdjacentHTML\b", r"\bdocument\.write",
    r"\beval\(", r"\bnew Function\b", r"\bsetHTMLUnsafe\b", r"\bcreateContextualFragment\b",
    r"\bDOMParser\b", r"\bsetTimeout\(\s*[\"'`]",
)  # fmt: skip


def test_all_scripts_together_are_small():
    total = sum(len(path.read_text("utf-8").splitlines()) for path in SCRIPTS)
    assert total <= LINES, f"{total} lines of JavaScript"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_makes_markup_of_text(path):
    source = path.read_text("utf-8")
    for pattern in FORBIDDEN:
        assert not re.search(pattern, source), pattern


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_is_generated_or_squeezed(path):
    lines = path.read_text("utf-8").splitlines()
    assert lines[0].startswith("// "), "a file begins with what it decides"
    assert max(map(len, lines)) <= WIDE
    assert "sourceMappingURL" not in path.read_text("utf-8")
    assert not path.name.endswith(".min.js")


def test_nothing_is_fetched_from_elsewhere():
    names = "http://www.w3.org/2000/svg"  # a name, never fetched
    for path in STATIC.rglob("*"):
        if path.is_file():
            found = re.findall(
                r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", path.read_text("utf-8").replace(names, "")
            )
            assert not found, f"{path.name}: {found}"


def test_only_pages_styles_scripts_and_an_icon_are_here():
    kinds = {path.suffix for path in STATIC.rglob("*") if path.is_file()}
    assert kinds <= {".html", ".css", ".js", ".svg"}


@pytest.mark.parametrize("path", SHEETS, ids=lambda path: path.name)
def test_a_page_styles_nothing_but_itself(path):
    """Sheets stay once their page was visited: a rule outside `.page.NAME { }` is another's too."""
    css = re.sub(r"/\*.*?\*/", "", path.read_text("utf-8"), flags=re.DOTALL).strip()
    assert css.startswith(f".page.{path.stem} {{")
    depth = [0]
    for sign in css:
        depth.append(depth[-1] + {"{": 1, "}": -1}.get(sign, 0))
    assert depth[-1] == 0 and 0 not in depth[css.index("{") + 1 : -1], "one block holds it all"
    assert not re.search(r"(?:^|[\s,;{}])(?::root|html|body)\b|@import|@scope", css)


def test_every_import_is_relative_and_exists():
    for path in SCRIPTS:
        for target in re.findall(
            r"""(?:from|import)\s*\(?\s*["']([^"']+)["']""", path.read_text("utf-8")
        ):
            assert target.startswith("./"), f"{path.name} imports {target}"
            assert (path.parent / target).is_file(), f"{path.name} imports {target}"


def test_the_page_itself_has_no_inline_script_or_style():
    html = (STATIC / "index.html").read_text("utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)", html)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=", html)
