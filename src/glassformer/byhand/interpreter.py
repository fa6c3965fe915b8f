"""The interpreter: a program planned once, then run forward, and backward as the list reversed.

What is planned: which operation of the table serves an op; `Linear`s whose weights are neighbours
joined to one product; outputs that take the memory of a value that nothing reads again; and for the
backward of some heads, where each gradient is written, which ones are added, and which gradients
several values share.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from glassformer.byhand.pass_context import Array
from glassformer.byhand.storage import Storage
from glassformer.byhand.table import Place, Run, Setting, Step, Sum, Table, operations_of
from glassformer.spec.program import INPUTS, Attend, Linear, Op, Program, Remember

# M rows, W width


@dataclass(slots=True)
class Tap:
    """A tap of what a step writes: which of its values, and the heads that it shows, if any."""

    name: str
    value: int
    heads: int
    #: False where the rows are no tokens: a sequence each, or a pair of query and key.
    tokens: bool


@dataclass(slots=True)
class BackwardPlan:
    """The steps that some heads need backward, in that order, and gradients that nobody writes."""

    steps: list[Step]
    untouched: list[Array]


@dataclass(slots=True)
class Plan:
    """A program planned over a model's arrays."""

    program: Program
    body: list[Step]
    heads: dict[str, list[Step]]
    #: The number of each value.
    numbers: dict[str, int]
    taps: dict[int, list[Tap]]
    #: The gradient of every weight that trains, by name.
    grads: Mapping[str, Array]
    backwards: dict[tuple[str, ...], BackwardPlan] = field(default_factory=dict)

    @property
    def steps(self) -> list[Step]:
        """Every step, in order."""
        return [*self.body, *(step for steps in self.heads.values() for step in steps)]

    def output(self, head: str) -> int:
        """Return the number of a head's output."""
        return self.numbers[self.program.outputs[head]]

    def forward(self, run: Run, steps: Iterable[Step]) -> None:
        """Run steps: each writes its values and leaves a cache."""
        values, caches, taps = run.values, run.caches, run.context.taps
        for step in steps:
            inputs = [values[i] for i in step.reads]
            out, caches[step.number] = step.operation.forward(step, inputs, run)
            if step.columns:
                for i, columns in zip(step.writes, step.columns, strict=True):
                    values[i] = out[:, columns]
            elif step.writes:
                values[step.writes[0]] = out
            if taps is not None:
                for tap in self.taps.get(step.number, ()):
                    taps[tap.name] = _shown(values[tap.value], tap, step, run)

    def backward(self, run: Run, given: Mapping[str, Array]) -> None:
        """Run the list reversed, from the gradients of some heads' outputs."""
        plan = self._backward(tuple(name for name in self.program.outputs if name in given))
        grads: list[Any] = [None] * len(run.values)
        run.grads = grads
        for name, dlogits in given.items():
            grads[self.output(name)] = dlogits.reshape(-1, dlogits.shape[-1])
        for grad in plan.untouched:
            grad.fill(0.0)
        caches, tap_grads = run.caches, run.context.tap_grads
        for step in plan.steps:
            if tap_grads is not None:
                for tap in self.taps.get(step.number, ()):
                    if grads[tap.value] is not None:
                        tap_grads[tap.name] = _shown(grads[tap.value], tap, step, run)
            dout: Any = None  # `Remember` writes no value
            if step.columns:
                dout = _joined(step, run)
            elif step.writes:
                dout = grads[step.writes[0]]
            found = step.operation.backward(step, dout, caches[step.number], run)
            for k, made in enumerate(found):
                if made is None or not step.needs[k]:
                    continue
                i = step.reads[k]
                match step.sums[k]:
                    case "first":
                        grads[i] = made
                    case "into":
                        if made is not grads[i]:
                            grads[i] += made
                    case "onto":
                        grads[i] = np.add(made, grads[i], out=made)
                    case "apart":
                        if not step.operation.into:
                            made = np.add(grads[i], made, out=run.gradient(step, k))
                        grads[i] = made

    def _backward(self, heads: tuple[str, ...]) -> BackwardPlan:
        if heads not in self.backwards:
            self.backwards[heads] = _Backward(self, heads).planned()
        return self.backwards[heads]


def _shown(rows: Array, tap: Tap, step: Step, run: Run) -> Array:
    """Return a copy of rows as a tap shows them: (B, T, W), or (B, N, T, H) for heads."""
    if not tap.tokens:
        return np.array(rows)
    side = run.rows(step)
    if tap.heads:
        return np.array(rows.reshape(side.B, side.T, tap.heads, -1).transpose(0, 2, 1, 3))
    return np.array(rows.reshape(side.B, side.T, -1))


