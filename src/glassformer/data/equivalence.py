"""Do two machines say the same of every string? If not, a shortest one that tells them apart."""

from collections import deque

from glassformer.data.machine import NOWHERE, Machine
from glassformer.spec.errors import InputError


def counterexample(a: Machine, b: Machine) -> tuple[str, ...] | None:
    """A shortest string that tells two machines apart, or None if they are equivalent.

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
    """Does no string tell them apart?"""
    return counterexample(a, b) is None
