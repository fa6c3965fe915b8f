"""What a beam search keeps: the best candidates of each step, and the tree that they grow.

Candidates of one step have one length, so their log-probabilities rank them; scores compare
hypotheses of different lengths.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# I items (prompts), W beams, V vocab, C = W * V candidates, R rows of the batch


@dataclass(frozen=True, slots=True)
class Node:
    """One kept token: the node before it (-1: the prompt), and the sum of log-probabilities.

    `place` counts new tokens from 1. `finish` says why a hypothesis is complete here, if it is.
    """

    parent: int
    token: int
    place: int
    logprob: float
    total: float
    group: int = 0
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete sequence of new tokens, the end among them; `node` is its leaf in the tree."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    logprob: float
    score: float
    finish: str
    node: int = -1


def path_to(nodes: list[Node], leaf: int) -> list[Node]:
    """The nodes from the first token to this one."""
    path = []
    while leaf >= 0:
        path.append(nodes[leaf])
        leaf = nodes[leaf].parent
    return path[::-1]


def best_candidates(
    ranked_IC: Tensor, totals_IC: Tensor, *, places: NDArray[np.int64]
) -> list[list[tuple[int, float]]]:
    """For each item the places[i] candidates that rank best, as (number, total), best first.

    Of equal ones the first wins, as `argmax` has it; `topk` alone would not say which.
    """
    most = min(int(places.max()), ranked_IC.shape[1])
    if most == 0:
        return [[] for _ in places]
    sorted_IW = ranked_IC.topk(most).values
    last_I1 = torch.from_numpy(np.clip(places, 1, most) - 1)[:, None].to(ranked_IC.device)
    enough_IC = ranked_IC >= sorted_IW.gather(1, last_I1)
    found = enough_IC.logical_and_(ranked_IC > -math.inf).nonzero()
    items, numbers = found.cpu().numpy().T
    ranks = ranked_IC[found[:, 0], found[:, 1]].cpu().numpy()
    totals = totals_IC[found[:, 0], found[:, 1]].tolist()
    made: list[list[tuple[int, float]]] = [[] for _ in places]
    for at in np.lexsort((numbers, -ranks, items)).tolist():
        item = int(items[at])
        if len(made[item]) < places[item]:
            made[item].append((int(numbers[at]), totals[at]))
    return made
