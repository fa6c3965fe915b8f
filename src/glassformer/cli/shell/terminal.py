"""stdout and stderr as the command finds them: closed, full, cut off, or without a sign for é.

What was asked for and cannot be written is an error of the machine; a reader who has seen enough is
none; narration that nobody can read is left out, and the work goes on.

What the terminal can show: its width, its signs, its colours. Decided here, once for all verbs.

The environment is read here: NO_COLOR turns colour off, as everywhere.
"""

import contextlib
import os
import shutil
import signal
import sys
from io import TextIOWrapper

import typer

from glassformer.spec.errors import MachineError

CUT_OFF = 128 + signal.SIGPIPE


def open_streams() -> None:
    """A stream that is closed swallows; what stdout has no sign for becomes an escape."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  as long as we live
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def tell(text: str) -> None:
    """A line on stderr, where all narration goes."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def is_cut_off(error: BaseException) -> bool:
    """Has the reader of stdout gone? The command line's library makes an exit of it."""
    return isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)


def give_up_stdout() -> None:
    """What waits in stdout can no longer be written, and Python is not to try at its end."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def trouble(error: OSError) -> MachineError:
    """A disk that is full, a file that is not ours: said in a line."""
    return MachineError(
        f"the system refuses: {error.strerror or error}",
        where=str(error.filename or "") or "perhaps stdout",
        hint="make room, or write elsewhere; --debug shows where it happened",
    )


#: Of lines, in turn; each line also has its own dashes or sign.
COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red")
NARROWEST, WIDEST = 40, 160


def columns() -> int:
    """Characters in a line; 80 where nothing says."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((80, 24)).columns))


def is_unicode(signs: str = "░▒▓█⣿│└…") -> bool:
    """Can stdout write these?"""
    try:
        signs.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def is_coloured() -> bool:
    """Is stdout a terminal whose user does not mind colour?"""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def paint(text: str, line: int) -> str:
    """A line's own colour, where there is any."""
    return typer.style(text, fg=COLOURS[line % len(COLOURS)]) if is_coloured() else text


def printable(text: str) -> str:
    """As stdout can write it: what it has no sign for becomes an escape, never an error."""
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)
