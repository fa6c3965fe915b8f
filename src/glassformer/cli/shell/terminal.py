"""stdin, stdout and stderr, and what the terminal can show: its width, characters, colours.

A requested result that cannot be written is an error of the machine; a reader that closes the pipe
is not an error; progress that cannot be written is dropped, and the work goes on. The environment
is read here: NO_COLOR turns colour off. A file that a verb writes to the path of `-o` has the
format of its ending.
"""

import contextlib
import errno
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path

import typer

from glassformer.spec.disk import replace_file
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.units import CONTROL, visible

CUT_OFF = 128 + signal.SIGPIPE


def open_streams() -> None:
    """Discard what goes to a closed stream, and read nothing from one; escape characters that
    stdout cannot encode.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  open until the process ends
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  open until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
        if sys.stdout.isatty():
            encoding = sys.stdout.encoding
            sys.stdout = TerminalOutput(
                sys.stdout.detach(),
                encoding=encoding,
                errors="backslashreplace",
                line_buffering=True,
            )


#: Control characters, and colours, which are ours.
COLOUR_OR_CONTROL = re.compile(f"\x1b\\[[0-9;]*m|{CONTROL}")


class TerminalOutput(TextIOWrapper):
    """A terminal as stdout: texts of models and names of files cannot move its cursor or set its
    title. Control characters are shown as escapes; `raw` lets them through.
    """

    raw = False

    def write(self, text: str, /) -> int:
        """Write the text as it can be shown."""
        return super().write(text if self.raw else COLOUR_OR_CONTROL.sub(_shown, text))


def _shown(found: re.Match[str]) -> str:
    return found[0] if len(found[0]) > 1 else visible(found[0])


def let_through() -> None:
    """Write what follows to a terminal as it is."""
    if isinstance(sys.stdout, TerminalOutput):
        sys.stdout.raw = True


def tell(text: str) -> None:
    """Print a line on stderr, where all progress goes; control characters as escapes."""
    with contextlib.suppress(OSError):
        print(COLOUR_OR_CONTROL.sub(_shown, text), file=sys.stderr, flush=True)


def is_cut_off(error: BaseException) -> bool:
    """Return True if the reader of stdout has gone; typer turns that error into an exit."""
    return isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)


def give_up_stdout() -> None:
    """Discard what is buffered for stdout, so that Python does not try to write it at exit."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def trouble(error: OSError) -> MachineError:
    """Turn an error of the system (disk full, permission denied) into one line with a hint."""
    return MachineError(
        f"the system refuses: {error.strerror or error}",
        where=str(error.filename or "") or "perhaps stdout",
        hint="make room, or write elsewhere; --debug shows where it happened",
    )


#: The colours of lines, in turn; each line also has its own dashes or marker.
COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red")
#: The colours of verdicts; any other is a failure.
VERDICTS = {
    "passed": typer.colors.GREEN,
    "not offered": typer.colors.BRIGHT_BLACK,
    "rounding": typer.colors.YELLOW,
    "limit": typer.colors.YELLOW,
    "known limitation": typer.colors.YELLOW,
    "unclear": typer.colors.YELLOW,
}
NARROWEST, WIDEST = 40, 160


def columns() -> int:
    """Return the characters of a line; 80 where the width is unknown."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((80, 24)).columns))


def is_unicode(signs: str = "░▒▓█⣿│└…") -> bool:
    """Return True if stdout can encode these characters."""
    try:
        signs.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def is_coloured() -> bool:
    """Return True if stdout is a terminal and colour is not turned off."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def paint(text: str, line: int) -> str:
    """Colour a line, where colour is used."""
    return typer.style(text, fg=COLOURS[line % len(COLOURS)]) if is_coloured() else text


def in_colour(text: str, verdict: str) -> str:
    """Return the text in the colour of a check's verdict."""
    return typer.style(text, fg=VERDICTS.get(verdict, typer.colors.RED))


def printable(text: str) -> str:
    """Return the text as stdout can encode it: other characters become escapes, never an error."""
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


# --- files ----------------------------------------------------------------------------------------


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
    if target.is_dir():
        raise InputError(
            "cannot be written: it is a folder", where=str(path), hint="name a file in it"
        )
    try:
        if target.exists() and not target.is_file():  # a device, a pipe
            target.write_bytes(content)
        else:
            replace_file(target, content)
    except OSError as error:
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