def _joined(step: Step, run: Run) -> Array:
    """Return the gradient of a joined step's output: its parts stand in one buffer already."""
    place = step.homes[0]
    rows = next(len(run.values[i]) for i in step.writes)
    whole = run.arena.at(place.buffer, (rows, place.width))
    for i, columns, moved in zip(step.writes, step.columns, step.moved, strict=True):
        if moved:
            grad = run.grads[i]
            whole[:, columns] = 0.0 if grad is None else grad
    return whole


# --- planning -------------------------------------------------------------------------------------


def plan(
    made: Program,
    *,
    table: Table,
    storage: Storage,
    grads: tuple[Array, Mapping[str, Array]],
    max_seq_len: int,
) -> Plan:
    """Plan a program; `grads` are the gradients' vector and its views by name."""
    numbers = {name: i for i, name in enumerate(made.values)}
    serving = dict(
        zip(map(id, made.ops), (one for _, one in operations_of(table, made)), strict=True)
    )
    groups = _groups(made, storage)
    memories = {op.memory: op for op in made.ops if isinstance(op.kind, Remember)}
    prepared: dict[Any, Any] = {}
    body: list[Step] = []
    heads: dict[str, list[Step]] = {name: [] for name in made.outputs}
    taps: dict[int, list[Tap]] = {}
    taken: set[int] = set()
    number = 0
    for op in made.ops:
        if id(op) in taken:
            continue
        group = groups.get(id(op), [op])
        taken |= {id(one) for one in group}
        reads = [*op.reads]
        keys = "target"
        if isinstance(op.kind, Attend):
            memory = memories[op.memory]
            reads[1:1] = memory.reads
            keys = _side(memory, made)
        setting = Setting(storage.vector.dtype, max_seq_len, _width(op, made), prepared)
        operation = serving[id(op)]
        step = Step(
            op=op,
            kind=op.kind,
            operation=operation,
            number=number,
            reads=tuple(numbers[name] for name in reads if name not in INPUTS),
            writes=tuple(numbers[one.writes] for one in group if one.writes is not None),
            weights=tuple(storage.views[name] for name in op.weights),
            grads=tuple(_slope(name, op, storage, grads[1], setting) for name in op.weights),
            names=op.weights,
            side=_side(op, made),
            keys=keys,
            constant=None if operation.prepare is None else operation.prepare(op, setting),
        )
        if len(group) > 1:
            _join(step, group, made, storage, grads)
        _tap(taps, step, group, made, numbers)
        owner = next((n for n in heads if op.part in (f"heads.{n}", f"transforms.{n}")), None)
        (body if owner is None else heads[owner]).append(step)
        number += 1
    found = Plan(made, body, heads, numbers, taps, grads[1])
    _overwrite(found)
    return found


def _slope(
    name: str, op: Op, storage: Storage, grads: Mapping[str, Array], setting: Setting
) -> Array | None:
    """Return where the gradient of a weight is written."""
    if name in grads:
        return grads[name]
    if isinstance(op.kind, Linear):
        return None
    shape = storage.views[name].shape

    def unread() -> Array:
        return np.empty(shape, setting.dtype)

    found: Array = setting.once(("unread", shape), unread)
    return found


def _width(op: Op, made: Program) -> int:
    """Return the width of what an op reads first, or of what it writes."""
    name = next((name for name in op.reads if name not in INPUTS), op.writes)
    return 0 if name is None else made.values[name].width


def _side(op: Op, made: Program) -> str:
    """Return the side that an op's rows belong to."""
    name = next((name for name in op.reads if name not in INPUTS), op.writes)
    rows = "target" if name is None else made.values[name].rows
    return "source" if rows == "source" or op.part.startswith("encoder.") else "target"


def _groups(made: Program, storage: Storage) -> dict[int, list[Op]]:
    """Return the `Linear`s of a block that can be one product, by the id of their first."""
    readers: dict[str, int] = {}
    for name in (name for op in made.ops for name in op.weights):
        readers[name] = readers.get(name, 0) + 1
    found: dict[int, list[Op]] = {}
    last: dict[str, list[list[Op]]] = {}  # by the value that is read
    for op in made.ops:
        if op.kind != Linear() or op.layer is None or readers[op.weights[0]] > 1:
            continue
        for before in last.setdefault(op.reads[0], []):
            if storage.follows(before[-1].weights[0], op.weights[0]):
                before.append(op)
                found[id(before[0])] = before
                break
        else:
            last[op.reads[0]].append([op])
    return found


