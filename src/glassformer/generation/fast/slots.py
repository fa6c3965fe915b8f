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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.costs.estimates import cache_bytes
from glassformer.generation.fast.block import FastAttention, FastModel, Places
from glassformer.generation.fast.native_stepper import NativeStepper
from glassformer.generation.fast.projection import (
    FastFeedForward,
    Maker,
    Projection,
    gpu_kernels,
)
from glassformer.generation.prompts import Prompts
from glassformer.generation.stepper import decodable
from glassformer.generation.stepping import Past, Stepper, check_decodes
from glassformer.kernels.matmul import CLASSES, Product, Routine, plain_rows, why_not_c
from glassformer.kernels.threads import torch_on_one_thread
from glassformer.models.model import Holder, Model
from glassformer.nn.embedding import TokenEmbedding
from glassformer.nn.ffn import activate
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

# R rows (tokens of a step), Q slots, S positions, D d_model, N query heads, K key-value heads,
# G = N / K, H d_head, X = 2 K heads in memory or N + 2 K of one product, O outputs, V vocab

#: Torch treats this many numbers alike in one go; the rest of a line takes another route.
VECTOR = 64


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one slot, at positions `start`, `start + 1`, …; what is before is kept.

    Logits are wanted after the last of them; of a `scored` span, after each.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    scored: bool = False

    @property
    def rows(self) -> int:
        """The number of rows of logits that are wanted of it."""
        return len(self.tokens) if self.scored else 1


def wanted_rows(spans: Sequence[Span]) -> list[int]:
    """Return the tokens, counted through all spans, after which logits are wanted."""
    rows: list[int] = []
    end = 0
    for span in spans:
        end += len(span.tokens)
        rows += range(end - span.rows, end)
    return rows


class Slots(ABC):
    """The memory of some sequences and the step over them, as continuous batching uses it.

    `cuts_prompts` says whether a prompt may be read in several spans, and a slot be continued from
    any position; without it a span begins a slot or adds one token.
    """

    cuts_prompts: bool
    invariant: bool
    #: Positions that two prompts must share before copying them is less work than reading them.
    worth_copying = 1

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
        """Read one span of each of some slots: next-token logits (R, V), the spans' rows in order.

        They are valid until the next step.
        """

    def run_greedy(
        self,
        spans: Sequence[Span],
        *,
        count: int,
        ends: Sequence[int],
        closed: Sequence[int],
        seconds: float,
    ) -> list[list[int]]:
        """Read one token of each of some slots, then the likeliest after it, and so on.

        Return the tokens chosen in each step, as `Stepper.run_greedy` does; none: not offered.
        """
        return []

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
        _check_continues(spec)
        like = next(self.model.parameters())
        self.device = like.device
        self.invariant = like.device.type == "cpu" if invariant is None else invariant
        self.one_by_one = self.invariant and like.device.type != "cpu"
        self.fast = _RowModel(self.model, invariant=self.invariant)
        self.kvs = _memory(self.model, slots, self.max_seq_len)

    @torch.inference_mode()
    def read(self, spans: Sequence[Span]) -> Tensor:
        if self.one_by_one:
            return torch.cat([self._one_by_one(span) for span in spans])
        with torch_on_one_thread():
            return self._step(spans)

    def _one_by_one(self, span: Span) -> Tensor:
        found = [
            self._step([Span(span.slot, span.start + place, (token,))])
            for place, token in enumerate(span.tokens)
        ]
        return torch.cat(found[-span.rows :])

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
        _copy(self.kvs, source, target, length=length)

    @property
    def memory_bytes(self) -> int:
        return sum(kv_QXSH.nbytes for kv_QXSH in self.kvs)


