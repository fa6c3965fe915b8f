"""A finite-state machine as a mask on the next token: every output is accepted by the machine.

A table says, for each state and number of new tokens, whether an accepting end can still be reached
within the limits; a token after which it cannot is masked. So no sequence is cut off in a state
that does not accept, and a constraint that allows nothing is refused before any work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from glassformer.data.automata.construct import machine_of_regex
from glassformer.data.automata.machine import NOWHERE, Machine
from glassformer.data.tokenizers.vocab import Tokenizer, Vocab
from glassformer.spec.errors import InputError

# B batch, Q states, V vocab, E edges

#: The distance of an end that cannot be reached; more states than numbers of 16 bits name.
NEVER, MOST_STATES = 1 << 40, 1 << 15
#: Bytes of masks that are kept for the next tokens of a sequence.
MOST_KEPT_BYTES = 1 << 25
#: Tokens whose states are computed together.
TOGETHER = 4_096


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """The symbols of every token: alone (at the beginning of a text), and behind other text.

    A token of a `Vocab` is one symbol, its name; a token of any other tokenizer is the characters
    of its text. The text of a token alone is the end of its text after other tokens.
    """

    alone: tuple[str, ...]
    behind: tuple[str, ...]
    are_names: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenTexts":
        """Decode every token."""
        alone = tuple(tokenizer.decode([token]) for token in range(tokenizer.vocab_size))
        if isinstance(tokenizer, Vocab):
            return cls(alone, alone, are_names=True)
        # Behind a plain word, which no half character can join.
        before = next(
            (i for i, text in enumerate(alone) if text.isascii() and text.isalnum()), None
        )
        if before is None:
            return cls(alone, alone, are_names=False)
        behind = (
            tokenizer.decode([before, token]).removeprefix(alone[before])
            for token in range(tokenizer.vocab_size)
        )
        return cls(alone, tuple(behind), are_names=False)


class Constraint:
    """A machine over a tokenizer's tokens.

    Tokens with other symbols are never legal. What a token adds can depend on whether it is the
    first (a space before it is then not written), so there is a state for nothing yet. `texts` are
    the tokenizer's, where they are known already.
    """

    def __init__(
        self, machine: Machine, *, tokenizer: Tokenizer, texts: TokenTexts | None = None
    ) -> None:
        texts = TokenTexts.of(tokenizer) if texts is None else texts
        self._take(targets(machine, texts), [*machine.ends, machine.ends[machine.start]])

    def _take(self, target_QV: NDArray[np.int16], ends: Sequence[bool]) -> None:
        self._last: tuple[object, _Table] | None = None
        self._bounded: WeakValueDictionary[object, Bounded] = WeakValueDictionary()
        #: (Q, V): the state after a token, NOWHERE if it is not possible.
        self.target_QV = target_QV
        self.vocab_size = target_QV.shape[1]
        #: The machine's states, and the one in which nothing was made yet, the last.
        self.start = len(target_QV) - 1
        self.ends_Q = np.array(ends, dtype=np.bool_)

    @classmethod
    def of_table(cls, target_QV: NDArray[np.int16], *, ends: Sequence[bool]) -> "Constraint":
        """Return a constraint from what `targets` returned; `ends` has the state for nothing."""
        made = cls.__new__(cls)
        made._take(target_QV, ends)
        return made

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
        key = (shortest, longest, vocab_size, tuple(eos), tuple(forbidden), tuple(forced))
        bounded = self._bounded.get(key)
        if bounded is not None:
            return bounded
        table = self._table(vocab_size, tuple(eos), tuple(forbidden))
        bounded = Bounded(
            start=self.start,
            target_QV=table.target_QV,
            left_Q=table.left_Q,
            early_LQ=_early(table, shortest, longest, ends, forced),
            ends_Q=self.ends_Q,
            eos=tuple(ends),
            shortest=shortest,
            longest=longest,
        )
        if not bounded.can(0)[self.start]:
            raise InputError(
                f"the constraint allows no sequence of {shortest} to {longest} tokens"
                + (f" that begins with {list(forced)}" if forced else ""),
                hint="allow more new tokens, or loosen the constraint",
            )
        if bounded.over(self.start, 0):
            raise InputError(
                "the constraint allows nothing but an empty sequence, and no end token is known",
                hint="give eos, or loosen the constraint",
            )
        self._bounded[key] = bounded  # the choices of a request share it while one of them runs
        return bounded

    def _table(self, vocab_size: int, eos: tuple[int, ...], forbidden: tuple[int, ...]) -> "_Table":
        """Return the table for a model's vocabulary, without ends; the last one made is kept."""
        key = (vocab_size, eos, forbidden)
        last = self._last
        if last is None or last[0] != key:
            more = vocab_size - self.vocab_size
            target_QV = np.pad(self.target_QV, ((0, 0), (0, more)), constant_values=NOWHERE)
            target_QV[:, list(forbidden)] = NOWHERE
            target_QV[:, list(eos)] = NOWHERE
            last = self._last = key, _Table.of(target_QV, self.ends_Q)
        return last[1]


