"""Progress of work whose parts have names: a bar on a terminal, a line now and then in a log."""

import time
from typing import Any, Self

from glassformer.lab.bar import Bar

#: Seconds between two lines of progress where there is no terminal to draw a bar on.
LINE_SECONDS = 10.0


class Progress:
    """A bar with the part that runs; in a log, a line now and then of work that takes long."""

    def __init__(self, title: str) -> None:
        self.bar, self.told = Bar(title, total=1), time.monotonic()

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.bar.__exit__(*raised)

    def show(self, part: str, done: int, total: int) -> None:
        """Show how many parts are done, and which begins."""
        if self.bar.total != total:
            self.bar.resize(total)
        self.bar.show(done, part)
        if not self.bar.live and time.monotonic() - self.told > LINE_SECONDS:
            self.told = time.monotonic()
            self.bar.tell(f"{self.bar.title}: {done} of {total} done; now: {part}")
