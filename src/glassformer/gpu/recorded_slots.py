"""`RecordedSlots`: continuous batching on a GPU, by recorded steps that are launched ahead."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.gpu.derived_products import Maker, gpu_kernels
from glassformer.gpu.derived_step import FastAttention, FastModel, Places
from glassformer.models.decodable import decodable
from glassformer.models.model import Holder, Model
from glassformer.models.stepping import AheadSlots, Span, wanted_rows
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

# R rows (tokens of a step), Q slots, S positions, D d_model, N query heads, K key-value heads,
# G = N / K, H d_head, X = 2 K heads in memory or N + 2 K of one product, V vocab


class RecordedSlots(AheadSlots):
    """The derived step over slots where answers may depend on company: made for a GPU.

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
        self.fast = FastModel(self.model, make=Maker(gpu_kernels(like)))
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
    if not all(block.mixer.causal for block in spec.decoder.blocks()):
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
