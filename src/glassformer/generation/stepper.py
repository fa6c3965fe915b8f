"""Steppers over torch models, and over the by-hand engine.

`TorchStepper` has a cache; `NaiveStepper` has none, reads everything again at each step and is
what the others are checked against; `HandStepper` runs the by-hand engine. The past is passed in
and out, never stored on the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from glassformer.byhand import cached_forward as byhand
from glassformer.byhand.model import Model as HandModel
from glassformer.models.decodable import decodable, read_prompts
from glassformer.models.inputs import Inputs
from glassformer.models.model import EncoderDecoder, Holder, Model
from glassformer.models.prompts import Prompts, padded
from glassformer.models.stepping import RewindingStepper, Stepper
from glassformer.nn.cache import FixedCache, GrowingCache
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import InputError

# B batch, T length, S source length, D d_model, V vocab


def _row(held: Tensor | None, rows_B: Tensor) -> Tensor | None:
    return None if held is None else held[rows_B]


@dataclass(slots=True)
class TorchPast:
    """A cache; after an encoder also its output and which of its positions are real."""

    cache: FixedCache | GrowingCache
    device: torch.device
    memory_BSD: Tensor | None = None
    memory_valid_BS: Tensor | None = None

    @torch.no_grad()
    def reorder(self, rows_B: Tensor) -> None:
        rows_B = rows_B.to(self.device)
        self.cache.reorder(rows_B)
        self.memory_BSD = _row(self.memory_BSD, rows_B)
        self.memory_valid_BS = _row(self.memory_valid_BS, rows_B)


class TorchStepper(RewindingStepper):
    """A model with a cache: reads the prompt once, then one new token per row and step."""

    def __init__(
        self,
        model: Model | Holder,
        *,
        cache: Literal["fixed", "growing"] = "fixed",
        kv_cache: KVCache = "float",
    ) -> None:
        self.model = decodable(model)
        super().__init__(self.model.spec)
        self.cache, self.kv_cache = cache, kv_cache

    @torch.no_grad()
    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, TorchPast]:
        inputs = read_prompts(self.model, prompts)
        length = inputs.tokens_BT.shape[1]
        cache: FixedCache | GrowingCache = GrowingCache(kv_cache=self.kv_cache)
        if self.cache == "fixed":
            cache = FixedCache(length + room, kv_cache=self.kv_cache)
        past = TorchPast(cache, inputs.tokens_BT.device)
        if isinstance(self.model, EncoderDecoder):
            past.memory_BSD = self.model.encode(inputs)
            past.memory_valid_BS = inputs.source_valid_BS
            self.encoder_calls += 1
        return self._read(inputs.tokens_BT, inputs.valid_BT, past), past

    @torch.no_grad()
    def step(self, tokens_B: Tensor, *, past: TorchPast) -> Tensor:
        return self._read(tokens_B.to(past.device)[:, None], None, past)

    @torch.no_grad()
    def read_several(self, tokens: Sequence[int], *, past: TorchPast) -> Tensor:
        """Add several tokens to the only row: next-token logits (T, V) after each."""
        tokens_1T = torch.tensor([list(tokens)], device=past.device)
        return self.model.project(self._hidden(tokens_1T, None, past)[0], "next")

    @torch.no_grad()
    def extend(self, tokens: Sequence[int], *, past: TorchPast) -> Tensor:
        """Add several tokens to the only row: next-token logits (1, V) after the last."""
        return self._read(torch.tensor([list(tokens)], device=past.device), None, past)

    def forget(self, count: int, *, past: TorchPast) -> None:
        """Take back the last tokens that were added."""
        past.cache.cut(past.cache.length - count)

    def _read(self, tokens_BT: Tensor, valid_BT: Tensor | None, past: TorchPast) -> Tensor:
        """Project the last column only: it holds every row's last token."""
        hidden_BTD = self._hidden(tokens_BT, valid_BT, past)
        return self.model.project(hidden_BTD[:, -1], "next")

    def _hidden(self, tokens_BT: Tensor, valid_BT: Tensor | None, past: TorchPast) -> Tensor:
        self.positions += tokens_BT.shape[1]
        inputs = Inputs(tokens_BT, valid_BT, source_valid_BS=past.memory_valid_BS)
        if isinstance(self.model, EncoderDecoder):
            assert past.memory_BSD is not None
            return self.model.decode(inputs, past.memory_BSD, cache=past.cache)
        return self.model.hidden(inputs, cache=past.cache)


