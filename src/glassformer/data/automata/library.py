"""The library of machines (counters, brackets, regular expressions, random), and walks on them.

`Walk` is a weighted random walk on a machine, which samples strings, and its probabilities. In a
state the walk ends with some probability, if strings may end there, or else samples a symbol by the
state's weights. So what comes next depends on the state alone, except that no string ends before
`min_length`. A walk has no longest length: readers cut it.
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glassformer.data.automata.construct import machine_of_regex
from glassformer.data.automata.machine import NOWHERE, Machine
from glassformer.data.batch import Floats, Ints
from glassformer.data.rng import stream
from glassformer.spec.checks import at_least
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.machines import MOST_STATES, MachineTable

# Q states, A symbols

KNOWN = (
    "parity",
    "mod-K",
    "permutations-N",
    "brackets-D",
    "random-N",
    "partial-N",
    "regex:PATTERN",
)


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


def permutations(n: int) -> Machine:
    """Return the machine that composes permutations of `n` things; the class is where 0 went.

    A symbol swaps two neighbouring places, a state is an order of all things, the first is the
    sorted one. From five on the group is not solvable: no circuit of fixed depth and polynomial
    size follows it, unless two classes of complexity that are thought different are one.
    """
    at_least("permutations-N", n, 2, most=6)
    orders = list(itertools.permutations(range(n)))
    number = {order: state for state, order in enumerate(orders)}

    def swapped(order: tuple[int, ...], at: int) -> tuple[int, ...]:
        return (*order[:at], order[at + 1], order[at], *order[at + 2 :])

    return Machine(
        alphabet=tuple(f"{at}{at + 1}" for at in range(n - 1)),
        transitions=tuple(
            tuple(number[swapped(order, at)] for at in range(n - 1)) for order in orders
        ),
        classes=tuple(order.index(0) for order in orders),
        class_names=tuple(map(str, range(n))),
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
    if name.endswith(".json"):
        raise InputError(
            f"'{name}' is a file, not a machine",
            hint="task.machine=FILE.json reads it, in Python gf.load_machine('FILE.json')",
        )
    found = re.fullmatch(r"(mod|permutations|brackets|random|partial)-([0-9]{1,9})", name)
    if found is None:
        raise InputError(
            f"machine '{name}' is not known",
            hint=f"{_suggestion(name)}; or a FILE.json of your own",
        )
    number = int(found[2])
    if number > MOST_STATES:
        raise InputError(f"machine '{name}' is too large", hint=f"at most {MOST_STATES}")
    make: dict[str, Callable[[], Machine]] = {
        "mod": lambda: modulo(number),
        "permutations": lambda: permutations(number),
        "brackets": lambda: brackets(number),
        "random": lambda: random_machine(number, symbols=symbols, seed=seed),
        "partial": lambda: random_machine(number, symbols=symbols, seed=seed, complete=False),
    }
    return make[found[1]]()


def machine_of_table(table: MachineTable) -> Machine:
    """Return the machine of a spec."""
    names = tuple(dict.fromkeys(table.classes))
    return Machine(
        alphabet=table.alphabet,
        transitions=table.transitions,
        classes=tuple(names.index(name) for name in table.classes),
        class_names=names,
        ends=table.ends,
        start=table.start,
    )


def _suggestion(name: str) -> str:
    """Return the nearest of the names, or all of them."""
    stem = name.split("-")[0].split(":")[0]
    near = nearest(stem, [known.split("-")[0].split(":")[0] for known in KNOWN])
    if not near.startswith("did you mean"):
        return f"known: {', '.join(KNOWN)}"
    full = next(k for k in KNOWN if k.startswith(near.split("'")[1]))
    return f"did you mean {full}?"


# --- random walks ---------------------------------------------------------------------------------

# Q states, A symbols, E = A + 1 events (the symbols, then the end), M = min_length + 1 phases,
# N strings, L positions

ENDS = 64  # the probability to end is a multiple of 1/64, so that all computers agree on its bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Strings:
    """Strings of at most `cut` symbols: symbol numbers, NOWHERE after the end; and their lengths.

    `following` is the event after the last symbol: the end, or, where the string was cut, perhaps
    a symbol that no longer fits.
    """

    symbols_NL: NDArray[np.int16]
    lengths_N: NDArray[np.int64]
    following_N: NDArray[np.int16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """A machine, and P(event | state) in each phase: after 0, 1, … min_length or more symbols."""

    machine: Machine
    probabilities_MQE: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        machine: Machine,
        *,
        end: float | Floats,
        min_length: int = 1,
        weights_QA: Floats | Ints | None = None,
    ) -> "Walk":
        """Return a walk by weights (uniform by default), ending with probability `end` if it may;
        `end` may be one for each state.

        Where nothing but the end is possible, it is certain; before min_length a symbol is possible
        only if the string can then still become long enough.
        """
        at_least("min_length", min_length, 0)
        if isinstance(end, float) and not 0.0 < end < 1.0:
            raise InputError(f"end {end} is not between 0 and 1", hint=f"{1 / 8}")
        shape = (machine.n_states, len(machine.alphabet))
        weights = np.ones(shape) if weights_QA is None else np.asarray(weights_QA, np.float64)
        if weights.shape != shape or not (weights > 0).all():
            raise InputError(
                f"weights of shape {weights.shape} for {shape[0]} states and {shape[1]} symbols",
                hint="one above 0 for each",
            )
        table_QA = machine.table()
        live_Q = np.array(machine.live())
        # can_MQ: may a string be in this state after this many symbols, and still end late enough?
        can_MQ = np.tile(live_Q, (min_length + 1, 1))
        open_QA = table_QA != NOWHERE
        for phase in range(min_length - 1, -1, -1):
            can_MQ[phase] = live_Q & (open_QA & can_MQ[phase + 1][table_QA]).any(axis=1)
        if not can_MQ[0, machine.start]:
            raise InputError(
                f"this machine has no string of {min_length} symbols or more",
                hint="lower min_length",
            )
        probabilities = np.zeros((min_length + 1, shape[0], shape[1] + 1))
        for phase in range(min_length + 1):
            following = min(phase + 1, min_length)
            possible_QA = open_QA & can_MQ[following][table_QA]
            end_Q = np.array(machine.ends) * (end if phase == min_length else 0.0)
            end_Q = np.where(possible_QA.any(axis=1), end_Q, 1.0)
            kept_QA = weights * possible_QA
            total_Q1 = np.maximum(kept_QA.sum(axis=1, keepdims=True), np.finfo(float).tiny)
            probabilities[phase, :, :-1] = kept_QA / total_Q1 * (1.0 - end_Q[:, None])
            probabilities[phase, :, -1] = end_Q
            probabilities[phase, ~can_MQ[phase]] = 0.0  # never met
        return cls(machine=machine, probabilities_MQE=probabilities)

    @property
    def min_length(self) -> int:
        """The length of the shortest string."""
        return len(self.probabilities_MQE) - 1

    def after(self, count: int) -> NDArray[np.float64]:
        """Return P(event | state) as (Q, E) after `count` symbols."""
        chance_QE: NDArray[np.float64] = self.probabilities_MQE[min(count, self.min_length)]
        return chance_QE

    def draw(self, rng: np.random.Generator, *, count: int, cut: int) -> Strings:
        """Sample strings, each at most `cut` symbols of a walk."""
        table_QA = self.machine.table()
        end = len(self.machine.alphabet)
        symbols_NL = np.full((count, cut), NOWHERE, dtype=np.int16)
        lengths_N = np.full(count, cut)
        following_N = np.full(count, end, dtype=np.int16)
        going = np.arange(count)  # the strings that have not ended
        state = np.full(count, self.machine.start)
        bounds_MQE = np.cumsum(self.probabilities_MQE, axis=2)
        for place in range(cut + 1):
            # The event's number is how many upper bounds lie at or below a random number.
            bounds = bounds_MQE[min(place, self.min_length)][state]
            below = rng.random(len(going))[:, None] * bounds[:, -1:]
            event = (bounds <= below).sum(axis=1)
            if place == cut:
                following_N[going] = event
                break
            ended = event == end
            lengths_N[going[ended]] = place
            going, state, event = going[~ended], state[~ended], event[~ended]
            symbols_NL[going, place] = event
            state = table_QA[state, event]
        return Strings(symbols_NL=symbols_NL, lengths_N=lengths_N, following_N=following_N)

    def prefix_probabilities(self, symbols_NL: Ints) -> NDArray[np.float64]:
        """Return P(a walk begins with the first 0, 1, … symbols), (N, L + 1); 0 after the end."""
        states = self.machine.trajectories(symbols_NL)
        made = np.ones((len(symbols_NL), symbols_NL.shape[1] + 1))
        for place in range(symbols_NL.shape[1]):
            chance_N = self.after(place)[states[:, place], symbols_NL[:, place]]
            chance_N = np.where(symbols_NL[:, place] == NOWHERE, 0.0, chance_N)
            made[:, place + 1] = made[:, place] * chance_N
        return made

    def likeliest_rest(self, *, cut: int) -> NDArray[np.float64]:
        """Return (cut + 1, Q): the probability of the likeliest way to the end or the cut."""
        table_QA = self.machine.table()
        best = np.ones((cut + 1, self.machine.n_states))
        for place in range(cut - 1, -1, -1):
            chance_QE = self.after(place)
            further_QA = chance_QE[:, :-1] * best[place + 1][table_QA]
            best[place] = np.maximum(chance_QE[:, -1], further_QA.max(axis=1))
        return best

    def entropies(self) -> NDArray[np.float64]:
        """Return the entropy of the next event in nats, (M, Q): -sum P log P."""
        p = self.probabilities_MQE
        nats: NDArray[np.float64] = -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=2)
        return np.abs(nats)  # -0.0 where the next event is certain

    def totals(self, *, cut: int) -> tuple[float, float]:
        """Return the expected nats and events of one string: exact, by iterating over states.

        A string of n < cut symbols is n + 1 events; a cut one is cut + 1.
        """
        nats_MQ = self.entropies()
        here_Q = np.zeros(self.machine.n_states)
        here_Q[self.machine.start] = 1.0
        table_QA = self.machine.table()
        nats = events = 0.0
        for place in range(cut + 1):
            nats += float((here_Q * nats_MQ[min(place, self.min_length)]).sum())
            events += float(here_Q.sum())
            moved_QA = here_Q[:, None] * self.after(place)[:, :-1]
            here_Q = np.zeros_like(here_Q)
            np.add.at(here_Q, table_QA[table_QA != NOWHERE], moved_QA[table_QA != NOWHERE])
        return nats, events


def given_walk(machine: Machine, shares_QE: Floats, *, min_length: int) -> Walk:
    """Return the walk with these probabilities of each state's symbols, then of the end.

    Before min_length, those of the symbols are scaled up: nothing ends.
    """
    weights_QA = np.where(shares_QE[:, :-1] > 0, shares_QE[:, :-1], 1.0)
    return Walk.of(machine, end=shares_QE[:, -1], min_length=min_length, weights_QA=weights_QA)


def weighted_walk(machine: Machine, *, min_length: int, max_length: int, seed: int | None) -> Walk:
    """Return a walk whose strings, cut at max_length, average about half-way between the two.

    Weights are integers from 1 to 9, sampled for each state and symbol by `seed`; without a seed
    they are equal.
    """
    weights_QA = None
    if seed is not None:
        shape = (machine.n_states, len(machine.alphabet))
        weights_QA = stream(seed, "weights").integers(1, 10, size=shape)
    middle = (min_length + max_length) / 2 + 1  # events, the end included
    best, smallest = None, float("inf")
    # Strings of one length only are always cut; they end there as often as not.
    for chance in range(1 if max_length > min_length else ENDS // 2, ENDS // 2 + 1):
        walk = Walk.of(machine, end=chance / ENDS, min_length=min_length, weights_QA=weights_QA)
        off = abs(walk.totals(cut=max_length)[1] - middle)
        if off < smallest - 1e-9:
            best, smallest = walk, off
    assert best is not None, "some chance is the nearest"
    return best
