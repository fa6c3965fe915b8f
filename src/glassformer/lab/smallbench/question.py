"""Questions of SmallBench, and the rule that makes chance exact.

A question is a text and some texts that may follow; one of them is right. Questions come in groups
that share their choices, and in a group every choice is right equally often: who always prefers the
same answer, for its letters, its length or its place, scores exactly 1 / choices. The exams go
further, each in its own way: no single part of the text gives the answer away, only what the parts
say together.

From log-probabilities to right and wrong.

A choice's score is the log-probability of the whole text with it. What all choices of a question
share cancels, so only the tokens after their longest common beginning are summed: no tokenizer has
to put a boundary between the context and the choice. Choices of equal score share the point.
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
    """What is read, what may follow, and which of it is right. No choice begins another."""

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
    """`make(rng)` draws a group; `solve(context, choices)` answers from the text alone: the oracle.

    `opens` says that the answer is the only sensible next text, so that a greedy continuation can
    be held against it.
    """

    name: str
    asks: str
    make: Callable[[np.random.Generator], Group]
    solve: Callable[[str, tuple[str, ...]], str]
    opens: bool


def grouped(questions: list[Question], *, kind: str = "") -> Group:
    """A group, once it is seen to be fair; without a `kind`, it is one of its own."""
    choices = {question.choices for question in questions}
    assert len(choices) == 1, "the questions of a group share their choices"
    counts = Counter(question.right for question in questions)
    assert len(counts) == len(questions[0].choices), "every choice is right somewhere"
    assert len(set(counts.values())) == 1, "every choice is right equally often"
    return Group(tuple(questions), kind or questions[0].context)


def drawn(rng: np.random.Generator, pool: tuple[str, ...], count: int) -> list[str]:
    """So many different ones, in an order by chance."""
    return [pool[i] for i in rng.permutation(len(pool))[:count]]


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
    points = cast(NDArray[np.float64], np.bincount(which, weights=marks))  # stubs say integers
    return Marks(points, np.bincount(which), int(exact.sum()))


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
