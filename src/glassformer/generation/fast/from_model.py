"""A torch model as the source of a native program: its own memory, and why it may have none.

`why_not` is the closed decision on which models have a native step: the spec's parts, which
`program` knows, the modules that hold them, and where and how their weights are stored.
"""

from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from glassformer.generation.fast.program import Array, unknown_part
from glassformer.kernels import c_library
from glassformer.kernels.integer import IntegerTiles
from glassformer.models.model import DecoderLM, EncoderDecoder, Model
from glassformer.models.stack import Stack, StackParts
from glassformer.models.weights import numpy_view
from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.block import TransformerBlock
from glassformer.nn.embedding import FactorizedTokenEmbedding, TokenEmbedding
from glassformer.nn.experts import MixtureOfExperts
from glassformer.nn.ffn import MLP, SwiGLU
from glassformer.nn.heads import TiedHead
from glassformer.nn.linear import Linear
from glassformer.nn.norm import LayerNorm, RMSNorm
from glassformer.nn.position import (
    AddedPosition,
    ALiBiPosition,
    LearnedPosition,
    RotaryPosition,
    SinusoidalPosition,
    heads_key,
)
from glassformer.spec.decoding import KVCache

DTYPES = (torch.float32, torch.bfloat16)

#: The modules that the program has operations for, and those that it need not run.
PARTS = {
    *(DecoderLM, EncoderDecoder, Stack, TransformerBlock, MultiHeadAttention, MLP, SwiGLU, Linear),
    MixtureOfExperts,
    *(LayerNorm, RMSNorm, TokenEmbedding, FactorizedTokenEmbedding, TiedHead, RotaryPosition),
    *(ALiBiPosition, nn.Dropout, nn.ModuleList, nn.ModuleDict),
}


@runtime_checkable
class IntegerWeights(Protocol):
    """A quantized layer or table; its weights are those of the C routines, if it uses them."""

    def c_weight(self) -> IntegerTiles | None:
        """Return the matrix in the layout of integer.c, or None."""


def why_not(model: Model, *, kv_cache: KVCache = "float") -> str:
    """Return the reason why this model has no native step here; empty if it has one."""
    if reason := c_library.why_not():
        return reason
    like = next(model.parameters())
    if like.device.type != "cpu":
        return f"the model is on {like.device}, and the native step runs on the CPU"
    if any(parameter.dtype not in DTYPES for parameter in model.parameters()):
        return f"its weights are {like.dtype}, and the native step reads float32 and bfloat16"
    if reason := unknown_part(model.spec, kv_cache=kv_cache):
        return reason
    for name, part in model.named_modules():
        if isinstance(part, IntegerWeights) and part.c_weight() is None:
            return f"the weights of {name} are not in the form of our C routines"
    return unknown_module(model, but=IntegerWeights)


def unknown_module(model: Model, *, but: type | None = None) -> str:
    """Return what a step that reads weights past the modules would pass over; empty if nothing.

    `but` are classes of other modules that the step knows.
    """
    for name, part in model.named_modules():
        if "position" in name.split("."):
            continue  # its table is read
        if type(part) not in PARTS and not (but is not None and isinstance(part, but)):
            return f"the step has no {type(part).__name__}, as in {name}"
        if part._forward_hooks or part._forward_pre_hooks:
            return f"a hook would not be called: {name or 'the model'} has one"
    return ""


class ModelSource:
    """A `program.Source`: views of a model's parameters and tables."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def array(self, name: str) -> Array | None:
        """Return a parameter, or a buffer of a quantized layer."""
        owner, _, leaf = name.rpartition(".")
        try:
            found = getattr(self.model.get_submodule(owner), leaf)
        except AttributeError:
            return None
        return numpy_view(found) if isinstance(found, Tensor) else None

    def integer(self, layer: str) -> IntegerTiles | None:
        """Return the quantized weights of a layer or table."""
        part = self.model.get_submodule(layer)
        return part.c_weight() if isinstance(part, IntegerWeights) else None

    def packed(self, layer: str) -> None:
        """Return None: a model's weights are unpacked."""
        return

    def rotation(self, stack: str, layer: int) -> Array | None:
        """Return the table of a layer's rotation."""
        parts = self._parts(stack)
        turn = parts.turns[layer]
        return None if turn is None else _table(parts.rotary[turn])

    def slopes(self, stack: str, layer: int) -> Array | None:
        """Return the slopes that layers with these heads share."""
        parts = self._parts(stack)
        if not parts.alibi:
            return None
        attention = list(parts.stack.blocks())[layer].attention
        key = heads_key(attention.n_heads, attention.head_width(self.model.spec.d_model))
        return _table(parts.alibi[key])

    def added(self, stack: str) -> Array | None:
        """Return the table of sinusoids, the learned rows, or those that a user's part computes."""
        match self._parts(stack).position:
            case SinusoidalPosition() as part:
                return numpy_view(part.table)
            case LearnedPosition() as part:
                return numpy_view(part.weight[part.offset :])
            case AddedPosition() as part:
                return numpy_view(part.table(self.model.spec.max_seq_len, torch.float32))
            case None:
                return None

    def _parts(self, stack: str) -> StackParts:
        if isinstance(self.model, EncoderDecoder):
            return self.model.encoder if stack == "encoder." else self.model.decoder
        return cast(StackParts, self.model)


def _table(part: nn.Module) -> Array:
    return numpy_view(cast(Tensor, part.table))
