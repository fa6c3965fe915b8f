"""How many threads a piece of work is worth, and a scope in which torch takes so many.

A thread that is given too little waits for the others more than it works, and where other programs
want the same cores all of them wait for the one that does not run. So small models take one thread
on any machine; how many cores there are is only the bound.
"""

import contextlib
from collections.abc import Iterator

import torch

#: FLOPs of one batch, forward and backward, for which a thread is worth its while: 20 to 30 ms.
FLOPS = 1_000_000_000
#: Weights that a decoding step reads, for which it is: 20 MB, about 3 ms.
WEIGHTS = 5_000_000


def threads_for(amount: float, grain: int) -> int:
    """One for each grain of work, at least one, at most those that torch would take here."""
    return max(1, min(torch.get_num_threads(), round(amount / grain)))


@contextlib.contextmanager
def taking(threads: int) -> Iterator[None]:
    """Within it torch, and the C kernels on its pool, compute on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
