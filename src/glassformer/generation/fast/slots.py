"""Many sequences in one step, each in its own slot of one memory, at its own position.

A step reads spans: some new tokens of some slots, one for a sequence that is being continued, many
for a prompt. Every token is one row of every product, so prompts and continuations share a pass
over the weights. `NativeSlots` does this by the native step, `SlotStepper` with the parts of the
fast step for models that the C file cannot run, and on a GPU; `OneByOneSlots` runs any `Stepper`, a
sequence at a time, for models that are no decoders of ours.

On the CPU a row's numbers are the same bits whatever rows are beside it, however a prompt was cut
into spans, and whether its beginning was computed or copied: products are our C routines, which sum
each row in one order; attention runs row by row; norms and activations work within a row. Parts of
which this is not known run one row at a time. On a GPU the products are the library's, which choose
their order by the number of rows: there `invariant` runs one row at a time too.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.generation.fast.block import FastAttention, FastModel, Places
from glassformer.generation.fast.native import NativeStepper
from glassformer.generation.fast.projection import FastFeedForward, Maker, Projection
from glassformer.generation.prompts import Prompts
from glassformer.generation.stepper import Past, Stepper, check_decodes, decodable
from glassformer.kernels.matmul import CLASSES, Product, Routine, why_not_c
from glassformer.kernels.threads import torch_on_one_thread
from glassformer.models.model import Holder, Model
from glassformer.nn.embedding import TokenEmbedding
from glassformer.nn.ffn import activate
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

# R rows (tokens of a step), Q slots, S positions, D d_model, N query heads, K key-value heads,
# G = N / K, H d_head, X = 2 K heads in memory or N + 2 K of one product, O outputs, V vocab

#: Torch treats this many numbers alike in one go; the rest of a line takes another route.
VECTOR = 64


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one slot, at positions `start`, `start + 1`, …; what is before is kept."""

    slot: int
    start: int
    tokens: tuple[int, ...]


