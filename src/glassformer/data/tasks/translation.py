"""Translation with exact answers: numbers and dates between figures and the words of two languages.

The source names the requested form: `de: 4217` is answered `viertausendzweihundertsiebzehn`,
`digits: March 17, 2024` is answered `2024-03-17`. Words are num2words' and Babel's, independent of
the machine's locale. Values are split, not pairs: what is held out occurs in no direction in
training. Tokens are pieces of words learned from the training part, so that rows are short, and
each digit is a token, so that no piece hides its position.
"""

import datetime
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import permutations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Batch, Ints, pad
from glassformer.data.rng import digest, stream
from glassformer.data.task import (
    EOS,
    PAD,
    Oracle,
    Task,
    answered_batch,
    checked,
    padded_to_longest,
    pick,
    spread,
    tenths,
)
from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.spec import presets
from glassformer.spec.errors import MachineError
from glassformer.spec.model import ModelSpec
from glassformer.spec.tasks import TranslationTask
from glassformer.spec.train import AdamW, CosineSchedule, TrainSpec

Kind = Literal["number", "date"]

#: The form that is no language.
FIGURES = "digits"
NEEDED = ("num2words", "babel")


@functools.lru_cache(maxsize=1 << 18)
def written(kind: Kind, value: int, form: str) -> str:
    """Return the text of a number, or of a date by its ordinal (day 1 is January 1 of year 1)."""
    if kind == "date":
        date = datetime.date.fromordinal(value)
        return date.isoformat() if form == FIGURES else _date(date, form)
    return str(value) if form == FIGURES else _number(value, form)


def writers() -> dict[str, str]:
    """Return the libraries that write words, with versions: others may word differently."""
    try:
        import babel  # noqa: F401
        import num2words  # noqa: F401
    except ImportError as error:
        raise MachineError(
            f"the translation task needs {error.name}, which is not installed",
            hint="pip install 'glassformer[translate]'",
        ) from error
    return {name: version(name) for name in NEEDED}


def _number(value: int, language: str) -> str:
    from num2words import num2words

    text: str = num2words(value, lang=language)
    return text


def _date(date: datetime.date, language: str) -> str:
    from babel.dates import format_date

    # The long form; a full one names the weekday, which is arithmetic and not translation.
    text: str = format_date(date, "long", locale=language)
    return text


# N pairs, B batch, T answer tokens, S source tokens, V vocabulary

SPECIALS = ("PAD", "BOS", "EOS")
WAYS = 6  # three forms, each into each other one


@dataclass(frozen=True, slots=True)
class _Value:
    """A number or a date, and which of its kind's lengths it has."""

    kind: Kind
    value: int

    @property
    def length(self) -> str:
        """The number of digits; dates are all alike."""
        return str(len(str(self.value))) if self.kind == "number" else "date"


@dataclass(frozen=True, slots=True)
class _Pairs:
    """One split: its values, and the pairs of each, one for every direction, as padded ids."""

    values: list[_Value]
    source_NS: NDArray[np.int64]
    source_lengths_N: NDArray[np.int64]
    answer_NT: NDArray[np.int64]
    answer_lengths_N: NDArray[np.int64]


