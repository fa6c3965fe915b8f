"""Machines made from something else: from a regular expression, or from a teacher's answers.

Regular expressions: a small parser, Thompson's construction, subsets, minimisation. Supported:
characters, `|`, `*`, `+`, `?`, `( )`, `[abc]`, `[a-c]`, `[^a]`, `.` for any symbol of the
alphabet, and `\\` before a literal character. The meaning is that of Python's `re.fullmatch`.

Queries: Angluin's algorithm, for anything that can be asked about strings. A teacher answers what
it observes after a string: a label, which symbols may follow, whether the string may end. Two
strings are in one state if no suffix in a growing set tells them apart; a string on which the
machine and the teacher disagree gives the next suffix (Rivest and Schapire). Nothing here knows
the true machine.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from glassformer.data.automata.machine import NOWHERE, Machine
from glassformer.spec.errors import InputError

FOREIGN = "^$]{}"  # special in `re`, not supported here
DEEPEST = 50  # brackets within brackets
MOST_STATES = 2_000
WIDEST = 255  # from one end of a range to the other
LONGEST_PATTERN = 20_000
#: Steps of a construction: symbols of choices, moves followed, states met. About a second.
MOST_WORK = 3_000_000
#: States x kinds of symbols of the machine that is minimised, whose work grows a little faster.
MOST_MOVES = 1 << 18


def machine_of_regex(
    pattern: str, *, alphabet: Sequence[str] = (), spaces: bool = False
) -> Machine:
    """Return the smallest machine whose strings may end exactly where they match; no dead ends.

    The default alphabet is the characters that occur in the pattern, in order; a blank may be one
    of them with `spaces`, where symbols are written one behind another. A pattern that needs too
    much work or memory is refused: what is counted does not depend on the computer.
    """
    if len(pattern) > LONGEST_PATTERN:
        raise InputError(
            f"a pattern of {len(pattern):,} characters", hint=f"at most {LONGEST_PATTERN:,}"
        )
    work = _Work()
    if not alphabet:
        reader = _Parser(pattern, None, work=work, spaces=spaces)
        reader.whole()
        alphabet = sorted(reader.named)
    parser = _Parser(pattern, tuple(alphabet), work=work, spaces=spaces)
    start, end = parser.whole()
    return _determinised(parser, start, end, work)


class _Work:
    """The steps that a construction may still take."""

    def __init__(self) -> None:
        self.left = MOST_WORK

    def take(self, steps: int) -> None:
        """Count some steps; refuse the pattern if there are too many."""
        self.left -= steps
        if self.left < 0:
            raise InputError(
                f"the machine of the pattern takes more than {MOST_WORK:,} steps to build",
                hint="fewer repetitions within repetitions, or shorter choices",
            )


#: The symbols that a move reads: those of the set, or with True all others.
Label = tuple[bool, frozenset[str]]


class _Parser:
    """A parser that reads a pattern once, left to right, and builds Thompson's machine on the way.

    A part is a pair of states, entered at the first and left at the second. `free[q]` are the moves
    that read nothing, `moves[q]` those that read one of some characters: the number of a label, of
    which each is there once, and the next state.
    """

    def __init__(
        self, pattern: str, alphabet: tuple[str, ...] | None, *, work: _Work, spaces: bool = False
    ) -> None:
        self.pattern = pattern
        self.place = 0
        self.depth = 0
        self.free: list[list[int]] = []
        self.moves: list[tuple[int, int] | None] = []
        self.labels: dict[Label, int] = {}
        self.named: set[str] = set()  # characters met so far
        self.open = alphabet is None  # a first reading, which only collects the characters
        self.alphabet = alphabet or ()
        self.known = frozenset(self.alphabet)
        self.work = work
        for symbol in self.alphabet:
            blank = symbol.isspace() and not (spaces and symbol == " ")
            if len(symbol) != 1 or blank:
                raise self.error(f"symbol {symbol!r} is not a single visible character")
        if not self.open and not self.alphabet:
            raise self.error("the pattern names no symbol", hint="name one, e.g. (ab)*")

    def error(self, what: str, *, hint: str = "") -> InputError:
        """Return an error with its position in the pattern."""
        return InputError(
            what, where=f"character {self.place} of regex '{self.pattern}'", hint=hint
        )

    def whole(self) -> tuple[int, int]:
        """Parse the complete pattern."""
        part = self.union()
        if self.place < len(self.pattern):
            raise self.error("a ) that closes nothing", hint="write \\) for the character itself")
        return part

    def union(self) -> tuple[int, int]:
        """Parse concat | concat | …"""
        start, end = self.state(), self.state()
        while True:
            first, last = self.concat()
            self.free[start].append(first)
            self.free[last].append(end)
            if self.peek() != "|":
                return start, end
            self.place += 1

    def concat(self) -> tuple[int, int]:
        """Parse parts one after another; none at all matches the empty string."""
        start = end = self.state()
        while self.peek() not in ("", "|", ")"):
            first, last = self.repeated()
            self.free[end].append(first)
            end = last
        return start, end

    def repeated(self) -> tuple[int, int]:
        """Parse a part, and how often it occurs."""
        first, last = self.atom()
        how = self.peek()
        if how not in ("*", "+", "?"):
            return first, last
        self.place += 1
        if self.peek() in ("*", "+", "?"):
            raise self.error("one repetition directly after another", hint="use brackets: (a*)?")
        start, end = self.state(), self.state()
        self.free[start].append(first)
        self.free[last].append(end)
        if how in "*?":
            self.free[start].append(end)
        if how in "*+":
            self.free[last].append(first)
        return start, end

    def atom(self) -> tuple[int, int]:
        """Parse one character of some, or a part in brackets."""
        character = self.peek()
        if character == "(":
            if self.depth == DEEPEST:
                raise self.error(f"more than {DEEPEST} brackets within brackets")
            self.place += 1
            self.depth += 1
            part = self.union()
            self.depth -= 1
            if self.peek() != ")":
                raise self.error("a ( that is not closed")
            self.place += 1
            return part
        if character == "[":
            return self.reads(self.choice())
        if character == ".":
            self.place += 1
            return self.reads((True, frozenset()))
        if character in ("*", "+", "?"):
            raise self.error(f"nothing before {character} to repeat")
        return self.reads((False, frozenset(self.literal())))

    def choice(self) -> Label:
        """Parse [abc], [a-c], [^abc]."""
        opened = self.place
        self.place += 1
        inverted = self.peek() == "^"
        self.place += inverted
        members: set[str] = set()
        while self.peek() != "]":
            if self.peek() == "":
                self.place = opened
                raise self.error("a [ that is not closed")
            low = self.member()
            if self.peek() == "-" and self.peek(1) not in ("]", ""):
                self.place += 1
                high = self.member()
                if high < low:
                    raise self.error(f"the range {low}-{high} is empty")
                if ord(high) - ord(low) > WIDEST:
                    raise self.error(f"the range {low}-{high} has more than {WIDEST} symbols")
                self.work.take(2 * (ord(high) - ord(low)))
                members |= {chr(code) for code in range(ord(low), ord(high) + 1)}
            else:
                members.add(low)
        self.place += 1
        self.named |= members
        is_empty = self.known <= members if inverted else self.known.isdisjoint(members)
        if is_empty and not self.open:
            raise self.error("a choice of no symbol")
        return inverted, frozenset(members)

    def member(self) -> str:
        """Parse one character between [ and ], where only \\ is special."""
        if self.peek() == "\\":
            self.place += 1
            if self.peek().isalnum():
                raise self.error(f"\\{self.peek()} is not known here")
        if self.peek() == "":
            raise self.error("the pattern ends within [")
        self.place += 1
        return self.pattern[self.place - 1]

    def literal(self) -> str:
        """Parse one character that stands for itself."""
        character = self.peek()
        if character in FOREIGN:
            raise self.error(
                f"'{character}' is not known here", hint=f"write \\{character} for itself"
            )
        if character == "\\":
            self.place += 1
            character = self.peek()
            if character == "" or character.isalnum():
                raise self.error(f"\\{character} is not known here")
        if character not in self.known and not self.open:
            raise self.error(f"'{character}' is not in the alphabet {' '.join(self.alphabet)}")
        self.place += 1
        self.named.add(character)
        return character

    def peek(self, ahead: int = 0) -> str:
        """Return the next character, empty at the end."""
        return self.pattern[self.place + ahead : self.place + ahead + 1]

    def state(self) -> int:
        """Add a state; return its number."""
        self.free.append([])
        self.moves.append(None)
        return len(self.free) - 1

    def reads(self, label: Label) -> tuple[int, int]:
        """Return a part that reads one of a label's symbols."""
        start, end = self.state(), self.state()
        if not self.open:
            self.moves[start] = (self.labels.setdefault(label, len(self.labels)), end)
        return start, end


