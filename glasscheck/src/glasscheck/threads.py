"""How many threads a verification takes: a small model is slower on several than on one."""

import contextlib
from collections.abc import Iterator

import torch

#: Parameters of a verified model that justify a thread: a minute or two of checks.
PARAMETERS = 100_000_000


@contextlib.contextmanager
def threads_for(parameters: int | None) -> Iterator[None]:
    """Let torch compute on as many threads as checks of this many parameters are worth."""
    before = torch.get_num_threads()
    if parameters is not None:
        torch.set_num_threads(max(1, min(before, round(parameters / PARAMETERS))))
    try:
        yield
    finally:
        torch.set_num_threads(before)
