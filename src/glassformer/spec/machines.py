"""A finite-state machine as a value: its table, and what may come next with which probability.

It is read from JSON in one of two forms. A person writes states and edges:

    {"states": {"even": {"class": "even", "end": 0.1}, "odd": {"class": "odd", "end": 0.2}},
     "edges": [["even", "0", "even", 0.4], ["even", "1", "odd", 0.5],
               ["odd", "0", "odd", 0.3], ["odd", "1", "even", 0.5]],
     "start": "even"}

`glass extract -o FILE.json` writes the other, a table of transitions by number. A run keeps the
machine itself, not the name of the file.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glassformer.spec.checks import spec
from glassformer.spec.errors import InputError, nearest

#: A transition that is not there.
NOWHERE = -1
#: The most states and symbols of a machine, and the bytes of a file.
MOST_STATES, MOST_SYMBOLS, MOST_BYTES = 1_000, 1_000, 16_000_000
#: How far the probabilities of a state may be from 1, by the rounding of whoever wrote them.
ROUNDING = 1e-3


@spec
class MachineTable:
    """A machine: next state = transitions[state][symbol], -1 where there is none.

    `classes` and `ends` are the class of each state, and whether a string may end there.
    `probabilities[state]` are those of the symbols, in the order of the alphabet, then of the end;
    without them `order` and `machine_seed` of the task decide.
    """

    alphabet: tuple[str, ...]
    transitions: tuple[tuple[int, ...], ...]
    classes: tuple[str, ...]
    ends: tuple[bool, ...]
    start: int = 0
    probabilities: tuple[tuple[float, ...], ...] = ()
    name: str = "machine"

    def __post_init__(self) -> None:
        states, symbols = len(self.transitions), len(self.alphabet)
        if not 1 <= states <= MOST_STATES or not 1 <= symbols <= MOST_SYMBOLS:
            raise InputError(
                f"a machine of {states} states and {symbols} symbols",
                hint=f"1 to {MOST_STATES} states, 1 to {MOST_SYMBOLS} symbols",
            )
        for what in ("classes", "ends"):
            if len(getattr(self, what)) != states:
                raise InputError(f"{len(getattr(self, what))} {what} for {states} states")
        if not 0 <= self.start < states:
            raise InputError(f"start {self.start} is no state", hint=f"0 to {states - 1}")
        for state, row in enumerate(self.transitions):
            if len(row) != symbols:
                raise InputError(f"state {state} has {len(row)} transitions for {symbols} symbols")
            if wrong := [t for t in row if not NOWHERE <= t < states]:
                raise InputError(
                    f"state {state} leads to {wrong[0]}", hint=f"0 to {states - 1}, or {NOWHERE}"
                )
        dead = self._dead()
        if self.start in dead:
            raise InputError("no string of this machine ever ends", hint="let a state be an end")
        if self.probabilities:
            self._check_probabilities(dead)

    def _dead(self) -> set[int]:
        """Return the states from which no string can end."""
        alive = {state for state, end in enumerate(self.ends) if end}
        while True:
            more = {q for q, row in enumerate(self.transitions) if alive.intersection(row)}
            if more <= alive:
                return set(range(len(self.transitions))) - alive
            alive |= more

    def _check_probabilities(self, dead: set[int]) -> None:
        if len(self.probabilities) != len(self.transitions):
            raise InputError(
                f"probabilities of {len(self.probabilities)} states for {len(self.transitions)}"
            )
        for state, row in enumerate(self.probabilities):
            if len(row) != len(self.alphabet) + 1:
                raise InputError(
                    f"state {state} has {len(row)} probabilities",
                    hint=f"{len(self.alphabet)} symbols, and the end",
                )
            events = [*self.alphabet, "the end"]
            possible = [t != NOWHERE for t in self.transitions[state]] + [self.ends[state]]
            for event, p, can in zip(events, row, possible, strict=True):
                if not 0.0 <= p <= 1.0 or (p > 0) != can:
                    what = "is possible" if can else "is not possible"
                    raise InputError(
                        f"state {state}: {event} {what}, and has the probability {p:g}",
                        hint="above 0 where there is an edge or an end, and 0 elsewhere",
                    )
            if abs(math.fsum(row) - 1.0) > ROUNDING:
                raise InputError(
                    f"the probabilities of state {state} add up to {math.fsum(row):g}, not 1",
                    hint="those of its edges and of the end",
                )
            if lost := dead.intersection(self.transitions[state]):
                raise InputError(
                    f"state {state} leads to state {min(lost)}, from which no string can end",
                    hint="let a state behind it be an end, or leave the edge out",
                )


# --- reading --------------------------------------------------------------------------------------


def read_machine(path: Path) -> MachineTable:
    """Read a machine from a JSON file: states and edges, or what `glass extract` wrote."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path} is too large for a machine", hint=f"{MOST_BYTES:,} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}", where=str(path)) from error
    try:
        return machine_of(data, name=path.stem)
    except InputError as error:
        raise InputError(error.what, where=error.where or str(path), hint=error.hint) from error


