"""Run directories: what a run leaves, in files that other tools open.

run.json           status, steps, engine, versions, results; no host, no user, no absolute path
config.toml/.json  the run's spec, to read and to repeat it
metrics.jsonl      a line a step and a line an evaluation; append-only, cut back on resume
alerts.jsonl       spikes, skipped steps, divergence
checkpoints/       step-000120/ and so on; `best` and `last` name one each
eval/              results by split
samples/           what a language model wrote at each evaluation
probes/            attention, lens and norms of a few fixed examples at evaluations
lock               held by the one writer, whose process id it holds

Nothing is written through a link: a folder or a log of the run that is one is refused by name.

References to a run and one of its checkpoints: `RUN`, `RUN@last`, `RUN@120`.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

from glassformer.spec.disk import (
    check_own,
    is_named,
    make_folder,
    open_own,
    remove,
    replace_file,
    small_text,
    sync_folder,
)
from glassformer.spec.errors import FileError, InputError, MachineError
from glassformer.spec.serialize import json_numbers
from glassformer.spec.units import plain_digits

STEP = "step-{:06d}"
#: Names of runs: one folder below `runs`, and no `@`, which names a checkpoint.
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


def run_folder(runs: Path, name: str) -> Path:
    """Return the folder of the run of that name; a name that is a path is refused."""
    if not NAME.fullmatch(name):
        raise InputError(
            f"{name[:80]!r} cannot be the name of a run",
            hint="up to 64 letters, digits, dots, - and _, not a dot first; {--runs|runs} names a "
            "folder",
        )
    return runs / name


def cache_folder(runs: Path) -> Path:
    """Return the folder for what runs can rebuild: the token files of their texts."""
    return runs / ".cache"


#: Errors of a folder that is not ours to write to, which more room would not help.
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)

#: Folders of a run or a sweep, and the files that are written at their end.
FOLDERS = ("checkpoints", "eval", "probes", "runs", "samples", "tensorboard")
LOGS = ("lock", "metrics.jsonl", "alerts.jsonl", "results.jsonl")


class RunDirectory:
    """The files of one run, by their meaning. Without `writes`, nothing of it is ever changed."""

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder = folder
        self.writes = writes
        self.checkpoints = folder / "checkpoints"
        self.metrics = folder / "metrics.jsonl"
        self.alerts = folder / "alerts.jsonl"
        self._lock: int | None = None  # while it is held
        self._is_signed = False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run for one writer; the lock is the kernel's, so a killed writer leaves none.

        In the lock of a run, the process id is written with the first change: a command that is
        refused changes nothing.
        """
        if not self.writes:
            yield
            return
        with self.writing():
            was_there, had_lock = self.folder.exists(), os.path.lexists(self.folder / "lock")
            self._make_folder()
            for name in (*FOLDERS, *LOGS):
                check_own(self.folder / name)
            handle = self._taken()
            if not any((self.folder / name).exists() for name in ("run.json", "sweep.json")):
                _sign(handle)
        self._lock, self._is_signed = handle, False
        try:
            yield
        finally:
            if not self._is_signed and not had_lock:  # nothing was changed
                with contextlib.suppress(OSError):
                    (self.folder / "lock").unlink()
                    if not was_there:
                        self.folder.rmdir()
            self._lock = None
            os.close(handle)

    def _taken(self) -> int:
        """Return the locked file; another process may remove one that it made and did not need."""
        path = self.folder / "lock"
        while True:
            handle = open_own(path, os.O_RDWR | os.O_CREAT)
            try:
                self._take_lock(handle)
            except BlockingIOError as error:
                os.close(handle)
                raise self._held_by() from error
            except OSError as error:
                os.close(handle)
                raise MachineError(
                    f"the file system has no locks: {error.strerror}",
                    where=str(self.folder),
                    hint="keep runs on a disk of this machine: {--runs|runs} names the folder",
                ) from error
            if is_named(handle, path):
                return handle
            os.close(handle)

    @staticmethod
    def _take_lock(handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # perhaps a process that only checks the lock
            time.sleep(0.1)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _held_by(self) -> MachineError:
        number = None
        with contextlib.suppress(OSError, FileError):
            handle = open_own(self.folder / "lock", os.O_RDONLY)
            try:
                number = plain_digits(os.read(handle, 20).decode("ascii", "replace").strip())
            finally:
                os.close(handle)
        is_known = number is not None and _lives(number)  # else that of the last writer
        return MachineError(
            f"another process (id {number if is_known else 'unknown'}) is writing this run",
            where=str(self.folder),
            hint="wait for it, or choose another {--name|name}",
        )

    def check_free(self) -> None:
        """Raise where a live process writes this run: before seconds are spent on building it."""
        if self.held():
            raise self._held_by()

    def check_new(self) -> None:
        """Raise where the folder holds a run already."""
        if self.has_run():
            raise InputError(
                f"the run {self.folder.name} exists",
                hint="{--resume|resume=True} goes on with it, {--overwrite|overwrite=True} "
                "starts anew, {--name|name} gives another",
            )

    def has_run(self) -> bool:
        """Return True if a run was begun here."""
        return (self.folder / "run.json").exists() or bool(self.steps())

    def held(self) -> bool:
        """Return True if a live process writes this run; the kernel frees a dead one's lock."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            opened = os.open(self.folder / "lock", flags)
        except OSError:
            return False
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks, where nothing is written
            return False
        finally:
            os.close(opened)
        return False

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Report a full disk, or a missing permission, as an error of the machine."""
        try:
            yield
        except OSError as error:
            raise MachineError(
                f"could not write the run: {error.strerror or error}",
                where=str(self.folder),
                hint=self._hint(error.errno),
            ) from error

    def _hint(self, number: int | None) -> str:
        if number in _NOT_WRITABLE:
            return "the folder must be yours to write to, or {--runs|runs} names another"
        if not (self.folder / "config.json").exists():
            return "nothing was begun: make room, and give the same command again"
        return "make room and go on with {--resume|resume=True}; earlier checkpoints are untouched"

    def _make_folder(self, folder: Path | None = None) -> None:
        """Make a folder of the run; one that is a link is refused, and so is the run's own."""
        make_folder(self.folder if folder is None else folder, below=self.folder)

    def changing(self, path: Path) -> Path:
        """Return a path of the run that is about to be changed; its folder is there, and no link.

        The first change puts the process id into the lock. Without the lock nothing is written:
        the folder was deleted, or somebody else may hold another one.
        """
        if self._lock is not None and os.fstat(self._lock).st_nlink == 0:
            raise self.deleted()
        self._make_folder(path.parent)
        if self._lock is not None and not self._is_signed:
            _sign(self._lock)
            self._is_signed = True
        return path

    def deleted(self) -> MachineError:
        """Return the error of a run whose files are gone: what follows would be lost."""
        return MachineError(
            "the run's files were deleted or replaced while it was training",
            where=str(self.folder),
            hint="train it anew, or under another {--name|name}; nothing more was written",
        )

    def write(self, name: str, data: str | bytes) -> None:
        """Replace a small file atomically: write a temporary one, sync, rename, sync."""
        if not self.writes:
            return
        with self.writing():
            path = self.changing(self.folder / name)
            replace_file(path, data.encode() if isinstance(data, str) else data)

    def append(self, path: Path) -> TextIO:
        """Open a log of the run to write at its end."""
        if not self.writes:
            return open(os.devnull, "a", encoding="utf-8")
        is_new = not path.exists()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        file = os.fdopen(open_own(self.changing(path), flags), "a", encoding="utf-8")
        if is_new:
            sync_folder(path.parent)
        return file

    def sync(self, log: TextIO) -> None:
        """Put what was written to a log on the disk."""
        log.flush()
        if self.writes:
            os.fsync(log.fileno())

    def remove(self, *names: str) -> None:
        """Remove files and folders of the run, with all that they hold."""
        if self.writes:
            with self.writing():
                for name in names:
                    remove(self.changing(self.folder / name))

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file; a number that is not finite becomes a string."""
        self.write(name, json.dumps(json_numbers(value), indent=2, allow_nan=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the run."""
        path = self.folder / name
        try:
            return dict(json.loads(small_text(path)))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InputError(
                f"no {name} here, so this is not a run", where=str(self.folder)
            ) from error
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise FileError(f"{name} cannot be read: {error}", where=str(self.folder)) from error

    # --- checkpoints ------------------------------------------------------------------------------

    def step_folder(self, step: int) -> Path:
        """Return the folder of that step's checkpoint."""
        return self.checkpoints / STEP.format(step)

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint folder, ascending, complete or not."""
        found = self.checkpoints.glob("step-*") if self.checkpoints.is_dir() else ()
        numbers = (plain_digits(path.name.removeprefix("step-")) for path in found)
        return sorted(number for number in numbers if number is not None)

    def newest_whole(self) -> tuple[int | None, list[str]]:
        """Return the newest step whose files verify, and what is wrong with newer ones."""
        from glassformer.store.checkpoint import verify_folder  # NumPy, which lists do not need

        problems = []
        for step in reversed(self.steps()):
            try:
                verify_folder(self.step_folder(step))
            except FileError as error:
                problems.append(f"{STEP.format(step)}: {error.what}")
            else:
                return step, problems
        return None, problems

    def point(self, name: str, step: int) -> None:
        """Let `best` or `last` name a step."""
        self.write(f"checkpoints/{name}", STEP.format(step) + "\n")

    def pointed(self, name: str) -> int | None:
        """Return the step that is `best` or `last`; None without a checkpoint of that kind.

        A process may have been killed after a checkpoint was complete and before the pointers were
        moved. So `last` is the newest checkpoint, and `best` the one that it says is.
        """
        steps = self.steps()
        if not steps:
            return None
        newest = self.step_folder(steps[-1])
        if name == "last" and (newest / "MANIFEST.json").is_file():
            return steps[-1]
        said = self._best_at(newest) if name == "best" else None
        if said in steps:
            return said
        path = self.checkpoints / name
        if not path.is_file():
            return None
        try:
            text = small_text(path)
        except FileError:
            return None
        number = plain_digits(text.strip().removeprefix("step-"))
        return number if number in steps else None

    @staticmethod
    def _best_at(checkpoint: Path) -> int | None:
        """Return the best step so far, as a checkpoint has it; None if it cannot be read."""
        try:
            state = json.loads(small_text(checkpoint / "state.json"))
            best = state["progress"]["best_step"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError, FileError):
            return None
        return best if isinstance(best, int) else None

    def prune(self, *, keep: int) -> None:
        """Remove all but the newest `keep` and the best, and what a kill left behind."""
        if not self.writes:
            return
        kept = {*self.steps()[-keep:], self.pointed("best"), self.pointed("last")}
        for step in self.steps():
            if step not in kept:
                remove(self.changing(self.step_folder(step)))
        for stray in self.checkpoints.glob(".tmp-*"):
            remove(self.changing(stray))

    def cut(self, path: Path, size: int) -> None:
        """Truncate a log to its length when a checkpoint was written."""
        if self.writes and path.exists() and path.stat().st_size > size:
            handle = open_own(self.changing(path), os.O_WRONLY)
            try:
                os.ftruncate(handle, size)
            finally:
                os.close(handle)


def _sign(lock: int) -> None:
    """Write this process's id into the lock."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)


def _lives(number: int) -> bool:
    """Return True if there is a process of this id."""
    try:
        os.kill(number, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return number > 0


@dataclass(frozen=True, slots=True)
class RunRef:
    """A path and, behind `@`, the checkpoint: `best` (also when empty), `last` or a step.

    A model of the Hugging Face cache is written the same way, with its revision behind the `@`.
    """

    path: str
    step: str = ""

    @classmethod
    def parse(cls, text: str | Path) -> Self:
        """Split a text at its first `@`."""
        path, _, step = str(text).partition("@")
        return cls(path, step)

    def __str__(self) -> str:
        return f"{self.path}@{self.step}" if self.step else self.path

    @property
    def folder(self) -> Path:
        """The run's folder, without the checkpoint."""
        return Path(self.path)

    @property
    def directory(self) -> RunDirectory:
        """The files of the run."""
        return RunDirectory(self.folder)

    def checkpoint(self) -> Path:
        """Return the folder of this checkpoint; raise if the run has none of that name."""
        run = self.directory
        steps = run.steps()
        if self.step in ("", "best", "last"):
            step = run.pointed(self.step or "best") or run.pointed("last") or steps[-1]
            return run.step_folder(step)
        number = plain_digits(self.step)
        if number is None or number not in steps:
            known = ", ".join(map(str, steps))
            raise InputError(
                f"no checkpoint '{self.step}' in {self.folder}", hint=f"best, last, {known}"
            )
        return run.step_folder(number)
