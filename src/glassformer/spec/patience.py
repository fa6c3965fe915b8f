"""How long a search may take, for a caller that waits; without `patience` nothing is limited.

A search has no measure of its work before it is done: any rank and a tolerance of a few parameters
can leave so much open that half a minute passes. A page has no minutes.
"""

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


class Clock:
    """The time that a search has left, as it was when the search began."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = _UNTIL.get()

    def check(self) -> None:
        """Raise when the time is over."""
        if self._until < float("inf") and time.monotonic() > self._until:
            raise OutOfPatience("the search takes longer than anybody here would wait")
