"""Steppers over torch models, and over the by-hand engine.

`TorchStepper` has a cache; `NaiveStepper` has none, reads everything again at each step and is
what the others are checked against; `ReplayedStepper` does the same as one launch on a GPU;
`HandStepper` runs the by-hand engine; `PrefixCacheStepper`
keeps its cache between prompts and reads only what differs from the last one, as in a chat. The
past is passed in and out, never stored on the model.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from glassformer.byhand import cached_forward as byhand
from glassformer.byhand.model import Model as HandModel
from glassformer.generation.prompts import Prompts, padded
from glassformer.generation.samplers import Together, settings_of
from glassformer.generation.stepping import RewindingStepper, Stepper
from glassformer.models.inputs import Inputs
from glassformer.models.model import EncoderDecoder, Holder, Model, model_of
from glassformer.nn.cache import FixedCache, GrowingCache
from glassformer.spec.decoding import DecodeSpec, KVCache
from glassformer.spec.errors import InputError

# B batch, T length, S source length, D d_model, V vocab


def decodable(model: Model | Holder) -> Model:
    """Return the model itself, in eval mode: dropout would make every step another model."""
    model = model_of(model)
    if model.training:
        raise InputError("the model is in training mode", hint="call model.eval() first")
    return model


def read_prompts(model: Model, prompts: Prompts) -> Inputs:
    """Return checked tensors on the model's device, padded on the left."""
    tokens_BT, valid_BT = padded(prompts.tokens)
    source_BS = source_valid_BS = None
    if prompts.sources is not None:
        source_BS, source_valid_BS = map(_tensor, padded(prompts.sources))
    given = Inputs(
        torch.from_numpy(tokens_BT),
        _tensor(valid_BT),
        source_BS=source_BS,
        source_valid_BS=source_valid_BS,
    )
    return model.inputs(given)


def _tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)


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
class ReplayedPast:
    """Token ids of one length, filled up to column `column`; `lines` are the rows still wanted."""

    room: "_Room"
    lines: Tensor

    def reorder(self, rows_B: Tensor) -> None:
        self.lines = self.lines[rows_B.to(self.lines.device)]


#: Steps of a run that are launched before the first of them has ended.
AHEAD = 4


class _Room:
    """The memory that the launches of one shape read and write.

    `column` is the last column that was read, `next_B` is what is read next, by rows; `done` counts
    the steps of a run, which has random numbers and keeps its choices here.
    """

    def __init__(self, batch: int, length: int, device: torch.device) -> None:
        self.tokens_BT = torch.zeros(batch, length, dtype=torch.int64, device=device)
        self.column = torch.zeros(1, dtype=torch.int64, device=device)
        self.next_B = self.tokens_BT.new_zeros(batch)
        self.done = torch.zeros_like(self.column)
        self.shares_CB = torch.zeros(length, batch, dtype=torch.float64, device=device)
        self.made_CB = self.tokens_BT.new_zeros(length, batch)

    def read_next(self) -> None:
        """Write the next tokens behind the last."""
        self.column += 1
        self.tokens_BT.index_copy_(1, self.column, self.next_B[:, None])


