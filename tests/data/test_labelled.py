"""Recall, selective copying, hops: every label is what a reader of the row would say."""

import numpy as np
import pytest

from glassformer.data.automata.library import machine_named
from glassformer.data.build_task import build_task
from glassformer.spec.errors import InputError
from glassformer.spec.tasks import CopyingTask, HopsTask, RecallTask
from tests.planting import Call, catches


def answered(words, spec):
    """Return the label of each position, None where there is none, by reading the words."""
    found = [None] * len(words)
    if isinstance(spec, RecallTask):
        value = {}
        for at, word in enumerate(words):
            if word.startswith("k") and words[at - 1] == "?" and at:
                found[at] = value[word]
            elif word.startswith("k"):
                value[word] = words[at + 1]
    elif isinstance(spec, CopyingTask):
        kept = [word for word in words if word not in ("-", "|")]
        behind = words.index("|") + 1
        found[behind:] = kept
    else:
        for at in range(len(words)):
            place = at
            for _ in range(spec.hops):
                before = [i for i in range(place) if words[i] == words[place]]
                if not before:
                    break
                place = before[-1] + 1
            else:
                found[at] = words[place]
    return found


SPECS = {
    "recall": RecallTask(min_pairs=2, max_pairs=5, keys=11, values=3, examples=300, longer=3),
    "copying": CopyingTask(
        marked=3, symbols=5, min_length=3, max_length=13, examples=300, longer=7
    ),
    "hops": HopsTask(symbols=3, min_length=11, max_length=19, examples=300, longer=5),
    "one hop": HopsTask(hops=1, symbols=7, min_length=13, max_length=17, examples=300, longer=5),
    "five hops": HopsTask(hops=5, symbols=3, min_length=23, max_length=29, examples=100, longer=2),
}


@catches(
    "a hop ends at the copy, not behind it",
    "data.tasks.labelled:Hops.draw",
    Call("take_along_axis"),
    case="hops",
    to="np.maximum({it} - 1, 0)",
)
@catches(
    "answers in the order of the pairs",
    "data.tasks.labelled:Recall.draw",
    Call("take_along_axis", of="values_NP"),
    case="recall",
    to="values_NP",
)
@pytest.mark.parametrize("name", SPECS)
def test_labels_follow_from_the_row(name):
    spec = SPECS[name]
    task = build_task(spec)
    for split, size in task.sizes().items():
        batch = task.batch(split, np.arange(size))
        for row in range(size):
            valid = batch.valid[row]
            words = [task.tokenizer.names[token] for token in batch.tokens[row][valid]]
            asked = batch.weights[row][valid] > 0
            labels = batch.targets["class"][row][valid]
            said = [str(at - 1) if yes else None for at, yes in zip(labels, asked, strict=True)]
            assert said == answered(words, spec), (name, words)
            assert (batch.weights[row][~valid] == 0).all()


@pytest.mark.parametrize("name", SPECS)
def test_longer_examples_are_longer_and_none_is_in_two_splits(name):
    task = build_task(SPECS[name])
    sizes = {
        split: [int(label) for label in next(iter(task.groups(split, np.arange(size)).values()))]
        for split, size in task.sizes().items()
    }
    assert min(sizes["longer"]) == max(max(sizes[s]) for s in ("train", "val", "test")) + 1
    rows = [
        tuple(task.batch(split, np.array([row])).tokens[0])
        for split, size in task.sizes().items()
        for row in range(size)
    ]
    assert len(set(rows)) == len(rows)


def test_symbols_are_evenly_drawn():
    task = build_task(HopsTask(symbols=5, min_length=31, max_length=31, examples=2_000, longer=0))
    batch = task.batch("train", np.arange(1_600))
    shares = np.bincount(batch.tokens.ravel(), minlength=6)[1:] / batch.tokens.size
    np.testing.assert_allclose(shares, 0.2, atol=0.01)
    assert (batch.tokens[:, 1:] != batch.tokens[:, :-1]).all()


def test_too_few_different_rows_and_keys_are_named():
    with pytest.raises(InputError, match="different examples of pairs 1 were not found"):
        build_task(RecallTask(min_pairs=1, max_pairs=1, keys=2, values=2, examples=50, longer=0))
    with pytest.raises(InputError, match="keys 8 is below 16"):
        RecallTask(keys=8)
    with pytest.raises(InputError, match="min_length 2 is below 6"):
        CopyingTask(min_length=2)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_machine_of_permutations_composes_swaps(n):
    machine = machine_named(f"permutations-{n}")
    rng = np.random.default_rng(n)
    assert machine.n_states == np.prod(np.arange(1, n + 1)) == len(machine.reachable())
    for _ in range(40):
        symbols = rng.integers(0, n - 1, size=23)
        order, state = list(range(n)), 0
        for at in symbols.tolist():
            order[at], order[at + 1] = order[at + 1], order[at]
            state = machine.transitions[state][at]
        assert machine.class_names[machine.classes[state]] == str(order.index(0))
    back = machine.transitions[machine.transitions[0][0]][0]
    assert back == 0  # a swap undoes itself
