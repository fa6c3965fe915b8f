"""Predicted time of a training step: the work of a spec divided by a machine's measured rates.

A step consists of products with weights, attention, elementwise operations, the loss, the
optimizer, and a fixed cost per operation. `lab.measure.machine_rates` measures the rates.
"""

import itertools
import math
from collections.abc import Iterator
from typing import assert_never

from glassformer.costs.estimates import flops, head_weights
from glassformer.spec.checks import at_least, check_tree, spec
from glassformer.spec.execution import PIECE
from glassformer.spec.manifest import Parameter, block_parameters, stored
from glassformer.spec.model import (
    MLP,
    Block,
    LayerNorm,
    ModelSpec,
    MoE,
    Norm,
    RMSNorm,
    SwiGLU,
    rotary_of,
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
SILU, GELU, RELU = (1.0, 1), (1.6, 1), (0.7, 1)
GATE = (1.0, 1)
RESIDUAL = (0.7, 1)  # an addition, and another for the sum of the two gradients
MEETING = (0.35, 1)  # the sum of two gradients alone
ROTATION = (3.0, 8)
GATHER = (1.0, 2)
ROUTING = (12.0, 30)  # softmax, a stable sort, counting, the balance loss
#: Number of calls of a product with weights, and of attention, forward and backward.
PRODUCT_CALLS, ATTENTION_CALLS = 4, 6
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
    check_tree(model)
    source = length if source_length is None else source_length
    products = elementwise = 0.0
    calls = 0

    def spend(work: Iterator[tuple[tuple[float, int], int]]) -> None:
        nonlocal elementwise, calls
        for (units, count), elements in work:
            elementwise += units * elements / rate_at(rates.passes, elements)
            calls += count

    for prefix, stack in model.stacks().items():
        rows = batch * (source if prefix == "encoder." else length)
        vocab = model.source_vocab if prefix == "encoder." else model.vocab_size
        spend(_around(model, rows, vocab))
        for block in stack.blocks():
            for parameter in block_parameters(block, "", model.d_model, init=model.init):
                if parameter.kind == "matrix":
                    products += _product(rates, parameter.shape, _rows(block, parameter, rows))
                    calls += PRODUCT_CALLS
            spend(_block(model, block, rows))
            calls += ATTENTION_CALLS * (1 if block.cross is None else 2)
    loss = 0.0
    for head, name in zip(model.heads, model.head_names(), strict=True):
        rows = batch * head.rows(length)
        width = model.head_size(name)
        weights = 6 * rows * head_weights(model, name)
        products += weights / rate_at(rates.products, model.d_model)
        loss += rows * width / rate_at(rates.logits, min(rows * width, PIECE))
        calls += PRODUCT_CALLS + 10
    work = 3 * batch * flops(model, length=length, source_length=source).attention
    d_head = next(model.decoder.blocks()).attention.head_width(model.d_model)
    slower = rate_at(rates.heads, USUAL_HEAD) / rate_at(rates.heads, d_head)
    own: list[Parameter] = list(stored(model).values())
    return StepTime(
        products=products,
        attention=work * slower / rate_at(rates.attention, length),
        elementwise=elementwise,
        loss=loss,
        optimizer=sum(p.size for p in own) / rates.updates,
        dispatch=(calls + UPDATE_CALLS * len(own)) * rates.dispatch,
        overlapped=rates.device != "cpu",
    )


def _product(rates: Rates, shape: tuple[int, ...], rows: float) -> float:
    return 6 * rows * math.prod(shape) / rate_at(rates.products, min(shape))


def _rows(block: Block, parameter: Parameter, rows: int) -> float:
    """Rows that pass through a matrix: an expert sees its share of the tokens."""
    if parameter.expert is None or not isinstance(block.ffn, MoE):
        return rows
    return rows * block.ffn.experts_per_token / block.ffn.n_experts


def _around(model: ModelSpec, rows: int, vocab: int) -> Iterator[tuple[tuple[float, int], int]]:
    """Embedding lookup, the table's gradient, the final norm, the gather of rows with a target."""
    yield GATHER, rows * model.d_model
    yield MEETING, vocab * model.d_model
    yield MEETING, vocab * model.d_model
    yield _norm(model.decoder.final_norm or LayerNorm()), rows * model.d_model
    yield GATHER, rows * model.d_model


def _block(model: ModelSpec, block: Block, rows: int) -> Iterator[tuple[tuple[float, int], int]]:
    hidden = rows * model.d_model
    for attention in (block.attention, block.cross):
        if attention is None:
            continue
        yield _norm(block.norm), hidden
        yield RESIDUAL, hidden
        yield MEETING, hidden
        yield MEETING, hidden
        d_head = attention.head_width(model.d_model)
        heads = (attention.n_heads, attention.kv_heads)
        for count in heads:
            if attention.qk_norm is not None:
                yield _norm(attention.qk_norm), rows * count * d_head
            turned = attention is block.attention and rotary_of(attention, model.position)
            if turned:
                yield ROTATION, rows * count * d_head
    yield _norm(block.norm), hidden
    yield RESIDUAL, hidden
    match block.ffn:
        case MLP() | SwiGLU():
            yield from _ffn(block.ffn, hidden, rows)
        case MoE():
            yield from _moe(model, block.ffn, rows)
        case _ as unreachable:
            assert_never(unreachable)


def _ffn(
    ffn: MLP | SwiGLU, hidden: int, rows: int, *, groups: int = 1
) -> Iterator[tuple[tuple[float, int], int]]:
    """The activation of a feed-forward; `groups` experts share the rows, and call one by one."""
    wide = rows * ffn.d_ff
    match ffn:
        case MLP(activation=activation):
            units, calls = RELU if activation in ("relu", "relu2") else GELU
            yield (units, calls * groups), wide
        case SwiGLU():
            yield (MEETING[0], MEETING[1] * groups), hidden
            for units, calls in (SILU, GATE):
                yield (units, calls * groups), wide
        case _ as unreachable:
            assert_never(unreachable)


def _moe(model: ModelSpec, ffn: MoE, rows: int) -> Iterator[tuple[tuple[float, int], int]]:
    """Routing and sorting, the gather into groups and back, the experts, the weighted sum."""
    chosen = rows * ffn.experts_per_token
    yield ROUTING, rows * ffn.n_experts
    yield GATHER, chosen * model.d_model
    yield from _ffn(ffn.expert, chosen * model.d_model, chosen, groups=ffn.n_experts)
    yield GATHER, chosen * model.d_model
    yield GATE, chosen * model.d_model
    if ffn.shared is not None:
        yield from _ffn(ffn.shared, rows * model.d_model, rows)
        yield RESIDUAL, rows * model.d_model
    if ffn.shared_gate:
        yield GATE, rows * model.d_model


def _norm(norm: Norm) -> tuple[float, int]:
    match norm:
        case LayerNorm():
            return LAYER_NORM
        case RMSNorm():
            return RMS_NORM
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
