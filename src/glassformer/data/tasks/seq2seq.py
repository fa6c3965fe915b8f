"""Tasks for an encoder and a decoder: rows of symbols to rearrange, and translation.

Copy, reverse or sort: the encoder reads `3 1 4 EOS`, the decoder `BOS 4 1 3`; its targets are
`4 1 3 EOS`. EOS at the source's end lets a model find the end by content. Splits are by unique
source.

Translation with exact answers: numbers and dates between figures and the words of two languages.
The source names the requested form: `de: 4217` is answered `viertausendzweihundertsiebzehn`,
`digits: March 17, 2024` is answered `2024-03-17`. Words are num2words' and Babel's, independent of
the machine's locale. Values are split, not pairs: what is held out occurs in no direction in
training. Tokens are pieces of words learned from the training part, so that rows are short, and
each digit is a token, so that no piece hides its position.
"""

import datetime
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    check_room,
    checked,
    distinct_rows,
    number_of_rows,
    overlap,
    padded_to_longest,
    pick,
    spread,
    tenths,
)
from glassformer.data.tokenizers.bpe import BytePairs
from glassformer.data.tokenizers.vocab import Vocab
from glassformer.spec import presets
from glassformer.spec.errors import MachineError
from glassformer.spec.model import ModelSpec
from glassformer.spec.tasks import SequenceTask, TranslationTask
from glassformer.spec.train import AdamW, CosineSchedule, TrainSpec

# N examples, B batch, T target tokens, S source tokens, V vocabulary

