"""Folders that appear complete or not at all: written under a temporary name, synced, renamed."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from glassformer.spec.errors import MachineError


@contextlib.contextmanager
def publishing(folder: Path, *, size: int, what: str = "folder") -> Iterator[Path]:
    """Yield a temporary folder that becomes this one when the block ends; an error removes it."""
    with _beside(folder, size=size, what=what) as beside:
        yield beside
        for inner in {path.parent for path in beside.rglob("*")} | {beside}:
            _sync_folder(inner)
        beside.rename(folder)
        _sync_folder(folder.parent)


@contextlib.contextmanager
def publishing_file(file: Path, *, size: int) -> Iterator[Path]:
    """Yield a temporary path for a single file, which the block has to sync."""
    with _beside(file, size=size, what="file") as beside:
        yield beside / file.name
        (beside / file.name).rename(file)
        _sync_folder(file.parent)


@contextlib.contextmanager
def _beside(folder: Path, *, size: int, what: str) -> Iterator[Path]:
    beside = folder.parent / f".tmp-{folder.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir()
        yield beside
    except OSError as error:
        raise MachineError(
            f"could not write the {what}: {error.strerror}",
            where=str(folder),
            hint=f"it needs {size:,} bytes; what was there before is untouched",
        ) from error
    finally:  # an interrupt too; once renamed, there is nothing left to remove
        shutil.rmtree(beside, ignore_errors=True)


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file of these pieces; it is on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
