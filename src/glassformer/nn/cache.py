"""The state of a torch model (`spec.state`), passed into a forward and never stored on a module.

Two kinds with one interface: `GrowingCache` takes new memory at each step, `FixedCache` writes into
memory that is allocated once. Cross-attention keys are computed once.

Keys and values are kept as they were computed, or in 8 bits (`kv_cache="int8"`). Then each head's
vector is rounded in groups of 32 numbers, in float32, when it enters the cache, and never again:

    scale = max |x| / 127
    code  = round_half_even(x / scale), clamped to [-127, 127]   (0 where the scale is 0)

and whoever attends, the new position among them, reads scale * code. A vector's codes depend on
that vector alone, so logits do not depend on how a prompt was cut. The native step keeps the same
codes (`kernels/step.c`). Keys and values of a source are kept as computed.
"""

from typing import Any, Protocol, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.kernels.int_matmul import quantized_rows
from glassformer.spec.decoding import KVCache
from glassformer.spec.errors import InputError
from glassformer.spec.execution import KV_GROUP
from glassformer.spec.state import Library, Memories
from glassformer.spec.state import joined_valid as joined

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


TORCH = Library(
    empty=lambda like, shape: like.new_empty(shape),
    true=lambda like, shape: like.new_ones(shape, dtype=torch.bool),
    index=lambda like, rows: torch.as_tensor(rows, dtype=torch.long, device=like.device),
)


class Cache(Protocol):
    """The interface of a state, as attention and the stack use it."""

    length: int
    valid_BS: Tensor | None

    @property
    def cross(self) -> dict[Any, Any]:
        """Keys and values of a source, by layer."""

    def extend(self, layer: int, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        """Add one layer's new keys and values; return all of that layer so far."""

    def advance(self, count: int, valid_BT: Tensor | None) -> None:
        """Count the new positions as past; called after every layer was extended."""


def joined_valid(
    past_BS: Tensor | None, length: int, new_BT: Tensor | None, count: int
) -> Tensor | None:
    """Join the validity of past and new positions; None while every position is real."""
    return joined(past_BS, length, new_BT, count, true=TORCH.true)


class GrowingCache(Memories):
    """A state that is limited by memory alone: each step copies the past into new memory."""

    def __init__(self, *, kv_cache: KVCache = "float") -> None:
        super().__init__(TORCH)
        self.kv_cache: KVCache = kv_cache

    def room(self, end: int) -> int:
        """Return how many positions to have where `end` are needed: just these."""
        return end

    def extend(self, layer: int, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        """Add one layer's new keys and values; return all of that layer so far."""
        new = _kept(k_BKTH, v_BKTH, self.kv_cache)
        return _numbers(self.of(layer).extend(new, state=self), self.kv_cache, k_BKTH.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are kept, those of a source aside."""
        return sum(memory.nbytes for memory in self.memories.values())


class FixedCache(GrowingCache):
    """A state that writes in place; each layer's memory is allocated at its first use."""

    def __init__(self, max_length: int, *, kv_cache: KVCache = "float") -> None:
        super().__init__(kv_cache=kv_cache)
        self.max_length = max_length

    def room(self, end: int) -> int:
        """Return the positions that there are; more are refused."""
        if end > self.max_length:
            raise InputError(
                f"the cache holds {self.max_length} positions, and {end} are needed",
                hint="ask for a longer cache or a shorter sequence",
            )
        return self.max_length
