"""How long a training step should take: the work that a spec describes over a machine's rates.

A step is products with weights, attention, elementwise passes, the loss, the optimizer, and the
time that each operation costs however small it is. `lab.calibrate` measures the rates.
"""

import itertools
import math
from collections.abc import Iterator

from glassformer.costs.flops import flops, head_weights
from glassformer.costs.memory import PIECE
from glassformer.spec.checks import spec
from glassformer.spec.manifest import Parameter, block_parameters, stored
from glassformer.spec.model import MLP, AnswerHead, Block, LayerNorm, ModelSpec, RMSNorm, Rotary

#: Points of a measured curve: at this size, so much work a second.
Curve = tuple[tuple[int, float], ...]


@spec
class Rates:
    """What a machine does in a second, forward and backward together, in float32.

    `products`: FLOPs, by the smaller side of the weight. `attention`: FLOPs over all keys, by
    length, and `heads`: by head width, each at a usual value of the other. `passes`: elements
    through a product of two tensors, by their elements. `logits`: entries through log-softmax and
    its loss, by their number. `updates`: parameters through clipping and AdamW. `dispatch`:
    seconds that an operation costs however small it is.
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
#: Elementwise operations in units of one pass, forward and backward, and how many calls they are.
LAYER_NORM, RMS_NORM = (1.1, 1), (4.0, 6)
SILU, GELU, RELU = (1.0, 1), (1.6, 1), (0.7, 1)
GATE = (1.0, 1)
RESIDUAL = (0.7, 1)  # an addition, and another where the two gradients meet
MEETING = (0.35, 1)  # an addition of two gradients alone
ROTATION = (3.0, 8)
GATHER = (1.0, 2)
#: Calls that a product with weights, or attention, is made of, forward and backward.
PRODUCT_CALLS, ATTENTION_CALLS = 4, 6
#: And what each tensor's clipping and update are.
UPDATE_CALLS = 3


@spec
class StepTime:
    """Seconds of a predicted step, by what they are spent on.

    A GPU works while the host calls: where they overlap, the longer of the two counts.
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
        """All of them, or the longer side."""
        work = self.products + self.attention + self.elementwise + self.loss + self.optimizer
        return max(work, self.dispatch) if self.overlapped else work + self.dispatch


def rate_at(curve: Curve, size: float) -> float:
    """The curve between its points, on logarithmic scales; level beyond its ends."""
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
    """Of one step of the house's training on a batch of whole sequences."""
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
                    products += _product(rates, parameter.shape, rows)
                    calls += PRODUCT_CALLS
            spend(_block(model, block, rows))
            calls += ATTENTION_CALLS * (1 if block.cross is None else 2)
    loss = 0.0
    for name in model.head_names():
        rows = batch * (1 if isinstance(model.head(name), AnswerHead) else length)
        width = model.head_size(name)
        again = 4 / 3 if rows * width > PIECE else 1.0  # pieces are made once more
        weights = again * 6 * rows * head_weights(model, name)
        products += weights / rate_at(rates.products, model.d_model)
        loss += again * rows * width / rate_at(rates.logits, min(rows * width, PIECE))
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


def _product(rates: Rates, shape: tuple[int, ...], rows: int) -> float:
    return 6 * rows * math.prod(shape) / rate_at(rates.products, min(shape))


def _around(model: ModelSpec, rows: int, vocab: int) -> Iterator[tuple[tuple[float, int], int]]:
    """Lookup, the table's gradient, the final norm, the rows that count."""
    yield GATHER, rows * model.d_model
    yield MEETING, vocab * model.d_model
    yield MEETING, vocab * model.d_model
    yield _NORMS[type(model.decoder.final_norm or LayerNorm())], rows * model.d_model
    yield GATHER, rows * model.d_model


def _block(model: ModelSpec, block: Block, rows: int) -> Iterator[tuple[tuple[float, int], int]]:
    whole = rows * model.d_model
    for attention in (block.attention, block.cross):
        if attention is None:
            continue
        yield _NORMS[type(block.norm)], whole
        yield RESIDUAL, whole
        yield MEETING, whole
        yield MEETING, whole
        d_head = attention.head_width(model.d_model)
        heads = (attention.n_heads, attention.kv_heads)
        for count in heads:
            if attention.qk_norm is not None:
                yield _NORMS[type(attention.qk_norm)], rows * count * d_head
            if isinstance(model.position, Rotary) and attention is block.attention:
                yield ROTATION, rows * count * d_head
    yield _NORMS[type(block.norm)], whole
    yield RESIDUAL, whole
    wide = rows * block.ffn.d_ff
    if isinstance(block.ffn, MLP):
        yield RELU if block.ffn.activation == "relu" else GELU, wide
    else:
        yield MEETING, whole
        yield SILU, wide
        yield GATE, wide


_NORMS: dict[type, tuple[float, int]] = {LayerNorm: LAYER_NORM, RMSNorm: RMS_NORM}
