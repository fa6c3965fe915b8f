"""Curves of runs for the page, read once, then from where the last reading ended.

A cursor is an offset and a checksum of the bytes before it, so that a file that was cut back by a
resumed run, and has grown past that offset again, is noticed and read anew. `lab.runs.table` reads
the rest of a run folder.
"""

import threading
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.lab.runs.curves import Curves, Series, read_curves
from glassformer.lab.runs.table import checked_file
from glassformer.web.app import limits

#: Runs whose curves stay in memory.
KEPT = 2 * limits.PICKED_RUNS
#: Bytes before the end of a reading that identify the file.
MARK_BYTES = 128


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
