"""Files that a verb writes to the path of `-o`: the ending decides the format."""

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from glassformer.cli.shell.terminal import columns, tell
from glassformer.spec.errors import InputError, MachineError


def ending_of(path: Path, allowed: Sequence[str]) -> str:
    """Return `png` of x.png; refuse an ending that is not one of the choices."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in allowed:
        known = " or ".join(f".{name}" for name in allowed).replace(" or ", ", ", len(allowed) - 2)
        stem = path.with_suffix("") if path.name else path / "out"
        raise InputError(f"-o {path} does not end in {known}", hint=f"-o {stem}.{allowed[0]}")
    return ending


def write_file(path: Path, content: bytes) -> None:
    """Write the file atomically, and print its path; raise the reason if it cannot be written."""
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name[:200]}.tmp")
    try:
        if target.exists() and not target.is_file():  # a device, a pipe; a folder refuses
            target.write_bytes(content)
        else:
            beside.write_bytes(content)
            beside.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        what = f"cannot be written: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise MachineError(what, where=str(path), hint="make room") from error
        hint = "the folder must be there, and be yours to write to"
        raise InputError(what, where=str(path), hint=hint) from error
    tell(f"saved {path}")


def end(path: object, commands: Sequence[tuple[str, str]]) -> None:
    """Print, on stderr, where the result is and what to do next; in one column if it is narrow.

    Commands are never broken, so that they can be pasted.
    """
    lines = [*([f"written to {path}"] if path else []), "", "next:"]
    width = max(len(command) for command, _ in commands)
    beside = [f"  {command:<{width}}  {what}" for command, what in commands]
    if max(map(len, beside)) <= columns():
        lines += beside
    else:
        lines += [line for command, what in commands for line in (f"  # {what}", f"  {command}")]
    tell("\n".join(lines))


def target_of(output: str | None, endings: tuple[str, ...]) -> Path | None:
    """Return the path of `-o`, checked before the work is done; None without it."""
    if output is None:
        return None
    path = Path(output)
    ending_of(path, endings)
    return path
