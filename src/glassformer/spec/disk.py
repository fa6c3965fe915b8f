"""How files are written: never through a link, and on the disk before anything relies on them.

A folder may come from somebody else, and a name in it may be a link to any file of ours. So a new
file gets a name that is not there yet, a log is opened only if it is a file with one name, and no
folder below a run is a link. A name that is made or moved is synced with its folder: after a loss
of power the disk holds what was written, in the order in which it was written.

What a killed process left under a temporary name is removed by the next writer of the same file;
a lock of the kernel tells it from what a living process is writing.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from glassformer.spec.errors import FileError, InputError

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AS_IT_IS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: Writers of one file at the same time.
_MOST = 1_000


def linked(path: Path, what: str = "is a link") -> FileError:
    """Return the error of a name that leads to another file."""
    return FileError(
        f"{path.name} {what}, and nothing is written through one",
        where=str(path),
        hint="remove it, or put a copy of what it leads to in its place",
    )


# --- folders --------------------------------------------------------------------------------------


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Put all files below a folder on the disk, and their names."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            handle = os.open(path, os.O_RDONLY | _AS_IT_IS)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    for inner in {path.parent for path in folder.rglob("*")} | {folder}:
        sync_folder(inner)


def make_folder(folder: Path, *, below: Path | None = None) -> None:
    """Make a folder and those above it, synced; from `below` on, a link is refused."""
    above = folder.parent
    if below is not None and folder != below:
        make_folder(above, below=below)
    elif not above.exists():
        make_folder(above)
    if below is not None and folder.is_symlink():
        raise linked(folder)
    try:
        folder.mkdir()
    except OSError:  # a folder that exists may also be refused as read-only
        if not folder.is_dir():
            raise
    else:
        sync_folder(above)


def rename(path: Path, new: Path) -> None:
    """Give a file or a folder another name, which is on the disk when this returns."""
    path.rename(new)
    for folder in {new.parent, path.parent}:
        if folder.is_dir():  # a temporary one may be gone
            sync_folder(folder)


def remove(path: Path) -> None:
    """Remove a file, a folder with all that it holds, or a link alone; nothing need be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """Yield a temporary folder in the same folder; it is removed at the end, unless renamed."""
    make_folder(path.parent)
    _remove_leftovers(path)
    while True:
        beside = path.with_name(f".tmp-{path.name[:200]}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        beside.mkdir()
        handle = os.open(beside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if _is_ours(handle, beside):
            break
        os.close(handle)
    try:
        yield beside
    finally:  # an interrupt too
        shutil.rmtree(beside, ignore_errors=True)
        os.close(handle)


def check_new(path: Path, *, hint: str = "choose another name, or remove it first") -> None:
    """Raise if something has this name, be it a link that leads nowhere."""
    if os.path.lexists(path):
        _remove_leftovers(path)
        raise InputError(f"{path} exists", hint=hint)


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary folders of this file or folder that no living process is writing."""
    kind = re.compile(rf"\.tmp-{re.escape(path.name[:200])}-\d+-[0-9a-f]{{8}}")
    with contextlib.suppress(OSError):
        for name in filter(kind.fullmatch, os.listdir(path.parent)):
            with contextlib.suppress(OSError):
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                handle = os.open(path.parent / name, flags)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent / name)
                finally:
                    os.close(handle)


def _is_ours(handle: int, path: Path) -> bool:
    """Lock a temporary name that was just made; False if another process took it for a leftover."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, where nothing is taken for a leftover
        pass
    return is_named(handle, path)


def is_named(handle: int, path: Path) -> bool:
    """Return True if an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


# --- small files that are read ------------------------------------------------------------------

TEXT_LIMIT = 10_000_000


def small_text(path: Path) -> str:
    """Return the text of a small file; a larger one, a pipe, and bytes that are no text, raise."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise FileError(f"{path.name} is no file", where=str(path.parent))
        data = file.read(TEXT_LIMIT + 1)
    if len(data) > TEXT_LIMIT:
        raise FileError(
            f"{path.name} is too large: more than {TEXT_LIMIT:,} bytes", where=str(path.parent)
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path.name} is not text", where=str(path.parent)) from error


# --- files ----------------------------------------------------------------------------------------


def create(path: Path) -> IO[bytes]:
    """Open a new file to write; what had its name is removed, and not written to."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.fdopen(os.open(path, _NEW, 0o666), "wb")


def open_own(path: Path, flags: int) -> int:
    """Open a file to change it; refused are a link, a second name of a file, and no file."""
    try:
        handle = os.open(path, flags | _AS_IT_IS, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise linked(path) from error
        if error.errno == errno.ENXIO:
            raise linked(path, "is a pipe") from error
        raise
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_nlink < 2:
        return handle
    os.close(handle)
    what = "has a second name elsewhere" if stat.S_ISREG(found.st_mode) else "is no file"
    raise linked(path, what)


def check_own(path: Path) -> None:
    """Raise if a name is a link, or a file that has another name too; nothing need be there."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISLNK(found.st_mode):
        raise linked(path)
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        raise linked(path, "has a second name elsewhere")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that takes this name, synced, when the block ends; an error leaves the old."""
    beside, handle = _temporary(path)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            rename(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Write a file of these bytes: a kill at any moment leaves the old one or the new one."""
    with replacing(path) as file:
        file.write(data)


def _temporary(path: Path) -> tuple[Path, int]:
    """Create a file under a temporary name; a leftover of a killed process is removed."""
    for number in range(_MOST):
        again = f".{number}" if number else ""
        beside = path.with_name(f".{path.name[:200]}{again}.tmp")
        if not _is_free(beside):
            continue
        try:
            handle = os.open(beside, _NEW, 0o666)
        except FileExistsError:
            continue
        if _is_ours(handle, beside):
            return beside, handle
        os.close(handle)
    raise FileExistsError(errno.EEXIST, "too many temporary files", str(path))


def _is_free(beside: Path) -> bool:
    """Return True if nothing has this name, or only what a killed process left, now removed."""
    try:
        handle = os.open(beside, os.O_RDONLY | _AS_IT_IS)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.ELOOP:
            return False
        beside.unlink()  # the link, not what it leads to
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_named(handle, beside):
            beside.unlink()
        return True
    except OSError:  # being written, no lock to ask, or not ours to remove
        return False
    finally:
        os.close(handle)
