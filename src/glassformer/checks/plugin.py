"""A pytest plugin: the certificate as a fixture, and as one test for each row.

Load it with `-p glassformer.checks.plugin`, or in a conftest.py with
`pytest_plugins = ["glassformer.checks.plugin"]`.
`pytest --glass package.module:factory` adds a test for each row of that model.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from glassformer.checks.catalogue import SUBJECT_CHECKS, Finding
from glassformer.checks.report import Report, verify
from glassformer.checks.subject import subject_of_factory
from glassformer.spec.errors import InputError, nearest


def certify(
    model: object,
    *,
    rows: Iterable[str] | None = None,
    expect: Mapping[str, str] | None = None,
    **options: Any,
) -> Report:
    """Verify a model; raise AssertionError if a row fails.

    `rows` limits what may fail to these names, each of which must have been offered; `expect` maps
    a row to the verdict that is known and accepted, and fails as soon as the verdict is another.
    """
    expected, chosen = dict(expect or {}), None if rows is None else set(rows)
    known = {check.name for check in SUBJECT_CHECKS}
    for name in (*expected, *(chosen or ())):
        if name not in known:
            raise InputError(f"no check '{name}'", hint=nearest(name, known))
    report = verify(model, **options)
    wrong = []
    for f in report.findings:
        if f.name in expected:
            if f.verdict != expected[f.name]:
                wrong.append(f"{f.name}: {f.verdict}, expected {expected[f.name]}")
        elif (chosen is None and f.failed) or (
            chosen is not None and f.name in chosen and f.verdict != "passed"
        ):
            wrong.append(f"{f.name}: {f.verdict}. {f.note}")
    if wrong:
        raise AssertionError("\n".join(["the certificate does not hold", *wrong, "", str(report)]))
    return report


@pytest.fixture
def glass_certificate() -> Callable[..., Report]:
    """Return `certify(model, rows=None, expect=None, ...)`, which returns the report."""
    return certify


class Row(pytest.Item):
    """One row of a certificate as a test."""

    finding: Finding

    def runtest(self) -> None:
        """Fail where the row is a bug; skip where it was not offered."""
        f = self.finding
        if f.verdict in ("not offered", "raised"):
            pytest.skip(f.note)
        if f.failed:
            pytest.fail(f"{f.worst:.1e}, allowed {f.tolerance:.1e}. {f.note}", pytrace=False)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return the model and the row, for pytest's lines."""
        return self.finding.subject, None, f"{self.finding.subject}: {self.name}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--glass package.module:factory`."""
    parser.addoption(
        "--glass",
        action="append",
        default=[],
        metavar="MODULE:FACTORY",
        help="verify what this function returns: a test for each row of the certificate",
    )


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add a test for each row of each model that was named."""
    for reference in config.getoption("--glass"):
        try:
            report = verify(subject_of_factory(reference))
        except InputError as error:
            raise pytest.UsageError(str(error)) from error
        for finding in report.findings:
            row = Row.from_parent(session, name=finding.name)
            row.finding = finding
            items.append(row)
