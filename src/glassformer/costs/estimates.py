"""FLOPs and bytes of a model, read off its program and its manifest.

FLOPs: a matrix product counts two for each multiplication, and attention counts all keys, as
PyTorch's own counter does. Elementwise work is left out. A backward pass is two forward passes. Of
a mixture of experts, only those that a token chooses count.

Bytes: weights, optimizer state, KV cache, and a training step with its `activations`.
"""

from typing import assert_never

from glassformer.costs.activations import FLOAT, activations
from glassformer.spec.checks import check_member, spec
from glassformer.spec.decoding import KVCache
from glassformer.spec.execution import KV_GROUP
from glassformer.spec.manifest import stored
from glassformer.spec.model import ModelSpec
from glassformer.spec.program import Attend, Linear, Remember, Route, program
from glassformer.spec.quantization import QuantSpec, coverage, targets
from glassformer.spec.schemes import SCHEMES, scheme_bytes
from glassformer.spec.train import AdamW, Optimizer


@spec
class Flops:
    """Forward FLOPs of one sequence: products with weights, and attention between positions."""

    products: int
    attention: int

    @property
    def forward(self) -> int:
        """Products and attention together."""
        return self.products + self.attention

    @property
    def training(self) -> int:
        """Forward and backward together."""
        return 3 * self.forward


def flops(model: ModelSpec, *, length: int, source_length: int | None = None) -> Flops:
    """Count the FLOPs of one sequence; `source_length` (encoder-decoder) defaults to `length`."""
    made = program(model)
    source = length if source_length is None else source_length
    rows = {"target": length, "source": source, "sequence": 1}
    products = attention = 0
    keys = {op.memory: made.values[op.reads[0]].rows for op in made.ops if not op.writes}
    for op in made.with_one_expert():  # with the rows of all those that a token chooses
        if op.writes is None:
            continue
        value = made.values[op.writes]
        if isinstance(op.kind, Route):
            rows["chosen"] = op.kind.chosen * rows[value.rows]
        elif isinstance(op.kind, Linear):
            products += 2 * rows[value.rows] * made.values[op.reads[0]].width * value.width
        elif isinstance(op.kind, Attend):
            attention += 4 * rows[value.rows] * rows[keys[op.memory]] * value.width
    return Flops(products=products, attention=attention)


def weight_bytes(model: ModelSpec) -> dict[str, int]:
    """Count the bytes of a checkpoint in float32, bf16 and each quantization scheme.

    Scales are included; tensors that are not quantized count as float32. A matrix that a scheme
    does not fit is counted as int8, which the name then says; a scheme that fits none is left out.
    """
    own = stored(model)
    numbers = sum(p.size for p in own.values())
    found = {"float32": 4 * numbers, "bf16": 2 * numbers}
    for kind in SCHEMES:
        form = coverage(model, kind()).name
        if not form:
            continue
        quantized = QuantSpec(scheme=kind(), indivisible="int8")
        chosen = {p.name: quantized.scheme_of(p) for p in targets(model)}
        found[form] = sum(
            FLOAT * p.size
            if (scheme := chosen.get(name)) is None
            else scheme_bytes(scheme, p.shape)
            for name, p in own.items()
        )
    return found


def optimizer_bytes(model: ModelSpec, optimizer: Optimizer) -> int:
    """Count the bytes of the optimizer's state: moments, and AdamW's step count per tensor."""
    check_member("optimizer", optimizer, Optimizer)
    return FLOAT * sum(optimizer.state_size(p) for p in stored(model).values())


@spec
class TrainingMemory:
    """Bytes of a training step in float32.

    `activations` is what one batch keeps for the backward pass; `passing` is what the loss needs in
    addition while its gradient is computed.
    """

    weights: int
    optimizer: int
    gradients: int
    activations: int
    passing: int

    @property
    def resident(self) -> int:
        """Weights, optimizer state and activations: what is allocated when the backward begins."""
        return self.weights + self.optimizer + self.activations

    @property
    def peak(self) -> int:
        """The maximum: as the backward begins, or once every gradient is allocated."""
        begin = self.resident + self.passing
        return max(begin, self.weights + self.optimizer + self.gradients)


def training_memory(
    model: ModelSpec,
    *,
    batch: int,
    length: int,
    optimizer: Optimizer | None = None,
    device: str = "cpu",
) -> TrainingMemory:
    """Estimate a training step on a batch without padding; the optimizer defaults to AdamW."""
    kept = activations(model, batch=batch, length=length, device=device)
    weights = FLOAT * sum(p.size for p in stored(model).values())
    return TrainingMemory(
        weights=weights,
        optimizer=optimizer_bytes(model, AdamW() if optimizer is None else optimizer),
        gradients=weights,
        activations=kept.kept,
        passing=kept.passing,
    )


def cache_bytes(
    spec: ModelSpec, *, batch: int, length: int, itemsize: int, kv_cache: KVCache = "float"
) -> int:
    """Count the bytes of the keys and values of `length` positions in every decoder layer.

    `itemsize` is of a number where they are kept as computed; "int8" has a byte for each, and a
    float32 for each group.
    """
    made, total = program(spec), 0
    for op in made.ops:
        if not isinstance(op.kind, Remember) or op.part.startswith("encoder."):
            continue
        if op.part.endswith(".cross"):  # of a source, once
            continue
        for name in op.reads:
            width = made.values[name].width // op.kind.heads
            match kv_cache:
                case "float":
                    one = width * itemsize
                case "int8":
                    one = width + 4 * -(-width // KV_GROUP)
                case _ as unreachable:
                    assert_never(unreachable)
            total += op.kind.heads * one
    return total * batch * length
