"""Attention maps as the page fetches them: one head at a time, and every head small.

A map is sent with NaN where nobody may look, so that a masked cell cannot be taken for a zero. A
small one is sent in float32, so that numbers on the page are Python's own; a large one in float16.

One look, kept for the page: what is sent at once, and what is fetched when it is asked for.

At once: words, losses, shapes. By position: answers, lens, norms. By head: one map.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glassformer.lens.inspection import Ablation, Inspection, comparable, compare
from glassformer.lens.measure.attention import KindMaps
from glassformer.lens.show.attention_map import AttentionMap
from glassformer.lens.show.svg import pooled
from glassformer.lens.show.token_text import shown
from glassformer.spec.errors import InputError
from glassformer.spec.units import plain_digits
from glassformer.web.app.query import Bytes

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
    def heat(self, kind: str, layer: int, head: str) -> AttentionMap:
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


def _thumbnail(heat: AttentionMap) -> NDArray[np.uint8]:
    weights = pooled(heat.tensor.float().masked_fill(~heat.allowed, 0.0).numpy(), most=THUMBNAIL)
    allowed = pooled(heat.allowed.numpy(), most=THUMBNAIL)
    return np.where(allowed, np.rint(weights.clip(0, 1) * FULL), MASKED).astype(np.uint8)


# N heads, T positions, S keys

#: Answers of each half-layer that the lens shows.
LENS_TOP = 3


@dataclass(frozen=True, eq=False)
class KeptInspection(Maps):
    """A look (after its ablation, if there is one) and where it came from."""

    look: Inspection
    run: str
    step: str
    precision: str
    parameters: int
    ablation: Ablation | None = None

    def header(self) -> dict[str, Any]:
        """What the page needs before anything can be drawn."""
        look = self.look
        return {
            "run": self.run,
            "step": self.step,
            "precision": self.precision,
            "parameters": self.parameters,
            "head": look.head,
            "words": [shown(word) for word in look.words],
            "source_words": _shown_words(look.source_words),
            "place": look.readout.position,
            "kinds": {kind: _shape(look.attention.of(kind)) for kind in look.kinds},
            "ablated": [str(head) for head in look.ablated],
            "loss": look.loss,
            "loss_before": self.ablation.before.loss if self.ablation else None,
            "losses": look.losses.tolist(),
        }

    def position(self, t: int, *, top: int, against: Maps | None) -> dict[str, Any]:
        """Answers, lens and norms at one position, beside those of before and of another model."""
        look = self.look
        t = look.lens.position(t)
        best = look.next(t, min(top, look.lens.predictions.ids.shape[-1]))
        others: dict[str, dict[str, Any]] = {}
        if self.ablation is not None:
            others["before"] = _beside(look, self.ablation.before, t, [i for i, *_ in best])
        if isinstance(against, KeptInspection):
            others["against"] = _beside(look, against.look, t, [i for i, *_ in best])
        target = look.target(t)
        return {
            "position": t,
            "next": [{"id": i, "word": shown(word), "p": share} for i, word, share in best],
            "target": None if target is None else {"id": target[0], "word": shown(target[1])},
            "loss": float(look.losses[t]),
            "entropy": float(look.entropy[t]),
            "lens": self._lens(t),
            "norms": self._norms(t),
            **others,
        }

    def _lens(self, t: int) -> list[dict[str, Any]]:
        lens = self.look.lens
        most = min(LENS_TOP, lens.predictions.ids.shape[-1])
        return [
            {
                "row": name,
                "layer": layer_of(name),
                "kl": kl,
                "top": [
                    {"id": i, "word": shown(word), "p": share}
                    for i, word, share in lens.choices(t, most, row=name)
                ],
            }
            for name, kl in zip(lens.row_names, lens.kl[:, t].tolist(), strict=True)
        ]

    def _norms(self, t: int) -> list[dict[str, Any]]:
        norms = self.look.norms
        added = {"attn": norms.attention, "cross": norms.cross, "mlp": norms.mlp}
        found = []
        for name, residual in zip(norms.row_names, norms.residual[:, t].tolist(), strict=True):
            layer, part = layer_of(name), name.rpartition(" ")[2]
            written = added.get(part) if layer is not None else None
            value = None if written is None else float(written[layer, t])
            found.append({"row": name, "residual": residual, "added": value})
        return found

    def size(self) -> int:
        """Bytes of the maps, of those before an ablation, and a byte a weight of a rounded copy."""
        weights = [each for maps in self.look.attention.by_kind.values() for each in maps.weights]
        held = sum(each.nbytes for each in weights) * (1 if self.ablation is None else 2)
        return held if self.precision == "float32" else held + self.parameters

    # --- maps -------------------------------------------------------------------------------------

    def heat(self, kind: str, layer: int, head: str) -> AttentionMap:
        """One head's map, or the mean of a layer's heads."""
        maps = self.look.attention.of(kind)
        return maps.mean(layer) if head == "mean" else maps[layer, head_number(head)]

    def heads(self, kind: str) -> list[int]:
        """Heads of each layer."""
        return [len(weights_NTS) for weights_NTS in self.look.attention.of(kind).weights]


def _shape(maps: KindMaps) -> dict[str, Any]:
    return {
        "heads": [len(weights_NTS) for weights_NTS in maps.weights],
        "rows": len(maps.rows_words),
        "columns": len(maps.columns_words),
    }


def _shown_words(words: tuple[str, ...] | None) -> list[str] | None:
    return None if words is None else [shown(word) for word in words]


def layer_of(row: str) -> int | None:
    """1 of `L1 mlp`; None of `embed` and `final`."""
    return plain_digits(row.partition(" ")[0].removeprefix("L"))


def _beside(look: Inspection, other: Inspection, t: int, ids: list[int]) -> dict[str, Any]:
    """Another look at the same tokens: its probabilities of these answers, loss, likeliest, KL."""
    if not comparable(look, other):
        return {"p": [None] * len(ids), "loss": None, "top": None, "kl": None, "mean_loss": None}
    found = compare(look, other, t, ids)
    _, word, share = found.top
    return {
        "p": found.shares,
        "loss": found.loss,
        "mean_loss": found.mean_loss,
        "top": {"word": shown(word), "p": share},
        "kl": found.kl,
    }
