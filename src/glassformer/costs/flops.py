"""What a model costs before it is built: FLOPs, bytes of weights and training, the cache.

FLOPs count two for each multiplication of a matrix product, attention over all keys, as PyTorch's
own counter does; elementwise work is left out. A backward is two forwards.
"""

from glassformer.costs.memory import activations
from glassformer.spec.checks import spec
from glassformer.spec.manifest import block_parameters, stored
from glassformer.spec.model import AnswerHead, Attention, FactorizedEmbedding, ModelSpec, NextHead
from glassformer.spec.quantization import QuantSpec, quantized_bytes, targets
from glassformer.spec.train import SGD, AdamW, Muon

FLOAT = 4


@spec
class Flops:
    """Of one sequence, forward: products with weights, and attention between positions."""

    products: int
    attention: int

    @property
    def forward(self) -> int:
        """Both."""
        return self.products + self.attention

    @property
    def training(self) -> int:
        """Forward and backward."""
        return 3 * self.forward


def flops(model: ModelSpec, *, length: int, source_length: int | None = None) -> Flops:
    """Of one sequence of this length (and of its source, which is as long unless said)."""
    source = length if source_length is None else source_length
    products = attention = 0
    for prefix, stack in model.stacks().items():
        rows = source if prefix == "encoder." else length
        if isinstance(model.embedding, FactorizedEmbedding):
            products += 2 * rows * model.embedding.rank * model.d_model
        for block in stack.blocks():
            parameters = block_parameters(block, "", model.d_model, init=model.init)
            weights = sum(p.size for p in parameters if p.kind == "matrix")
            products += 2 * rows * weights
            attention += 4 * rows * rows * _attention_width(block.attention, model.d_model)
            if block.cross is not None:
                # Keys and values are made of the source, whose length may be another.
                d_head = block.cross.head_width(model.d_model)
                of_source = 2 * block.cross.kv_heads * d_head * model.d_model
                products += 2 * (source - rows) * of_source
                attention += 4 * rows * source * _attention_width(block.cross, model.d_model)
    for name in model.head_names():
        rows = 1 if isinstance(model.head(name), AnswerHead) else length
        products += 2 * rows * head_weights(model, name)
    return Flops(products=products, attention=attention)


def _attention_width(attention: Attention, d_model: int) -> int:
    return attention.n_heads * attention.head_width(d_model)


def head_weights(model: ModelSpec, name: str) -> int:
    """Weights that a head's product reads, shared or not."""
    head, width = model.head(name), model.head_size(name)
    tied = isinstance(head, NextHead) and head.tied
    if tied and isinstance(model.embedding, FactorizedEmbedding):
        return model.embedding.rank * (width + model.d_model)
    return width * model.d_model


# --- bytes --------------------------------------------------------------------------------------


def weight_bytes(model: ModelSpec) -> dict[str, int]:
    """Of a checkpoint in float32, bf16, int8 and int4, scales and plain tensors included.

    int8 has a scale a channel; int4 a scale for 32 inputs, and int8 where 32 do not divide them.
    """
    own = stored(model)
    numbers = sum(p.size for p in own.values())
    found = {"float32": 4 * numbers, "bf16": 2 * numbers}
    for bits in (8, 4):
        quantized = QuantSpec(bits=bits, indivisible="int8")
        chosen = {p.name: quantized.scheme_of(p) for p in targets(model)}
        found[f"int{bits}"] = sum(
            FLOAT * p.size
            if (scheme := chosen.get(name)) is None
            else quantized_bytes(p.shape, scheme)
            for name, p in own.items()
        )
    return found


def optimizer_bytes(model: ModelSpec, optimizer: SGD | AdamW | Muon) -> int:
    """Of the optimizer's state: moments, and AdamW's step count of each tensor."""
    own = list(stored(model).values())
    match optimizer:
        case SGD(momentum=momentum):
            return FLOAT * sum(p.size for p in own) if momentum else 0
        case AdamW():
            return FLOAT * sum(2 * p.size + 1 for p in own)
        case Muon():
            return FLOAT * sum(
                p.size if p.kind == "matrix" and p.layer is not None else 2 * p.size + 1
                for p in own
            )


@spec
class TrainingMemory:
    """Bytes of training in float32: what is there all the time, and what one batch adds."""

    weights: int
    optimizer: int
    gradients: int
    activations: int
    passing: int

    @property
    def resident(self) -> int:
        """Weights, optimizer and activations: what stands there when the backward begins."""
        return self.weights + self.optimizer + self.activations

    @property
    def peak(self) -> int:
        """The most at one time: as the backward begins, or when every gradient is there."""
        begin = self.resident + self.passing
        return max(begin, self.weights + self.optimizer + self.gradients)


def training_memory(
    model: ModelSpec,
    *,
    batch: int,
    length: int,
    optimizer: SGD | AdamW | Muon | None = None,
    device: str = "cpu",
) -> TrainingMemory:
    """Of the house's training step on one batch of whole sequences; AdamW unless said otherwise."""
    kept = activations(model, batch=batch, length=length, device=device)
    weights = FLOAT * sum(p.size for p in stored(model).values())
    return TrainingMemory(
        weights=weights,
        optimizer=optimizer_bytes(model, AdamW() if optimizer is None else optimizer),
        gradients=weights,
        activations=kept.kept,
        passing=kept.passing,
    )


def cache_bytes(spec: ModelSpec, *, batch: int, length: int, itemsize: int) -> int:
    """Keys and values of so many positions in every decoder layer."""
    numbers = sum(
        2 * block.attention.kv_heads * block.attention.head_width(spec.d_model)
        for block in spec.decoder.blocks()
    )
    return numbers * batch * length * itemsize