def machine_of(data: object, *, name: str = "machine") -> MachineTable:
    """Return the machine that JSON values describe, in any of the forms."""
    if not isinstance(data, Mapping):
        raise InputError("a machine is a JSON object", hint='{"states": …, "edges": …}')
    if isinstance(data.get("machine"), Mapping):  # of `glass extract`
        return _extracted(data["machine"], name=name)
    if "edges" in data:
        return _drawn(data, name=name)
    if "transitions" in data:
        from glassformer.spec.serialize import from_dict

        return from_dict(MachineTable, {"name": name, **data})
    raise InputError(
        "this describes no machine",
        hint="an object with states and edges, or a file of glass extract -o FILE.json",
    )


def _extracted(data: Mapping[str, Any], *, name: str) -> MachineTable:
    """Return an extracted machine, without the probability of what cannot occur in it."""
    from glassformer.spec.serialize import from_dict

    kept = {key: value for key, value in data.items() if key != "access"}
    bare = from_dict(
        MachineTable, {**{k: v for k, v in kept.items() if k != "probabilities"}, "name": name}
    )
    rows = []
    for state, given in enumerate(kept.get("probabilities") or ()):
        possible = [t != NOWHERE for t in bare.transitions[state]] + [bare.ends[state]]
        if len(given) != len(possible):
            raise InputError(f"state {state} has {len(given)} probabilities", hint="extract again")
        # A model gives every event some probability; six digits may round a rare one to 0.
        row = [max(float(p), 1e-6) if can else 0.0 for p, can in zip(given, possible, strict=True)]
        rows.append([p / math.fsum(row) for p in row])
    described = {
        **{field: getattr(bare, field) for field in ("alphabet", "classes", "ends", "start")},
        "transitions": bare.transitions,
        "probabilities": rows,
        "name": name,
    }
    return from_dict(MachineTable, described)


