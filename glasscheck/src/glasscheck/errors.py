"""Errors for users: what happened, where, and what to do about it.

Each class carries the exit code that the command returns for it.
"""

import difflib
from collections.abc import Iterable


class GlassError(Exception):
    """An error for users: what went wrong, where, and a hint of what to do; at most three lines."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(what)

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
    """A file that is damaged, or not what it claims to be."""

    exit_code = 3


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return `did you mean 'causality'?`, or the list of known names if none is near."""
    choices = sorted(set(known))
    close = difflib.get_close_matches(name, choices, n=1, cutoff=cutoff)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(choices)}" if choices else "nothing is known here"
