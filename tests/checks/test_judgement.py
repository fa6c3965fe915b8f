"""What fails a run: errors, rules, baselines, lost rows; and the formats that carry it away."""

import json
from dataclasses import replace
from datetime import date

import pytest
import torch
from torch import nn

import glasscheck as gc
from glasscheck.catalogue import Finding
from glasscheck.errors import FileError, InputError
from glasscheck.judgement import Known, Rules, baseline_of
from glasscheck.report import Report
from glasscheck.settings import settings_of, shard_of
from tests.checks.strangers import made

ROW = Finding("a row", "cache", "m:tiny", "float32", "V7", 1.0, 1e-5, "passed")


def report(**verdicts):
    return Report(tuple(replace(ROW, name=name, verdict=v) for name, v in verdicts.items()))


def test_an_error_is_a_failure_unless_errors_are_allowed():
    found = report(a="passed", b="error", c="not offered", d="limit")
    assert (found.failed, found.warnings, found.ran) == (1, 1, 2)
    assert found.summary().startswith("2 of 4 checks ran: 1 passed, 1 failed, 1 warning; not asked")
    assert (allowed := found.judged(Rules(allow_errors=True))).failed == 0
    assert allowed.warnings == 2
    assert found.judged(Rules(strict=True)).failed == 2


def test_what_is_required_must_have_passed():
    found = report(a="passed", b="not offered")
    assert found.judged(Rules(require=("a",))).failed == 0
    (failed,) = [f for f in found.judged(Rules(require=("b",))).findings if f.failed]
    assert "required, and not passed" in failed.note
    with pytest.raises(InputError, match="no check 'bb' to require"):
        found.judged(Rules(require=("bb",)))


