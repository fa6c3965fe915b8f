"""`Machine`: a finite-state machine as a value, with minimisation and a test of equivalence.

A machine is deterministic by construction: a table of states by symbols. It may be partial; a
missing transition means that no string continues that way. Each state has a class, the machine's
output for the string so far, and a string may end in some states only. Minimisation is Hopcroft's
algorithm; two machines that differ have a shortest counterexample.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from glassformer.data.batch import Ints
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.machines import NOWHERE as NOWHERE

# Q states, A symbols


def coarsest_refinement(table_QA: Ints, *, labels_Q: Ints) -> NDArray[np.int64]:
    """Return a block number for each state of a complete table; a block has one label."""
    states, symbols = table_QA.shape
    enter: list[list[list[int]]] = [[[] for _ in range(states)] for _ in range(symbols)]
    for state, row in enumerate(table_QA.tolist()):
        for symbol, target in enumerate(row):
            enter[symbol][target].append(state)
    _, block_of = np.unique(labels_Q, return_inverse=True)
    number: list[int] = block_of.tolist()
    blocks: list[set[int]] = [set() for _ in range(max(number) + 1)]
    for state, block in enumerate(number):
        blocks[block].add(state)
    waiting = {(block, symbol) for block in range(len(blocks)) for symbol in range(symbols)}
    while waiting:
        splitter, symbol = waiting.pop()
        entering: dict[int, set[int]] = {}
        for target in blocks[splitter]:
            for state in enter[symbol][target]:
                entering.setdefault(number[state], set()).add(state)
        for block, inside in entering.items():
            if len(inside) == len(blocks[block]):
                continue
            blocks[block] -= inside
            fresh = len(blocks)
            blocks.append(inside)
            for state in inside:
                number[state] = fresh
            for other in range(symbols):
                if (block, other) in waiting or len(inside) <= len(blocks[block]):
                    waiting.add((fresh, other))
                else:
                    waiting.add((block, other))
    return np.array(number, dtype=np.int64)


# Q states, A symbols of the alphabet, N strings, L positions


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine: next state = transitions[state][symbol], or NOWHERE; class = classes[state].

    `ends[state]` is True if a string may end there; by default it may end anywhere.
    """

    alphabet: tuple[str, ...]
    transitions: tuple[tuple[int, ...], ...]
    classes: tuple[int, ...]
    class_names: tuple[str, ...] = ("reject", "accept")
    ends: tuple[bool, ...] = ()
    start: int = 0

    def __post_init__(self) -> None:
        if not self.ends:
            object.__setattr__(self, "ends", (True,) * self.n_states)
        if not self.transitions or not self.alphabet:
            raise InputError("a machine needs a state and a symbol")
        if len(set(self.alphabet)) < len(self.alphabet):
            raise InputError(f"a symbol occurs twice in the alphabet {self.alphabet}")
        for symbol in self.alphabet:
            # A blank is a character of texts; as a token's name `Vocab` refuses it.
            if symbol != " " and symbol.split() != [symbol]:
                raise InputError(f"symbol {symbol!r} is not one word", hint="no spaces")
        for state, row in enumerate(self.transitions):
            if len(row) != len(self.alphabet):
                raise InputError(
                    f"{len(row)} transitions for {len(self.alphabet)} symbols",
                    where=f"state {state}",
                    hint=f"{NOWHERE} where there is none",
                )
            for symbol, target in zip(self.alphabet, row, strict=True):
                if not NOWHERE <= target < self.n_states:
                    raise InputError(
                        f"'{symbol}' leads to state {target}, which is none",
                        where=f"state {state}",
                        hint=f"0 to {self.n_states - 1}, or {NOWHERE}",
                    )
        if not 0 <= self.start < self.n_states:
            raise InputError(f"start {self.start} is no state", hint=f"0 to {self.n_states - 1}")
        if len(self.classes) != self.n_states or len(self.ends) != self.n_states:
            raise InputError(
                f"{len(self.classes)} classes and {len(self.ends)} ends for {self.n_states} states"
            )
        for state, kind in enumerate(self.classes):
            if not 0 <= kind < len(self.class_names):
                raise InputError(
                    f"class {kind} has no name",
                    where=f"state {state}",
                    hint=f"classes are 0 to {len(self.class_names) - 1}",
                )

    # --- what it is -----------------------------------------------------------------------------

    @property
    def n_states(self) -> int:
        """The number of states."""
        return len(self.transitions)

    def table(self) -> NDArray[np.int64]:
        """Return the transitions (Q, A) as an array."""
        return np.array(self.transitions, dtype=np.int64)

    def missing(self) -> list[tuple[int, str]]:
        """Return states and symbols without a transition: none for a complete machine."""
        return [
            (state, symbol)
            for state, row in enumerate(self.transitions)
            for symbol, target in zip(self.alphabet, row, strict=True)
            if target == NOWHERE
        ]

    def reachable(self) -> list[int]:
        """Return the states that some string leads to, in the order of a breadth-first walk."""
        order = [self.start]
        seen = {self.start}
        for state in order:  # grows while it is read
            for target in self.transitions[state]:
                if target != NOWHERE and target not in seen:
                    seen.add(target)
                    order.append(target)
        return order

    def live(self) -> tuple[bool, ...]:
        """Return, for each state, True if a string in it can still end."""
        before: list[list[int]] = [[] for _ in self.transitions]
        for state, row in enumerate(self.transitions):
            for target in row:
                if target != NOWHERE:
                    before[target].append(state)
        found = [state for state in range(self.n_states) if self.ends[state]]
        alive = list(self.ends)
        for state in found:
            for earlier in before[state]:
                if not alive[earlier]:
                    alive[earlier] = True
                    found.append(earlier)
        return tuple(alive)

    def legal(self, state: int) -> tuple[str, ...]:
        """Return the symbols after which a string can still end."""
        alive = self.live()
        return tuple(
            symbol
            for symbol, target in zip(self.alphabet, self.transitions[state], strict=True)
            if target != NOWHERE and alive[target]
        )

    # --- what it does ---------------------------------------------------------------------------

    def run(self, symbols: Iterable[str]) -> list[int]:
        """Return the states of a string: the start, then one after each symbol."""
        states = [self.start]
        for place, symbol in enumerate(symbols):
            if symbol not in self.alphabet:
                raise InputError(
                    f"'{symbol}' is not in the alphabet",
                    where=f"symbol {place + 1}",
                    hint=nearest(symbol, self.alphabet),
                )
            target = self.transitions[states[-1]][self.alphabet.index(symbol)]
            if target == NOWHERE:
                raise InputError(
                    f"'{symbol}' is not possible in state {states[-1]}",
                    where=f"symbol {place + 1}",
                    hint=f"legal: {' '.join(self.legal(states[-1])) or 'only to end'}",
                )
            states.append(target)
        return states

    def run_classes(self, symbols: Iterable[str]) -> list[str]:
        """Return the classes of a string: of the empty one, then after each symbol."""
        return [self.class_names[self.classes[state]] for state in self.run(symbols)]

    def accepts(self, symbols: Iterable[str]) -> bool:
        """Return True if this string can be read to its last symbol and may end there."""
        state = self.start
        for symbol in symbols:
            if symbol not in self.alphabet:
                return False
            state = self.transitions[state][self.alphabet.index(symbol)]
            if state == NOWHERE:
                return False
        return self.ends[state]

    def trajectories(self, symbols_NL: Ints) -> NDArray[np.int64]:
        """Return the states (N, L + 1) of strings of symbol numbers; NOWHERE after their ends."""
        table = np.pad(self.table(), ((0, 1), (0, 1)), constant_values=NOWHERE)
        states = np.full((len(symbols_NL), symbols_NL.shape[1] + 1), self.start, dtype=np.int64)
        for place in range(symbols_NL.shape[1]):
            states[:, place + 1] = table[states[:, place], symbols_NL[:, place]]
        return states

    # --- other machines -------------------------------------------------------------------------

    def completed(self, *, dead_class: int = 0) -> "Machine":
        """Return the machine with a dead state for missing transitions, if any are missing."""
        if not self.missing():
            return self
        dead = self.n_states
        table = np.where(self.table() == NOWHERE, dead, self.table()).tolist()
        return replace(
            self,
            transitions=(*map(tuple, table), (dead,) * len(self.alphabet)),
            classes=(*self.classes, dead_class),
            ends=(*self.ends, False),
        )

    def trimmed(self) -> "Machine":
        """Return the machine without states that are unreachable or from which no string can end.

        States are numbered as a breadth-first walk meets them.
        """
        alive = self.live()
        if not alive[self.start]:
            raise InputError("no string of this machine ever ends", hint="let a state be an end")
        rows = (
            tuple(t if t != NOWHERE and alive[t] else NOWHERE for t in row)
            for row in self.transitions
        )
        cut = replace(self, transitions=tuple(rows))
        return cut._kept(cut.reachable())

    def minimised(self) -> "Machine":
        """Return the smallest machine with the same classes and ends after every string (Hopcroft).

        States are numbered as a breadth-first walk meets them, so that two machines are equivalent
        exactly if their minimised ones are equal.
        """
        part = self._kept(self.reachable())
        dead = part.n_states  # stands for all strings that cannot be read
        table_QA = np.where(part.table() == NOWHERE, dead, part.table())
        table_QA = np.vstack([table_QA, np.full((1, len(self.alphabet)), dead)])
        labels_Q = [2 * kind + end for kind, end in zip(part.classes, part.ends, strict=True)]
        blocks_Q = coarsest_refinement(table_QA, labels_Q=np.array([*labels_Q, -1]))
        # One state for each block, the first that a breadth-first walk meets.
        first: dict[int, int] = {}
        for state in range(part.n_states):
            first.setdefault(int(blocks_Q[state]), state)
        merged = tuple(
            tuple(NOWHERE if t == dead else first[int(blocks_Q[t])] for t in row)
            for row in table_QA[:dead].tolist()
        )
        whole = replace(part, transitions=merged)
        return whole._kept(whole.reachable())

    def _kept(self, states: Sequence[int]) -> "Machine":
        """Return the machine of these states only, in this order; other targets become NOWHERE."""
        number = {state: place for place, state in enumerate(states)} | {NOWHERE: NOWHERE}
        return replace(
            self,
            transitions=tuple(
                tuple(number.get(t, NOWHERE) for t in self.transitions[state]) for state in states
            ),
            classes=tuple(self.classes[state] for state in states),
            ends=tuple(self.ends[state] for state in states),
            start=number[self.start],
        )


