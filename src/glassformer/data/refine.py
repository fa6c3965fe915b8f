"""Hopcroft's algorithm: the coarsest division of states that no symbol can tell apart.

A block is split by the states that enter a splitter on one symbol; of the two halves only the
smaller must become a splitter itself, which makes it O(A Q log Q).
"""

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Ints

# Q states, A symbols


def coarsest_refinement(table_QA: Ints, *, labels_Q: Ints) -> NDArray[np.int64]:
    """A block number for each state of a complete table; states of one block have one label."""
    states, symbols = table_QA.shape
    enter: list[list[list[int]]] = [[[] for _ in range(states)] for _ in range(symbols)]
    for state, row in enumerate(table_QA.tolist()):
        for symbol, target in enumerate(row):
            enter[symbol][target].append(state)
    _, block_of = np.unique(labels_Q, return_inverse=True)
    number: list[int] = block_of.tolist()
    blocks: list[set[int]] = [set() for _ in range(max(number) + 1)]
    for state, block in enumerate(number):
        blocks[block].add(state)
    waiting = {(block, symbol) for block in range(len(blocks)) for symbol in range(symbols)}
    while waiting:
        splitter, symbol = waiting.pop()
        entering: dict[int, set[int]] = {}
        for target in blocks[splitter]:
            for state in enter[symbol][target]:
                entering.setdefault(number[state], set()).add(state)
        for block, inside in entering.items():
            if len(inside) == len(blocks[block]):
                continue
            blocks[block] -= inside
            fresh = len(blocks)
            blocks.append(inside)
            for state in inside:
                number[state] = fresh
            for other in range(symbols):
                if (block, other) in waiting or len(inside) <= len(blocks[block]):
                    waiting.add((fresh, other))
                else:
                    waiting.add((block, other))
    return np.array(number, dtype=np.int64)
