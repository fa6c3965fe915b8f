"""The SmallBench suite: a row for each exam, with its interval, chance and oracle.

Intervals are bootstrapped over groups, not over questions: the questions of a group share their
words, and their marks are not independent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.data.rng import stream
from glassformer.lab.smallbench.exams import (
    AGREEMENT,
    ARITHMETIC,
    BRACKET,
    COPY,
    INDUCTION,
    MACHINE,
    RECALL,
    encode_length,
    manuals,
    yardstick,
)
from glassformer.lab.smallbench.question import Exam, Examinee, Group, NotOffered, mark
from glassformer.spec.checks import at_least
from glassformer.spec.errors import InputError

EXAMS: dict[str, Exam] = {
    exam.name: exam for exam in (COPY, RECALL, INDUCTION, ARITHMETIC, BRACKET, AGREEMENT, MACHINE)
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
        about = {"bytes": len(read.encode()), "bz2": yardstick(read)}
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
    if len(points) < 2:
        return None, None
    drawn = stream(seed, "smallbench", "bootstrap").integers(
        len(points), size=(RESAMPLES, len(points))
    )
    means = points[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    middle, tail = points.sum() / sizes.sum(), (1 - confidence) / 2
    wider = _student(tail, len(points) - 1) * math.sqrt(len(points) / (len(points) - 1))
    low, high = middle + wider * (np.quantile(means, [tail, 1 - tail]) - middle)
    return float(low), float(high)


def _student(tail: float, freedom: int) -> float:
    """Return Student's t quantile over the normal's, by four terms of its series in 1 / freedom."""
    z = NormalDist().inv_cdf(1 - tail)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    series: float = sum(term / freedom**power for power, term in enumerate(terms))
    return series / z
