"""Machines: checks, runs, Hopcroft and equivalence against brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.data.automata.library import (
    brackets,
    machine_named,
    modulo,
    parity,
    random_machine,
)
from glassformer.data.automata.machine import NOWHERE, Machine, counterexample, equivalent
from glassformer.spec.errors import InputError
from tests.data.strategies import machines, said, strings
from tests.planting import Assign, catches


def behaviours(machine, longest):
    """How many different states can be met, told apart by all that follows them."""
    met = {machine.start}
    for string in strings(machine.alphabet, machine.n_states):
        state = machine.start
        for symbol in string:
            state = machine.transitions[state][machine.alphabet.index(symbol)]
            if state == NOWHERE:
                break
        else:
            met.add(state)
    told = set()
    for state in met:
        begun = Machine(
            alphabet=machine.alphabet,
            transitions=machine.transitions,
            classes=machine.classes,
            class_names=machine.class_names,
            ends=machine.ends,
            start=state,
        )
        told.add(tuple(said(begun, string) for string in strings(machine.alphabet, longest)))
    return len(told)


@given(machines(states=5))
@settings(max_examples=300)
def test_minimised_is_as_small_as_brute_force_says_and_says_the_same(machine):
    small = machine.minimised()
    assert small.n_states == behaviours(machine, machine.n_states)
    for string in strings(machine.alphabet, machine.n_states + 1):
        assert said(small, string) == said(machine, string)
    assert small.minimised() == small


@given(st.integers(0, 10_000))
def test_minimised_finds_hidden_copies(seed):
    # Each state twice, every transition to either copy by chance: half of them are one too many.
    rng = np.random.default_rng(seed)
    machine = random_machine(12, symbols=2, seed=seed)
    n = machine.n_states
    doubled = np.concatenate([machine.table()] * 2) + n * rng.integers(0, 2, (2 * n, 2))
    grown = Machine(
        alphabet=machine.alphabet,
        transitions=tuple(map(tuple, doubled.tolist())),
        classes=machine.classes * 2,
    )
    assert grown.minimised() == machine


@catches(
    "counterexample not shortest",
    "data.automata.machine:counterexample",
    Assign("pair"),
    to="queue.pop()",
)
@given(machines(states=3), machines(states=3))
@settings(max_examples=300)
def test_counterexample_is_the_first_by_brute_force(a, b):
    told = (s for s in strings(a.alphabet, a.n_states + b.n_states + 1) if said(a, s) != said(b, s))
    assert counterexample(a, b) == next(told, None)
    assert equivalent(a, b) == (a.minimised() == b.minimised())


def test_machines_that_differ_late_are_told_apart_by_a_shortest_string():
    assert counterexample(modulo(6), modulo(6)) is None
    late = Machine(
        alphabet=("0", "1"),
        transitions=tuple((q, (q + 1) % 12) for q in range(12)),
        classes=tuple(q % 6 if q != 11 else 0 for q in range(12)),
        class_names=tuple("012345"),
    )
    assert counterexample(modulo(6), late) == ("1",) * 11


def test_alphabets_in_another_order_are_the_same():
    turned = Machine(
        alphabet=("1", "0"),
        transitions=((1, 0), (0, 1)),
        classes=(0, 1),
        class_names=("even", "odd"),
    )
    assert equivalent(parity(), turned)


@given(machines(states=4, symbols=3))
def test_completed_reads_every_string_and_says_the_same_of_the_old_ones(machine):
    whole = machine.completed()
    assert not whole.missing()
    assert bool(machine.missing()) == (whole.n_states > machine.n_states)
    for string in strings(machine.alphabet, 4):
        assert whole.accepts(string) == machine.accepts(string)
        before = said(machine, string)
        assert before is None or said(whole, string) == before


@given(machines(states=4))
def test_legal_symbols_are_those_that_can_still_end(machine):
    for state in range(machine.n_states):
        for symbol in machine.alphabet:
            target = machine.transitions[state][machine.alphabet.index(symbol)]
            can = False
            if target != NOWHERE:
                begun = Machine(
                    alphabet=machine.alphabet,
                    transitions=machine.transitions,
                    classes=machine.classes,
                    class_names=machine.class_names,
                    ends=machine.ends,
                    start=target,
                )
                can = any(begun.accepts(s) for s in strings(machine.alphabet, machine.n_states))
            assert (symbol in machine.legal(state)) == can


@given(machines(states=4))
def test_trimmed_keeps_the_strings_and_only_useful_states(machine):
    if not any(machine.accepts(s) for s in strings(machine.alphabet, machine.n_states)):
        with pytest.raises(InputError, match="no string of this machine ever ends"):
            machine.trimmed()
        return
    small = machine.trimmed()
    assert all(small.live())
    assert sorted(small.reachable()) == list(range(small.n_states))
    for string in strings(machine.alphabet, 5):
        assert small.accepts(string) == machine.accepts(string)


def test_runs_give_states_and_classes():
    assert parity().run("10110") == [0, 1, 1, 0, 1, 1]
    assert parity().run_classes("10110") == ["even", "odd", "odd", "even", "odd", "odd"]
    assert brackets(2).run("(())") == [0, 1, 2, 1, 0]
    assert brackets(2).legal(0) == ("(",)
    assert brackets(2).legal(2) == (")",)
    assert brackets(2).accepts("()(())")
    assert not brackets(2).accepts("((()))")
    assert not brackets(2).accepts("(")
    assert not brackets(2).accepts("x")


@given(machines(states=4, symbols=3), st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1))
def test_many_strings_at_once_are_each_alone(machine, rows):
    width = max(map(len, rows))
    symbols = np.full((len(rows), width), NOWHERE)
    for place, row in enumerate(rows):
        symbols[place, : len(row)] = row
    states = machine.trajectories(symbols)
    for place, row in enumerate(rows):
        state, expected = machine.start, [machine.start]
        for symbol in row:
            state = NOWHERE if state == NOWHERE else machine.transitions[state][symbol]
            expected.append(state)
        assert states[place].tolist() == expected + [NOWHERE] * (width - len(row))


@pytest.mark.parametrize("complete", [True, False])
@given(st.integers(1, 9), st.integers(2, 4), st.integers(0, 1000))
def test_random_machines_are_reachable_and_minimal(complete, states, symbols, seed):
    machine = random_machine(states, symbols=symbols, seed=seed, complete=complete)
    assert machine.n_states == states
    assert machine.reachable() == list(range(states))  # met in this order, too
    assert machine.minimised() == machine
    assert machine == random_machine(states, symbols=symbols, seed=seed, complete=complete)
    assert all(machine.legal(state) for state in range(states))
    if complete:
        assert not machine.missing()


def test_random_machines_differ_by_seed_and_partial_ones_by_state():
    assert len({random_machine(5, symbols=3, seed=seed) for seed in range(20)}) == 20
    machine = machine_named("partial-6", symbols=3)
    assert machine.missing()
    assert len({machine.legal(state) for state in range(6)}) > 1


def test_the_library_by_name():
    assert machine_named("parity") == parity()
    assert equivalent(
        machine_named("mod-2"), Machine(**{**fields(parity()), "class_names": ("0", "1")})
    )
    assert machine_named("mod-5").n_states == 5
    assert machine_named("brackets-4").n_states == 5
    assert machine_named("random-6", symbols=4, seed=3) == random_machine(6, symbols=4, seed=3)
    assert machine_named("regex:a|b").accepts("b")


def fields(machine):
    return {name: getattr(machine, name) for name in machine.__slots__}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_brackets_are_those_that_counting_allows(depth):
    for string in strings("()", 8):
        opened = np.cumsum([1 if symbol == "(" else -1 for symbol in string] or [0])
        fits = opened.min() >= 0 and opened.max() <= depth and opened[-1] == 0
        assert brackets(depth).accepts(string) == fits


@pytest.mark.parametrize("k", [2, 3, 5])
def test_counters_count(k):
    for string in strings("01", 7):
        assert modulo(k).run(string)[-1] == string.count("1") % k
