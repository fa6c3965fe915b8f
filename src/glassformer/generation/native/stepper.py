"""`NativeStepper`: the native step of a torch model, over the model's own memory.

The default on a CPU for models that the C file can run. `unavailable` is the closed decision on
which these are: what the program has, the modules that hold it, and where and how their weights are
stored.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from glassformer.generation.native.arrays import ArrayStepper, NativePast
from glassformer.generation.native.lowering import Array, unknown_part
from glassformer.generation.native.prompt_cache import PromptCache
from glassformer.kernels import c_library
from glassformer.kernels.build import digest
from glassformer.kernels.integer import IntegerTiles
from glassformer.models.decodable import decodable
from glassformer.models.model import DecoderLM, EncoderDecoder, Holder, Model
from glassformer.models.prompts import Prompts
from glassformer.models.stack import Stack, StackParts
from glassformer.models.stepping import Stepper
from glassformer.models.weights import model_digest, numpy_view
from glassformer.nn.attention import MultiHeadAttention
from glassformer.nn.block import TransformerBlock
from glassformer.nn.embedding import FactorizedTokenEmbedding, TokenEmbedding
from glassformer.nn.experts import MixtureOfExperts
from glassformer.nn.ffn import MLP, SwiGLU
from glassformer.nn.heads import TiedHead
from glassformer.nn.linear import Linear, PackedWeight
from glassformer.nn.norm import LayerNorm, RMSNorm
from glassformer.nn.position import (
    ALiBiPosition,
    RotaryPosition,
    added_rows,
    heads_key,
)
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import InputError
from glassformer.spec.program import Op

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


def unavailable(model: Model, *, kv_cache: KVCache = "float") -> str:
    """Return the reason why this model has no native step here; empty if it has one."""
    if reason := c_library.unavailable():
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
    return foreign_module(model, but=IntegerWeights)


def foreign_module(model: Model, *, but: type | None = None) -> str:
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

    def added(self, op: Op) -> Array | None:
        """Return the table of sinusoids, the learned rows, or those that a user's part computes."""
        part = self._parts(op.part.removesuffix("position")).position
        rows = added_rows(part, self.model.spec.max_seq_len, torch.float32)
        return None if rows is None else numpy_view(rows)

    def _parts(self, stack: str) -> StackParts:
        if isinstance(self.model, EncoderDecoder):
            return self.model.encoder if stack == "encoder." else self.model.decoder
        return cast(StackParts, self.model)


def _table(part: nn.Module) -> Array:
    return numpy_view(cast(Tensor, part.table))


# B rows, V vocab


class NativeStepper(ArrayStepper):
    """An `ArrayStepper` over a torch model; tensors that it gives share memory with its arrays.

    With `prompt_cache`, a folder, prompts are read from where they differ from those that are kept
    there, and are kept in their turn; `reused` counts the tokens that were not read again.
    """

    def __init__(
        self,
        model: Model | Holder,
        *,
        prompt_cache: Path | None = None,
        kv_cache: KVCache = "float",
    ) -> None:
        self.model = decodable(model)
        Stepper.__init__(self, self.model.spec)
        if reason := unavailable(self.model, kv_cache=kv_cache):
            raise InputError(f"no native step: {reason}", hint="TorchStepper runs any model")
        if prompt_cache is not None and self.model.spec.encoder is not None:
            raise InputError("a prompt cache is for decoders: answers to a source begin alike")
        self.prompt_cache, self.kv_cache = prompt_cache, kv_cache
        self._version: tuple[int, ...] = ()
        self._kept: PromptCache | None = None
        self._prepare()

    def array(self, numbers: NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers)

    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, NativePast]:
        """Read the prompts in blocks, from where they differ from what is kept."""
        self._notice_new_weights()
        if self._kept is None:
            return super().start(prompts, room=room)
        past, lengths = super().empty(0), []
        for row in prompts.tokens:
            one = super().empty(1)
            lengths.append(self._kept.find(row, past=one))
            past.join(one)
        self.reused += sum(lengths)
        rest = [tokens[length:] for tokens, length in zip(prompts.tokens, lengths, strict=True)]
        logits_BV: Tensor = self.read(rest, past=past)
        for place, tokens in enumerate(prompts.tokens):
            self._kept.keep(tokens, past=past, row=place, length=lengths[place])
        return logits_BV, past

    def empty(self, rows: int, *, room: int = 0) -> NativePast:
        """Return rows without a token, with all the memory that `room` positions of each take."""
        self._notice_new_weights()
        return super().empty(rows, room=room)

    def is_current(self, past: NativePast) -> bool:
        """Return True if the weights are those that a past was read with."""
        self._notice_new_weights()
        return past.own.pages is self.pages

    def kept(self, prompt: Sequence[int]) -> int:
        """Return the number of a prompt's first tokens that are in the folder."""
        if self.prompt_cache is None:
            return 0
        self._notice_new_weights()
        return 0 if self._kept is None else self._kept.longest(prompt)[0]

    def keep(self, prompt: Sequence[int], *, past: NativePast) -> None:
        if self._kept is not None:
            self._kept.keep(prompt, past=past, row=0, length=self.kept(prompt))

    def identity(self) -> str:
        kind = f"native {self.kv_cache} {digest()} {c_library.variant()}"
        return model_digest(self.model, kind=kind)

    def _notice_new_weights(self) -> None:
        """Write the program again if the model was trained, loaded or moved since."""
        now = tuple(x for p in self.model.parameters() for x in (p._version, p.data_ptr()))
        now += tuple(m.loads for m in self.model.modules() if isinstance(m, PackedWeight))
        if now == self._version:
            return
        if reason := unavailable(self.model, kv_cache=self.kv_cache):
            raise InputError(f"no native step any more: {reason}", hint="make another stepper")
        self._write(self.model.spec, ModelSource(self.model))
        self._kept = None
        if self.prompt_cache is not None:
            self._kept = PromptCache(
                self.prompt_cache, model=self.identity(), positions=self.max_seq_len
            )
        self._version = now
