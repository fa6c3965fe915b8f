"""Models: a body that computes hidden states, and heads that read them.

`DecoderLM` is one stack and heads; GPT-2, Llama, Qwen and the FSM probe are specs of it.
`EncoderDecoder` is decode(encode(source)); the encoder's output goes to every decoder layer.

`build(spec)`: the only place where models are constructed.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from glassformer.data.batch import Batch
from glassformer.models.inputs import Inputs, as_inputs
from glassformer.models.stack import Stack, StackParts, add_stack_parts, run_stack
from glassformer.nn.cache import Cache
from glassformer.nn.embedding import FactorizedTokenEmbedding, TokenEmbedding
from glassformer.nn.experts import BalanceLosses
from glassformer.nn.heads import TiedHead, build_heads, build_transforms, finished, read_out
from glassformer.nn.initialise import initialise
from glassformer.nn.linear import Specified
from glassformer.nn.taps import Taps
from glassformer.spec.checks import check_tree
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.manifest import check_fits, manifest
from glassformer.spec.model import ModelSpec

# B batch, T length, D d_model, V logits


class Model(Specified, ABC):
    """A body and heads: `forward` is every head's `logits` of the `hidden` states of `inputs`."""

    heads: nn.ModuleDict
    transforms: nn.ModuleDict

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
        balance: BalanceLosses | None = None,
    ) -> Tensor:
        """Run the body: return hidden states (B, T, D) after the final norm.

        `recompute` saves memory in training: the backward runs each block again. `balance`
        collects the load-balancing losses of mixtures of experts.
        """

    @abstractmethod
    def output_embedding(self) -> TokenEmbedding | FactorizedTokenEmbedding:
        """Return the embedding that a tied head shares."""

    def inputs(
        self, batch: "Batch | Inputs | Tensor | np.ndarray", *, cache: Cache | None = None
    ) -> Inputs:
        """Return checked tensors on the model's device."""
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
        """Return a head's logits, optionally at some positions: (B, T, V), or (B, V) of an answer.

        `valid_BT` tells an answer head where a padded sequence ends.
        """
        if head not in self.spec.head_names():
            raise InputError(f"no head '{head}'", hint=nearest(head, self.spec.head_names()))
        kind = self.spec.head(head)
        if kind.readout is not None:
            hidden_BTD = read_out(hidden_BTD, valid_BT, readout=kind.readout)
        elif positions is not None:
            hidden_BTD = hidden_BTD[:, positions]
        return self.project(hidden_BTD, head)

    def project(self, rows: Tensor, head: str) -> Tensor:
        """Project hidden vectors (..., D) to a head's logits (..., V)."""
        logits: Tensor
        if head in self.transforms:
            rows = self.transforms[head](rows)
        if head not in self.heads:  # a vector that is read as it is
            return rows
        part = self.heads[head]
        logits = part(rows, self.output_embedding()) if isinstance(part, TiedHead) else part(rows)
        return finished(logits, self.spec.head(head))

    def forward(
        self,
        batch: "Batch | Inputs | Tensor | np.ndarray",
        *,
        cache: Cache | None = None,
        taps: Taps | None = None,
    ) -> dict[str, Tensor]:
        """Return logits by head."""
        if taps is not None:
            taps.check(self.spec)
        taps = self.scoped_taps if taps is None else taps.within(self.scoped_taps)
        if cache is not None and cache.length:
            self._check_continuation()
        inputs = self.inputs(batch, cache=cache)
        hidden_BTD = self.hidden(inputs, cache=cache, taps=taps)
        answers = {}
        for head in self.spec.head_names():
            logits = self.logits(hidden_BTD, head, valid_BT=inputs.valid_BT)
            answers[head] = logits if taps is None else taps.visit(f"logits.{head}", logits)
        return answers

    def _check_continuation(self) -> None:
        """Refuse a cache where an answer needs the complete sequence, not only its new tokens."""
        for head in self.spec.heads:
            if head.readout not in (None, "last"):
                raise InputError(
                    f"an answer read at '{head.readout}' cannot be continued from a cache",
                    hint="give the complete sequence at once",
                )

    def penalty(self) -> Tensor:
        """Return the regulariser that the spec adds to every loss: the L1 term of U, or 0."""
        terms = [
            part.penalty() for part in self.modules() if isinstance(part, FactorizedTokenEmbedding)
        ]
        return torch.stack(terms).sum() if terms else next(self.parameters()).new_zeros(())


