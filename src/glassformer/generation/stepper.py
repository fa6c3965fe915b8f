"""Steppers over torch models, and over the by-hand engine.

`TorchStepper` has a cache; `NaiveStepper` has none, reads everything again at each step and is
what the others are checked against; `HandStepper` runs the by-hand engine. The past is passed in
and out, never stored on the model.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.byhand import cached_forward as byhand
from glassformer.byhand.model import Model as HandModel
from glassformer.models.decodable import decodable, read_prompts
from glassformer.models.inputs import Inputs
from glassformer.models.model import EncoderDecoder, Holder, Model
from glassformer.models.prompts import Ids, Prompts, padded
from glassformer.models.stepping import Stepper
from glassformer.models.weights import arrays_of, model_digest, tensor_of
from glassformer.nn.cache import FixedCache, GrowingCache
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import InputError
from glassformer.spec.serialize import to_json
from glassformer.spec.state import State

# B batch, T length, S source length, D d_model, V vocab


class TorchStepper(Stepper):
    """A model with a cache: reads the prompt once, then one new token per row and step.

    After an encoder, the cache has its output as `cross["source"]`, and which of it is real.
    """

    forward_only = ""

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
    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, GrowingCache]:
        inputs = read_prompts(self.model, prompts)
        past = self.empty(inputs.tokens_BT.shape[1] + room)
        if isinstance(self.model, EncoderDecoder):
            held = (self.model.encode(inputs), inputs.source_valid_BS)
            past.cross["source"] = tuple(one for one in held if one is not None)
            self.encoder_calls += 1
        return self._read(inputs.tokens_BT, inputs.valid_BT, past), past

    def empty(self, room: int) -> GrowingCache:
        """Return a state that has read nothing, with room for so many columns."""
        if self.cache == "fixed":
            return FixedCache(room, kv_cache=self.kv_cache)
        return GrowingCache(kv_cache=self.kv_cache)

    @torch.no_grad()
    def step(self, tokens_B: Tensor, *, past: GrowingCache) -> Tensor:
        return self._read(tokens_B[:, None], None, past)

    @torch.no_grad()
    def extend(self, tokens: Sequence[int], *, past: GrowingCache, every: bool = False) -> Tensor:
        tokens_1T = torch.tensor([list(tokens)])
        if not every:
            return self._read(tokens_1T, None, past)
        return self.model.project(self._hidden(tokens_1T, None, past)[0], "next")

    def identity(self) -> str:
        return model_digest(self.model, kind=f"torch {self.kv_cache}")

    def stored(self, past: GrowingCache) -> dict[str, NDArray[Any]]:
        return arrays_of(past.arrays())

    def restored(self, arrays: Mapping[str, NDArray[Any]], *, room: int) -> GrowingCache:
        device = next(self.model.parameters()).device
        past = self.empty(arrays["valid"].shape[1] + room)
        past.fill({name: tensor_of(array).to(device) for name, array in arrays.items()})
        return past

    def _read(self, tokens_BT: Tensor, valid_BT: Tensor | None, past: GrowingCache) -> Tensor:
        """Project the last column only: it holds every row's last token."""
        hidden_BTD = self._hidden(tokens_BT, valid_BT, past)
        return self.model.project(hidden_BTD[:, -1], "next")

    def _hidden(self, tokens_BT: Tensor, valid_BT: Tensor | None, past: GrowingCache) -> Tensor:
        self.positions += tokens_BT.shape[1]
        tokens_BT = tokens_BT.to(next(self.model.parameters()).device)
        if not isinstance(self.model, EncoderDecoder):
            return self.model.hidden(Inputs(tokens_BT, valid_BT), cache=past)
        memory_BSD, *masks = past.cross["source"]
        inputs = Inputs(tokens_BT, valid_BT, source_valid_BS=masks[0] if masks else None)
        return self.model.decode(inputs, memory_BSD, cache=past)


