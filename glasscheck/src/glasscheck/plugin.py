"""A pytest plugin: the certificate as a fixture, and as one test for each row.

pytest finds it where glasscheck is installed; torch is imported by the first model alone.
`pytest --glass package.module:factory` adds a test for each row of that model, and
`--glass "package.module:factory::row"`, the id of such a test, that row alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # which imports torch, and every pytest loads this file
    from glasscheck.catalogue import Finding
    from glasscheck.report import Report


def certify(
    model: object,
    *,
    rows: Iterable[str] | None = None,
    expect: Mapping[str, str] | None = None,
    **options: Any,
) -> "Report":
    """Verify a model; raise AssertionError if a row fails.

    `rows` limits what may fail to these names, each of which must have been offered; `expect` maps
    a row to the verdict that is known and accepted, and fails as soon as the verdict is another.
    """
    from glasscheck.report import verify

    expected, chosen = dict(expect or {}), None if rows is None else set(rows)
    report = verify(model, **options)
    _known([*expected, *(chosen or ())], report.findings)
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


def _known(names: Iterable[str], found: "Iterable[Finding]") -> None:
    """Refuse a row that is none."""
    from glasscheck.catalogue import SUBJECT_CHECKS
    from glasscheck.errors import InputError, nearest

    known = {check.name for check in SUBJECT_CHECKS} | {finding.name for finding in found}
    for name in names:
        if name not in known:
            raise InputError(f"no check '{name}'", hint=nearest(name, known))


@pytest.fixture
def glass_certificate() -> "Callable[..., Report]":
    """Return `certify(model, rows=None, expect=None, ...)`, which returns the report."""
    return certify


class Certificate(pytest.Collector):
    """A model whose rows are tests; its name begins their ids."""

    findings: "Sequence[Finding]"

    def collect(self) -> Iterator["Row"]:
        """Yield a test for each row."""
        for finding in self.findings:
            row = Row.from_parent(self, name=finding.name)
            row.finding = finding
            yield row


class Row(pytest.Item):
    """One row of a certificate as a test."""

    finding: "Finding"

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
        certificate = Certificate.from_parent(
            session, name=_model(reference), nodeid=_model(reference)
        )
        certificate.findings = _findings(reference)
        report = certificate.ihook.pytest_make_collect_report(collector=certificate)
        certificate.ihook.pytest_collectreport(report=report)  # so that they are counted
        items.extend(report.result)


def _model(reference: str) -> str:
    return reference.partition("::")[0]


def _findings(reference: str) -> "Sequence[Finding]":
    """Return the rows of a model, or the one that is named after `::`."""
    from glasscheck.report import verify_reference

    row = reference.partition("::")[2]
    try:
        found = verify_reference(_model(reference)).findings
        _known([row] if row else [], found)
    except ValueError as error:  # a model's library has errors of its own
        raise pytest.UsageError(str(error)) from error
    return [finding for finding in found if row in ("", finding.name)]