def _kinds(parser: _Parser, work: _Work) -> tuple[list[int], list[list[int]]]:
    """Return the kind of each symbol, and the kinds that each label reads.

    Symbols that every label reads or leaves together are of one kind, and are moved as one.
    """
    names: dict[str, list[int]] = {symbol: [] for symbol in parser.alphabet}
    for (_, members), label in parser.labels.items():
        work.take(len(members))
        for symbol in members & parser.known:
            names[symbol].append(label)
    numbers: dict[tuple[int, ...], int] = {}
    kind_of = {
        symbol: numbers.setdefault(tuple(sorted(labels)), len(numbers))
        for symbol, labels in names.items()
    }
    reads = []
    for inverted, members in parser.labels:
        named = {kind_of[symbol] for symbol in members & parser.known}
        if inverted:
            work.take(len(numbers))
            named = set(range(len(numbers))) - named
        reads.append(sorted(named))
    return list(kind_of.values()), reads


def _determinised(parser: _Parser, start: int, end: int, work: _Work) -> Machine:
    """Return the smallest machine of the sets of states of a string; class 1 if it may end.

    A set is the states in it that read something, and the last one: the others follow from them.
    """
    kinds, reads = _kinds(parser, work)
    n_kinds = max(kinds) + 1
    number: dict[bytes, int] = {}
    order: list[array[int]] = []

    def numbered(targets: Iterable[int]) -> int:
        seen = set(targets)
        waiting = list(seen)
        for state in waiting:  # grows while it is read
            fresh = [one for one in parser.free[state] if one not in seen]
            seen.update(fresh)
            waiting += fresh
        work.take(2 * len(waiting))
        subset = array("I", sorted(q for q in seen if parser.moves[q] is not None or q == end))
        key = subset.tobytes()
        if key not in number:
            number[key] = len(order)
            order.append(subset)
            if len(order) > MOST_STATES:
                raise parser.error(f"the machine has more than {MOST_STATES} states")
            if len(order) * n_kinds > MOST_MOVES:
                raise InputError(
                    f"the machine has more than {MOST_MOVES:,} states times kinds of symbols",
                    hint="fewer different symbols, or a shorter pattern",
                )
        return number[key]

    numbered([start])
    table: list[list[int]] = []
    for subset in order:  # grows while it is read
        targets: dict[int, set[int]] = {}
        for state in subset:
            move = parser.moves[state]
            if move is None:
                continue
            work.take(len(reads[move[0]]))
            for kind in reads[move[0]]:
                targets.setdefault(kind, set()).add(move[1])
        same: dict[frozenset[int], int] = {}  # kinds often lead to the same states
        row = [NOWHERE] * n_kinds
        work.take(n_kinds // 8)
        for kind, those in targets.items():
            key = frozenset(those)
            if key not in same:
                same[key] = numbered(key)
            row[kind] = same[key]
        table.append(row)
    accepted = tuple(end in subset for subset in order)
    small = (
        Machine(
            alphabet=tuple(map(str, range(n_kinds))),
            transitions=tuple(map(tuple, table)),
            classes=tuple(map(int, accepted)),
            ends=accepted,
        )
        .trimmed()
        .minimised()
    )
    return _respelled(small, parser.alphabet, kinds, work)


def _respelled(
    small: Machine, alphabet: tuple[str, ...], kinds: Sequence[int], work: _Work
) -> Machine:
    """Return a machine over kinds as one over symbols, its states in breadth-first order again."""
    work.take(small.n_states * len(alphabet) // 8)
    rows = [tuple(row[kind] for kind in kinds) for row in small.transitions]
    order = [small.start]
    seen = {small.start}
    for state in order:  # grows while it is read
        fresh = [t for t in dict.fromkeys(rows[state]) if t != NOWHERE and t not in seen]
        seen.update(fresh)
        order += fresh
    place = {state: number for number, state in enumerate(order)} | {NOWHERE: NOWHERE}
    return Machine(
        alphabet=alphabet,
        transitions=tuple(tuple(place[target] for target in rows[state]) for state in order),
        classes=tuple(small.classes[state] for state in order),
        ends=tuple(small.ends[state] for state in order),
    )


# --- from queries ---------------------------------------------------------------------------------


#: A string as numbers of symbols.
Word = tuple[int, ...]


class Seen(NamedTuple):
    """What is observed after a string. `ends` is None where the teacher cannot know it."""

    label: int
    allowed: tuple[bool, ...]
    ends: bool | None


#: The answer to a string that the teacher cannot read to its end.
BEYOND = Seen(label=-1, allowed=(), ends=None)
#: What a teacher answers: an observation, BEYOND, or None for a string that is not possible.
Answer = Seen | None
Teacher = Callable[[Word], Answer]


def agree(a: Answer, b: Answer) -> bool:
    """Return True unless the two observations differ in something that both know."""
    if a is BEYOND or b is BEYOND:
        return True
    if a is None or b is None:
        return a is b
    known = a.ends is not None and b.ends is not None
    return a.label == b.label and a.allowed == b.allowed and (a.ends == b.ends or not known)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """A machine that explains the answers so far; a shortest string that it gets wrong, if any.

    `access` is a shortest string to each state; `seen` what the teacher observes in it.
    """

    transitions: tuple[tuple[int, ...], ...]
    access: tuple[Word, ...]
    seen: tuple[Seen, ...]
    wrong: Word | None

    @property
    def n_states(self) -> int:
        """The number of states."""
        return len(self.transitions)

    def state(self, word: Iterable[int]) -> int:
        """Return the state after a string; NOWHERE if it is not possible."""
        state = 0
        for symbol in word:
            state = NOWHERE if state == NOWHERE else self.transitions[state][symbol]
        return state

    def answer(self, word: Iterable[int]) -> Answer:
        """Return what the machine would answer in the teacher's place."""
        state = self.state(word)
        return None if state == NOWHERE else self.seen[state]

    def machine(self, *, alphabet: Sequence[str], class_names: Sequence[str]) -> Machine:
        """Return the machine, minimised; a label is a class. Where no end was seen, there is none.

        States keep their numbers: both are numbered as a breadth-first walk meets them, and no
        suffix-distinguished states can be merged.
        """
        return Machine(
            alphabet=tuple(alphabet),
            transitions=self.transitions,
            classes=tuple(seen.label for seen in self.seen),
            class_names=tuple(class_names),
            ends=tuple(bool(seen.ends) for seen in self.seen),
        ).minimised()


def hypotheses(
    teacher: Teacher, *, symbols: int, words: Sequence[Word], most_states: int
) -> Iterator[Hypothesis]:
    """Yield machines of more and more states, until one is right on all `words`.

    `words` are the strings on which a machine is tested, shortest first, with all their beginnings.
    Ends as well before a machine of more than `most_states`, or where the answers contradict each
    other so that no suffix separates them: then the last machine's `wrong` is not None.
    """
    suffixes: list[Word] = [()]
    while True:
        made = _closed(teacher, symbols, suffixes, most_states)
        if made is None:
            return
        found = Hypothesis(transitions=made[0], access=made[1], seen=made[2], wrong=None)
        wrong = next(disagreements(found, teacher, words), None)
        if wrong is None:
            yield found
            return
        yield Hypothesis(
            transitions=found.transitions, access=found.access, seen=found.seen, wrong=wrong
        )
        suffix = _separating(teacher, found, wrong)
        if suffix is None or suffix in suffixes:
            return
        suffixes.append(suffix)


def disagreements(found: Hypothesis, teacher: Teacher, words: Sequence[Word]) -> Iterator[Word]:
    """Yield the strings on which a machine and the teacher differ.

    `words` hold every beginning of each of them before it.
    """
    states: dict[Word, int] = {(): 0}
    for word in words:
        if word:
            before = states[word[:-1]]
            states[word] = NOWHERE if before == NOWHERE else found.transitions[before][word[-1]]
        state = states[word]
        if not agree(None if state == NOWHERE else found.seen[state], teacher(word)):
            yield word


def _closed(
    teacher: Teacher, symbols: int, suffixes: list[Word], most_states: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[Word, ...], tuple[Seen, ...]] | None:
    """Return the machine whose states are the rows that the suffixes tell apart; None if many."""

    def row(word: Word) -> list[Answer]:
        return [teacher(word + suffix) for suffix in suffixes]

    access: list[Word] = [()]
    rows = [row(())]
    table: list[tuple[int, ...]] = []
    for word in access:  # grows while it is read
        targets = []
        here = rows[len(table)][0]
        assert here is not None, "only possible strings lead to states"
        for symbol in range(symbols):
            if not here.allowed[symbol]:
                targets.append(NOWHERE)
                continue
            there = row((*word, symbol))
            same = (
                number
                for number, known in enumerate(rows)
                if all(agree(a, b) for a, b in zip(known, there, strict=True))
            )
            state = next(same, None)
            if state is None:
                if len(rows) == most_states:
                    return None
                state = len(rows)
                access.append((*word, symbol))
                rows.append(there)
            else:  # a state knows what any of its strings shows
                rows[state] = [_fuller(a, b) for a, b in zip(rows[state], there, strict=True)]
            targets.append(state)
        table.append(tuple(targets))
    seen = [known[0] for known in rows]
    return tuple(table), tuple(access), tuple(s for s in seen if s is not None)


def _fuller(a: Answer, b: Answer) -> Answer:
    """Return the one of two agreeing answers that knows more."""
    return b if a is BEYOND or (a is not None and a.ends is None and b is not BEYOND) else a


def _separating(teacher: Teacher, found: Hypothesis, wrong: Word) -> Word | None:
    """Return a suffix that separates two strings that the machine holds to be in one state.

    Replace a beginning of `wrong` by the access string of its state: at first the teacher disagrees
    with the machine, with all of it replaced it agrees. Where that changes, one symbol led astray.
    """
    claimed = found.answer(wrong)
    for cut in range(len(wrong), 0, -1):
        state = found.state(wrong[: cut - 1])
        if state == NOWHERE:
            continue
        if not agree(teacher(found.access[state] + wrong[cut - 1 :]), claimed):
            return wrong[cut:]
    return None
