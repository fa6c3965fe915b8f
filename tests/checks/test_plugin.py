"""The certificate in other people's tests: fixture, rows as tests, reports, older certificates."""

import json
from xml.etree import ElementTree

import pytest

import glassformer as gf
from glassformer.checks.plugin import certify
from glassformer.spec.errors import InputError
from tests.checks.strangers import CACHED, made

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
    with pytest.raises(InputError, match="no check 'cached = uncached'"):
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
    _, _, failed = pytester.inline_run(*plugin, "--glass", "models:bad").listoutcomes()
    assert any(FUTURE in report.nodeid for report in failed)
