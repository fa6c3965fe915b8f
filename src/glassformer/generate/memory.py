"""The memory of a decoding: keys and values of every layer in place, and what padding needs.

Rows that end leave their lines; beams move between them. Memory that was made is kept by its
`Decoder`, so that the next decoding finds it.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.generate.graph import Recorded

# B batch, S positions, T prompt length, K key-value heads, X = 2 K, H d_head


@dataclass(slots=True)
class Slots:
    """Layer by layer (B, 2 K, S, H), keys before values; `kvs` are the first `batch` lines."""

    whole: list[Tensor]
    batch: int
    length: int = 0
    valid_BS: Tensor | None = None
    cross: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def kvs(self) -> list[Tensor]:
        """Layer by layer, the lines in use."""
        return [kv_BXSH[: self.batch] for kv_BXSH in self.whole]

    def extend(self, layer: int, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        kv_BXSH, K = self.whole[layer][: self.batch], k_BKTH.shape[1]
        end = self.length + k_BKTH.shape[2]
        kv_BXSH[:, :K, self.length : end] = k_BKTH
        kv_BXSH[:, K:, self.length : end] = v_BKTH
        return kv_BXSH[:, :K, :end], kv_BXSH[:, K:, :end]

    def advance(self, count: int, valid_BT: Tensor | None) -> None:
        self.length += count
        self.valid_BS = valid_BT

    def reorder(self, rows_B: Tensor) -> None:
        """Rows move within the memory; more rows than it has need new memory."""
        self.batch = len(rows_B)
        if self.batch > len(self.whole[0]):
            self.whole = [kv_BXSH[rows_B] for kv_BXSH in self.whole]
        else:
            for kv_BXSH in self.whole:
                moved_BXSH = kv_BXSH[:, :, : self.length].index_select(0, rows_B)
                kv_BXSH[: self.batch, :, : self.length] = moved_BXSH
        for layer, (k, v) in self.cross.items():
            self.cross[layer] = (k[rows_B], v[rows_B])


@dataclass(slots=True)
class LeanPast:
    """The slots, where each row stands, and the masks that padding needs, made once.

    In a recorded step (`record`), a batch that shrinks keeps its lines: `lines_B` says which are
    still alive, until half of them are not.
    """

    slots: Slots
    call: int
    device: torch.device
    places_B: Tensor | None = None
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
            self.places_B, rows_B = self.record.places_B, lines_B
            self.record = self.lines_B = None
            if fewer:  # graphs are kept by size: few sizes, the lines to spare hold the first row
                spare = (1 << (len(rows) - 1).bit_length()) - len(rows)
                self.lines_B = torch.arange(len(rows), device=self.device) if spare else None
                rows_B = torch.cat((rows_B, rows_B[:1].expand(spare)))
        self.slots.reorder(rows_B)
        self.places_B = None if self.places_B is None else self.places_B[rows_B]
        self.mask_B11S = None if self.mask_B11S is None else self.mask_B11S[rows_B]
        if self.cross_mask_B11S is not None:
            self.cross_mask_B11S = self.cross_mask_B11S[rows_B]
        self.crosses = [self.slots.cross[layer] for layer in range(len(self.crosses))]

    def widen_crosses(self, *, to_multiple_of: int) -> None:
        """Sources of few lengths: masked columns are added behind them."""
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
    """(B, 1, 1, S + more), to be added to scores: -inf for padding, 0 for all that is real."""
    mask_BS = torch.zeros(len(valid_BS), valid_BS.shape[1] + more, dtype=dtype)
    mask_BS = mask_BS.to(valid_BS.device)
    mask_BS[:, : valid_BS.shape[1]].masked_fill_(~valid_BS, -math.inf)
    return mask_BS[:, None, None]