@dataclass(frozen=True, slots=True)
class _Table:
    """States after tokens, the edges between states, and how many tokens an end is away."""

    target_QV: NDArray[np.int16]
    from_E: NDArray[np.int64]
    to_E: NDArray[np.int64]
    ends_Q: NDArray[np.bool_]
    left_Q: NDArray[np.int64]

    @classmethod
    def of(cls, target_QV: NDArray[np.int16], ends_Q: NDArray[np.bool_]) -> "_Table":
        """Find the edges, and walk from the ends backwards: each edge once."""
        n_states = len(target_QV)
        adjacent_QQ = np.zeros((n_states, n_states), dtype=np.bool_)
        for state, targets_V in enumerate(target_QV):
            adjacent_QQ[state, targets_V[targets_V != NOWHERE]] = True
        from_E, to_E = np.nonzero(adjacent_QQ)
        order_E = np.argsort(to_E, kind="stable")
        entering_E = from_E[order_E]
        first_Q = np.searchsorted(to_E[order_E], np.arange(n_states + 1))
        left_Q = np.where(ends_Q, 0, NEVER)
        reached, steps = np.flatnonzero(ends_Q), 0
        while len(reached):
            steps += 1
            spans = [entering_E[first_Q[state] : first_Q[state + 1]] for state in reached]
            before = np.unique(np.concatenate(spans))
            reached = before[left_Q[before] == NEVER]
            left_Q[reached] = steps
        return cls(target_QV, from_E, to_E, ends_Q, left_Q)


def _early(
    table: _Table, shortest: int, longest: int, ends: Sequence[int], forced: Sequence[int]
) -> NDArray[np.bool_]:
    """Return a table (L, Q) by tokens made and state: True if an end can be reached.

    For those numbers of tokens where a sequence is too short to end or tokens are forced; from
    then on the distance to the nearest end decides (`Bounded.can`), which is the row after.
    """
    first = min(max(shortest - 1 if ends else shortest, len(forced), 0), longest + 1)
    can_LQ = np.zeros((first + 1, len(table.ends_Q)), dtype=np.bool_)
    can_LQ[first] = table.left_Q <= longest - first - (1 if ends else 0)
    seen: dict[bytes, int] = {}
    for made in range(first - 1, -1, -1):
        if made >= len(forced):  # nothing but the row after decides: rows may repeat
            key = can_LQ[made + 1].tobytes()
            period = seen.setdefault(key, made + 1) - (made + 1)
            if period:
                can_LQ[made] = can_LQ[made + period]
                continue
        onward_Q = np.zeros_like(table.ends_Q)
        if made < longest and made < len(forced):
            target_Q = table.target_QV[:, forced[made]]
            onward_Q = (target_Q != NOWHERE) & can_LQ[made + 1, target_Q]
        elif made < longest:
            onward_Q[table.from_E[can_LQ[made + 1, table.to_E]]] = True
        stop_Q = np.zeros_like(table.ends_Q)
        if ends:
            forced_end = made >= len(forced) or forced[made] in ends
            stop_Q = table.ends_Q & (shortest <= made + 1 <= longest and forced_end)
        can_LQ[made] = stop_Q | onward_Q
    return can_LQ[:first]


def targets(machine: Machine, texts: TokenTexts) -> NDArray[np.int16]:
    """Return the states (Q, V) after each token, NOWHERE if it is not possible.

    The last row is the state in which nothing was made yet.
    """
    table_QA = np.asarray(machine.transitions, dtype=np.int16)
    if len(table_QA) >= MOST_STATES:
        raise InputError(f"a machine of {len(table_QA):,} states", hint=f"fewer than {MOST_STATES}")
    number = {symbol: place for place, symbol in enumerate(machine.alphabet)}
    alone = _symbols(texts.alone, number, are_names=texts.are_names)
    behind = _symbols(texts.behind, number, are_names=texts.are_names)
    target_QV = np.full((len(table_QA) + 1, len(texts.alone)), NOWHERE, dtype=np.int16)
    legal = np.array([bool(text) for text in texts.alone], dtype=np.bool_) & alone.known_V
    _fill(target_QV[-1:], table_QA, alone, legal, np.array([machine.start], dtype=np.int16))
    everywhere = np.arange(len(table_QA), dtype=np.int16)
    _fill(target_QV[:-1], table_QA, behind, legal & behind.known_V, everywhere)
    if (target_QV == NOWHERE).all():
        raise InputError(
            "no token of the vocabulary is a symbol of the constraint's machine",
            hint=f"its symbols: {' '.join(machine.alphabet[:12])}",
        )
    return target_QV


