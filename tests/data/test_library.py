"""Walks: probabilities, draws and entropies against going through every string."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from glassformer.data.automata.construct import machine_of_regex
from glassformer.data.automata.library import Walk, brackets, machine_named, parity, weighted_walk
from glassformer.data.automata.machine import Machine
from glassformer.spec.errors import InputError
from tests.data.strategies import machines
from tests.planting import Name, catches


def every_string(walk, cut):
    """(symbols, following event, probability) of all strings, one step at a time."""
    machine, end = walk.machine, len(walk.machine.alphabet)

    def further(symbols, state, chance):
        for event, p in enumerate(walk.after(len(symbols))[state]):
            if p == 0:
                continue
            if event == end or len(symbols) == cut:
                yield symbols, event, chance * p
            else:
                target = machine.transitions[state][event]
                yield from further((*symbols, event), target, chance * p)

    return list(further((), machine.start, 1.0))


@st.composite
def walks(draw):
    machine = draw(machines(states=4))
    assume(any(machine.live()) and machine.live()[machine.start])
    weight = st.integers(1, 9)
    row = st.tuples(*[weight] * len(machine.alphabet))
    weights = np.array(draw(st.tuples(*[row] * machine.n_states)))
    min_length = draw(st.integers(0, 3))
    try:
        return Walk.of(machine, end=0.25, min_length=min_length, weights_QA=weights)
    except InputError:  # no string is so long
        assume(False)


@given(walks(), st.integers(0, 5))
def test_all_strings_together_are_certain(walk, cut):
    made = every_string(walk, cut)
    assert math.isclose(sum(p for *_, p in made), 1.0, rel_tol=1e-12)
    for symbols, event, _ in made:
        assert len(symbols) >= min(walk.min_length, cut)
        if event == len(walk.machine.alphabet):
            assert walk.machine.accepts([walk.machine.alphabet[s] for s in symbols])


@catches("entropy in bits", "data.automata.library:Walk.entropies", Name("log"), to="np.log2")
@given(walks(), st.integers(0, 5))
def test_entropy_is_that_of_all_strings(walk, cut):
    made = every_string(walk, cut)
    nats, events = walk.totals(cut=cut)
    assert math.isclose(nats, -sum(p * math.log(p) for *_, p in made), rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(events, sum(p * (len(s) + 1) for s, _, p in made), rel_tol=1e-9)


@given(walks(), st.integers(1, 5))
def test_prefixes_and_the_likeliest_rest(walk, cut):
    made = every_string(walk, cut)
    whole: dict[tuple[int, ...], float] = {}  # strings as they are read; -2 marks an end
    for symbols, _, p in made:
        key = symbols if len(symbols) == cut else (*symbols, -2)
        whole[key] = whole.get(key, 0.0) + p
    best = walk.likeliest_rest(cut=cut)
    for string in itertools.islice((s for s, *_ in made), 20):
        rows = np.full((1, cut), -1)
        rows[0, : len(string)] = string
        prefixes = walk.prefix_probabilities(rows)[0]
        states = walk.machine.trajectories(rows)[0]
        for length in range(len(string) + 1):
            begun = string[:length]
            under = {k: p for k, p in whole.items() if k[:length] == begun}
            assert math.isclose(prefixes[length], sum(under.values()), rel_tol=1e-9)
            likeliest = prefixes[length] * best[length, states[length]]
            assert math.isclose(likeliest, max(under.values()), rel_tol=1e-9)
        assert (prefixes[len(string) + 1 :] == 0).all()


def draws_follow_the_walk(walk, cut=8, count=40_000):
    """Each event after each state, as often as its probability says, to five standard errors."""
    drawn = walk.draw(np.random.default_rng(7), count=count, cut=cut)
    states = walk.machine.trajectories(drawn.symbols_NL)
    end = len(walk.machine.alphabet)
    events = np.pad(drawn.symbols_NL, ((0, 0), (0, 1)), constant_values=-1).astype(int)
    rows = np.arange(count)
    np.testing.assert_array_equal(events[rows, drawn.lengths_N], -1)
    events[rows, drawn.lengths_N] = drawn.following_N
    assert (drawn.following_N[drawn.lengths_N < cut] == end).all()
    for phase in range(walk.min_length + 1):
        places = slice(phase, phase + 1 if phase < walk.min_length else None)
        for state in range(walk.machine.n_states):
            seen = events[:, places][states[:, places] == state]
            for event in range(end + 1):
                p = walk.after(phase)[state, event]
                spread = math.sqrt(len(seen) * p * (1 - p))
                assert abs((seen == event).sum() - len(seen) * p) <= 5 * spread + 1e-9


@pytest.mark.parametrize(
    "machine",
    [parity(), brackets(3), machine_named("random-5"), machine_named("partial-4"),
     machine_of_regex("(ab|c)*d?")],
    ids=["parity", "brackets", "random", "partial", "regex"],
)  # fmt: skip
@pytest.mark.parametrize("min_length", [0, 1, 3])
def test_draws_follow_the_walk(machine, min_length):
    draws_follow_the_walk(weighted_walk(machine, min_length=min_length, max_length=8, seed=5))


def test_strings_are_about_half_as_long_as_they_may_be():
    walk = weighted_walk(parity(), min_length=2, max_length=20, seed=None)
    assert abs(walk.totals(cut=20)[1] - 12) < 0.5
    np.testing.assert_allclose(walk.after(9)[:, :2], walk.after(9)[:, :1].repeat(2, axis=1))
    weighted = weighted_walk(machine_named("random-5"), min_length=1, max_length=32, seed=0)
    assert len(np.unique(weighted.after(9)[:, 0])) > 1


def test_one_length_only():
    walk = weighted_walk(parity(), min_length=6, max_length=6, seed=1)
    drawn = walk.draw(np.random.default_rng(0), count=500, cut=6)
    assert (drawn.lengths_N == 6).all()
    assert 150 < (drawn.following_N == 2).sum() < 350


def test_a_finite_language_ends_where_it_must():
    walk = Walk.of(machine_of_regex("ab|abc"), end=0.5, min_length=3)
    assert [s for s, *_ in every_string(walk, 5)] == [(0, 1, 2)]
    assert walk.totals(cut=5)[0] == 0.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Walk.of(parity(), end=0.0), "end 0.0 is not between 0 and 1"),
        (lambda: Walk.of(parity(), end=0.5, weights_QA=np.ones((3, 2))), "2 states and 2 symbols"),
        (lambda: Walk.of(parity(), end=0.5, weights_QA=np.zeros((2, 2))), "one above 0"),
        (lambda: Walk.of(parity(), end=0.5, min_length=-1), "min_length -1 is below 0"),
        (
            lambda: Walk.of(machine_of_regex("ab|abc"), end=0.5, min_length=4),
            "no string of 4 symbols or more",
        ),
        (
            lambda: Walk.of(
                Machine(alphabet=("a",), transitions=((0,),), classes=(0,), ends=(False,)), end=0.5
            ),
            "no string of 1 symbols or more",
        ),
    ],
)
def test_bad_walks_are_named(make, words):
    with pytest.raises(InputError, match=words):
        make()
