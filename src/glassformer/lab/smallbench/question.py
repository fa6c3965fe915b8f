"""Questions of SmallBench, and the rule that makes chance exact.

A question is a text and some texts that may follow; one of them is right. Questions come in groups
that share their choices, and in a group every choice is right equally often: who always prefers the
same answer, for its letters, its length or its place, scores exactly 1 / choices. The exams go
further, each in its own way: no single part of the text gives the answer away, only what the parts
say together.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

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
