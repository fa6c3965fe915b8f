"""Attention maps as the page fetches them: one head at a time, and every head small.

A map is sent with NaN where nobody may look, so that a masked cell cannot be taken for a zero. A
small one is sent in float32, so that numbers on the page are Python's own; a large one in float16.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glassformer.lens.heatmap import Heat
from glassformer.lens.picture import pooled
from glassformer.spec.errors import InputError
from glassformer.web.query import Bytes

# L layers, N heads, T queries, S keys

#: Rows and columns of a thumbnail; the byte that says "masked"; the byte that says 1.
THUMBNAIL = 32
MASKED, FULL = 255, 254
#: Cells up to which a map is sent in float32.
EXACT = 256 * 256


class Maps(ABC):
    """Something with attention maps that was kept for the page."""

    @abstractmethod
    def header(self) -> dict[str, Any]:
        """What the page needs before anything can be drawn."""

    @abstractmethod
    def position(self, t: int, *, top: int, against: "Maps | None") -> dict[str, Any]:
        """Answers, lens and norms at one position, beside another's."""

    @abstractmethod
    def heat(self, kind: str, layer: int, head: str) -> Heat:
        """One head's map, or the `mean` of a layer's."""

    @abstractmethod
    def heads(self, kind: str) -> list[int]:
        """Heads of each layer."""

    def map(self, kind: str, layer: int, head: str, *, minus: "Maps | None") -> Bytes:
        """The map's cells, NaN where masked; less another's, if one is given."""
        heat = self.heat(kind, layer, head)
        shown = heat if minus is None else heat - minus.heat(kind, layer, head)
        values_TS = shown.tensor.float().masked_fill(~shown.allowed, torch.nan).numpy()
        dtype = np.float32 if values_TS.size <= EXACT else np.float16
        return Bytes(values_TS.astype(dtype).tobytes(), values_TS.shape, np.dtype(dtype).name)

    def thumbnails(self, kind: str) -> Bytes:
        """(L, N, h, w) of bytes: the largest weight of each patch, or `MASKED` where all are."""
        counts = self.heads(kind)
        small = [
            [_thumbnail(self.heat(kind, layer, str(head))) for head in range(count)]
            for layer, count in enumerate(counts)
        ]
        made = np.zeros((len(counts), max(counts), *small[0][0].shape), np.uint8)
        for layer, row in enumerate(small):
            made[layer, : len(row)] = row
        return Bytes(made.tobytes(), made.shape, "uint8")


def head_number(text: str) -> int:
    """3 of `3`."""
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise InputError(f"{text[:20]!r} is no head", hint="a number, or mean")
    return int(text)


def _thumbnail(heat: Heat) -> NDArray[np.uint8]:
    weights = pooled(heat.tensor.float().masked_fill(~heat.allowed, 0.0).numpy(), most=THUMBNAIL)
    allowed = pooled(heat.allowed.numpy(), most=THUMBNAIL)
    return np.where(allowed, np.rint(weights.clip(0, 1) * FULL), MASKED).astype(np.uint8)