class ReplayedStepper(Stepper):
    """No cache, on a GPU: sequences of the final length at every step, launched as one graph.

    For small models, which wait for launches, not for arithmetic, and for stacks of them, which
    have no fast step. It reads the weights where they are; they may change, but not move. Tokens
    that are sampled by plain rules are chosen in the same launch.
    """

    def __init__(self, model: Model) -> None:
        if model.spec.encoder is not None:
            raise InputError("a model with an encoder", hint="use TorchStepper")
        self.model = decodable(model)
        super().__init__(model.spec)
        self._rooms: dict[tuple[int, int], _Room] = {}
        self._launches: dict[tuple[object, ...], Callable[[], Tensor]] = {}
        self._samplers: dict[tuple[object, ...], Together] = {}
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Launch on a stream of its own, after what was launched so far, beside what comes now."""
        if not next(self.model.parameters()).is_cuda:
            yield
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(self._stream):
            yield

    @torch.no_grad()
    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, ReplayedPast]:
        inputs = read_prompts(self.model, prompts)
        if inputs.valid_BT is not None:
            raise InputError("prompts of different lengths", hint="use TorchStepper")
        B, length = inputs.tokens_BT.shape
        shape, device = (B, length + room), inputs.tokens_BT.device
        if shape not in self._rooms:
            self._rooms[shape] = _Room(*shape, device)
        here = self._rooms[shape]
        here.tokens_BT[:, :length] = inputs.tokens_BT
        here.column.fill_(length - 1)
        self.positions += here.tokens_BT.shape[1]
        past = ReplayedPast(here, torch.arange(B, device=device))
        return self._logits(here), past

    @torch.no_grad()
    def step(self, tokens_B: Tensor, *, past: ReplayedPast) -> Tensor:
        here = past.room
        self.positions += here.tokens_BT.shape[1]
        here.next_B.index_copy_(0, past.lines, tokens_B.to(here.next_B.device))
        here.read_next()
        return self._launch(here, lambda: self._logits(here))()[past.lines]

    @torch.no_grad()
    def run_sampled(
        self, tokens_B: Tensor, *, past: ReplayedPast, spec: DecodeSpec, shares_CB: Tensor
    ) -> list[list[int]] | None:
        here, steps, settings = past.room, len(shares_CB), settings_of(spec)
        sampler = self._samplers.setdefault(settings, Together(spec, waits=False))

        def compute() -> Tensor:
            here.read_next()
            share_B1 = here.shares_CB.index_select(0, here.done)[0][:, None]
            found_B = sampler(self._logits(here), share_B1)
            here.made_CB.index_copy_(0, here.done, found_B[None])
            here.next_B.copy_(found_B.clamp(min=0))  # NOTHING is for the caller to see
            here.done += 1
            return here.made_CB

        launch = self._launch(here, compute, *settings)
        device = here.next_B.device
        here.next_B.index_copy_(0, past.lines, tokens_B.to(device))
        here.shares_CB[:steps].index_copy_(1, past.lines, shares_CB.to(device))
        here.done.zero_()
        under_way: deque[torch.cuda.Event] = deque()
        for _ in range(steps):
            launch()
            if device.type == "cuda":  # a full queue would keep other threads from launching
                under_way.append(torch.cuda.current_stream().record_event())
                if len(under_way) > AHEAD:
                    under_way.popleft().synchronize()
        self.positions += steps * here.tokens_BT.shape[1]
        made: list[list[int]] = here.made_CB[:steps].index_select(1, past.lines).tolist()
        return made

    def _logits(self, here: _Room) -> Tensor:
        """Return the logits after the last column that was read."""
        hidden_BTD = self.model.hidden(Inputs(here.tokens_BT))
        return self.model.project(hidden_BTD.index_select(1, here.column)[:, 0], "next")

    def _launch(
        self, here: _Room, compute: Callable[[], Tensor], *settings: object
    ) -> Callable[[], Tensor]:
        """Return what computes this over the memory of its shape: on a GPU, recorded once."""
        key = (*here.tokens_BT.shape, *settings)
        if here.tokens_BT.device.type != "cuda":
            return compute
        if key not in self._launches:
            self._launches[key] = self._record(here, compute)
        return self._launches[key]

    def _record(self, here: _Room, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record a launch; what it writes is put back."""
        kept = [(x, x.clone()) for x in (here.tokens_BT, here.column, here.next_B, here.done)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = compute()
        for x, before in kept:
            x.copy_(before)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


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


# B batch (always 1), T length, V vocab


@dataclass(slots=True)
class PrefixPast:
    """The cache and the ids in it; `call` numbers the decoding that it belongs to."""

    cache: GrowingCache
    ids: list[int]
    call: int

    def reorder(self, rows_B: Tensor) -> None:
        if rows_B.tolist() != [0]:
            raise InputError("a prefix cache holds one row", hint="use TorchStepper for several")


class PrefixCacheStepper(Stepper):
    """A stepper for one decoder and one row at a time; `reused` counts positions not read again."""

    def __init__(self, model: Model, *, kv_cache: KVCache = "float") -> None:
        if model.spec.encoder is not None:
            raise InputError("a conversation needs a decoder", hint="use TorchStepper")
        self.model = decodable(model)
        super().__init__(model.spec)
        self.reused = 0
        self._past = PrefixPast(GrowingCache(kv_cache=kv_cache), [], 0)

    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, PrefixPast]:
        """Read the part of the prompt that the cache does not hold; the cache grows as needed."""
        if len(prompts) != 1:
            raise InputError(f"{len(prompts)} prompts at once", hint="one, or use TorchStepper")
        ids = list(prompts.tokens[0])
        held = self._past
        # The last token is always read: its logits are the result.
        shared = 0
        while shared < min(len(held.ids), len(ids) - 1) and held.ids[shared] == ids[shared]:
            shared += 1
        held.cache.cut(shared)
        self._past = PrefixPast(held.cache, ids[:shared], held.call + 1)
        self.reused += shared
        return self._read(ids[shared:], self._past), self._past

    def step(self, tokens_B: Tensor, *, past: PrefixPast) -> Tensor:
        if past.call != self._past.call:
            raise InputError(
                "this past was cut by a later prompt", hint="finish one before another"
            )
        return self._read(tokens_B.tolist(), past)

    @torch.no_grad()
    def _read(self, ids: list[int], past: PrefixPast) -> Tensor:
        tokens_BT = torch.tensor([ids], device=next(self.model.parameters()).device)
        try:
            hidden_BTD = self.model.hidden(Inputs(tokens_BT), cache=past.cache)
        except BaseException:  # some layers may hold the new positions and others not
            past.cache.cut(0)
            past.ids.clear()
            raise
        past.ids += ids
        self.positions += len(ids)
        return self.model.project(hidden_BTD[:, -1], "next")
