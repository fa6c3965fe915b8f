"""From log-probabilities to right and wrong.

A choice's score is the log-probability of the whole text with it. What all choices of a question
share cancels, so only the tokens after their longest common beginning are summed: no tokenizer has
to put a boundary between the context and the choice. Choices of equal score share the point.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glassformer.lab.smallbench.examinee import (
    Examinee,
    Ids,
    NotOffered,
    Place,
    log_probabilities,
)
from glassformer.lab.smallbench.question import Group, Question


@dataclass(frozen=True, slots=True)
class Marks:
    """Of some groups: the points of each kind of group, out of how many, and how many answers are,
    from the first token to the last, what the model would say greedily.
    """

    points: NDArray[np.float64]
    questions: NDArray[np.int64]
    exact: int


def mark(examinee: Examinee, groups: Sequence[Group]) -> Marks:
    """Ask every question of these groups."""
    marks, exact = _asked(examinee, [one for group in groups for one in group.questions])
    kinds = [group.kind for group in groups for _ in group.questions]
    _, which = np.unique(kinds, return_inverse=True)
    return Marks(np.bincount(which, weights=marks), np.bincount(which), int(exact.sum()))


def _asked(
    examinee: Examinee, questions: Sequence[Question]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Each question's mark, and whether its answer would have been said."""
    rows: dict[Ids, int] = {}  # choices of one token each are read from one row
    places: list[list[Place]] = []
    plans = []
    for question in questions:
        plan = []
        for ids, start in _tokens(examinee, question):
            row = rows.setdefault(ids[:-1], len(rows))
            if row == len(places):
                places.append([])
            first = len(places[row])
            places[row] += [(place - 1, ids[place]) for place in range(start, len(ids))]
            plan.append((row, slice(first, len(places[row]))))
        plans.append(plan)
    found = log_probabilities(examinee, list(rows), places)
    marks, exact = np.zeros(len(questions)), np.zeros(len(questions), dtype=np.bool_)
    for number, (question, (*choices, whole)) in enumerate(zip(questions, plans, strict=True)):
        scores = np.array([found[row][0][part].sum() for row, part in choices])
        best = scores == scores.max()
        marks[number] = best[question.right] / best.sum()
        exact[number] = found[whole[0]][1][whole[1]].all()
    return marks, exact


def _tokens(examinee: Examinee, question: Question) -> list[tuple[Ids, int]]:
    """Ids of the text with each choice, and from which token on it counts; last, the answer again,
    from where it leaves the context.
    """
    texts = [examinee.ids(question.context + choice) for choice in question.choices]
    longest = max(map(len, texts))
    if longest - 1 > examinee.max_length:
        raise NotOffered(f"it reads {examinee.max_length} tokens, a question has {longest - 1}")
    start = _shared(texts)
    right = texts[question.right]
    answer = min(start, _shared([right, examinee.ids(question.context)]))
    if answer == 0:
        raise NotOffered("its first token depends on the answer, and nothing stands before it")
    return [*((ids, start) for ids in texts), (right, answer)]


def _shared(texts: Sequence[Ids]) -> int:
    """Length of the longest common beginning."""
    for place, tokens in enumerate(zip(*texts, strict=False)):
        if len(set(tokens)) > 1:
            return place
    return min(map(len, texts))
