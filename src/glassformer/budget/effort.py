"""The limit of a search: a number of evaluations, and optionally a caller's own stop signal.

One evaluation is the work of cutting one region of designs, about ten microseconds. Evaluations are
counted rather than timed, so the same budget gives the same answer on every machine. A caller with
a deadline passes `stop`; this package reads no clock.
"""

import math
from collections.abc import Callable

from glassformer.spec.errors import MachineError

Stop = Callable[[], bool]


class SearchStopped(MachineError):
    """The caller's `stop` ended a search before it had a result."""


class Effort:
    """The evaluations left to one search or several; unlimited by default.

    A share has a limit of its own, and what it spends is also charged to the effort it came from.
    """

    __slots__ = ("_parent", "_stop", "left", "spent")

    def __init__(
        self,
        limit: float = math.inf,
        *,
        parent: "Effort | None" = None,
        stop: Stop | None = None,
    ) -> None:
        self.left: float = limit if parent is None else min(limit, parent.left)
        self.spent = 0
        self._parent = parent
        self._stop: Stop | None = stop if parent is None else parent._stop

    def share(self, parts: int) -> "Effort":
        """Return one of `parts` equal shares of what is left."""
        return Effort(self.left if self.left == math.inf else self.left // parts, parent=self)

    def spend(self, evaluations: int) -> None:
        """Charge this effort and its parents; raise `SearchStopped` if the caller says stop."""
        effort: Effort | None = self
        while effort is not None:
            effort.spent += evaluations
            effort.left -= evaluations
            effort = effort._parent
        if self._stop is not None and self._stop():
            raise SearchStopped("the search was stopped before it had a result")

    @property
    def is_spent(self) -> bool:
        """True once no evaluation is left."""
        return self.left <= 0
