"""Tables of options in the docs are those of the specs."""

from pages.options import refresh, refreshed, table_of
from pages.quotes import PAGES


def test_tables_are_up_to_date():
    for page in sorted(PAGES.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert refreshed(text) == text, f"{page.name}: run python -m pages options"


def test_an_old_table_is_replaced_and_the_rest_is_kept(tmp_path):
    mark = "<!-- options: tests/spec/test_options.py Sample -->"
    old = f"before\n\n{mark}\n\n| field |\n|---|\n| `gone` |\n\nafter\n"
    (tmp_path / "page.md").write_text(old)
    assert refresh(tmp_path) == [tmp_path / "page.md"]
    new = (tmp_path / "page.md").read_text()
    table = table_of("tests/spec/test_options", "Sample")
    assert new == f"before\n\n{mark}\n\n{table}\nafter\n"
    assert refresh(tmp_path) == []
    assert "| `share` | `--share` | 1 | `0 < x <= 1` | A share. |\n" in table
    assert "| `stops` | `--stops`, repeatable |  |  | Texts. |\n" in table
