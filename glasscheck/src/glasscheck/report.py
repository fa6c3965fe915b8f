"""The certificate: findings, counted, shown as text or as one JSON object."""

import importlib.metadata
import itertools
import math
import platform
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import nn

from glasscheck.catalogue import (
    FAILURES,
    Begin,
    Examination,
    Finding,
    subject_checks,
    verify_subject,
)
from glasscheck.errors import CheckFailed, FileError
from glasscheck.foreign import looks_fresh, redraw, refuse_what_cannot_run, untouched
from glasscheck.formats import Case, annotations, badge, junit_xml, sarif
from glasscheck.judgement import Rules, lost
from glasscheck.subject import Logits, Subject, called, of_its_library, subject_of
from glasscheck.threads import threads_for
from glasscheck.witness import whole_script

Style = Callable[[str, str], str]  # (text, verdict) -> text with or without colour
Watch = Callable[[str, int, int], None]  # the row that begins, rows done, rows in all


def plain(text: str, verdict: str) -> str:
    """Return the text without colour."""
    return text


#: Columns of a line that is not a row: the list of what was not offered.
LINE = 100
#: Reasons for checks that were not asked which the last line names.
REASONS = 3


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The findings of a verification; printed, and shown in a notebook, as text."""

    #: The command and the distribution, as reports name them.
    COMMAND: ClassVar[str] = "glasscheck"
    PACKAGE: ClassVar[str] = "glasscheck"

    findings: tuple[Finding, ...]
    redrawn: bool = False  # fresh weights were given noise of unit scale for the checks

    def judged(self, rules: Rules) -> Self:
        """Return the report as a project's rules see it."""
        return replace(self, findings=rules.judged(self.findings))

    @property
    def ran(self) -> int:
        """The number of checks that were tried."""
        return sum(f.ran for f in self.findings)

    @property
    def passed(self) -> int:
        """The number of findings that passed."""
        return sum(f.verdict == "passed" for f in self.findings)

    @property
    def failed(self) -> int:
        """The number of findings that failed."""
        return sum(f.failed for f in self.findings)

    @property
    def warnings(self) -> int:
        """The number of findings that are rounding, a limit that is named, or unclear."""
        return sum(f.warned for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints; a gap that is not finite becomes null."""
        checks = []
        for f in self.findings:
            checks.append(
                {
                    "name": f.name,
                    "group": f.group,
                    "subject": f.subject,
                    "dtype": f.dtype,
                    "size": f.size,
                    "worst": f.worst if math.isfinite(f.worst) else None,
                    "tolerance": f.tolerance,
                    "verdict": f.verdict,
                    "failed": f.failed,
                    "judged": f.judged,
                    "note": f.note,
                    "seconds": round(f.seconds, 4),
                }
            )
        return {
            "passed": self.passed,
            "failed": self.failed,
            "warnings": self.warnings,
            "ran": self.ran,
            "of": len(self.findings),
            "redrawn": self.redrawn,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                self.PACKAGE: _version(self.PACKAGE),
            },
            "checks": checks,
        }

    def markdown(self) -> str:
        """Return a table of what does not hold, for a pull request; the rest is counted."""
        lines = [f"**{self.summary()}**", ""]
        rows = [f for f in self.findings if f.failed or f.warned]
        if rows:
            lines += ["| verdict | check | gap | allowed | note |", "|---|---|---|---|---|"]
        for f in rows:
            note = f.note.replace("|", "\\|")
            lines.append(f"| {f.word} | {f.name} | {_number(f.worst)} | {_bar(f)} | {note} |")
        return "\n".join(lines) + "\n"

    def cases(self) -> list[Case]:
        """Return a test for each check; what was not asked is skipped."""
        cases = []
        for f in self.findings:
            said = f"{f.word}: {_number(f.worst)}, allowed {_bar(f)}. {f.note}"
            outcome = "failed" if f.failed else "warning" if f.warned else "passed"
            if f.verdict == "not offered" and not f.failed:
                outcome, said = "skipped", f.note
            cases.append(Case(f"{f.subject}.{f.group}", f.name, f.seconds, outcome, said))
        return cases

    def junit(self) -> str:
        """Return JUnit XML: a test for each check; what was not asked is skipped."""
        return junit_xml(self.COMMAND, self.cases())

    def sarif(self) -> str:
        """Return SARIF, which code hosts show beside the lines of a change."""
        return sarif(self.PACKAGE, self.cases())

    def annotations(self) -> str:
        """Return GitHub's workflow commands: an error or a warning for each check in question."""
        return annotations(self.cases())

    def compare(self, older: Mapping[str, Any]) -> list[str]:
        """Return what changed since an older certificate (`to_dict()`): "was 3e-07, is 2e-03".

        A check is named if its verdict changed, if its gap grew tenfold towards what is allowed, or
        if it is gone.
        """
        before = _by_name(older)
        lines = []
        for f in self.findings:
            was = before.get((f.subject, f.name, f.dtype))
            if was is None:
                continue
            gap = "no match" if was["worst"] is None else _number(was["worst"])
            grew = was["worst"] is not None and f.worst > max(10 * was["worst"], 0.1 * f.tolerance)
            if was["verdict"] != f.verdict:
                lines.append(
                    f"{f.name}: was {was['verdict']} ({gap}), is {f.verdict} ({_number(f.worst)})"
                )
            elif f.verdict == "passed" and grew and f.tolerance:
                lines.append(f"{f.name}: was {gap}, is {_number(f.worst)}, still within {_bar(f)}")
        gone = set(before) - {(f.subject, f.name, f.dtype) for f in self.findings}
        return lines + [
            f"{name}: was {before[s, name, d]['verdict']}, is gone" for s, name, d in sorted(gone)
        ]

    def new_failures(self, older: Mapping[str, Any]) -> list[Finding]:
        """Return the failures that an older certificate does not have, and the rows it has lost."""
        before = _by_name(older)
        known = {key for key, was in before.items() if was.get("failed", was["verdict"] == "bug")}
        new = [f for f in self.findings if f.failed and (f.subject, f.name, f.dtype) not in known]
        already = {(f.subject, f.name) for f in new}
        return new + [f for f in lost(before, self.findings) if (f.subject, f.name) not in already]

    def badge(self) -> str:
        """Return an SVG badge: how many rows passed, or failed."""
        return badge(self.COMMAND, passed=self.passed, failed=self.failed)

    def raise_if_failed(self) -> None:
        """Raise an exception that names the first failure."""
        for f in self.findings:
            if f.failed:
                raise CheckFailed(f"{f.name}: {_number(f.worst)} > {_bar(f)}", where=f.subject)

    def __repr__(self) -> str:
        return self.text()

    def text(self, style: Style = plain) -> str:
        """Return a row for each check over all subjects, then each failure on its own."""
        rows: dict[tuple[str, str], list[Finding]] = {}
        for f in self.findings:
            if f.ran:
                rows.setdefault((f.group, f.name), []).append(f)
        lines: list[str] = []
        width = max((len(name) for _, name in rows), default=0)
        group = ""
        for (row_group, name), findings in sorted(
            rows.items(), key=lambda row: _first(self.findings, row[0][0])
        ):
            if row_group != group:
                group = row_group
                lines.append(f"\n{group}" if lines else group)
            lines.append(_row(name.ljust(width), findings, style))
        lines += [_failure(f, style) for f in self.findings if f.failed and f.verdict != "error"]
        lines += _warnings(self.findings, style)
        lines += _by_reason(self.findings, "error", "could not run", style)
        lines += _by_reason(self.findings, "not offered", "not offered", style)
        if self.redrawn:
            lines += ["", "weights: fresh ones, so noise of unit scale was added for the checks"]
        verdict = "bug" if self.failed else "rounding" if self.warnings else "passed"
        said = self.summary().replace("; not asked: ", "\nnot asked: ")
        return "\n".join([*lines, "", style(said, verdict)])

    def summary(self) -> str:
        """Return how many checks ran, what came of them, and why the others were not asked."""
        total = f"{self.ran} of {len(self.findings)} checks ran: "
        total += f"{self.passed} passed, {self.failed} failed"
        if self.warnings:
            total += f", {self.warnings} warning{'s' * (self.warnings > 1)}"
        reasons = Counter(f.note for f in self.findings if f.verdict == "not offered")
        asked = [f"{n} ({reason})" for reason, n in reasons.most_common(REASONS)]
        more = sum(n for _, n in reasons.most_common()[REASONS:])
        listed = ", ".join([*asked, *([f"{more} for other reasons"] if more else [])])
        return f"{total}; not asked: {listed}" if listed else total

    def times(self) -> list[str]:
        """Return a line for each check with its seconds, the slowest first."""
        tried = sorted((f for f in self.findings if f.ran), key=lambda f: -f.seconds)
        total = sum(f.seconds for f in tried)
        return ["", f"{total:.1f} s", *(f"{f.seconds:8.2f} s  {f.name}" for f in tried)]

    def repros(self) -> dict[str, str]:
        """Return a script of plain torch for each failure that calls alone can show, by check."""
        return {
            f.name: whole_script(
                f.repro,
                claim=f.name,
                allowed=f.tolerance,
                reference=f.subject if ":" in f.subject else "",
                redrawn=self.redrawn,
            )
            for f in self.findings
            if f.failed and f.repro
        }


def _by_name(older: Mapping[str, Any]) -> dict[tuple[str, str, str], Mapping[str, Any]]:
    try:
        return {(c["subject"], c["name"], c["dtype"]): c for c in older["checks"]}
    except (KeyError, TypeError) as error:
        raise FileError(
            "no certificate: it has no list of checks",
            hint="give what --json or to_dict() wrote",
        ) from error


def _version(package: str) -> str:
    """Return the installed version, without importing the package's front door."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from the source folder
        return "unknown"


def _first(findings: Iterable[Finding], group: str) -> int:
    return next(i for i, f in enumerate(findings) if f.group == group)


def _number(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.1e}" if math.isfinite(value) else "no match"


def _bar(f: Finding) -> str:
    return "exact" if f.tolerance == 0 else _number(f.tolerance)


def _row(name: str, findings: list[Finding], style: Style) -> str:
    columns = []
    for dtype in dict.fromkeys(f.dtype for f in findings):
        worst = max((f for f in findings if f.dtype == dtype), key=lambda f: f.worst)
        columns.append(f"{dtype} {_number(worst.worst):>8} of {_bar(worst):<7}")
    subjects = list(dict.fromkeys(f.subject for f in findings))
    size = findings[0].size if len(subjects) == 1 else f"{len(subjects)} models"
    verdict = next((f.word for f in findings if f.failed), "")
    verdict = verdict or next((f.word for f in findings if f.warned), "passed")
    return f"  {name}  {style(verdict.ljust(8), verdict)}  {'  '.join(columns)}  {size}"


def _warnings(findings: Iterable[Finding], style: Style) -> list[str]:
    """List what does not hold as it stands and fails nothing: one line a row, then its reason."""
    lines = []
    for f in findings:
        if f.warned:
            size = "" if f.verdict == "limit" else f": {_number(f.worst)}, allowed {_bar(f)}"
            lines.append(style(f"  {f.word.ljust(8)}  {f.name}{size}", f.verdict))
            lines += textwrap.wrap(
                f.note, LINE, initial_indent=" " * 12, subsequent_indent=" " * 12
            )
    return ["", "warnings", *lines] if lines else []


def _by_reason(findings: Iterable[Finding], verdict: str, title: str, style: Style) -> list[str]:
    """List the checks with a verdict by its reason: never counted as passed."""
    reasons: dict[str, list[str]] = {}
    for f in findings:
        if f.verdict == verdict:
            reasons.setdefault(f.note, []).append(f.name)
    lines = []
    for reason, names in reasons.items():
        said = f"{reason}: {'; '.join(dict.fromkeys(names))}"  # names have commas of their own
        wrapped = textwrap.wrap(
            said,
            LINE,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [style(line, "not offered") for line in wrapped]
    return ["", style(title, "not offered"), *lines] if lines else []


def _failure(f: Finding, style: Style) -> str:
    note = f"\n  {f.note}" if f.note else ""
    where = f"{f.subject}, {f.dtype}, {f.size}" if f.size else f"{f.subject}, {f.dtype}"
    gap = f"{_number(f.worst)}, allowed {_bar(f)}"
    word = f.verdict if f.verdict in FAILURES else f"fails ({f.verdict})"
    return f"\n{style(word, 'bug')}  {f.name}\n  at: {where}\n  worst: {gap}{note}"


def verify(
    thing: object,
    *,
    only: str | None = None,
    deep: bool = False,
    name: str = "",
    logits: Logits | None = None,
    vocab_size: int | None = None,
    max_length: int | None = None,
    causal: bool | None = None,
    watch: Watch | None = None,
    rules: Rules | None = None,
    call: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    shard: tuple[int, int] | None = None,
) -> Report:
    """Check a model: any torch module, or a `Subject`.

    `logits=lambda tokens, valid: ...` calls a module whose forward has other arguments; `causal`
    tells a model that reads forwards from one that reads both ways, where its config does not.
    `call` are arguments of every call, `names` its arguments by role ({"cache": "memories"}, also
    tokens, mask, labels). `watch(row, done, total)` is called before each row; `rules` say what
    else fails, and what is known; `shard=(3, 8)` runs the third of eight parts of the checks. The
    model comes back as it was: weights, gradients, modes, buffers, attributes, random generators.
    """
    rules = rules or Rules()
    told = {"vocab_size": vocab_size, "max_length": max_length, "causal": causal}
    if (other := of_its_library("verify", thing)) is not None:
        found: Report = other(
            thing, only=only, deep=deep, name=name, logits=logits, watch=watch, **told
        )
        return found.judged(rules)
    module = _module_of(thing)
    if module is not None:
        refuse_what_cannot_run(module)
    redrawn = module is not None and looks_fresh(module)
    with untouched(module, weights=redrawn) if module is not None else nullcontext():
        if redrawn and module is not None:
            redraw(module)
        subject = subject_of(
            thing,
            name=name,
            logits=logits,
            vocab_size=vocab_size,
            max_length=max_length,
            causal=causal,
            call=call,
            names=names,
        )
        begin = counted(watch, len(subject_checks(subject, only=only, deep=deep)))
        with threads_for(subject.parameter_count()):
            skip = rules.skipped(subject.name)
            findings = tuple(
                verify_subject(subject, only=only, deep=deep, begin=begin, skip=skip, shard=shard)
            )
    return Report(findings, redrawn).judged(rules)


def verify_reference(
    reference: str,
    *,
    causal: bool | None = None,
    rules: Rules | None = None,
    call: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    **options: Any,
) -> Report:
    """Check what `package.module:factory` or `file.py:factory` returns."""
    made, fresh = called(reference)
    if (other := of_its_library("verify", made)) is not None:
        found: Report = other(made, name=reference, causal=causal, **options)
        return found.judged(rules or Rules())
    subject = subject_of(made, name=reference, causal=causal, fresh=fresh, call=call, names=names)
    return verify(subject, rules=rules, **options)


class Rowwise:
    """A model whose checks run one at a time, when they are asked for, and once.

    `own` are the findings of a library with checks of its own, which runs them all at once.
    """

    def __init__(
        self,
        reference: str,
        *,
        causal: bool | None = None,
        call: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.name = reference
        self.own: Sequence[Finding] | None = None
        made, fresh = called(reference)
        self._module = _module_of(made)
        if (other := of_its_library("verify", made)) is not None:
            self.own = other(made, name=reference, causal=causal).findings
            return
        if self._module is not None:
            refuse_what_cannot_run(self._module)
            if looks_fresh(self._module):
                redraw(self._module)
        with self._kept():
            subject = subject_of(
                made, name=reference, causal=causal, fresh=fresh, call=call, names=names
            )
        self._rows = Examination(subject, subject_checks(subject, deep=True))

    def _kept(self) -> AbstractContextManager[None]:
        return nullcontext() if self._module is None else untouched(self._module, weights=False)

    def findings(self, name: str, *, skip: Mapping[str, str] | None = None) -> list[Finding]:
        """Return the finding of a check; none where it does not concern this kind of model."""
        if name not in self._rows.checks:
            return []
        self._rows.skip = skip or {}
        with self._kept(), threads_for(self._rows.subject.parameter_count()):
            return [self._rows.finding(name)]


def counted(watch: Watch | None, total: int) -> Begin | None:
    """Return what tells a watcher the number of rows done, beside each row's name."""
    if watch is None:
        return None
    done = itertools.count()
    return lambda row: watch(row, next(done), total)


def _module_of(thing: object) -> nn.Module | None:
    """Return the module whose state a verification must leave as it is."""
    if isinstance(thing, Subject):
        return None if thing.foreign is None else thing.foreign.module
    return thing if isinstance(thing, nn.Module) else None
