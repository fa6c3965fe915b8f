"""The contract of a task: numbered examples in splits, batches, and the truth about them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Batch, Ints
from glassformer.data.rng import digest
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.spec.errors import InputError
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

    def legal_mass(self, log_probabilities: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Return a model's probability of legal answers, (B, T) or (B,); 0 on PAD."""
        legal = self._distribution() > 0 if self.legal is None else self.legal
        mass: NDArray[np.float64] = (np.exp(log_probabilities) * legal).sum(axis=-1)
        return mass

    def _distribution(self) -> NDArray[np.float64]:
        if self.probabilities is None:
            raise InputError("this oracle knows the entropy only, not the distribution")
        return self.probabilities


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
    for split in ("train", "val"):
        if not isinstance(sizes.get(split), int) or sizes[split] < 1:
            raise InputError(
                f"the task has no examples in '{split}'", hint="sizes() must count them"
            )
    vocab_size = task.tokenizer.vocab_size
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
