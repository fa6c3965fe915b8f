"""The one-file report of a run: the entry, which joins the sections.

Each section is made by itself; what a run does not have, or what cannot be computed for it, is
replaced by a line that says so. Every number comes from the objects that the other commands use.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from glassformer.checks.catalogue import Finding
from glassformer.checks.report import Report, verify
from glassformer.lens.show.html import escape_line
from glassformer.lens.show.report_page import Cell, Section, Text, missing, page, say, table
from glassformer.spec.errors import GlassError
from glassformer.store.rundir import RunRef
from glassformer.web.report import errors, inside
from glassformer.web.report import run as report_run
from glassformer.web.report.run import Subject

Writer = Callable[[Subject], Iterator[str]]

SECTIONS: tuple[tuple[str, str, Writer], ...] = (
    ("trained", "What was trained", report_run.trained),
    ("curves", "Curves", report_run.curves),
    ("errors", "Errors", errors.errors),
    ("machine", "The machine it computes", errors.machine),
    ("examples", "Right and wrong", errors.examples),
    ("written", "What it writes", report_run.written),
    ("attention", "Attention", inside.attention),
    ("lens", "Logit lens", inside.lens),
    ("roles", "Head roles", inside.roles),
    ("files", "Sizes and hashes", report_run.files),
)


def report(
    run: str | Path,
    *,
    verify: bool = True,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write the report of `RUN`, `RUN@last` or `RUN@120` into the run's folder; return its path.

    Without `verify` the checks are left out. `progress` is called with each section's title.
    """
    certificate = None if verify else Report(())
    text = report_html(str(run), certificate=certificate, device=device, progress=progress)
    directory = RunRef.parse(run).directory
    directory.write("report.html", text)
    return directory.folder / "report.html"


def report_html(
    path: str,
    *,
    certificate: Report | None = None,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> str:
    """Return the report of `RUN`, `RUN@last` or `RUN@120` as one HTML file.

    `certificate`: checks of this checkpoint made before (an empty one: no checks); without it they
    are made now. `progress` is called with the title of each section before it is made.
    """
    run = Subject(path, device)
    lead = report_run.lead(run)  # raises if this is no run, or has no checkpoint
    sections = []
    for key, title, write in SECTIONS:
        if progress is not None:
            progress(title)
        body = _written(run, write)
        if body:
            sections.append(Section(key, title, body))
    if progress is not None:
        progress("Verify")
    checked = verify(run.adapter, name=run.name) if certificate is None else certificate
    sections.insert(-1, Section("verify", "Verify", "".join(_verified(checked))))
    command = f"glass report {run.name}"
    foot = (
        f"<p>Made by <code>{escape_line(command)}</code>; every number is what the commands of "
        "glassformer compute. No script, nothing fetched.</p>"
    )
    return page(f"Run {run.name}", lead, sections, foot)


def _written(run: Subject, write: Writer) -> str:
    """Return a section, or a line with the reason why it is missing."""
    try:
        return "".join(write(run))
    except GlassError as error:
        hint = f" ({error.hint})" if error.hint else ""
        return missing(f"Not available: {error.what}{hint}")


def _verified(report: Report) -> Iterator[str]:
    """Yield the rows of `glass verify RUN`."""
    if not report.findings:
        yield missing("No checks were requested: glass verify runs them.")
        return
    warned = f", {report.warnings} with a warning" if report.warnings else ""
    yield say(f"{report.passed} checks passed, {report.failed} failed{warned}.")
    yield say("Two ways of computing the same thing, compared on this checkpoint.", kind="note")
    rows: list[list[Cell]] = [
        [
            found.name,
            Text(found.group),
            Text(found.dtype),
            f"{found.worst:.1e}" if math.isfinite(found.worst) else "no match",
            "exact" if found.tolerance == 0 else f"{found.tolerance:.1e}",
            Text(found.verdict, kind=_kind(found)),
        ]
        for found in report.findings
        if found.verdict not in ("not offered", "raised")
    ]
    heading = ["check", "group", "precision", "worst", "allowed", "verdict"]
    yield table(heading, rows, caption="the certificate")
    notes = [f"{f.name} ({f.verdict}): {f.note}" for f in report.findings if f.warned or f.failed]
    yield _listed("Why these are not passed", notes)
    for verdict, title in (
        ("raised", "Could not run, and not counted as failed"),
        ("not offered", "Not offered by this model, and not counted as passed"),
    ):
        reasons: dict[str, list[str]] = {}
        for finding in report.findings:
            if finding.verdict == verdict:
                reasons.setdefault(finding.note, []).append(finding.name)
        yield _listed(
            title, [f"{why}: {', '.join(dict.fromkeys(n))}" for why, n in reasons.items()]
        )


def _kind(finding: Finding) -> str:
    """Return the class of a verdict, which decides its colour."""
    if finding.failed:
        return "failed"
    return "passed" if finding.verdict == "passed" else "warned"


def _listed(title: str, lines: list[str]) -> str:
    items = "".join(f"<li>{escape_line(line)}</li>" for line in lines)
    return f"<h3>{title}</h3><ul>{items}</ul>" if lines else ""
