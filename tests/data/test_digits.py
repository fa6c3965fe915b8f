"""Source 003's task: twenty tokens, right answers, unique examples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.data.tasks.digits import (
    VOCAB,
    Digits,
    Example,
    answer_of,
    create_batch,
    detokenize,
    generate_example,
    tokenize,
)
from glassformer.spec.errors import InputError
from glassformer.spec.tasks import OPERATIONS, DigitsTask
from tests.planting import Compare, catches

TASK = Digits(DigitsTask())
SMALL = DigitsTask(max_length=3, examples=777)


def by_words(operation, digits):
    """The answers again, said another way."""
    ordered = sorted(digits)
    return {
        "FIRST": digits[0],
        "SECOND": digits[1],
        "LAST": digits[len(digits) - 1],
        "MAX": ordered[-1],
        "MIN": ordered[0],
        "LENGTH": sum(1 for _ in digits),
        "SUM": int(str(sum(digits))[-1]),
    }[operation]


def parsed(line):
    operation, *digits, separator, answer, end = line.split()
    assert (separator, end) == ("SEP", "EOS")
    return Example(operation, tuple(map(int, digits)), int(answer))


def every_example(task):
    return {
        split: [parsed(task.describe(split, row)) for row in range(size)]
        for split, size in task.sizes().items()
    }


def test_twenty_tokens_and_digits_are_their_own_ids():
    assert VOCAB.vocab_size == 20
    assert tokenize("0 1 2 3 4 5 6 7 8 9") == list(range(10))
    assert VOCAB.names[10:17] == OPERATIONS
    assert {"PAD", "SEP", "EOS"} == set(VOCAB.names[17:])


@given(st.lists(st.integers(0, 19)))
def test_text_round_trips(ids):
    assert tokenize(detokenize(ids)) == ids


@given(st.sampled_from(OPERATIONS), st.lists(st.integers(0, 9), min_size=2, max_size=9))
def test_answers_are_right(operation, digits):
    assert answer_of(operation, digits) == by_words(operation, digits)


@given(st.integers(0, 1000))
def test_generated_examples_are_right_and_in_range(seed):
    example = generate_example(np.random.default_rng(seed), min_length=3, max_length=5)
    assert 3 <= len(example.digits) <= 5
    assert example.answer == by_words(example.operation, example.digits)
    assert tokenize(example.prompt)[-1] == VOCAB.sep


def splits_are_unique_and_right(spec=SMALL):
    made = every_example(Digits(spec))
    together = [example for examples in made.values() for example in examples]
    assert len(set(together)) == len(together) == spec.examples
    assert all(by_words(e.operation, e.digits) == e.answer for e in together)
    return made


@catches("test is val too", "data.task:tenths", Compare("==", nth=1), to="{left} >= 8")
def test_splits_are_unique_and_right():
    made = splits_are_unique_and_right()
    assert {split: len(examples) for split, examples in made.items()} == {
        "train": 623,
        "val": 77,
        "test": 77,
    }


def test_defaults_are_ten_thousand_balanced():
    made = splits_are_unique_and_right(DigitsTask())
    assert TASK.sizes() == {"train": 8000, "val": 1000, "test": 1000}
    counts = TASK.facts()["examples"]
    assert max(counts["operation"].values()) - min(counts["operation"].values()) <= 5
    assert counts["length"]["2"] == 700  # all that there are
    longer = [counts["length"][length] for length in "3456"]
    assert max(longer) - min(longer) <= 7
    for examples in made.values():  # in each split too
        operations = [sum(e.operation == o for e in examples) / len(examples) for o in OPERATIONS]
        assert max(operations) - min(operations) < 0.01


def test_all_examples_can_be_asked_for():
    task = Digits(DigitsTask(max_length=2, examples=300, operations=("SUM", "MAX", "LAST")))
    assert sum(task.sizes().values()) == 300


def batches_are_the_sources_own(rows=range(40)):
    rows = np.array(rows)
    batch = TASK.batch("val", rows)
    expected = create_batch([parsed(TASK.describe("val", int(row))) for row in rows])
    np.testing.assert_array_equal(batch.tokens, expected.tokens)
    np.testing.assert_array_equal(batch.valid, expected.valid)
    np.testing.assert_array_equal(batch.targets["answer"], expected.targets["answer"])
    np.testing.assert_array_equal(batch.weights, expected.weights)


def test_batches_are_the_sources_own():
    batches_are_the_sources_own()
    batches_are_the_sources_own([3])


def test_create_batch_pads_to_the_longest():
    batch = create_batch([Example("MAX", (3, 9, 1), 9), Example("SECOND", (4, 5), 5)])
    assert batch.tokens.shape == (2, 5)
    assert detokenize(batch.tokens[1]) == "SECOND 4 5 SEP PAD"
    assert batch.valid.tolist() == [[True] * 5, [True] * 4 + [False]]
    assert batch.targets["answer"].tolist() == [9, 5]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tokenize("SECNOD 7 3"), "did you mean 'SECOND'?"),
        (lambda: answer_of("MEAN", (1, 2)), "operation 'MEAN' is not one of"),
        (lambda: answer_of("MAX", (1,)), "not two digits or more"),
        (lambda: answer_of("MAX", (1, 12)), "not two digits or more"),
        (lambda: Digits(DigitsTask(max_length=2)), "10000 different digit examples"),
        (lambda: Digits(DigitsTask(max_length=2)), "is 700"),
        (lambda: TASK.batch("tset", np.arange(2)), "did you mean 'test'?"),
        (lambda: TASK.batch("test", np.array([1000])), "no row 1000 in 'test'"),
        (lambda: TASK.batch("test", np.array([-1])), "0 to 999"),
        (lambda: TASK.batch("test", np.array([0.5])), "dtype float64"),
        (lambda: TASK.batch("test", np.arange(0)), "a list of row numbers"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(InputError) as caught:
        make()
    assert words in str(caught.value)


def test_confusions_name_the_digit_and_the_token_that_was_answered():
    task = Digits(DigitsTask(examples=2_000))
    rows = np.arange(50)
    right = task.batch("val", rows).targets["answer"]
    answers = np.where(rows % 2 == 0, right, VOCAB.id("SEP"))
    pairs = task.confusions("val", rows, answers)["answer"]
    assert pairs == [(str(d), str(d) if row % 2 == 0 else "SEP") for row, d in enumerate(right)]


def test_confusions_name_the_operation_that_fits_the_answer():
    task = Digits(DigitsTask(examples=2_000))
    rows = np.arange(50)
    right = task.batch("val", rows).targets["answer"]
    pairs = task.confusions("val", rows, right)["operation"]
    assert all(asked == answered for asked, answered in pairs)
    asked = task.groups("val", rows)["operation"]
    wrong = task.confusions("val", rows, np.full(50, 9))["operation"]
    for row, (question, answered) in enumerate(wrong):
        assert question == asked[row]
        digits = [int(d) for d in task.describe("val", row).split()[1:-3]]
        if answered == "none":
            assert all(answer_of(op, digits) != 9 for op in task.spec.operations)
        else:
            assert answer_of(answered, digits) == 9