def counterexample(a: Machine, b: Machine) -> tuple[str, ...] | None:
    """Return a shortest string that tells two machines apart; None if they are equivalent.

    Equivalent: every string can be read by both or by neither, has classes of one name in both,
    and may end in both or in neither. Of several shortest strings, the first by `a`'s alphabet.
    """
    if set(a.alphabet) != set(b.alphabet):
        raise InputError(
            f"the alphabets differ: {' '.join(a.alphabet)} and {' '.join(b.alphabet)}",
            hint="equivalence is asked of machines over the same symbols",
        )

    def said(machine: Machine, state: int) -> tuple[str, bool] | None:
        if state == NOWHERE:
            return None
        return machine.class_names[machine.classes[state]], machine.ends[state]

    def step(machine: Machine, state: int, symbol: str) -> int:
        if state == NOWHERE:
            return NOWHERE
        return machine.transitions[state][machine.alphabet.index(symbol)]

    begin = (a.start, b.start)
    came: dict[tuple[int, int], tuple[tuple[int, int], str] | None] = {begin: None}
    queue = deque([begin])
    while queue:
        pair = queue.popleft()
        if said(a, pair[0]) != said(b, pair[1]):
            string: list[str] = []
            back = came[pair]
            while back is not None:
                string.append(back[1])
                back = came[back[0]]
            return tuple(reversed(string))
        for symbol in a.alphabet:
            following = (step(a, pair[0], symbol), step(b, pair[1], symbol))
            if following not in came:
                came[following] = (pair, symbol)
                queue.append(following)
    return None


def equivalent(a: Machine, b: Machine) -> bool:
    """Return True if no string tells the machines apart."""
    return counterexample(a, b) is None
