"""The SmallBench suite: its exams, each with a solver, and a row for each with its interval.

Copy, recall, induction and a machine pair every query with every arrangement of the answers, so
that neither the query nor the rest decides alone. Agreement varies the number of subject and other
noun: agreeing with the nearest noun is right in two of four. Arithmetic and brackets need a rule
that the model brings along. Bits per byte: every token costs -log2 of its probability, a first
token without context log2 of the vocabulary, on the text that the recipes hold out.

Intervals are bootstrapped over groups, not over questions: the questions of a group share their
words, and their marks are not independent.
"""

import bz2
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.data.rng import stream
from glassformer.data.tasks.text import held_out_text
from glassformer.lab.smallbench.question import (
    LETTERS,
    WORDS,
    Exam,
    Examinee,
    Group,
    NotOffered,
    Place,
    Question,
    drawn,
    grouped,
    log_probabilities,
    mark,
)
from glassformer.spec.checks import at_least
from glassformer.spec.errors import InputError
from glassformer.spec.tasks import TextTask

K = 4  # spans, pairs: the number of choices
SPAN = 4  # words of a span to copy
STATES = 3


def _copy(rng: np.random.Generator) -> Group:
    """Ask which word ends a line of `SPAN` words that was begun again."""
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


def _lookup(
    rng: np.random.Generator,
    pool: tuple[str, ...],
    spell: Callable[[list[tuple[str, str]], str], str],
) -> Group:
    """Ask for the value of each of `K` keys, with every arrangement of the values."""
    items = drawn(rng, pool, 2 * K)
    keys, values = items[:K], items[K:]
    questions = []
    for shift in range(K):
        pairs = [(key, values[(i + shift) % K]) for i, key in enumerate(keys)]
        for query, key in enumerate(keys):
            questions.append(_question([spell(pairs, key)], "", values, (query + shift) % K))
    return grouped(questions)


def _recall(rng: np.random.Generator) -> Group:
    """Ask which of `K` values belongs to a key."""
    return _lookup(
        rng,
        WORDS,
        lambda pairs, key: f"{', '.join(f'{k}: {value}' for k, value in pairs)}. {key}:",
    )


def _solve_recall(context: str, choices: tuple[str, ...]) -> str:
    pairs, query = context.split(". ")
    known = dict(pair.split(": ") for pair in pairs.split(", "))
    return f" {known[query.removesuffix(':')]}"


def _induction(rng: np.random.Generator) -> Group:
    """Ask which letter followed this one before."""
    return _lookup(rng, LETTERS, lambda pairs, key: " ".join([*map(" ".join, pairs), key]))


def _solve_induction(context: str, choices: tuple[str, ...]) -> str:
    letters = context.split()
    return f" {letters[letters.index(letters[-1]) + 1]}"


def _machine(rng: np.random.Generator) -> Group:
    """Ask for the state after two symbols, each a permutation; the second one's is rotated."""
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
    """Ask which verb agrees with the subject, another noun standing between."""
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


CHOICES = 4  # results to choose from
BRACKETS = ("()", "[]", "{}", "<>")


