"""Errors for users: what happened, where, and what to do about it.

Each class carries the exit code that the command line returns for it, so that a script can tell a
failed check from a bad file without reading the message.
"""

import difflib
from collections.abc import Iterable


class GlassError(Exception):
    """An error for users: what went wrong, where, and a hint of what to do; at most three lines."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  at: {self.where}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class CheckFailed(GlassError):
    """A check that the caller requested did not hold."""

    exit_code = 1


class InputError(GlassError, ValueError):
    """A value that breaks a rule: the message names both, and the nearest valid value."""


class FileError(GlassError):
    """A file that is damaged, hostile, or not what it claims to be."""

    exit_code = 3


class DivergedError(GlassError):
    """Training diverged: the loss or a gradient is no longer finite."""

    exit_code = 4


class MachineError(GlassError):
    """The machine cannot do it: memory, disk, a lock held by another process, a missing library."""

    exit_code = 5


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'd_model'?`, or the list of known names."""
    choices = sorted(set(known))
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(choices)}" if choices else "nothing is known here"
