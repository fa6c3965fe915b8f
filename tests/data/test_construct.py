"""Regular expressions mean what Python's `re.fullmatch` says."""

import re
import time

import pytest
from hypothesis import given, settings

from glassformer.data.automata.construct import machine_of_regex
from glassformer.data.automata.machine import counterexample, equivalent
from glassformer.spec.errors import InputError
from tests.data.strategies import patterns, strings

STRINGS = ["".join(string) for string in strings("abc", 6)]


def check_against_re(pattern):
    machine = machine_of_regex(pattern, alphabet="abc")
    meant = re.compile(pattern)
    for string in STRINGS:
        assert machine.accepts(string) == bool(meant.fullmatch(string)), string
    assert all(machine.live())
    assert machine.minimised() == machine


@given(patterns)
@settings(max_examples=200)
def test_random_patterns(pattern):
    check_against_re(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["a", "ab|c", "(ab|c)*", "a+b?", "(a|)b", "[abc]", "[a-b]c", "[^ab]*", ".", ".*abc", "",
     "(a*)*", "((a|b)(b|c))+", "(a|b)*a(a|b)(a|b)", "a?a?a?aaa", "[c-]?", "[-b]", "[^-b]+"],
)  # fmt: skip
def test_every_construct(pattern):
    check_against_re(pattern)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("(a|b)*", "(a*b*)*"),
        ("a+", "aa*"),
        ("(a?)*", "a*"),
        ("(ab)*a", "a(ba)*"),
        ("[a-c]", "a|b|c"),
    ],
)
def test_known_identities(a, b):
    assert equivalent(machine_of_regex(a, alphabet="abc"), machine_of_regex(b, alphabet="abc"))


def test_a_difference_is_shown_by_a_shortest_string():
    found = counterexample(
        machine_of_regex("(ab)*", alphabet="ab"), machine_of_regex("(ab)*(aba)?", alphabet="ab")
    )
    # "aba" may end in one only; that it can still go on already tells "ab a" apart from nothing.
    assert found == ("a", "b", "a")


def test_the_alphabet_is_what_the_pattern_names():
    assert machine_of_regex("b[x-z]|a").alphabet == ("a", "b", "x", "y", "z")
    assert machine_of_regex(r"\(\)*|\.").alphabet == ("(", ")", ".")
    assert machine_of_regex("[^-b]a-?").alphabet == ("-", "a", "b")
    assert machine_of_regex("[a-c-e]").alphabet == ("-", "a", "b", "c", "e")


@pytest.mark.parametrize(
    ("pattern", "words", "place"),
    [
        ("(ab", "a ( that is not closed", 3),
        ("ab)", "a ) that closes nothing", 2),
        ("[ab", "a [ that is not closed", 0),
        ("*a", "nothing before * to repeat", 0),
        ("a|+b", "nothing before + to repeat", 2),
        ("a**", "one repetition directly after another", 2),
        ("a+?", "one repetition directly after another", 2),
        ("a{2}", "'{' is not known here", 1),
        ("^a$", "'^' is not known here", 0),
        (r"\d", r"\d is not known here", 1),
        (r"a[b\d]", r"\d is not known here", 4),
        ("a\\", "is not known here", 2),
        ("", "names no symbol", 0),
        (".", "names no symbol", 0),
        ("a b", "not a single visible character", 0),
        ("[b-a]", "the range b-a is empty", 4),
        ("a[^a]", "a choice of no symbol", 5),
        ("(" * 60 + "a" + ")" * 60, "more than 50 brackets", 50),
        ("(a|b)*a" + "(a|b)" * 12, "more than 2000 states", 67),
        ("[\x01-\U0010ffff]", "more than 255 symbols", 4),
    ],
)
def test_bad_patterns_are_named_with_their_place(pattern, words, place):
    with pytest.raises(InputError) as caught:
        machine_of_regex(pattern)
    assert words in caught.value.what
    assert f"character {place} of" in caught.value.where


def han(count, first=0):
    """Different characters."""
    return [chr(0x4E00 + first + n) for n in range(count)]


HUGE = {
    "choices that may be left out": "[\u0100-\u01f0]?" * 2_800,
    "parts of nothing": "(a|b|)" * 3_000,
    "stars": "".join(f"{one}*" for one in han(9_000)),
    "choices of all but one": "".join(f"[^{one}]?" for one in han(3_900)),
    "any symbol": "".join(han(10_000)) + "." * 9_990,
    "ranges": "".join(f"[{one}-{chr(ord(one) + 250)}]" for one in han(3_900)),
    "a chain of different symbols": "".join(han(1_900)),
    "sets that double": "(a|b)*a" + "(a|b)" * 3_900,
    "repetitions of repetitions": "((a+b+)+c+)+" * 1_600,
    "a long pattern": "a" * 20_001,
}  # fmt: skip


@pytest.mark.parametrize("case", HUGE)
def test_a_pattern_that_takes_too_much_is_refused(case):
    begin = time.process_time()
    with pytest.raises(InputError, match=r"more than|a pattern of"):
        machine_of_regex(HUGE[case])
    assert time.process_time() - begin < 3


def test_many_symbols_that_are_moved_as_one_are_cheap():
    letters = "".join(han(240))
    machine = machine_of_regex(f"[{letters[0]}-{letters[-1]}]?" * 500)
    assert machine.n_states == 501
    assert machine.accepts(letters)
    assert not machine.accepts(letters * 3)
