"""What all tasks have in common: the protocol, the same bytes each time, nothing hidden."""

import json
import subprocess
import sys
import types

import numpy as np
import pytest

from glassformer.data.build_task import build_task
from glassformer.data.rng import digest, hash_rows, stream
from glassformer.data.task import Oracle, distinct_rows, overlap, spread, tenths
from glassformer.data.tokenizers.own import tokenizer_from_json
from glassformer.spec.errors import InputError
from glassformer.spec.tasks import (
    CopyingTask,
    DigitsTask,
    FsmTask,
    HopsTask,
    RecallTask,
    SequenceTask,
    TextTask,
    TranslationTask,
)

SPECS = {
    "digits": DigitsTask(examples=1_000),
    "copy": SequenceTask(operation="copy", examples=1_000),
    "reverse": SequenceTask(operation="reverse", examples=1_000),
    "sort": SequenceTask(operation="sort", examples=1_000),
    "parity": FsmTask(examples=2_000),
    "random": FsmTask(machine="random-5", max_length=32, examples=2_000),
    "permutations": FsmTask(machine="permutations-4", examples=2_000),
    "recall": RecallTask(examples=1_000),
    "copying": CopyingTask(examples=1_000),
    "hops": HopsTask(examples=1_000),
    "translation": TranslationTask(examples=900),
    "text": TextTask(path=types.__file__, length=16, vocab_size=300),
}
TASKS = {name: build_task(spec) for name, spec in SPECS.items()}
everyone = pytest.mark.parametrize("name", SPECS)


def some(task, split):
    return np.arange(min(97, task.sizes()[split]))


@everyone
def test_batches_have_one_shape_everywhere(name):
    task = TASKS[name]
    assert {"train", "val"} <= set(task.sizes())
    for split, size in task.sizes().items():
        rows = some(task, split)
        batch = task.batch(split, rows)
        lengths = task.lengths(split)
        assert lengths.shape == (size,)
        np.testing.assert_array_equal(batch.valid.sum(axis=1), lengths[rows])
        assert batch.valid.shape[1] == lengths[rows].max()  # to the longest, and no more
        assert batch.tokens.dtype == np.int64
        assert 0 <= batch.tokens.min() <= batch.tokens.max() < task.tokenizer.vocab_size
        assert set(batch.targets) == set(task.heads)
        for head, target in batch.targets.items():
            assert target.dtype == np.int64
            assert 0 <= target.min() <= target.max() < task.heads[head]
        assert batch.weights.dtype == np.float32
        assert set(np.unique(batch.weights)) <= {0.0, 1.0}
        if batch.weights.ndim == 2:
            assert (batch.weights[~batch.valid] == 0).all()


@everyone
def test_a_batch_is_its_rows_one_by_one(name):
    task = TASKS[name]
    rows = np.array([5, 0, 11, 5])
    batch = task.batch("val", rows)
    truth = task.oracle("val", rows)
    for place, row in enumerate(rows):
        alone = task.batch("val", np.array([row]))
        width = alone.tokens.shape[1]
        np.testing.assert_array_equal(batch.tokens[place, :width], alone.tokens[0])
        for head, target in alone.targets.items():
            together = batch.targets[head][place]
            np.testing.assert_array_equal(
                together[:width] if together.ndim else together, target[0]
            )
        if truth is not None:
            one = task.oracle("val", np.array([row]))
            np.testing.assert_array_equal(truth.entropy[place].ravel()[:width], one.entropy[0])


@everyone
def test_the_oracle_knows_the_targets(name):
    task = TASKS[name]
    head = next(iter(task.heads))
    for split in task.sizes():
        rows = some(task, split)
        truth = task.oracle(split, rows)
        if name == "text":
            assert truth is None
            continue
        batch = task.batch(split, rows)
        target = batch.targets[head]
        picked = np.take_along_axis(truth.probabilities, target[..., None], -1)[..., 0]
        where = batch.valid if target.ndim == 2 else slice(None)
        assert (picked[where] > 0).all()
        np.testing.assert_allclose(truth.probabilities.sum(-1)[where], 1.0)
        assert truth.entropy.shape == target.shape
        np.testing.assert_array_equal(truth.legal, truth.probabilities > 0)


@everyone
def test_labels_facts_and_descriptions(name):
    task = TASKS[name]
    for split in task.sizes():
        rows = some(task, split)
        assert all(len(labels) == len(rows) for labels in task.groups(split, rows).values())
        assert isinstance(task.describe(split, 3), str)
    facts = json.loads(json.dumps(task.facts(), allow_nan=False))
    assert facts["sizes"] == task.sizes()
    assert len(facts["sha256"]) == 64
    assert facts.get("overlap", 0) == 0
    stored = tokenizer_from_json(task.tokenizer.to_json())
    assert stored.vocab_size == task.tokenizer.vocab_size


@everyone
def test_bad_splits_and_rows_are_named(name):
    task = TASKS[name]
    for call in (task.batch, task.groups, task.oracle):
        with pytest.raises(InputError, match="no split 'tarin'"):
            call("tarin", np.arange(2))
        with pytest.raises(InputError, match="there is no row -1"):
            call("train", np.array([3, -1]))
    with pytest.raises(InputError, match="no split"):
        task.lengths("tarin")
    with pytest.raises(InputError, match="there is no row"):
        task.describe("val", 10**9)


