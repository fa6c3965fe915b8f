"""Curves for the page: read once, then from where the last reading ended; thinned in Python.

A cursor says how far a run was read and by what bytes it ended there, so that a file that was cut
back by a resumed run, and has grown past the same place again, is noticed and read anew.
"""

import threading
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.lab.runs.curves import Curves, Series, read_curves
from glassformer.web.app import limits
from glassformer.web.pages.run_listing import checked_file

#: Runs whose curves stay in memory.
KEPT = 2 * limits.PICKED_RUNS
#: Bytes before the place where a reading ended that say whether it is still the same file.
MARK_BYTES = 128


class CurveReader:
    """The curves of runs, each extended by what was written since.

    A long run is read for seconds: whoever asks for another one does not wait for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reading: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
        self._kept: OrderedDict[Path, tuple[Curves, str]] = OrderedDict()

    def read(self, folder: Path) -> tuple[Curves, str]:
        """All curves of a run, and the cursor of this reading."""
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
            found = curves, cursor_of(path, curves.next)
            with self._lock:
                self._kept[folder] = found
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            return found


def cursor_of(path: Path, offset: int) -> str:
    """`OFFSET.CHECK`: how far, and a checksum of the last bytes before it."""
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
        found = old or new
        assert found is not None
        return found
    kept = np.searchsorted(old.step, new.step[0])  # a step that comes again replaces what it was
    return Series(
        old.name,
        *(
            np.concatenate([getattr(old, part)[:kept], getattr(new, part)])
            for part in ("step", "tokens", "seconds", "value")
        ),
    )


def drawn(series: Series, *, axis: str, most: int, span: float) -> dict[str, Any]:
    """Points for the screen: the raw ones, and the smoothed line where one was asked for."""
    thin = series.thinned(most)
    made: dict[str, Any] = {
        "x": thin.x(axis).tolist(),
        "y": thin.value.tolist(),
        "step": thin.step.tolist(),
    }
    if span > 1:
        smooth = series.smoothed(span).thinned(most)
        made["smooth"] = {"x": smooth.x(axis).tolist(), "y": smooth.value.tolist()}
    return made


def same_but_seed(settings: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Runs that differ in nothing but `train.seed`, in groups of two and more."""
    groups: dict[str, list[str]] = {}
    for run, values in settings.items():
        key = repr(sorted((k, repr(v)) for k, v in values.items() if k != "train.seed"))
        groups.setdefault(key, []).append(run)
    return [runs for runs in groups.values() if len(runs) > 1]


def band(members: Iterable[Series], *, axis: str, most: int, span: float) -> dict[str, Any]:
    """Mean, lowest and highest over runs, at the steps that all of them have."""
    smoothed = [one.smoothed(span) if span > 1 else one for one in members]
    common = smoothed[0].step
    for one in smoothed[1:]:
        common = np.intersect1d(common, one.step)
    values = np.stack([one.value[np.isin(one.step, common)] for one in smoothed])
    xs = np.stack([one.x(axis)[np.isin(one.step, common)] for one in smoothed]).mean(axis=0)
    kept = slice(None)
    if len(common) > most:
        kept = np.unique(np.linspace(0, len(common) - 1, most).round().astype(np.int64))
    return {
        "x": xs[kept].tolist(),
        "step": common[kept].tolist(),
        "mean": values.mean(axis=0)[kept].tolist(),
        "low": values.min(axis=0)[kept].tolist(),
        "high": values.max(axis=0)[kept].tolist(),
    }
