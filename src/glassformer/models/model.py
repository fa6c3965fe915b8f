"""What every model is: a body that makes hidden states, and heads that read them."""

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from glassformer.data.batch import Batch
from glassformer.models.inputs import Inputs, as_inputs
from glassformer.nn.cache import Cache
from glassformer.nn.embedding import FactorizedTokenEmbedding, TokenEmbedding
from glassformer.nn.heads import TiedHead, read_out
from glassformer.nn.linear import Linear
from glassformer.nn.taps import Taps
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.model import AnswerHead, ModelSpec, NextHead

# B batch, T length, D d_model, V logits


class Model(nn.Module, ABC):
    """`forward` = every head's `logits` of the `hidden` states of checked `inputs`."""

    spec: ModelSpec
    heads: nn.ModuleDict

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.scoped_taps: Taps | None = None

    @abstractmethod
    def hidden(
        self,
        inputs: Inputs,
        *,
        cache: Cache | None = None,
        taps: Taps | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """The body: hidden states (B, T, D) after the final norm.

        `recompute` saves memory in training: the backward runs each block again.
        """

    @abstractmethod
    def output_embedding(self) -> TokenEmbedding | FactorizedTokenEmbedding:
        """The table that a tied head shares."""

    def inputs(
        self, batch: "Batch | Inputs | Tensor | np.ndarray", *, cache: Cache | None = None
    ) -> Inputs:
        """The border: checked tensors on the model's device."""
        device = next(self.parameters()).device
        past = 0 if cache is None else cache.length
        return as_inputs(batch, self.spec, device=device, past=past)

    def logits(
        self,
        hidden_BTD: Tensor,
        head: str = "next",
        *,
        valid_BT: Tensor | None = None,
        positions: Tensor | slice | None = None,
    ) -> Tensor:
        """One head's logits, at some positions if asked: (B, T, V), or (B, V) for an answer.

        `valid_BT` tells an answer head where a padded sequence ends.
        """
        if head not in self.heads:
            raise InputError(f"no head '{head}'", hint=nearest(head, self.spec.head_names()))
        kind = self.spec.head(head)
        if isinstance(kind, AnswerHead):
            hidden_BTD = read_out(hidden_BTD, valid_BT, readout=kind.readout)
        elif positions is not None:
            hidden_BTD = hidden_BTD[:, positions]
        return self.project(hidden_BTD, head)

    def project(self, rows: Tensor, head: str) -> Tensor:
        """Hidden vectors (..., D) to a head's logits (..., V), wherever they were read."""
        part = self.heads[head]
        if isinstance(part, TiedHead):
            return part(rows, self.output_embedding())
        return part(rows)

    def forward(
        self,
        batch: "Batch | Inputs | Tensor | np.ndarray",
        *,
        cache: Cache | None = None,
        taps: Taps | None = None,
    ) -> dict[str, Tensor]:
        """Logits by head."""
        taps = self.scoped_taps if taps is None else taps
        if taps is not None:
            taps.check(self.spec)
        if cache is not None and cache.length:
            self._check_continuation()
        inputs = self.inputs(batch, cache=cache)
        hidden_BTD = self.hidden(inputs, cache=cache, taps=taps)
        answers = {}
        for head in self.heads:
            logits = self.logits(hidden_BTD, head, valid_BT=inputs.valid_BT)
            answers[head] = logits if taps is None else taps.visit(f"logits.{head}", logits)
        return answers

    def _check_continuation(self) -> None:
        """An answer over the whole sequence cannot be read from its new tokens alone."""
        for head in self.spec.heads:
            if isinstance(head, AnswerHead) and head.readout != "last":
                raise InputError(
                    f"an answer read at '{head.readout}' cannot be continued from a cache",
                    hint="give the whole sequence at once",
                )

    def penalty(self) -> Tensor:
        """What the spec adds to every loss: the L1 term of a factorized embedding, else 0."""
        terms = [
            part.penalty() for part in self.modules() if isinstance(part, FactorizedTokenEmbedding)
        ]
        return torch.stack(terms).sum() if terms else next(self.parameters()).new_zeros(())


class Holder(Protocol):
    """Whoever holds a model, as an adapter does."""

    model: Model


def model_of(thing: Model | Holder) -> Model:
    """The model itself, whether it comes bare or held."""
    return thing if isinstance(thing, Model) else thing.model


def build_heads(spec: ModelSpec) -> nn.ModuleDict:
    """The modules of the spec's heads, by name."""
    heads = nn.ModuleDict()
    for head, name in zip(spec.heads, spec.head_names(), strict=True):
        size = spec.head_size(name)
        if isinstance(head, NextHead) and head.tied:
            heads[name] = TiedHead(size, bias=head.bias)
        else:
            heads[name] = Linear(spec.d_model, size, bias=head.bias)
    return heads