FIRST = EOS + 1  # the id of symbol 0


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Sources and answers as padded ids, EOS after each, and their lengths with it."""

    source_NS: NDArray[np.integer]
    source_lengths_N: NDArray[np.int64]
    answer_NT: NDArray[np.integer]
    answer_lengths_N: NDArray[np.int64]

    def chosen(self, numbers: Ints) -> "_Pairs":
        """Return some of the pairs."""
        return _Pairs(
            self.source_NS[numbers],
            self.source_lengths_N[numbers],
            self.answer_NT[numbers],
            self.answer_lengths_N[numbers],
        )


class _Answered(Task):
    """A task whose answer to a source is one sequence, for an encoder and a decoder."""

    _splits: Mapping[str, _Pairs]

    def model(self) -> ModelSpec:
        """Return a small encoder-decoder."""
        return presets.seq2seq(
            vocab_size=self.heads["next"],
            d_model=64,
            n_heads=4,
            d_ff=256,
            n_layers=2,
            max_seq_len=64,
            dropout=0.0,
        )

    def sizes(self) -> dict[str, int]:
        """Return the number of examples in each split."""
        return {split: len(pairs.answer_NT) for split, pairs in self._splits.items()}

    def lengths(self, split: str) -> NDArray[np.int64]:
        """Return the number of tokens of each answer, its end included."""
        return pick(self._splits, split).answer_lengths_N

    def batch(self, split: str, rows: Ints) -> Batch:
        """Return the source, BOS and the answer, and the answer and EOS as the target of `next`."""
        kept = self._take(split, rows)
        return answered_batch(
            kept.source_NS,
            kept.source_lengths_N,
            answer_NT=kept.answer_NT,
            answer_lengths_N=kept.answer_lengths_N,
        )

    def oracle(self, split: str, rows: Ints) -> Oracle:
        """Return the truth: entropy (B, T) 0, and (B, T, V) 1 on the target; 0 on PAD."""
        kept = self._take(split, rows)
        next_BT, valid_BT = padded_to_longest(kept.answer_NT, kept.answer_lengths_N)
        probabilities_BTV = np.eye(self.heads["next"])[next_BT] * valid_BT[:, :, None]
        return Oracle(
            entropy=np.zeros(next_BT.shape),
            probabilities=probabilities_BTV,
            legal=probabilities_BTV > 0,
        )

    def _checked(self, split: str, rows: Ints) -> NDArray[np.int64]:
        size = len(pick(self._splits, split).answer_NT)
        return checked(rows, size=size, split=split)

    def _take(self, split: str, rows: Ints) -> _Pairs:
        return pick(self._splits, split).chosen(self._checked(split, rows))


LEARNING = TrainSpec(
    steps=1_000,
    batch_size=64,
    lr=2e-3,
    schedule=CosineSchedule(warmup=100),
    optimizer=AdamW(beta2=0.98, eps=1e-9),
)


class Sequences(_Answered):
    """Unique sources, as evenly over lengths as there are different ones.

    The split `longer` holds lengths that no other split has, a tenth of `examples` in number.
    """

    tokenizer: Vocab

    def __init__(self, spec: SequenceTask) -> None:
        self.spec = spec
        self.name: str = spec.operation
        check_room(spec.examples, spec.max_length + spec.longer)
        symbols = spec.vocab_size - FIRST
        self.tokenizer = Vocab(("PAD", "BOS", "EOS", *(str(i) for i in range(symbols))))
        self.heads: Mapping[str, int] = {"next": spec.vocab_size}
        every = self._make(spec.examples, spec.min_length, spec.max_length)
        rng = stream(spec.seed, "sequences", "order")
        self._splits = {
            split: every.chosen(rng.permutation(numbers))
            for split, numbers in tenths(spec.examples).items()
        }
        if spec.longer:
            shortest, longest = spec.max_length + 1, spec.max_length + spec.longer
            room = sum(number_of_rows(symbols, n) for n in range(shortest, longest + 1))
            count = min(-(-spec.examples // 10), room)
            longer = self._make(count, shortest, longest)
            self._splits["longer"] = longer.chosen(rng.permutation(count))
        self._overlap = overlap({name: rows.source_NS for name, rows in self._splits.items()})
        assert self._overlap == 0, f"{self._overlap} sources are in two splits"

    def training(self) -> TrainSpec:
        """Return settings that learn every operation in a few minutes."""
        return LEARNING

    def groups(self, split: str, rows: Ints) -> dict[str, list[str]]:
        """Return each row's number of symbols."""
        return {"length": [str(n - 1) for n in self._take(split, rows).answer_lengths_N]}

    def describe(self, split: str, row: int) -> str:
        """Return an example such as `3 1 4 -> 4 1 3`."""
        kept = self._take(split, np.array([row]))
        length = kept.answer_lengths_N[0] - 1
        source, answer = kept.source_NS[0, :length], kept.answer_NT[0, :length]
        return f"{self.tokenizer.detokenize(source)} -> {self.tokenizer.detokenize(answer)}"

    def facts(self) -> dict[str, Any]:
        """Return sizes, examples of each length by split, overlap of the splits, a hash."""
        by_length = {
            split: {
                str(length): int(count)
                for length, count in zip(
                    *np.unique(rows.answer_lengths_N - 1, return_counts=True), strict=True
                )
            }
            for split, rows in self._splits.items()
        }
        arrays = [
            array
            for rows in self._splits.values()
            for array in (rows.source_NS, rows.answer_NT, rows.answer_lengths_N - 1)
        ]
        return {
            "task": self.name,
            "sizes": self.sizes(),
            "overlap": self._overlap,
            "lengths": by_length,
            "vocab": list(self.tokenizer.names),
            "sha256": digest(arrays),
        }

    def _make(self, count: int, shortest: int, longest: int) -> _Pairs:
        """Make unique rows, length by length, shuffled within each length."""
        symbols = self.spec.vocab_size - FIRST
        lengths = range(shortest, longest + 1)
        counts = spread(count, [number_of_rows(symbols, n) for n in lengths], what="sequences")
        source_NS = np.full((count, longest + 1), PAD, dtype=np.int32)
        answer_NT = np.full((count, longest + 1), PAD, dtype=np.int32)
        start = 0
        for length, many in zip(lengths, counts, strict=True):
            rng = stream(self.spec.seed, "sequences", length)
            drawn = distinct_rows(rng, count=many, base=symbols, length=length)
            place = slice(start, start + many)
            source_NS[place, :length] = drawn + FIRST
            answer_NT[place, :length] = _rearranged(drawn, self.spec.operation) + FIRST
            source_NS[place, length] = answer_NT[place, length] = EOS
            start += many
        with_end_N = np.repeat(np.array(lengths), counts) + 1
        return _Pairs(source_NS, with_end_N, answer_NT, with_end_N)