def _drawn(data: Mapping[str, Any], *, name: str) -> MachineTable:
    """Return the machine of states and edges; states are named by their edges if not listed."""
    known = ("states", "edges", "start", "alphabet", "name")
    if unknown := [key for key in data if key not in known]:
        raise InputError(f"unknown key '{unknown[0]}'", hint=nearest(unknown[0], known))
    edges = [_edge(each, number) for number, each in enumerate(_list(data["edges"], "edges"))]
    states = _states(data.get("states"), edges)
    names = list(states)
    symbols = [str(each) for each in _list(data.get("alphabet", ()), "alphabet")]
    for _, symbol, _, _ in edges:
        if "alphabet" in data and symbol not in symbols:
            raise InputError(f"'{symbol}' is not in the alphabet", hint=nearest(symbol, symbols))
        if symbol not in symbols:
            symbols.append(symbol)
    start = str(data.get("start", names[0] if names else ""))
    for place in (start, *(place for edge in edges for place in (edge[0], edge[2]))):
        if place not in states:
            raise InputError(f"there is no state '{place}'", hint=nearest(place, names))
    weighted = [p is not None for _, _, _, p in edges]
    ends = {state: told.get("end", True) for state, told in states.items()}
    if any(weighted) and not all(weighted):
        here, symbol, there, _ = edges[weighted.index(False)]
        raise InputError(
            f"the edge {here} {symbol} {there} has no probability, and others have one",
            hint="[from, symbol, to, probability] for all edges, or for none",
        )
    for state, end in ends.items():
        if any(weighted) and isinstance(end, bool) and "end" in states[state] and end:
            raise InputError(
                f"state '{state}' ends with the probability true",
                hint="where edges have probabilities, end is one too, such as 0.1",
            )
        if not any(weighted) and not isinstance(end, bool):
            raise InputError(
                f"state '{state}' ends with the probability {end!r}, and edges have none",
                hint="give each edge one, [from, symbol, to, probability]; or end as true or false",
            )
    table = {state: [NOWHERE] * len(symbols) for state in names}
    shares = {state: [0.0] * len(symbols) for state in names}
    for here, symbol, there, p in edges:
        at = symbols.index(symbol)
        if table[here][at] != NOWHERE:
            raise InputError(
                f"state '{here}' has two edges for '{symbol}'", hint="a machine is deterministic"
            )
        table[here][at] = names.index(there)
        shares[here][at] = p or 0.0
    rows = []
    for state in names if any(weighted) else ():
        told = states[state].get("end")
        rest = max(0.0, 1.0 - math.fsum(shares[state]))
        end = float(told) if told is not None else rest if rest > ROUNDING else 0.0
        ends[state] = end > 0
        total = math.fsum([*shares[state], end])
        if abs(total - 1.0) > ROUNDING or min(*shares[state], end) < 0:
            raise InputError(
                f"the probabilities of state '{state}' add up to {total:g}, not 1",
                hint="those of its edges, and of its end",
            )
        rows.append(tuple(p / total for p in (*shares[state], end)))
    return MachineTable(
        alphabet=tuple(symbols),
        transitions=tuple(map(tuple, table.values())),
        classes=tuple(
            str(told.get("class", "accept" if ends[state] else "reject"))
            for state, told in states.items()
        ),
        ends=tuple(bool(ends[state]) for state in names),
        start=names.index(start),
        probabilities=tuple(rows),
        name=str(data.get("name", name)),
    )


#: An edge: from, symbol, to, probability.
Edge = tuple[str, str, str, float | None]


def _edge(given: object, number: int) -> Edge:
    where = f"edge {number + 1}"
    if isinstance(given, Mapping):
        given = [given.get(key) for key in ("from", "symbol", "to", "probability")]
        given = given[:3] if given[3] is None else given
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) not in (3, 4):
        raise InputError(
            f"{where} is {str(given)[:60]}", hint='["from", "symbol", "to"], or a probability too'
        )
    here, symbol, there, *rest = given
    for word in (here, symbol, there):
        if not isinstance(word, str | int) or isinstance(word, bool):
            raise InputError(f"{where}: {word!r} is no name")
    p = rest[0] if rest else None
    if p is not None and (isinstance(p, bool) or not isinstance(p, int | float) or not 0 < p <= 1):
        raise InputError(f"{where} has the probability {p!r}", hint="above 0, at most 1")
    return str(here), str(symbol), str(there), None if p is None else float(p)


def _states(given: object, edges: Sequence[Edge]) -> dict[str, dict[str, Any]]:
    """Return what is said of each state by its name."""
    if given is None:
        return {place: {} for edge in edges for place in (edge[0], edge[2])}
    if not isinstance(given, Mapping):
        listed = [str(each) for each in _list(given, "states")]
        if len(set(listed)) < len(listed):
            raise InputError("a state is listed twice")
        return {name: {} for name in listed}
    found: dict[str, dict[str, Any]] = {}
    for name, told in given.items():
        if not isinstance(told, Mapping):
            raise InputError(
                f"state '{name}' is {str(told)[:60]}", hint='{"class": "accept", "end": true}'
            )
        if unknown := [key for key in told if key not in ("class", "end")]:
            raise InputError(f"state '{name}': unknown key '{unknown[0]}'", hint="class, end")
        end = told.get("end")
        if end is not None and not isinstance(end, bool | int | float):
            raise InputError(f"state '{name}': end is {end!r}", hint="true, false or a probability")
        found[str(name)] = dict(told)
    return found


def _list(given: object, what: str) -> Sequence[Any]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InputError(f"{what} is {str(given)[:60]}", hint="a list")
    return given
