"""`gf.compare`: runs side by side: the settings that differ, the results, honest differences.

Runs that differ in nothing but their seed are one group. Between two groups, seeds that both have
are paired: the difference of each pair removes what both share. A difference has an interval where
two seeds or more allow one, and says so where they do not.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any, Literal

from glassformer.lab.runs.table import (
    differing,
    duration,
    number,
    read_record,
    run_summary,
    same_but_seed,
    settings,
)
from glassformer.lens.show import html
from glassformer.lens.show.text import cut
from glassformer.spec.csv_text import csv_text
from glassformer.spec.errors import FileError, InputError, nearest

#: Settings in the terminal, and characters that a value needs to be worth a column.
LISTED, NARROW = 30, 10
SEED = "train.seed"
#: The two tables, and their titles.
SECTIONS = {"setting": "settings that differ", "result": "results"}
#: Results by their key in a run's row: title, and whether smaller is better.
RESULTS = {
    "val_loss": "validation loss",
    "val_accuracy": "validation accuracy",
    "bits_per_byte": "bits per byte",
    "excess": "excess over the exact entropy",
    "step": "steps",
    "parameters": "parameters",
    "seconds": "training time",
}
#: Results whose differences are computed; the others only inform.
SCORED = ("val_loss", "val_accuracy", "bits_per_byte", "excess")


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The mean of a score in one group minus that in the first, with its interval if it has one.

    `how`: "paired" by seed, "unpaired" (Welch's interval), or "single": one run on a side, so that
    nothing is known about the spread.
    """

    score: str
    group: str
    against: str
    mean: float
    low: float | None
    high: float | None
    how: Literal["paired", "unpaired", "single"]
    seeds: int

    @property
    def is_clear(self) -> bool:
        """True if the interval excludes zero."""
        return self.low is not None and self.high is not None and self.low * self.high > 0

    def text(self) -> str:
        """Return the difference in words."""
        title = RESULTS[self.score]
        head = f"{title}: {self.group} - {self.against} = {signed(self.mean)}"
        if self.low is None or self.high is None:
            return f"{head}; one seed a side, so its error is unknown"
        verdict = "a clear difference" if self.is_clear else "no difference seen"
        pairs = f"{self.seeds} seeds, {self.how}"
        return (
            f"{head}, 95 % interval {signed(self.low)} to {signed(self.high)} ({pairs}): {verdict}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """Runs side by side; prints as tables, and writes CSV, JSON and HTML."""

    runs: tuple[str, ...]
    settings: Mapping[str, tuple[Any, ...]]
    results: Mapping[str, tuple[Any, ...]]
    groups: tuple[tuple[str, ...], ...]
    differences: tuple[Difference, ...]

    def rows(self) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
        """Yield (section, name, values of the runs), settings first."""
        for name, values in self.settings.items():
            yield "setting", name, values
        for name, values in self.results.items():
            yield "result", RESULTS[name], tuple(_shown(name, value) for value in values)

    def text(self, *, width: int = 100) -> str:
        """Return the tables for a terminal; runs that do not fit side by side stand below."""
        parts = []
        if not self.settings:
            parts.append("the settings of these runs are the same")
        for section, title in SECTIONS.items():
            lines = [(name, values) for kind, name, values in self.rows() if kind == section]
            if lines:
                table = _table(title, self.runs, lines[:LISTED], width=width)
                more = len(lines) - LISTED
                parts.append(table + (f"\nand {more} more, all in -o FILE" if more > 0 else ""))
        if self.differences:
            notes = [line for one in self.differences for line in _wrapped(one.text(), width)]
            parts.append("\n".join(["differences", *notes]))
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "runs": list(self.runs),
            "settings": {k: list(v) for k, v in self.settings.items()},
            "results": {k: list(v) for k, v in self.results.items()},
            "groups": [list(group) for group in self.groups],
            "differences": [asdict(one) for one in self.differences],
        }

    def to_json(self) -> str:
        """Return one JSON object."""
        return json.dumps(self.to_dict())

    def csv(self) -> str:
        """Return a row for each run: its settings that differ, and its results."""
        columns = [*self.settings.values(), *self.results.values()]
        lines = [[run, *(cells[at] for cells in columns)] for at, run in enumerate(self.runs)]
        return csv_text(["run", *self.settings, *self.results], lines)

    def html(self) -> str:
        """Return a page without scripts that needs nothing from elsewhere."""
        title = " and ".join(self.runs)
        return html.page(title, f"<h1>{html.escape_line(title)}</h1>{self._repr_html_()}")

    def _repr_html_(self) -> str:
        parts = []
        for kind, title in SECTIONS.items():
            lines = [
                [name, *map(_plain, values)]
                for section, name, values in self.rows()
                if section == kind
            ]
            if lines:
                parts.append(html.table(["", *self.runs], lines, caption=title))
        parts += [f"<p>{html.escape_line(one.text())}</p>" for one in self.differences]
        return "".join(parts)

    def __repr__(self) -> str:
        return self.text()


def compare(*names: str | Path, runs: str | Path = "runs") -> RunComparison:
    """Compare runs: the settings that differ, their results, and differences by seed.

    Each is a run's folder or its name under `runs`.
    """
    given = [str(name) for name in dict.fromkeys(map(str, names))]
    if len(given) < 2:
        raise InputError("a comparison needs two runs", hint="glass compare A B")
    folders = {name: _folder(name, Path(runs)) for name in given}
    by_run = {name: settings(folder) for name, folder in folders.items()}
    found = {name: _results(name, folder) for name, folder in folders.items()}
    different = differing(by_run)
    results = {
        key: tuple(found[name].get(key) for name in given)
        for key in RESULTS
        if any(found[name].get(key) is not None for name in given)
    }
    groups = _groups(by_run)
    return RunComparison(
        runs=tuple(given),
        settings={
            key: tuple(different["runs"][name][key] for name in given) for key in different["keys"]
        },
        results=results,
        groups=groups,
        differences=tuple(_differences(groups, by_run, found)),
    )


def _folder(name: str, runs: Path) -> Path:
    for place in (Path(name), runs / name):
        if (place / "run.json").is_file():
            return place
    if "@" in name:
        raise InputError(
            f"{name} is a checkpoint, and runs are compared", hint=f"write {name.partition('@')[0]}"
        )
    known = [p.parent.name for p in runs.glob("*/run.json")] if runs.is_dir() else []
    raise InputError(f"there is no run {name}, here or in {runs}", hint=nearest(name, known))


def _results(name: str, folder: Path) -> dict[str, Any]:
    row = run_summary(name, folder, "run")
    try:
        val = read_record(folder, "run.json").get("val")
    except FileError:
        val = None
    oracle = val.get("oracle") if isinstance(val, dict) else None
    oracle = oracle if isinstance(oracle, dict) else {}
    found = {key: row.get(key, number(oracle.get(key))) for key in RESULTS}
    if found["excess"] == found["val_loss"]:  # the truth is certain, so both are the same number
        found["excess"] = None
    return found


# --- differences ----------------------------------------------------------------------------------


def _groups(by_run: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """Return runs that differ in their seed alone, in the order in which they were given."""
    several = {run: tuple(group) for group in same_but_seed(by_run) for run in group}
    return tuple(dict.fromkeys(several.get(run, (run,)) for run in by_run))


def _differences(
    groups: Sequence[tuple[str, ...]],
    by_run: Mapping[str, Mapping[str, Any]],
    found: Mapping[str, Mapping[str, Any]],
) -> Iterator[Difference]:
    """Yield each group minus the first, for every score that both have."""
    first = groups[0]
    for group in groups[1:]:
        for score in SCORED:
            ours, theirs = (_by_seed(one, by_run, found, score) for one in (group, first))
            if ours and theirs:
                yield _difference(score, _title(group), _title(first), ours, theirs)


def _title(group: tuple[str, ...]) -> str:
    return group[0] if len(group) == 1 else f"{group[0]} (and {len(group) - 1} seeds more)"


def _by_seed(
    group: Iterable[str],
    by_run: Mapping[str, Mapping[str, Any]],
    found: Mapping[str, Mapping[str, Any]],
    score: str,
) -> dict[Any, float]:
    pairs = ((by_run[run].get(SEED), number(found[run].get(score))) for run in group)
    return {seed: value for seed, value in pairs if value is not None}


def _difference(
    score: str, group: str, against: str, ours: Mapping[Any, float], theirs: Mapping[Any, float]
) -> Difference:
    shared = [seed for seed in ours if seed in theirs]
    mean, margin = fmean(ours.values()) - fmean(theirs.values()), None
    how: Literal["paired", "unpaired", "single"] = "single"
    seeds = min(len(ours), len(theirs))
    if len(shared) >= 2:
        pairs = [ours[seed] - theirs[seed] for seed in shared]
        from glassformer.lab.sweeps.ranking import t_quantile  # imports NumPy

        how, seeds, mean = "paired", len(shared), fmean(pairs)
        margin = t_quantile(len(pairs) - 1) * math.sqrt(variance(pairs) / len(pairs))
    elif seeds >= 2:
        how, margin = "unpaired", _welch(list(ours.values()), list(theirs.values()))
    return Difference(
        score=score,
        group=group,
        against=against,
        mean=mean,
        low=None if margin is None else mean - margin,
        high=None if margin is None else mean + margin,
        how=how,
        seeds=seeds,
    )


def _welch(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return half of Welch's interval of a difference of means."""
    from scipy import stats

    if variance(ours) == variance(theirs) == 0:
        return 0.0
    low, high = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
    return float(high - low) / 2


# --- words ----------------------------------------------------------------------------------------


def signed(value: float) -> str:
    """Format a difference with its sign and three significant digits."""
    return f"{value:+.3g}"


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    match name:
        case "val_accuracy":
            return f"{value:.2%}"
        case "seconds":
            return duration(value)
        case "step" | "parameters":
            return f"{value:,}"
        case _:
            return f"{value:.4g}"


def _plain(value: Any) -> str:
    """Return a setting as text: a dash where a run does not have it, quotes if it is empty."""
    if value is None:
        return "-"
    if value == "":
        return '""'
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(
    title: str, runs: Sequence[str], lines: Sequence[tuple[str, tuple[Any, ...]]], *, width: int
) -> str:
    """Lay out names and values in columns; each run on a line of its own where they do not fit."""
    first = max(len(title), *(len(name) for name, _ in lines))
    room = max(NARROW, (width - first) // len(runs) - 2)
    rows = [(name, [cut(_plain(value), room) for value in values]) for name, values in lines]
    columns = [max(len(run), *(len(values[i]) for _, values in rows)) for i, run in enumerate(runs)]
    if first + sum(column + 2 for column in columns) <= width:
        head = "".join(f"  {run:>{w}}" for run, w in zip(runs, columns, strict=True))
        made = [f"{title:<{first}}{head}"]
        for name, values in rows:
            cells = "".join(f"  {value:>{w}}" for value, w in zip(values, columns, strict=True))
            made.append(f"{name:<{first}}{cells}".rstrip())
        return "\n".join(made)
    made, widest = [title], max(map(len, runs))
    for name, values in rows:
        made.append(f"  {name}")
        made += [f"    {run:<{widest}}  {v}" for run, v in zip(runs, values, strict=True)]
    return "\n".join(made)


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