def _join(
    step: Step,
    group: Sequence[Op],
    made: Program,
    storage: Storage,
    grads: tuple[Array, Mapping[str, Array]],
) -> None:
    """Make a step of several `Linear`s one product."""
    start, columns = 0, []
    for op in group:
        assert op.writes is not None
        columns.append(slice(start, start := start + made.values[op.writes].width))
    step.columns = tuple(columns)
    names = [op.weights[0] for op in group]
    biases = [op.weights[1] for op in group if len(op.weights) > 1]
    step.names = (*names, *biases)
    train = names[0] in storage.trained
    step.weights = (storage.joined(storage.vector, names),)
    step.grads = (storage.joined(grads[0], names) if train else None,)
    neighbours = all(storage.follows(a, b) for a, b in itertools.pairwise(biases))
    if biases and len(biases) == len(group) and neighbours:
        step.weights += (storage.joined(storage.vector, biases),)
        step.grads += (storage.joined(grads[0], biases) if biases[0] in storage.trained else None,)
    else:
        step.column_biases = tuple(
            (at, storage.views[op.weights[1]], grads[1].get(op.weights[1]))
            for at, op in zip(columns, group, strict=True)
            if len(op.weights) > 1
        )


def _tap(
    taps: dict[int, list[Tap]],
    step: Step,
    group: Sequence[Op],
    made: Program,
    numbers: Mapping[str, int],
) -> None:
    """Note the taps of what a step writes; `Attend` and `Remember` have taps of their own."""
    heads = {op.memory: op.kind.heads for op in made.ops if isinstance(op.kind, Attend)}
    for op in group:
        if op.writes is None or isinstance(op.kind, Attend):
            continue
        tokens = made.values[op.writes].rows in ("target", "source")
        for name in op.taps:
            shown = heads[op.part] if name == f"{op.part}.q" else 0
            tap = Tap(name, numbers[op.writes], shown, tokens)
            taps.setdefault(step.number, []).append(tap)


def _overwrite(found: Plan) -> None:
    """Let outputs take the memory of values that nothing reads later and no cache refers to."""
    steps, last = found.steps, {}
    kept = {found.numbers[found.program.hidden], *map(found.output, found.program.outputs)}
    width = {found.numbers[name]: value for name, value in found.program.values.items()}
    for step in steps:
        for i in step.reads:
            last[i] = step.number
        kept |= {i for k, i in enumerate(step.reads) if k in step.operation.keeps}
        if step.operation.keeps_output:
            kept |= set(step.writes)
    for step in steps:
        for k in step.operation.over:
            i = step.reads[k]
            same = width[i].width == width[step.writes[0]].width
            if i not in kept and last[i] == step.number and same and step.reads.count(i) == 1:
                step.over = k
                break


@dataclass(eq=False, slots=True)
class _Buffer:
    """A buffer of gradients, or a joined step's part of one; the values whose gradient it holds."""

    place: Place
    #: What may use it next: buffers for rows of the same kind and width. None: no other.
    kind: tuple[str, int] | None
    holders: set[int] = field(default_factory=set)


