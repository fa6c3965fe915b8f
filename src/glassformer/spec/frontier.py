"""The closed boxes of a search, in the order of the best that each may hold.

Now and then one is followed down to its end, always into its most promising part: a design that is
found early spares the boxes that cannot hold a better one, and is there if the search must end.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator

from glassformer.spec.boxes import Box
from glassformer.spec.preference import Key

#: After so many boxes one is followed down.
DIVE = 64

Entry = tuple[Key, int, Box]


class Frontier:
    """Boxes that a search has not opened; `bound` is the least key in a box."""

    def __init__(self, bound: Callable[[Box], Key]) -> None:
        self._bound = bound
        self._heap: list[Entry] = []
        self._order = itertools.count(0, -1)  # of two alike the later, which is smaller
        self._turn = itertools.count(1)
        self._dives = False
        self._ahead: Entry | None = None

    def push(self, parts: Iterable[Box], *, best: Key) -> None:
        """Those parts of the last box that may hold something as good as the best."""
        bounds = ((self._bound(box), next(self._order), box) for box in parts)
        entries = [entry for entry in bounds if entry[0] <= best]
        if self._dives and entries:
            self._ahead = min(entries)
            entries.remove(self._ahead)
        for entry in entries:
            heapq.heappush(self._heap, entry)

    def is_done(self, best: Key) -> bool:
        """Whether no closed box may hold something as good as the best."""
        return self._ahead is None and not (self._heap and self._heap[0][0] <= best)

    def pop(self) -> Box:
        """The next box to open."""
        entry, self._ahead = self._ahead, None
        if entry is None:
            self._dives = next(self._turn) % DIVE == 0
            entry = heapq.heappop(self._heap)
        return entry[2]

    def bounds(self, best: Key) -> Iterator[Key]:
        """Of the boxes that may hold something as good as the best."""
        entries = self._heap if self._ahead is None else [self._ahead, *self._heap]
        return (bound for bound, _, _ in entries if bound <= best)
