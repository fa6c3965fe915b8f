"""The sampler: every row once an epoch, the same order whenever and from wherever one asks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.data.rng import Sampler
from glassformer.spec.errors import InputError
from tests.planting import Assign, catches

SIZES = st.tuples(st.integers(1, 300), st.integers(1, 40), st.integers(-5, 5), st.booleans())


def sampler(size, batch_size, seed, bucketed):
    lengths = np.random.default_rng(size).integers(1, 20, size) if bucketed else None
    return Sampler(size, batch_size=batch_size, seed=seed, lengths=lengths)


def every_row_once(size, batch_size, seed, bucketed):
    order = sampler(size, batch_size, seed, bucketed)
    for epoch in range(3):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        batches = [order.rows(step) for step in steps]
        assert sorted(np.concatenate(batches)) == list(range(size))
        assert sum(len(batch) < batch_size for batch in batches) == (size % batch_size > 0)
        assert all(batch.dtype == np.int64 and 0 < len(batch) <= batch_size for batch in batches)


@given(SIZES)
def test_an_epoch_has_every_row_once(arguments):
    every_row_once(*arguments)


@given(SIZES, st.lists(st.integers(0, 1000), min_size=1, max_size=8))
def test_the_step_alone_decides(arguments, steps):
    expected = [sampler(*arguments).rows(step).tolist() for step in steps]  # one fresh for each
    asked = sampler(*arguments)
    assert [asked.rows(step).tolist() for step in steps] == expected


def test_a_resumed_run_goes_on_where_it_stopped():
    whole = Sampler(103, batch_size=8, seed=3)
    resumed = Sampler(103, batch_size=8, seed=3)
    for step in range(1_000_000, 1_000_050):  # no need to go through what was before
        np.testing.assert_array_equal(resumed.rows(step), whole.rows(step))


def test_what_is_handed_out_can_be_changed_without_harm():
    order = Sampler(10, batch_size=4, seed=0)
    first = order.rows(0)
    first[:] = -1
    assert (order.rows(0) >= 0).all()


@catches(
    "every epoch alike",
    "data.rng:Sampler._batches_of",
    Assign("rng"),
    to="{func}({args[0]}, {args[1]})",
)
def test_epochs_and_seeds_differ():
    order = Sampler(50, batch_size=50, seed=0)
    made = {tuple(order.rows(epoch)) for epoch in range(20)}
    made |= {tuple(Sampler(50, batch_size=50, seed=seed).rows(0)) for seed in range(1, 20)}
    assert len(made) == 39
    assert tuple(range(50)) not in made


def test_batches_are_of_like_length():
    lengths = np.random.default_rng(0).integers(1, 33, 5_000)
    plain = Sampler(5_000, batch_size=32, seed=0)
    bucketed = Sampler(5_000, batch_size=32, seed=0, lengths=lengths)

    def padding(order):
        steps = range(order.steps_per_epoch)
        return np.mean([np.ptp(lengths[order.rows(step)]) for step in steps])

    assert padding(plain) > 25
    assert padding(bucketed) < 3
    # and not the short ones first: the mean length of the first tenth is that of all
    first = np.concatenate([bucketed.rows(step) for step in range(15)])
    assert abs(lengths[first].mean() - lengths.mean()) < 8
    # nor the same rows together each time
    again = {tuple(sorted(bucketed.rows(157 + step))) for step in range(157)}
    assert not any(tuple(sorted(bucketed.rows(step))) in again for step in range(157))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sampler(0, batch_size=4, seed=0), "size 0 is below 1"),
        (lambda: Sampler(4, batch_size=0, seed=0), "batch_size 0 is below 1"),
        (lambda: Sampler(4, batch_size=2, seed=0).rows(-1), "step -1 is below 0"),
        (lambda: Sampler(4, batch_size=2, seed=0, lengths=np.ones(3)), "for 4 rows"),
    ],
)
def test_bad_samplers_are_named(make, words):
    with pytest.raises(InputError, match=words):
        make()
