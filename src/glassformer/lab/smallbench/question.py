"""Questions of SmallBench, the rule that makes chance exact, and the scoring of answers.

A question is a text and choices that may follow; one is right. The questions of a group share their
choices, and every choice is right equally often: a fixed preference scores exactly 1 / choices.
A choice's score is the log-probability of the full text with it, summed after the longest common
beginning of the choices, so no tokenizer has to split context from choice. Ties share the point.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
from numpy.typing import NDArray

from glassformer.lab.smallbench.examinee import Examinee, Ids, NotOffered, Place, log_probabilities

#: Short words of one length, so that no choice is longer than another.
WORDS = (
    "ant", "arm", "bag", "bat", "bed", "bee", "box", "bus", "cap", "car", "cat", "cow", "cup",
    "dog", "ear", "egg", "eye", "fan", "fig", "fox", "hat", "hen", "ice", "ink", "jam", "jar",
    "key", "lid", "map", "net", "nut", "oak", "oar", "owl", "pan", "pen", "pie", "pig", "pin",
    "pot", "rat", "rod", "rug", "sky", "sun", "tea", "tie", "toe", "toy", "van", "wax", "wig",
)  # fmt: skip
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A context, its choices, and which one is right. No choice is the beginning of another."""

    context: str
    choices: tuple[str, ...]
    right: int

    def __post_init__(self) -> None:
        assert 0 <= self.right < len(self.choices)
        ordered = sorted(self.choices)
        for one, other in pairwise(ordered):
            assert not other.startswith(one), f"{one!r} begins {other!r}"

    @property
    def answer(self) -> str:
        """The right choice."""
        return self.choices[self.right]


@dataclass(frozen=True, slots=True)
class Group:
    """Questions that balance each other. Groups of one `kind` are not independent of each other."""

    questions: tuple[Question, ...]
    kind: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Exam:
    """An exam: `make(rng)` samples a group; `solve(context, choices)` is the oracle.

    `opens` means that the answer is the only sensible next text, so that a greedy continuation can
    be compared with it.
    """

    name: str
    asks: str
    make: Callable[[np.random.Generator], Group]
    solve: Callable[[str, tuple[str, ...]], str]
    opens: bool


def grouped(questions: list[Question], *, kind: str = "") -> Group:
    """Return a group after checking that it is fair; the default `kind` is its own."""
    choices = {question.choices for question in questions}
    assert len(choices) == 1, "the questions of a group share their choices"
    counts = Counter(question.right for question in questions)
    assert len(counts) == len(questions[0].choices), "every choice is right somewhere"
    assert len(set(counts.values())) == 1, "every choice is right equally often"
    return Group(tuple(questions), kind or questions[0].context)


def drawn(rng: np.random.Generator, pool: tuple[str, ...], count: int) -> list[str]:
    """Sample `count` different items, in random order."""
    return [pool[i] for i in rng.permutation(len(pool))[:count]]


@dataclass(frozen=True, slots=True)
class Marks:
    """Points by kind of group, out of how many, and the number of answers that are, from the first
    token to the last, the model's greedy continuation.
    """

    points: NDArray[np.float64]
    questions: NDArray[np.int64]
    exact: int


def mark(examinee: Examinee, groups: Sequence[Group]) -> Marks:
    """Score the model on every question of these groups."""
    marks, exact = _asked(examinee, [one for group in groups for one in group.questions])
    kinds = [group.kind for group in groups for _ in group.questions]
    _, which = np.unique(kinds, return_inverse=True)
    points = cast(NDArray[np.float64], np.bincount(which, weights=marks))  # stubs say integers
    return Marks(points, np.bincount(which), int(exact.sum()))


def _asked(
    examinee: Examinee, questions: Sequence[Question]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return each question's mark, and whether its answer is the greedy continuation."""
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
    """Return the ids of the text with each choice, and the first token that counts; last, the
    answer again, from where it leaves the context.
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
    """Return the length of the longest common beginning."""
    for place, tokens in enumerate(zip(*texts, strict=False)):
        if len(set(tokens)) > 1:
            return place
    return min(map(len, texts))
