"""Runs as rows of a table: `gf.runs`, `glass runs`, the page Runs; and what is done to whole runs.

A run folder may come from a stranger, so everything in it is checked for its type and size before
it is passed on. Listing a run opens three files and reads a bounded number of bytes, without
torch or NumPy. Tags are in tags.json, beside the record that training writes.
"""

import contextlib
import fnmatch
import functools
import json
import operator
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glassformer.spec.csv_text import csv_text
from glassformer.spec.disk import remove, rename
from glassformer.spec.errors import FileError, GlassError, InputError, MachineError, nearest
from glassformer.spec.manifest import count_parameters
from glassformer.spec.serialize import from_dict
from glassformer.spec.train import RunSpec
from glassformer.store.rundir import RunDirectory, run_folder

#: A run that claims to be running and has written nothing for this long is shown as stalled.
SILENCE_SECONDS = 60.0
#: Points of a sparkline, and bytes read for each: at least a complete line of metrics.jsonl.
SPARKS = 24
SPARK_BYTES = 1536
#: Steps beyond this are no run's.
LARGEST_STEP = 10**15
#: Bytes at the end of metrics.jsonl that are searched for the newest evaluation.
TAIL_BYTES = 64 * 1024
#: Numbers in a record beyond this are not passed on.
LARGEST = 1e300
#: Bytes of a run's small JSON files that are read; folders whose readings are remembered.
RECORD_BYTES = 4 * 1024 * 1024
REMEMBERED = 4_000
#: Tags of a run, and characters of one.
TAGS, TAG = 20, re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,31}")


class OutsideRun(InputError):
    """A file of a run that is a link to somewhere else."""


def checked_file(folder: Path, name: str) -> Path:
    """Return the path of a file of a run; a link that leads out of the run is refused."""
    path = folder / name
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise OutsideRun(f"{name} is a link that leads out of its run", where=folder.name)
    return path