class Translation(Task):
    """Every value in all six directions; splits `train`, `val`, `test` by value, head `next`."""

    answers_are_sentences = True

    tokenizer: BytePairs

    def __init__(self, spec: TranslationTask) -> None:
        self.spec = spec
        self.name = "translation"
        self._writers = writers()
        self.directions = tuple(permutations((FIGURES, *spec.languages), 2))
        parts = _divided(spec)
        texts = {split: self._texts(values) for split, values in parts.items()}
        self.tokenizer = BytePairs.train(
            (text for pair in texts["train"] for text in pair),
            vocab_size=spec.pieces,
            specials=SPECIALS,
            digits_apart=True,
        )
        self.heads: Mapping[str, int] = {"next": self.tokenizer.vocab_size}
        self._splits = {split: self._encoded(parts[split], pairs) for split, pairs in texts.items()}

    def model(self) -> ModelSpec:
        """Return a small encoder-decoder."""
        return presets.seq2seq(
            vocab_size=self.tokenizer.vocab_size,
            d_model=64,
            n_heads=4,
            d_ff=256,
            n_layers=2,
            max_seq_len=64,
            dropout=0.0,
        )

    def training(self) -> TrainSpec:
        """Return settings that take under five minutes on two cores."""
        return TrainSpec(
            steps=2_500,
            batch_size=128,
            lr=2e-3,
            schedule=CosineSchedule(warmup=100),
            optimizer=AdamW(beta2=0.98, eps=1e-9),
            evaluate_every=500,
            checkpoint_every=500,
        )

    def sizes(self) -> dict[str, int]:
        """Return the number of pairs in each split."""
        return {split: len(pairs.answer_NT) for split, pairs in self._splits.items()}

    def lengths(self, split: str) -> NDArray[np.int64]:
        """Return the number of tokens of each answer, its end included."""
        return pick(self._splits, split).answer_lengths_N

    def batch(self, split: str, rows: Ints) -> Batch:
        """Return the source, BOS and the answer, and the answer and EOS as the target of `next`."""
        pairs, rows = self._found(split, rows)
        return answered_batch(
            pairs.source_NS[rows],
            pairs.source_lengths_N[rows],
            answer_NT=pairs.answer_NT[rows],
            answer_lengths_N=pairs.answer_lengths_N[rows],
        )

    def groups(self, split: str, rows: Ints) -> dict[str, list[str]]:
        """Return direction, requested form, number or date, and digits of a number."""
        pairs, rows = self._found(split, rows)
        ways = [self.directions[row % WAYS] for row in rows]
        values = [pairs.values[row // WAYS] for row in rows]
        return {
            "direction": [f"{given} to {wanted}" for given, wanted in ways],
            "language": [wanted for _, wanted in ways],
            "kind": [value.kind for value in values],
            "length": [value.length for value in values],
        }

    def oracle(self, split: str, rows: Ints) -> Oracle:
        """Return the truth: entropy (B, T) 0, and (B, T, V) 1 on the target; 0 on PAD."""
        pairs, rows = self._found(split, rows)
        next_BT, valid_BT = padded_to_longest(pairs.answer_NT[rows], pairs.answer_lengths_N[rows])
        probabilities_BTV = np.eye(self.heads["next"])[next_BT] * valid_BT[:, :, None]
        return Oracle(
            entropy=np.zeros(next_BT.shape),
            probabilities=probabilities_BTV,
            legal=probabilities_BTV > 0,
        )

    def describe(self, split: str, row: int) -> str:
        """Return an example such as `de: 42 -> zweiundvierzig`."""
        pairs, (number,) = self._found(split, np.array([row]))
        return " -> ".join(self._pair(pairs.values[number // WAYS], number % WAYS))

    def facts(self) -> dict[str, Any]:
        """Return sizes, characters per answer token, the libraries of the words, and a hash."""
        arrays = [
            array for pairs in self._splits.values() for array in (pairs.source_NS, pairs.answer_NT)
        ]
        return {
            "task": self.name,
            "languages": list(self.spec.languages),
            "writers": self._writers,
            "sizes": self.sizes(),
            "overlap": self._overlap(),
            "vocab_size": self.tokenizer.vocab_size,
            "sha256": digest(arrays),
        }

    def _overlap(self) -> int:
        """Count the numbers and dates that occur in more than one split."""
        distinct = [set(pairs.values) for pairs in self._splits.values()]
        return sum(map(len, distinct)) - len(set[_Value]().union(*distinct))

    def _found(self, split: str, rows: Ints) -> tuple[_Pairs, NDArray[np.int64]]:
        pairs = pick(self._splits, split)
        return pairs, checked(rows, size=len(pairs.answer_NT), split=split)

    def _pair(self, value: _Value, way: int) -> tuple[str, str]:
        """Return the source and the answer."""
        given, wanted = self.directions[way]
        source = f"{wanted}: {written(value.kind, value.value, given)}"
        return source, written(value.kind, value.value, wanted)

    def _texts(self, values: Sequence[_Value]) -> list[tuple[str, str]]:
        return [self._pair(value, way) for value in values for way in range(WAYS)]

    def _encoded(self, values: list[_Value], texts: Sequence[tuple[str, str]]) -> _Pairs:
        sides = []
        for side in range(2):
            ids = self.tokenizer.encode_many([pair[side] for pair in texts])
            tokens_NT, valid_NT = pad([[*row, EOS] for row in ids], filler=PAD)
            sides.append((tokens_NT.astype(np.int64), valid_NT.sum(axis=1)))
        (source_NS, source_lengths_N), (answer_NT, answer_lengths_N) = sides
        return _Pairs(values, source_NS, source_lengths_N, answer_NT, answer_lengths_N)


def _divided(spec: TranslationTask) -> dict[str, list[_Value]]:
    """Return distinct values by split: half numbers, evenly over lengths, half dates."""
    count = spec.examples // WAYS
    places = range(1, spec.digits + 1)
    room = [9 * 10 ** (place - 1) for place in places]
    first = datetime.date(spec.first_year, 1, 1).toordinal()
    days = datetime.date(spec.last_year, 12, 31).toordinal() + 1 - first
    dates, numbers = count // 2, count - count // 2
    spread(dates, [days], what="dates")  # refuses more than there are
    values: list[_Value] = []
    for place, many, size in zip(places, spread(numbers, room, what="numbers"), room, strict=True):
        drawn = stream(spec.seed, "translation", place).permutation(size)[:many]
        values += [_Value("number", 10 ** (place - 1) + int(number)) for number in drawn]
    drawn = stream(spec.seed, "translation", "dates").permutation(days)[:dates]
    values += [_Value("date", first + int(day)) for day in drawn]
    mixed = stream(spec.seed, "translation", "order")
    return {
        split: [values[number] for number in mixed.permutation(numbers)]
        for split, numbers in tenths(len(values)).items()
    }
