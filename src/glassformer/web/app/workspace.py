"""`Workspace`: everything a request may refer to: runs and models by id, loaded models, results.

An id is a name, never a path; it is looked up in one folder, and a link that leads out of it is
refused. At most two models are in memory, and one heavy job runs at a time.

Curves of runs are read once, then from where the last reading ended. A cursor is an offset and a
checksum of the bytes before it, so that a file that was cut back by a resumed run, and has grown
past that offset again, is noticed and read anew.
"""

import contextlib
import secrets
import threading
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glassformer.lab.runs.curves import Curves, Series, read_curves
from glassformer.lab.runs.table import checked_file
from glassformer.spec.errors import InputError
from glassformer.store.checkpoint import MANIFEST
from glassformer.store.rundir import NAME, RunDirectory, RunRef
from glassformer.web.app import limits
from glassformer.web.app.query import Busy, Refused, Unknown
from glassformer.web.app.relay import Relay

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


if TYPE_CHECKING:
    from glassformer.adapters.base import BaseAdapter


#: The file that makes a folder a sweep.
SWEEP = "sweep.json"


def kind_of(folder: Path) -> str | None:
    """Return `run`, `model`, or None for a folder that is neither; no file is read."""
    if (folder / MANIFEST).is_file():  # a run's checkpoint has a run.json of its own
        return "model"
    if (folder / "run.json").is_file():
        return "run"
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return "model"
    return "model" if folder.suffix == ".gguf" and folder.is_file() else None


def id_for(path: Path) -> str:
    """Return a folder's name as an id: characters that an id may not have become dashes."""
    name = path.resolve().name.removesuffix(".gguf")
    letters = "".join(letter if NAME.fullmatch(f"a{letter}") else "-" for letter in name)
    return letters.lstrip(".")[:64] or "model"


def _display_path(root: Path) -> str:
    """Return the folder relative to the working directory; only its name if it is elsewhere."""
    here = Path.cwd()
    return root.relative_to(here).as_posix() if root.is_relative_to(here) else root.name


def written_at(path: Path) -> int:
    """Return when a checkpoint was written: one that was replaced is loaded again."""
    stamp = path / MANIFEST if (path / MANIFEST).is_file() else path
    try:
        return stamp.stat().st_mtime_ns
    except OSError as error:
        raise Unknown("this checkpoint was removed just now", hint="choose another step") from error


@dataclass(slots=True)
class _Loaded:
    """A model in memory, and the lock of the thread that computes with it."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    adapter: Any = None


@dataclass(frozen=True, slots=True)
class _Result:
    """A result, its bytes, and the model it refers to (which it would keep in memory)."""

    value: Any
    size: int
    model: Any


class ResultCache:
    """Recent results by key, bounded in number and bytes; the least recently used go first.

    A result that the page fetches later is put under a random key; one that is expensive to compute
    and depends on known values is put under those values.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: OrderedDict[Hashable, _Result] = OrderedDict()

    def put(
        self, value: Any, *, key: Hashable | None = None, size: int = 0, model: Any = None
    ) -> Any:
        """Store a result of `size` bytes; return its key, a random one if none is given."""
        key = secrets.token_hex(8) if key is None else key
        with self._lock:
            self._results.pop(key, None)
            self._results[key] = _Result(value, size, model)
            while len(self._results) > limits.RESULTS or (
                len(self._results) > 1
                and sum(each.size for each in self._results.values()) > limits.RESULT_BYTES
            ):
                self._results.popitem(last=False)
        return key

    def find(self, key: Hashable) -> Any:
        """Return the result under this key, or None."""
        with self._lock:
            if key not in self._results:
                return None
            self._results.move_to_end(key)
            return self._results[key].value

    def get(self, key: Hashable) -> Any:
        """Return the result under this key; if it was dropped, the page asks for it again."""
        value = self.find(key)
        if value is None:
            raise Unknown("this result is no longer kept", hint="ask for it again")
        return value

    def drop_model(self, model: Any) -> None:
        """Drop the results that refer to a model that is being unloaded."""
        with self._lock:
            for key in [key for key, each in self._results.items() if each.model is model]:
                del self._results[key]