def read_record(folder: Path, name: str) -> dict[str, Any]:
    """Read a small JSON file of a run, which must hold an object."""
    path = checked_file(folder, name)
    try:
        with open(path, "rb", opener=_without_blocking) as file:
            data = file.read(RECORD_BYTES + 1)
        if len(data) > RECORD_BYTES:
            raise ValueError(f"more than {RECORD_BYTES:,} bytes")
        record = json.loads(data)
        if not isinstance(record, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{name} cannot be read: {str(error)[:120]}", where=folder.name) from error
    return record


def _without_blocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a named pipe must not block the server


def run_summary(name: str, folder: Path, kind: str) -> dict[str, Any]:
    """Return one row of the table of runs; a damaged record is shown as such, not left out."""
    if kind == "model":
        return {"id": name, "kind": "model", "status": "model"}
    try:
        record = read_record(folder, "run.json")
    except (FileError, OutsideRun) as error:
        return {"id": name, "kind": "run", "status": "damaged", "why": error.what}
    recorded = str(record.get("status"))[:40]
    glance = _glance(folder, tail=TAIL_BYTES if recorded == "running" else 4096)
    val = glance.val if recorded == "running" else record.get("val")
    val = val if isinstance(val, dict) else {}
    status, why = current_status(RunDirectory(folder), recorded)
    return {
        "id": name,
        "kind": "run",
        "status": status,
        "why": why,
        "task": str(record.get("task"))[:80],
        "engine": str(record.get("engine"))[:20],
        "step": max(glance.step, number(record.get("step")) or 0),
        "steps": number(record.get("steps")),
        "best_step": number(record.get("best_step")),
        "written": _written(folder),
        "val_loss": number(val.get("loss")),
        "val_accuracy": number(val.get("accuracy")),
        **_facts(folder, record),
        "seconds": _seconds(record, status),
        "tags": list(read_tags(folder)),
        "spark": glance.sparks,
    }


def _facts(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters, seed and learning rate; an older run's are in its config."""
    recorded = {name: number(record.get(name)) for name in _NO_FACTS}
    if None not in recorded.values():
        return recorded
    try:
        stat = (folder / "config.json").stat()
    except OSError:
        return dict(_NO_FACTS)
    return dict(_cached_facts(folder, stat.st_size, stat.st_mtime_ns))


_NO_FACTS: Mapping[str, Any] = {"parameters": None, "seed": None, "lr": None}


@functools.lru_cache(maxsize=REMEMBERED)
def _cached_facts(folder: Path, size: int, _written: int) -> Mapping[str, Any]:
    try:
        spec = from_dict(RunSpec, read_record(folder, "config.json"))
        count = count_parameters(spec.model)
    except GlassError:
        return _NO_FACTS
    return {"parameters": count, "seed": spec.train.seed, "lr": spec.train.lr}


def _seconds(record: Mapping[str, Any], status: str) -> int | float | None:
    """Return the seconds of training: as recorded, of a run that still trains since its start."""
    clock = record.get("clock")
    clock = clock if isinstance(clock, dict) else {}
    spent, at = number(clock.get("seconds")), number(clock.get("at"))
    if status == "running" and spent is not None and at is not None:
        return round(spent + max(0.0, time.time() - at), 1)
    return spent


def read_tags(folder: Path) -> tuple[str, ...]:
    """Return a run's tags; a damaged file has none."""
    if not (folder / "tags.json").is_file():
        return ()
    try:
        tags = read_record(folder, "tags.json").get("tags")
    except (FileError, OutsideRun):
        return ()
    wanted = tags if isinstance(tags, list) else []
    return tuple(t for t in wanted[:TAGS] if isinstance(t, str) and TAG.fullmatch(t))


def current_status(directory: RunDirectory, recorded: str) -> tuple[str, str]:
    """Return the status now, and why it differs from the recorded one."""
    if recorded != "running":
        return recorded, ""
    if not directory.held():
        return "stalled", "its process is gone"
    silent = time.time() - _written(directory.folder)
    if silent > SILENCE_SECONDS:
        return "stalled", f"nothing written for {silent:.0f} s, though its process lives"
    return "running", ""


def number(value: Any) -> int | float | None:
    """Return a finite number, else None; also None for an integer that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < LARGEST else None


def _written(folder: Path) -> float:
    """Return the time at which the run last wrote anything."""
    times = [0.0]
    for name in ("metrics.jsonl", "run.json", "checkpoints", "lock"):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


@dataclass(frozen=True, slots=True)
class _Glance:
    """The newest step and evaluation in metrics.jsonl, and a few losses for a sparkline."""

    step: int = 0
    val: Mapping[str, Any] = field(default_factory=dict)
    sparks: tuple[float, ...] = ()


def _glance(folder: Path, *, tail: int) -> _Glance:
    try:
        stat = (folder / "metrics.jsonl").stat()
    except OSError:
        return _Glance()
    return _cached_glance(folder, tail, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=REMEMBERED)
def _cached_glance(folder: Path, tail_bytes: int, size: int, _written: int) -> _Glance:
    """Read the end of the file, and a few bytes at evenly spaced offsets.

    run.json is written when a run begins and when it ends; in between, only this file changes. A
    file that has not changed is not read again.
    """
    try:
        path = checked_file(folder, "metrics.jsonl")
        with open(path, "rb", opener=_without_blocking) as file:
            handle = file.fileno()
            tail = os.pread(handle, tail_bytes, max(0, size - tail_bytes))
            spread = max(0, size - SPARK_BYTES) / (SPARKS - 1)
            offsets = sorted({int(i * spread) for i in range(SPARKS)})
            parts = [(at, os.pread(handle, SPARK_BYTES, at)) for at in offsets]
    except (OSError, OutsideRun):
        return _Glance()
    newest = [*_entries(tail, begins=len(tail) == size)]
    losses: dict[int, float] = {}
    for at, part in parts:
        for entry in _entries(part, begins=not at):
            if (loss := number(entry.get("loss"))) is not None:
                losses.setdefault(entry["step"], float(loss))
                break
    return _Glance(
        step=newest[-1]["step"] if newest else 0,
        val=next((e["val"] for e in reversed(newest) if isinstance(e.get("val"), dict)), {}),
        sparks=tuple(losses.values()),
    )


def _entries(part: bytes, *, begins: bool) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a piece of the file that can be read; `begins`: with a line."""
    lines = part.split(b"\n")[:-1]
    for line in lines if begins else lines[1:]:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            entry = json.loads(line)
            if type(entry["step"]) is int and 0 <= entry["step"] < LARGEST_STEP:
                yield entry


# --- settings ------------------------------------------------------------------------------------


def settings(folder: Path) -> dict[str, Any]:
    """Read config.json as dotted names and plain values."""
    return dict(_flat("", read_record(folder, "config.json")))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            yield from _flat(f"{name}.{index}", item)
    else:
        yield name, number(value) if isinstance(value, float) else value


#: Settings in which runs differ most often, in the order in which they are shown.
FIRST_SETTINGS = (
    *("task.kind", "task.operation", "task.machine", "task.path"),
    *("model.d_model", "model.decoder.layers.0.count"),
    *("model.decoder.layers.0.block.attention.n_heads", "model.decoder.layers.0.block.ffn.d_ff"),
    *("model.vocab_size", "train.steps", "train.lr", "train.batch_size", "train.seed", "engine"),
)
_SECTIONS = ("task", "train", "engine", "model")


def _setting_order(name: str) -> tuple[int, int]:
    """Return a sort key: settings named above first, then by section; the sort is stable."""
    first = FIRST_SETTINGS.index(name) if name in FIRST_SETTINGS else len(FIRST_SETTINGS)
    section = name.partition(".")[0]
    return first, _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS)


def differing(by_run: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return only the settings that are not the same in all of these runs, common ones first."""
    names = sorted(
        dict.fromkeys(name for values in by_run.values() for name in values), key=_setting_order
    )
    keys = [
        name
        for name in names
        if len({json.dumps(values.get(name)) for values in by_run.values()}) > 1
    ]
    rows = {run: {key: values.get(key) for key in keys} for run, values in by_run.items()}
    return {"keys": keys, "runs": rows}


def same_but_seed(settings: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Group runs that differ in nothing but `train.seed`; groups of two and more."""
    groups: dict[str, list[str]] = {}
    for run, values in settings.items():
        key = repr(sorted((k, repr(v)) for k, v in values.items() if k != "train.seed"))
        groups.setdefault(key, []).append(run)
    return [runs for runs in groups.values() if len(runs) > 1]


# --- the table ------------------------------------------------------------------------------------

#: Columns of the table: the row's key, its title, and how narrow terminals lose it: last first.
COLUMNS = {
    "id": "run",
    "task": "task",
    "status": "status",
    "step": "step",
    "val_loss": "val loss",
    "val_accuracy": "accuracy",
    "parameters": "parameters",
    "seconds": "time",
    "written": "written",
    "seed": "seed",
    "lr": "lr",
    "tags": "tags",
}
_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}


@dataclass(frozen=True, slots=True)
class RunTable(Sequence[Mapping[str, Any]]):
    """Rows of runs, in order; it prints as a table, and a notebook shows it as one."""

    rows: tuple[Mapping[str, Any], ...]

    def __getitem__(self, index: Any) -> Any:
        return RunTable(self.rows[index]) if isinstance(index, slice) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> list[str]:
        """The names of the runs."""
        return [str(row["id"]) for row in self.rows]

    def text(self, *, width: int = 120) -> str:
        """Return a table with as many columns as fit the width; those of no run are left out."""
        kept = [key for key in COLUMNS if any(row.get(key) not in (None, [], "") for row in self)]
        cells = {key: [COLUMNS[key], *(_cell(key, row) for row in self)] for key in kept}
        widths = {key: max(map(len, column)) for key, column in cells.items()}
        while len(kept) > 2 and sum(widths[key] + 2 for key in kept) - 2 > width:
            kept.pop()
        right = {"step", "val_loss", "val_accuracy", "parameters", "seconds", "seed", "lr"}
        lines = []
        for index in range(len(self) + 1):
            line = (
                f"{cells[key][index]:{'>' if key in right else '<'}{widths[key]}}" for key in kept
            )
            lines.append("  ".join(line).rstrip())
        return "\n".join(lines)

    def csv(self) -> str:
        """Return every column as comma-separated values."""

        def cell(value: Any) -> Any:
            return " ".join(value) if isinstance(value, list) else value

        return csv_text(list(COLUMNS), [[cell(row.get(name)) for name in COLUMNS] for row in self])

    def __repr__(self) -> str:
        return self.text() if self.rows else "no runs"

    def _repr_html_(self) -> str:
        import html

        head = "".join(f"<th>{title}</th>" for title in COLUMNS.values())
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_cell(k, row))}</td>" for k in COLUMNS) + "</tr>"
            for row in self
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(key: str, row: Mapping[str, Any]) -> str:
    value = row.get(key)
    if value is None:
        return ""
    match key:
        case "step":
            steps = row.get("steps")
            return f"{value:,}" if steps in (None, value) else f"{value:,}/{steps:,}"
        case "val_loss":
            return f"{value:.4g}"
        case "val_accuracy":
            return f"{value:.1%}"
        case "parameters":
            return f"{value:,}"
        case "seconds":
            return duration(value)
        case "written":
            return ago(value)
        case "lr":
            return f"{value:g}"
        case "tags":
            return " ".join(value)
        case _:
            return str(value)


