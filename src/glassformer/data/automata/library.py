"""The library of machines: counters, bounded brackets, regular expressions, random ones."""

import re
from collections.abc import Callable

import numpy as np

from glassformer.data.automata.machine import NOWHERE, Machine
from glassformer.data.automata.regex import machine_of_regex
from glassformer.data.rng import stream
from glassformer.spec.checks import at_least
from glassformer.spec.errors import InputError, nearest

# Q states, A symbols

KNOWN = ("parity", "mod-K", "brackets-D", "random-N", "partial-N", "regex:PATTERN")
MOST_STATES = 1_000


def parity() -> Machine:
    """Return the machine of the parity of 1s: even or odd."""
    return Machine(
        alphabet=("0", "1"),
        transitions=((0, 1), (1, 0)),
        classes=(0, 1),
        class_names=("even", "odd"),
    )


def modulo(k: int) -> Machine:
    """Return the machine that counts 1s modulo k; the class is the remainder."""
    at_least("mod-K", k, 2)
    return Machine(
        alphabet=("0", "1"),
        transitions=tuple((state, (state + 1) % k) for state in range(k)),
        classes=tuple(range(k)),
        class_names=tuple(str(remainder) for remainder in range(k)),
    )


def brackets(depth: int) -> Machine:
    """Return the machine of balanced brackets, at most `depth` open; the state is their number.

    A string may end only when all are closed. Closing what is not open, or opening one too many, is
    not possible.
    """
    at_least("brackets-D", depth, 1)
    return Machine(
        alphabet=("(", ")"),
        transitions=tuple(
            (state + 1 if state < depth else NOWHERE, state - 1 if state else NOWHERE)
            for state in range(depth + 1)
        ),
        classes=(1,) + (0,) * depth,
        class_names=("open", "balanced"),
        ends=(True,) + (False,) * depth,
    )


def random_machine(states: int, *, symbols: int, seed: int, complete: bool = True) -> Machine:
    """Return a minimal random machine of `states` states, all reachable, with two classes.

    Symbols are a, b, c, … and strings may end anywhere. With complete=False each state lacks about
    a third of its transitions, but never all: what is legal then depends on the state.
    """
    at_least("states", states, 1)
    at_least("symbols", symbols, 1)
    if symbols > 26:
        raise InputError(f"{symbols} symbols: they are letters", hint="26 is the most")
    if not complete and symbols < 2:
        raise InputError("a machine of one symbol cannot lack any", hint="use 2 symbols")
    for attempt in range(1_000):
        rng = stream(seed, "machine", states, symbols, int(complete), attempt)
        found = _draw_machine(rng, states=states, symbols=symbols, complete=complete)
        if len(found.reachable()) == states and found.minimised().n_states == states:
            # minimised() also numbers the states as they are met
            return found.minimised()
    raise InputError(
        f"no minimal machine of {states} states and {symbols} symbols in 1000 draws",
        hint="use more symbols, or another machine_seed",
    )


def _draw_machine(
    rng: np.random.Generator, *, states: int, symbols: int, complete: bool
) -> Machine:
    table_QA = rng.integers(0, states, size=(states, symbols))
    if not complete:
        table_QA[rng.random(table_QA.shape) < 1 / 3] = NOWHERE
        stay = rng.integers(0, symbols, size=states)
        target = rng.integers(0, states, size=states)
        empty = (table_QA == NOWHERE).all(axis=1)
        table_QA[empty, stay[empty]] = target[empty]
    # A tree to every state: large random machines hardly ever reach all of them by chance.
    free = [(0, symbol) for symbol in range(symbols)]
    for state in range(1, states):
        parent, symbol = free.pop(int(rng.integers(len(free))))
        table_QA[parent, symbol] = state
        free += [(state, symbol) for symbol in range(symbols)]
    classes = rng.integers(0, 2, size=states)
    return Machine(
        alphabet=tuple("abcdefghijklmnopqrstuvwxyz"[:symbols]),
        transitions=tuple(map(tuple, table_QA.tolist())),
        classes=tuple(classes.tolist()),
    )


def machine_named(name: str, *, symbols: int = 3, seed: int = 0) -> Machine:
    """Return `parity`, `mod-3`, `brackets-4`, `random-5`, `partial-5` or `regex:(ab|c)*`.

    `symbols` and `seed` are those of random machines; `partial-N` is one in which the legal symbols
    depend on the state.
    """
    if name == "parity":
        return parity()
    if name.startswith("regex:"):
        return machine_of_regex(name.removeprefix("regex:"))
    found = re.fullmatch(r"(mod|brackets|random|partial)-([0-9]{1,9})", name)
    if found is None:
        raise InputError(f"machine '{name}' is not known", hint=_suggestion(name))
    number = int(found[2])
    if number > MOST_STATES:
        raise InputError(f"machine '{name}' is too large", hint=f"at most {MOST_STATES}")
    make: dict[str, Callable[[], Machine]] = {
        "mod": lambda: modulo(number),
        "brackets": lambda: brackets(number),
        "random": lambda: random_machine(number, symbols=symbols, seed=seed),
        "partial": lambda: random_machine(number, symbols=symbols, seed=seed, complete=False),
    }
    return make[found[1]]()


def _suggestion(name: str) -> str:
    """Return the nearest of the names, or all of them."""
    stem = name.split("-")[0].split(":")[0]
    near = nearest(stem, [known.split("-")[0].split(":")[0] for known in KNOWN])
    if not near.startswith("did you mean"):
        return f"known: {', '.join(KNOWN)}"
    full = next(k for k in KNOWN if k.startswith(near.split("'")[1]))
    return f"did you mean {full}?"
