"""Digit operations: an operation and digits in, one digit out.

The model reads `SECOND 7 3 9 SEP` and predicts `3`. There are 20 tokens: the digits, whose ids are
their values, seven operations, PAD, SEP, EOS. A complete example, as people write it, is
`SECOND 7 3 9 SEP 3 EOS`. Splits are by unique example.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Batch, Ints, pad
from glassformer.data.rng import digest, stream
from glassformer.data.task import (
    Oracle,
    Task,
    checked,
    distinct_rows,
    overlap,
    padded_to_longest,
    pick,
    spread,
    tenths,
)
from glassformer.data.tokenizers.vocab import Vocab
from glassformer.spec import presets
from glassformer.spec.checks import one_of
from glassformer.spec.errors import InputError
from glassformer.spec.model import Dropout, ModelSpec
from glassformer.spec.tasks import OPERATIONS, DigitsTask
from glassformer.spec.train import AdamW, CosineSchedule, TrainSpec

# N examples, B batch, T tokens, V vocabulary

VOCAB = Vocab((*"0123456789", *OPERATIONS, "PAD", "SEP", "EOS"))
PAD, SEP = VOCAB.id("PAD"), VOCAB.id("SEP")


class Example(NamedTuple):
    """An operation, the digits it is applied to, and the digit that comes out."""

    operation: str
    digits: tuple[int, ...]
    answer: int

    @property
    def prompt(self) -> str:
        """The model's input: `SECOND 7 3 9 SEP`."""
        return " ".join((self.operation, *map(str, self.digits), "SEP"))

    def __str__(self) -> str:
        return f"{self.prompt} {self.answer} EOS"


def tokenize(text: str) -> list[int]:
    """Return the token ids of words separated by spaces."""
    return VOCAB.tokenize(text)


def detokenize(ids: Iterable[int]) -> str:
    """Return the words of token ids."""
    return VOCAB.detokenize(ids)


def answer_of(operation: str, digits: Sequence[int]) -> int:
    """Return the one right answer."""
    one_of("operation", operation, OPERATIONS)
    if len(digits) < 2 or not all(0 <= digit <= 9 for digit in digits):
        raise InputError(f"{list(digits)} are not two digits or more", hint="0 to 9 each")
    return int(_answers(operation, np.array([digits]))[0])


def generate_example(
    rng: np.random.Generator | None = None,
    *,
    min_length: int = 2,
    max_length: int = 6,
    operations: Sequence[str] = OPERATIONS,
) -> Example:
    """Return a random operation on a random number of random digits, with its answer."""
    rng = np.random.default_rng() if rng is None else rng
    operation = operations[int(rng.integers(len(operations)))]
    length = int(rng.integers(min_length, max_length + 1))
    digits = tuple(rng.integers(0, 10, size=length).tolist())
    return Example(operation, digits, answer_of(operation, digits))


