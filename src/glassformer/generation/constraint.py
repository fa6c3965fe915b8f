"""A finite-state machine as a mask on the next token: every output is accepted by the machine.

A table says, for each state and number of new tokens, whether an accepting end can still be reached
within the limits; a token after which it cannot is masked. So no sequence is cut off in a state
that does not accept, and a constraint that allows nothing is refused before any work.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from glassformer.data.automata.construct import machine_of_regex
from glassformer.data.automata.machine import NOWHERE, Machine
from glassformer.data.tokenizers.vocab import Tokenizer, Vocab
from glassformer.spec.errors import InputError

# B batch, Q states, V vocab

MOST_KEPT = 1_000  # masks in the cache


class Constraint:
    """A machine over a tokenizer's tokens.

    A token of a `Vocab` is one symbol, its name; a token of any other tokenizer is the characters
    of its text. Tokens with other symbols are never legal. What a token adds can depend on whether
    it is the first (a space before it is then not written), so there is a state for nothing yet.
    """

    def __init__(self, machine: Machine, *, tokenizer: Tokenizer) -> None:
        self.machine = machine
        self._last: tuple[object, NDArray[np.int64]] | None = None
        self.vocab_size = tokenizer.vocab_size
        #: The machine's states, and the one in which nothing was made yet, the last.
        self.start = machine.n_states
        self.ends_Q = np.array([*machine.ends, machine.ends[machine.start]])
        #: (Q, V): the state after a token, NOWHERE if it is not possible.
        self.target_QV = np.full((self.start + 1, self.vocab_size), NOWHERE, dtype=np.int64)
        table_QA = machine.table()
        number = {symbol: place for place, symbol in enumerate(machine.alphabet)}
        for token, first, later in _texts(tokenizer, frozenset(number)):
            state_Q = _after(table_QA, [number[symbol] for symbol in first])
            self.target_QV[self.start, token] = state_Q[machine.start]
            if first == later:
                self.target_QV[: self.start, token] = state_Q
            elif all(symbol in number for symbol in later):
                behind = [number[symbol] for symbol in later]
                self.target_QV[: self.start, token] = _after(table_QA, behind)
        if (self.target_QV == NOWHERE).all():
            raise InputError(
                "no token of the vocabulary is a symbol of the constraint's machine",
                hint=f"its symbols: {' '.join(machine.alphabet[:12])}",
            )

    @classmethod
    def of_regex(cls, pattern: str, *, tokenizer: Tokenizer) -> "Constraint":
        """Return a constraint to strings that match the pattern (see `data.automata.construct`)."""
        spaces = not isinstance(tokenizer, Vocab)  # its tokens are names, never a blank
        return cls(machine_of_regex(pattern, spaces=spaces), tokenizer=tokenizer)

    def within(
        self,
        *,
        shortest: int,
        longest: int,
        vocab_size: int,
        eos: Sequence[int] = (),
        forbidden: Sequence[int] = (),
        forced: Sequence[int] = (),
    ) -> "Bounded":
        """Return this constraint for sequences of `shortest` to `longest` tokens, the end counted.

        Without an `eos` a sequence ends at `longest`, or where nothing can follow. A model may know
        more tokens than the tokenizer does; those are never legal.
        """
        if vocab_size < self.vocab_size:
            raise InputError(
                f"the constraint's tokenizer has {self.vocab_size} tokens, the model {vocab_size}",
                hint="use the model's own tokenizer",
            )
        ends = [token for token in eos if token not in forbidden]
        if eos and not ends:
            raise InputError("every end is forbidden, and the constraint asks for one")
        target_QV = self._table(vocab_size, tuple(eos), tuple(forbidden))
        can_LQ = self._reachable_ends(target_QV, shortest, longest, ends, forced)
        if not can_LQ[0, self.start]:
            raise InputError(
                f"the constraint allows no sequence of {shortest} to {longest} tokens"
                + (f" that begins with {list(forced)}" if forced else ""),
                hint="allow more new tokens, or loosen the constraint",
            )
        bounded = Bounded(
            start=self.start,
            target_QV=target_QV,
            can_LQ=can_LQ,
            ends_Q=self.ends_Q,
            eos=tuple(ends),
            shortest=shortest,
            longest=longest,
        )
        if bounded.over(self.start, 0):
            raise InputError(
                "the constraint allows nothing but an empty sequence, and no end token is known",
                hint="give eos, or loosen the constraint",
            )
        return bounded

    def _table(
        self, vocab_size: int, eos: tuple[int, ...], forbidden: tuple[int, ...]
    ) -> NDArray[np.int64]:
        """Return the table for a model's vocabulary, without ends; the last one made is kept."""
        key = (vocab_size, eos, forbidden)
        if self._last is None or self._last[0] != key:
            more = vocab_size - self.vocab_size
            target_QV = np.pad(self.target_QV, ((0, 0), (0, more)), constant_values=NOWHERE)
            target_QV[:, list(forbidden)] = NOWHERE
            target_QV[:, list(eos)] = NOWHERE
            self._last = key, target_QV
        return self._last[1]

    def _reachable_ends(
        self,
        target_QV: NDArray[np.int64],
        shortest: int,
        longest: int,
        ends: Sequence[int],
        forced: Sequence[int],
    ) -> NDArray[np.bool_]:
        """Return a table (longest + 1, Q) by tokens made and state: True if an end is reachable."""
        n_states, ends_Q = len(target_QV), self.ends_Q
        adjacent_QQ = np.zeros((n_states, n_states), dtype=np.bool_)
        for state in range(n_states):
            targets = target_QV[state]
            adjacent_QQ[state, targets[targets != NOWHERE]] = True
        can_LQ = np.zeros((longest + 1, n_states), dtype=np.bool_)
        for made in range(longest, -1, -1):
            onward_Q = np.zeros(n_states, dtype=np.bool_)
            if made < longest:
                following_QQ = adjacent_QQ
                if made < len(forced):
                    target_Q = target_QV[:, forced[made]]
                    following_QQ = target_Q[:, None] == np.arange(n_states)
                onward_Q = (following_QQ & can_LQ[made + 1]).any(axis=1)
            if ends:
                end_fits = shortest <= made + 1 <= longest
                forced_end = made >= len(forced) or forced[made] in ends
                stop_Q = ends_Q & (end_fits and forced_end)
            else:
                stop_Q = ends_Q & (made >= shortest) & (made >= len(forced))
                if made < longest:
                    stop_Q &= ~onward_Q
            can_LQ[made] = stop_Q | onward_Q
        return can_LQ