class _Backward:
    """Plans the backward of some heads: walks the list reversed and follows every gradient.

    A buffer holds the gradient of one value, or of several that have the same one: of the residual
    stream and of the part that was added to it. It is free when the last of them has been used.
    """

    def __init__(self, forward: Plan, heads: Collection[str]) -> None:
        self.plan = forward
        self.values = list(forward.program.values.values())
        self.wanted = _wanted(forward.steps, forward.grads)
        self.homes = _homes(forward.steps)
        given = {forward.output(name) for name in heads}
        outside = _Buffer(Place(-1), None, {-1, *given})  # never alone: never written into
        self.held = dict.fromkeys(given, outside)
        self.joined: dict[int, int] = {}  # the number of a joined step's buffer
        self.free: dict[tuple[str, int], list[int]] = {}
        self.count = 0
        self.ended: list[_Buffer] = []  # buffers that may be free after this step
        self.written: set[str] = set()

    def planned(self) -> BackwardPlan:
        made = [self._step(step) for step in reversed(self.plan.steps)]
        untouched = [grad for name, grad in self.plan.grads.items() if name not in self.written]
        return BackwardPlan([step for step in made if step is not None], untouched)

    def _step(self, step: Step) -> Step | None:
        """Return a step as it runs backward; None where no gradient arrives or is needed."""
        if step.writes and not any(i in self.held and i in self.wanted for i in step.writes):
            for i in set(step.writes) & set(self.held):
                self._used(i)
            return None
        changed: dict[str, Any] = {"adds": tuple(name in self.written for name in step.names)}
        self.written |= set(step.names)
        dout, own = None, bool(step.columns)
        if step.columns:
            homes = tuple(self._home(step, columns) for columns in step.columns)
            moved = (
                i not in self.held or self.held[i].place != home
                for i, home in zip(step.writes, homes, strict=True)
            )
            changed |= {"homes": homes, "moved": tuple(moved)}
            for i in set(step.writes) & set(self.held):
                self._used(i)
        elif step.writes:
            dout = self._used(step.writes[0])
            own = not dout.holders
        how = [self._gradient(step, k, dout, own) for k in range(len(step.reads))]
        for buffer in self.ended:
            if buffer.kind is not None and not buffer.holders:
                self.free[buffer.kind].append(buffer.place.buffer)
                buffer.kind = None
        self.ended = []
        if step.columns:
            kind = (self.values[step.writes[0]].rows, step.columns[-1].stop)
            self.free[kind].append(self.joined[step.number])
        return replace(
            step,
            own=own,
            needs=tuple(i in self.wanted for i in step.reads),
            sums=tuple(sum_ for sum_, _ in how),
            places=tuple(place for _, place in how),
            **changed,
        )

    def _gradient(self, step: Step, k: int, dout: _Buffer | None, own: bool) -> tuple[Sum, Place]:
        """Plan where the gradient of one input is written, and how it joins what is there."""
        operation, i, nowhere = step.operation, step.reads[k], Place(-1)
        if not step.writes:
            return "first", nowhere
        if i not in self.wanted:
            return "first", self._new(i, temporary=True).place
        there = self.held.get(i)
        alone = there is not None and there.holders == {i}
        if there is not None and not alone:
            self._used(i)  # others read it too: the sum stands somewhere else
        into = operation.into and k == 0
        douts = k in operation.same or (operation.inplace and own and k == 0)
        if dout is not None and douts:  # the gradient is dout's own array
            if alone:
                return "into", nowhere
            if there is not None and (not own or dout.holders):
                return "apart", self._new(i).place
            self.held[i] = dout
            dout.holders.add(i)
            return "first" if there is None else "onto", nowhere
        if alone:
            return "into", nowhere if into else self._new(i, temporary=True).place
        place = self._new(i).place
        return "first" if there is None else "apart" if into else "onto", place

    # --- buffers

    def _used(self, i: int) -> _Buffer:
        """Note that a value's gradient has been used; return its buffer."""
        buffer = self.held.pop(i)
        buffer.holders.discard(i)
        self.ended.append(buffer)
        return buffer

    def _new(self, i: int, *, temporary: bool = False) -> _Buffer:
        """Return a buffer for the gradient of a value: its home, if that is free, or another."""
        value = self.values[i]
        kind = (value.rows, value.width)
        if temporary:
            self.ended.append(buffer := _Buffer(Place(self._take(kind)), kind))
            return buffer
        home = self._home(*self.homes[i]) if i in self.homes else None
        if home is None or any(other.place == home for other in self.held.values()):
            buffer = _Buffer(Place(self._take(kind)), kind, {i})
        else:
            buffer = _Buffer(home, None, {i})
        self.held[i] = buffer
        return buffer

    def _home(self, step: Step, columns: slice) -> Place:
        """Return some columns of a joined step's buffer."""
        width = step.columns[-1].stop
        if step.number not in self.joined:
            self.joined[step.number] = self._take((self.values[step.writes[0]].rows, width))
        return Place(self.joined[step.number], width, columns)

    def _take(self, kind: tuple[str, int]) -> int:
        """Return the number of a free buffer, or of a new one."""
        if free := self.free.setdefault(kind, []):
            return free.pop()
        self.count += 1
        return self.count - 1


def _wanted(steps: Sequence[Step], grads: Collection[str]) -> set[int]:
    """Return the values whose gradient reaches a weight that trains."""
    found: set[int] = set()
    for step in steps:
        if any(name in grads for name in step.names) or found & set(step.reads):
            found |= set(step.writes)
    return found


def _homes(steps: Sequence[Step]) -> dict[int, tuple[Step, slice]]:
    """Return the columns of a joined step where a value's gradient should be written.

    What is made of one part alone, and runs backward in place, has that part's home.
    """
    homes: dict[int, tuple[Step, slice]] = {}
    reads = [i for step in steps for i in step.reads]
    for step in steps:
        if step.columns:
            homes |= {i: (step, at) for i, at in zip(step.writes, step.columns, strict=True)}
        elif step.operation.inplace and step.reads[0] in homes and reads.count(step.reads[0]) == 1:
            homes[step.writes[0]] = homes[step.reads[0]]
    return homes