def duration(seconds: float) -> str:
    """Format a duration for people: 8 s, 1 min 20 s, 3 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def ago(moment: float, *, now: float | None = None) -> str:
    """Format a moment by how long ago it was; a date when it is more than a week."""
    passed = (time.time() if now is None else now) - moment
    if passed > 7 * 86_400:
        return time.strftime("%Y-%m-%d", time.localtime(moment))
    for size, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if passed >= size:
            count = int(passed // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def runs(
    folder: str | Path = "runs",
    *,
    sort: str = "written",
    reverse: bool = False,
    where: Iterable[str] = (),
) -> RunTable:
    """List the runs of a folder, the newest first, sorted and filtered by columns or settings.

    `sort="val_loss"` or `sort="train.lr"`; `where=["task=digits", "val_loss<0.5", "run=big-*"]`.
    Values that are missing come last.
    """
    rows = tuple(_all_rows(Path(folder)))
    for condition in where:
        test = _condition(condition, rows)
        rows = tuple(row for row in rows if test(row))
    key = _column(sort, rows)
    downward = reverse != (key == "written")  # the newest first
    known = [row for row in rows if _value(row, key) is not None]
    known.sort(key=lambda row: _sortable(_value(row, key)), reverse=downward)
    rest = [row for row in rows if _value(row, key) is None]
    return RunTable((*known, *rest))


def _all_rows(folder: Path) -> Iterator[dict[str, Any]]:
    try:
        places = sorted(folder.iterdir())
    except OSError:
        return
    for place in places:
        if (place / "run.json").is_file():
            yield run_summary(place.name, place, "run") | {"folder": str(place)}


def _column(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the key of a column by its key or title, or a setting's dotted name."""
    titles = {title: key for key, title in COLUMNS.items()} | {"date": "written", "steps": "steps"}
    if name in COLUMNS or name in titles:
        return titles.get(name, name)
    known = {setting for row in rows for setting in _settings_of(row)}
    if rows and name not in known:
        hint = nearest(name, [*titles, *known])
        if hint.startswith("known"):
            hint = f"a column: {', '.join(titles)}; or a setting such as train.lr"
        raise InputError(f"no column or setting '{name}'", hint=hint)
    return name