@dataclass(slots=True)
class Text(State):
    """All token ids read so far, of steppers that read everything again."""

    rows: list[Ids]
    sources: list[Ids] | None = None

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    def reorder(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        if self.sources is not None:
            self.sources = [self.sources[row] for row in rows]

    def fork(self, rows: Sequence[int] | None = None) -> "Text":
        other = Text(self.rows, self.sources)
        other.reorder(range(len(self.rows)) if rows is None else rows)
        return other

    def rewind(self, lengths: Sequence[int]) -> list[int]:
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]
        return self.lengths

    def add(self, tokens_B: Tensor) -> None:
        """Append a token to each row."""
        self.rows = [(*row, new) for row, new in zip(self.rows, tokens_B.tolist(), strict=True)]

    @property
    def prompts(self) -> Prompts:
        """The rows as prompts."""
        return Prompts(tuple(self.rows), None if self.sources is None else tuple(self.sources))


class NaiveStepper(Stepper):
    """No cache: the complete sequence goes through the model at every step.

    With `kv_cache="int8"` keys and values are rounded as that cache rounds them, anew each time.
    """

    def __init__(self, model: Model | Holder, *, kv_cache: KVCache = "float") -> None:
        self.model = decodable(model)
        super().__init__(self.model.spec)
        self.kv_cache = kv_cache

    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, Text]:
        past = Text(list(prompts.tokens), None if prompts.sources is None else [*prompts.sources])
        return self._read(past), past

    def step(self, tokens_B: Tensor, *, past: Text) -> Tensor:
        past.add(tokens_B)
        return self._read(past)

    @torch.no_grad()
    def _read(self, past: Text) -> Tensor:
        inputs = read_prompts(self.model, past.prompts)
        self.positions += inputs.tokens_BT.shape[1]
        self.encoder_calls += inputs.source_BS is not None
        cache = None if self.kv_cache == "float" else GrowingCache(kv_cache=self.kv_cache)
        return self.model.project(self.model.hidden(inputs, cache=cache)[:, -1], "next")


class HandStepper(Stepper):
    """The by-hand engine's cached forward."""

    forward_only = ""

    def __init__(self, model: HandModel) -> None:
        super().__init__(model.spec)
        self.model = model

    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, byhand.DecodeState]:
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
        logits_BV, past = byhand.start(
            self.model,
            tokens_BT,
            valid_BT=valid_BT,
            source_tokens_BS=source_BS,
            source_valid_BS=source_valid_BS,
        )
        return torch.from_numpy(np.array(logits_BV)), past

    def step(self, tokens_B: Tensor, *, past: byhand.DecodeState) -> Tensor:
        return self._add(tokens_B.cpu().numpy()[:, None], past)[:, -1]

    def extend(
        self, tokens: Sequence[int], *, past: byhand.DecodeState, every: bool = False
    ) -> Tensor:
        logits_TV = self._add(np.array([list(tokens)]), past)[0]
        return logits_TV if every else logits_TV[-1:]

    def identity(self) -> str:
        made = hashlib.sha256(f"numpy {self.model.dtype} {to_json(self.model.spec)}".encode())
        for name, array in sorted(self.model.params.items()):
            made.update(f"{name} {array.shape}\n".encode())
            made.update(np.ascontiguousarray(array).tobytes())
        return made.hexdigest()[:32]

    def restored(self, arrays: Mapping[str, NDArray[Any]], *, room: int) -> byhand.DecodeState:
        past = byhand.DecodeState(self.model.dtype)
        past.fill({name: np.array(array) for name, array in arrays.items()})
        return past

    def _add(self, tokens_BT: "np.ndarray", past: byhand.DecodeState) -> Tensor:
        self.positions += tokens_BT.shape[1]
        logits_BTV = byhand.extend(self.model, tokens_BT, state=past)
        return torch.from_numpy(np.array(logits_BTV))
