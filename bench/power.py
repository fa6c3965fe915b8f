"""Loss of power while a run trains: what was not synced is dropped, and the run is opened again.

While a run trains, every sync of a file or a folder is noted: what it holds then is on the disk. At
a cut, the disk is made of that alone, or of that and any part of what came after it, as a disk may
have written it: a file's new bytes or a beginning of them, a name in a folder or not. The run must
then open at the newest complete checkpoint or at the one before, know all lines of its log up to
there, and end in the same bits.
"""

import contextlib
import hashlib
import os
import random
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest import mock

from bench.clock import said
from bench.kills import sample, train
from glassformer.lab.runs.record import load_run_spec
from glassformer.lab.runs.run import TrainingRun
from glassformer.spec.serialize import override, to_json
from glassformer.store.rundir import RunDirectory

CUTS, STEPS = 300, 12
#: In a folder by name: the number of a file or a folder, and True if it is a folder.
Names = dict[str, tuple[int, bool]]


class Shadow:
    """The disk below a folder: the contents of files and the names in folders, as last synced."""

    def __init__(self, root: Path, note: Callable[["Shadow"], None]) -> None:
        self.root, self.note, self.events = root, note, 0
        self.contents: dict[int, bytes] = {}
        self.names: dict[int, Names] = {}
        self._kept: list[int] = []  # open, so that no other file gets their numbers
        self._seen: set[int] = set()
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Self:
        real_fsync, real_rename = os.fsync, os.rename

        def fsync(handle: int) -> None:
            real_fsync(handle)
            path = Path(os.readlink(f"/proc/self/fd/{handle}"))
            if path.is_relative_to(self.root):
                self._synced(path, os.fstat(handle))
                self._cut_here()

        def rename(old: str | Path, new: str | Path) -> None:
            real_rename(old, new)
            self._cut_here()

        self._patches.enter_context(mock.patch.object(os, "fsync", fsync))
        self._patches.enter_context(mock.patch.object(os, "rename", rename))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patches.close()
        for handle in self._kept:
            os.close(handle)

    def _cut_here(self) -> None:
        self.events += 1
        self.note(self)

    def _synced(self, path: Path, status: os.stat_result) -> None:
        if stat.S_ISDIR(status.st_mode):
            self.names[status.st_ino] = self._names(path)
        else:
            self.contents[status.st_ino] = path.read_bytes() if path.exists() else b""

    def _names(self, folder: Path) -> Names:
        found: Names = {}
        for entry in os.scandir(folder):
            number = entry.inode()
            found[entry.name] = number, entry.is_dir(follow_symlinks=False)
            if number not in self._seen:
                self._seen.add(number)
                self._kept.append(os.open(entry.path, os.O_RDONLY | os.O_NONBLOCK))
        return found

    def write(self, folder: Path, chance: random.Random | None) -> None:
        """Make the disk as a loss of power would leave it now; without chance, only the synced."""
        now = {os.stat(self.root).st_ino: self.root}
        now |= {path.lstat().st_ino: path for path in self.root.rglob("*")}
        self._write_folder(folder, os.stat(self.root).st_ino, now, chance)

    def _write_folder(
        self, folder: Path, number: int, now: dict[int, Path], chance: random.Random | None
    ) -> None:
        folder.mkdir()
        before = self.names.get(number, {})
        after = self._names(now[number]) if number in now else {}
        for name in sorted(before.keys() | after.keys()):
            found = before.get(name)
            if chance is not None and chance.random() < 0.5:
                found = after.get(name)
            if found is None:
                continue
            inner, is_folder = found
            if is_folder:
                self._write_folder(folder / name, inner, now, chance)
            else:
                (folder / name).write_bytes(self._content(inner, now, chance))

    def _content(self, number: int, now: dict[int, Path], chance: random.Random | None) -> bytes:
        synced = self.contents.get(number, b"")
        if chance is None or number not in now:
            return synced
        data = now[number].read_bytes()
        part = data[: chance.randint(0, len(data))]
        torn = part if len(part) >= len(synced) and data.startswith(synced) else data
        return chance.choice((synced, data, torn))