def _settings_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return settings(Path(row["folder"]))
    except (FileError, OutsideRun):
        return {}


def _value(row: Mapping[str, Any], key: str) -> Any:
    return row.get(key) if key in COLUMNS or key == "steps" else _settings_of(row).get(key)


def _sortable(value: Any) -> tuple[int, float, str]:
    if isinstance(value, int | float):
        return 0, float(value), ""
    return 1, 0.0, " ".join(value) if isinstance(value, list) else str(value)


def _condition(text: str, rows: Sequence[Mapping[str, Any]]) -> Callable[[Mapping[str, Any]], bool]:
    """Parse `val_loss<0.5` or `run=big-*`; a text is compared as a pattern, tags by any of them."""
    sign = next((sign for sign in _OPERATORS if sign in text), None)
    if sign is None:
        raise InputError(
            f"'{text}' is no condition", hint="task=digits, 'val_loss<0.5', tags=paper"
        )
    name, _, wanted = text.partition(sign)
    key, limit = _column(name.strip(), rows), _number(wanted.strip())
    if limit is None and sign not in ("=", "!="):
        raise InputError(f"'{wanted}' is no number", hint=f"{name}{sign}0.5")

    def holds(row: Mapping[str, Any]) -> bool:
        value = _value(row, key)
        if limit is not None and isinstance(value, int | float):
            return _OPERATORS[sign](value, limit)
        texts = value if isinstance(value, list) else [] if value is None else [str(value)]
        found = any(fnmatch.fnmatchcase(one, wanted.strip()) for one in texts)
        return found if sign == "=" else sign == "!=" and not found

    return holds


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# --- whole runs -----------------------------------------------------------------------------------


