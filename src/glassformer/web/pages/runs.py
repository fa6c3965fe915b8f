"""The pages Runs and Sweeps: runs and models, curves, settings that differ; sweeps, one by one.

Live curves are polled: the page sends the cursors it has, and receives the runs that have grown.

A sweep's progress, ranking, pictures and runs are drawn here, like the page Model, as trees of
elements. Its ranking is computed again only when its list of results has grown. What it needs of
the laboratory imports torch, so it is imported when a sweep is opened.
"""

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glassformer.lab.runs import table
from glassformer.lab.runs.curves import AXES, Series
from glassformer.lab.runs.table import duration, read_record
from glassformer.lens.show.element import Element, el
from glassformer.spec.errors import FileError, GlassError, InputError, nearest
from glassformer.store.rundir import NAME, RunDirectory
from glassformer.web.app import limits
from glassformer.web.app.query import Query, Route
from glassformer.web.app.workspace import SWEEP, Workspace, kind_of

if TYPE_CHECKING:
    from glassformer.lab.sweeps.ranking import Ranked, Ranking
    from glassformer.lab.sweeps.sweep import Sweep

#: The most alerts of one run that are shown, the newest.
ALERTS = 500


def about(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Return the program's name and version, the folder it shows, and the limits of requests."""
    query.only()
    return {
        "name": "glassformer",
        "version": version("glassformer"),
        "folder": workspace.root.name,
        "limits": {
            "prompt_characters": limits.PROMPT_CHARACTERS,
            "prompt_tokens": limits.PROMPT_TOKENS,
            "new_tokens": limits.NEW_TOKENS,
            "beams": limits.BEAMS,
            "picked_runs": limits.PICKED_RUNS,
        },
    }


def list_runs(query: Query, workspace: Workspace) -> dict[str, Any]:
    """List every run and model of the folder, by name."""
    query.only()
    rows = []
    for name, folder, kind in workspace.folders():
        row = table.run_summary(name, folder, kind)
        seconds, written = row.get("seconds"), row.get("written")
        row["path"] = f"{workspace.display_path}/{folder.name}"
        row["time"] = None if seconds is None else table.duration(seconds)
        row["date"] = written and time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
        rows.append(row)
    return {"folder": workspace.display_path, "sweeps": workspace.sweeps_path, "runs": rows}


def one_run(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Return a run: its row of the list, its checkpoints, its settings, the sizes of its splits."""
    query.only()
    name = query.text("id")
    folder = workspace.folder(name)
    line = table.run_summary(name, folder, kind_of(folder) or "model")
    if line["kind"] == "model" or line["status"] == "damaged":
        return {**line, "checkpoints": [], "settings": {}, "splits": {}}
    directory = workspace.run(name)
    data = table.read_record(folder, "run.json").get("data")
    sizes = data.get("sizes") if isinstance(data, dict) else None
    splits = sizes if isinstance(sizes, dict) else {}
    return {
        **line,
        "checkpoints": directory.steps(),
        "best": directory.pointed("best"),
        "last": directory.pointed("last"),
        "settings": table.settings(folder),
        "splits": {str(split)[:40]: table.number(size) for split, size in splits.items()},
    }


def _marks(alerts: Any) -> list[dict[str, Any]]:
    return [
        {"step": one.step, "kind": one.kind[:40], "message": one.message[:300]}
        for one in alerts[-ALERTS:]
    ]


def settings(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Return the settings in which the runs differ."""
    query.only("runs")
    return table.differing(_settings(_picked(query), workspace))


def curves(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Return one quantity of several runs, thinned for a screen; unchanged runs are left out.

    `seen` are the cursors that the page has, in the order of `runs`. With `group=seed`, runs that
    differ in nothing but their seed are also given as mean and band. With `beside=val`, each line
    comes with the same quantity of validation, `val.loss` beside `loss`.
    """
    query.only("runs", "series", "x", "smooth", "group", "seen", "max", "beside")
    picked = _picked(query)
    seen = query.texts("seen", most=limits.PICKED_RUNS)
    wanted = query.text("series", default="loss")
    axis = query.choice("x", AXES, default="step")
    span = query.number("smooth", low=0.0, high=1e6, default=0.0)
    most = query.integer("max", low=4, high=limits.CURVE_POINTS, default=limits.CURVE_POINTS)
    grouped = query.choice("group", ("none", "seed"), default="none") == "seed"
    beside = query.choice("beside", ("none", "val"), default="none") == "val"
    lines: list[dict[str, Any]] = []
    unchanged: list[str] = []
    names: dict[str, None] = {}
    by_run: dict[str, Series] = {}
    for index, run in enumerate(picked):
        directory = workspace.run(run)
        read, cursor = workspace.curves.read(directory.folder)
        names |= dict.fromkeys(read.series)
        if wanted in read.series:
            by_run[run] = read.series[wanted]
        if index < len(seen) and seen[index] == cursor:
            unchanged.append(run)
            continue
        line: dict[str, Any] = {"run": run, "cursor": cursor, "checkpoints": directory.steps()}
        line["alerts"] = _marks(read.alerts)
        if wanted in read.series:
            line |= drawn(read.series[wanted], axis=axis, most=most, span=span)
        if beside and f"val.{wanted}" in read.series:
            line["beside"] = drawn(read.series[f"val.{wanted}"], axis=axis, most=most, span=0.0)
        lines.append(line)
    if names and wanted not in names:
        raise InputError(f"no run here has a curve '{wanted}'", hint=nearest(wanted, names))
    bands = []
    if grouped and lines:
        for members in table.same_but_seed(_settings(picked, workspace)):
            held = [by_run[run] for run in members if run in by_run and len(by_run[run])]
            if len(held) > 1:
                mean = band(held, axis=axis, most=most, span=span)
                named = [run for run in members if run in by_run]
                bands.append({"name": group_name(named), "runs": named, **mean})
    return {"names": list(names), "curves": lines, "unchanged": unchanged, "bands": bands}


def group_name(runs: Sequence[str]) -> str:
    """Name runs that differ in their seed alone: what their names begin with, and their number."""
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*runs, strict=False))
    start = "".join(letters[0] for letters in same).rstrip("0123456789").rstrip("-_.")
    return f"{start.removesuffix('seed').rstrip('-_.') or runs[0]} × {len(runs)}"


def _picked(query: Query) -> tuple[str, ...]:
    picked = query.texts("runs", most=limits.PICKED_RUNS)
    if not picked:
        raise InputError("no runs are named", hint="runs=a,b")
    return tuple(dict.fromkeys(picked))


def _settings(picked: tuple[str, ...], workspace: Workspace) -> dict[str, dict[str, Any]]:
    return {run: table.settings(workspace.run(run).folder) for run in picked}


def drawn(series: Series, *, axis: str, most: int, span: float) -> dict[str, Any]:
    """Return points for the screen: the raw ones, and the smoothed line if requested."""
    thin = series.thinned(most)
    points: dict[str, Any] = {
        "x": thin.x(axis).tolist(),
        "y": thin.value.tolist(),
        "step": thin.step.tolist(),
    }
    if span > 1:
        smooth = series.smoothed(span).thinned(most)
        points["smooth"] = {"x": smooth.x(axis).tolist(), "y": smooth.value.tolist()}
    return points


def band(members: Iterable[Series], *, axis: str, most: int, span: float) -> dict[str, Any]:
    """Return mean, lowest and highest over runs, at the steps that all of them have."""
    smoothed = [one.smoothed(span) if span > 1 else one for one in members]
    common = smoothed[0].step
    for one in smoothed[1:]:
        common = np.intersect1d(common, one.step)
    values = np.stack([one.value[np.isin(one.step, common)] for one in smoothed])
    xs = np.stack([one.x(axis)[np.isin(one.step, common)] for one in smoothed]).mean(axis=0)
    kept: Any = slice(None)
    if len(common) > most:
        kept = np.unique(np.linspace(0, len(common) - 1, most).round().astype(np.int64))
    return {
        "x": xs[kept].tolist(),
        "step": common[kept].tolist(),
        "mean": values.mean(axis=0)[kept].tolist(),
        "low": values.min(axis=0)[kept].tolist(),
        "high": values.max(axis=0)[kept].tolist(),
    }


# --- the page Sweeps ------------------------------------------------------------------------------


#: Seeds that a row of the table links to.
LINKED = 10
#: Columns of words; the others are of numbers.
WORDS = ("cell", "runs")


def list_sweeps(query: Query, workspace: Workspace) -> dict[str, Any]:
    """List the sweeps, the newest first."""
    query.only()
    found = []
    folder = workspace.sweeps
    for path in sorted(folder.iterdir())[: limits.LISTED] if folder.is_dir() else ():
        if NAME.fullmatch(path.name) and (path / SWEEP).is_file():
            found.append((_written(path), path.name))
    names = [name for _, name in sorted(found, reverse=True)]
    return {"folder": workspace.sweeps_path, "sweeps": names}


def one_sweep(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Return a sweep as trees: its progress, its ranking and its pictures; `live` while it runs."""
    query.only()
    from glassformer.lab.sweeps import report

    name = query.text("id")
    folder = workspace.sweep(name)
    live = RunDirectory(folder).held()
    sweep, ranking = _ranked(folder, workspace)
    parts = [
        _progress(sweep, live=live),
        *_ranking(sweep, ranking, name),
        *_pictures(sweep, ranking),
    ]
    return {
        "name": name,
        "live": live,
        "parts": [part.tree() for part in parts],
        **report.commands(sweep.plan.sweep, f"{workspace.sweeps_path}/{name}"),
    }


def _written(path: Path) -> float:
    stamps = [path / file for file in (SWEEP, "results.jsonl", "progress.json")]
    return max((stamp.stat().st_mtime for stamp in stamps if stamp.is_file()), default=0.0)


def _ranked(folder: Path, workspace: Workspace) -> "tuple[Sweep, Ranking]":
    from glassformer.lab.sweeps.sweep import Sweep

    files = [folder / SWEEP, folder / "results.jsonl"]
    stamps = tuple((f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file())
    key = ("sweep", folder, stamps)
    known: tuple[Sweep, Ranking] | None = workspace.results.find(key)
    if known is None:
        try:
            sweep = Sweep.glance(folder)
            known = sweep, sweep.ranking
        except GlassError:
            raise
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InputError(f"this sweep is damaged: {error}", where=folder.name) from error
        workspace.results.put(known, key=key)
    return known


def _progress(sweep: "Sweep", *, live: bool) -> Element:
    plan = sweep.plan
    total = max(len(plan.cells), plan.sweep.draws) * plan.sweep.seeds
    states = [one.status for one in sweep.results.values()]
    bad = sum(state in ("failed", "diverged") for state in states)
    done = states.count("finished")
    facts = [f"{plan.sweep.what}: {len(plan.cells)} cells, {plan.sweep.seeds} seeds"]
    facts.append(f"{done} of {total} runs done")
    stopped = states.count("stopped")
    facts += [f"{stopped} stopped"] if stopped and not live else []
    facts += [f"{bad} failed or diverged"] if bad else []
    share = (done + bad) / max(1, total)
    if live:
        try:
            record = read_record(sweep.path, "progress.json")
            running, left = record.get("running"), record.get("left")
            facts.append(f"{len(running) if isinstance(running, list) else 0} running")
            if isinstance(left, (int, float)) and math.isfinite(left):
                facts.append(f"{duration(left)} left")
        except FileError:
            facts.append("running")
    elif done + bad + stopped < total:
        facts.append("it does not run now")
    bar = el("progress", max=1, value=f"{share:.4f}", aria_label="runs done")
    return el("p", bar, el("span", " · ".join(facts)), class_="progress", role="status")


def _ranking(sweep: "Sweep", ranking: "Ranking", name: str) -> Iterator[Element]:
    from glassformer.lab.sweeps import report

    if not ranking.rows:
        yield el("section", el("p", "No cell has all its seeds yet."), class_="panel")
        return
    groups = (el("li", ranking.group_text(group)) for group in ranking.groups[:12])
    yield el(
        "section",
        el("h2", f"Ranking by {ranking.metric.replace('_', ' ')}"),
        el("ul", *groups, class_="ties"),
        *(el("p", note, class_="note") for note in ranking.notes),
        _scrolled("Ranking as a picture", report.intervals_picture(ranking)),
        _table(sweep, ranking, name),
        class_="panel ranking",
        aria_label="Ranking",
    )


def _pictures(sweep: "Sweep", ranking: "Ranking") -> Iterator[Element]:
    from glassformer.lab.sweeps import report
    from glassformer.lab.sweeps.sweep import mean_curve

    if not ranking.rows:
        return
    rows = ranking.rows
    shown = [*rows[: report.CURVES], rows[-1]]
    curves = {row.cell: mean_curve(sweep.plan, sweep.results, row.cell) for row in shown}
    for _, title, picture in report.pictures(sweep.plan, ranking, curves):
        note = el("p", f"{picture.props['aria-label']}.", class_="note")
        inside = el("h2", title), note, _scrolled(title, picture)
        yield el("section", *inside, class_="panel", aria_label=title)


def _scrolled(label: str, picture: Element) -> Element:
    return el("div", picture, class_="scroll", tabindex=0, role="group", aria_label=label)


def _table(sweep: "Sweep", ranking: "Ranking", name: str) -> Element:
    from glassformer.lab.sweeps.report import ranking_columns

    columns = ranking_columns(sweep.plan, ranking)
    heads = [*columns, "runs"]
    lines = zip(ranking.rows, zip(*columns.values(), strict=True), strict=True)
    body = [_row(ranking, row, words, name) for row, words in lines]
    body += [
        el("tr", *_cells(("", cell, why), span=len(heads) - 2))
        for _, cell, why in ranking.incomplete
    ]
    inside = el("thead", el("tr", *map(_head, heads))), el("tbody", *body)
    return _scrolled("Table: ranking", el("table", *inside, class_="data", aria_label="Ranking"))


def _head(word: str) -> Element:
    return el("th", word, scope="col", **({} if word in WORDS else {"class_": "n"}))


def _row(ranking: "Ranking", row: "Ranked", words: Sequence[str], name: str) -> Element:
    from glassformer.lab.sweeps.plan import run_name

    links: list[Element | str] = []
    for seed in range(min(LINKED, ranking.seeds)):
        where = f"#/inspect?run={name}.{run_name(row.cell, seed)}"
        label = f"Inspect {row.name}, seed {seed}"
        links += [el("a", f"s{seed}", href=where, aria_label=label), " "]
    cells = _cells([word.strip() or "-" for word in words])
    return el("tr", *cells, el("td", *links), class_=f"group-{row.group % 2}")


def _cells(words: Sequence[str], *, span: int = 1) -> Iterator[Element]:
    """Yield the cells of a line, the second its name; the last spans what is left."""
    for index, word in enumerate(words):
        props: dict[str, object] = {"class_": "n"} if span == 1 else {}
        if span > 1 and index == len(words) - 1:
            props["colspan"] = span
        inside = (word,) if word else ()
        yield el("th", *inside, scope="row") if index == 1 else el("td", *inside, **props)


ROUTES: tuple[Route, ...] = (
    ("GET", "/api/about", about),
    ("GET", "/api/runs", list_runs),
    ("GET", "/api/runs/{id}", one_run),
    ("GET", "/api/settings", settings),
    ("GET", "/api/curves", curves),
    ("GET", "/api/sweeps", list_sweeps),
    ("GET", "/api/sweeps/{id}", one_sweep),
)
