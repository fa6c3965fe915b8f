"""`FastStepper`: decoding with derived weights, memory and CUDA graphs that are kept between calls.

The prompt goes through the model itself, once, into `KVMemory`, which holds the keys and values of
every layer; each new token then goes through the fast step (`block.FastModel`). The tokens are
those of `TorchStepper`. A recorded step is one launch per token: a graph reads and writes fixed
addresses, so it has its own tokens, counters and masks, and a decoding copies its own into them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.generation.fast.block import FastModel, why_not
from glassformer.generation.fast.projection import Maker, gpu_kernels
from glassformer.generation.prompts import Prompts
from glassformer.generation.stepper import Stepper, decodable, read_prompts
from glassformer.kernels.matmul import CHOICES, CLASSES, Product, Routine
from glassformer.models.inputs import Inputs
from glassformer.models.model import EncoderDecoder, Holder, Model
from glassformer.spec.errors import InputError

# B batch, S positions, V vocab


class StepState(TypedDict):
    """The operands of a step that belong to one decoding, by the names of its arguments."""

    positions_B: Tensor
    mask_B11S: Tensor | None
    crosses: list[tuple[Tensor, Tensor]]
    cross_mask_B11S: Tensor | None


@dataclass(slots=True)
class Recorded:
    """A graph and its operands; `logits_BV` is overwritten by the next replay."""

    graph: torch.cuda.CUDAGraph
    tokens_B: Tensor
    end_1: Tensor
    positions_B: Tensor
    mask_B11S: Tensor | None
    crosses: list[tuple[Tensor, Tensor]]
    cross_mask_B11S: Tensor | None
    logits_BV: Tensor

    def take_up(
        self,
        end: int,
        *,
        positions_B: Tensor,
        mask_B11S: Tensor | None,
        crosses: list[tuple[Tensor, Tensor]],
        cross_mask_B11S: Tensor | None,
    ) -> None:
        """Copy another decoding's state in; `end` is the length after the next token."""
        self.end_1.fill_(end)
        self.positions_B.copy_(positions_B)
        if self.mask_B11S is not None and mask_B11S is not None:
            self.mask_B11S.copy_(mask_B11S)
        if self.cross_mask_B11S is not None and cross_mask_B11S is not None:
            self.cross_mask_B11S.copy_(cross_mask_B11S)
        for own, given in zip(self.crosses, crosses, strict=True):
            own[0].copy_(given[0])
            own[1].copy_(given[1])

    def step(self, tokens_B: Tensor, lines_B: Tensor | None) -> Tensor:
        """Return the logits of the rows that go on; without `lines_B` in the graph's own memory."""
        if lines_B is None:
            self.tokens_B.copy_(tokens_B)
            self.graph.replay()
            return self.logits_BV
        self.tokens_B.index_copy_(0, lines_B, tokens_B)
        self.graph.replay()
        return self.logits_BV.index_select(0, lines_B)


def record(
    step: Callable[..., Tensor],
    kvs: list[Tensor],
    end: int,
    *,
    positions_B: Tensor,
    mask_B11S: Tensor | None,
    crosses: list[tuple[Tensor, Tensor]],
    cross_mask_B11S: Tensor | None,
) -> Recorded:
    """Record `step` over this memory; only column end - 1, the next one, is overwritten."""
    tokens_B = torch.zeros(len(positions_B), dtype=torch.long, device=positions_B.device)
    end_1 = torch.tensor([end], device=positions_B.device)
    own_positions_B = positions_B.clone()
    operands: StepState = {
        "positions_B": own_positions_B,
        "mask_B11S": None if mask_B11S is None else mask_B11S.clone(),
        "crosses": [(k.clone(), v.clone()) for k, v in crosses],
        "cross_mask_B11S": None if cross_mask_B11S is None else cross_mask_B11S.clone(),
    }
    # Kernels are compiled and libraries set up on another stream before anything is recorded.
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(2):
            step(tokens_B, kvs, end_1, **operands)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits_BV = step(tokens_B, kvs, end_1, **operands)
        end_1.add_(1)
        own_positions_B.add_(1)
    return Recorded(graph, tokens_B, end_1, logits_BV=logits_BV, **operands)