def _arithmetic(rng: np.random.Generator) -> Group:
    """Make questions of one number with four others, all results of two digits.

    Results share some digits with the question. Only groups are taken in which the right ones share
    neither more nor fewer than the wrong ones: repeating what was read does not help.
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
    """Count the digits of the result that occur in the context."""
    return sum(digit in context for digit in result)


def _solve_arithmetic(context: str, choices: tuple[str, ...]) -> str:
    found = re.fullmatch(r"(\d+)([+-])(\d+)=", context)
    assert found is not None
    one, sign, other = int(found[1]), found[2], int(found[3])
    return str(one + other if sign == "+" else one - other)


def _brackets(rng: np.random.Generator) -> Group:
    """Make questions: `( ant [ bed ] cap` needs `)`, `( ant [ bed ] [ cap` needs `]`, and swapped.

    What was opened or closed last is the same in both: only the number of open brackets decides.
    There are few kinds of brackets, and a model treats one alike everywhere: groups of the same two
    kinds count as one in the interval.
    """
    kinds = drawn(rng, BRACKETS, 2)
    words = drawn(rng, WORDS, 3)
    before = bool(rng.integers(2))  # pairs of both kinds, closed before anything counts
    choices = tuple(f" {kind[1]}" for kind in kinds)
    questions = []
    for outer, (o, c) in enumerate((kind[0], kind[1]) for kind in kinds):
        inner = 1 - outer
        i, j = kinds[inner][0], kinds[inner][1]
        closed = f"{o} {c} {i} {j} " if before else ""
        begun = f"{closed}{o} {words[0]} {i} {words[1]} {j} "
        texts = ((f"{begun}{words[2]}", outer), (f"{begun}{i} {words[2]}", inner))
        for text, right in texts:
            questions.append(Question(context=text, choices=choices, right=right))
    return grouped(questions, kind="".join(sorted(kinds)))


def _solve_brackets(context: str, choices: tuple[str, ...]) -> str:
    partner = {pair[0]: pair[1] for pair in BRACKETS}
    waiting: list[str] = []
    for word in context.split():
        if word in partner:
            waiting.append(partner[word])
        elif word in partner.values():
            assert waiting.pop() == word, "brackets cross"
    return f" {waiting[-1]}"


#: A longer context is not used, so that models of different lengths get the same questions.
WINDOW = 512


@dataclass(frozen=True, slots=True)
class Code:
    """The cost of a text: bits by window, bytes by window (its tokens' share of the text), all
    tokens, and bits per byte of this model and of uniform logits.
    """

    bits: NDArray[np.float64]
    bytes: NDArray[np.float64]
    tokens: int
    bits_per_byte: float
    uniform: float


def manuals(size: int) -> str:
    """Return about the first `size` bytes of the default corpus's held-out part, in full lines."""
    text = _held_out()
    end = text.find(b"\n", size)
    return text.decode() if end < 0 else text[: end + 1].decode()


@functools.cache
def _held_out() -> bytes:
    return held_out_text(TextTask()).encode()


def encode_length(examinee: Examinee, text: str) -> Code:
    """Read a text in windows; a token is predicted from those before it in the window."""
    if not text.strip():
        raise InputError("an empty text has no bits per byte")
    if examinee.max_length < 2:
        raise NotOffered("it reads one token at a time")
    ids = examinee.ids(text)
    if len(ids) < 2:
        raise NotOffered("the text is a single token")
    width = min(WINDOW, examinee.max_length)
    rows, places = [], []
    for start in range(0, len(ids) - 1, width):
        row = ids[start : start + width]
        following = ids[start + 1 : start + width + 1]
        asked: list[Place] = list(enumerate(following))
        rows.append(row[: len(asked)])
        places.append(asked)
    found = log_probabilities(examinee, rows, places)
    bits = np.array([-logp.sum() / math.log(2) for logp, _ in found])
    tokens = np.array([len(asked) for asked in places])
    if examinee.begin is None:  # nothing stood before the first token
        bits[0] += math.log2(examinee.vocab_size)
        tokens[0] += 1
    size, count = len(text.encode()), int(tokens.sum())
    return Code(
        bits,
        tokens / count * size,
        count,
        bits_per_byte=float(bits.sum() / size),
        uniform=count * math.log2(examinee.vocab_size) / size,
    )


EXAMS: dict[str, Exam] = {
    exam.name: exam
    for exam in (
        Exam(name="copy", make=_copy, solve=_solve_copy, opens=True),
        Exam(name="recall", make=_recall, solve=_solve_recall, opens=True),
        Exam(name="induction", make=_induction, solve=_solve_induction, opens=True),
        Exam(name="arithmetic", make=_arithmetic, solve=_solve_arithmetic, opens=True),
        Exam(name="brackets", make=_brackets, solve=_solve_brackets, opens=False),
        Exam(name="agreement", make=_agreement, solve=_solve_agreement, opens=False),
        Exam(name="fsm", make=_machine, solve=_solve_machine, opens=True),
    )
}
BITS = "bits per byte"
#: Questions of each exam.
ITEMS = 960
#: Bytes of text for each question of the other exams.
BYTES_PER_ITEM = 64
RESAMPLES = 10_000
#: Fewer would not show how much groups differ.
LEAST_GROUPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One row. Marks are shares of right answers, and more is better; bits per byte are costs.

    `oracle` is the score of the solver that reads the same text, None where the truth is unknown.
    `exact`: the share of answers that the model generates greedily. Not offered: no score.
    """

    exam: str
    score: float | None = None
    low: float | None = None
    high: float | None = None
    chance: float | None = None
    oracle: float | None = None
    exact: float | None = None
    questions: int = 0
    groups: int = 0
    not_offered: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A model's rows, and what they depend on. `text` describes the text of bits per byte."""

    model: str
    seed: int
    items: int
    confidence: float
    scores: tuple[Score, ...]
    text: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {"suite": "smallbench", **asdict(self), "scores": [asdict(s) for s in self.scores]}

    def table(self) -> str:
        """Return the result as a table for people."""
        head = f"{'':<15}{'score':>8}{f'{self.confidence:.1%} interval':>22}"
        lines = [f"{head}{'chance':>9}{'oracle':>9}{'said':>8}{'questions':>11}"]
        lines += [_line(score) for score in self.scores]
        if self.text:
            lines.append(
                f"bits per byte: {self.text['bytes']:,} bytes of held-out manuals, less is better; "
                f"bz2 needs {self.text['bz2']:.3f}"
            )
        return "\n".join(lines)


def _line(score: Score) -> str:
    if score.score is None:
        return f"{score.exam:<15}not offered: {score.not_offered}"
    style = "{:.3f}" if score.exam == BITS else "{:.1%}"

    def shown(value: float | None, without: str) -> str:
        return without if value is None else style.format(value)

    span = "-" if score.low is None else f"{shown(score.low, '')} to {shown(score.high, '')}"
    return (
        f"{score.exam:<15}{shown(score.score, ''):>8}{span:>22}{shown(score.chance, ''):>9}"
        f"{shown(score.oracle, 'unknown'):>9}{shown(score.exact, '-'):>8}{score.questions:>11,}"
    )


def smallbench(
    examinee: Examinee,
    *,
    items: int = ITEMS,
    seed: int = 0,
    confidence: float = 0.95,
    only: Sequence[str] | None = None,
    text: str | None = None,
) -> Result:
    """Score about `items` questions of each exam, sampled by `seed`: the same for every model.

    `only` names some of the exams; `text` replaces the manuals that bits per byte are measured on.
    """
    at_least("items", items, 1)
    if not 0.0 < confidence < 1.0:
        raise InputError(f"confidence {confidence} is outside (0, 1)", hint="0.95")
    chosen = exams(only)
    scores, about = [], {}
    for name in chosen:
        if name != BITS:
            scores.append(_exam(examinee, EXAMS[name], items, seed, confidence))
            continue
        read = manuals(items * BYTES_PER_ITEM) if text is None else text
        scores.append(_bits(examinee, read, seed, confidence))
        content = read.encode()  # bz2 has learned nothing before
        bz2_bits = 8 * len(bz2.compress(content, 9)) / len(content)
        about = {"bytes": len(content), "bz2": bz2_bits}
    return Result(
        model=examinee.name,
        seed=seed,
        items=items,
        confidence=confidence,
        scores=tuple(scores),
        text=about,
    )


def exams(only: Sequence[str] | None = None) -> list[str]:
    """Return the names of the rows, all of them or those requested."""
    known = [BITS, *EXAMS]
    for name in only or ():
        if name not in known:
            raise InputError(f"SmallBench has no exam '{name}'", hint=f"it has: {', '.join(known)}")
    return [name for name in known if only is None or name in only]


def questions_of(exam: Exam, *, items: int, seed: int) -> list[Group]:
    """Return as many groups as `items` questions need, a few at least; more begin the same."""
    rng = stream(seed, "smallbench", exam.name)
    groups = [exam.make(rng) for _ in range(LEAST_GROUPS)]
    while sum(len(group.questions) for group in groups) < items:
        groups.append(exam.make(rng))
    return groups


def _exam(examinee: Examinee, exam: Exam, items: int, seed: int, confidence: float) -> Score:
    groups = questions_of(exam, items=items, seed=seed)
    try:
        marks = mark(examinee, groups)
    except NotOffered as reason:
        return Score(exam=exam.name, not_offered=str(reason))
    low, high = interval(marks.points, marks.questions, seed=seed, confidence=confidence)
    asked = [question for group in groups for question in group.questions]
    solved = [exam.solve(one.context, one.choices) == one.answer for one in asked]
    return Score(
        exam=exam.name,
        score=float(marks.points.sum() / len(asked)),
        low=low,
        high=high,
        chance=float(np.mean([1 / len(one.choices) for one in asked])),
        oracle=float(np.mean(solved)),
        exact=marks.exact / len(asked) if exam.opens else None,
        questions=len(asked),
        groups=len(marks.points),
    )


def _bits(examinee: Examinee, text: str, seed: int, confidence: float) -> Score:
    try:
        code = encode_length(examinee, text)
    except NotOffered as reason:
        return Score(exam=BITS, not_offered=str(reason))
    low, high = interval(code.bits, code.bytes, seed=seed, confidence=confidence)
    return Score(
        exam=BITS,
        score=code.bits_per_byte,
        low=low,
        high=high,
        chance=code.uniform,
        questions=code.tokens,
        groups=len(code.bits),
    )


def interval(
    points: NDArray[np.float64], sizes: NDArray[Any], *, seed: int, confidence: float
) -> tuple[float | None, float | None]:
    """Bootstrap sum(points) / sum(sizes): the groups are resampled with replacement.

    The spread is widened as Student's t is over the normal: without it, intervals from a dozen
    groups are too short. One group has no interval.
    """
    from scipy import special

    if len(points) < 2:
        return None, None
    drawn = stream(seed, "smallbench", "bootstrap").integers(
        len(points), size=(RESAMPLES, len(points))
    )
    means = points[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    middle, tail = points.sum() / sizes.sum(), (1 - confidence) / 2
    wider = float(special.stdtrit(len(points) - 1, 1 - tail) / special.ndtri(1 - tail))
    wider *= math.sqrt(len(points) / (len(points) - 1))
    low, high = middle + wider * (np.quantile(means, [tail, 1 - tail]) - middle)
    return float(low), float(high)
