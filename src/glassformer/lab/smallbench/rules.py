"""Exams whose answer follows from a rule that the model has to bring along: sums, brackets."""

import re

import numpy as np

from glassformer.lab.smallbench.question import WORDS, Exam, Group, Question, drawn, grouped

CHOICES = 4  # results to choose from
BRACKETS = ("()", "[]", "{}", "<>")


def _arithmetic(rng: np.random.Generator) -> Group:
    """One number with four others, all results of two digits.

    Results share some digits with what is asked. Only groups are taken in which the right ones
    share neither more nor fewer than the wrong ones: repeating what was read helps nobody.
    """
    while True:
        sign = "+-"[int(rng.integers(2))]
        one = int(rng.integers(10, 100))
        others = [int(other) for other in rng.permutation(90)[:CHOICES] + 1]
        results = [one + other if sign == "+" else one - other for other in others]
        if not all(10 <= result < 100 for result in results) or set(results) & set(others):
            continue
        contexts = [f"{one}{sign}{other}=" for other in others]
        shared = np.array([[_shared(text, str(result)) for result in results] for text in contexts])
        if shared.trace() * CHOICES == shared.sum():
            choices = tuple(map(str, results))
            return grouped(
                [
                    Question(context=text, choices=choices, right=i)
                    for i, text in enumerate(contexts)
                ]
            )


def _shared(context: str, result: str) -> int:
    """Digits of the result that stand in the context."""
    return sum(digit in context for digit in result)


def _solve_arithmetic(context: str, choices: tuple[str, ...]) -> str:
    found = re.fullmatch(r"(\d+)([+-])(\d+)=", context)
    assert found is not None
    one, sign, other = int(found[1]), found[2], int(found[3])
    return str(one + other if sign == "+" else one - other)


def _brackets(rng: np.random.Generator) -> Group:
    """`( ant [ bed ] cap` asks for `)`, `( ant [ bed ] [ cap` for `]`, and both kinds exchanged.

    What was opened or closed last is the same in both: only the count of what is open tells. There
    are few kinds of brackets, and what a model makes of one it makes of it everywhere: groups of
    the same two kinds count as one when the interval is drawn.
    """
    kinds = drawn(rng, BRACKETS, 2)
    words = drawn(rng, WORDS, 3)
    before = bool(rng.integers(2))  # pairs of both kinds, closed before anything counts
    choices = tuple(f" {kind[1]}" for kind in kinds)
    questions = []
    for outer, (o, c) in enumerate(kinds):
        inner = 1 - outer
        i, j = kinds[inner]
        closed = f"{o} {c} {i} {j} " if before else ""
        begun = f"{closed}{o} {words[0]} {i} {words[1]} {j} "
        texts = ((f"{begun}{words[2]}", outer), (f"{begun}{i} {words[2]}", inner))
        for text, right in texts:
            questions.append(Question(context=text, choices=choices, right=right))
    return grouped(questions, kind="".join(sorted(kinds)))


def _solve_brackets(context: str, choices: tuple[str, ...]) -> str:
    partner = dict(BRACKETS)
    waiting: list[str] = []
    for word in context.split():
        if word in partner:
            waiting.append(partner[word])
        elif word in partner.values():
            assert waiting.pop() == word, "brackets cross"
    return f" {waiting[-1]}"


ARITHMETIC = Exam(
    name="arithmetic",
    asks="the sum or difference of two numbers, of two digits",
    make=_arithmetic,
    solve=_solve_arithmetic,
    opens=True,
)
BRACKET = Exam(
    name="brackets",
    asks="which of two kinds of brackets has to be closed",
    make=_brackets,
    solve=_solve_brackets,
    opens=False,
)
