"""Key-value caches, passed into a forward and never stored on a module.

Two kinds with one interface: `GrowingCache` concatenates, `FixedCache` writes into memory that is
allocated once. Both record which positions are real tokens, so that prompts of different lengths
can share a batch, and both can be reordered for beams. Cross-attention keys are computed once.

Keys and values are kept as they were computed, or in 8 bits (`kv_cache="int8"`). Then each head's
vector is rounded in groups of 32 numbers, in float32, when it enters the cache, and never again:

    scale = max |x| / 127
    code  = round_half_even(x / scale), clamped to [-127, 127]   (0 where the scale is 0)

and whoever attends, the new position among them, reads scale * code. A vector's codes depend on
that vector alone, so logits do not depend on how a prompt was cut. The native step keeps the same
codes (`kernels/step.c`). Keys and values of a source are kept as computed.
"""

from typing import Protocol, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.kernels.int_matmul import quantized_rows
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import InputError
from glassformer.spec.execution import KV_GROUP

# B batch, T new length, S length so far, K key-value heads, H d_head, G groups of a head


def to_int8(x_BKTH: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of keys or values, and a scale (B, K, T, G) of each group of a vector."""
    width = x_BKTH.shape[-1]
    padded = F.pad(x_BKTH.float(), (0, -width % KV_GROUP))  # zeros change no group's maximum
    codes_RG, scale_R1 = quantized_rows(padded.reshape(-1, KV_GROUP))
    codes_BKTH = codes_RG.view(padded.shape)[..., :width].to(torch.int8)
    return codes_BKTH, scale_R1.view(*padded.shape[:-1], -1)


def from_int8(codes_BKTH: Tensor, scale_BKTG: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that codes and scales stand for, computed in float32."""
    scale_BKTH = scale_BKTG.repeat_interleave(KV_GROUP, -1)[..., : codes_BKTH.shape[-1]]
    return (codes_BKTH * scale_BKTH).to(dtype)


#: What is kept of one layer, each (B, K, S, ...): keys and values, or codes and scales of both.
Kept = tuple[Tensor, ...]


def _kept(k_BKTH: Tensor, v_BKTH: Tensor, kv_cache: KVCache) -> Kept:
    match kv_cache:
        case "float":
            return k_BKTH, v_BKTH
        case "int8":
            return *to_int8(k_BKTH), *to_int8(v_BKTH)
        case _ as unreachable:
            assert_never(unreachable)


def _numbers(kept: Kept, kv_cache: KVCache, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys and values that were kept."""
    match kv_cache:
        case "float":
            k_BKSH, v_BKSH = kept
            return k_BKSH, v_BKSH
        case "int8":
            k_codes, k_scale, v_codes, v_scale = kept
            return from_int8(k_codes, k_scale, dtype), from_int8(v_codes, v_scale, dtype)
        case _ as unreachable:
            assert_never(unreachable)


class Cache(Protocol):
    """The interface of a cache, as attention and the stack use it."""

    length: int
    valid_BS: Tensor | None
    cross: dict[int, tuple[Tensor, Tensor]]

    def extend(self, layer: int, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        """Add one layer's new keys and values; return all of that layer so far."""

    def advance(self, count: int, valid_BT: Tensor | None) -> None:
        """Count the new positions as past; called after every layer was extended."""

    def reorder(self, rows_B: Tensor) -> None:
        """Make row b what row rows_B[b] was; rows may repeat."""


def joined_valid(
    past_BS: Tensor | None, length: int, new_BT: Tensor | None, count: int
) -> Tensor | None:
    """Join the validity of past and new positions; None while every position is real."""
    if past_BS is None and new_BT is None:
        return None
    some = past_BS if new_BT is None else new_BT
    assert some is not None
    if past_BS is None:
        past_BS = some.new_ones(len(some), length)
    if new_BT is None:
        new_BT = some.new_ones(len(some), count)
    return torch.cat((past_BS, new_BT), dim=1)


def _check_rows(past: Tensor, new: Tensor) -> None:
    """Refuse a batch of another size, which would be broadcast into the past."""
    if len(past) != len(new):
        raise InputError(
            f"the cache holds {len(past)} sequences, and {len(new)} were given",
            hint="reorder the cache to this number of rows, or start a new one",
        )


def _nbytes(layers: dict[int, Kept]) -> int:
    return sum(one.nbytes for kept in layers.values() for one in kept)


class GrowingCache:
    """A cache that concatenates: limited by memory alone, one copy of the past per step."""

    def __init__(self, *, kv_cache: KVCache = "float") -> None:
        self.length = 0
        self.kv_cache: KVCache = kv_cache
        self.valid_BS: Tensor | None = None
        self.cross: dict[int, tuple[Tensor, Tensor]] = {}
        self._layers: dict[int, Kept] = {}

    def extend(self, layer: int, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        new = _kept(k_BKTH, v_BKTH, self.kv_cache)
        if layer in self._layers:
            past = self._layers[layer]
            _check_rows(past[0], k_BKTH)
            new = tuple(torch.cat(pair, 2) for pair in zip(past, new, strict=True))
        self._layers[layer] = new
        return _numbers(new, self.kv_cache, k_BKTH.dtype)

    def advance(self, count: int, valid_BT: Tensor | None) -> None:
        self.valid_BS = joined_valid(self.valid_BS, self.length, valid_BT, count)
        self.length += count

    def cut(self, length: int) -> None:
        """Drop everything from this position on."""
        for layer, kept in self._layers.items():
            self._layers[layer] = tuple(one[:, :, :length] for one in kept)
        self.valid_BS = None if self.valid_BS is None else self.valid_BS[:, :length]
        self.length = length

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are kept, those of a source aside."""
        return _nbytes(self._layers)

    def reorder(self, rows_B: Tensor) -> None:
        for layer, kept in self._layers.items():
            self._layers[layer] = tuple(one[rows_B] for one in kept)
        for layer, (k, v) in self.cross.items():
            self.cross[layer] = (k[rows_B], v[rows_B])
        if self.valid_BS is not None:
            self.valid_BS = self.valid_BS[rows_B]


class FixedCache:
    """A cache that writes in place; each layer's memory is allocated at its first use."""

    def __init__(self, max_length: int, *, kv_cache: KVCache = "float") -> None:
        self.length = 0
        self.max_length = max_length
        self.kv_cache: KVCache = kv_cache
        self.valid_BS: Tensor | None = None
        self.cross: dict[int, tuple[Tensor, Tensor]] = {}
        self._layers: dict[int, Kept] = {}

    def extend(self, layer: int, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + k_BKTH.shape[2]
        if end > self.max_length:
            raise InputError(
                f"the cache holds {self.max_length} positions, and {end} are needed",
                hint="ask for a longer cache or a shorter sequence",
            )
        new = _kept(k_BKTH, v_BKTH, self.kv_cache)
        if layer not in self._layers:
            self._layers[layer] = tuple(
                one.new_zeros(*one.shape[:2], self.max_length, one.shape[3]) for one in new
            )
        kept = self._layers[layer]
        _check_rows(kept[0], k_BKTH)
        for memory, one in zip(kept, new, strict=True):
            memory[:, :, self.length : end] = one
        so_far = tuple(memory[:, :, :end] for memory in kept)
        return _numbers(so_far, self.kv_cache, k_BKTH.dtype)

    def advance(self, count: int, valid_BT: Tensor | None) -> None:
        self.valid_BS = joined_valid(self.valid_BS, self.length, valid_BT, count)
        self.length += count

    def cut(self, length: int) -> None:
        """Drop everything from this position on: it is written over."""
        self.valid_BS = None if self.valid_BS is None else self.valid_BS[:, :length]
        self.length = length

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are kept, those of a source aside."""
        return _nbytes(self._layers)

    def reorder(self, rows_B: Tensor) -> None:
        for layer, kept in self._layers.items():
            if len(rows_B) != len(kept[0]):  # as many beams as never before: memory of another size
                self._layers[layer] = tuple(one[rows_B] for one in kept)
                continue
            for one in kept:
                one[:, :, : self.length] = one[rows_B, :, : self.length]
        for layer, (k, v) in self.cross.items():
            self.cross[layer] = (k[rows_B], v[rows_B])
        if self.valid_BS is not None:
            self.valid_BS = self.valid_BS[rows_B]