def _texts(
    tokenizer: Tokenizer, known: frozenset[str]
) -> Iterator[tuple[int, tuple[str, ...], tuple[str, ...]]]:
    """Yield tokens that may be allowed, with their symbols at the start of a text and later in it.

    The text of a token alone is the end of its text after other tokens.
    """
    alone = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    # Behind a plain word, which no half character can join.
    before = next((i for i, text in enumerate(alone) if text.isascii() and text.isalnum()), None)
    for token, text in enumerate(alone):
        if isinstance(tokenizer, Vocab):
            if text in known:
                yield token, (text,), (text,)
        elif text and known.issuperset(text):
            behind = text
            if before is not None:
                behind = tokenizer.decode([before, token]).removeprefix(alone[before])
            yield token, tuple(text), tuple(behind)


def _after(table_QA: NDArray[np.int64], symbols: Sequence[int]) -> NDArray[np.int64]:
    """Return the state (Q,) that these symbols lead to from each; NOWHERE if impossible."""
    state_Q = np.arange(len(table_QA))
    for symbol in symbols:
        state_Q = np.where(state_Q == NOWHERE, NOWHERE, table_QA[state_Q, symbol])
    return state_Q


@dataclass(frozen=True, slots=True)
class Bounded:
    """A constraint with its limits; the caller keeps the state of each row."""

    start: int
    target_QV: NDArray[np.int64]
    can_LQ: NDArray[np.bool_]
    ends_Q: NDArray[np.bool_]
    eos: tuple[int, ...]
    shortest: int
    longest: int
    _at: dict[tuple[int, int], NDArray[np.bool_]] = field(default_factory=dict)
    _masks: dict[tuple[int, bytes], NDArray[np.bool_]] = field(default_factory=dict)

    def allow(self, state: int, made: int) -> NDArray[np.bool_]:
        """Return the tokens (V,) allowed in this state after `made` new ones. Read only."""
        found = self._at.get((state, made))
        if found is None:
            if len(self._masks) >= MOST_KEPT:
                self._at.clear()
                self._masks.clear()
            found = self._at[state, made] = self._mask(state, made)
        return found

    def _mask(self, state: int, made: int) -> NDArray[np.bool_]:
        """Return the mask; far from the limits it does not depend on `made`, and is kept once."""
        end = bool(self.ends_Q[state]) and self.shortest <= made + 1
        can_Q = self.can_LQ[made + 1] if made < self.longest else np.zeros_like(self.ends_Q)
        key = (2 * state + end, can_Q.tobytes())
        if key not in self._masks:
            target_V = self.target_QV[state]
            allow_V = (target_V != NOWHERE) & can_Q[target_V]
            allow_V[list(self.eos)] = end
            self._masks[key] = allow_V
        return self._masks[key]

    def advance(self, state: int, token: int) -> int:
        """Return the state after a token; an end token changes nothing."""
        target = int(self.target_QV[state, token])
        return state if target == NOWHERE else target

    def over(self, state: int, made: int) -> bool:
        """True if nothing can follow here; only without an end token."""
        return not self.eos and not self.allow(state, made).any()
