"""`Decoder`: a stepper that keeps what it built between calls: derived weights, memory, a graph.

The prompt goes through the model itself, once, into memory that is kept and written in place; each
new token then goes through the lean step. The tokens are those of the plain path.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from glassformer.generate.lean import LeanModel
from glassformer.generate.product import TRIED_AT, Product, Routine, fastest_routine
from glassformer.generate.prompts import Prompts
from glassformer.generate.stepper import check_decodes, check_eval, read_prompts
from glassformer.models.encoder_decoder import EncoderDecoder
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

# B batch, S positions, T prompt length, K key-value heads, X = 2 K, H d_head, V vocab


def cache_bytes(spec: ModelSpec, *, batch: int, length: int, itemsize: int) -> int:
    """Keys and values of so many positions in every decoder layer."""
    numbers = sum(
        2 * block.attention.kv_heads * block.attention.head_width(spec.d_model)
        for block in spec.decoder.blocks()
    )
    return numbers * batch * length * itemsize


@dataclass(slots=True)
class Slots:
    """The cache of a prompt's forward: layer by layer (B, 2 K, S, H), keys before values."""

    kvs: list[Tensor]
    length: int = 0
    valid_BS: Tensor | None = None
    cross: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def extend(self, layer: int, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        kv_BXSH, K = self.kvs[layer], k_BKTH.shape[1]
        end = self.length + k_BKTH.shape[2]
        kv_BXSH[:, :K, self.length : end] = k_BKTH
        kv_BXSH[:, K:, self.length : end] = v_BKTH
        return kv_BXSH[:, :K, :end], kv_BXSH[:, K:, :end]

    def advance(self, count: int, valid_BT: Tensor | None) -> None:
        self.length += count
        self.valid_BS = valid_BT

    def reorder(self, rows_B: Tensor) -> None:
        """Rows move within the memory; more rows than it has need new memory."""
        for layer, kv_BXSH in enumerate(self.kvs):
            if len(rows_B) > len(kv_BXSH):
                self.kvs[layer] = kv_BXSH[rows_B]
                continue
            here_BXSH = kv_BXSH[: len(rows_B)]
            here_BXSH[:, :, : self.length] = kv_BXSH[:, :, : self.length].index_select(0, rows_B)
            self.kvs[layer] = here_BXSH
        for layer, (k, v) in self.cross.items():
            self.cross[layer] = (k[rows_B], v[rows_B])


@dataclass(slots=True)
class LeanPast:
    """The slots, where each row stands, and the masks that padding needs, made once."""

    slots: Slots
    call: int
    device: torch.device
    places_B: Tensor | None = None
    mask_B11S: Tensor | None = None
    cross_mask_B11S: Tensor | None = None
    crosses: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @torch.inference_mode()
    def reorder(self, rows_B: Tensor) -> None:
        rows_B = rows_B.to(self.device)
        self.slots.reorder(rows_B)
        self.places_B = None if self.places_B is None else self.places_B[rows_B]
        self.mask_B11S = None if self.mask_B11S is None else self.mask_B11S[rows_B]
        if self.cross_mask_B11S is not None:
            self.cross_mask_B11S = self.cross_mask_B11S[rows_B]
        self.crosses = [self.slots.cross[layer] for layer in range(len(self.crosses))]


class Decoder:
    """A `Stepper` for one model, to be kept and used again.

    `routines` says how products are asked for: "auto" tries each shape once, with 1, 4 and 8 rows;
    a name is used for all. What was chosen stands in `chosen`, by (outputs, inputs).
    `compile=True` runs the step through torch.compile, which attends to the whole memory behind a
    mask, so that every step has one shape. One decoding at a time: memory is shared.
    """

    def __init__(
        self, model: Model, *, routines: Literal["auto"] | Routine = "auto", compile: bool = False
    ) -> None:
        check_decodes(model.spec)
        check_eval(model)
        self.model = model
        self.routines = routines
        self.compile = compile
        self.vocab_size = model.spec.vocab_size
        self.max_seq_len = model.spec.max_seq_len
        self.source_vocab = None if model.spec.encoder is None else model.spec.source_vocab
        self.encoder_calls = 0
        self.positions = 0
        self.chosen: dict[tuple[int, ...], tuple[Routine, ...]] = {}
        self._step: Callable[..., Tensor] | None = None
        self._version: tuple[int, ...] = ()
        self._kvs: list[Tensor] = []
        self._call = 0

    @torch.inference_mode()
    def start(self, prompts: Prompts, *, room: int) -> tuple[Tensor, LeanPast]:
        inputs = read_prompts(self.model, prompts)
        B, T = inputs.tokens_BT.shape
        self._call += 1
        self._notice_new_weights()
        slots = Slots(self._memory(B, T + room))
        past = LeanPast(slots, self._call, inputs.tokens_BT.device)
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
            past.places_B = inputs.valid_BT.sum(1)
            past.mask_B11S = _added(inputs.valid_BT, slots.kvs[0].shape[2] - T, dtype)
        elif self.compile:
            past.places_B = torch.full((B,), T, device=past.device)
        if inputs.source_valid_BS is not None:
            past.cross_mask_B11S = _added(inputs.source_valid_BS, 0, dtype)
        return self.model.project(hidden_BTD[:, -1], "next"), past

    @torch.inference_mode()
    def step(self, tokens_B: Tensor, *, past: LeanPast) -> Tensor:
        if past.call != self._call:
            raise InputError(
                "this Decoder has begun another decoding, in the same memory",
                hint="finish one before the next, or make a second Decoder",
            )
        slots = past.slots
        assert self._step is not None
        end = slots.length + 1
        logits_BV = self._step(
            tokens_B.to(past.device),
            slots.kvs,
            torch.tensor([end], device=past.device) if self.compile else end,
            places_B=past.places_B,
            mask_B11S=past.mask_B11S,
            crosses=past.crosses,
            cross_mask_B11S=past.cross_mask_B11S,
        )
        slots.length += 1
        self.positions += 1
        if past.places_B is not None:
            past.places_B += 1
        return logits_BV

    @property
    def memory_bytes(self) -> int:
        """Of the keys and values that are kept."""
        return sum(kv.nbytes for kv in self._kvs)

    def _memory(self, batch: int, length: int) -> list[Tensor]:
        """Kept memory, or new where it is too small: (B, 2 K, S, H) for each layer."""
        if not self._kvs or len(self._kvs[0]) < batch or self._kvs[0].shape[2] < length:
            like = next(self.model.parameters())
            self._kvs = [
                like.new_zeros(
                    batch,
                    2 * block.attention.kv_heads,
                    length,
                    block.attention.head_width(self.model.spec.d_model),
                )
                for block in self.model.spec.decoder.blocks()
            ]
        return [kv[:batch] for kv in self._kvs]

    def _notice_new_weights(self) -> None:
        """Derived forms are made anew when the model was trained on, loaded or moved."""
        now = tuple(x for p in self.model.parameters() for x in (p._version, p.data_ptr()))
        if now != self._version:
            self._kvs = []  # the model may have another dtype or device now
            self._build()
            self._version = now

    def _build(self) -> None:
        """Derived weights, and the step over them."""
        self.chosen = {}
        lean = LeanModel(self.model, make=self._product)
        self._step = torch.compile(lean.step) if self.compile else lean.step

    def _product(self, weight_OI: Tensor, bias_O: Tensor | None) -> Product:
        shape = tuple(weight_OI.shape)
        if shape not in self.chosen:
            if self.routines == "auto":
                self.chosen[shape] = tuple(fastest_routine(weight_OI, rows=n) for n in TRIED_AT)
            else:
                self.chosen[shape] = (self.routines,) * len(TRIED_AT)
        return Product(weight_OI, bias_O, routines=self.chosen[shape])


def _added(valid_BS: Tensor, more: int, dtype: torch.dtype) -> Tensor:
    """(B, 1, 1, S + more), to be added to scores: -inf for padding, 0 for all that is real."""
    mask_BS = torch.zeros(len(valid_BS), valid_BS.shape[1] + more, dtype=dtype)
    mask_BS = mask_BS.to(valid_BS.device)
    mask_BS[:, : valid_BS.shape[1]].masked_fill_(~valid_BS, -math.inf)
    return mask_BS[:, None, None]