class Slots(ABC):
    """The memory of some sequences and the step over them, as continuous batching uses it.

    `cuts_prompts` says whether a prompt may be read in several spans, and a slot be continued from
    any position; without it a span begins a slot or adds one token.
    """

    cuts_prompts: bool
    invariant: bool

    def __init__(self, spec: ModelSpec, *, slots: int, context: int) -> None:
        check_decodes(spec)
        if not 1 < context <= spec.max_seq_len:
            raise InputError(
                f"a context of {context} tokens for a model of {spec.max_seq_len}",
                hint=f"2 to {spec.max_seq_len}",
            )
        if slots < 1:
            raise InputError(f"{slots} slots", hint="at least 1")
        self.slots, self.max_seq_len = slots, context
        self.vocab_size = spec.vocab_size
        self.source_vocab = None if spec.encoder is None else spec.source_vocab

    @abstractmethod
    def read(self, spans: Sequence[Span]) -> Tensor:
        """Read one span of each of some slots: next-token logits (spans, V) after each."""

    @abstractmethod
    def copy(self, source: int, target: int, *, length: int) -> None:
        """Copy the first positions of one slot to another."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """The most bytes that keys and values take."""


class SlotStepper(Slots):
    """The fast step over slots, for a decoder of ours."""

    cuts_prompts = True

    def __init__(
        self,
        model: Model | Holder,
        *,
        slots: int,
        context: int | None = None,
        invariant: bool | None = None,
    ) -> None:
        self.model = decodable(model)
        spec = self.model.spec
        super().__init__(spec, slots=slots, context=context or spec.max_seq_len)
        if spec.encoder is not None:
            raise InputError("slots need a decoder", hint="use OneByOneSlots")
        if not all(block.attention.causal for block in spec.decoder.blocks()):
            raise InputError("attention that is not causal cannot be continued")
        like = next(self.model.parameters())
        self.device = like.device
        self.invariant = like.device.type == "cpu" if invariant is None else invariant
        self.one_by_one = self.invariant and like.device.type != "cpu"
        self.fast = _RowModel(self.model, invariant=self.invariant)
        self.kvs = [
            like.new_zeros(
                slots,
                2 * block.attention.kv_heads,
                self.max_seq_len,
                block.attention.head_width(spec.d_model),
            )
            for block in spec.decoder.blocks()
        ]

    @torch.inference_mode()
    def read(self, spans: Sequence[Span]) -> Tensor:
        if self.one_by_one:
            return torch.cat([self._one_by_one(span) for span in spans])
        with torch_on_one_thread():
            return self._step(spans)

    def _one_by_one(self, span: Span) -> Tensor:
        for place, token in enumerate(span.tokens):
            logits_1V = self._step([Span(span.slot, span.start + place, (token,))])
        return logits_1V

    def _step(self, spans: Sequence[Span]) -> Tensor:
        places = _RowPlaces(spans, self.device)
        tokens = [token for span in spans for token in span.tokens]
        return self.fast.step(
            torch.tensor(tokens, device=self.device),
            self.kvs,
            places,
            positions_B=places.positions_R,
            mask_B11S=None,
            crosses=[],
            cross_mask_B11S=None,
        )

    @torch.inference_mode()
    def copy(self, source: int, target: int, *, length: int) -> None:
        for kv_QXSH in self.kvs:
            kv_QXSH[target, :, :length] = kv_QXSH[source, :, :length]

    @property
    def memory_bytes(self) -> int:
        return sum(kv_QXSH.nbytes for kv_QXSH in self.kvs)


class _RowPlaces(Places):
    """The slot and the position of each row of one step."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.spans = spans
        slots: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        for span in spans:
            slots += [span.slot] * len(span.tokens)
            positions += range(span.start, span.start + len(span.tokens))
            ends.append(len(slots) - 1)
        self.places = list(zip(slots, positions, strict=True))
        self.slots_R = torch.tensor(slots, device=device)
        self.positions_R = torch.tensor(positions, device=device)
        self.ends = torch.tensor(ends, device=device)

    def last(self, x_BD: Tensor) -> Tensor:
        return x_BD if len(self.ends) == len(x_BD) else x_BD[self.ends]

    def attend(self, own: FastAttention, qkv_BXH: Tensor, kv_BXSH: Tensor) -> Tensor:
        (R, _, H), N, K = qkv_BXH.shape, own.n_heads, own.n_kv_heads
        kv_BXSH[self.slots_R, :, self.positions_R] = qkv_BXH[:, N:]
        q_RKGH = qkv_BXH[:, :N].reshape(R, K, N // K, H)
        out_RKGH = torch.empty_like(q_RKGH)
        for row, (slot, position) in enumerate(self.places):
            begin = 0 if own.window is None else max(0, position + 1 - own.window)
            past_XSH = kv_BXSH[slot, :, begin : position + 1]
            bias = None
            if own.slopes_N is not None:
                bias = own.bias(begin, position + 1, past_XSH.shape[1], past_XSH.dtype)
            out_RKGH[row] = F.scaled_dot_product_attention(
                q_RKGH[row, None], past_XSH[None, :K], past_XSH[None, K:], attn_mask=bias
            )[0]
        return out_RKGH.view(R, N * H)


class _RowModel(FastModel):
    """The fast step whose rows do not depend on each other, where that is asked for."""

    def __init__(self, model: Model, *, invariant: bool) -> None:
        on_cpu = next(model.parameters()).device.type == "cpu"
        self.by_row = invariant and on_cpu
        product = _row_product if self.by_row else _library_product
        super().__init__(model, make=Maker(product))
        if not self.by_row:
            return
        for block in self.blocks:
            _make_safe(block.attention.qkv)
            _make_safe(block.attention.out)
            if isinstance(block.feed, FastFeedForward):
                _make_safe(block.feed.up)
                _make_safe(block.feed.down)
                if block.feed.activation:
                    block.feed = _OneRowActivation(block.feed)  # type: ignore[assignment]
            else:
                block.feed = _OneRowFeed(block.feed)  # type: ignore[assignment]
        if isinstance(self.head, Projection):
            _make_safe(self.head)

    def _embedded(self, tokens_B: Tensor, at: "int | Tensor") -> Tensor:
        if not self.by_row or type(self.embed) is TokenEmbedding:
            return super()._embedded(tokens_B, at)
        assert isinstance(at, Tensor)
        rows = zip(tokens_B.split(1), at.split(1), strict=True)
        return torch.cat([super(_RowModel, self)._embedded(*row) for row in rows])


def _library_product(weight_OI: Tensor, bias_O: Tensor | None) -> Product:
    everywhere: list[Routine] = ["linear"] * len(CLASSES)
    return Product(weight_OI, bias_O, routines=everywhere)


def _row_product(weight_OI: Tensor, bias_O: Tensor | None) -> Product:
    """Return a product by the C routine for any number of rows; by torch, row by row, without."""
    if why_not_c(weight_OI):
        return _library_product(weight_OI, bias_O)
    everywhere: list[Routine] = ["c"] * len(CLASSES)
    product = Product(weight_OI, bias_O, routines=everywhere)
    product.by_rows[-1] = product.by_rows[1]
    return product


def _make_safe(projection: Projection) -> None:
    """Call a projection's product one row at a time unless its rows are known not to mix."""
    product: Any = projection.product
    if isinstance(product, Product):
        independent = not why_not_c(product.weight_OI)
    else:
        independent = getattr(product, "rows_apart", False)
    if not independent:
        projection.product = _OneRow(product)  # type: ignore[assignment]


class _OneRow:
    """A product that is called for one row at a time."""

    def __init__(self, product: Any) -> None:
        self.product = product

    def __call__(self, x_BI: Tensor) -> Tensor:
        return torch.cat([self.product(x_1I) for x_1I in x_BI.split(1)])

    def onto(self, residual_BO: Tensor, x_BI: Tensor) -> Tensor:
        rows = zip(residual_BO.split(1), x_BI.split(1), strict=True)
        return torch.cat([self.product.onto(*row) for row in rows])


class _OneRowFeed:
    """A feed-forward that is called for one row at a time: a mixture of experts."""

    def __init__(self, feed: Any) -> None:
        self.feed = feed

    def onto(self, residual_BD: Tensor) -> Tensor:
        return torch.cat([self.feed.onto(x_1D) for x_1D in residual_BD.split(1)])


class _OneRowActivation:
    """A feed-forward whose activation is called for one row at a time where that matters.

    Rows of a width that torch's vectors do not divide are one long line to it, of which the last
    numbers take another route: which row they belong to depends on the number of rows.
    """

    def __init__(self, feed: FastFeedForward) -> None:
        self.feed = feed

    def onto(self, residual_BD: Tensor) -> Tensor:
        wide_BF = self.feed.up(residual_BD)
        parts = (wide_BF,) if wide_BF.shape[1] % VECTOR == 0 else wide_BF.split(1)
        hidden_BF = torch.cat([activate(part, self.feed.activation) for part in parts])
        return self.feed.down.onto(residual_BD, hidden_BF)


# --- the native step --------------------------------------------------------------------------


class NativeSlots(Slots):
    """The native step (`kernels/step.c`) over slots: rows of one past, in pages of 16 positions.

    A row's numbers are its own there by construction: every operation of the C file goes over one
    row at a time, in one order. Slots that begin alike share pages; who writes into a shared page
    gets a copy first, so all of them together never hold more pages than `memory_bytes` counts.
    """

    cuts_prompts = True
    invariant = True

    def __init__(self, model: Model | Holder, *, slots: int, context: int | None = None) -> None:
        self.stepper = NativeStepper(model)
        spec = self.stepper.model.spec
        super().__init__(spec, slots=slots, context=context or spec.max_seq_len)
        if spec.encoder is not None:
            raise InputError("slots need a decoder", hint="use OneByOneSlots")
        self.past = self.stepper.empty_past(slots, room=self.max_seq_len)

    def read(self, spans: Sequence[Span]) -> Tensor:
        rows = [span.slot for span in spans]
        starts = [span.start for span in spans]
        tokens = [span.tokens for span in spans]
        return self.stepper.read_some(tokens, rows=rows, starts=starts, past=self.past)

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

    def __init__(self, stepper: Stepper, spec: ModelSpec, *, slots: int, context: int) -> None:
        super().__init__(spec, slots=slots, context=context)
        self.stepper = stepper
        self.pasts: list[Past | None] = [None] * slots
        self.sources: list[tuple[int, ...] | None] = [None] * slots
        self._position = [0] * slots
        self._bytes = 0
        for block in spec.decoder.blocks():
            width = block.attention.kv_heads * block.attention.head_width(spec.d_model)
            self._bytes += 2 * 4 * slots * context * width

    def begin(self, slot: int, source: tuple[int, ...] | None) -> None:
        """Set what the encoder reads for the next sequence of a slot."""
        self.sources[slot] = source
        self.pasts[slot] = None

    def read(self, spans: Sequence[Span]) -> Tensor:
        return torch.cat([self._read(span) for span in spans])

    def _read(self, span: Span) -> Tensor:
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
