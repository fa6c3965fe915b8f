"""The loader of users' own files: what a spec names is imported only where the user consents.

A run folder or a model file may come from a stranger, so code is imported only if the user named
it: on the command line (`glass train my_task.py:MyTask`, `--own-code my_task.py`), from Python
(`allow_own_code("my_task.py")`), or by installing a package that declares it in the entry-point
group `glassformer.parts`. A file that has changed since is refused.
"""

import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from glassformer.spec.errors import GlassError, InputError
from glassformer.spec.own import (
    OwnCodeRefused,
    OwnPart,
    OwnSchedule,
    Settings,
    check_source,
    installed_parts,
    is_source,
)
from glassformer.spec.train import TrainSpec

P = TypeVar("P", bound=OwnPart)


@dataclass(slots=True)
class _Allowed:
    """The code that the user has named in this process."""

    files: dict[str, tuple[Path, bytes]] = field(default_factory=dict)  # by SHA-256
    modules: set[str] = field(default_factory=set)
    # by SHA-256 and folder: the same file may have other neighbours elsewhere
    imported: dict[tuple[str, Path], types.ModuleType] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=set)  # of these files, if not on Python's path
    neighbours: dict[str, Path] = field(default_factory=dict)  # folders of modules beside them

    def clear(self) -> None:
        """Forget all of it, and what was imported from beside these files."""
        for name in self.neighbours:
            sys.modules.pop(name, None)
        for known in (self.files, self.modules, self.imported, self.folders, self.neighbours):
            known.clear()


#: Consent is the user's, to this process, as imported modules are.
_ALLOWED = _Allowed()


def allow_own_code(source: str | Path) -> None:
    """Consent to running a file (`my_task.py`, `my_task.py:MyTask`) or a module in this process."""
    text = str(source)
    module = text.rpartition(":")[0] if is_source(text) else text
    if module.endswith(".py"):
        path = Path(module)
        code = _read(path)
        _ALLOWED.files[hashlib.sha256(code).hexdigest()] = (path, code)
    elif all(word.isidentifier() for word in module.split(".")):
        _ALLOWED.modules.add(module)
    else:
        raise InputError(f"{text[:80]!r} is no Python file", hint="my_task.py, or package.module")


def forget_own_code() -> None:
    """Withdraw every consent of this process."""
    _ALLOWED.clear()


def name_part(kind: type[P], source: str, options: Mapping[str, Any] | None = None) -> P:
    """Return the spec of a part that the user names: that is consent, and its file is hashed."""
    check_source(source)
    allow_own_code(source)
    module = source.rpartition(":")[0]
    code = _read(Path(module)) if module.endswith(".py") else _module_code(module)
    part = kind(
        source=source,
        sha256=hashlib.sha256(code).hexdigest(),
        options=Settings(options or {}),
    )
    open_part(part)  # a class that is not there, or does not import, is reported at once
    return part


def open_part(part: OwnPart) -> type:
    """Return the class that a spec names; refuse it without consent, or if the file has changed."""
    module = part.source.rpartition(":")[0]
    if module.endswith(".py"):
        found = _import_file(part, module)
    else:
        found = _import_module(part, module)
    own = getattr(found, part.class_name, None)
    if not isinstance(own, type):
        classes = [
            name
            for name, value in vars(found).items()
            if isinstance(value, type) and value.__module__ == found.__name__
        ]
        raise InputError(
            f"there is no class {part.class_name} in {module}",
            hint=f"it has: {', '.join(classes)}" if classes else "it defines no class",
        )
    return own


def learning_rate(train: TrainSpec, step: int) -> float:
    """Return the learning rate of a step, counted from 0, also by a schedule of the user's own.

    That one is made anew for each step: a rate depends on the step and the run's steps alone, so
    that a run which is resumed has the rates of one that was never stopped.
    """
    own = train.schedule
    if not isinstance(own, OwnSchedule):
        return train.learning_rate(step)
    kind: Any = open_part(own)
    with running(own):
        share = float(kind(**own.options).share(step, train.steps))
    if not 0.0 <= share < float("inf"):
        raise InputError(
            f"{own.source}: the share of step {step} is {share:g}",
            hint="a number of 0 or more; 1 is train.lr",
        )
    return train.lr * share


