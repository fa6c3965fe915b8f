"""Random machines, patterns and strings for the properties."""

import itertools

from hypothesis import strategies as st

from glassformer.data.automata.machine import NOWHERE, Machine


@st.composite
def machines(draw, *, states=5, symbols=2, classes=2, partial=True):
    """Any machine, reachable or not, minimal or not."""
    n = draw(st.integers(1, states))
    target = st.integers(NOWHERE if partial else 0, n - 1)
    row = st.tuples(*[target] * symbols)
    return Machine(
        alphabet=tuple("abc"[:symbols]),
        transitions=draw(st.tuples(*[row] * n)),
        classes=draw(st.tuples(*[st.integers(0, classes - 1)] * n)),
        class_names=tuple("uvw"[:classes]),
        ends=draw(st.tuples(*[st.booleans()] * n)),
        start=draw(st.integers(0, n - 1)),
    )


def strings(alphabet, longest):
    """Every string of at most so many symbols, shortest first."""
    for length in range(longest + 1):
        yield from itertools.product(alphabet, repeat=length)


def said(machine, string):
    """What a machine says of a string, step by step and without its methods: class, may it end."""
    state = machine.start
    for symbol in string:
        state = machine.transitions[state][machine.alphabet.index(symbol)]
        if state == NOWHERE:
            return None
    return machine.class_names[machine.classes[state]], machine.ends[state]


_PARTS = st.sampled_from(["a", "b", "c", ".", "[ab]", "[a-c]", "[^a]", "()"])
patterns = st.recursive(
    _PARTS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from("*+?")).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=8,
)