# B batch, S positions, T prompt length, K key-value heads, X = 2 K, H d_head


@dataclass(slots=True)
class KVMemory:
    """Keys and values of each layer (B, 2 K, S, H), keys first; the first `batch` rows are used."""

    memory: list[Tensor]
    batch: int
    length: int = 0
    valid_BS: Tensor | None = None
    cross: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def kvs(self) -> list[Tensor]:
        """The rows in use, by layer."""
        return [kv_BXSH[: self.batch] for kv_BXSH in self.memory]

    def extend(self, layer: int, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        kv_BXSH, K = self.memory[layer][: self.batch], k_BKTH.shape[1]
        end = self.length + k_BKTH.shape[2]
        kv_BXSH[:, :K, self.length : end] = k_BKTH
        kv_BXSH[:, K:, self.length : end] = v_BKTH
        return kv_BXSH[:, :K, :end], kv_BXSH[:, K:, :end]

    def advance(self, count: int, valid_BT: Tensor | None) -> None:
        self.length += count
        self.valid_BS = valid_BT

    def reorder(self, rows_B: Tensor) -> None:
        """Move rows within the memory; more rows than it has need new memory."""
        self.batch = len(rows_B)
        if self.batch > len(self.memory[0]):
            self.memory = [kv_BXSH[rows_B] for kv_BXSH in self.memory]
        else:
            for kv_BXSH in self.memory:
                moved_BXSH = kv_BXSH[:, :, : self.length].index_select(0, rows_B)
                kv_BXSH[: self.batch, :, : self.length] = moved_BXSH
        for layer, (k, v) in self.cross.items():
            self.cross[layer] = (k[rows_B], v[rows_B])


@dataclass(slots=True)
class FastPast:
    """The memory, the position of each row, and the masks that padding needs, made once.

    In a recorded step (`record`), a batch that shrinks keeps its size: `lines_B` are the rows that
    go on, until they are half of the batch or fewer.
    """

    slots: KVMemory
    call: int
    device: torch.device
    positions_B: Tensor | None = None
    mask_B11S: Tensor | None = None
    cross_mask_B11S: Tensor | None = None
    crosses: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    record: Recorded | None = None
    lines_B: Tensor | None = None

    @torch.inference_mode()
    def reorder(self, rows_B: Tensor) -> None:
        rows = rows_B.tolist()
        fewer = all(a < b for a, b in pairwise(rows))
        rows_B = rows_B.to(self.device)
        if self.record is not None:
            lines_B = rows_B if self.lines_B is None else self.lines_B[rows_B]
            if fewer and 2 * len(rows) > self.slots.batch:
                self.lines_B = lines_B
                return
            self.positions_B, rows_B = self.record.positions_B, lines_B
            self.record = self.lines_B = None
            if fewer:  # graphs are kept by size: few sizes; spare rows repeat the first one
                spare = (1 << (len(rows) - 1).bit_length()) - len(rows)
                self.lines_B = torch.arange(len(rows), device=self.device) if spare else None
                rows_B = torch.cat((rows_B, rows_B[:1].expand(spare)))
        self.slots.reorder(rows_B)
        self.positions_B = None if self.positions_B is None else self.positions_B[rows_B]
        self.mask_B11S = None if self.mask_B11S is None else self.mask_B11S[rows_B]
        if self.cross_mask_B11S is not None:
            self.cross_mask_B11S = self.cross_mask_B11S[rows_B]
        self.crosses = [self.slots.cross[layer] for layer in range(len(self.crosses))]

    def widen_crosses(self, *, to_multiple_of: int) -> None:
        """Pad the sources with masked columns, so that there are few different lengths."""
        k_BKSH = self.crosses[0][0]
        B, source = len(k_BKSH), k_BKSH.shape[2]
        more = -source % to_multiple_of
        if self.cross_mask_B11S is None:
            self.cross_mask_B11S = k_BKSH.new_zeros(B, 1, 1, source)
        self.cross_mask_B11S = F.pad(self.cross_mask_B11S, (0, more), value=-math.inf)
        for layer, (k, v) in enumerate(self.crosses):
            self.slots.cross[layer] = (F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more)))
        self.crosses = [self.slots.cross[layer] for layer in range(len(self.crosses))]


