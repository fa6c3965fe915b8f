"""The page Runs: what there is, how it goes, and in what the runs differ.

Live curves are polled: the page says how far it has seen each run, and is sent those that grew.
"""

from importlib.metadata import version
from typing import Any

from glassformer.lab.runs.curves import AXES, Spent, read_curves
from glassformer.spec.errors import InputError, nearest
from glassformer.web.app import limits
from glassformer.web.app.query import Query, Route
from glassformer.web.app.workspace import Lab, kind_of
from glassformer.web.pages import run_listing
from glassformer.web.pages.curves import band, drawn, same_but_seed

#: Alerts of one run that are shown; the newest.
ALERTS = 500


def about(query: Query, lab: Lab) -> dict[str, Any]:
    """Which program this is, what it shows, and how much it may be asked."""
    query.only()
    return {
        "name": "glassformer",
        "version": version("glassformer"),
        "folder": lab.root.name,
        "limits": {
            "prompt_characters": limits.PROMPT_CHARACTERS,
            "prompt_tokens": limits.PROMPT_TOKENS,
            "new_tokens": limits.NEW_TOKENS,
            "beams": limits.BEAMS,
            "picked_runs": limits.PICKED_RUNS,
        },
    }


def list_runs(query: Query, lab: Lab) -> dict[str, Any]:
    """Every run and model of the folder, by name."""
    query.only()
    found = [
        run_listing.listed(name, folder, kind) | {"path": f"{lab.place}/{folder.name}"}
        for name, folder, kind in lab.folders()
    ]
    return {"folder": lab.place, "runs": found}


def one_run(query: Query, lab: Lab) -> dict[str, Any]:
    """A run: its line of the list, its checkpoints, its settings, the sizes of its splits."""
    query.only()
    name = query.text("id")
    folder = lab.folder(name)
    line = run_listing.listed(name, folder, kind_of(folder) or "model")
    if line["kind"] == "model" or line["status"] == "damaged":
        return {**line, "checkpoints": [], "settings": {}, "splits": {}}
    directory = lab.run(name)
    data = run_listing.read_record(folder, "run.json").get("data")
    sizes = data.get("sizes") if isinstance(data, dict) else None
    splits = sizes if isinstance(sizes, dict) else {}
    return {
        **line,
        "checkpoints": directory.steps(),
        "best": directory.pointed("best"),
        "last": directory.pointed("last"),
        "settings": run_listing.settings(folder),
        "splits": {str(split)[:40]: run_listing.number(size) for split, size in splits.items()},
    }


def metrics(query: Query, lab: Lab) -> dict[str, Any]:
    """A run's series from a byte of its metrics on; `next` and `spent` are for the next question.

    `restarted`: the file was cut back meanwhile, and these are all of its points.
    """
    query.only("from", "max", "series", "tokens", "seconds")
    directory = lab.run(query.text("id"))
    for name in ("metrics.jsonl", "alerts.jsonl"):
        run_listing.checked_file(directory.folder, name)
    start = query.integer("from", low=0, high=1 << 50, default=0)
    most = query.integer("max", low=4, high=limits.CURVE_POINTS, default=limits.CURVE_POINTS)
    spent = Spent(
        query.integer("tokens", low=0, high=1 << 60, default=0),
        query.number("seconds", low=0.0, high=1e12, default=0.0),
    )
    curves = read_curves(directory.folder, start=start, spent=spent)
    wanted = query.texts("series", most=40) or tuple(curves.series)
    made = {
        name: {part: getattr(one, part).tolist() for part in ("step", "tokens", "seconds", "value")}
        for name, one in (
            (name, curves.series[name].thinned(most)) for name in wanted if name in curves.series
        )
    }
    return {
        "next": curves.next,
        "spent": {"tokens": curves.spent.tokens, "seconds": curves.spent.seconds},
        "restarted": curves.restarted,
        "names": list(curves.series),
        "series": made,
    }


def alerts(query: Query, lab: Lab) -> dict[str, Any]:
    """What deserved a look in a run; the newest, and how many there are."""
    query.only()
    curves, _ = lab.curves.read(lab.run(query.text("id")).folder)
    return {"count": len(curves.alerts), "alerts": _marks(curves.alerts)}


def _marks(found: Any) -> list[dict[str, Any]]:
    return [
        {"step": one.step, "kind": one.kind[:40], "message": one.message[:300]}
        for one in found[-ALERTS:]
    ]


def settings(query: Query, lab: Lab) -> dict[str, Any]:
    """In what the runs differ, and in nothing else."""
    query.only("runs")
    return run_listing.differing(_settings(_picked(query), lab))


def curves(query: Query, lab: Lab) -> dict[str, Any]:
    """One quantity of several runs, thinned for a screen; those that have not grown are left out.

    `seen` are the cursors that the page has, in the order of `runs`. With `group=seed`, runs that
    differ in nothing but their seed are also given as mean and band.
    """
    query.only("runs", "series", "x", "smooth", "group", "seen", "max")
    picked = _picked(query)
    seen = query.texts("seen", most=limits.PICKED_RUNS)
    wanted = query.text("series", default="loss")
    axis = query.choice("x", AXES, default="step")
    span = query.number("smooth", low=0.0, high=1e6, default=0.0)
    most = query.integer("max", low=4, high=limits.CURVE_POINTS, default=limits.CURVE_POINTS)
    grouped = query.choice("group", ("none", "seed"), default="none") == "seed"
    lines, unchanged, names, found = [], [], {}, {}
    for index, run in enumerate(picked):
        directory = lab.run(run)
        read, cursor = lab.curves.read(directory.folder)
        names |= dict.fromkeys(read.series)
        if wanted in read.series:
            found[run] = read.series[wanted]
        if index < len(seen) and seen[index] == cursor:
            unchanged.append(run)
            continue
        line = {"run": run, "cursor": cursor, "checkpoints": directory.steps()}
        line["alerts"] = _marks(read.alerts)
        if wanted in read.series:
            line |= drawn(read.series[wanted], axis=axis, most=most, span=span)
        lines.append(line)
    if names and wanted not in names:
        raise InputError(f"no run here has a curve '{wanted}'", hint=nearest(wanted, names))
    bands = []
    if grouped and lines:
        for members in same_but_seed(_settings(picked, lab)):
            held = [found[run] for run in members if run in found and len(found[run])]
            if len(held) > 1:
                made = band(held, axis=axis, most=most, span=span)
                bands.append({"runs": [run for run in members if run in found], **made})
    return {"names": list(names), "curves": lines, "unchanged": unchanged, "bands": bands}


def _picked(query: Query) -> tuple[str, ...]:
    picked = query.texts("runs", most=limits.PICKED_RUNS)
    if not picked:
        raise InputError("no runs are named", hint="runs=a,b")
    return tuple(dict.fromkeys(picked))


def _settings(picked: tuple[str, ...], lab: Lab) -> dict[str, dict[str, Any]]:
    return {run: run_listing.settings(lab.run(run).folder) for run in picked}


ROUTES: tuple[Route, ...] = (
    ("GET", "/api/about", about),
    ("GET", "/api/runs", list_runs),
    ("GET", "/api/runs/{id}", one_run),
    ("GET", "/api/runs/{id}/metrics", metrics),
    ("GET", "/api/runs/{id}/alerts", alerts),
    ("GET", "/api/settings", settings),
    ("GET", "/api/curves", curves),
)