def row(engine: str, count: int = CUTS) -> dict[str, object]:
    """Cut the power so many times, and go on to the end after one cut in ten."""
    began = time.perf_counter()
    found = list(cuts(count, engine=engine, resume=count // 10))
    good = sum(not cut["fault"] for cut in found)
    for cut in found:
        if cut["fault"]:
            print(f"power, event {cut['event']}: {cut['fault']}", file=sys.stderr)
    return said(
        "kills",
        f"{engine}, the power cut; {count // 10} run on to their end",
        f"{good} of {len(found)} open at the newest checkpoint or the one before",
        round((time.perf_counter() - began) / len(found) * 1e3, 1),
    )


def cuts(
    count: int, *, engine: str = "numpy", seed: int = 0, resume: int | None = None
) -> Iterator[dict[str, Any]]:
    """Cut the power so many times; `resume` of the runs go on to their end, or all of them."""
    text = to_json(override(sample(engine), [f"train.steps={STEPS}"]))
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        place = Path(name)
        with _shadow(place / "counted", lambda shadow: None) as shadow:
            train(text, place / "counted" / "runs" / "x")
        whole = _weights(place / "counted" / "runs" / "x")
        at: dict[int, list[int]] = {}
        for number in range(count):
            at.setdefault(chance.randint(1, shadow.events), []).append(number)
        made: dict[int, tuple[int, list[int]]] = {}

        def note(disk: Shadow) -> None:
            for number in at.get(disk.events, ()):
                mixed = random.Random(f"{seed}/{number}") if number % 3 else None
                disk.write(place / str(number), mixed)
                made[number] = disk.events, _complete(disk.root / "runs" / "x")

        with _shadow(place / "cut", note):
            train(text, place / "cut" / "runs" / "x")
        for number, (event, complete) in sorted(made.items()):
            wanted = resume is None or number < resume
            yield {"event": event, **_opened(place / str(number), complete, text, whole, wanted)}


def _shadow(place: Path, note: Callable[[Shadow], None]) -> Shadow:
    place.mkdir()
    return Shadow(place.resolve(), note)


def _complete(run: Path) -> list[int]:
    directory = RunDirectory(run)
    return [n for n in directory.steps() if (directory.step_folder(n) / "MANIFEST.json").is_file()]


def _weights(run: Path) -> str:
    directory = RunDirectory(run)
    last = directory.step_folder(directory.steps()[-1])
    return hashlib.sha256((last / "model.safetensors").read_bytes()).hexdigest()


def _opened(
    place: Path, complete: list[int], text: str, whole: str, to_its_end: bool
) -> dict[str, Any]:
    """Open the run as the cut left it; `fault` says what is wrong, if anything is."""
    run = place / "runs" / "x"
    step = RunDirectory(run).newest_whole()[0]
    allowed = [*([None] if len(complete) < 2 else []), *complete[-2:]]
    if step not in allowed:
        return {"step": step, "fault": f"opens at {step} of {complete}"}
    if step is not None:
        found = TrainingRun(load_run_spec(RunDirectory(run)), run)
        with found.directory.locked():
            notes = [note for note in found.resume() if not note.startswith("resuming")]
        if any("metrics.jsonl" in note for note in notes):
            return {"step": step, "fault": notes[0]}
    if to_its_end:
        if step is None and not (run / "run.json").is_file():  # the same command again
            (run / "config.json").unlink(missing_ok=True)
        train(text, run)
        if _weights(run) != whole:
            return {"step": step, "fault": "another end"}
        strays = [p.name for p in run.rglob(".*") if ".tmp" in p.name]
        if strays:
            return {"step": step, "fault": f"left {strays[0]}"}
    return {"step": step, "fault": ""}
