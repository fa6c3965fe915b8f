"""Activations: what autograd keeps of one training batch between forward and backward.

Read off the program, in float32 and with fused attention. Each kind of operation says which of
the values that it reads and writes its backward needs, and what it keeps besides; a value that
several need is kept once. On a GPU the fused kernel takes heads whose width is a multiple of four,
and a key for every query head, so padding and repeated keys are counted there. A test compares the
estimate with saved-tensor hooks (`bench.footprint`).
"""

from collections.abc import Iterator
from typing import assert_never

from glassformer.spec.checks import spec
from glassformer.spec.errors import InputError
from glassformer.spec.execution import GPU_HEAD_BYTES, GROUP_ROWS, PIECE
from glassformer.spec.model import ModelSpec
from glassformer.spec.position import RelativeBias
from glassformer.spec.program import (
    Activate,
    Add,
    AddRows,
    Adjust,
    Attend,
    Bias,
    Drop,
    Embed,
    Gate,
    Gather,
    Linear,
    Norm,
    Op,
    Program,
    ReadOut,
    Remember,
    Rotate,
    Route,
    Scatter,
    Value,
    program,
)

FLOAT, LONG = 4, 8


@spec
class Activations:
    """Bytes that one batch keeps in the body (embedding and blocks) and in the heads' losses.

    `passing` is what the largest loss needs in addition while its gradient is computed.
    """

    body: int
    heads: int
    passing: int

    @property
    def kept(self) -> int:
        """The bytes that a saved-tensor hook measures."""
        return self.body + self.heads


def activations(
    model: ModelSpec,
    *,
    batch: int,
    length: int,
    source_length: int | None = None,
    device: str = "cpu",
) -> Activations:
    """Estimate the activations of one training batch without padding."""
    if any(stack.dropout.attention for stack in model.stacks().values()):
        raise InputError(
            "dropout on attention weights leaves the fused attention: what it keeps depends on "
            "the machine",
            hint="set dropout.attention=0",
        )
    made = program(model, training=True)
    source = length if source_length is None else source_length
    body = _Body(model, made, batch=batch, target=length, source=source, device=device).bytes()
    heads, passing = 0, 0
    for head, name in zip(model.heads, model.head_names(), strict=True):
        loss = _Loss(made, name, batch * head.rows(length), model.d_model)
        heads += sum(loss.kept())
        passing = max(passing, loss.passing())
    return Activations(body=body, heads=heads, passing=passing)


