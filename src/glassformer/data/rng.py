"""Random numbers: named streams and hashes that are the same on every machine.

A stream is PCG64 seeded with the SHA-256 of a seed and some words, so that two purposes never share
numbers and a new one never moves an old one. Python's own `hash` differs between processes.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Ints

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
