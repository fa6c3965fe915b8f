"""Subject-verb agreement: minimal pairs from a small grammar of English.

    sentence -> subject preposition other verb
    subject, other -> singular or plural, from the lexicon
    verb -> agrees with the subject

A group has all four numbers of subject and other: who agrees with the nearest noun is right in two
of four, like one who always takes the same verb. Number shows in many ways (s, a vowel, another
determiner), so that no single letter stands for it.
"""

import numpy as np

from glassformer.lab.smallbench.question import Exam, Group, Question, grouped

#: Singular and plural.
NOUNS = (
    ("the value", "the values"),
    ("the object", "the objects"),
    ("the file", "the files"),
    ("the name", "the names"),
    ("the line", "the lines"),
    ("the man", "the men"),
    ("the woman", "the women"),
    ("the child", "the children"),
    ("the foot", "the feet"),
    ("the tooth", "the teeth"),
    ("the mouse", "the mice"),
    ("the goose", "the geese"),
    ("this sheep", "these sheep"),
    ("that fish", "those fish"),
    ("one series", "two series"),
    ("one deer", "many deer"),
    ("each aircraft", "all aircraft"),
    ("this species", "some species"),
)
VERBS = (
    (" is", " are"),
    (" was", " were"),
    (" has", " have"),
    (" does not", " do not"),
)
PREPOSITIONS = ("near", "of", "with", "behind", "in", "for", "from", "by")


def _agreement(rng: np.random.Generator) -> Group:
    subject, other = (NOUNS[i] for i in rng.permutation(len(NOUNS))[:2])
    verbs = VERBS[int(rng.integers(len(VERBS)))]
    preposition = PREPOSITIONS[int(rng.integers(len(PREPOSITIONS)))]
    return grouped(
        [
            Question(context=f"{subject[n]} {preposition} {other[m]}", choices=verbs, right=n)
            for n in (0, 1)
            for m in (0, 1)
        ]
    )


def _solve_agreement(context: str, choices: tuple[str, ...]) -> str:
    subject = " ".join(context.split()[:2])
    (number,) = {pair.index(subject) for pair in NOUNS if subject in pair}
    (verbs,) = (pair for pair in VERBS if pair == choices)
    return verbs[number]


AGREEMENT = Exam(
    name="agreement",
    asks="which verb agrees with the subject, another noun standing between",
    make=_agreement,
    solve=_solve_agreement,
    opens=False,
)
