"""FLOPs of a model, computed from its spec.

A matrix product counts two FLOPs for each multiplication, and attention counts all keys, as
PyTorch's own counter does. Elementwise work is left out. A backward pass is two forward passes.
Of a mixture of experts, only those that a token chooses count.
"""

from typing import assert_never

from glassformer.spec.checks import check_tree, spec
from glassformer.spec.manifest import active, block_parameters, is_tied
from glassformer.spec.model import (
    Attention,
    FactorizedEmbedding,
    ModelSpec,
    PlainEmbedding,
    ScaledEmbedding,
)


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
    check_tree(model)
    source = length if source_length is None else source_length
    products = attention = 0
    for prefix, stack in model.stacks().items():
        rows = source if prefix == "encoder." else length
        match model.embedding:
            case FactorizedEmbedding(rank=rank):
                products += 2 * rows * rank * model.d_model
            case PlainEmbedding() | ScaledEmbedding():
                pass
            case _ as unreachable:
                assert_never(unreachable)
        for block in stack.blocks():
            parameters = block_parameters(block, "", model.d_model, init=model.init)
            weights = sum(p.size for p in parameters if p.kind == "matrix" and active(block, p))
            products += 2 * rows * weights
            attention += 4 * rows * rows * _attention_width(block.attention, model.d_model)
            if block.cross is not None:
                # Keys and values are computed from the source, whose length may differ.
                d_head = block.cross.head_width(model.d_model)
                of_source = 2 * block.cross.kv_heads * d_head * model.d_model
                products += 2 * (source - rows) * of_source
                attention += 4 * rows * source * _attention_width(block.cross, model.d_model)
    for head, name in zip(model.heads, model.head_names(), strict=True):
        rows = head.rows(length)
        products += 2 * rows * head_weights(model, name)
    return Flops(products=products, attention=attention)


def _attention_width(attention: Attention, d_model: int) -> int:
    return attention.n_heads * attention.head_width(d_model)


def head_weights(model: ModelSpec, name: str) -> int:
    """Count the weights that a head's product reads, whether tied or its own."""
    head, width = model.head(name), model.head_size(name)
    match model.embedding:
        case FactorizedEmbedding(rank=rank) if is_tied(head):
            return rank * (width + model.d_model)
        case FactorizedEmbedding() | PlainEmbedding() | ScaledEmbedding():
            return width * model.d_model
        case _ as unreachable:
            assert_never(unreachable)