class _Body:
    """Embedding and blocks: the values that are kept, each once, and what is kept besides."""

    def __init__(
        self, model: ModelSpec, made: Program, *, batch: int, target: int, source: int, device: str
    ) -> None:
        self.model, self.made, self.batch, self.device = model, made, batch, device
        #: Rows of values, and the positions that they stand for.
        self.length = {"target": target, "source": source}
        self.rows = {name: batch * count for name, count in self.length.items()}
        self.memories: dict[str, tuple[Value, Value]] = {}
        self.biases: dict[str, Bias] = {}
        self.routed = 0
        #: Values that are kept, and what all operations that are alike keep once, by its name.
        self.values: set[str] = set()
        self.once: dict[object, int] = {}

    def bytes(self) -> int:
        """Walk through the program and sum what is kept."""
        total = 0
        for op in self.made.with_one_expert():  # its group has the rows of all groups together
            if not op.part.startswith(("heads.", "transforms.")):
                total += sum(self.besides(op))
        kept = sum(FLOAT * self.numbers(self.made.values[name]) for name in self.values)
        return total + kept + sum(self.once.values())

    def numbers(self, value: Value) -> int:
        """How many numbers a value has."""
        return self.rows[value.rows] * value.width

    def keep(self, *names: str | None) -> None:
        """Values that the backward reads."""
        self.values.update(name for name in names if name is not None)

    def besides(self, op: Op) -> Iterator[int]:
        """Note the values that an operation keeps; yield the bytes of what else it keeps."""
        read = self.made.values.get(op.reads[0]) if op.reads else None
        written = None if op.writes is None else self.made.values[op.writes]
        match op.kind:
            case Embed():
                assert written is not None
                yield LONG * self.rows[written.rows]  # the ids
            case Norm():
                self.keep(op.reads[0])
                assert read is not None
                yield from self.norm(op.kind, self.numbers(read))
            case Linear():
                self.keep(op.reads[0])
            case Rotate():
                assert read is not None
                rotary, d_head = op.kind.rotary(), read.width // op.kind.heads
                angles = self.model.max_seq_len * rotary.width(d_head)
                self.once[read.rows, rotary, d_head] = FLOAT * angles
            case Bias():
                assert op.writes is not None
                self.biases[op.writes] = op.kind
            case Remember():
                assert op.memory is not None
                self.memories[op.memory] = (
                    self.made.values[op.reads[0]],
                    self.made.values[op.reads[1]],
                )
            case Attend():
                yield from self.attend(op, op.kind)
            case Activate():
                # The slope of ReLU follows from what it writes.
                self.keep(op.writes if op.kind.function == "relu" else op.reads[0])
            case Gate():
                assert written is not None
                yield from self.gate(op, op.kind, written)
            case Route():
                assert read is not None
                yield from self.route(op.kind, read)
            case Gather():
                yield LONG * self.rows["chosen"]
            case Scatter():
                assert written is not None
                yield FLOAT * self.routed * written.width  # the experts' outputs, to be weighted
            case Drop():
                assert written is not None
                yield FLOAT * self.numbers(written)  # the mask
            case AddRows() | Add() | Adjust() | ReadOut():
                pass  # sums, and what stands in the heads
            case _ as unreachable:
                assert_never(unreachable)

    def norm(self, norm: Norm, numbers: int) -> Iterator[int]:
        """LayerNorm's two statistics, or RMSNorm's one and its normalised input."""
        yield FLOAT * numbers // norm.over * (2 if norm.form == "layer" else 1)
        if norm.form == "rms":
            yield FLOAT * numbers
        if norm.offset:
            yield FLOAT * norm.over  # 1 + weight

    def gate(self, op: Op, gate: Gate, written: Value) -> Iterator[int]:
        """A gated unit's input, its gate, and their product."""
        numbers = FLOAT * self.numbers(written)
        if gate.function == "sigmoid":  # of one number for a row
            self.keep(op.reads[1])
            yield FLOAT * self.rows[written.rows]
            return
        self.keep(*op.reads)
        if gate.limit is not None:
            # The gate after its limit, the sigmoid, the opened gate, and u + 1.
            yield 4 * numbers
        else:
            yield numbers

    def route(self, route: Route, logits: Value) -> Iterator[int]:
        """The router's. How far groups are filled up depends on the tokens: half of the most."""
        rows, experts = self.rows[logits.rows], logits.width
        self.routed = chosen = rows * route.chosen
        self.rows["chosen"] = chosen + experts * (GROUP_ROWS - 1) // 2
        yield FLOAT * rows * (experts + 1)  # probabilities; which tokens are real
        yield (FLOAT + 2 * LONG) * chosen  # their weights, indices and rows in the groups
        if route.normalize:
            yield FLOAT * (chosen + rows)  # the probabilities that were chosen, and their sum

    def attend(self, op: Op, attend: Attend) -> Iterator[int]:
        """Queries, keys, values, the output, and the log-sum-exp of each row.

        Without a fused kernel: keys and values for every query head, and all weights, with the
        capped scores before them. No fused kernel caps scores or has a sink, and on a CPU none has
        the gradient of a bias.
        """
        assert op.memory is not None and op.writes is not None
        (keys, values), out = self.memories[op.memory], self.made.values[op.writes]
        queries = self.rows[out.rows] * attend.heads
        d_head, bias = out.width // attend.heads, None
        length = self.length["source" if out.rows == "source" else "target"]
        if len(op.reads) == 2:
            bias = self.biases[op.reads[1]]
            if isinstance(bias.form, RelativeBias):  # the bucket of each distance
                self.once["buckets", out.rows, attend.before, attend.after] = LONG * length**2
        learned = self.device == "cpu" and bias is not None and isinstance(bias.form, RelativeBias)
        self.keep(op.reads[0], op.writes)
        if attend.softcap is not None or op.weights or learned:
            yield FLOAT * 2 * d_head * attend.heads * self.rows[keys.rows]
            scores = queries * self.length[keys.rows]
            yield FLOAT * scores + (FLOAT * queries if op.weights else 0)
            if attend.softcap is not None:
                yield FLOAT * scores
                if bias is not None:
                    yield scores // self.batch  # which of them are masked, a byte each
                elif attend.after == 0:
                    yield scores // (attend.heads * self.batch)
            return
        self.masks(op, attend, bias, out, length)
        padded, heads = d_head, attend.kv_heads
        if self.device != "cpu":
            multiple = GPU_HEAD_BYTES // FLOAT
            padded, heads = -(-d_head // multiple) * multiple, attend.heads
        if (padded, heads) == (d_head, attend.kv_heads):
            self.keep(keys.name, values.name)
        else:
            yield FLOAT * 2 * padded * heads * self.rows[keys.rows]
        yield FLOAT * (2 * (padded - d_head) * queries + queries)
        layered = (d_head, "layer")
        made_anew = any(  # in another layout than a product's
            isinstance(other.kind, Rotate)
            or (isinstance(other.kind, Norm) and (other.kind.over, other.kind.form) == layered)
            for other in self.made.ops
            if other.part == op.part
        )
        if padded != d_head or (made_anew and self.device == "cpu"):
            yield FLOAT * d_head * queries  # the output is copied to the layout that is read next

    def masks(self, op: Op, attend: Attend, bias: Bias | None, out: Value, length: int) -> None:
        """What fused attention adds to the scores, a number for each, kept once by those alike.

        A window's mask is kept in each layer.
        """
        seen = (out.rows, attend.before, attend.after)
        if bias is not None:
            self.once["bias", *seen, attend.heads, out.width] = FLOAT * length**2 * attend.heads
        elif attend.before is not None and attend.before + 1 < length:
            self.once[op.memory] = length**2 * FLOAT


class _Loss:
    """The loss of one head over `rows` hidden rows with a target.

    In chunks, the logits are not kept: only the gradients of the rows and of the head's parameters
    or, where a chunk is computed again, rows, targets and weights.
    """

    def __init__(self, made: Program, name: str, rows: int, d_model: int) -> None:
        parts = (f"heads.{name}", f"transforms.{name}")
        every = [op for op in made.ops if op.part in parts]
        self.ops = [op for op in every if not isinstance(op.kind, ReadOut)]
        self.picked = len(every) > len(self.ops)
        self.made, self.rows, self.d_model = made, rows, d_model
        self.logits = rows * made.values[made.outputs[name]].width
        self.products = [op for op in self.ops if isinstance(op.kind, Linear)]
        self.biased = bool(self.products) and len(self.products[-1].weights) > 1
        self.is_one_product = len(self.ops) == len(self.products) == 1

    def kept(self) -> Iterator[int]:
        """Bytes of the hidden rows, their log-softmax, targets and weights."""
        yield FLOAT * self.rows * self.d_model
        yield self.rows  # the mask of rows with a target, a byte each
        if self.picked:
            yield 2 * LONG * self.rows  # the row and the position of each that is read
        if self.logits > PIECE:
            if self.is_one_product:
                yield FLOAT * self.logits // self.rows * (self.d_model + self.biased)
            else:
                yield (LONG + FLOAT) * self.rows
            return
        if any(isinstance(op.kind, Adjust) and op.kind.softcap is not None for op in self.ops):
            yield FLOAT * self.logits  # the capped logits
        yield FLOAT * self.logits + (LONG + FLOAT) * self.rows
        for op in self.products[1:]:
            yield FLOAT * self.rows * self.made.values[op.reads[0]].width

    def passing(self) -> int:
        """Bytes of a chunk of logits and its gradient."""
        return 2 * FLOAT * min(self.logits, PIECE)
