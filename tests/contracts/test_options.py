"""Tables of options in the docs are those of the specs."""

import re

import pytest
from pages.options import refresh, refreshed, table_of
from pages.quotes import PAGES, SOURCES

from glassformer.cli.main import VERBS, main
from glassformer.spec.options import options_of
from glassformer.spec.train import TrainSpec


def test_tables_are_up_to_date():
    for page in sorted(PAGES.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert refreshed(text) == text, f"{page.name}: run python -m pages options"


def test_every_verb_is_on_the_page_of_the_command_line():
    page = (PAGES / "cli.md").read_text("utf-8")
    assert [verb for verb in VERBS if f"<!-- help: {verb} -->" not in page] == []


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


@pytest.mark.parametrize("name", ["typical_p", "min_p"])
def test_a_sampler_is_named_in_three_files_at_most(name):
    """Its field, its rule, and where a check uses it; everything else is made from the field."""
    word = re.compile(rf"\b{name}\b|\b{name.replace('_', '-')}\b")
    sources = [path for path in SOURCES.rglob("*") if path.suffix in (".py", ".js", ".css")]
    named = {str(p.relative_to(SOURCES)) for p in sources if word.search(p.read_text("utf-8"))}
    home = {"glassformer/spec/decoding.py", "glassformer/generation/samplers.py"}
    assert home <= named
    assert len(named) <= 3, named
    if name == "typical_p":
        assert named == home, "the page `adding a sampler` names two files"


def test_every_setting_of_training_is_listed_with_its_default(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["glass", "train", "--settings"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    said = capsys.readouterr().out
    for each in options_of(TrainSpec):
        assert f"train.{each.name}=" in said
        assert each.help in said
    assert "train.lr=0.001\n    Learning rate at the schedule's peak. [x > 0]\n" in said
