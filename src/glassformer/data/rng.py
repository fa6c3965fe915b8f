"""Random numbers that are the same on every machine: named streams, hashes, the order of the data.

A stream is PCG64 seeded with the SHA-256 of a seed and some words, so that two purposes never share
numbers and a new one never moves an old one. Python's own `hash` differs between processes.

The rows of a step's batch are a pure function of the step. Nothing is stored but the step: a
resumed run requests the next one. An epoch is a permutation of all rows; its last batch is short
where the sizes do not divide, so that no row is left out.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Ints
from glassformer.spec.checks import at_least
from glassformer.spec.errors import InputError

# N rows, L positions


def stream(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return the generator of this seed for this purpose."""
    words = "/".join(str(word) for word in (seed, *purpose))
    key = hashlib.sha256(words.encode()).digest()[:16]
    return np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))


def hash_rows(rows_NL: Ints, *, lengths_N: Ints, seed: int) -> NDArray[np.uint64]:
    """Return 64 bits for each row's first `length` numbers; what follows is not read."""
    key = hashlib.sha256(f"{seed}/rows".encode()).digest()[:8]
    hash_N = np.full(len(rows_NL), int.from_bytes(key, "little"), dtype=np.uint64)
    for place in range(rows_NL.shape[1]):
        mixed_N = _mix(hash_N ^ (rows_NL[:, place].astype(np.int64) + 1).astype(np.uint64))
        hash_N = np.where(place < lengths_N, mixed_N, hash_N)
    return _mix(hash_N ^ lengths_N.astype(np.uint64))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply one step of splitmix64: a bijection of 64 bits; every bit depends on every other."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def digest(arrays: Iterable[NDArray[Any]]) -> str:
    """Return the SHA-256 of arrays: shapes, types and values, little-endian on any machine."""
    total = hashlib.sha256()
    for array in arrays:
        plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        total.update(f"{plain.dtype.str}{plain.shape}".encode())
        total.update(plain.data)
    return total.hexdigest()


def permuted(
    places: Ints, size: int, *, seed: int, purpose: tuple[str | int, ...]
) -> NDArray[np.int64]:
    """Return where a permutation of 0 … size - 1 puts these numbers; nothing else is computed.

    A Feistel network is a permutation of all numbers of an even number of bits, whatever its round
    function is; a result beyond `size` is put in again until it is below. So an order of any number
    of rows takes no memory, and its middle is found without its beginning.
    """
    at_least("size", size)
    half = ((size - 1).bit_length() + 1) // 2 or 1
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = stream(seed, *purpose).integers(0, 1 << 64, ROUNDS, dtype=np.uint64)
    found = np.array(places, dtype=np.uint64)
    outside = np.ones(found.shape, dtype=np.bool_)
    while outside.any():
        left, right = found[outside] >> shift, found[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        found[outside] = left << shift | right
        outside = found >= np.uint64(size)
    return found.astype(np.int64)


ROUNDS = 6  # four make a random permutation of a random round function; two to spare
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
