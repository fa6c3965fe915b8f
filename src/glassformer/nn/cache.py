"""Key-value caches, passed into a forward and never stored on a module.

Two kinds with one interface: `GrowingCache` concatenates, `FixedCache` writes into memory that is
allocated once. Both record which positions are real tokens, so that prompts of different lengths
can share a batch, and both can be reordered for beams. Cross-attention keys are computed once.
"""

from typing import Protocol

import torch
from torch import Tensor

from glassformer.spec.errors import InputError

# B batch, T new length, S length so far, K key-value heads, H d_head


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


class GrowingCache:
    """A cache that concatenates: limited by memory alone, one copy of the past per step."""

    def __init__(self) -> None:
        self.length = 0
        self.valid_BS: Tensor | None = None
        self.cross: dict[int, tuple[Tensor, Tensor]] = {}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self._layers:
            k_past, v_past = self._layers[layer]
            _check_rows(k_past, k_BKTH)
            k_BKTH, v_BKTH = torch.cat((k_past, k_BKTH), 2), torch.cat((v_past, v_BKTH), 2)
        self._layers[layer] = (k_BKTH, v_BKTH)
        return k_BKTH, v_BKTH

    def advance(self, count: int, valid_BT: Tensor | None) -> None:
        self.valid_BS = joined_valid(self.valid_BS, self.length, valid_BT, count)
        self.length += count

    def cut(self, length: int) -> None:
        """Drop everything from this position on."""
        for layer, (k, v) in self._layers.items():
            self._layers[layer] = (k[:, :, :length], v[:, :, :length])
        self.valid_BS = None if self.valid_BS is None else self.valid_BS[:, :length]
        self.length = length

    def reorder(self, rows_B: Tensor) -> None:
        for kept in (self._layers, self.cross):
            for layer, (k, v) in kept.items():
                kept[layer] = (k[rows_B], v[rows_B])
        if self.valid_BS is not None:
            self.valid_BS = self.valid_BS[rows_B]


class FixedCache:
    """A cache that writes in place; each layer's memory is allocated at its first use."""

    def __init__(self, max_length: int) -> None:
        self.length = 0
        self.max_length = max_length
        self.valid_BS: Tensor | None = None
        self.cross: dict[int, tuple[Tensor, Tensor]] = {}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + k_BKTH.shape[2]
        if end > self.max_length:
            raise InputError(
                f"the cache holds {self.max_length} positions, and {end} are needed",
                hint="ask for a longer cache or a shorter sequence",
            )
        if layer not in self._layers:
            B, K, _, H = k_BKTH.shape
            shape = (B, K, self.max_length, H)
            self._layers[layer] = (k_BKTH.new_zeros(shape), v_BKTH.new_zeros(shape))
        k_all, v_all = self._layers[layer]
        _check_rows(k_all, k_BKTH)
        k_all[:, :, self.length : end] = k_BKTH
        v_all[:, :, self.length : end] = v_BKTH
        return k_all[:, :, :end], v_all[:, :, :end]

    def advance(self, count: int, valid_BT: Tensor | None) -> None:
        self.valid_BS = joined_valid(self.valid_BS, self.length, valid_BT, count)
        self.length += count

    def cut(self, length: int) -> None:
        """Drop everything from this position on: it is written over."""
        self.valid_BS = None if self.valid_BS is None else self.valid_BS[:, :length]
        self.length = length

    def reorder(self, rows_B: Tensor) -> None:
        for layer, (k, v) in self._layers.items():
            if len(rows_B) != len(k):  # as many beams as never before: memory of another size
                self._layers[layer] = (k[rows_B], v[rows_B])
                continue
            k[:, :, : self.length] = k[rows_B, :, : self.length]
            v[:, :, : self.length] = v[rows_B, :, : self.length]
        for layer, (k, v) in self.cross.items():
            self.cross[layer] = (k[rows_B], v[rows_B])
        if self.valid_BS is not None:
            self.valid_BS = self.valid_BS[rows_B]