@dataclass(slots=True)
class Rows:
    """All token ids read so far."""

    tokens_BT: Tensor
    valid_BT: Tensor | None
    source_BS: Tensor | None
    source_valid_BS: Tensor | None

    def reorder(self, rows_B: Tensor) -> None:
        rows_B = rows_B.to(self.tokens_BT.device)
        self.tokens_BT = self.tokens_BT[rows_B]
        self.valid_BT = _row(self.valid_BT, rows_B)
        self.source_BS = _row(self.source_BS, rows_B)
        self.source_valid_BS = _row(self.source_valid_BS, rows_B)


class NaiveStepper(Stepper):
    """No cache: the complete sequence goes through the model at every step.

    With `kv_cache="int8"` keys and values are rounded as that cache rounds them, anew each time.
    """

    def __init__(self, model: Model | Holder, *, kv_cache: KVCache = "float") -> None:
        self.model = decodable(model)
        super().__init__(self.model.spec)
        self.kv_cache = kv_cache

    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, Rows]:
        inputs = read_prompts(self.model, prompts)
        past = Rows(inputs.tokens_BT, inputs.valid_BT, inputs.source_BS, inputs.source_valid_BS)
        return self._read(past), past

    def step(self, tokens_B: Tensor, *, past: Rows) -> Tensor:
        new_B1 = tokens_B.to(past.tokens_BT.device)[:, None]
        past.tokens_BT = torch.cat((past.tokens_BT, new_B1), 1)
        if past.valid_BT is not None:
            past.valid_BT = torch.cat((past.valid_BT, torch.ones_like(new_B1, dtype=torch.bool)), 1)
        return self._read(past)

    @torch.no_grad()
    def _read(self, past: Rows) -> Tensor:
        self.positions += past.tokens_BT.shape[1]
        self.encoder_calls += past.source_BS is not None
        inputs = Inputs(
            past.tokens_BT,
            past.valid_BT,
            source_BS=past.source_BS,
            source_valid_BS=past.source_valid_BS,
        )
        cache = None if self.kv_cache == "float" else GrowingCache(kv_cache=self.kv_cache)
        return self.model.project(self.model.hidden(inputs, cache=cache)[:, -1], "next")


@dataclass(slots=True)
class HandPast:
    """The by-hand engine's own state."""

    state: byhand.DecodeState

    def reorder(self, rows_B: Tensor) -> None:
        self.state.reorder(rows_B.cpu().numpy())


class HandStepper(Stepper):
    """The by-hand engine's cached forward."""

    def __init__(self, model: HandModel) -> None:
        super().__init__(model.spec)
        self.model = model

    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, HandPast]:
        tokens_BT, valid_BT = padded(prompts.tokens)
        if tokens_BT.shape[1] + room > self.max_seq_len:
            raise InputError(
                f"the by-hand engine counts padding: {tokens_BT.shape[1]} + {room} columns exceed "
                f"max_seq_len {self.max_seq_len}",
                hint="give prompts of one length, or ask for fewer new tokens",
            )
        source_BS = source_valid_BS = None
        if prompts.sources is not None:
            source_BS, source_valid_BS = padded(prompts.sources)
            self.encoder_calls += 1
        self.positions += tokens_BT.shape[1]
        logits_BV, state = byhand.start(
            self.model,
            tokens_BT,
            valid_BT=valid_BT,
            source_tokens_BS=source_BS,
            source_valid_BS=source_valid_BS,
        )
        return torch.from_numpy(np.array(logits_BV)), HandPast(state)

    def step(self, tokens_B: Tensor, *, past: HandPast) -> Tensor:
        self.positions += 1
        logits_BV = byhand.step(self.model, tokens_B.cpu().numpy(), state=past.state)
        return torch.from_numpy(np.array(logits_BV))
