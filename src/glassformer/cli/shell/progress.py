"""Progress of work whose parts have names: a bar on a terminal, a line now and then in a log."""

from typing import Self

from glassformer.lab.bar import Bar


class Progress:
    """A bar with the part that runs; in a log, a line now and then of work that takes long."""

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
