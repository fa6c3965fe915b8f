"""Exams whose answer stands in the text: copy, recall, induction, and a machine to be followed.

All are squares. The questions of a group pair every query with every arrangement of the answers:
who reads the query alone meets each answer equally often, who reads the rest alone is asked every
query. Every choice occurs equally often before the query.
"""

import re

import numpy as np

from glassformer.lab.smallbench.question import (
    LETTERS,
    WORDS,
    Exam,
    Group,
    Question,
    drawn,
    grouped,
)

K = 4  # spans, pairs: the number of choices
SPAN = 4  # words of a span to copy
STATES = 3


def _copy(rng: np.random.Generator) -> Group:
    words = drawn(rng, WORDS, K * SPAN)
    starts = [words[i * SPAN : (i + 1) * SPAN - 1] for i in range(K)]
    ends = words[SPAN - 1 :: SPAN]
    questions = []
    for shift in range(K):
        lines = [" ".join([*start, ends[(i + shift) % K]]) for i, start in enumerate(starts)]
        for query, start in enumerate(starts):
            questions.append(_question([*lines, " ".join(start)], "\n", ends, (query + shift) % K))
    return grouped(questions)


def _question(parts: list[str], between: str, ends: list[str], right: int) -> Question:
    return Question(
        context=between.join(parts), choices=tuple(f" {end}" for end in ends), right=right
    )


def _solve_copy(context: str, choices: tuple[str, ...]) -> str:
    *lines, begun = context.split("\n")
    (line,) = (line for line in lines if line.startswith(begun))
    return line.removeprefix(begun)


def _recall(rng: np.random.Generator) -> Group:
    words = drawn(rng, WORDS, 2 * K)
    keys, values = words[:K], words[K:]
    questions = []
    for shift in range(K):
        pairs = [f"{key}: {values[(i + shift) % K]}" for i, key in enumerate(keys)]
        for query, key in enumerate(keys):
            parts = [", ".join(pairs), f"{key}:"]
            questions.append(_question(parts, ". ", values, (query + shift) % K))
    return grouped(questions)


def _solve_recall(context: str, choices: tuple[str, ...]) -> str:
    pairs, query = context.split(". ")
    known = dict(pair.split(": ") for pair in pairs.split(", "))
    return f" {known[query.removesuffix(':')]}"


def _induction(rng: np.random.Generator) -> Group:
    letters = drawn(rng, LETTERS, 2 * K)
    keys, values = letters[:K], letters[K:]
    questions = []
    for shift in range(K):
        pairs = [f"{key} {values[(i + shift) % K]}" for i, key in enumerate(keys)]
        for query, key in enumerate(keys):
            questions.append(_question([*pairs, key], " ", values, (query + shift) % K))
    return grouped(questions)


def _solve_induction(context: str, choices: tuple[str, ...]) -> str:
    letters = context.split()
    return f" {letters[letters.index(letters[-1]) + 1]}"


def _machine(rng: np.random.Generator) -> Group:
    """Two symbols, each a permutation of the states; the second one's targets are turned around."""
    letters = drawn(rng, LETTERS, STATES + 2)
    states, (first, second) = letters[:STATES], letters[STATES:]
    one, two = rng.permutation(STATES), rng.permutation(STATES)
    questions = []
    for turn in range(STATES):
        turned = (two + turn) % STATES
        for start, state in enumerate(states):
            parts = [
                f"{first} takes {_edges(states, one)}",
                f"{second} takes {_edges(states, turned)}",
                f"from {state}, {first} then {second} leads to",
            ]
            questions.append(_question(parts, "; ", states, int(turned[one[start]])))
    return grouped(questions)


def _edges(states: list[str], targets: np.ndarray) -> str:
    return ", ".join(f"{states[i]} to {states[target]}" for i, target in enumerate(targets))


def _solve_machine(context: str, choices: tuple[str, ...]) -> str:
    *tables, query = context.split("; ")
    leads = {}
    for table in tables:
        symbol, _, edges = table.partition(" takes ")
        leads[symbol] = dict(edge.split(" to ") for edge in edges.split(", "))
    found = re.fullmatch(r"from (\w), (\w) then (\w) leads to", query)
    assert found is not None
    state, *symbols = found.groups()
    for symbol in symbols:
        state = leads[symbol][state]
    return f" {state}"


COPY = Exam(
    name="copy",
    asks=f"which word ends a line of {SPAN} that was begun again",
    make=_copy,
    solve=_solve_copy,
    opens=True,
)
RECALL = Exam(
    name="recall",
    asks=f"which of {K} values belongs to a key",
    make=_recall,
    solve=_solve_recall,
    opens=True,
)
INDUCTION = Exam(
    name="induction",
    asks="which letter followed this one before",
    make=_induction,
    solve=_solve_induction,
    opens=True,
)
MACHINE = Exam(
    name="fsm",
    asks=f"where a machine of {STATES} states is after two symbols, its table being given",
    make=_machine,
    solve=_solve_machine,
    opens=True,
)