class _RowPlaces(Places):
    """The slot and the position of each row of one step."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.spans = spans
        slots: list[int] = []
        positions: list[int] = []
        for span in spans:
            slots += [span.slot] * len(span.tokens)
            positions += range(span.start, span.start + len(span.tokens))
        self.places = list(zip(slots, positions, strict=True))
        self.slots_R = torch.tensor(slots, device=device)
        self.positions_R = torch.tensor(positions, device=device)
        self.ends = torch.tensor(wanted_rows(spans), device=device)

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
        return plain_rows(self.feed.down.onto(residual_BD, hidden_BF))


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
        context: int | None = None,
        kv_cache: KVCache = "float",
    ) -> None:
        self.stepper = NativeStepper(model, kv_cache=kv_cache)
        spec = self.stepper.model.spec
        super().__init__(spec, slots=slots, context=context or spec.max_seq_len)
        if spec.encoder is not None:
            raise InputError("slots need a decoder", hint="use OneByOneSlots")
        self.past = self.stepper.empty_past(slots, room=self.max_seq_len)

    def read(self, spans: Sequence[Span]) -> Tensor:
        rows = [span.slot for span in spans]
        starts = [span.start for span in spans]
        tokens = [span.tokens for span in spans]
        logits: Tensor = self.stepper.read_some(
            tokens, rows=rows, starts=starts, past=self.past, chosen=wanted_rows(spans)
        )
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
        return self.stepper.run_some_greedy(
            [span.tokens[0] for span in spans],
            rows=[span.slot for span in spans],
            starts=[span.start for span in spans],
            past=self.past,
            count=count,
            ends=ends,
            closed=closed,
            seconds=seconds,
        )

    def copy(self, source: int, target: int, *, length: int) -> None:
        self.past.own.share(source, target, length=length)

    @property
    def memory_bytes(self) -> int:
        return self.stepper.memory_bytes


# --- a GPU ----------------------------------------------------------------------------------------


class RecordedSlots(Slots):
    """The fast step over slots where answers may depend on company: made for a GPU.

    The sequences that go on are one recorded launch (a CUDA graph for each of a few batch sizes).
    The last token of each slot stays on the device, in `last_Q`: the next step can be launched
    before the tokens of this one have been seen (`Batcher` does). Prompts are read together, their
    attention padded. There is one slot more than offered: a batch's spare rows write there.
    On a CPU nothing is recorded, and the same operations run one by one.
    """

    cuts_prompts = True
    invariant = False
    worth_copying = 64

    def __init__(self, model: Model | Holder, *, slots: int, context: int | None = None) -> None:
        self.model = decodable(model)
        spec = self.model.spec
        super().__init__(spec, slots=slots, context=context or spec.max_seq_len)
        _check_continues(spec)
        like = next(self.model.parameters())
        self.device = like.device
        self.fast = FastModel(
            self.model, make=Maker(_library_product, gpu_kernels(like), static=True)
        )
        self.kvs = _memory(self.model, slots + 1, self.max_seq_len)
        self.last_Q = torch.zeros(slots + 1, dtype=torch.long, device=self.device)
        self._sizes = sorted({*(s for s in SIZES if s < slots), slots})
        self._steps = self._recorded()

    @torch.inference_mode()
    def _recorded(self) -> dict[int, "_RecordedStep"]:
        """Return the step of each batch size, the largest first, since they share memory."""
        pool = None
        steps = {}
        for size in reversed(self._sizes):
            places_2B = torch.ones(2, size, dtype=torch.long, device=self.device)
            places_2B[0] = self.slots
            steps[size] = _RecordedStep(self._step, places_2B, pool)
            if steps[size].graph is not None:
                pool = steps[size].graph.pool()  # type: ignore[union-attr]
        return steps

    def _step(self, places_2B: Tensor) -> Tensor:
        slots_B, ends_B = places_2B
        rows = _SlotRows(slots_B, ends_B, turns=self.fast.all_attend_by_kernels)
        return self._through(self.last_Q[slots_B], rows, rows.positions_B)

    def _through(self, tokens_B: Tensor, places: Places, positions_B: Tensor) -> Tensor:
        return self.fast.step(
            tokens_B,
            self.kvs,
            places,
            positions_B=positions_B,
            mask_B11S=None,
            crosses=[],
            cross_mask_B11S=None,
        )

    def there(self, values: Any) -> Tensor:
        """Return numbers on the device, without waiting for what it is doing."""
        here = torch.as_tensor(values)
        if self.device.type != "cuda":
            return here.to(self.device)
        return here.pin_memory().to(self.device, non_blocking=True)

    @torch.inference_mode()
    def advance(self, slots: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Read each slot's last token as position end - 1: logits (rows, V), soon overwritten."""
        count = len(slots)
        size = next(size for size in self._sizes if size >= count)
        spare = size - count
        places = [[*slots, *[self.slots] * spare], [*ends, *[1] * spare]]
        return self._steps[size].run(self.there(places))[:count]

    @torch.inference_mode()
    def keep(self, slots: Sequence[int], tokens_R: Tensor) -> None:
        """Set the last token of some slots; an id below 0, which is no token, becomes 0."""
        self.last_Q[self.there(slots)] = tokens_R.clamp(min=0)

    @torch.inference_mode()
    def read(self, spans: Sequence[Span]) -> Tensor:
        ones = [span for span in spans if len(span.tokens) == 1]
        many = [span for span in spans if len(span.tokens) > 1]
        read = []
        if many:
            rows = _SpanRows(many, self.there, self.device)
            tokens_R = self.there([token for span in many for token in span.tokens])
            read.append(self._through(tokens_R, rows, rows.positions_R))
        for first in range(0, len(ones), self.slots):
            some = ones[first : first + self.slots]
            slots = [span.slot for span in some]
            self.keep(slots, self.there([span.tokens[0] for span in some]))
            read.append(self.advance(slots, [span.start + 1 for span in some]).clone())
        logits_RV = torch.cat(read)
        if not (many and ones):
            return logits_RV
        order = sorted(range(len(spans)), key=lambda n: len(spans[n].tokens) == 1)
        owner = [n for n in order for _ in range(spans[n].rows)]  # the span of each row
        back = sorted(range(len(owner)), key=owner.__getitem__)
        return logits_RV[self.there(back)]

    @torch.inference_mode()
    def copy(self, source: int, target: int, *, length: int) -> None:
        _copy(self.kvs, source, target, length=length)

    @property
    def memory_bytes(self) -> int:
        return sum(kv_QXSH.nbytes for kv_QXSH in self.kvs)


