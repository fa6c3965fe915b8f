"""The certificate in other people's tests: fixture, rows as tests, reports, older certificates."""

import json
import subprocess
import sys
import tomllib
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import glasscheck as gc
import glassformer as gf
from glasscheck.plugin import certify
from glassformer.cli.main import app
from glassformer.spec.errors import FileError
from tests.checks.strangers import CACHED, made
from tests.contracts.test_docs import ROOT

pytest_plugins = ["pytester"]

FUTURE = "the future changes no bit of the past"


def test_the_assertion_names_what_does_not_hold():
    assert certify(made()(), only="cache").failed == 0
    assert certify(made()(), rows=[CACHED], only="cache").passed
    broken = made("off by one with a cache")
    with pytest.raises(AssertionError, match="cached = uncached, token by token: bug"):
        certify(broken(), only="cache")
    certify(broken(), only="cache", expect={CACHED: "bug"})
    with pytest.raises(AssertionError, match="token by token: passed, expected bug"):
        certify(made()(), only="cache", expect={CACHED: "bug"})
    with pytest.raises(gc.InputError, match="no check 'cached = uncached'"):
        certify(made()(), rows=["cached = uncached"])


def test_reports_for_pull_requests_and_servers():
    report = gf.verify(made("off by one with a cache")(), only="cache")
    assert f"| bug | {CACHED} |" in report.markdown()
    suite = ElementTree.fromstring(report.junit())
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == [CACHED]
    assert (
        int(suite.get("skipped", 0)) == sum(case.find("skipped") is not None for case in suite) > 0
    )


def test_what_changed_since_an_older_certificate():
    older = json.loads(json.dumps(gf.verify(made()(), only="cache").to_dict()))
    newer = gf.verify(made("off by one with a cache")(), only="cache")
    assert gf.verify(made()(), only="cache").compare(older) == []
    (first, *_) = newer.compare(older)
    assert first.startswith(f"{CACHED}: was passed (")
    assert ", is bug (" in first


def test_a_known_failure_is_no_news():
    newer = gf.verify(made("off by one with a cache")(), only="cache")
    older = gf.verify(made()(), only="cache").to_dict()
    assert [f.name for f in newer.new_failures(older)] == [CACHED]
    assert newer.new_failures(newer.to_dict()) == []
    older["checks"][0]["worst"] = 1e-12  # the first passed row of cached = uncached
    grown = gf.verify(made()(), only="cache")
    assert grown.compare(older) == []  # a hundred times nothing is nothing
    with pytest.raises(FileError, match="no certificate"):
        grown.compare({"passed": 3})


def test_the_command_keeps_and_compares_certificates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["verify", "tests.checks.foreign:leaky", "--only", "causality"]
    files = [f"--{name}={name}" for name in ("out", "junit", "markdown", "badge")]
    result = CliRunner().invoke(app, [*words, *files])
    assert result.exit_code == 1
    kept = json.loads((tmp_path / "out").read_text())
    assert kept["failed"] == 1 and kept["versions"]["torch"]
    assert ElementTree.parse(tmp_path / "junit").getroot().get("failures") == "1"
    assert f"| bug | {FUTURE} |" in (tmp_path / "markdown").read_text()
    badge = ElementTree.parse(tmp_path / "badge").getroot()
    assert badge.get("aria-label") == "glass verify: 1 failed"
    again = CliRunner().invoke(app, [*words, "--against", "out"])
    assert again.exit_code == 0
    assert "nothing changed" in again.stdout
    (tmp_path / "bad.json").write_text("[]")
    refused = CliRunner().invoke(app, [*words, "--against", "bad.json"])
    assert isinstance(refused.exception, FileError)


def test_rows_become_tests(pytester):
    pytester.makepyfile(
        models="""
        import torch
        from glassformer import Subject
        table = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
        def good():
            return Subject(name="t", logits=lambda t, v: table[t], vocab_size=7, max_length=32)
        def bad():
            def logits(t, v):
                return table[t].flip(1).cumsum(1).flip(1)
            return Subject(name="t", logits=logits, vocab_size=7, max_length=32)
        """,
        test_it="""
        from models import good
        def test_good(glass_certificate):
            glass_certificate(good(), only="causality")
        """,
    )
    plugin = ("-p", "glassformer.checks.plugin", "-p", "no:cacheprovider")
    result = pytester.inline_run(*plugin, "--glass", "models:good")
    passed, skipped, failed = result.listoutcomes()
    assert len(passed) > 3
    assert skipped
    assert not failed
    both = ("--glass", "models:good", "--glass", "models:bad")
    run = pytester.inline_run(*plugin, *both)
    _, _, failed = run.listoutcomes()
    assert f"models:bad::{FUTURE}" in [report.nodeid for report in failed]
    assert not any(report.nodeid.startswith("models:good") for report in failed)
    counted = sum(len(report.result) for report in run.getreports("pytest_collectreport")
                  if report.nodeid.startswith("models:"))  # fmt: skip
    assert counted == len([r for r in run.getreports("pytest_runtest_logreport")
                           if r.when == "call" or r.skipped]) - 1 >= 20  # fmt: skip
    # An id runs its row alone.
    alone = pytester.inline_run(*plugin, "--glass", failed[0].nodeid, "-k", "models")
    assert [r.nodeid for r in alone.listoutcomes()[2]] == [failed[0].nodeid]


def test_pytest_finds_the_plugin_and_torch_is_not_imported_for_it():
    """By an entry point of the name that `-p` has, so that the two are one."""
    project = tomllib.loads((ROOT / "glasscheck" / "pyproject.toml").read_text())
    (entry,) = project["project"]["entry-points"]["pytest11"].items()
    assert entry == (certify.__module__, certify.__module__)
    lines = f"import sys, {certify.__module__}; print('torch' in sys.modules)"
    made = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "False"
