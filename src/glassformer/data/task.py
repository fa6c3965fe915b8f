"""What every task offers: numbered examples in splits, batches, and the truth about them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Batch, Ints
from glassformer.data.tokenizers.vocab import Tokenizer
from glassformer.spec.errors import InputError

# B batch, T length, V vocabulary


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
        """A model's cross-entropy against the truth less the truth's entropy, (B, T) or (B,).

        Infinite where the model rules out what can happen; 0 on PAD.
        """
        truth = self._distribution()
        terms = np.where(truth > 0, truth * np.where(truth > 0, log_probabilities, 0.0), 0.0)
        missing: NDArray[np.float64] = -terms.sum(axis=-1) - self.entropy
        return missing

    def legal_mass(self, log_probabilities: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """How much of a model's probability is on legal answers, (B, T) or (B,); 0 on PAD."""
        legal = self._distribution() > 0 if self.legal is None else self.legal
        mass: NDArray[np.float64] = (np.exp(log_probabilities) * legal).sum(axis=-1)
        return mass

    def _distribution(self) -> NDArray[np.float64]:
        if self.probabilities is None:
            raise InputError("this oracle knows the entropy only, not the distribution")
        return self.probabilities


class Task(Protocol):
    """Examples by split and number. The same spec gives the same examples, on every machine."""

    name: str

    @property
    def tokenizer(self) -> Tokenizer:
        """Names of the tokens, and what a checkpoint stores as `tokenizer.json`."""

    @property
    def heads(self) -> Mapping[str, int]:
        """The targets' heads, and how many answers each has to choose from."""

    def sizes(self) -> Mapping[str, int]:
        """How many examples each split has: train, val, and others by the task's own names."""

    def lengths(self, split: str) -> NDArray[np.int64]:
        """Tokens of each example, for batches of like lengths."""

    def batch(self, split: str, rows: Ints) -> Batch:
        """Those examples, padded to the longest of them, with targets by head and loss weights."""

    def groups(self, split: str, rows: Ints) -> Mapping[str, list[str]]:
        """Labels, one a row, by which results are broken down: {"length": ["3", "7"]}."""

    def confusions(
        self, split: str, rows: Ints, answers: NDArray[np.int64]
    ) -> Mapping[str, list[tuple[str, str]]]:
        """What was asked and what the answers look like, one pair a row; {} where there is no such
        reading. `answers` are the likeliest tokens of the first head.
        """

    def oracle(self, split: str, rows: Ints) -> Oracle | None:
        """The truth about `batch(split, rows)`, or None where nobody knows it (text)."""

    def describe(self, split: str, row: int) -> str:
        """One example as people write it."""

    def facts(self) -> Mapping[str, Any]:
        """What is known of the task as a whole, for the run's record: JSON values and a hash."""
