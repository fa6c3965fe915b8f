"""Learning a machine by queries: Angluin's algorithm, for anything that can be asked about strings.

A teacher answers what it observes after a string: a label, which symbols may follow, whether the
string may end. Two strings are in one state if no suffix in a growing set tells them apart; a
string on which the machine and the teacher disagree gives the next suffix (Rivest and Schapire).
Nothing here knows the true machine.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from glassformer.data.automata.machine import NOWHERE, Machine

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
