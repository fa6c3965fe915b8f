"""The table of operations: for each kind of the program, what computes it and its gradients.

An `Operation` serves the ops whose fields its `runs` takes; of a `Table`'s operations, the first
that takes an op serves it. So a faster operation for some kinds, or for some fields of a kind, is
put before NumPy's, and what it does not take falls back by itself. The loss, the norm of the
gradient and the optimizer's update are members of a table too.

`interpreter.py` plans a program once, as `Step`s, and runs the list; `Run` is one pass.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from glassformer.byhand.inputs import Side, allow_of, positions_of
from glassformer.byhand.pass_context import Array, PassContext, Workspace
from glassformer.spec.errors import InputError
from glassformer.spec.lacking import Runs, lacks
from glassformer.spec.program import Op, Program
from glassformer.spec.state import Memories

# B batch, T query length, S key length, M rows (B x T), W width, K key-value heads, H d_head


class Place(NamedTuple):
    """A buffer of gradients by number, or some columns of one that is `width` wide."""

    buffer: int
    width: int = 0
    columns: slice | None = None


#: The first gradient of a value; one that is added into what is there; one that what is there is
#: added to; a sum in a buffer of its own.
Sum = Literal["first", "into", "onto", "apart"]


@dataclass(slots=True)
class Step:
    """One operation of a planned program, with everything that is known before a pass.

    Values are tables of rows (M, W), by number. `reads` are the op's, without the program's inputs;
    `Attend` reads its memory's keys and values after its queries, so that their gradients find
    their way: q, k, v, then the bias. Several `Linear`s that read one value and whose weights are
    neighbours are one step, with one joined weight; what it writes is split by `columns`.

    Where the step runs backward, the fields below are set for that pass.
    """

    op: Op
    kind: Any
    operation: "Operation"
    number: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    #: The op's weights and their gradients: views of the model's vectors. Of a weight that does not
    #: train an array that nobody reads, or in a `Linear`, which saves a product, None.
    weights: tuple[Array, ...]
    grads: tuple[Any, ...]
    names: tuple[str, ...]
    #: "source" for the rows of an encoder and what is projected from them, else "target".
    side: str
    #: Of an `Attend`, the side of its memory.
    keys: str = "target"
    #: What `Operation.prepare` made: tables of positions and the like.
    constant: Any = None
    #: The number of the input whose memory the output takes; -1: the output has memory of its own.
    over: int = -1
    columns: tuple[slice, ...] = ()
    #: Biases of a joined step that has them for some of its columns only: columns, bias, gradient.
    column_biases: tuple[tuple[slice, Array, Array | None], ...] = ()
    # --- backward
    #: True where nothing else reads the output's gradient: it may be overwritten.
    own: bool = False
    #: For each input, whether its gradient is asked for.
    needs: tuple[bool, ...] = ()
    #: For each weight, True where its gradient is added, because another step has written to it.
    adds: tuple[bool, ...] = ()
    #: For each input, where its gradient is written, and how it joins what other steps gave.
    places: tuple["Place", ...] = ()
    sums: tuple[Sum, ...] = ()
    #: Of a joined step, where the parts of its output's gradient stand, and which must be copied.
    homes: tuple["Place", ...] = ()
    moved: tuple[bool, ...] = ()


Forward = Callable[[Step, Sequence[Array], "Run"], tuple[Array, Any]]
Backward = Callable[[Step, Array, Any, "Run"], Sequence[Array | None]]


@dataclass(frozen=True, slots=True)
class Operation:
    """An implementation of one kind of operation, forward and backward.

    `forward(step, inputs, run)` returns the output and a cache. Outputs and what a cache keeps come
    from `run.ws`, scratch too, between `mark` and `release`. With `step.over` the output is written
    into that input's own memory and is that array.

    `backward(step, dout, cache, run)` returns the gradient of each of `step.reads`; None is enough
    where `step.needs` has False. It is written to `run.gradient(step, k)`; it may be `dout` itself,
    unchanged, for the inputs that `same` names. With `inplace` the gradient of the first input is
    written into `dout` where `step.own` allows it. With `into` it adds to `run.total(step, 0)` and
    returns that. Gradients of weights are written to `step.grads`, or added where `step.adds` says.
    """

    kind: type
    forward: Forward
    backward: Backward
    #: The fields that it takes, of the kind and of specs inside them, as in `spec.program.missing`.
    runs: Runs
    prepare: Callable[[Op, "Setting"], Any] | None = None
    #: Inputs whose memory the output may take, if nothing reads them later; the best first.
    over: tuple[int, ...] = ()
    #: Inputs that the cache refers to, and whether it refers to the output.
    keeps: Collection[int] = ()
    keeps_output: bool = False
    same: tuple[int, ...] = ()
    inplace: bool = False
    into: bool = False


class AdamRule(NamedTuple):
    """The numbers of one update by Adam; `steps` counts this one."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    decoupled: bool
    steps: int


