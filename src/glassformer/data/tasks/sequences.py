"""Copy, reverse or sort a row of symbols, with an encoder and a decoder.

The encoder reads `3 1 4 EOS`, the decoder `BOS 4 1 3`; its targets are `4 1 3 EOS`. EOS at the
source's end lets a model find the end by content. Splits are by unique source.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Batch, Ints
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
from glassformer.data.tokenizers.vocab import Vocab
from glassformer.spec import presets
from glassformer.spec.model import ModelSpec
from glassformer.spec.tasks import SequenceTask
from glassformer.spec.train import AdamW, CosineSchedule, TrainSpec

# N examples, B batch, T target tokens, S source tokens, V vocabulary

FIRST = EOS + 1  # the id of symbol 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """One split: source and answer, as ids of symbols with EOS after them, padded; their length."""

    source_NS: NDArray[np.int32]
    answer_NT: NDArray[np.int32]
    lengths_N: NDArray[np.int64]


class Sequences(Task):
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
        self._splits: dict[str, _Rows] = {}
        for split, numbers in tenths(spec.examples).items():
            self._splits[split] = _chosen(every, rng.permutation(numbers))
        if spec.longer:
            shortest, longest = spec.max_length + 1, spec.max_length + spec.longer
            room = sum(number_of_rows(symbols, n) for n in range(shortest, longest + 1))
            count = min(-(-spec.examples // 10), room)
            longer = self._make(count, shortest, longest)
            self._splits["longer"] = _chosen(longer, rng.permutation(count))
        self._overlap = overlap({name: rows.source_NS for name, rows in self._splits.items()})
        assert self._overlap == 0, f"{self._overlap} sources are in two splits"

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
        """Return settings that learn every operation in a few minutes."""
        return TrainSpec(
            steps=1_000,
            batch_size=64,
            lr=2e-3,
            schedule=CosineSchedule(warmup=100),
            optimizer=AdamW(beta2=0.98, eps=1e-9),
        )

    def sizes(self) -> dict[str, int]:
        """Return the number of examples in each split."""
        return {split: len(rows.lengths_N) for split, rows in self._splits.items()}

    def lengths(self, split: str) -> NDArray[np.int64]:
        """Return the number of tokens of each example, on either side: its symbols and one more."""
        return pick(self._splits, split).lengths_N + 1

    def batch(self, split: str, rows: Ints) -> Batch:
        """Return the source, BOS and the answer, and the answer and EOS as the target of `next`."""
        kept = self._take(split, rows)
        return answered_batch(
            kept.source_NS,
            kept.lengths_N + 1,
            answer_NT=kept.answer_NT,
            answer_lengths_N=kept.lengths_N + 1,
        )

    def groups(self, split: str, rows: Ints) -> dict[str, list[str]]:
        """Return each row's number of symbols."""
        return {"length": [str(length) for length in self._take(split, rows).lengths_N]}

    def oracle(self, split: str, rows: Ints) -> Oracle:
        """Return the truth: entropy (B, T) 0, and (B, T, V) 1 on the target; 0 on PAD."""
        kept = self._take(split, rows)
        next_BT, valid_BT = padded_to_longest(kept.answer_NT, kept.lengths_N + 1)
        probabilities_BTV = np.eye(self.spec.vocab_size)[next_BT] * valid_BT[:, :, None]
        return Oracle(
            entropy=np.zeros(next_BT.shape),
            probabilities=probabilities_BTV,
            legal=probabilities_BTV > 0,
        )

    def describe(self, split: str, row: int) -> str:
        """Return an example such as `3 1 4 -> 4 1 3`."""
        kept = self._take(split, np.array([row]))
        length = kept.lengths_N[0]
        source, answer = kept.source_NS[0, :length], kept.answer_NT[0, :length]
        return f"{self.tokenizer.detokenize(source)} -> {self.tokenizer.detokenize(answer)}"

    def facts(self) -> dict[str, Any]:
        """Return sizes, examples of each length by split, overlap of the splits, a hash."""
        by_length = {
            split: {
                str(length): int(count)
                for length, count in zip(
                    *np.unique(rows.lengths_N, return_counts=True), strict=True
                )
            }
            for split, rows in self._splits.items()
        }
        arrays = [
            array
            for rows in self._splits.values()
            for array in (rows.source_NS, rows.answer_NT, rows.lengths_N)
        ]
        return {
            "task": self.name,
            "sizes": self.sizes(),
            "overlap": self._overlap,
            "lengths": by_length,
            "vocab": list(self.tokenizer.names),
            "sha256": digest(arrays),
        }

    def _make(self, count: int, shortest: int, longest: int) -> _Rows:
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
        return _Rows(source_NS, answer_NT, np.repeat(np.array(lengths), counts))

    def _take(self, split: str, rows: Ints) -> _Rows:
        kept = pick(self._splits, split)
        return _chosen(kept, checked(rows, size=len(kept.lengths_N), split=split))


def _chosen(rows: _Rows, numbers: Ints) -> _Rows:
    return _Rows(rows.source_NS[numbers], rows.answer_NT[numbers], rows.lengths_N[numbers])


def _rearranged(rows: Ints, kind: str) -> Ints:
    """Return rows of one length, each copied, reversed or sorted."""
    match kind:
        case "copy":
            return rows
        case "reverse":
            return rows[:, ::-1]
        case _:
            return np.sort(rows, axis=1)