def test_a_known_limitation_has_a_reason_and_a_day(tmp_path):
    known = Known(check="b", reason="no room", until=date(2027, 1, 1), model="m:*")
    found = report(a="passed", b="bug")
    before = found.judged(Rules(baseline=(known,), today=date(2026, 12, 31)))
    assert (before.failed, before.warnings) == (0, 1)
    assert "known limitation" in before.text() and "no room (until 2027-01-01)" in before.text()
    after = found.judged(Rules(baseline=(known,), today=date(2027, 1, 2), strict=True))
    assert after.failed == 1 and "ended on 2027-01-01" in after.text()
    elsewhere = replace(known, model="other:*")
    assert found.judged(Rules(baseline=(elsewhere,), today=date(2026, 12, 31))).failed == 1
    file = tmp_path / "known.toml"
    file.write_text('[[known]]\ncheck = "b"\nreason = "r"\nuntil = 2027-01-01\nskip = true\n')
    (entry,) = baseline_of(file)
    rules = Rules(baseline=(entry,), today=date(2026, 1, 1))
    assert rules.skipped("m:tiny") == {"b": "r (until 2027-01-01)"}
    assert Rules(baseline=(entry,), today=date(2028, 1, 1)).skipped("m:tiny") == {}
    assert rules.unneeded(report(b="passed").findings) == [entry]
    for text, word in (
        ('[[known]]\ncheck = "b"\nuntil = 2027-01-01\n', "without 'reason'"),
        ('[[known]]\ncheck = "b"\nreason = "r"\n', "without 'until'"),
        ('[[known]]\ncheck = "b"\nreason = "r"\nuntil = "soon"\n', "not a date"),
        ('[[known]]\nchek = "b"\n', "a baseline has no 'chek'"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=word):
            baseline_of(file)
    with pytest.raises(FileError):
        baseline_of(tmp_path / "none.toml")


def test_passed_to_error_and_lost_rows_are_news():
    older = json.loads(json.dumps(report(a="passed", b="passed", c="passed").to_dict()))
    newer = report(a="error", b="not offered")
    assert [f.name for f in newer.new_failures(older)] == ["a", "b", "c"]
    assert "a: was passed" in newer.compare(older)[0] and "is error" in newer.compare(older)[0]
    explained = report(a="bug", b="not offered")
    note = "not asked, as 'a' does not hold"
    explained = Report(tuple(replace(f, note=note) for f in explained.findings))
    assert [f.name for f in explained.new_failures(older)] == ["a", "c"]


def test_a_skipped_check_does_not_run():
    skip = Known(
        check="cached = uncached, token by token", reason="later", until=date(9999, 1, 1), skip=True
    )
    found = gc.verify(made()(), only="cache", rules=Rules(baseline=(skip,)))
    row = {f.name: f for f in found.findings}[skip.check]
    assert (row.verdict, row.note) == ("not offered", "skipped: later (until 9999-01-01)")


def test_shards_cover_every_check_once():
    every = gc.verify(made()(), only="cache")
    parts = [gc.verify(made()(), only="cache", shard=(i, 3)) for i in (1, 2, 3)]
    names = [f.name for part in parts for f in part.findings]
    assert sorted(names) == sorted(f.name for f in every.findings)
    assert all(shard_of(text) == pair for text, pair in ((None, None), ("3/8", (3, 8))))
    for text in ("0/3", "4/3", "3", "a/b"):
        with pytest.raises(InputError, match="no part"):
            shard_of(text)


@pytest.mark.parametrize(
    ("fault", "module"),
    [("one token of the future", "blocks.0.out"), ("off by one with a cache", "places"),
     ("norm over time", "blocks.0.norm")],
)  # fmt: skip
def test_a_failure_comes_with_a_script_and_the_module_at_fault(fault, module):
    """The script, run without glasscheck on the same model, fails as the row did."""
    found = gc.verify(made(fault)())
    scripts = found.repros()
    assert scripts, found
    name, script = next(iter(scripts.items()))
    (row,) = [f for f in found.findings if f.name == name]
    assert row.note.endswith(f"first module that differs: {module}"), row.note
    model = made(fault)()
    lines = script.replace("model = ...  # the module that was verified", "")
    assert "glasscheck" not in lines
    with pytest.raises(AssertionError):
        exec(lines, {"model": model})
    with torch.no_grad():
        assert model.training is False


def test_formats():
    found = report(a="passed", b="bug", c="limit", d="error")
    lines = found.annotations().splitlines()
    assert [line.split(" ")[0] for line in lines] == ["::error", "::warning", "::error"]
    assert "file=m.py,title=b" in lines[0]
    (run,) = json.loads(found.sarif())["runs"]
    assert [(r["ruleId"], r["level"]) for r in run["results"]] == [
        ("b", "error"), ("c", "warning"), ("d", "error"),
    ]  # fmt: skip


def test_settings(tmp_path):
    file = tmp_path / "pyproject.toml"
    assert settings_of(tmp_path).models == ()
    file.write_text("""
[tool.glasscheck]
models = ["a:b"]
require = ["r"]
names = { cache = "memo" }
[[tool.glasscheck.model]]
factory = "c:d"
call = { n = 3 }
bidirectional = true
""")
    told = settings_of(tmp_path)
    assert [m.factory for m in told.models] == ["a:b", "c:d"] and told.require == ("r",)
    assert told.of("c:d").options() == {"call": {"n": 3}, "names": {"cache": "memo"},
                                        "causal": False}  # fmt: skip
    file.write_text("[tool.glasscheck]\nmodles = []\n")
    with pytest.raises(InputError, match="no setting 'modles'"):
        settings_of(tmp_path)


def test_factories_are_seeded_and_arguments_fixed(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(11, 11)

        def forward(self, words, *, scale, memo=None):
            return self.table(words) * scale

    model = Scaled()
    found = gc.verify(model, call={"scale": 2.0}, names={"tokens": "words"})
    assert found.failed == 0 and found.passed > 8
    with pytest.raises(InputError, match="has no 'wrods'"):
        gc.verify(model, call={"scale": 2.0}, names={"tokens": "wrods"})