def test_something_else_is_no_task():
    with pytest.raises(
        InputError, match="task: str is not one of CopyingTask, DigitsTask, FinetuneTask"
    ):
        build_task("digits")


def test_seeds_make_other_data():
    for spec in (DigitsTask, SequenceTask, FsmTask, TranslationTask):
        hashes = {build_task(spec(examples=2_000, seed=s)).facts()["sha256"] for s in (-1, 0, 1)}
        assert len(hashes) == 3


def test_other_processes_make_the_same_bytes_without_torch():
    program = (
        "import sys\n"
        "from glassformer.data.build_task import build_task\n"
        "from glassformer.spec.tasks import *\n"
        "for spec in (DigitsTask(examples=1000), SequenceTask(operation='sort', examples=1000),\n"
        "             FsmTask(examples=2000)):\n"
        "    print(build_task(spec).facts()['sha256'])\n"
        "assert 'torch' not in sys.modules and 'tokenizers' not in sys.modules\n"
    )
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        expected = [TASKS[name].facts()["sha256"] for name in ("digits", "sort", "parity")]
        assert done.stdout.split() == expected


# --- what they are made with --------------------------------------------------------------------


def test_streams_and_hashes_are_by_name():
    first = stream(3, "a", 1).random(4)
    np.testing.assert_array_equal(stream(3, "a", 1).random(4), first)
    for other in (stream(4, "a", 1), stream(3, "b", 1), stream(3, "a", 2), stream(3, "a")):
        assert (other.random(4) != first).all()
    # PCG64 and SHA-256 are the same everywhere: this number must be, too.
    assert stream(0, "anywhere").integers(1 << 62) == 1544251790716367202


def test_row_hashes_read_the_row_and_nothing_behind_it():
    rows = stream(0, "rows").integers(0, 3, (500, 6))
    lengths = stream(0, "lengths").integers(0, 7, 500)
    hashed = hash_rows(rows, lengths_N=lengths, seed=1)
    changed = np.where(np.arange(6) < lengths[:, None], rows, -1)
    wider = np.pad(changed, ((0, 0), (0, 3)))
    np.testing.assert_array_equal(hash_rows(wider, lengths_N=lengths, seed=1), hashed)
    keys = {tuple(row[:n]) for row, n in zip(rows.tolist(), lengths, strict=True)}
    assert len(set(hashed.tolist())) == len(keys)
    assert (hash_rows(rows, lengths_N=lengths, seed=2) != hashed).all()
    parts = np.bincount((hash_rows(np.arange(10_000)[:, None], lengths_N=np.ones(10_000, int),
                                   seed=0) % np.uint64(10)).astype(int))  # fmt: skip
    assert parts.min() > 850


def test_digests_see_types_shapes_and_values():
    array = np.arange(6, dtype=np.int16)
    made = {
        digest([array]),
        digest([array.reshape(2, 3)]),
        digest([array.astype(np.int32)]),
        digest([array + 1]),
        digest([array, array]),
    }
    assert len(made) == 5
    assert digest([array.astype(">i2")]) == digest([array])


def test_tenths_and_spread():
    parts = tenths(23)
    assert {split: len(numbers) for split, numbers in parts.items()} == {
        "train": 19,
        "val": 2,
        "test": 2,
    }
    assert sorted(np.concatenate(list(parts.values()))) == list(range(23))
    assert spread(10, [1, 100, 2], what="things") == [1, 7, 2]
    assert spread(10, [100, 100, 100], what="things") == [3, 3, 4]
    with pytest.raises(InputError, match="11 different things asked for, there are 10"):
        spread(11, [4, 6], what="things")


@pytest.mark.parametrize(
    ("count", "base", "length"), [(8, 2, 3), (5, 2, 3), (300, 10, 9), (0, 3, 2)]
)
def test_distinct_rows_are_distinct(count, base, length):
    rows = distinct_rows(stream(0, "x"), count=count, base=base, length=length)
    assert rows.shape == (count, length)
    assert len(np.unique(rows, axis=0)) == count
    assert count == 0 or 0 <= rows.min() <= rows.max() < base


def test_overlap_is_counted():
    a, b = np.array([[1, 2], [3, 4], [1, 2]]), np.array([[3, 4, -1], [5, 6, 7]])
    assert overlap({"a": a, "b": b}) == 1
    assert overlap({"a": a, "b": b[1:]}) == 0


def test_an_oracle_of_entropy_alone_says_so():
    with pytest.raises(InputError, match="knows the entropy only"):
        Oracle(entropy=np.zeros(2)).excess(np.zeros((2, 3)))


def test_excess_is_infinite_where_the_possible_is_ruled_out():
    truth = Oracle(entropy=np.full(1, np.log(2)), probabilities=np.array([[0.5, 0.5, 0.0]]))
    assert truth.excess(np.array([[0.0, -np.inf, -np.inf]])) == np.inf
    certain = truth.excess(np.log(np.array([[0.25, 0.25, 0.5]])))
    np.testing.assert_allclose(certain, np.log(2))
    np.testing.assert_allclose(truth.legal_mass(np.log(np.array([[0.25, 0.25, 0.5]]))), 0.5)