def added_mask(valid_BS: Tensor, more: int, dtype: torch.dtype) -> Tensor:
    """Return a mask (B, 1, 1, S + more) to add to scores: -inf for padding, 0 for real tokens."""
    mask_BS = torch.zeros(len(valid_BS), valid_BS.shape[1] + more, dtype=dtype)
    mask_BS = mask_BS.to(valid_BS.device)
    mask_BS[:, : valid_BS.shape[1]].masked_fill_(~valid_BS, -math.inf)
    return mask_BS[:, None, None]


# B batch, S positions, T prompt length, K key-value heads, X = 2 K, H d_head, V vocab

MEMORY_STEP, SOURCE_STEP = 128, 32  # lengths are rounded up to these where steps are recorded


class FastStepper(Stepper):
    """A `Stepper` for one model, to be kept and used again.

    `routines` selects the routine of the products: "auto" tries each shape once, with 1, 4 and 8
    rows; a name is used for all. `chosen` lists what was chosen, by (outputs, inputs).
    `compile=True` runs the step through torch.compile, which masks the complete memory so that
    every step has one shape. On a GPU the step runs our kernels, where possible (`gpu_kernels`),
    recorded as one CUDA graph, unless `graph=False`. One decoding at a time: memory is shared.
    """

    def __init__(
        self,
        model: Model | Holder,
        *,
        routines: Literal["auto"] | Routine = "auto",
        compile: bool = False,
        graph: bool = True,
    ) -> None:
        self.model = decodable(model)
        super().__init__(self.model.spec)
        if reason := why_not(self.model.spec):
            raise InputError(
                f"the fast step does not compute {reason}",
                hint="leave out {--lean and --compile|fast and compile}: TorchStepper runs any",
            )
        if compile and routines == "c":
            raise InputError("a compiled step cannot hold our C kernels", hint="routines='auto'")
        self.routines = routines
        self.compile = compile
        self.graph = graph
        self.chosen: dict[tuple[int, ...], tuple[Routine, ...]] = {}
        self._step: Callable[..., Tensor] | None = None
        self._version: tuple[int, ...] = ()
        self._kvs: list[Tensor] = []
        self._records: dict[tuple[object, ...], Recorded] = {}
        self._call = 0

    @torch.inference_mode()
    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, FastPast]:
        inputs = read_prompts(self.model, prompts)
        B, T = inputs.tokens_BT.shape
        self._call += 1
        self._notice_new_weights()
        slots = KVMemory(self._memory(B, T + room), B)
        past = FastPast(slots, self._call, inputs.tokens_BT.device)
        given = Inputs(inputs.tokens_BT, inputs.valid_BT, source_valid_BS=inputs.source_valid_BS)
        if isinstance(self.model, EncoderDecoder):
            memory_BSD = self.model.encode(inputs)
            self.encoder_calls += 1
            hidden_BTD = self.model.decode(given, memory_BSD, cache=slots)
            slots.cross = {
                layer: (k.contiguous(), v.contiguous()) for layer, (k, v) in slots.cross.items()
            }
            past.crosses = [slots.cross[layer] for layer in range(len(slots.cross))]
        else:
            hidden_BTD = self.model.hidden(given, cache=slots)
        self.positions += T
        dtype = hidden_BTD.dtype
        if inputs.valid_BT is not None:
            past.positions_B = inputs.valid_BT.sum(1)
            past.mask_B11S = added_mask(inputs.valid_BT, slots.memory[0].shape[2] - T, dtype)
        elif self._one_shape:
            past.positions_B = torch.full((B,), T, device=past.device)
        if inputs.source_valid_BS is not None:
            past.cross_mask_B11S = added_mask(inputs.source_valid_BS, 0, dtype)
        if self._recording and past.crosses:
            past.widen_crosses(to_multiple_of=SOURCE_STEP)
        return self.model.project(hidden_BTD[:, -1], "next"), past

    @torch.inference_mode()
    def step(self, tokens_B: Tensor, *, past: FastPast) -> Tensor:
        if past.call != self._call:
            raise InputError(
                "this FastStepper has begun another decoding, in the same memory",
                hint="finish one before the next, or make a second FastStepper",
            )
        slots = past.slots
        assert self._step is not None
        if slots.memory is not self._kvs:  # a search needed more rows than there were
            self._kvs = slots.memory
            self._records.clear()
        end = slots.length + 1
        tokens_B = tokens_B.to(past.device)
        slots.length += 1
        self.positions += 1
        if self._recording:
            past.record = past.record or self._taken_up(past, end)
            return past.record.step(tokens_B, past.lines_B)
        logits_BV = self._step(
            tokens_B,
            slots.kvs,
            torch.tensor([end], device=past.device) if self.compile else end,
            positions_B=past.positions_B,
            mask_B11S=past.mask_B11S,
            crosses=past.crosses,
            cross_mask_B11S=past.cross_mask_B11S,
        )
        if past.positions_B is not None:
            past.positions_B += 1
        return logits_BV

    @property
    def memory_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return sum(kv.nbytes for kv in self._kvs)

    @property
    def _recording(self) -> bool:
        return self.graph and next(self.model.parameters()).is_cuda

    @property
    def _one_shape(self) -> bool:
        """True if every step must have the same shapes: compiled, or recorded."""
        return self.compile or self._recording

    def _taken_up(self, past: FastPast, end: int) -> Recorded:
        """Return the graph for a batch of this shape, recorded if needed, with this state."""
        shape = past.crosses[0][0].shape if past.crosses else None
        key = (past.slots.batch, past.mask_B11S is None, shape)
        assert self._step is not None and past.positions_B is not None
        state: StepState = {
            "positions_B": past.positions_B,
            "mask_B11S": past.mask_B11S,
            "crosses": past.crosses,
            "cross_mask_B11S": past.cross_mask_B11S,
        }
        if key not in self._records:
            self._records[key] = record(self._step, past.slots.kvs, end, **state)
        self._records[key].take_up(end, **state)
        return self._records[key]

    def _memory(self, batch: int, length: int) -> list[Tensor]:
        """Return the kept memory, or new where it is too small: (B, 2 K, S, H) for each layer."""
        if self._recording:  # few lengths, so that graphs serve again
            length = -(-length // MEMORY_STEP) * MEMORY_STEP
        if not self._kvs or len(self._kvs[0]) < batch or self._kvs[0].shape[2] < length:
            like = next(self.model.parameters())
            self._records.clear()
            self._kvs = [
                like.new_zeros(
                    batch,
                    2 * block.attention.kv_heads,
                    length,
                    block.attention.head_width(self.model.spec.d_model),
                )
                for block in self.model.spec.decoder.blocks()
            ]
        return self._kvs

    def _notice_new_weights(self) -> None:
        """Derive the weights again if the model was trained, loaded or moved since."""
        now = tuple(x for p in self.model.parameters() for x in (p._version, p.data_ptr()))
        if now != self._version:
            self._kvs = []  # the model may have another dtype or device now
            self._records.clear()
            self._build()
            self._version = now

    def _build(self) -> None:
        """Derive the weights, and make the step that reads them."""
        self.chosen = {}
        like = next(self.model.parameters())
        gpu = None if self.compile else gpu_kernels(like)
        fast = FastModel(self.model, make=Maker(self._product, gpu, self._one_shape))
        self._step = torch.compile(fast.step) if self.compile else fast.step

    def _product(self, weight_OI: Tensor, bias_O: Tensor | None) -> Product:
        shape = tuple(weight_OI.shape)
        if shape not in self.chosen:
            if self.routines == "auto":
                self.chosen[shape] = CHOICES.of(weight_OI, compiled=self.compile)
            else:
                self.chosen[shape] = (self.routines,) * len(CLASSES)
        return Product(weight_OI, bias_O, routines=self.chosen[shape])