@dataclass(frozen=True, slots=True)
class Table:
    """Operations in order of preference, and what follows the last of them in a training step.

    `cross_entropy` and its backward have the form of `loss.cross_entropy_forward` and `_backward`,
    `adam` updates (param, grad, m, v) in place by an `AdamRule` with two arrays of scratch, `sgd`
    as `updates.sgd_update`; `global_norm` and `clip_global_norm` are those of `updates` too.
    """

    name: str
    operations: tuple[Operation, ...]
    cross_entropy: Callable[..., tuple[float, Any]]
    cross_entropy_backward: Callable[[float, Any], Array]
    adam: Callable[[Array, Array, Array, Array, AdamRule, tuple[Array, Array]], None]
    sgd: Callable[..., None]
    global_norm: Callable[[Array], float]
    clip_global_norm: Callable[..., float]

    def serving(self, op: Op) -> Operation | None:
        """Return the first operation that takes this op, or None."""
        for operation in self.operations:
            if operation.kind is type(op.kind) and not any(lacks(op.kind, operation.runs)):
                return operation
        return None

    def lacking(self, made: Program) -> tuple[str, ...]:
        """Return what no operation takes, each once, with its first place."""
        found: dict[str, str] = {}
        for op in made.ops:
            if self.serving(op) is None:
                of_kind = [one for one in self.operations if one.kind is type(op.kind)]
                lack = next(lacks(op.kind, of_kind[-1].runs if of_kind else {}))
                found.setdefault(lack, op.part)
        return tuple(f"{lack} ({part})" for lack, part in found.items())


@dataclass(slots=True)
class Setting:
    """The settings from which an operation prepares its constants; equal ones are made once."""

    dtype: "np.dtype[Any]"
    max_seq_len: int
    #: The width of what the op reads first.
    width: int
    made: dict[Any, Any]

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what was made under this key."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


# --- one pass -------------------------------------------------------------------------------------


class Rows:
    """The rows of one side in a pass: positions and masks, each computed once.

    With `past`, `valid_BS` covers the past positions and the new ones, and rows are the new ones.
    """

    def __init__(self, side: Side, *, past: int = 0, valid_BS: Array | None = None) -> None:
        self.side, self.past = side, past
        self.B, self.T = int(side.tokens_BT.shape[0]), int(side.tokens_BT.shape[1])
        self.valid_BS = side.valid_BT if valid_BS is None else valid_BS
        self.valid_BT = None if self.valid_BS is None else self.valid_BS[:, past:]
        self.positions = positions_of(
            self.T, past=past, valid_BS=self.valid_BS, segments_BT=side.segments_BT
        )

    @property
    def keys(self) -> int:
        """The number of positions that queries may attend to."""
        return self.past + self.T

    def places(self) -> Array:
        """Return the positions of all keys, (1 or B, S)."""
        found = positions_of(self.keys, valid_BS=self.valid_BS, segments_BT=self.side.segments_BT)
        return np.arange(self.keys)[None] if isinstance(found, slice) else found


class Run:
    """One pass through a program: its values, caches, memories and gradients.

    `state` remembers earlier tokens; without it each pass reads complete sequences.
    """

    def __init__(
        self,
        context: PassContext,
        sides: dict[str, Rows],
        *,
        values: int,
        steps: int,
        arena: Workspace,
        state: Memories | None = None,
    ) -> None:
        self.context = context
        self.ws: Workspace = context.ws
        self.sides = sides
        self.values: list[Any] = [None] * values
        self.caches: list[Any] = [None] * steps
        self.memories: dict[str, tuple[Array, Array]] = {}
        self.state = state
        #: The load-balancing loss of each mixture, by the part that it stands in.
        self.balances: dict[str, float] = {}
        # --- backward
        self.grads: list[Any] = []
        #: The slope of the objective in each load-balancing loss.
        self.dbalance: dict[str, float] = {}
        #: Buffers of gradients, by number.
        self.arena = arena
        self._once: dict[Any, Any] = {}

    def rows(self, step: Step) -> Rows:
        """Return the rows of the step's side."""
        return self.sides[step.side]

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what was made under this key in this pass."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]

    def allow(self, step: Step) -> Array | None:
        """Return the mask of an `Attend`, (1 or B, 1, T, S): 1 = may attend, 0 = not."""
        kind, queries, keys = step.kind, self.sides[step.side], self.sides[step.keys]
        apart = queries is not keys

        def make() -> Array | None:
            return allow_of(
                before=kind.before,
                after=kind.after,
                queries=queries.T,
                keys=keys.T if apart else keys.keys,
                dtype=self.ws.dtype,
                valid_q_BT=queries.valid_BT,
                valid_k_BS=keys.valid_BS,
                segments_BT=None if apart else queries.side.segments_BT,
            )

        key = ("allow", step.side, step.keys, kind.before, kind.after)
        found: Array | None = self.once(key, make)
        return found

    # --- backward

    def gradient(self, step: Step, k: int) -> Array:
        """Return the array to write the gradient of input k to; its contents are undefined."""
        like, place = self.values[step.reads[k]], step.places[k]
        if place.columns is None:
            return self.arena.at(place.buffer, like.shape)
        return self.arena.at(place.buffer, (len(like), place.width))[:, place.columns]

    def total(self, step: Step, k: int) -> Array:
        """Return the gradient of input k so far, zeros at first, to add to."""
        if step.sums[k] == "into":
            found: Array = self.grads[step.reads[k]]
            return found
        total = self.gradient(step, k)
        if step.sums[k] == "first":
            total.fill(0.0)
        else:
            np.copyto(total, self.grads[step.reads[k]])
        return total


def operations_of(table: Table, made: Program) -> Iterator[tuple[Op, Operation]]:
    """Yield each op with what serves it; one that nothing serves is refused by name."""
    for op in made.ops:
        operation = table.serving(op)
        if operation is None:
            raise InputError(
                f"no operation in {table.name} for {table.lacking(made)[0]}", hint="engine=torch"
            )
        yield op, operation
