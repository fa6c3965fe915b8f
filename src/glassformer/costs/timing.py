"""Predicted time of a training step: the work of a spec divided by a machine's measured rates.

A step consists of products with weights, attention, elementwise operations, the loss, the
optimizer, and a fixed cost per operation. `lab.measure.machine_rates` measures the rates.
"""

import itertools
import math
from collections import Counter
from typing import assert_never

from glassformer.costs.estimates import flops
from glassformer.spec.checks import at_least, spec
from glassformer.spec.execution import PIECE
from glassformer.spec.manifest import stored
from glassformer.spec.model import ModelSpec
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

#: Points of a measured curve: (size, work per second at this size).
Curve = tuple[tuple[int, float], ...]


@spec
class Rates:
    """Work per second of a machine, forward and backward together, in float32.

    `products`: FLOPs of matrix products, by the smaller side of the weight. `attention`: FLOPs over
    all keys by length, and `heads` by head width, each at a usual value of the other. `passes`:
    elements of an elementwise product, by their number. `logits`: entries of log-softmax and loss,
    by their number. `updates`: parameters through clipping and AdamW. `dispatch`: seconds that an
    operation takes regardless of its size.
    """

    device: str
    threads: int
    products: Curve
    attention: Curve
    heads: Curve
    passes: Curve
    logits: Curve
    updates: float
    dispatch: float


#: The head width at which `Rates.attention` is measured.
USUAL_HEAD = 32
#: Elementwise operations: cost in units of one pass, forward and backward, and number of calls.
LAYER_NORM, RMS_NORM = (1.1, 1), (4.0, 6)
ACTIVATIONS = {"relu": (0.7, 1), "relu2": (0.7, 1), "silu": (1.0, 1)}
GELU = (1.6, 1)
GATE = (1.0, 1)
MEETING = (0.35, 1)  # the sum of the gradients of two readers of a value
ADDITION = (0.35, 0)  # its call counts with the meeting that a sum of the residual stream brings
ROTATION = (3.0, 8)
GATHER = (1.0, 2)
ROUTING = (12.0, 30)  # softmax, a stable sort, counting, the balance loss
TABLE = (2 * MEETING[0], 2)  # the gradient of an embedding's table
#: Number of calls of a product with weights, of attention and of a loss, forward and backward.
PRODUCT_CALLS, ATTENTION_CALLS, LOSS_CALLS = 4, 6, 10
#: Number of calls of clipping and update per tensor.
UPDATE_CALLS = 3


@spec
class StepTime:
    """Predicted seconds of a step, by kind of work.

    A GPU computes while the host dispatches the next call: where they overlap, the longer of the
    two counts.
    """

    products: float
    attention: float
    elementwise: float
    loss: float
    optimizer: float
    dispatch: float
    overlapped: bool = False

    @property
    def total(self) -> float:
        """The sum, or where host and device overlap the longer of the two."""
        work = self.products + self.attention + self.elementwise + self.loss + self.optimizer
        return max(work, self.dispatch) if self.overlapped else work + self.dispatch