def rename_run(name: str, to: str, *, folder: str | Path = "runs") -> Path:
    """Give a run another name; one that trains, or a name that is taken, is refused."""
    place, new = _own_run(name, Path(folder)), run_folder(Path(folder), to)
    if new.exists():
        raise InputError(f"there is a {to} already", where=str(new), hint="another name")
    with RunDirectory(place).writing():
        rename(place, new)
    return new


def tag_run(
    name: str, *, add: Iterable[str] = (), remove: Iterable[str] = (), folder: str | Path = "runs"
) -> tuple[str, ...]:
    """Add tags to a run or take some off, and return those that it has."""
    place = _own_run(name, Path(folder), trains=True)
    tags = dict.fromkeys(read_tags(place))
    for tag in add:
        if not TAG.fullmatch(tag):
            raise InputError(
                f"'{tag[:60]}' cannot be a tag", hint="up to 32 letters, digits, dots, - and _"
            )
        tags[tag] = None
    for tag in remove:
        if tag not in tags:
            raise InputError(f"{name} has no tag '{tag}'", hint=nearest(tag, tags))
        del tags[tag]
    if len(tags) > TAGS:
        raise InputError(f"{name} would have {len(tags)} tags", hint=f"{TAGS} at most")
    RunDirectory(place).write_json("tags.json", {"tags": list(tags)})
    return tuple(tags)


def delete_runs(names: Iterable[str], *, folder: str | Path = "runs") -> list[Path]:
    """Delete runs with all of their files; none if one of them is no run, or trains."""
    places = [_own_run(name, Path(folder)) for name in names]
    for place in places:
        with RunDirectory(place).writing():
            remove(place)
    return places


def _own_run(name: str, folder: Path, *, trains: bool = False) -> Path:
    """Return the folder of a run, by its name alone: no path, no link."""
    place = run_folder(folder, name)
    if not (place / "run.json").is_file() or place.is_symlink():
        raise InputError(
            f"there is no run {name} in {folder}", hint=nearest(name, runs(folder).names)
        )
    if not trains and RunDirectory(place).held():
        raise MachineError(
            "another process is writing this run", where=str(place), hint="wait for it, or stop it"
        )
    return place
