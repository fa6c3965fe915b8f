"""A pytest plugin: the certificate as a fixture, and as one test for each row.

pytest finds it where glasscheck is installed. `pytest --glass package.module:factory` adds a test
for each row of that model, `pytest --glasscheck` those of `[tool.glasscheck]` in pyproject.toml,
and `--glass "package.module:factory::row"`, the id of such a test, that row alone. Collecting them
makes no model and runs no check: `-k`, `--collect-only` and pytest-xdist take them as any tests.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # which imports torch, and every pytest loads this file
    from glasscheck.catalogue import Finding
    from glasscheck.judgement import Rules
    from glasscheck.report import Report
    from glasscheck.settings import Model


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

    model: "Model"
    rules: "Rules"
    wanted: str  # one row, or all

    def collect(self) -> Iterator["Row"]:
        """Yield a test for each row that any model has, and one for those of its own library."""
        from glasscheck.catalogue import SUBJECT_CHECKS

        names = [check.name for check in SUBJECT_CHECKS if not check.deep]
        for name in [*names, OWN] if not self.wanted else [self.wanted]:
            yield Row.from_parent(self, name=name)

    @cached_property
    def rows(self) -> "Rows":
        """The model's rows, made when the first of its tests runs."""
        from glasscheck.catalogue import SUBJECT_CHECKS

        names = [check.name for check in SUBJECT_CHECKS]
        return Rows(self.model, self.rules, names)


class Rows:
    """The rows of one model, each run when it is asked for, and once."""

    def __init__(self, model: "Model", rules: "Rules", names: Sequence[str]) -> None:
        from glasscheck.errors import GlassError
        from glasscheck.report import Rowwise

        self.rules, self.names = rules, names
        try:
            self.report = Rowwise(model.factory, **model.options())
        except GlassError as error:  # a test that cannot be set up, and no crash of the session
            raise pytest.UsageError(str(error)) from error

    def findings(self, name: str) -> "Sequence[Finding]":
        """Return what a test of this name is about: a row, or all of the model's own library."""
        if self.report.own is not None:
            known = [f for f in self.report.own if (f.name == name)]
            rest = [f for f in self.report.own if f.name not in self.names]
            return rest if name == OWN else known
        skip = self.rules.skipped(self.report.name)
        return () if name == OWN else self.report.findings(name, skip=skip)


#: The test of what a library with checks of its own adds to those of any model.
OWN = "the checks of its own library"


class Row(pytest.Item):
    """One row of a certificate as a test, which runs when pytest runs it."""

    def runtest(self) -> None:
        """Fail where the row does; skip where it was not asked."""
        parent = self.parent
        assert isinstance(parent, Certificate)
        found = parent.rules.judged_alone(parent.rows.findings(self.name))
        failed = [f for f in found if f.failed]
        if failed:
            said = [f"{f.name}: {f.worst:.1e}, allowed {f.tolerance:.1e}. {f.note}" for f in failed]
            pytest.fail("\n".join(said), pytrace=False)
        if not found and self.name not in (*parent.rows.names, OWN):
            pytest.fail(f"no check '{self.name}'", pytrace=False)
        if not any(f.ran for f in found):
            pytest.skip("; ".join(f.note for f in found) or "its library has no checks of its own")

    def reportinfo(self) -> tuple[str, None, str]:
        """Return the model and the row, for pytest's lines."""
        owner = self.parent.name if self.parent is not None else ""
        return owner, None, f"{owner}: {self.name}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--glass package.module:factory` and `--glasscheck`."""
    parser.addoption(
        "--glass",
        action="append",
        default=[],
        metavar="MODULE:FACTORY",
        help="verify what this function returns: a test for each row of the certificate",
    )
    parser.addoption(
        "--glasscheck",
        action="store_true",
        help="verify the models of [tool.glasscheck] in pyproject.toml",
    )


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add a test for each row of each model that was named, without making one."""
    references = list(config.getoption("--glass"))
    if not references and not config.getoption("--glasscheck"):
        return
    from glasscheck.errors import GlassError
    from glasscheck.judgement import Rules, baseline_of
    from glasscheck.settings import settings_of

    try:
        settings = settings_of(config.rootpath)
        if config.getoption("--glasscheck"):
            references += [model.factory for model in settings.models]
        baseline = () if settings.baseline is None else baseline_of(settings.baseline)
        rules = Rules(
            strict=settings.strict, allow_errors=settings.allow_errors,
            require=settings.require, baseline=baseline,
        )  # fmt: skip
        for reference in dict.fromkeys(references):
            name, _, wanted = reference.partition("::")
            certificate = Certificate.from_parent(session, name=name, nodeid=name)
            certificate.model, certificate.rules = settings.of(name), rules
            certificate.wanted = wanted
            report = certificate.ihook.pytest_make_collect_report(collector=certificate)
            certificate.ihook.pytest_collectreport(report=report)  # so that they are counted
            items.extend(report.result)
    except GlassError as error:
        raise pytest.UsageError(str(error)) from error


class CertificateMixin:
    """One test of each class in `all_model_classes`, beside transformers' `ModelTesterMixin`.

    `glasscheck_rules` are a project's rules, `glasscheck_options` what else `verify` is told.
    """

    glasscheck_rules: "Rules | None" = None
    glasscheck_options: Mapping[str, Any] = {}

    def test_glasscheck(self) -> None:
        """Verify every class, built from the tester's small config."""
        from glasscheck.report import verify
        from glasscheck.subject import seeded_call

        case: Any = self
        config = case.model_tester.prepare_config_and_inputs_for_common()[0]
        for kind in case.all_model_classes:
            with case.subTest(kind.__name__):
                model = seeded_call(partial(kind, config)).eval()
                rules, told = self.glasscheck_rules, self.glasscheck_options
                verify(model, rules=rules, **told).raise_if_failed()