class Workspace:
    """A runs folder (or one run, or one model), and what was loaded from it.

    extra_models: models elsewhere on the disk, by the id under which they are shown.
    """

    def __init__(
        self,
        runs: Path,
        *,
        extra_models: Mapping[str, Path] | None = None,
        device: str = "cpu",
        relay: Relay | None = None,
    ) -> None:
        self.device = device
        self.relay = relay
        self._extra = {name: path.resolve() for name, path in (extra_models or {}).items()}
        kind = kind_of(runs)
        if kind is not None:
            self._extra = {id_for(runs): runs.resolve(), **self._extra}
        self.root = (runs.parent if kind else runs).resolve()
        self.display_path = _display_path(self.root)
        self._alone = kind is not None
        self._guard = threading.Lock()
        self._slot = threading.Semaphore(1)
        self._models: OrderedDict[tuple[str, int], _Loaded] = OrderedDict()
        self.results = ResultCache()
        self.curves = CurveReader()
        self.closing = threading.Event()

    # --- runs and models by id --------------------------------------------------------------------

    def folders(self) -> list[tuple[str, Path, str]]:
        """Return (id, folder, `run` or `model`) of everything here, by name."""
        paths = dict(self._extra)
        if not self._alone and self.root.is_dir():
            for path in sorted(self.root.iterdir())[: limits.LISTED]:
                if NAME.fullmatch(path.name) and path.name not in paths and self._inside(path):
                    paths[path.name] = path
        kinds = ((name, path, kind_of(path)) for name, path in paths.items())
        return [(name, path, kind) for name, path, kind in kinds if kind is not None]

    def folder(self, name: str) -> Path:
        """Return the folder of an id."""
        if name in self._extra:
            return self._extra[name]
        if not NAME.fullmatch(name):
            raise Unknown("that cannot be the name of a run", hint="letters, digits, . - and _")
        path = self.root / name
        if self._alone or not path.exists() or kind_of(path) is None:
            path = self._run_of_sweep(name)
        elif not self._inside(path):
            raise Refused(f"'{name}' is a link that leads out of the runs folder")
        return path

    @property
    def sweeps(self) -> Path:
        """The folder of the sweeps: beside that of the runs, or the one that is shown."""
        shown = any(self.root.glob(f"*/{SWEEP}")) if self.root.is_dir() else False
        return self.root if shown else self.root.parent / "sweeps"

    @property
    def sweeps_path(self) -> str:
        """The folder of the sweeps as commands name it."""
        return _display_path(self.sweeps)

    def sweep(self, name: str) -> Path:
        """Return the folder of a sweep."""
        path = self.sweeps / name
        if not NAME.fullmatch(name) or not (path / SWEEP).is_file():
            raise Unknown(f"there is no sweep called '{name[:80]}'")
        if not path.resolve().is_relative_to(self.sweeps.resolve()):
            raise Refused(f"'{name}' is a link that leads out of the folder of the sweeps")
        return path

    def _run_of_sweep(self, name: str) -> Path:
        """Return the folder of `SWEEP.c003-s1`, a run of a sweep."""
        sweep, _, run = name.rpartition(".")
        path = self.sweeps / sweep / "runs" / run
        if not sweep or kind_of(path) != "run":
            raise Unknown(f"there is no run called '{name}'")
        if not path.resolve().is_relative_to(self.sweep(sweep).resolve()):
            raise Refused(f"'{name}' is a link that leads out of its sweep")
        return path

    def run(self, name: str) -> RunDirectory:
        """Return the run of an id; the id of a model is refused."""
        folder = self.folder(name)
        if kind_of(folder) != "run":
            raise InputError(f"'{name}' is a model: it has no curves and no training settings")
        return RunDirectory(folder)

    def _inside(self, path: Path) -> bool:
        if not path.is_symlink():  # the root itself is resolved, and an id has no parts
            return True
        try:
            return path.resolve(strict=True).is_relative_to(self.root)
        except (OSError, RuntimeError):  # a link to nowhere, or to itself
            return False

    # --- loaded models ----------------------------------------------------------------------------

    def checkpoint(self, name: str, step: str = "best") -> Path:
        """Return the folder of a run's checkpoint `best`, `last` or `120`; a model's own path."""
        from glassformer.adapters.folder.paths import checkpoint_of

        folder = self.folder(name)
        if kind_of(folder) != "run":
            if step not in ("best", "last"):
                raise Unknown(f"'{name}' is a model: it has no step {step[:20]}")
            return folder
        if step not in ("best", "last") and not (step.isascii() and step.isdigit()):
            raise InputError(f"{step[:20]!r} is not a step", hint="best, last, or a number")
        if not RunDirectory(folder).steps():
            raise Unknown(
                f"the run '{name}' has no checkpoint",
                hint="it has not saved one yet, or ended before the first: see the page Runs",
            )
        try:
            found = checkpoint_of(str(RunRef(str(folder), step)))
        except InputError as error:
            raise Unknown(error.what, hint=error.hint) from error
        if not found.resolve().is_relative_to(folder.resolve()):
            raise Refused("a checkpoint that is a link leads out of its run")
        return found

    def model(self, name: str, step: str = "best") -> "BaseAdapter":
        """Return the model, loaded once; the least recently used of three is unloaded."""
        adapter: BaseAdapter = self._loaded(name, step).adapter
        return adapter

    @contextlib.contextmanager
    def working(self, name: str, step: str = "best") -> Iterator["BaseAdapter"]:
        """Run as the one heavy job, with exclusive use of the model."""
        with self.heavy():
            loaded = self._loaded(name, step)
            with loaded.lock:
                yield loaded.adapter

    @contextlib.contextmanager
    def heavy(self) -> Iterator[None]:
        """Run as the one heavy job; raise Busy if the one before does not end soon."""
        if not self._slot.acquire(timeout=limits.PATIENCE_SECONDS):
            raise Busy("another job is running", hint="it is tried again in a moment")
        try:
            yield
        finally:
            self._slot.release()

    def _loaded(self, name: str, step: str) -> _Loaded:
        from glassformer.adapters.load import load

        path = self.checkpoint(name, step)
        key = (str(path), written_at(path))
        with self._guard:
            loaded = self._models.setdefault(key, _Loaded())
            self._models.move_to_end(key)
            while len(self._models) > limits.MODELS:
                self._unload(self._models.popitem(last=False)[1].adapter)
        with loaded.lock:
            if loaded.adapter is None:
                loaded.adapter = load(path, device=self.device)
        return loaded

    def _unload(self, adapter: Any) -> None:
        if adapter is not None:
            self.results.drop_model(adapter)