@dataclass(frozen=True, slots=True)
class _Symbols:
    """The numbers of all tokens' symbols one after another; token i's begin at first_V[i]."""

    numbers: NDArray[np.int32]
    first_V: NDArray[np.int64]
    known_V: NDArray[np.bool_]


def _symbols(texts: Sequence[str], number: Mapping[str, int], *, are_names: bool) -> _Symbols:
    if are_names:
        numbers = np.array([number.get(text, NOWHERE) for text in texts], dtype=np.int32)
        return _Symbols(numbers, np.arange(len(texts) + 1), numbers != NOWHERE)
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    first_V = np.concatenate([[0], np.cumsum(lengths)])
    joined = "".join(texts).encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(joined, dtype=np.uint32)
    of_code = np.full(int(codes.max(initial=0)) + 2, NOWHERE, dtype=np.int32)
    for symbol, place in number.items():
        if len(symbol) == 1 and ord(symbol) < len(of_code):
            of_code[ord(symbol)] = place
    numbers = of_code[codes]
    unknown_V = np.concatenate([[0], np.cumsum(numbers == NOWHERE)])
    return _Symbols(numbers, first_V, unknown_V[first_V[1:]] == unknown_V[first_V[:-1]])


def _fill(
    target_QV: NDArray[np.int16],
    table_QA: NDArray[np.int16],
    symbols: _Symbols,
    legal_V: NDArray[np.bool_],
    begin_Q: NDArray[np.int16],
) -> None:
    """Write the states that legal tokens lead to from each of some states: the shortest first."""
    dead = len(table_QA)
    table_QA = np.pad(table_QA, ((0, 1), (0, 0)), constant_values=NOWHERE)
    table_QA = np.where(table_QA == NOWHERE, np.int16(dead), table_QA)
    lengths_V = np.diff(symbols.first_V)
    tokens = np.flatnonzero(legal_V)
    tokens = tokens[np.argsort(lengths_V[tokens], kind="stable")]
    together = max(TOGETHER * 64 // len(begin_Q), 64)
    for low in range(0, len(tokens), together):
        part = tokens[low : low + together]
        first, lengths = symbols.first_V[part], lengths_V[part]
        state_QN = np.repeat(begin_Q[:, None], len(part), axis=1)
        for place in range(int(lengths[-1])):
            on = int(np.searchsorted(lengths, place, side="right"))  # those that go on
            read = symbols.numbers[first[on:] + place]
            state_QN[:, on:] = table_QA[state_QN[:, on:], read]
        target_QV[:, part] = np.where(state_QN == dead, NOWHERE, state_QN)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Bounded:
    """A constraint with its limits; the caller keeps the state of each row."""

    start: int
    target_QV: NDArray[np.int16]
    left_Q: NDArray[np.int64]
    early_LQ: NDArray[np.bool_]
    ends_Q: NDArray[np.bool_]
    eos: tuple[int, ...]
    shortest: int
    longest: int
    _at: dict[tuple[int, int], NDArray[np.bool_]] = field(default_factory=dict)
    _masks: dict[tuple[int, bytes], NDArray[np.bool_]] = field(default_factory=dict)

    def can(self, made: int) -> NDArray[np.bool_]:
        """Return for each state whether an end can be reached after `made` tokens, in time."""
        if made < len(self.early_LQ):
            early_Q: NDArray[np.bool_] = self.early_LQ[made]
            return early_Q
        in_time_Q: NDArray[np.bool_] = self.left_Q <= self.longest - made - bool(self.eos)
        return in_time_Q

    def allow(self, state: int, made: int) -> NDArray[np.bool_]:
        """Return the tokens (V,) allowed in this state after `made` new ones. Read only."""
        found = self._at.get((state, made))
        if found is None:
            if len(self._masks) * self.target_QV.shape[1] >= MOST_KEPT_BYTES:
                self._at.clear()
                self._masks.clear()
            found = self._at[state, made] = self._mask(state, made)
        return found

    def _mask(self, state: int, made: int) -> NDArray[np.bool_]:
        """Return the mask; far from the limits it does not depend on `made`, and is kept once."""
        end = bool(self.ends_Q[state]) and self.shortest <= made + 1
        can_Q = self.can(made + 1) if made < self.longest else np.zeros_like(self.ends_Q)
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
