"""How long a search may take: so many looks, or, for a caller that waits, so many seconds.

Looks are counted, so that the same question always ends at the same place: what takes as long as
cutting one box of designs is a look, about ten microseconds. `patience` is for a page, which has no
minutes.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from glassformer.spec.errors import MachineError

_UNTIL: ContextVar[float] = ContextVar("until", default=float("inf"))


class OutOfPatience(MachineError):
    """The search took longer than its caller would wait."""


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Searches begun inside give up after so many seconds, from now on, all of them together."""
    token = _UNTIL.set(min(_UNTIL.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _UNTIL.reset(token)


class Effort:
    """The looks that are left to a search, or to several of them; without a number, no limit.

    A part of an effort has looks of its own, which the whole has less of afterwards.
    """

    __slots__ = ("_until", "_whole", "left", "spent")

    def __init__(self, looks: float = math.inf, *, whole: "Effort | None" = None) -> None:
        self.left: float = looks if whole is None else min(looks, whole.left)
        self.spent = 0
        self._whole = whole
        self._until = _UNTIL.get()

    def share(self, of: int) -> "Effort":
        """One of so many equal parts of what is left."""
        return Effort(self.left if self.left == math.inf else self.left // of, whole=self)

    def spend(self, looks: int) -> None:
        """So many looks less; raise when the time is over."""
        effort: Effort | None = self
        while effort is not None:
            effort.spent += looks
            effort.left -= looks
            effort = effort._whole
        if self._until < math.inf and time.monotonic() > self._until:
            raise OutOfPatience("the search takes longer than anybody here would wait")

    @property
    def is_over(self) -> bool:
        """Whether every look is spent."""
        return self.left <= 0
