"""Reading of run folders for the page: record, status, sparkline, settings and curves.

A run folder may come from a stranger, so everything in it is checked for its type and size before
it is passed on. Listing a run opens three files and reads a bounded number of bytes. Curves are
read once, then from where the last reading ended: a cursor is an offset and a checksum of the bytes
before it, so that a file that was cut back by a resumed run, and has grown past that offset again,
is noticed and read anew.
"""

import functools
import json
import math
import os
import re
import threading
import time
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.lab.runs.curves import Curves, Series, read_curves
from glassformer.spec.errors import FileError
from glassformer.store.rundir import RunDirectory
from glassformer.web.app import limits
from glassformer.web.app.query import Refused

#: A run that claims to be running and has written nothing for this long is shown as stalled.
SILENCE_SECONDS = 60.0
#: Points of a sparkline, and bytes read for each: longer than a line of metrics.jsonl.
SPARKS = 24
SPARK_BYTES = 768
#: Bytes at the end of metrics.jsonl that are searched for the newest evaluation.
TAIL_BYTES = 64 * 1024
#: Numbers in a record beyond this are not passed on.
LARGEST = 1e300
#: Runs whose curves stay in memory.
KEPT = 2 * limits.PICKED_RUNS
#: Bytes before the end of a reading that identify the file.
MARK_BYTES = 128
_LOSS = re.compile(rb'\n\{"step": \d+, "loss": (-?\d[0-9.eE+-]{0,30}),')
_STEP = re.compile(rb'^\{"step": (\d{1,15}),', re.MULTILINE)


def checked_file(folder: Path, name: str) -> Path:
    """Return the path of a file of a run; a link that leads out of the run is refused."""
    path = folder / name
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise Refused(f"{name} is a link that leads out of its run", where=folder.name)
    return path


def read_record(folder: Path, name: str) -> dict[str, Any]:
    """Read a small JSON file of a run, which must hold an object."""
    path = checked_file(folder, name)
    try:
        with open(path, "rb", opener=_without_blocking) as file:
            data = file.read(limits.RECORD_BYTES + 1)
        if len(data) > limits.RECORD_BYTES:
            raise ValueError(f"more than {limits.RECORD_BYTES:,} bytes")
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
    except (FileError, Refused) as error:
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
        "spark": glance.sparks,
    }


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


@functools.lru_cache(maxsize=2 * limits.LISTED)
def _cached_glance(folder: Path, tail_bytes: int, size: int, _written: int) -> _Glance:
    """Read the end of the file, and a few bytes at evenly spaced offsets.

    run.json is written when a run begins and when it ends; in between, only this file changes. A
    file that has not changed is not read again.
    """
    try:
        path = checked_file(folder, "metrics.jsonl")
        with open(path, "rb", opener=_without_blocking) as file:
            number = file.fileno()
            tail = os.pread(number, tail_bytes, max(0, size - tail_bytes))
            spread = max(0, size - SPARK_BYTES) / (SPARKS - 1)
            offsets = sorted({int(i * spread) for i in range(SPARKS)})
            parts = [(at, os.pread(number, SPARK_BYTES, at)) for at in offsets]
    except (OSError, Refused):
        return _Glance()
    lines = tail[: tail.rfind(b"\n") + 1]  # complete ones
    steps = _STEP.findall(lines)
    losses: dict[int, float] = {}  # by offset: in a short file the same line is read twice
    for at, part in parts:
        match = _LOSS.search(part if at else b"\n" + part)
        if match:
            losses[at + match.start() + (1 if at else 0)] = _float(match[1])
    return _Glance(
        step=int(steps[-1]) if steps else 0,
        val=_last_val(lines),
        sparks=tuple(loss for loss in losses.values() if math.isfinite(loss)),
    )


def _float(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:  # 1.2.3
        return math.nan


def _last_val(lines: bytes) -> dict[str, Any]:
    for line in reversed(lines.split(b"\n")):
        if b'"val": {' in line:
            try:
                val = json.loads(line)["val"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # cut off at the front, or not ours
            return val if isinstance(val, dict) else {}
    return {}


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


# --- curves --------------------------------------------------------------------------------------


class CurveReader:
    """Curves of runs, each extended by what was written since the last reading.

    A long run takes seconds to read; requests for other runs do not wait for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reading: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
        self._kept: OrderedDict[Path, tuple[Curves, str]] = OrderedDict()

    def read(self, folder: Path) -> tuple[Curves, str]:
        """Return all curves of a run, and the cursor of this reading."""
        path = checked_file(folder, "metrics.jsonl")
        checked_file(folder, "alerts.jsonl")
        with self._lock:
            reading = self._reading[folder]
        with reading:
            with self._lock:
                kept = self._kept.pop(folder, None)
            if kept is None or cursor_of(path, kept[0].next) != kept[1]:
                curves = read_curves(folder)
            else:
                curves = _extended(
                    kept[0], read_curves(folder, start=kept[0].next, spent=kept[0].spent)
                )
            read = curves, cursor_of(path, curves.next)
            with self._lock:
                self._kept[folder] = read
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            return read


def cursor_of(path: Path, offset: int) -> str:
    """Return `OFFSET.CHECKSUM`: how far was read, and a checksum of the bytes before it."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, offset - MARK_BYTES))
            before = file.read(min(offset, MARK_BYTES))
    except OSError:
        before = b""
    return f"{offset}.{zlib.crc32(before):08x}"


def _extended(old: Curves, new: Curves) -> Curves:
    if new.restarted:
        return new
    names = dict.fromkeys((*old.series, *new.series))
    series = {name: _joined(old.series.get(name), new.series.get(name)) for name in names}
    return replace(new, series=series)


def _joined(old: Series | None, new: Series | None) -> Series:
    if old is None or new is None:
        either = old or new
        assert either is not None
        return either
    kept = np.searchsorted(old.step, new.step[0])  # a repeated step replaces the old one
    return Series(
        old.name,
        *(
            np.concatenate([getattr(old, part)[:kept], getattr(new, part)])
            for part in ("step", "tokens", "seconds", "value")
        ),
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


def same_but_seed(settings: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Group runs that differ in nothing but `train.seed`; groups of two and more."""
    groups: dict[str, list[str]] = {}
    for run, values in settings.items():
        key = repr(sorted((k, repr(v)) for k, v in values.items() if k != "train.seed"))
        groups.setdefault(key, []).append(run)
    return [runs for runs in groups.values() if len(runs) > 1]


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