class Holder(Protocol):
    """An object that holds a model, as an adapter does."""

    @property
    def model(self) -> nn.Module:
        """The model, one of ours or another library's."""


def model_of(thing: Model | Holder) -> Model:
    """Return the model itself, whether it comes bare or held; refuse another library's module."""
    model = thing if isinstance(thing, Model) else thing.model
    if not isinstance(model, Model):
        raise InputError(
            f"{type(model).__name__} is not one of our models",
            hint='load it with backend="native"',
        )
    return model


class DecoderLM(Model, StackParts):
    """embed -> blocks -> final norm -> heads."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        add_stack_parts(self, spec, spec.decoder, vocab_size=spec.vocab_size)
        self.heads = build_heads(spec)
        self.transforms = build_transforms(spec)

    def hidden(
        self,
        inputs: Inputs,
        *,
        cache: Cache | None = None,
        taps: Taps | None = None,
        recompute: bool = False,
        balance: BalanceLosses | None = None,
    ) -> Tensor:
        return run_stack(
            self,
            inputs.tokens_BT,
            valid_BT=inputs.valid_BT,
            segments_BT=inputs.segments_BT,
            runs_R=inputs.runs_R,
            types_BT=inputs.types_BT,
            cache=cache,
            taps=taps,
            recompute=recompute,
            balance=balance,
        )

    def output_embedding(self) -> TokenEmbedding | FactorizedTokenEmbedding:
        return self.embed


# B batch, T target length, S source length, D d_model


class EncoderDecoder(Model):
    """The 2017 transformer: every decoder layer reads the encoder's output."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        assert spec.encoder is not None
        self.encoder = Stack(spec, spec.encoder, vocab_size=spec.source_vocab)
        self.decoder = Stack(spec, spec.decoder, vocab_size=spec.vocab_size)
        if spec.share_embedding:
            self.decoder.embed = self.encoder.embed
        self.heads = build_heads(spec)
        self.transforms = build_transforms(spec)

    def encode(
        self,
        inputs: Inputs,
        *,
        taps: Taps | None = None,
        recompute: bool = False,
        balance: BalanceLosses | None = None,
    ) -> Tensor:
        """Return the memory (B, S, D) that every decoder layer reads."""
        assert inputs.source_BS is not None
        return run_stack(
            self.encoder,
            inputs.source_BS,
            valid_BT=inputs.source_valid_BS,
            taps=taps,
            prefix="encoder.",
            recompute=recompute,
            balance=balance,
        )

    def decode(
        self,
        inputs: Inputs,
        memory_BSD: Tensor,
        *,
        cache: Cache | None = None,
        taps: Taps | None = None,
        recompute: bool = False,
        balance: BalanceLosses | None = None,
    ) -> Tensor:
        """Return hidden states (B, T, D) of the target tokens; with a cache, of the new ones."""
        return run_stack(
            self.decoder,
            inputs.tokens_BT,
            valid_BT=inputs.valid_BT,
            memory_BSD=memory_BSD,
            memory_valid_BS=inputs.source_valid_BS,
            cache=cache,
            taps=taps,
            prefix="decoder.",
            recompute=recompute,
            balance=balance,
        )

    def hidden(
        self,
        inputs: Inputs,
        *,
        cache: Cache | None = None,
        taps: Taps | None = None,
        recompute: bool = False,
        balance: BalanceLosses | None = None,
    ) -> Tensor:
        memory_BSD = self.encode(inputs, taps=taps, recompute=recompute, balance=balance)
        return self.decode(
            inputs, memory_BSD, cache=cache, taps=taps, recompute=recompute, balance=balance
        )

    def output_embedding(self) -> TokenEmbedding | FactorizedTokenEmbedding:
        return self.decoder.embed


def build(
    spec: ModelSpec,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> DecoderLM | EncoderDecoder:
    """Build a model with weights sampled by the spec's rules, in eval mode.

    Without a generator torch's own is used. On the device "meta" nothing is allocated or sampled.
    """
    check_tree(spec)
    target = torch.device(device or "cpu")
    if target.type != "meta":
        check_fits(spec, bytes_each=4)
    with torch.device("meta" if target.type == "meta" else "cpu"):
        model = DecoderLM(spec) if spec.encoder is None else EncoderDecoder(spec)
    if target.type != "meta":
        # Sampled on the CPU, so that a seed gives the same weights on every device.
        initialise(model, manifest(spec), generator=generator)
        model.to(target)
    return model.eval()
