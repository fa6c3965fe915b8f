"""What the terminal can show: its width, its signs, its colours. Decided here, once for all verbs.

The environment is read here: NO_COLOR turns colour off, as everywhere.
"""

import os
import shutil
import sys

import typer

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
