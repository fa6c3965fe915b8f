"""Copy, reverse, sort: the data shifts, sources are unique, longer ones are kept apart."""

import numpy as np
import pytest

from glassformer.data.tasks.seq2seq import Sequences
from glassformer.spec.errors import InputError
from glassformer.spec.tasks import SequenceTask
from tests.planting import Call, catches

KINDS = ("copy", "reverse", "sort")
MEANT = {"copy": list, "reverse": lambda row: row[::-1], "sort": sorted}
SMALL = {
    kind: SequenceTask(
        operation=kind, vocab_size=7, min_length=1, max_length=6, examples=500, longer=2
    )
    for kind in KINDS
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_say_what_the_task_says(kind):
    task = Sequences(SMALL[kind])
    names = task.tokenizer
    for split, size in task.sizes().items():
        batch = task.batch(split, np.arange(size))
        for row in range(size):
            *source, end = batch.source.tokens[row][batch.source.valid[row]].tolist()
            symbols = [int(names.names[token]) for token in source]
            answer = names.tokenize(" ".join(map(str, MEANT[kind](symbols))))
            read = batch.tokens[row][batch.valid[row]].tolist()
            said = batch.targets["next"][row][batch.valid[row]].tolist()
            assert end == names.eos
            assert said == [*answer, names.eos]
            assert read == [names.bos, *answer]  # the same, one place later


@catches(
    "seq2seq PAD weighted",
    "data.task:answered_batch",
    Call("astype"),
    to="np.ones(valid_BT.shape, dtype={args[0]})",
)
def test_padding_has_no_weight():
    task = Sequences(SMALL["reverse"])
    batch = task.batch("train", np.arange(400))
    np.testing.assert_array_equal(batch.weights, batch.valid)
    assert not batch.valid.all()
    assert (batch.tokens[~batch.valid] == task.tokenizer.pad).all()
    assert (batch.source.tokens[~batch.source.valid] == task.tokenizer.pad).all()


def no_source_is_in_two_splits(spec=SMALL["sort"]):
    task = Sequences(spec)
    found = []
    for split, size in task.sizes().items():
        found += [task.describe(split, row).split(" -> ")[0] for row in range(size)]
    assert len(set(found)) == len(found) == spec.examples + task.sizes()["longer"]


def test_no_source_is_in_two_splits():
    no_source_is_in_two_splits()


def test_lengths_are_even_and_longer_is_longer():
    task = Sequences(SequenceTask())
    lengths = {split: task.lengths(split) - 1 for split in task.sizes()}
    assert task.sizes() == {"train": 16_000, "val": 2_000, "test": 2_000, "longer": 2_000}
    assert (lengths["train"].min(), lengths["train"].max()) == (4, 10)
    assert (lengths["longer"].min(), lengths["longer"].max()) == (11, 14)
    for values in lengths.values():
        counts = np.unique(values, return_counts=True)[1]
        assert np.ptp(counts) <= 3
    assert task.describe("val", 0).count("->") == 1


def test_short_lengths_give_all_they_have():
    task = Sequences(SMALL["copy"])  # four symbols: 4, 16, 64, 256, … of each length
    counts = np.unique(np.concatenate([task.lengths(s) for s in ("train", "val", "test")]) - 1,
                       return_counts=True)[1]  # fmt: skip
    assert counts.tolist()[:3] == [4, 16, 64]
    assert counts.sum() == 500
    assert "longer" not in Sequences(SequenceTask(longer=0, examples=100)).sizes()


def test_more_examples_than_there_are():
    with pytest.raises(InputError) as caught:
        Sequences(SequenceTask(vocab_size=5, min_length=1, max_length=3, examples=15))
    assert "15 different sequences asked for, there are 14" in str(caught.value)
