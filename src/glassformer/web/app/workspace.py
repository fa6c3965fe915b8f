"""`Lab`: what the page may ask about, by id. Runs and models, loaded models, kept results.

An id is a name, never a path; it is looked up in one folder, and a link that leads out of it is
refused. At most two models are in memory, and one heavy job is at work at a time.
"""

import contextlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassformer.spec.errors import InputError
from glassformer.store.checkpoint import MANIFEST
from glassformer.store.run_ref import RunRef
from glassformer.store.rundir import NAME, RunDirectory
from glassformer.web.app import limits
from glassformer.web.app.query import Busy, Refused, Unknown
from glassformer.web.pages.curves import CurveReader

if TYPE_CHECKING:
    from glassformer.adapters.base import BaseAdapter


def kind_of(folder: Path) -> str | None:
    """`run`, `model`, or None for a folder that holds neither; nothing is read."""
    if (folder / MANIFEST).is_file():  # a run's checkpoint has a run.json of its own
        return "model"
    if (folder / "run.json").is_file():
        return "run"
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return "model"
    return "model" if folder.suffix == ".gguf" and folder.is_file() else None


def id_for(path: Path) -> str:
    """A folder's name as an id: what an id may not hold becomes a dash."""
    name = path.resolve().name.removesuffix(".gguf")
    made = "".join(letter if NAME.fullmatch(f"a{letter}") else "-" for letter in name)
    return made.lstrip(".")[:64] or "model"


def _place(root: Path) -> str:
    """The folder as a command here would name it; what lies elsewhere tells its name alone."""
    here = Path.cwd()
    return root.relative_to(here).as_posix() if root.is_relative_to(here) else root.name


def written_at(path: Path) -> int:
    """When a checkpoint was written: one that was replaced is loaded anew."""
    stamp = path / MANIFEST if (path / MANIFEST).is_file() else path
    try:
        return stamp.stat().st_mtime_ns
    except OSError as error:
        raise Unknown("this checkpoint was removed just now", hint="choose another step") from error


