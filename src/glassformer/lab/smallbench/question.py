"""SmallBench: a model as `Examinee`, questions, the rule that makes chance exact, and the scoring.

An `Examinee` is a tokenizer and logits. Our models are converted here; a model of another library
needs two functions of its own.

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
import torch
from numpy.typing import NDArray

from glassformer.adapters.wrapped import WrappedAdapter
from glassformer.data.batch import Batch, pad
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.models.model import Holder, Model, model_of
from glassformer.spec.errors import GlassError, InputError

# B batch, T length, V vocabulary

Ids = tuple[int, ...]
Logits = Callable[[NDArray[np.int64], NDArray[np.bool_]], NDArray[np.floating]]

#: The most numbers that one call for logits may return, so that a large vocabulary fits memory.
ROOM = 1 << 26


class NotOffered(Exception):
    """A question that the model cannot be given; the text gives the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examinee:
    """A model with its tokenizer.

    logits(tokens_BT, valid_BT) returns (B, T, V), the next token's at each position; rows are
    padded on the right and valid is True for real tokens, so a causal model may ignore it. `encode`
    adds nothing of its own; `begin` is the token before every text, if there is one.
    `decode` shows whether a text survived: one that was lost or changed is not offered.
    """

    name: str
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    logits: Logits
    vocab_size: int
    max_length: int
    begin: int | None = None

    def ids(self, text: str) -> Ids:
        """Return the ids of a text as the model reads it, after `begin`."""
        try:
            inner = [int(token) for token in self.encode(text)]
            again = self.decode(inner)
        except (GlassError, ValueError, KeyError) as error:
            what = str(error).partition("\n")[0]
            raise NotOffered(f"its tokenizer cannot read {text[:40]!r}: {what}") from error
        if again.strip() != text.strip():
            raise NotOffered(f"its tokenizer makes {again[:40]!r} of {text[:40]!r}")
        ids = (*(() if self.begin is None else (self.begin,)), *inner)
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise InputError(
                f"the tokenizer gives id {wrong}, the model has {self.vocab_size}",
                where=self.name,
                hint="give the tokenizer that the model was trained with",
            )
        return ids


def examinee_of(
    model: Model | Holder | WrappedAdapter, tokenizer: Tokenizer, *, name: str
) -> Examinee:
    """Return a model as an examinee; it needs a next-token head and no encoder."""
    if not isinstance(model, WrappedAdapter):
        model = model_of(model)
    if "next" not in model.spec.head_names() or model.spec.encoder is not None:
        raise InputError(
            f"{name} does not continue a text, so SmallBench has no questions for it",
            hint="glass evaluate RUN measures a model on its own task",
        )
    if any(not block.mixer.causal for block in model.spec.decoder.blocks()):
        raise InputError(f"{name} looks ahead, so it would see the answers", hint="a causal model")

    @torch.no_grad()
    def logits(tokens_BT: NDArray[np.int64], valid_BT: NDArray[np.bool_]) -> NDArray[np.floating]:
        if isinstance(model, WrappedAdapter):
            answer_BTV = model(torch.from_numpy(tokens_BT), valid=torch.from_numpy(valid_BT))
        else:
            answer_BTV = model(Batch(tokens=tokens_BT, valid=valid_BT))["next"]
        return answer_BTV.float().cpu().numpy()

    model.eval()
    return Examinee(
        name=name,
        encode=tokenizer.encode,
        decode=tokenizer.decode,
        logits=logits,
        vocab_size=model.spec.vocab_size,
        max_length=model.spec.max_seq_len,
        begin=tokenizer.bos,
    )


Place = tuple[int, int]  # of a row: a position, and the token that follows it


def log_probabilities(
    examinee: Examinee, rows: Sequence[Ids], places: Sequence[Sequence[Place]]
) -> list[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """Return the log-probability of the given next token at each position of each row, and whether
    it is the likeliest. Rows of similar lengths share a batch; nothing else depends on that.
    """
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    found: dict[int, tuple[NDArray[np.float64], NDArray[np.bool_]]] = {}
    while order:
        longest = len(rows[order[-1]])
        chosen = order[-max(1, min(256, ROOM // (longest * examinee.vocab_size))) :]
        del order[-len(chosen) :]
        tokens_BT, valid_BT = pad([rows[row] for row in chosen])
        logits_BTV = np.asarray(examinee.logits(tokens_BT.astype(np.int64), valid_BT))
        expected = (*tokens_BT.shape, examinee.vocab_size)
        if logits_BTV.shape != expected:
            raise InputError(
                f"the logits have shape {logits_BTV.shape}, not {expected}",
                where=examinee.name,
                hint="(batch, length, vocabulary)",
            )
        for place, row in enumerate(chosen):
            read, following = np.array(places[row], dtype=np.int64).reshape(-1, 2).T
            found[row] = _looked_up(logits_BTV[place, read], following, name=examinee.name)
    return [found[row] for row in range(len(rows))]


def _looked_up(
    logits_PV: NDArray[np.floating], following_P: NDArray[np.int64], *, name: str
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    wide_PV = logits_PV.astype(np.float64)
    if not np.isfinite(wide_PV.max(-1)).all() or np.isnan(wide_PV).any():
        raise InputError("the model's logits are not finite", where=name)
    wide_PV = wide_PV - wide_PV.max(-1, keepdims=True)
    own_P = np.take_along_axis(wide_PV, following_P[:, None], -1)[:, 0]
    return own_P - np.log(np.exp(wide_PV).sum(-1)), wide_PV.argmax(-1) == following_P


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
