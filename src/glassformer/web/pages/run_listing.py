"""One run as the page lists it: what run.json says, whether that still holds, and a small curve.

A run directory may come from a stranger, so whatever it says is checked for its type and size
before it is passed on. Listing a run opens three files and reads a bounded number of bytes.
"""

import functools
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glassformer.spec.errors import FileError
from glassformer.store.rundir import RunDirectory
from glassformer.web.app import limits
from glassformer.web.app.query import Refused

#: A run that claims to be running and wrote nothing for this long is shown as stalled.
SILENCE_SECONDS = 60.0
#: Points of a sparkline, and bytes read for each: longer than a line of metrics.jsonl.
SPARKS = 24
SPARK_BYTES = 768
#: Bytes at the end of metrics.jsonl in which the newest evaluation is looked for.
TAIL_BYTES = 64 * 1024
#: A number in a record beyond this is not passed on.
LARGEST = 1e300
_LOSS = re.compile(rb'\n\{"step": \d+, "loss": (-?\d[0-9.eE+-]{0,30}),')
_STEP = re.compile(rb'^\{"step": (\d{1,15}),', re.MULTILINE)


def checked_file(folder: Path, name: str) -> Path:
    """A file of a run; a link that leads out of the run is refused."""
    path = folder / name
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise Refused(f"{name} is a link that leads out of its run", where=folder.name)
    return path


def read_record(folder: Path, name: str) -> dict[str, Any]:
    """A small JSON file of a run, as an object."""
    path = checked_file(folder, name)
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            data = file.read(limits.RECORD_BYTES + 1)
        if len(data) > limits.RECORD_BYTES:
            raise ValueError(f"more than {limits.RECORD_BYTES:,} bytes")
        found = json.loads(data)
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{name} cannot be read: {str(error)[:120]}", where=folder.name) from error
    return found


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe in a file's place must not hold us up


def listed(name: str, folder: Path, kind: str) -> dict[str, Any]:
    """A line of the table; a run whose record is damaged says so instead of vanishing."""
    if kind == "model":
        return {"id": name, "kind": "model", "status": "model"}
    try:
        record = read_record(folder, "run.json")
    except (FileError, Refused) as error:
        return {"id": name, "kind": "run", "status": "damaged", "why": error.what}
    said = str(record.get("status"))[:40]
    glance = _look(folder, tail=TAIL_BYTES if said == "running" else 4096)
    val = glance.val if said == "running" else record.get("val")
    val = val if isinstance(val, dict) else {}
    status, why = status_of(RunDirectory(folder), said)
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


def status_of(directory: RunDirectory, said: str) -> tuple[str, str]:
    """The status that holds now, and why it is not what the record says."""
    if said != "running":
        return said, ""
    if not directory.held():
        return "stalled", "its process is gone"
    silent = time.time() - _written(directory.folder)
    if silent > SILENCE_SECONDS:
        return "stalled", f"nothing written for {silent:.0f} s, though its process lives"
    return "running", ""


def number(value: Any) -> int | float | None:
    """A finite number, or nothing; also nothing for a whole number that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < LARGEST else None


def _written(folder: Path) -> float:
    """When the run last wrote anything."""
    times = [0.0]
    for name in ("metrics.jsonl", "run.json", "checkpoints", "lock"):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


@dataclass(frozen=True, slots=True)
class _Glance:
    """What a bounded look at metrics.jsonl tells."""

    step: int = 0
    val: Mapping[str, Any] = field(default_factory=dict)
    sparks: tuple[float, ...] = ()


def _look(folder: Path, *, tail: int) -> _Glance:
    try:
        found = (folder / "metrics.jsonl").stat()
    except OSError:
        return _Glance()
    return _glance(folder, tail, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=2 * limits.LISTED)
def _glance(folder: Path, tail_bytes: int, size: int, _written: int) -> _Glance:
    """The newest step and evaluation, and the loss at evenly spaced places of the file.

    run.json is written when a run begins and when it ends; what happens between stands here. A
    file that has not changed is not looked at again.
    """
    try:
        path = checked_file(folder, "metrics.jsonl")
        with open(path, "rb", opener=_without_waiting) as file:
            place = file.fileno()
            tail = os.pread(place, tail_bytes, max(0, size - tail_bytes))
            spread = max(0, size - SPARK_BYTES) / (SPARKS - 1)
            places = sorted({int(i * spread) for i in range(SPARKS)})
            parts = [(at, os.pread(place, SPARK_BYTES, at)) for at in places]
    except (OSError, Refused):
        return _Glance()
    whole = tail[: tail.rfind(b"\n") + 1]
    steps = _STEP.findall(whole)
    losses: dict[int, float] = {}  # by their place: in a short file the same line is met again
    for at, part in parts:
        match = _LOSS.search(part if at else b"\n" + part)
        if match:
            losses[at + match.start() + (1 if at else 0)] = _float(match[1])
    return _Glance(
        step=int(steps[-1]) if steps else 0,
        val=_last_val(whole),
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
                found = json.loads(line)["val"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # cut off at the front, or not ours
            return found if isinstance(found, dict) else {}
    return {}


# --- settings ------------------------------------------------------------------------------------


def settings(folder: Path) -> dict[str, Any]:
    """config.json as dotted names and plain values."""
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


#: What people ask about two runs, in the order in which they ask it.
TELLING = (
    *("task.kind", "task.operation", "task.machine", "task.path"),
    *("model.d_model", "model.decoder.layers.0.count"),
    *("model.decoder.layers.0.block.attention.n_heads", "model.decoder.layers.0.block.ffn.d_ff"),
    *("model.vocab_size", "train.steps", "train.lr", "train.batch_size", "train.seed", "engine"),
)
_ROOMS = ("task", "train", "engine", "model")


def _telling(name: str) -> tuple[int, int]:
    """Those that are named above, then by what people change most; a stable sort keeps the rest."""
    first = TELLING.index(name) if name in TELLING else len(TELLING)
    room = name.partition(".")[0]
    return first, _ROOMS.index(room) if room in _ROOMS else len(_ROOMS)


def differing(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Only the settings that are not the same in all of these runs, the most telling first."""
    names = sorted(
        dict.fromkeys(name for values in found.values() for name in values), key=_telling
    )
    keys = [
        name
        for name in names
        if len({json.dumps(values.get(name)) for values in found.values()}) > 1
    ]
    rows = {run: {key: values.get(key) for key in keys} for run, values in found.items()}
    return {"keys": keys, "runs": rows}