def _rearranged(rows: Ints, kind: str) -> Ints:
    """Return rows of one length, each copied, reversed or sorted."""
    match kind:
        case "copy":
            return rows
        case "reverse":
            return rows[:, ::-1]
        case _:
            return np.sort(rows, axis=1)


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
            hint="pip install num2words babel sacrebleu",
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


class Translation(_Answered):
    """Every value in all six directions; splits `train`, `val`, `test` by value, head `next`."""

    answers_are_sentences = True

    tokenizer: BytePairs

    def __init__(self, spec: TranslationTask) -> None:
        self.spec = spec
        self.name = "translation"
        self._writers = writers()
        self.directions = tuple(permutations((FIGURES, *spec.languages), 2))
        self._values = _divided(spec)
        texts = {split: self._texts(values) for split, values in self._values.items()}
        self.tokenizer = BytePairs.train(
            (text for pair in texts["train"] for text in pair),
            vocab_size=spec.pieces,
            specials=SPECIALS,
            digits_apart=True,
        )
        self.heads: Mapping[str, int] = {"next": self.tokenizer.vocab_size}
        self._splits = {split: self._encoded(pairs) for split, pairs in texts.items()}

    def training(self) -> TrainSpec:
        """Return settings that take under five minutes on two cores."""
        return replace(
            LEARNING, steps=2_500, batch_size=128, evaluate_every=500, checkpoint_every=500
        )

    def groups(self, split: str, rows: Ints) -> dict[str, list[str]]:
        """Return direction, requested form, number or date, and digits of a number."""
        rows = self._checked(split, rows)
        ways = [self.directions[row % WAYS] for row in rows]
        values = [self._values[split][row // WAYS] for row in rows]
        return {
            "direction": [f"{given} to {wanted}" for given, wanted in ways],
            "language": [wanted for _, wanted in ways],
            "kind": [value.kind for value in values],
            "length": [value.length for value in values],
        }

    def describe(self, split: str, row: int) -> str:
        """Return an example such as `de: 42 -> zweiundvierzig`."""
        (number,) = self._checked(split, np.array([row]))
        return " -> ".join(self._pair(self._values[split][number // WAYS], number % WAYS))

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
        distinct = [*map(set, self._values.values())]
        return sum(map(len, distinct)) - len(set[_Value]().union(*distinct))

    def _pair(self, value: _Value, way: int) -> tuple[str, str]:
        """Return the source and the answer."""
        given, wanted = self.directions[way]
        source = f"{wanted}: {written(value.kind, value.value, given)}"
        return source, written(value.kind, value.value, wanted)

    def _texts(self, values: Sequence[_Value]) -> list[tuple[str, str]]:
        return [self._pair(value, way) for value in values for way in range(WAYS)]

    def _encoded(self, texts: Sequence[tuple[str, str]]) -> _Pairs:
        sides = []
        for side in range(2):
            ids = self.tokenizer.encode_many([pair[side] for pair in texts])
            tokens_NT, valid_NT = pad([[*row, EOS] for row in ids], filler=PAD)
            sides.append((tokens_NT.astype(np.int64), valid_NT.sum(axis=1)))
        (source_NS, source_lengths_N), (answer_NT, answer_lengths_N) = sides
        return _Pairs(source_NS, source_lengths_N, answer_NT, answer_lengths_N)


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