def create_batch(examples: Sequence[Example]) -> Batch:
    """Return tokens_BT, padded on the right, and the answers (B,) as head `answer`."""
    tokens_BT, valid_BT = pad([tokenize(example.prompt) for example in examples], filler=PAD)
    answers_B = np.array([example.answer for example in examples], dtype=np.int64)
    return Batch(
        tokens=tokens_BT,
        valid=valid_BT,
        targets={"answer": answers_B},
        weights=np.ones(len(examples), dtype=np.float32),
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """One split: the prompts, padded, how many of their tokens are real, and the answers."""

    tokens_NT: NDArray[np.int8]
    lengths_N: NDArray[np.int64]
    answers_N: NDArray[np.int8]


class Digits(Task):
    """Unique examples, as evenly over operations and lengths as there are different ones."""

    def __init__(self, spec: DigitsTask) -> None:
        self.spec = spec
        self.name = "digits"
        self.tokenizer = VOCAB
        self.heads: Mapping[str, int] = {"answer": VOCAB.vocab_size}
        every = _enumerate(spec)
        rng = stream(spec.seed, "digits", "order")
        self._splits: dict[str, _Rows] = {}
        for split, numbers in tenths(len(every.tokens_NT)).items():
            mixed = rng.permutation(numbers)
            self._splits[split] = _Rows(
                every.tokens_NT[mixed], every.lengths_N[mixed], every.answers_N[mixed]
            )
        self._overlap = overlap({name: rows.tokens_NT for name, rows in self._splits.items()})
        assert self._overlap == 0, f"{self._overlap} examples are in two splits"

    def model(self) -> ModelSpec:
        """Return the preset with a little dropout, the best of three settings."""
        model = presets.digits(vocab_size=self.tokenizer.vocab_size)
        return replace(model, decoder=replace(model.decoder, dropout=Dropout.from_number(0.05)))

    def training(self) -> TrainSpec:
        """Return settings that learn every operation."""
        return TrainSpec(
            steps=4_000,
            batch_size=128,
            lr=2e-3,
            schedule=CosineSchedule(warmup=100),
            optimizer=AdamW(weight_decay=0.1),
        )

    def sizes(self) -> dict[str, int]:
        """Return the number of examples in each split."""
        return {split: len(rows.tokens_NT) for split, rows in self._splits.items()}

    def lengths(self, split: str) -> NDArray[np.int64]:
        """Return the number of tokens of each prompt: the operation, the digits, SEP."""
        return pick(self._splits, split).lengths_N

    def batch(self, split: str, rows: Ints) -> Batch:
        """Return prompts, and the answer's token as the target of head `answer`, (B,)."""
        tokens_BT, lengths_B, answers_B = self._take(split, rows)
        tokens_BT, valid_BT = padded_to_longest(tokens_BT, lengths_B)
        return Batch(
            tokens=tokens_BT,
            valid=valid_BT,
            targets={"answer": answers_B},
            weights=np.ones(len(answers_B), dtype=np.float32),
        )

    def groups(self, split: str, rows: Ints) -> dict[str, list[str]]:
        """Return each row's operation, and its number of digits."""
        tokens_BT, lengths_B, _ = self._take(split, rows)
        return {
            "operation": [VOCAB.names[token] for token in tokens_BT[:, 0]],
            "length": [str(length - 2) for length in lengths_B],
        }

    def confusions(
        self, split: str, rows: Ints, answers: NDArray[np.int64]
    ) -> dict[str, list[tuple[str, str]]]:
        """Return the requested operation and the one that would give this prediction (or `none`);
        the right digit and the predicted token.
        """
        tokens_BT, lengths_B, answers_B = self._take(split, rows)
        pairs = []
        for tokens, length, answer in zip(tokens_BT, lengths_B, answers, strict=True):
            asked, digits = VOCAB.names[tokens[0]], [int(d) for d in tokens[1 : length - 1]]
            fits = [op for op in self.spec.operations if answer_of(op, digits) == int(answer)]
            pairs.append((asked, asked if asked in fits else (fits[0] if fits else "none")))
        names = [VOCAB.names[token] for token in answers]
        return {"operation": pairs, "answer": list(zip(map(str, answers_B), names, strict=True))}

    def oracle(self, split: str, rows: Ints) -> Oracle:
        """Return the truth: entropy (B,) 0, and all probability (B, V) on the one answer."""
        answers_B = self._take(split, rows)[2]
        probabilities_BV = np.eye(VOCAB.vocab_size)[answers_B]
        return Oracle(
            entropy=np.zeros(len(answers_B)),
            probabilities=probabilities_BV,
            legal=probabilities_BV > 0,
        )

    def describe(self, split: str, row: int) -> str:
        """Return an example such as `SECOND 7 3 9 SEP 3 EOS`."""
        tokens_BT, lengths_B, answers_B = self._take(split, np.array([row]))
        return detokenize([*tokens_BT[0, : lengths_B[0]], answers_B[0], VOCAB.id("EOS")])

    def facts(self) -> dict[str, Any]:
        """Return sizes, counts by operation and length, overlap of the splits, a hash."""
        counts: dict[str, dict[str, int]] = {"operation": {}, "length": {}}
        for split, size in self.sizes().items():
            for group, labels in self.groups(split, np.arange(size)).items():
                for label, count in zip(*np.unique(labels, return_counts=True), strict=True):
                    counts[group][str(label)] = counts[group].get(str(label), 0) + int(count)
        arrays = [
            array
            for rows in self._splits.values()
            for array in (rows.tokens_NT, rows.lengths_N, rows.answers_N)
        ]
        return {
            "task": self.name,
            "sizes": self.sizes(),
            "overlap": self._overlap,
            "examples": counts,
            "vocab": list(VOCAB.names),
            "sha256": digest(arrays),
        }

    def _take(
        self, split: str, rows: Ints
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens_BT of full width, lengths_B, answers_B."""
        kept = pick(self._splits, split)
        rows = checked(rows, size=len(kept.tokens_NT), split=split)
        return (
            kept.tokens_NT[rows].astype(np.int64),
            kept.lengths_N[rows],
            kept.answers_N[rows].astype(np.int64),
        )


def _enumerate(spec: DigitsTask) -> _Rows:
    """Return all examples by cell (an operation and a length), shuffled within each."""
    cells = [
        (operation, length)
        for length in range(spec.min_length, spec.max_length + 1)
        for operation in spec.operations
    ]
    counts = spread(spec.examples, [10**length for _, length in cells], what="digit examples")
    tokens_NT = np.full((spec.examples, spec.max_length + 2), PAD, dtype=np.int8)
    lengths_N = np.empty(spec.examples, dtype=np.int64)
    answers_N = np.empty(spec.examples, dtype=np.int8)
    start = 0
    for (operation, length), count in zip(cells, counts, strict=True):
        rng = stream(spec.seed, "digits", operation, length)
        digits = distinct_rows(rng, count=count, base=10, length=length)
        place = slice(start, start + count)
        tokens_NT[place, 0] = VOCAB.id(operation)
        tokens_NT[place, 1 : length + 1] = digits
        tokens_NT[place, length + 1] = SEP
        lengths_N[place] = length + 2
        answers_N[place] = _answers(operation, digits)
        start += count
    return _Rows(tokens_NT, lengths_N, answers_N)


def _answers(operation: str, digits: Ints) -> Ints:
    """Return the answers (N,) of one operation on rows of digits (N, length)."""
    match operation:
        case "FIRST":
            answers = digits[:, 0]
        case "SECOND":
            answers = digits[:, 1]
        case "LAST":
            answers = digits[:, -1]
        case "MAX":
            answers = digits.max(axis=1)
        case "MIN":
            answers = digits.min(axis=1)
        case "LENGTH":
            answers = np.full(len(digits), digits.shape[1])
        case _:
            answers = digits.sum(axis=1) % 10
    return answers
