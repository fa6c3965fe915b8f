"""The order of the data: which rows make up the batch of a step, as a pure function of the step.

Nothing is stored but the step: a resumed run requests the next one. An epoch is a permutation of
all rows; its last batch is short where the sizes do not divide, so that no row is left out.
"""

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Ints
from glassformer.data.rng import stream
from glassformer.spec.checks import at_least
from glassformer.spec.errors import InputError

POOL = 64  # batches; within one pool rows are sorted by length, across pools the order is random


class Sampler:
    """Rows by step. With `lengths`, the rows of a batch have similar lengths.

    Buckets: an epoch's permutation is cut into pools of 64 batches, each pool is sorted by length
    (equal ones in random order), cut into batches, and the batches are shuffled. The short batch
    may then come at any position.
    """

    def __init__(
        self, size: int, *, batch_size: int, seed: int, lengths: Ints | None = None
    ) -> None:
        at_least("size", size)
        at_least("batch_size", batch_size)
        if lengths is not None and np.shape(lengths) != (size,):
            raise InputError(
                f"lengths of shape {np.shape(lengths)} for {size} rows", hint="one length a row"
            )
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.steps_per_epoch = -(-size // batch_size)
        self._lengths = None if lengths is None else np.array(lengths, dtype=np.int64)
        self._epoch = -1
        self._batches: list[NDArray[np.int64]] = []

    def rows(self, step: int) -> NDArray[np.int64]:
        """Return the rows of the batch of this step, counted from 0."""
        at_least("step", step, 0)
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._batches = self._batches_of(epoch)
            self._epoch = epoch
        return self._batches[place].copy()

    def _batches_of(self, epoch: int) -> list[NDArray[np.int64]]:
        rng = stream(self.seed, "order", epoch)
        order = rng.permutation(self.size)
        if self._lengths is not None:
            pool = POOL * self.batch_size
            for start in range(0, self.size, pool):
                part = order[start : start + pool]
                by_length = np.argsort(self._lengths[part], kind="stable")
                order[start : start + pool] = part[by_length]
        batches = [
            order[start : start + self.batch_size] for start in range(0, self.size, self.batch_size)
        ]
        if self._lengths is not None:
            batches = [batches[place] for place in rng.permutation(len(batches))]
        return batches
