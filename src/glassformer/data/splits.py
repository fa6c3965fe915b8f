"""Splits of examples, and batches of sources and answers.

Random draws repeat examples, so it is the distinct examples that are split: eight in ten train, one
is evaluated during training (`val`), one afterwards (`test`). Targets are shifted here and nowhere
else: the decoder's input is its target, one position later.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Batch, Bools, Ints, Source
from glassformer.spec.errors import InputError, nearest

# N examples, L positions, B batch, T length

T = TypeVar("T")


def tenths(count: int) -> dict[str, NDArray[np.int64]]:
    """Return numbers 0 … count - 1 by split: of each ten, eight train, then one val and one test.

    Neighbours go to different splits, so groups of examples that stand together are all divided.
    """
    numbers = np.arange(count)
    place = numbers % 10
    return {"train": numbers[place < 8], "val": numbers[place == 8], "test": numbers[place == 9]}


def spread(total: int, capacities: Sequence[int], *, what: str) -> list[int]:
    """Return each cell's share of `total`: as even as possible, none above its capacity."""
    if total > sum(capacities):
        raise InputError(
            f"{total} different {what} asked for, there are {sum(capacities)}",
            hint=f"the nearest valid number of examples is {sum(capacities)}, or allow longer ones",
        )
    counts = [0] * len(capacities)
    left = total
    smallest_first = sorted(range(len(capacities)), key=lambda cell: capacities[cell])
    for done, cell in enumerate(smallest_first):
        counts[cell] = min(capacities[cell], left // (len(capacities) - done))
        left -= counts[cell]
    return counts


def distinct_rows(
    rng: np.random.Generator, *, count: int, base: int, length: int
) -> NDArray[np.int64]:
    """Sample `count` distinct rows of `length` numbers below `base`, all sets equally likely."""
    assert count <= base**length, "spread() keeps to what there is"
    if base**length <= 4 * count:  # so few that all can be listed
        picked = rng.permutation(base**length)[:count]
        powers = base ** np.arange(length - 1, -1, -1)
        listed: NDArray[np.int64] = picked[:, None] // powers % base
        return listed
    rows_NL = np.empty((0, length), dtype=np.int64)
    while len(rows_NL) < count:
        fresh_NL = rng.integers(0, base, size=(count - len(rows_NL), length))
        rows_NL = np.concatenate([rows_NL, fresh_NL])
        _, first = np.unique(rows_NL, axis=0, return_index=True)
        rows_NL = rows_NL[np.sort(first)]
    return rows_NL


def overlap(splits: Mapping[str, Ints]) -> int:
    """Return the number of distinct rows that occur in more than one split."""
    width = max(rows.shape[1] for rows in splits.values())
    own = [
        np.unique(np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=-1), axis=0)
        for rows in splits.values()
    ]
    together = np.concatenate(own)
    return len(together) - len(np.unique(together, axis=0))


def pick(splits: Mapping[str, T], split: str) -> T:
    """Return the split of that name."""
    if split not in splits:
        raise InputError(f"there is no split '{split}'", hint=nearest(split, splits))
    return splits[split]


def checked(rows: Ints, *, size: int, split: str) -> NDArray[np.int64]:
    """Return row numbers as int64; refuse others: a negative one would count from the end."""
    rows = np.asarray(rows)
    if rows.ndim != 1 or len(rows) == 0 or rows.dtype.kind not in "iu":
        raise InputError(
            f"rows of shape {rows.shape} and dtype {rows.dtype}", hint="a list of row numbers"
        )
    if rows.min() < 0 or rows.max() >= size:
        wrong = rows[(rows < 0) | (rows >= size)][0]
        raise InputError(f"there is no row {wrong} in '{split}'", hint=f"0 to {size - 1}")
    return rows.astype(np.int64)


def padded_to_longest(rows_NT: Ints, lengths_N: Ints) -> tuple[NDArray[np.int64], Bools]:
    """Return tokens_BT and valid_BT, cut to the longest of these rows."""
    width = int(lengths_N.max())
    return rows_NT[:, :width].astype(np.int64), np.arange(width) < lengths_N[:, None]


# N rows, B the same, cut to the longest of them, S source length, T answer length

PAD, BOS, EOS = range(3)


def answered_batch(
    source_NS: Ints, source_lengths_N: Ints, *, answer_NT: Ints, answer_lengths_N: Ints
) -> Batch:
    """Return a batch: the source; BOS and the answer; the answer and EOS as target of `next`."""
    source_BS, source_valid_BS = padded_to_longest(source_NS, source_lengths_N)
    next_BT, valid_BT = padded_to_longest(answer_NT, answer_lengths_N)
    # The decoder's input at a position is its target at the position before.
    tokens_BT = np.full_like(next_BT, BOS)
    tokens_BT[:, 1:] = next_BT[:, :-1]
    tokens_BT[~valid_BT] = PAD
    return Batch(
        tokens=tokens_BT,
        valid=valid_BT,
        targets={"next": next_BT},
        weights=valid_BT.astype(np.float32),
        source=Source(tokens=source_BS, valid=source_valid_BS),
    )
