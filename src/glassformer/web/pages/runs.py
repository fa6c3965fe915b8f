"""The page Runs: the list of runs and models, curves, and the settings in which runs differ.

Live curves are polled: the page sends the cursors it has, and receives the runs that have grown.
"""

import itertools
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from glassformer.lab.runs import table
from glassformer.lab.runs.curves import AXES, Series, Spent, read_curves
from glassformer.spec.errors import InputError, nearest
from glassformer.web.app import limits
from glassformer.web.app.query import Query, Route
from glassformer.web.app.workspace import Workspace, kind_of

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


def metrics(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Return a run's series from an offset of its metrics on; continue with `next` and `spent`.

    `restarted`: the file was cut back meanwhile, and these are all of its points.
    """
    query.only("from", "max", "series", "tokens", "seconds")
    directory = workspace.run(query.text("id"))
    for name in ("metrics.jsonl", "alerts.jsonl"):
        table.checked_file(directory.folder, name)
    start = query.integer("from", low=0, high=1 << 50, default=0)
    most = query.integer("max", low=4, high=limits.CURVE_POINTS, default=limits.CURVE_POINTS)
    spent = Spent(
        query.integer("tokens", low=0, high=1 << 60, default=0),
        query.number("seconds", low=0.0, high=1e12, default=0.0),
    )
    curves = read_curves(directory.folder, start=start, spent=spent)
    wanted = query.texts("series", most=40) or tuple(curves.series)
    series = {
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
        "series": series,
    }


def alerts(query: Query, workspace: Workspace) -> dict[str, Any]:
    """Return the newest alerts of a run, and the number of all."""
    query.only()
    curves, _ = workspace.curves.read(workspace.run(query.text("id")).folder)
    return {"count": len(curves.alerts), "alerts": _marks(curves.alerts)}


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
        line = {"run": run, "cursor": cursor, "checkpoints": directory.steps()}
        line["alerts"] = _marks(read.alerts)
        if wanted in read.series:
            line |= drawn(read.series[wanted], axis=axis, most=most, span=span)
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


ROUTES: tuple[Route, ...] = (
    ("GET", "/api/about", about),
    ("GET", "/api/runs", list_runs),
    ("GET", "/api/runs/{id}", one_run),
    ("GET", "/api/runs/{id}/metrics", metrics),
    ("GET", "/api/runs/{id}/alerts", alerts),
    ("GET", "/api/settings", settings),
    ("GET", "/api/curves", curves),
)


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