@contextlib.contextmanager
def running(part: OwnPart) -> Iterator[None]:
    """Report an error of the user's code as such, with the file and the line."""
    try:
        yield
    except GlassError:
        raise
    except Exception as error:
        raise InputError(
            f"{part.source} failed: {type(error).__name__}: {error}",
            where=_line_of(error, part),
            hint="{--debug shows|the cause has} the whole traceback",
        ) from error


def _import_file(part: OwnPart, file: str) -> types.ModuleType:
    if part.sha256 not in _ALLOWED.files:
        raise _refusal(part, file)
    path, code = _ALLOWED.files[part.sha256]
    folder = path.resolve().parent
    if (part.sha256, folder) in _ALLOWED.imported:
        return _ALLOWED.imported[part.sha256, folder]
    loader = _Loader(f"glassformer_own_{part.sha256[:16]}", path, code)
    found = importlib.util.spec_from_loader(loader.name, loader)
    assert found is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[loader.name] = module  # dataclasses and typing look a class's module up
    with running(part), neighbours(folder):
        loader.exec_module(module)
    _ALLOWED.imported[part.sha256, folder] = module
    return module


@contextlib.contextmanager
def neighbours(folder: Path) -> Iterator[None]:
    """Let a file import the modules beside it, as Python does for a script.

    They come first while the file is imported, and last afterwards, for imports inside functions.
    Modules of the same name beside another user's file are not taken for them.
    """
    place, known = str(folder), _ALLOWED.neighbours
    for name in [name for name, home in known.items() if home != folder]:
        sys.modules.pop(name, None)
        del known[name]
    before, on_path = set(sys.modules), place in sys.path and folder not in _ALLOWED.folders
    sys.path.insert(0, place)
    importlib.invalidate_caches()  # a file may be newer than what was listed of its folder
    try:
        yield
    finally:
        sys.path.remove(place)
        if place not in sys.path:
            sys.path.append(place)
        if not on_path:
            _ALLOWED.folders.add(folder)
            new = {name for name in set(sys.modules) - before if _is_beside(name, folder)}
            known.update(dict.fromkeys(new, folder))


def _is_beside(name: str, folder: Path) -> bool:
    """Return True if a module is `folder/name.py`, or in the package `folder/name`."""
    module, first = sys.modules[name], name.partition(".")[0]
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    beside = (folder / f"{first}.py", folder / first)
    found = [Path(place).resolve() for place in places if isinstance(place, str)]
    return any(one in beside or beside[1] in one.parents for one in found)


class _Loader(importlib.machinery.SourceFileLoader):
    """A loader that imports the bytes that were hashed, not the file's present ones, uncached."""

    def __init__(self, name: str, path: Path, code: bytes) -> None:
        super().__init__(name, str(path))
        self._code = code

    def get_code(self, fullname: str) -> types.CodeType | None:
        """Return the compiled file."""
        code: types.CodeType = self.source_to_code(self._code, self.path)
        return code


def _import_module(part: OwnPart, name: str) -> types.ModuleType:
    if name not in _ALLOWED.modules and part.source not in installed_parts().values():
        raise _refusal(part, name)
    with running(part):
        module = importlib.import_module(name)
    if hashlib.sha256(_module_code(name)).hexdigest() != part.sha256:
        raise _changed(part, name)
    return module


def _module_code(name: str) -> bytes:
    """Return the file of an importable module, which the user has named."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise InputError(f"there is no module {name}: {error}") from error
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise InputError(f"there is no Python file of the module {name}")
    return _read(Path(found.origin))


def _refusal(part: OwnPart, module: str) -> InputError:
    names = [path.name for path, _ in _ALLOWED.files.values()]
    if Path(module).name in names:
        return _changed(part, module)
    return OwnCodeRefused(
        f"this needs code of its author's own, {part.source}, which is not run unless you allow it",
        hint=f"{{--own-code {module}|glassformer.data.own_code.allow_own_code({module!r})}}, "
        "if you have read that file and trust it",
    )


def _changed(part: OwnPart, module: str) -> InputError:
    return InputError(
        f"{module} is not the file that this was made with: it has changed since",
        where=f"recorded SHA-256 {part.sha256}",
        hint="bring that version of the file back, or train anew with this one",
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def _line_of(error: BaseException, part: OwnPart) -> str:
    """Return the innermost line of the user's file in a traceback."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    file = Path(part.source.rpartition(":")[0]).name
    own = [frame for frame in frames if Path(frame.filename).name == file]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else part.source
