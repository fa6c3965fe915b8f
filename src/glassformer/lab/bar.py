"""A progress bar on a terminal or in a notebook, and the clock beside it; no torch is needed."""

import contextlib
import importlib
import sys
import time
from html import escape
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

#: Seconds between two redraws of a bar, and in a notebook.
LIVE_SECONDS, CELL_SECONDS = 0.1, 0.5
#: Seconds between two lines of text where there is no bar.
QUIET_SECONDS = 10.0


def in_notebook() -> bool:
    """Return True in a notebook's kernel; IPython at a terminal is a terminal."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def is_watched() -> bool:
    """Return True if somebody may be looking: at a terminal, or at a notebook."""
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


class Bar:
    """A bar `title ━━━━━━ 58%  facts`, on a terminal or in a notebook only.

    A terminal's is removed when it is done, a notebook's stays as a line of text. It is redrawn
    when progress is reported, never by a thread of its own.
    """

    def __init__(self, title: str, *, total: int, done: int = 0) -> None:
        self.title, self.total, self.done, self.facts = title, total, done, ""
        self.in_cell = in_notebook()
        terminal = not self.in_cell and sys.stderr.isatty()
        self.live = terminal or self.in_cell
        self.drawn, self.told = 0.0, time.perf_counter()
        self._cell: Any = None  # the display that a notebook lets us redraw
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TaskProgressColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            console=Console(stderr=True, highlight=False, force_jupyter=False),
            auto_refresh=False,
            transient=True,
            disable=not terminal,
        )
        self._task = self._progress.add_task(title, total=total, completed=done, facts="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        with contextlib.suppress(OSError):
            self._progress.stop()
        if self._cell is not None:
            self._draw_cell()

    def resize(self, total: int) -> None:
        """Set how much there is to do, where that was not known before."""
        self.total = total
        self._progress.update(self._task, total=total)

    def show(self, done: int, facts: str = "") -> None:
        """Set how much is done, and redraw if it is time."""
        moment = time.perf_counter()
        self.done, self.facts = done, facts
        if not self.live or moment - self.drawn < (CELL_SECONDS if self.in_cell else LIVE_SECONDS):
            return
        self.drawn = moment
        if self.in_cell:
            self._draw_cell()
        else:
            with contextlib.suppress(OSError):  # the terminal was closed: the work goes on
                self._progress.update(self._task, completed=done, facts=facts, refresh=True)

    def is_due(self, *, now: bool = False) -> bool:
        """Return True if a line of text is due: there is no bar, and none for some seconds."""
        moment = time.perf_counter()
        if self.live or not (now or moment - self.told >= QUIET_SECONDS):
            return False
        self.told = moment
        return True

    def _draw_cell(self) -> None:
        """Draw the bar as one line of HTML, where the last one was."""
        notebook: Any = importlib.import_module("IPython.display")
        picture = notebook.HTML(
            f"<div style='font-family:monospace;white-space:pre'>{escape(self.title)} "
            f"<progress max='{self.total}' value='{self.done}'></progress> "
            f"{escape(self.facts)}</div>"
        )
        if self._cell is None:
            self._cell = notebook.display(picture, display_id=True)
        else:
            self._cell.update(picture)

    def tell(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        if self.in_cell:
            print(text)
        elif self.live:
            with contextlib.suppress(OSError):
                self._progress.console.print(text, markup=False, soft_wrap=True)
        else:
            with contextlib.suppress(OSError):  # nobody can read it: the work goes on
                print(text, file=sys.stderr, flush=True)


class PartsBar:
    """A bar with the part of the work that runs; in a log, a line now and then."""

    def __init__(self, title: str) -> None:
        self.bar = Bar(title, total=1)

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.bar.__exit__(*raised)

    def show(self, part: str, done: int, total: int) -> None:
        """Show how many parts are done, and which begins."""
        if self.bar.total != total:
            self.bar.resize(total)
        self.bar.show(done, part)
        if self.bar.is_due():
            self.bar.tell(f"{self.bar.title}: {done} of {total} done; now: {part}")


def clock(seconds: float) -> str:
    """Format seconds: 0:07, 12:30, 3:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