@dataclass(slots=True)
class _Loaded:
    """A model in memory, and the lock of whoever computes with it."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    adapter: Any = None


class Lab:
    """A runs folder (or one run, or one model), and what was loaded from it.

    extra_models: models elsewhere on the disk, by the id under which they are shown.
    """

    def __init__(self, runs: Path, *, extra_models: Mapping[str, Path] | None = None) -> None:
        self._extra = {name: path.resolve() for name, path in (extra_models or {}).items()}
        kind = kind_of(runs)
        if kind is not None:
            self._extra = {id_for(runs): runs.resolve(), **self._extra}
        self.root = (runs.parent if kind else runs).resolve()
        self.place = _place(self.root)
        self._alone = kind is not None
        self._guard = threading.Lock()
        self._slot = threading.Semaphore(1)
        self._models: OrderedDict[tuple[str, int], _Loaded] = OrderedDict()
        self._kept: OrderedDict[str, tuple[Any, int, Any]] = OrderedDict()
        self._results: OrderedDict[Any, Any] = OrderedDict()
        self.curves = CurveReader()
        self.closing = threading.Event()

    # --- what there is ----------------------------------------------------------------------------

    def folders(self) -> list[tuple[str, Path, str]]:
        """(id, folder, `run` or `model`) of everything here, by name."""
        found = dict(self._extra)
        if not self._alone and self.root.is_dir():
            for path in sorted(self.root.iterdir())[: limits.LISTED]:
                if NAME.fullmatch(path.name) and path.name not in found and self._inside(path):
                    found[path.name] = path
        kinds = ((name, path, kind_of(path)) for name, path in found.items())
        return [(name, path, kind) for name, path, kind in kinds if kind is not None]

    def folder(self, name: str) -> Path:
        """The folder of an id."""
        if name in self._extra:
            return self._extra[name]
        if not NAME.fullmatch(name):
            raise Unknown("that cannot be the name of a run", hint="letters, digits, . - and _")
        path = self.root / name
        if self._alone or not path.exists() or kind_of(path) is None:
            raise Unknown(f"there is no run called '{name}'")
        if not self._inside(path):
            raise Refused(f"'{name}' is a link that leads out of the runs folder")
        return path

    def run(self, name: str) -> RunDirectory:
        """The run of an id; a model without a run is told as such."""
        folder = self.folder(name)
        if kind_of(folder) != "run":
            raise InputError(f"'{name}' is a model: it has no curves and no settings of a training")
        return RunDirectory(folder)

    def _inside(self, path: Path) -> bool:
        if not path.is_symlink():  # the root itself is resolved, and an id has no parts
            return True
        try:
            return path.resolve(strict=True).is_relative_to(self.root)
        except (OSError, RuntimeError):  # a link to nowhere, or to itself
            return False

    # --- models -----------------------------------------------------------------------------------

    def checkpoint(self, name: str, step: str = "best") -> Path:
        """The folder (or file) that a run's `best`, `last` or `120` means; a model's own."""
        from glassformer.adapters.load import checkpoint_of

        folder = self.folder(name)
        if kind_of(folder) != "run":
            if step not in ("best", "last"):
                raise Unknown(f"'{name}' is a model: it has no step {step[:20]}")
            return folder
        if step not in ("best", "last") and not (step.isascii() and step.isdigit()):
            raise InputError(f"{step[:20]!r} is no step", hint="best, last, or a number")
        if not RunDirectory(folder).steps():
            raise Unknown(
                f"the run '{name}' has no checkpoint",
                hint="it is too young, or ended before its first one: the page Runs says which",
            )
        try:
            found = checkpoint_of(str(RunRef(str(folder), step)))
        except InputError as error:
            raise Unknown(error.what, hint=error.hint) from error
        if not found.resolve().is_relative_to(folder.resolve()):
            raise Refused("a checkpoint that is a link leads out of its run")
        return found

    def model(self, name: str, step: str = "best") -> "BaseAdapter":
        """The model, loaded once; the least used of three is let go."""
        return self._loaded(name, step).adapter

    @contextlib.contextmanager
    def working(self, name: str, step: str = "best") -> Iterator["BaseAdapter"]:
        """The one heavy job, with its model to itself."""
        with self.heavy():
            loaded = self._loaded(name, step)
            with loaded.lock:
                yield loaded.adapter

    @contextlib.contextmanager
    def heavy(self) -> Iterator[None]:
        """Wait a moment for the job before; then say so instead of piling up."""
        if not self._slot.acquire(timeout=limits.PATIENCE_SECONDS):
            raise Busy("another job is at work", hint="it is tried again in a moment")
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
                self._let_go(self._models.popitem(last=False)[1].adapter)
        with loaded.lock:
            if loaded.adapter is None:
                loaded.adapter = load(path)
        return loaded

    def _let_go(self, adapter: Any) -> None:
        """With a model go the results that hold it: they would keep it in memory."""
        held = [key for key, (*_, holds) in self._kept.items() if holds is adapter]
        for key in held if adapter is not None else ():
            del self._kept[key]

    # --- results ----------------------------------------------------------------------------------

    def keep(self, value: Any, *, size: int = 0, holds: Any = None) -> str:
        """Keep a result of so many bytes, which holds this model, for the page; its key."""
        key = secrets.token_hex(8)
        with self._guard:
            self._kept[key] = (value, size, holds)
            while len(self._kept) > limits.INSPECTIONS or (
                len(self._kept) > 1
                and sum(size for _, size, _ in self._kept.values()) > limits.KEPT_BYTES
            ):
                self._kept.popitem(last=False)
        return key

    def kept(self, key: str) -> Any:
        """A kept result; the oldest are let go, and the page then asks again."""
        with self._guard:
            if key not in self._kept:
                raise Unknown("this result is no longer kept", hint="ask for it again")
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def remembered(self, key: Any) -> Any:
        """What was computed under this key before, or None."""
        with self._guard:
            return self._results.get(key)

    def remember(self, key: Any, value: Any) -> None:
        """Keep what takes long and depends on `key` alone."""
        with self._guard:
            self._results[key] = value
            while len(self._results) > limits.INSPECTIONS:
                self._results.popitem(last=False)
