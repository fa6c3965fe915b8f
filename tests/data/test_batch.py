"""Batch and pad: one mask convention, checked where it enters."""

import numpy as np
import pytest

from glassformer.data.batch import Batch, Source, pad
from glassformer.spec.errors import InputError

TOKENS = np.arange(15).reshape(3, 5)
VALID = np.ones((3, 5), dtype=bool)


def test_padding_on_either_side():
    tokens, valid = pad([[1, 2, 3], [4], [5, 6]], filler=9)
    np.testing.assert_array_equal(tokens, [[1, 2, 3], [4, 9, 9], [5, 6, 9]])
    np.testing.assert_array_equal(valid, [[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    tokens, valid = pad([[1, 2, 3], [4], [5, 6]], side="left", filler=9)
    np.testing.assert_array_equal(tokens, [[1, 2, 3], [9, 9, 4], [9, 5, 6]])
    np.testing.assert_array_equal(valid, [[1, 1, 1], [0, 0, 1], [0, 1, 1]])
    assert tokens.dtype == np.int64
    assert valid.dtype == np.bool_


@pytest.mark.parametrize("side", ["right", "left"])
def test_what_went_in_is_what_is_valid(side):
    sequences = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]
    batch = Batch.of(sequences, side=side)
    assert [list(row[valid]) for row, valid in zip(batch.tokens, batch.valid, strict=True)] == (
        sequences
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pad([]), "an empty batch"),
        (lambda: pad([[1], [], [2]]), "sequence 1 of the batch has no tokens"),
        (lambda: pad([[1], [2, 3]], side="rihgt"), "side 'rihgt'"),
        (lambda: pad([[1], [2.5]]), "sequence 1 of the batch"),
        (lambda: Batch(tokens=TOKENS[:0], valid=VALID[:0]), "tokens is empty: shape (0, 5)"),
        (lambda: Batch(tokens=TOKENS[:, :0], valid=VALID[:, :0]), "tokens is empty: shape (3, 0)"),
        (lambda: Batch(tokens=TOKENS[0], valid=VALID[0]), "tokens has shape (5,)"),
        (lambda: Batch(tokens=TOKENS / 2, valid=VALID), "dtype float64"),
        (lambda: Batch(tokens=TOKENS, valid=VALID[:, :4]), "valid has shape (3, 4)"),
        (lambda: Batch(tokens=TOKENS, valid=VALID.astype(int)), "valid has dtype int64"),
        (lambda: Batch(tokens=TOKENS, valid=VALID, segments=TOKENS[:2]), "segments has shape"),
        (
            lambda: Batch(tokens=TOKENS, valid=VALID, targets={"next": TOKENS[:, 1:]}),
            "targets['next'] has shape (3, 4)",
        ),
        (
            lambda: Batch(tokens=TOKENS, valid=VALID, weights=np.ones((5, 3))),
            "weights has shape (5, 3)",
        ),
        (
            lambda: Batch(tokens=TOKENS, valid=VALID, targets={"next": TOKENS}, weights=np.ones(3)),
            "weights has shape (3,)",
        ),
        (lambda: Batch(tokens=TOKENS, valid=VALID, weights=-np.ones(3)), "a number below 0"),
        (lambda: Batch(tokens=TOKENS, valid=VALID, weights=np.full(3, np.nan)), "not finite"),
        (
            lambda: Batch(
                tokens=TOKENS, valid=VALID, source=Source(tokens=TOKENS[:2], valid=VALID[:2])
            ),
            "2 source sequences for 3 target ones",
        ),
        (lambda: Source(tokens=TOKENS, valid=VALID[:2]), "source.valid has shape (2, 5)"),
        (lambda: Source(tokens=TOKENS[:0], valid=VALID[:0]), "source.tokens is empty"),
    ],
)
def test_bad_batches_are_named(make, words):
    with pytest.raises(InputError) as caught:
        make()
    assert words in str(caught.value)


def test_good_batches_pass():
    batch = Batch(
        tokens=TOKENS,
        valid=VALID,
        targets={"next": TOKENS, "answer": TOKENS[:, 0]},
        weights=np.ones((3, 5)),
        segments=np.zeros((3, 5), dtype=int),
        source=Source(tokens=TOKENS[:, :2], valid=VALID[:, :2]),
    )
    assert batch.source.tokens.shape == (3, 2)
    assert Batch(tokens=TOKENS, valid=VALID, weights=np.ones(3)).segments is None
