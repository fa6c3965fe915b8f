"""The contract of a task: numbered examples in splits, batches, and the truth about them.

Random draws repeat examples, so it is the distinct examples that are split: eight in ten train, one
is evaluated during training (`val`), one afterwards (`test`). Targets are shifted here and nowhere
else: the decoder's input is its target, one position later.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Batch, Bools, Ints, Source
from glassformer.data.rng import Sampler, digest
from glassformer.data.tokenizers.own import tokenizer_files
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.execution import check_memory
from glassformer.spec.model import ModelSpec
from glassformer.spec.train import TrainSpec

# B batch, T length, V vocabulary

#: The heads that a model may have.
HEADS = ("next", "class", "state", "answer")
#: Examples that the defaults of a task read at once.
_CHUNK = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Oracle:
    """The truth about a batch, at every position (B, T) or for every sequence (B,).

    entropy in nats of the true answer's distribution (0 where it is certain, and on PAD);
    `probabilities` the distribution itself, (B, T, V) or (B, V); `legal` likewise, bool, the
    answers that can occur at all. On PAD nothing is probable and nothing is legal.

    A model's cross-entropy against `probabilities` less `entropy` is exactly its divergence from
    the truth: never negative, 0 for a perfect model, without the noise of the sampled targets.
    """

    entropy: NDArray[np.float64]
    probabilities: NDArray[np.float64] | None = None
    legal: NDArray[np.bool_] | None = None

    def excess(self, log_probabilities: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Return a model's cross-entropy against the truth less its entropy, (B, T) or (B,).

        Infinite where the model rules out what can happen; 0 on PAD.
        """
        truth = self._distribution()
        terms = np.where(truth > 0, truth * np.where(truth > 0, log_probabilities, 0.0), 0.0)
        missing: NDArray[np.float64] = -terms.sum(axis=-1) - self.entropy
        return missing

    def is_legal(self, answers: Ints) -> NDArray[np.bool_]:
        """Return True where an answer, one at each position, can occur."""
        legal = self._distribution() > 0 if self.legal is None else self.legal
        known = np.minimum(answers, legal.shape[-1] - 1)
        found = np.take_along_axis(legal, known[..., None], axis=-1)[..., 0]
        possible: NDArray[np.bool_] = found & (answers < legal.shape[-1])
        return possible

    def legal_mass(self, log_probabilities: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Return a model's probability of legal answers, (B, T) or (B,); 0 on PAD."""
        legal = self._distribution() > 0 if self.legal is None else self.legal
        mass: NDArray[np.float64] = (np.exp(log_probabilities) * legal).sum(axis=-1)
        return mass

    def _distribution(self) -> NDArray[np.float64]:
        if self.probabilities is None:
            raise InputError("this oracle knows the entropy only, not the distribution")
        return self.probabilities


class Order(Protocol):
    """The rows of every batch of a training, by its number: nothing else needs to be saved."""

    def rows(self, step: int) -> NDArray[np.int64]:
        """Return the rows of the batch of this step, counted from 0."""


class Task(ABC):
    """Examples by split and number. The same spec gives the same examples, on every machine.

    A task must set `tokenizer` and `heads` and define `sizes` and `batch`; everything else has a
    default that a task replaces when it knows better.
    """

    #: Shown in lists and recorded with a run; the class's name unless set.
    name: str
    #: Names of the tokens, and what a checkpoint stores as `tokenizer.json`.
    tokenizer: Tokenizer
    #: The targets' heads, and how many classes each predicts.
    heads: Mapping[str, int]
    #: Examples are running text: a run records continuations of held-out ones.
    is_running_text: ClassVar[bool] = False
    #: Answers are sentences: decoded ones are scored by chrF and BLEU as well.
    answers_are_sentences: ClassVar[bool] = False

    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """Return the number of examples in each split: train, val, and the task's own."""

    @abstractmethod
    def batch(self, split: str, rows: Ints) -> Batch:
        """Return these examples, padded to the longest, with targets by head and loss weights."""

    def lengths(self, split: str) -> NDArray[np.int64]:
        """Return the number of tokens of each example, for batches of similar lengths."""
        counts = [batch.valid.sum(axis=1) for batch in self._batches(split)]
        return np.concatenate(counts).astype(np.int64)

    def longest(self) -> int:
        """Return the number of tokens of the longest example of any split."""
        return max(int(self.lengths(split).max()) for split, size in self.sizes().items() if size)

    def order(self, *, batch_size: int, seed: int) -> Order:
        """Return the rows of every batch: a permutation each epoch, similar lengths together."""
        lengths = self.lengths("train")
        return Sampler(self.sizes()["train"], batch_size=batch_size, seed=seed, lengths=lengths)

    def files(self) -> Mapping[str, bytes]:
        """Return the files that a checkpoint keeps of the task: its tokenizer."""
        return tokenizer_files(self.tokenizer)

    def groups(self, split: str, rows: Ints) -> Mapping[str, list[str]]:
        """Return labels, one per row, by which results are broken down: {"length": ["3", "7"]}."""
        return {}

    def confusions(
        self, split: str, rows: Ints, answers: NDArray[np.int64]
    ) -> Mapping[str, list[tuple[str, str]]]:
        """Return pairs (true label, predicted label), one per row; {} if there are no labels.

        `answers` are the most likely tokens of the first head.
        """
        return {}

    def oracle(self, split: str, rows: Ints) -> Oracle | None:
        """Return the true distribution of `batch(split, rows)`; None where it is unknown (text)."""
        return None

    def predicts_tokens(self, head: str) -> bool:
        """Return True if the classes of a head are tokens, so that they have a text."""
        counted = self.heads.get(head) == self.tokenizer.vocab_size
        return head == "next" or (head == "answer" and counted)

    def describe(self, split: str, row: int) -> str:
        """Return one example as people write it."""
        batch = self.batch(split, np.array([row]))
        return self.tokenizer.decode([int(i) for i in batch.tokens[0][batch.valid[0]]])

    def model(self) -> ModelSpec | None:
        """Return the model to train by default; None leaves the choice to the recipe."""
        return None

    def training(self) -> TrainSpec | None:
        """Return the default training settings; None leaves the choice to the recipe."""
        return None

    def notes(self) -> list[str]:
        """Return remarks that a person should read before training."""
        return []

    def facts(self) -> Mapping[str, Any]:
        """Return facts for the run's record: JSON values, and a hash of every example."""
        return {
            "task": self.name,
            "sizes": dict(self.sizes()),
            "sha256": digest(
                array
                for split, size in self.sizes().items()
                if size
                for batch in self._batches(split)
                for array in _arrays(batch)
            ),
        }

    def _batches(self, split: str) -> Iterator[Batch]:
        size = self.sizes()[split]
        for first in range(0, size, _CHUNK):
            yield self.batch(split, np.arange(first, min(first + _CHUNK, size)))


def check_task(task: Task) -> None:
    """Require what training relies on, naming what is missing; for users' own tasks."""
    for name in ("tokenizer", "heads"):
        if not hasattr(task, name):
            raise InputError(f"the task has no `{name}`", hint=f"set self.{name} in __init__")
    heads, sizes = dict(task.heads), dict(task.sizes())
    unknown = sorted(set(heads) - set(HEADS))
    if unknown or not heads:
        raise InputError(
            f"the task's heads are {', '.join(heads) or 'none'}",
            hint=f"a model has heads called {', '.join(HEADS)}",
        )
    for head, count in heads.items():
        if type(count) is not int or count < 1:
            raise InputError(
                f"the head '{head}' has {count!r} classes", hint="a whole number of at least 1"
            )
    vocab_size = task.tokenizer.vocab_size
    if heads.get("next", vocab_size) != vocab_size:
        raise InputError(
            f"the head 'next' has {heads['next']} classes, the tokenizer {vocab_size} tokens",
            hint="the next token is any token: self.heads = {'next': self.tokenizer.vocab_size}",
        )
    for split in ("train", "val"):
        if not isinstance(sizes.get(split), int) or sizes[split] < 1:
            raise InputError(
                f"the task has no examples in '{split}'", hint="sizes() must count them"
            )
    for split, size in sizes.items():
        rows = np.arange(min(size, 3))
        batch = task.batch(split, rows) if size else None
        if not isinstance(batch, Batch | None):
            raise InputError(f"batch('{split}', rows) returned a {type(batch).__name__}")
        if batch is None:
            continue
        if len(batch.tokens) != len(rows):
            raise InputError(f"batch('{split}', rows) has {len(batch.tokens)} rows for {len(rows)}")
        if set(batch.targets) != set(heads):
            raise InputError(
                f"the targets of '{split}' are {', '.join(batch.targets) or 'none'}, "
                f"the heads {', '.join(heads)}"
            )
        _check_ids("tokens", batch.tokens[batch.valid], vocab_size)
        for head, count in heads.items():
            targets = batch.targets[head]
            known = targets[batch.valid] if targets.shape == batch.valid.shape else targets
            _check_ids(f"targets['{head}']", known, count)
        if np.shape(task.lengths(split)) != (size,):
            raise InputError(f"lengths('{split}') must give one number for each of {size} examples")


def _check_ids(name: str, ids: Ints, count: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= count):
        raise InputError(
            f"{name} holds {int(ids.max() if ids.max() >= count else ids.min())}",
            hint=f"numbers are 0 to {count - 1}",
        )


def _arrays(batch: Batch) -> Iterator[NDArray[Any]]:
    """Return everything in a batch that a model could learn from, padding as zeros."""
    yield np.where(batch.valid, batch.tokens, 0)
    yield batch.valid
    yield from (batch.targets[head] for head in sorted(batch.targets))
    if batch.weights is not None:
        yield batch.weights
    if batch.segments is not None:
        yield batch.segments
    if batch.source is not None:
        yield np.where(batch.source.valid, batch.source.tokens, 0)
        yield batch.source.valid


# --- splits of examples, and batches of sources and answers --------------------------------------

# N examples, L positions, B batch, T length

T = TypeVar("T")


def tenths(count: int) -> dict[str, NDArray[np.int64]]:
    """Return numbers 0 … count - 1 by split: of each ten, eight train, then one val and one test.

    Neighbours go to different splits, so groups of examples that stand together are all divided.
    """
    numbers = np.arange(count)
    place = numbers % 10
    return {"train": numbers[place < 8], "val": numbers[place == 8], "test": numbers[place == 9]}


def spread(total: int, capacities: Sequence[int], *, what: str) -> list[int]:
    """Return each cell's share of `total`: as even as possible, none above its capacity."""
    if total > sum(capacities):
        raise InputError(
            f"{total} different {what} asked for, there are {sum(capacities)}",
            hint=f"the nearest valid number of examples is {sum(capacities)}, or allow longer ones",
        )
    counts = [0] * len(capacities)
    left = total
    smallest_first = sorted(range(len(capacities)), key=lambda cell: capacities[cell])
    for done, cell in enumerate(smallest_first):
        counts[cell] = min(capacities[cell], left // (len(capacities) - done))
        left -= counts[cell]
    return counts


def number_of_rows(base: int, length: int, *, most: int = 1 << 62) -> int:
    """Return `base ** length`, or `most` where it is more: such numbers take time to compute."""
    return min(base**length, most) if length * base.bit_length() <= 4096 else most


#: The most positions of examples that are made in memory: minutes, and gigabytes.
MOST_POSITIONS = 200_000_000


def check_room(count: int, length: int) -> None:
    """Refuse examples that would take hours to make, or cannot be held, before any is made."""
    what = f"{count:,} examples of up to {length:,} positions"
    hint = "fewer {task.examples|examples}, or a smaller {task.max_length|max_length}"
    if count * length > MOST_POSITIONS:
        raise InputError(f"{what} are more than {MOST_POSITIONS:,} positions", hint=hint)
    # two rows of int32, and a copy while the splits are made
    check_memory(what, 16 * count * length, hint=hint)


def distinct_rows(
    rng: np.random.Generator, *, count: int, base: int, length: int
) -> NDArray[np.int64]:
    """Sample `count` distinct rows of `length` numbers below `base`, all sets equally likely."""
    room = number_of_rows(base, length)
    assert count <= room, "spread() keeps to what there is"
    if room <= 4 * count:  # so few that all can be listed
        picked = rng.permutation(room)[:count]
        powers = base ** np.arange(length - 1, -1, -1)
        listed: NDArray[np.int64] = picked[:, None] // powers % base
        return listed
    rows_NL = np.empty((0, length), dtype=np.int64)
    while len(rows_NL) < count:
        fresh_NL = rng.integers(0, base, size=(count - len(rows_NL), length))
        rows_NL = np.concatenate([rows_NL, fresh_NL])
        _, first = np.unique(rows_NL, axis=0, return_index=True)
        rows_NL = rows_NL[np.sort(first)]
    return rows_NL


def overlap(splits: Mapping[str, Ints]) -> int:
    """Return the number of distinct rows that occur in more than one split."""
    width = max(rows.shape[1] for rows in splits.values())
    own = [
        np.unique(np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=-1), axis=0)
        for rows in splits.values()
    ]
    together = np.concatenate(own)
    return len(together) - len(np.unique(together, axis=0))


def check_split(split: str, splits: Mapping[str, object]) -> None:
    """Refuse a split that a task does not have."""
    if split not in splits:
        raise InputError(f"no split '{split}'", hint=nearest(split, splits))


def pick(splits: Mapping[str, T], split: str) -> T:
    """Return the split of that name."""
    check_split(split, splits)
    return splits[split]


def checked(rows: Ints, *, size: int, split: str) -> NDArray[np.int64]:
    """Return row numbers as int64; refuse others: a negative one would count from the end."""
    rows = np.asarray(rows)
    if rows.ndim != 1 or len(rows) == 0 or rows.dtype.kind not in "iu":
        raise InputError(
            f"rows of shape {rows.shape} and dtype {rows.dtype}", hint="a list of row numbers"
        )
    if rows.min() < 0 or rows.max() >= size:
        wrong = rows[(rows < 0) | (rows >= size)][0]
        raise InputError(f"there is no row {wrong} in '{split}'", hint=f"0 to {size - 1}")
    return rows.astype(np.int64)


def padded_to_longest(rows_NT: Ints, lengths_N: Ints) -> tuple[NDArray[np.int64], Bools]:
    """Return tokens_BT and valid_BT, cut to the longest of these rows."""
    width = int(lengths_N.max())
    return rows_NT[:, :width].astype(np.int64), np.arange(width) < lengths_N[:, None]


# N rows, B the same, cut to the longest of them, S source length, T answer length

PAD, BOS, EOS = range(3)


def answered_batch(
    source_NS: Ints, source_lengths_N: Ints, *, answer_NT: Ints, answer_lengths_N: Ints
) -> Batch:
    """Return a batch: the source; BOS and the answer; the answer and EOS as target of `next`."""
    source_BS, source_valid_BS = padded_to_longest(source_NS, source_lengths_N)
    next_BT, valid_BT = padded_to_longest(answer_NT, answer_lengths_N)
    # The decoder's input at a position is its target at the position before.
    tokens_BT = np.full_like(next_BT, BOS)
    tokens_BT[:, 1:] = next_BT[:, :-1]
    tokens_BT[~valid_BT] = PAD
    return Batch(
        tokens=tokens_BT,
        valid=valid_BT,
        targets={"next": next_BT},
        weights=valid_BT.astype(np.float32),
        source=Source(tokens=source_BS, valid=source_valid_BS),
    )
