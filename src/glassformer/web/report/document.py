"""The one-file report of a run: its sections, those about the inside of the model among them.

Each section is made by itself; what a run does not have, or what cannot be computed for it, is
replaced by a line that says so. Every number comes from the objects that the other commands use.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from glassformer.adapters.text_inputs import Words
from glassformer.checks.catalogue import Finding
from glassformer.checks.report import Report, verify
from glassformer.lab.runs.artifacts import probe_files
from glassformer.lens.heads import HeadName
from glassformer.lens.inspection import Inspection, inspect
from glassformer.lens.measure.probes import read_probes
from glassformer.lens.measure.roles import ROLES, head_roles
from glassformer.lens.measure.snapshot import truncate
from glassformer.lens.show.attention_map import AttentionMap
from glassformer.lens.show.chart_svg import colour_key
from glassformer.lens.show.html import escape_line, folded
from glassformer.lens.show.report_page import (
    Cell,
    Section,
    Shaded,
    Text,
    beside,
    missing,
    page,
    say,
    table,
)
from glassformer.lens.show.text import shown
from glassformer.spec.errors import GlassError
from glassformer.store.rundir import RunRef
from glassformer.web.report import errors
from glassformer.web.report import run as report_run
from glassformer.web.report.run import Subject

#: Tokens of the inspected example; the most small maps, steps and large maps.
TOKENS, THUMBNAILS, STEPS, LARGE = 128, 600, 6, 32
SIDE = 184  # pixels of a large map: four fit in a row
#: Columns of the lens, heads of the ranking, rows that roles are scored on.
COLUMNS, RANKED, SCORED = 24, 12, 64


def final_inspection(run: Subject) -> Inspection:
    """Inspect the probes' example with the checkpoint, once for all sections."""
    if "inspection" not in run.memory:
        run.memory["inspection"] = _inspect(run)
    inspection: Inspection = run.memory["inspection"]
    return inspection


def _inspect(run: Subject) -> Inspection:
    """Inspect the probes' first example; without probes, the first validation example."""
    files = probe_files(run.directory)
    row = read_probes(list(files.values())[-1]).examples[0] if files else 0
    batch = truncate(run.task.batch("val", np.array([row], dtype=np.int64)), TOKENS)
    words = Words(run.task.tokenizer)
    source = None if batch.source is None else [words(i) for i in batch.source.tokens[0].tolist()]
    return inspect(run.adapter, batch, names=words, source_words=source)


def attention(run: Subject) -> Iterator[str]:
    """Every head at some steps, small; every head of the checkpoint, with words."""
    seen = final_inspection(run)
    yield say(f"One validation example: {_words(seen)}")
    heads = list(_all_heads(seen))
    masked = any(not bool(each.allowed.all()) for each in heads)
    yield say(
        "A row is a token that attends, a column one that it attends to; the stronger the colour, "
        f"the more of its attention.{' Hatched cells are masked.' if masked else ''}",
        kind="note",
    )
    yield colour_key("attention weight").svg()
    ranked = seen.ranking().heads if len(heads) > LARGE else ()
    kept = [each for each in heads if not ranked or each.head in ranked[:LARGE]]
    left_out = f"; the {LARGE} of {len(heads)} whose ablation changes most" if ranked else ""
    figures = [(each.head, each.svg(side=SIDE)) for each in kept if each.head is not None]
    maps = _by_layer(figures, kind="large")
    yield f"<h3>Step {run.step}, with words{escape_line(left_out)}</h3>"
    yield maps if len(seen.words) <= 40 else folded(f"{len(kept)} maps", maps)
    yield from _steps(run, seen)


def _all_heads(seen: Inspection) -> Iterator[AttentionMap]:
    for kind in seen.kinds:
        yield from seen.attention.of(kind).heads()


