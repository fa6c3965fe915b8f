"""Errors for users: what happened, where, and what to do about it.

Each class carries the exit code that the command line returns for it, so that a script can tell a
failed check from a bad file without reading the message.
"""

import difflib
import re
from collections.abc import Iterable

#: `{on the command line|in Python}`
_EITHER = re.compile(r"\{([^{}|]+)\|([^{}|]+)\}")


class GlassError(Exception):
    """An error for users: what went wrong, where, and a hint of what to do; at most three lines.

    An option is named as the reader would type it: `{--resume|resume=True}` in a text is the first
    on the command line and the second in Python.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self._texts = (what, where, hint)
        self.what, self.where, self.hint = (_spelled(text, 2) for text in self._texts)
        super().__init__(self.what)

    def in_command(self) -> "GlassError":
        """Return an error of the same texts with its options spelled as on the command line."""
        what, where, hint = (_spelled(text, 1) for text in self._texts)
        return GlassError(what, where=where, hint=hint)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  at: {self.where}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


def _spelled(text: str, which: int) -> str:
    return _EITHER.sub(lambda found: found[which], text)


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


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return `did you mean 'd_model'?`, or the list of known names if none is near."""
    choices = sorted(set(known))
    close = difflib.get_close_matches(name, choices, n=1, cutoff=cutoff)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(choices)}" if choices else "nothing is known here"
