"""Many sequences in one step, each in its own slot of one memory, at its own position.

`NativeSlots` does this by the native step, where every token is one row of every product, so that
prompts and continuations share a pass over the weights; `OneByOneSlots` runs any `Stepper`, a
sequence at a time. A row's numbers are the same bits whatever rows are beside it, and in the native
step also however a prompt was cut into spans, and whether its beginning was computed or copied.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from glassformer.costs.estimates import cache_bytes
from glassformer.generation.native.stepper import NativeStepper
from glassformer.models.model import Holder, Model
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import Slots, Span, Stepper, wanted_rows
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec
from glassformer.spec.state import State

# V vocab

# --- the native step --------------------------------------------------------------------------


class NativeSlots(Slots):
    """The native step (`kernels/step.c`) over slots: rows of one past, in pages of 16 positions.

    A row's numbers are its own there by construction: every operation of the C file goes over one
    row at a time, in one order. Slots that begin alike share pages; who writes into a shared page
    gets a copy first, so all of them together never hold more pages than `memory_bytes` counts.
    """

    cuts_prompts = True
    invariant = True

    def __init__(
        self,
        model: Model | Holder,
        *,
        slots: int,
        spare: int = 0,
        context: int | None = None,
        kv_cache: KVCache = "float",
    ) -> None:
        self.spare = spare
        self.stepper = NativeStepper(model, kv_cache=kv_cache)
        spec = self.stepper.model.spec
        super().__init__(spec, slots=slots, context=context or spec.max_seq_len)
        if spec.encoder is not None:
            raise InputError("slots need a decoder", hint="use OneByOneSlots")
        self.past = self.stepper.empty(slots + spare, room=self.max_seq_len)

    def read(self, spans: Sequence[Span]) -> Tensor:
        rows, tokens = self._taken_back(spans), [span.tokens for span in spans]
        logits: Tensor
        if all(len(new) == 1 for new in tokens):  # the sequences go on, and no prompt is read
            logits = self.stepper.step([new for (new,) in tokens], past=self.past, rows=rows)
        else:
            chosen = np.asarray(wanted_rows(spans))
            logits = self.stepper.read(tokens, past=self.past, rows=rows, chosen=chosen)
        return logits

    def run_greedy(
        self,
        spans: Sequence[Span],
        *,
        count: int,
        ends: Sequence[int],
        closed: Sequence[int],
        seconds: float,
    ) -> list[list[int]]:
        rows = self._taken_back(spans)
        return self.stepper.run_greedy(
            [span.tokens[0] for span in spans],
            past=self.past,
            count=count,
            ends=ends,
            closed=closed,
            logprobs=False,
            seconds=seconds,
            rows=rows,
        )[0]

    def _taken_back(self, spans: Sequence[Span]) -> list[int]:
        """Take the slots of the spans back to where these begin; return the slots."""
        lengths = self.past.lengths
        for span in spans:
            lengths[span.slot] = span.start
        self.past.rewind(lengths)
        return [span.slot for span in spans]

    def copy(self, source: int, target: int, *, length: int) -> None:
        self.past.own.share(source, target, length=length)

    @property
    def memory_bytes(self) -> int:
        return self.stepper.memory_bytes


# --- any other model ------------------------------------------------------------------------------


class OneByOneSlots(Slots):
    """Slots over any `Stepper` whose decodings are independent: each sequence is a batch of one.

    Whatever the stepper does, a sequence never shares a batch, so its company changes nothing.
    `source` is the prompt's part that an encoder reads; see `begin`.
    """

    cuts_prompts = False
    invariant = True

    def __init__(
        self,
        stepper: Stepper,
        spec: ModelSpec,
        *,
        slots: int,
        context: int,
        kv_cache: KVCache = "float",
    ) -> None:
        super().__init__(spec, slots=slots, context=context)
        self.stepper = stepper
        self.pasts: list[State | None] = [None] * slots
        self.sources: list[tuple[int, ...] | None] = [None] * slots
        self._bytes = cache_bytes(spec, batch=slots, length=context, itemsize=4, kv_cache=kv_cache)

    def begin(self, slot: int, source: tuple[int, ...] | None) -> None:
        """Set what the encoder reads for the next sequence of a slot."""
        self.sources[slot] = source
        self.pasts[slot] = None

    def read(self, spans: Sequence[Span]) -> Tensor:
        return torch.cat([self._read(span) for span in spans])

    def _read(self, span: Span) -> Tensor:
        if span.rows > 1:  # a stepper gives logits after the last token of a prompt
            each = enumerate(span.tokens, start=span.start)
            return torch.cat([self._read(Span(span.slot, n, (t,))).clone() for n, t in each])
        if span.start == 0:
            source = self.sources[span.slot]
            prompts = Prompts((span.tokens,), None if source is None else (source,))
            room = self.max_seq_len - len(span.tokens)
            logits_1V, self.pasts[span.slot] = self.stepper.start(prompts, room=room)
            return logits_1V
        assert len(span.tokens) == 1, "a slot is begun or continued by one token"
        return self.stepper.step(torch.tensor(span.tokens), past=self.pasts[span.slot])

    def copy(self, source: int, target: int, *, length: int) -> None:
        raise AssertionError("prompts are not cut, so nothing is copied")

    @property
    def memory_bytes(self) -> int:
        return self._bytes