def _steps(run: Subject, seen: Inspection) -> Iterator[str]:
    """Yield radio buttons that choose a step, by style alone; all steps are printed on paper."""
    files = probe_files(run.directory)
    if not files:
        yield missing("This run has no probes, so only its checkpoint can be shown.")
        return
    chosen = spread(files, most=max(1, min(STEPS, THUMBNAILS // len(list(_all_heads(seen))))))
    panels: dict[str, str] = {}
    for step, file in chosen.items():
        probes = read_probes(file)
        loss = "" if probes.loss is None else f", loss of the probes {probes.loss:.4f}"
        figures = [(name, probes.map(0, name).thumbnail()) for name in probes.heads()]
        note = say(f"step {step}{loss}", kind="note")
        panels[f"{step}"] = note + _by_layer(figures, kind="grid")
    names = list(panels)
    inputs = "".join(
        f'<label><input type="radio" name="at" id="at-{name}"'
        f"{' checked' if name == names[-1] else ''}>{int(name):,}</label>"
        for name in names
    )
    rules = "".join(
        f".steps:has(#at-{name}:checked) .at:not(.at-{name}){{display:none}}" for name in names
    )
    bodies = "".join(f'<div class="at at-{name}">{body}</div>' for name, body in panels.items())
    yield f"<style>@media screen{{{rules}}}</style>"
    yield (
        f'<div class="steps"><h3>While it trained</h3><fieldset><legend>Step</legend>{inputs}'
        f"</fieldset>{bodies}</div>"
    )


def _by_layer(figures: Sequence[tuple[HeadName, str]], *, kind: str) -> str:
    """Return pictures of heads, one line per layer of each kind."""
    lines: dict[tuple[str, int], list[str]] = {}
    for name, image in figures:
        figure = f"<figure>{image}<figcaption>{name}</figcaption></figure>"
        lines.setdefault((name.kind, name.layer), []).append(figure)
    rows = "".join(f'<div class="{kind}">{"".join(line)}</div>' for line in lines.values())
    return f'<div class="layers">{rows}</div>'


def spread(files: Mapping[int, Path], *, most: int) -> dict[int, Path]:
    """Return the first and the last file, and others spread evenly on a logarithmic scale."""
    steps = list(files)
    if len(steps) <= most:
        return dict(files)
    chosen = np.geomspace(1, len(steps), most).round().astype(int) - 1
    return {steps[i]: files[steps[i]] for i in sorted({*chosen.tolist(), len(steps) - 1})}


def lens(run: Subject) -> Iterator[str]:
    """Show what the model would predict after each sublayer, and its KL from the end."""
    seen = final_inspection(run)
    readout = seen.lens.position(None)
    first = max(0, len(seen.words) - COLUMNS)
    heading = [f"{t} {shown(word, most=12)}" for t, word in enumerate(seen.words)][first:]
    lines: list[list[Cell]] = []
    for number, name in reversed(list(enumerate(seen.lens.row_names))):
        cells = [seen.lens.top(t, 1, row=name)[0] for t in range(first, len(seen.words))]
        shaded = [Shaded(f"{shown(word, most=12)} {p:.0%}", p) for word, p in cells]
        lines.append([name, *shaded, f"{float(seen.lens.kl[number, readout]):.4f}"])
    cut_off = f", the last {COLUMNS} positions" if first else ""
    yield say(f"The same example: {_words(seen)}")
    caption = f"likeliest token after each sublayer, from the bottom up{cut_off}; KL at {readout}"
    yield table(["", *heading, "KL to the end, nats"], lines, caption=caption)
    answer: list[list[Cell]] = [[shown(word), f"{p:.2%}"] for _, word, p in seen.next(None, 5)]
    next_table = table(
        ["token", "probability"], answer, caption=f"predictions at position {readout}"
    )
    ranking = seen.ranking()
    rows: list[list[Cell]] = [
        [
            row["head"],
            "" if row["loss_change"] is None else f"{row['loss_change']:+.4f}",
            f"{row['kl']:.4f}",
        ]
        for row in ranking.rows()[:RANKED]
    ]
    more = f", the first {RANKED} of {len(ranking.heads)}" if len(ranking.heads) > RANKED else ""
    caption = f"what ablating one head changes, largest first{more}"
    ranked = table(["head", "loss, nats", "KL, nats"], rows, caption=caption)
    yield beside([next_table, ranked])


def roles(run: Subject) -> Iterator[str]:
    """Score each head against simple roles."""
    final_inspection(run)  # refuses a model without taps
    rows = np.arange(min(SCORED, run.task.sizes()["val"]), dtype=np.int64)
    batch = truncate(run.task.batch("val", rows), TOKENS)
    groups = run.task.groups("val", rows)
    scores = head_roles(
        run.adapter,
        batch,
        groups=groups.get("operation"),
        at="last" if "answer" in batch.targets else "every",
    )
    lines: list[list[Cell]] = []
    rows_of = scores.rows()
    scored = [name for name in ROLES if any(row[name] == row[name] for row in rows_of)]
    for row in rows_of:
        cells = [_score(row[name], row[f"{name} chance"]) for name in scored]
        lines.append([row["head"], Text(row["role"]), *cells])
    needed = f"a role needs a lift of {scores.threshold}"
    caption = f"score (chance) of each role, on {scores.source}; {needed}"
    yield table(["head", "role", *scored], lines, caption=caption)
    if "operation" not in scored:
        yield missing(f"The task {run.task.name} has no operations, so that role is not scored.")
    yield say(
        "A role says what a head attends to, not what the prediction depends on.", kind="note"
    )


def _score(score: float, chance: float) -> Shaded | None:
    if score != score:
        return None
    return Shaded(f"{score:.2f} ({chance:.2f})", max(0.0, (score - chance) / max(1e-9, 1 - chance)))


def _words(seen: Inspection) -> str:
    words = " ".join(shown(word) for word in seen.words[:40])
    more = " …" if len(seen.words) > 40 else ""
    source = ""
    if seen.source_words is not None:
        source = f"{' '.join(shown(word) for word in seen.source_words[:40])} -> "
    target = seen.target(None)
    expected = "" if target is None else f" (target: {shown(target[1])})"
    return f"{source}{words}{more}{expected}"


Writer = Callable[[Subject], Iterator[str]]

SECTIONS: tuple[tuple[str, str, Writer], ...] = (
    ("trained", "What was trained", report_run.trained),
    ("curves", "Curves", report_run.curves),
    ("errors", "Errors", errors.errors),
    ("machine", "The machine it computes", errors.machine),
    ("examples", "Right and wrong", errors.examples),
    ("written", "What it writes", report_run.written),
    ("attention", "Attention", attention),
    ("lens", "Logit lens", lens),
    ("roles", "Head roles", roles),
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
            Text(found.word, kind=_kind(found)),
        ]
        for found in report.findings
        if found.ran
    ]
    heading = ["check", "group", "precision", "worst", "allowed", "verdict"]
    yield table(heading, rows, caption="the certificate")
    notes = [f"{f.name} ({f.verdict}): {f.note}" for f in report.findings if f.warned or f.failed]
    yield _listed("Why these are not passed", notes)
    for verdict, title in (
        ("error", "Could not run, and counted as failed"),
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
