"""`RecordedStepper`: decoding with weights, memory and CUDA graphs that are kept between calls.

The prompt goes through the model itself, once, into `KVMemory`, which holds the keys and values of
every layer; each new token then goes through the derived step (`derived_step.FastModel`). The
tokens are those of `TorchStepper`. On a GPU a step is one launch (`decoding_graph`), which can
choose the next tokens too, the likeliest or those of beams; the past of beams is not moved, but
read by an index.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.gpu.decoding_graph import (
    GREEDY,
    KEPT,
    SLICE,
    STEP,
    Ahead,
    Recorded,
    RecordedPrompt,
    StepState,
)
from glassformer.gpu.derived_products import Maker, gpu_kernels
from glassformer.gpu.derived_step import FastAttention, FastModel, Lines, Places, lacks
from glassformer.models.decodable import decodable, read_prompts
from glassformer.models.inputs import Inputs
from glassformer.models.model import EncoderDecoder, Holder, Model
from glassformer.models.prompts import Prompts
from glassformer.models.stepping import BeamRun, BeamStep, Stepper
from glassformer.spec.errors import InputError
from glassformer.spec.state import State

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

    def widen(self, rows: int) -> None:
        """Make room for more rows; those there are stay where they are."""
        if rows > len(self.memory[0]):
            self.memory = [
                torch.cat((kv_BXSH, kv_BXSH.new_zeros(rows - len(kv_BXSH), *kv_BXSH.shape[1:])))
                for kv_BXSH in self.memory
            ]

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
class RecordedPast(State):
    """The memory, the position of each row, and the masks that padding needs, made once.

    In a recorded step a batch that shrinks keeps its size: `rows` are those that go on, until
    they are half of the batch or fewer. Rows that are reordered or repeated, as beams are, stay
    where they are if `by_index`: `lines` say where each finds its past, the first `count` of them
    are in use. `ahead` are tokens that the GPU has been told to choose, which nobody has read yet.
    """

    slots: KVMemory
    call: int
    device: torch.device
    positions_B: Tensor | None = None
    pads_B: Tensor | None = None
    mask_B11S: Tensor | None = None
    cross_mask_B11S: Tensor | None = None
    crosses: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    by_index: bool = False
    record: Recorded | None = None
    rows: list[int] | None = None
    lines: Lines | None = None
    count: int = 0
    width: int = 0
    ahead: list[Ahead] = field(default_factory=list)
    next_B: Tensor | None = None

    @torch.inference_mode()
    def reorder(self, rows: Sequence[int]) -> None:
        rows = [int(row) for row in rows]
        fewer = all(a < b for a, b in pairwise(rows))
        rows_B = torch.tensor(rows, dtype=torch.long).to(self.device)
        self.count = len(rows)
        if self.lines is not None or (self.by_index and not fewer):
            assert not self.ahead, "tokens are chosen ahead of a batch that only shrinks"
            self._point(rows_B)
            return
        for chosen in self.ahead:
            chosen.keep(rows)
        if self.record is not None:
            kept = rows if self.rows is None else [self.rows[row] for row in rows]
            if fewer and 2 * len(rows) > self.slots.batch:
                self.rows = kept
                return
            rows_B = torch.tensor(kept, device=self.device)
            self.next_B = self.record.tokens_B[rows_B]
            self.record = self.rows = None
            if fewer:  # graphs are kept by size: few sizes; spare rows repeat the first one
                spare = _rounded(len(rows)) - len(rows)
                self.rows = list(range(len(rows))) if spare else None
                rows_B = torch.cat((rows_B, rows_B[:1].expand(spare)))
        self.slots.reorder(rows_B)
        self.positions_B = None if self.positions_B is None else self.positions_B[rows_B]
        self.pads_B = None if self.pads_B is None else self.pads_B[rows_B]
        self.mask_B11S = None if self.mask_B11S is None else self.mask_B11S[rows_B]
        if self.cross_mask_B11S is not None:
            self.cross_mask_B11S = self.cross_mask_B11S[rows_B]
        self.crosses = [self.slots.cross[layer] for layer in range(len(self.crosses))]

    def _point(self, rows_B: Tensor) -> None:
        """Let each row find its past where that of row rows_B[b] lies; nothing is moved."""
        assert self.pads_B is not None
        n, places = len(rows_B), self.slots.memory[0].shape[2]
        if self.lines is None:
            own_B = torch.arange(self.slots.batch, device=self.device)
            if self.rows is not None:
                rows_B = torch.tensor(self.rows, device=self.device)[rows_B]
            self.record = self.rows = None
            self.lines = Lines(own_B, own_B.int()[:, None].repeat(1, places))
            self.slots.batch = n
            self.slots.widen(n)
        elif 2 * n <= self.slots.batch:
            self.record, self.slots.batch = None, _rounded(n)
        spare = self.slots.batch - n
        rows_B = torch.cat((rows_B, rows_B[:1].expand(spare)))
        self.pads_B = self.pads_B[rows_B]
        lines = [one[rows_B] for one in self.lines]
        if self.record is None:
            self.lines = Lines(*lines)
            return
        self.record.state.pads_B.copy_(self.pads_B)
        for own, given in zip(self.lines, lines, strict=True):  # the record's, see `_taken_up`
            own.copy_(given)

    def state(self) -> StepState:
        """Return the operands of a recorded step."""
        assert self.pads_B is not None
        return StepState(
            self.pads_B, self.mask_B11S, self.crosses, self.cross_mask_B11S, self.lines
        )

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


def _rounded(rows: int) -> int:
    """Return the next power of two."""
    return 1 << (rows - 1).bit_length()


def _parameters(module: nn.Module) -> list[Tensor]:
    """Return all parameters, shared ones each time: in a fraction of the time of `parameters`."""
    modules: list[nn.Module | None] = [module]
    found: list[Tensor | None] = []
    for one in modules:  # grows on the way
        if one is not None:
            found += one._parameters.values()
            modules += one._modules.values()
    return [parameter for parameter in found if parameter is not None]


def added_mask(valid_BS: Tensor, more: int, dtype: torch.dtype) -> Tensor:
    """Return a mask (B, 1, 1, S + more) to add to scores: -inf for padding, 0 for real tokens."""
    mask_BS = torch.zeros(len(valid_BS), valid_BS.shape[1] + more, dtype=dtype)
    mask_BS = mask_BS.to(valid_BS.device)
    mask_BS[:, : valid_BS.shape[1]].masked_fill_(~valid_BS, -math.inf)
    return mask_BS[:, None, None]


# B batch, S positions, T prompt length, K key-value heads, X = 2 K, H d_head, V vocab

CHOOSING = "glassformer.gpu.triton_choose"  # needs Triton
#: Prompts of so many tokens are recorded; the last ones are kept, of so many tokens together.
MOST_TOKENS, TOKENS_KEPT = 16_384, 65_536
MEMORY_STEP, SOURCE_STEP = 128, 32  # lengths are rounded up to these where steps are recorded


class _PromptRows(Places):
    """All tokens of prompts of one length, as rows; attention is causal, and starts at 0."""

    turns = True

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length = batch, length

    def attend(self, own: FastAttention, qkv_BXH: Tensor, kv_BXSH: Tensor) -> Tensor:
        N, K = own.n_heads, own.n_kv_heads
        assert own.gpu is not None, "prompts are read so where all layers attend by kernels"
        turned_RYH = own.gpu.turn(
            qkv_BXH,
            kv_BXSH,
            length=self.length,
            n_heads=N,
            rotation=own.table,
            gains=own.gains,
            eps=0.0 if own.norms is None else own.norms.eps,
        )
        turned_BYTH = turned_RYH.view(self.batch, self.length, N + K, own.d_head).transpose(1, 2)
        q_BNTH, k_BKTH = turned_BYTH.split((N, K), 1)
        v_BKTH = kv_BXSH[:, K:, : self.length]
        heads_BNTH = F.scaled_dot_product_attention(
            q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=N != K
        )
        return heads_BNTH.transpose(1, 2).reshape(self.batch * self.length, N * own.d_head)

    def last(self, x_BD: Tensor) -> Tensor:
        return x_BD[self.length - 1 :: self.length].contiguous()


class RecordedStepper(Stepper):
    """A `Stepper` for one model, to be kept and used again.

    Every step has one shape: what of the memory is not read is masked. On a GPU the step runs our
    kernels, where possible (`gpu_kernels`), recorded as one CUDA graph, unless `graph=False`; on a
    CPU the same operations run one by one, to be compared with others. One decoding at a time:
    memory is shared.
    """

    def __init__(self, model: Model | Holder, *, graph: bool = True) -> None:
        self.model = decodable(model)
        super().__init__(self.model.spec)
        if reason := lacks(self.model.spec):
            raise InputError(
                f"the recorded step has no {reason}", hint="TorchStepper runs any model"
            )
        self.graph = graph
        self._step: Callable[..., Tensor] | None = None
        self._version: tuple[int, ...] = ()
        self._kvs: list[Tensor] = []
        self._records: dict[tuple[object, ...], Recorded] = {}
        self._prompts: dict[tuple[int, int], RecordedPrompt | None] = {}
        self._call = 0
        self._gpu: ModuleType | None = None
        self._fast: FastModel | None = None
        self._by_kernels = self._reads_prompts = False

    @torch.inference_mode()
    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, RecordedPast]:
        inputs = read_prompts(self.model, prompts)
        B, T = inputs.tokens_BT.shape
        self._call += 1
        self._notice_new_weights()
        slots = KVMemory(self._memory(B, T + room), B)
        past = RecordedPast(slots, self._call, inputs.tokens_BT.device, count=B)
        given = Inputs(inputs.tokens_BT, inputs.valid_BT, source_valid_BS=inputs.source_valid_BS)
        if isinstance(self.model, EncoderDecoder):
            memory_BSD = self.model.encode(inputs)
            self.encoder_calls += 1
            hidden_BTD = self.model.decode(given, memory_BSD, cache=slots)
            slots.cross = {
                layer: (k.contiguous(), v.contiguous()) for layer, (k, v) in slots.cross.items()
            }
            past.crosses = [slots.cross[layer] for layer in range(len(slots.cross))]
        elif self._reads_prompts and inputs.valid_BT is None:
            return self._read(inputs.tokens_BT, past), past
        else:
            hidden_BTD = self.model.hidden(given, cache=slots)
        self.positions += T
        dtype = hidden_BTD.dtype
        if inputs.valid_BT is not None:
            past.positions_B = inputs.valid_BT.sum(1)
            past.mask_B11S = added_mask(inputs.valid_BT, slots.memory[0].shape[2] - T, dtype)
        else:
            past.positions_B = torch.full((B,), T, device=past.device)
        if self._recording:
            past.pads_B, past.by_index = T - past.positions_B, self._by_kernels
        if inputs.source_valid_BS is not None:
            past.cross_mask_B11S = added_mask(inputs.source_valid_BS, 0, dtype)
        if self._recording and past.crosses:
            past.widen_crosses(to_multiple_of=SOURCE_STEP)
        return self.model.project(hidden_BTD[:, -1], "next"), past

    def _read(self, tokens_BT: Tensor, past: RecordedPast) -> Tensor:
        """Read prompts of one length by the derived step: all tokens are rows of one batch."""
        B, T = tokens_BT.shape
        rows, positions_R = _PromptRows(B, T), torch.arange(T, device=past.device).repeat(B)
        kvs, fast = past.slots.kvs, self._fast
        assert fast is not None

        def read(tokens_R: Tensor) -> Tensor:
            return fast.step(
                tokens_R,
                kvs,
                rows,
                positions_B=positions_R,
                mask_B11S=None,
                crosses=[],
                cross_mask_B11S=None,
            )

        tokens_R = tokens_BT.flatten()
        if B * T > MOST_TOKENS:  # the GPU is busy far longer than the host
            logits_BV = read(tokens_R)
        elif (B, T) not in self._prompts:  # a length that comes once is not worth recording
            self._prompts[B, T] = None
            logits_BV = read(tokens_R)
        else:
            recorded = self._prompts.pop((B, T)) or RecordedPrompt(read, tokens_R)
            self._prompts[B, T] = recorded  # the last of all: the first is given up
            while sum(b * t for b, t in self._prompts) > TOKENS_KEPT:
                self._prompts.pop(next(iter(self._prompts)))
            logits_BV = recorded.read(tokens_R)
        past.slots.advance(T, None)
        past.pads_B, past.by_index = torch.zeros(B, dtype=torch.long, device=past.device), True
        self.positions += T
        return logits_BV

    @torch.inference_mode()
    def step(self, tokens_B: Tensor, *, past: RecordedPast) -> Tensor:
        slots = self._begun(past)
        assert self._step is not None and not past.ahead
        end = slots.length + 1
        tokens_B = tokens_B.to(past.device)
        record = self._taken_up(past, STEP) if self._recording else None
        slots.length += 1
        self.positions += 1
        if record is not None:
            record.set_tokens(tokens_B, past.rows)
            return record.step(past.rows, past.count)
        logits_BV = self._step(
            tokens_B,
            slots.kvs,
            torch.full((1,), end, device=past.device),
            positions_B=past.positions_B,
            mask_B11S=past.mask_B11S,
            crosses=past.crosses,
            cross_mask_B11S=past.cross_mask_B11S,
        )
        assert past.positions_B is not None
        past.positions_B += 1
        return logits_BV

    @torch.inference_mode()
    def run_greedy(
        self,
        tokens_B: Tensor,
        *,
        past: RecordedPast,
        count: int,
        ends: Sequence[int],
        closed: Sequence[int],
        logprobs: bool,
        seconds: float,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Choose the likeliest tokens on the GPU, which goes on while the first ones are read.

        Rows that end do not end the run: what they go on with is not read.
        """
        slots = self._begun(past)
        if self._choosing is None or past.lines is not None:
            return [], []
        fresh = past.record is None or past.record.kind != GREEDY
        record = self._taken_up(past, GREEDY)
        if not past.ahead:
            record.set_tokens(tokens_B, past.rows)
        elif fresh:
            assert past.next_B is not None
            record.set_tokens(past.next_B, past.rows)
        record.close(closed, ())
        while (under_way := sum(one.count for one in past.ahead)) < min(count, 2 * SLICE):
            # The last slices are short: what they choose is looked at while no GPU works.
            some = min(SLICE, -(-(count - under_way) // 2))
            past.ahead.append(record.launch_greedy(some, past.rows))
            slots.length += past.ahead[-1].count
            self.positions += past.ahead[-1].count
        return past.ahead.pop(0).read(logprobs=logprobs)

    @torch.inference_mode()
    def run_beams(
        self, tokens_B: Tensor, *, past: RecordedPast, run: BeamRun
    ) -> tuple[Tensor, list[BeamStep]]:
        """Search on the GPU, several steps in one launch; see `Stepper.run_beams`."""
        slots = self._begun(past)
        widest = max((b - a for a, b in pairwise(run.first)), default=0)
        past.width = max(past.width, 2, widest)
        if self._choosing is None or past.lines is None or past.width > self._choosing.WIDEST:
            return self.step(tokens_B, past=past), []
        count = max(0, min(run.count, KEPT - 1))
        record = self._taken_up(past, past.width)
        record.set_tokens(tokens_B, None)
        record.close(run.closed, run.ends)
        steps = record.run_beams(run, count=count, length=slots.length)
        slots.length += 1 + len(steps)
        self.positions += 1 + len(steps)
        return record.logits_BV[: past.count], steps

    def _begun(self, past: RecordedPast) -> KVMemory:
        """Return a past's memory, if it still is this stepper's."""
        if past.call != self._call:
            raise InputError(
                "this RecordedStepper has begun another decoding, in the same memory",
                hint="finish one before the next, or make a second RecordedStepper",
            )
        if past.slots.memory is not self._kvs:  # a search needed more rows than there were
            self._kvs = past.slots.memory
            self._forget_records()
        return past.slots

    @property
    def _choosing(self) -> ModuleType | None:
        """The kernels that choose tokens, where they run."""
        return self._gpu if self._recording and self._by_kernels else None

    @property
    def memory_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return sum(kv.nbytes for kv in self._kvs)

    @property
    def _recording(self) -> bool:
        return self.graph and next(self.model.parameters()).is_cuda

    def _taken_up(self, past: RecordedPast, kind: int) -> Recorded:
        """Return the graph of a kind for this batch, recorded if needed, with its state."""
        if past.record is not None and past.record.kind == kind:
            return past.record
        state, slots = past.state(), past.slots
        key = (kind, *state.shape)
        assert self._step is not None
        if key not in self._records:
            self._records[key] = Recorded(
                self._step,
                slots.memory if past.lines is not None else slots.kvs,
                state,
                length=slots.length,
                kind=kind,
                vocab_size=self.vocab_size,
                choose=self._choosing,
                finder=None if self._fast is None else self._fast.finder(len(state.pads_B)),
            )
        past.record = self._records[key]
        past.record.take_up(state, length=slots.length)
        past.lines = past.record.state.lines
        return past.record

    def _memory(self, batch: int, length: int) -> list[Tensor]:
        """Return the kept memory, or new where it is too small: (B, 2 K, S, H) for each layer."""
        if self._recording:  # few lengths, so that graphs serve again
            length = -(-length // MEMORY_STEP) * MEMORY_STEP
        if not self._kvs or len(self._kvs[0]) < batch or self._kvs[0].shape[2] < length:
            like = next(self.model.parameters())
            self._forget_records()
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

    def _forget_records(self) -> None:
        """Give up all graphs: they read and write memory that is no longer used."""
        self._records.clear()
        self._prompts.clear()

    def _notice_new_weights(self) -> None:
        """Derive the weights again if the model was trained, loaded or moved since."""
        now = tuple(x for p in _parameters(self.model) for x in (p._version, p.data_ptr()))
        if now != self._version:
            self._kvs = []  # the model may have another dtype or device now
            self._forget_records()
            self._build()
            self._version = now

    def _build(self) -> None:
        """Derive the weights, and make the step that reads them."""
        gpu = gpu_kernels(next(self.model.parameters()))
        fast = FastModel(self.model, make=Maker(gpu))
        self._fast = fast
        self._by_kernels = gpu is not None and fast.all_attend_by_kernels
        plain = all(
            b.attention.window is None and b.attention.slopes_N is None for b in fast.blocks
        )
        causal = all(block.mixer.causal for block in self.model.spec.decoder.blocks())
        self._reads_prompts = self._recording and self._by_kernels and plain and causal
        self._gpu = importlib.import_module(CHOOSING) if self._by_kernels else None
        self._step = fast.step