#: Batch sizes for which a step is recorded, up to the number of slots.
SIZES = (1, 2, 4, 8, 16, *range(32, 4_096, 32))


class _RecordedStep:
    """A step of one batch size over fixed memory; recorded on a GPU, called elsewhere."""

    def __init__(self, step: Callable[[Tensor], Tensor], places_2B: Tensor, pool: Any) -> None:
        self.step, self.places_2B = step, places_2B
        self.graph: torch.cuda.CUDAGraph | None = None
        if not places_2B.is_cuda:
            return
        # Kernels are compiled and libraries set up on another stream before anything is recorded.
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            step(places_2B)
        torch.cuda.current_stream().wait_stream(warm_up)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.logits_BV = step(places_2B)

    def run(self, places_2B: Tensor) -> Tensor:
        """Return logits, in memory that the next step of any size overwrites."""
        self.places_2B.copy_(places_2B)
        if self.graph is None:
            return self.step(self.places_2B)
        self.graph.replay()
        return self.logits_BV


class _SlotRows(Places):
    """One new token for each of some slots; everything has one shape, whatever the lengths are."""

    def __init__(self, slots_B: Tensor, ends_B: Tensor, *, turns: bool) -> None:
        self.slots_B, self.ends_B, self.positions_B = slots_B, ends_B, ends_B - 1
        self.turns = turns

    def last(self, x_BD: Tensor) -> Tensor:
        return x_BD

    def attend(self, own: FastAttention, qkv_BXH: Tensor, kv_BXSH: Tensor) -> Tensor:
        (B, _, H), N, K = qkv_BXH.shape, own.n_heads, own.n_kv_heads
        if self.turns:
            assert own.gpu is not None
            heads: Tensor = own.gpu.attend(
                qkv_BXH,
                kv_BXSH,
                self.ends_B,
                n_heads=N,
                places_B=self.positions_B,
                rotation=own.table,
                gains=own.gains,
                eps=0.0 if own.norms is None else own.norms.eps,
                window=own.window,
                mask_BS=None,
                slopes_N=own.slopes_N,
                slots_B=self.slots_B,
                in_parts=own.out.gpu is not None,
            )
            return heads
        kv_BXSH[self.slots_B, :, self.positions_B] = qkv_BXH[:, N:]
        past_BXSH = kv_BXSH[self.slots_B]
        mask_BGTS = _seen(own, self.positions_B[:, None], past_BXSH.shape[2], past_BXSH.dtype)
        q_BKGH = qkv_BXH[:, :N].reshape(B, K, N // K, H)
        heads_BKGH = F.scaled_dot_product_attention(
            q_BKGH, past_BXSH[:, :K], past_BXSH[:, K:], attn_mask=mask_BGTS
        )
        return heads_BKGH.reshape(B, N * H)


class _SpanRows(Places):
    """The rows of some spans; attention pads spans of about one length to one batch."""

    def __init__(
        self, spans: Sequence[Span], there: Callable[[Any], Tensor], device: torch.device
    ) -> None:
        slots: list[int] = []
        positions: list[int] = []
        groups: dict[int, list[tuple[int, Span]]] = {}
        for span in spans:
            first = len(slots)
            slots += [span.slot] * len(span.tokens)
            positions += range(span.start, span.start + len(span.tokens))
            end = span.start + len(span.tokens)
            groups.setdefault(end.bit_length(), []).append((first, span))
        self.slots_R, self.positions_R = there([slots, positions])
        self.ends_R = there(wanted_rows(spans))
        self.groups = [_Padded(group, there) for group in groups.values()]

    def last(self, x_BD: Tensor) -> Tensor:
        return x_BD[self.ends_R]

    def attend(self, own: FastAttention, qkv_BXH: Tensor, kv_BXSH: Tensor) -> Tensor:
        (R, _, H), N, K = qkv_BXH.shape, own.n_heads, own.n_kv_heads
        kv_BXSH[self.slots_R, :, self.positions_R] = qkv_BXH[:, N:]
        q_RKGH = qkv_BXH[:, :N].reshape(R, K, N // K, H)
        out_RKGH = torch.empty_like(q_RKGH)
        for group in self.groups:
            B, T = group.rows_BT.shape
            past_BXSH = kv_BXSH[group.slots_B, :, : group.columns]
            mask_BKQS = _seen(own, group.positions_BT, group.columns, past_BXSH.dtype)
            q_BKQH = q_RKGH[group.rows_BT].permute(0, 2, 3, 1, 4).reshape(B, K, -1, H)
            heads_BKQH = F.scaled_dot_product_attention(
                q_BKQH, past_BXSH[:, :K], past_BXSH[:, K:], attn_mask=mask_BKQS
            )
            heads_BTKGH = heads_BKQH.view(B, K, N // K, T, H).permute(0, 3, 1, 2, 4)
            out_RKGH[group.rows_BT] = heads_BTKGH  # a repeated row gets the same numbers again
        return out_RKGH.view(R, N * H)


class _Padded:
    """Spans as one batch: a shorter one repeats its last row."""

    def __init__(self, group: Sequence[tuple[int, Span]], there: Callable[[Any], Tensor]) -> None:
        longest = max(len(span.tokens) for _, span in group)
        self.columns = max(span.start + len(span.tokens) for _, span in group)
        offsets = [[min(n, len(span.tokens) - 1) for n in range(longest)] for _, span in group]
        rows = [[f + n for n in line] for (f, _), line in zip(group, offsets, strict=True)]
        places = [[s.start + n for n in line] for (_, s), line in zip(group, offsets, strict=True)]
        self.rows_BT, self.positions_BT = there([rows, places])
        self.slots_B = there([span.slot for _, span in group])


def _seen(own: FastAttention, positions_BT: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores (B, 1 or K, G T, S) of queries at these positions."""
    B, T = positions_BT.shape
    column_S = torch.arange(columns, device=positions_BT.device)
    distance_BTS = positions_BT[..., None] - column_S
    hidden_BTS = distance_BTS < 0
    if own.window is not None:
        hidden_BTS = hidden_BTS | (distance_BTS >= own.window)
    K, G = own.n_kv_heads, own.n_heads // own.n_kv_heads
    if own.slopes_N is None:
        mask_BTS = torch.zeros_like(distance_BTS, dtype=dtype).masked_fill(hidden_BTS, -torch.inf)
        return mask_BTS[:, None, None].expand(B, 1, G, T, columns).reshape(B, 1, G * T, columns)
    slopes_KG11 = own.slopes_N.view(K, G, 1, 1)
    bias_BKGTS = -slopes_KG11 * distance_BTS[:, None, None].to(slopes_KG11.dtype)
    bias_BKGTS = bias_BKGTS.masked_fill(hidden_BTS[:, None, None], -torch.inf)
    return bias_BKGTS.to(dtype).reshape(B, K, G * T, columns)


def _check_continues(spec: ModelSpec) -> None:
    if spec.encoder is not None:
        raise InputError("slots need a decoder", hint="use OneByOneSlots")
    if not all(block.attention.causal for block in spec.decoder.blocks()):
        raise InputError("attention that is not causal cannot be continued")


def _memory(model: Model, slots: int, context: int) -> list[Tensor]:
    """Return zeros for keys and values (Q, 2 K, S, H) of each layer."""
    like = next(model.parameters())
    return [
        like.new_zeros(
            slots,
            2 * block.attention.kv_heads,
            context,
            block.attention.head_width(model.spec.d_model),
        )
        for block in model.spec.decoder.blocks()
    ]


def _copy(kvs: Sequence[Tensor], source: int, target: int, *, length: int) -> None:
    for kv_QXSH in kvs:
        kv_QXSH[target, :, :length] = kv_QXSH[source, :, :length]


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
        self.pasts: list[Past | None] = [None] * slots
        self.sources: list[tuple[int, ...] | None] = [None] * slots
        self._position = [0] * slots
        self._bytes = cache_bytes(spec, batch=slots, length=context, itemsize=4, kv_cache=kv_cache)

    def begin(self, slot: int, source: tuple[int, ...] | None) -> None:
        """Set what the encoder reads for the next sequence of a slot."""
        self.sources[slot] = source
        self.pasts[slot] = None

    def read(self, spans: Sequence[Span]) -> Tensor:
        return torch.cat([self._read(span) for span in spans])

    def _read(self, span: Span) -> Tensor:
        if span.rows > 1:  # a stepper gives logits after the last token of what it reads
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
