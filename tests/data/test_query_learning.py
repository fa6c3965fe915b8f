"""Learning a machine by queries, against Hopcroft's minimal machine of the same teacher."""

import itertools

import pytest

from glassformer.data.automata.construct import (
    BEYOND,
    Seen,
    agree,
    disagreements,
    hypotheses,
)
from glassformer.data.automata.library import machine_named
from glassformer.data.automata.machine import NOWHERE, Machine, counterexample

NAMES = (
    "parity",
    "mod-7",
    "brackets-5",
    "regex:(ab|c)*a?",
    *(f"random-{count}" for count in (1, 2, 3, 5, 8, 11)),
    *(f"partial-{count}" for count in (1, 2, 3, 5, 8, 11)),
)


def teacher_of(machine: Machine, *, min_length: int = 0, longest: int = 100):
    """The machine itself as a teacher; it does not tell the end of strings below min_length."""

    def answer(word):
        if len(word) > longest:
            return BEYOND
        state = machine.start
        for symbol in word:
            state = machine.transitions[state][symbol]
            if state == NOWHERE:
                return None
        allowed = tuple(target != NOWHERE for target in machine.transitions[state])
        ends = machine.ends[state] if len(word) >= min_length else None
        return Seen(machine.classes[state], allowed, ends)

    return answer


def words(symbols: int, longest: int):
    """Every string, shortest first."""
    return [w for n in range(longest + 1) for w in itertools.product(range(symbols), repeat=n)]


@pytest.mark.parametrize("min_length", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_the_learned_machine_is_the_minimal_one(name, min_length):
    true = machine_named(name).trimmed()
    symbols = len(true.alphabet)
    teacher = teacher_of(true, min_length=min_length)
    found = list(hypotheses(teacher, symbols=symbols, words=words(symbols, 7), most_states=32))
    sizes = [one.n_states for one in found]
    assert sizes == sorted(set(sizes)), "every counterexample makes the machine larger"
    assert [one.wrong is None for one in found] == [False] * (len(found) - 1) + [True]
    learned = found[-1].machine(alphabet=true.alphabet, class_names=true.class_names)
    assert counterexample(learned, true) is None
    assert learned == true.minimised()


def test_access_strings_lead_to_their_states_by_a_shortest_way():
    true = machine_named("random-8").trimmed()
    (*_, found) = hypotheses(
        teacher_of(true), symbols=len(true.alphabet), words=words(3, 7), most_states=32
    )
    assert [found.state(word) for word in found.access] == list(range(found.n_states))
    assert [len(word) for word in found.access] == sorted(len(word) for word in found.access)
    assert all(found.answer(w) == teacher_of(true)(w) for w in words(3, 5))


def test_it_gives_up_before_too_many_states():
    true = machine_named("random-8").trimmed()
    found = list(hypotheses(teacher_of(true), symbols=3, words=words(3, 7), most_states=5))
    assert all(one.n_states <= 5 and one.wrong is not None for one in found)
    wrong = found[-1].wrong
    assert not agree(found[-1].answer(wrong), teacher_of(true)(wrong))
    shorter = [w for w in words(3, 7) if len(w) < len(wrong)]
    assert not list(disagreements(found[-1], teacher_of(true), shorter))


def test_a_teacher_that_contradicts_itself_ends_the_search():
    """One string of parity is answered wrongly: no finite machine of few states says so."""
    true = teacher_of(machine_named("parity"))

    def noisy(word):
        return Seen(0, (True, True), True) if word == (1, 0, 0, 0, 0, 0) else true(word)

    found = list(hypotheses(noisy, symbols=2, words=words(2, 7), most_states=4))
    assert found[0].n_states == 2
    assert found[0].wrong == (1, 0, 0, 0, 0, 0)
    assert all(one.wrong is not None for one in found)


def test_what_is_not_known_agrees_with_everything_and_the_impossible_with_nothing():
    some = Seen(1, (True, False), True)
    assert agree(some, some._replace(ends=None))
    assert not agree(some, some._replace(ends=False))
    assert not agree(some, some._replace(label=0, ends=None))
    assert not agree(some, some._replace(allowed=(True, True), ends=None))
    assert agree(None, None)
    assert not agree(None, some)
    assert agree(BEYOND, some)
    assert agree(BEYOND, None)


def test_strings_too_long_to_ask_do_not_stop_it():
    true = machine_named("mod-3")
    teacher = teacher_of(true, longest=4)
    (*_, found) = hypotheses(teacher, symbols=2, words=words(2, 4), most_states=8)
    assert found.machine(alphabet=true.alphabet, class_names=true.class_names) == true.minimised()