def rate_at(curve: Curve, size: float) -> float:
    """Interpolate a curve on logarithmic scales; constant beyond its ends."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in itertools.pairwise(curve):
        if size <= right:
            share = math.log(size / left) / math.log(right / left)
            return math.exp((1 - share) * math.log(low) + share * math.log(high))
    return curve[-1][1]


def step_time(
    model: ModelSpec, rates: Rates, *, batch: int, length: int, source_length: int | None = None
) -> StepTime:
    """Predict the time of one training step on a batch without padding."""
    made = program(model)
    source = length if source_length is None else source_length
    work = _Work(made, rates, target=batch * length, source=batch * source, sequence=batch)
    loss = 0.0
    for head, name in zip(model.heads, model.head_names(), strict=True):
        rows, width = batch * head.rows(length), made.values[made.outputs[name]].width
        loss += rows * width / rate_at(rates.logits, min(rows * width, PIECE))
        work.calls += LOSS_CALLS
        work.spend(GATHER, rows * model.d_model)  # of the rows with a target
    for stack in model.stacks():
        vocab = model.source_vocab if stack == "encoder." else model.vocab_size
        work.spend(TABLE, vocab * model.d_model)
    own = list(stored(model).values())
    attention = 3 * batch * flops(model, length=length, source_length=source).attention
    return StepTime(
        products=work.products,
        attention=attention * work.slower / rate_at(rates.attention, length),
        elementwise=work.elementwise,
        loss=loss,
        optimizer=sum(p.size for p in own) / rates.updates,
        dispatch=(work.calls + UPDATE_CALLS * len(own)) * rates.dispatch,
        overlapped=rates.device != "cpu",
    )


class _Work:
    """Seconds of products and elementwise operations of a program, and its number of calls.

    Of a mixture's experts the first stands for all: with the rows of all, and the calls of each.
    """

    def __init__(self, made: Program, rates: Rates, **rows: int) -> None:
        self.made, self.rates, self.rows = made, rates, dict(rows)
        self.products = self.elementwise = 0.0
        self.calls, self.experts = 0, 1
        readers: Counter[str] = Counter()
        widths = []
        for op in made.with_one_expert():
            readers.update(op.reads)
            if op.writes is not None:
                self.add(op, made.values[op.writes])
            if isinstance(op.kind, Attend):
                widths.append(made.values[op.writes or ""].width // op.kind.heads)
        for name, value in made.values.items():
            for _ in range(readers[name] - 1 if value.rows in self.rows else 0):
                self.over(value, MEETING)
        usual = rate_at(rates.heads, USUAL_HEAD)
        self.slower = sum(usual / rate_at(rates.heads, width) for width in widths) / len(widths)

    def spend(self, cost: tuple[float, int], elements: int, *, times: int = 1) -> None:
        """Pass over so many elements, at this cost, in calls for each of `times` parts."""
        units, calls = cost
        self.elementwise += units * elements / rate_at(self.rates.passes, elements)
        self.calls += calls * times

    def over(self, value: Value, *costs: tuple[float, int]) -> None:
        """Pass over a value at each of these costs."""
        for cost in costs:
            self.spend(cost, self.rows[value.rows] * value.width, times=self.calls_on(value))

    def calls_on(self, value: Value) -> int:
        return self.experts if value.rows == "chosen" else 1

    def add(self, op: Op, value: Value) -> None:
        """Add one operation, which writes this value."""
        read = self.made.values.get(op.reads[0], value) if op.reads else value
        match op.kind:
            case Linear():
                work = 6 * self.rows[value.rows] * read.width * value.width
                self.products += work / rate_at(self.rates.products, min(read.width, value.width))
                self.calls += PRODUCT_CALLS * self.calls_on(value)
            case Attend():
                self.calls += ATTENTION_CALLS
            case Embed():
                self.over(value, GATHER)
            case Norm(form=form):
                self.over(value, LAYER_NORM if form == "layer" else RMS_NORM)
            case Rotate():
                self.over(value, ROTATION)
            case Add():
                self.over(value, ADDITION)
            case Activate(function=function):
                self.over(value, ACTIVATIONS.get(function, GELU))
            case Gate(function="sigmoid"):
                self.over(value, GATE)
            case Gate():
                self.over(value, ACTIVATIONS["silu"], GATE)
            case Route(chosen=chosen):
                self.experts, self.rows["chosen"] = read.width, chosen * self.rows[read.rows]
                self.over(read, ROUTING)
            case Gather():
                self.spend(GATHER, self.rows["chosen"] * value.width)
            case Scatter():
                for cost in (GATHER, GATE):
                    self.spend(cost, self.rows["chosen"] * value.width)
            case AddRows() | Bias() | Remember() | Adjust() | Drop() | ReadOut():
                pass  # what is looked up once, or stays in its place
            case _ as unreachable:
                assert_never(unreachable)


@spec
class SharedStep:
    """One step of a model on several GPUs, per GPU: bytes on the wire, seconds, and memory.

    `efficiency` is the share of the time that is spent on the model: nothing is assumed to overlap
    for copies, which sum their gradients after the last batch; a sharded model's traffic is hidden
    behind its products as far as those last.
    """

    ranks: int
    sharded: bool
    sent: int
    compute_seconds: float
    wire_seconds: float
    memory: int

    @property
    def efficiency(self) -> float:
        """Time of the products over the time of the step."""
        if self.sharded:
            return self.compute_seconds / max(self.compute_seconds, self.wire_seconds)
        return self.compute_seconds / (self.compute_seconds + self.wire_seconds)


def shared_step(
    model: ModelSpec,
    *,
    ranks: int,
    batch: int,
    length: int,
    accumulate: int = 1,
    sharded: bool = False,
    flops_a_second: float,
    bytes_a_second: float,
) -> SharedStep:
    """Predict a step of `accumulate` batches of `batch` rows on each of `ranks` GPUs, on paper.

    A ring sends 2 (R - 1) / R of the gradients' bytes for a sum, and half of that for a gather or a
    scattered sum; a sharded model needs two gathers and a scattered sum for every batch. A card
    holds weights, gradients and AdamW's moments in float32, all or one R-th of them; copies
    also the flat tensor that is summed.
    """
    at_least("ranks", ranks)
    at_least("accumulate", accumulate)
    weights = 4 * sum(parameter.size for parameter in stored(model).values())
    ring = (ranks - 1) / ranks
    sent = 3 * ring * weights * accumulate if sharded else 2 * ring * weights
    work = flops(model, length=length).training * batch * accumulate
    held = 4 * weights / ranks if sharded else 5 * weights
    return SharedStep(
        ranks=ranks,
        sharded=sharded,
        sent=round(sent),
        compute_seconds=work / flops_a_second,
        wire_seconds=sent / bytes_a_second,
        memory=round(held),
    )
