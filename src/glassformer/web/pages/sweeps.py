"""The page Sweeps: the sweeps of the folder, and one of them: progress, ranking, pictures, runs.

Like the page Model, it is drawn here, as trees of elements. The ranking of a sweep is computed
again only when its list of results has grown. What it needs of the laboratory imports torch, so it
is imported when a sweep is opened.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassformer.lab.runs.table import duration, read_record
from glassformer.lens.show.block_picture import Element
from glassformer.spec.errors import FileError, GlassError, InputError
from glassformer.store.rundir import NAME, RunDirectory
from glassformer.web.app import limits
from glassformer.web.app.query import Query, Route
from glassformer.web.app.workspace import SWEEP, Workspace

if TYPE_CHECKING:
    from glassformer.lab.sweeps.ranking import Ranked, Ranking
    from glassformer.lab.sweeps.sweep import Sweep

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
    bar = Element("progress", {"max": "1", "value": f"{share:.4f}", "aria-label": "runs done"})
    words = Element("span", {}, (" · ".join(facts),))
    return Element("p", {"class": "progress", "role": "status"}, (bar, words))


def _ranking(sweep: "Sweep", ranking: "Ranking", name: str) -> Iterator[Element]:
    from glassformer.lab.sweeps import report

    if not ranking.rows:
        words = "No cell has all its seeds yet."
        yield Element("section", {"class": "panel"}, (Element("p", {}, (words,)),))
        return
    groups = tuple(Element("li", {}, (ranking.group_text(g),)) for g in ranking.groups[:12])
    inside: list[Element] = [
        Element("h2", {}, (f"Ranking by {ranking.metric.replace('_', ' ')}",)),
        Element("ul", {"class": "ties"}, groups),
        *(Element("p", {"class": "note"}, (note,)) for note in ranking.notes),
        _scrolled("Ranking as a picture", report.intervals_picture(ranking)),
        _table(sweep, ranking, name),
    ]
    yield Element("section", {"class": "panel ranking", "aria-label": "Ranking"}, tuple(inside))


def _pictures(sweep: "Sweep", ranking: "Ranking") -> Iterator[Element]:
    from glassformer.lab.sweeps import report
    from glassformer.lab.sweeps.sweep import mean_curve

    if not ranking.rows:
        return
    rows = ranking.rows
    shown = [*rows[: report.CURVES], rows[-1]]
    curves = {row.cell: mean_curve(sweep.plan, sweep.results, row.cell) for row in shown}
    made = (
        ("Two factors", report.heat_picture(sweep.plan, ranking)),
        ("Settings", report.parallel_picture(sweep.plan, ranking)),
        ("Curves", report.curves_picture(ranking, curves)),
    )
    for title, picture in made:
        if picture is not None:
            inside = (Element("h2", {}, (title,)), _scrolled(title, picture))
            yield Element("section", {"class": "panel", "aria-label": title}, inside)


def _scrolled(label: str, picture: Element) -> Element:
    props = {"class": "scroll", "tabindex": "0", "role": "group", "aria-label": label}
    return Element("div", props, (picture,))


def _table(sweep: "Sweep", ranking: "Ranking", name: str) -> Element:
    based = bool(ranking.baseline)
    heads = ["rank", "cell", ranking.metric.replace("_", " "), "±", "behind best"]
    heads += ["vs baseline"] if based else []
    heads += ["parameters", "runs"]
    head = Element("tr", {}, tuple(_head(word) for word in heads))
    body = tuple(_row(sweep, ranking, row, name, based=based) for row in ranking.rows)
    rest = tuple(
        Element("tr", {}, _cells(("", cell, why), span=len(heads) - 2))
        for _, cell, why in ranking.incomplete
    )
    inside = (Element("thead", {}, (head,)), Element("tbody", {}, body + rest))
    table = Element("table", {"class": "data", "aria-label": "Ranking"}, inside)
    props = {"class": "scroll", "tabindex": "0", "role": "group", "aria-label": "Table: ranking"}
    return Element("div", props, (table,))


def _head(word: str) -> Element:
    return Element("th", {"scope": "col"} | ({} if word in WORDS else {"class": "n"}), (word,))


def _row(sweep: "Sweep", ranking: "Ranking", row: "Ranked", name: str, *, based: bool) -> Element:
    from glassformer.lab.sweeps import report
    from glassformer.lab.sweeps.plan import run_name

    metric = ranking.metric
    words = [
        str(row.rank),
        row.name,
        report.score_text(row.mean, metric),
        report.margin_text(row, metric),
        report.gap_text(row.best, metric).strip() or "-",
    ]
    words += [report.gap_text(row.baseline, metric).strip() or "-"] if based else []
    words.append(f"{sweep.plan.cells[row.cell].parameters:,}")
    links: list[Element | str] = []
    for seed in range(min(LINKED, ranking.seeds)):
        where = f"#/inspect?run={name}.{run_name(row.cell, seed)}"
        label = f"Inspect {row.name}, seed {seed}"
        links += [Element("a", {"href": where, "aria-label": label}, (f"s{seed}",)), " "]
    props = {"class": f"group-{row.group % 2}"}
    return Element("tr", props, (*_cells(words), Element("td", {}, tuple(links))))


def _cells(words: Sequence[str], *, span: int = 1) -> tuple[Element, ...]:
    made = []
    for index, word in enumerate(words):
        tag = "th" if index == 1 else "td"
        props = {"scope": "row"} if index == 1 else {"class": "n"} if span == 1 else {}
        if span > 1 and index == len(words) - 1:
            props["colspan"] = str(span)
        made.append(Element(tag, props, (word,) if word else ()))
    return tuple(made)


ROUTES: tuple[Route, ...] = (
    ("GET", "/api/sweeps", list_sweeps),
    ("GET", "/api/sweeps/{id}", one_sweep),
)
