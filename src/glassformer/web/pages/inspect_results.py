"""Results of the page Inspect that are kept for later requests.

`InspectionResult` is one pass of a model; `SnapshotResult` is a training step whose checkpoint is
gone, as its probes recorded it. Sent at once: words, losses, shapes. By position: predictions,
lens, norms. By head: one attention map, with NaN where it is masked, so that a masked cell cannot
be taken for a zero; a small map in float32, so that numbers on the page are Python's own, a large
one in float16. A module of its own, imported on first use: it needs torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glassformer.lab.runs.artifacts import probe_files
from glassformer.lens.heads import HeadName, kind_of
from glassformer.lens.inspection import Ablation, Inspection, comparable, compare
from glassformer.lens.measure.attention import KindMaps
from glassformer.lens.measure.probes import Probes, read_probes
from glassformer.lens.show.attention_map import AttentionMap
from glassformer.lens.show.chart_svg import pooled
from glassformer.lens.show.text import shown
from glassformer.spec.errors import InputError
from glassformer.spec.units import plain_digits
from glassformer.store.rundir import RunDirectory
from glassformer.web.app.query import Bytes, Unknown

# L layers, N heads, T queries, S keys

#: Rows and columns of a thumbnail; the byte of a masked cell; the byte of a weight of 1.
THUMBNAIL = 32
MASKED, FULL = 255, 254
#: The most cells of a map that is sent in float32.
EXACT = 256 * 256
#: Predictions of each sublayer that the lens shows.
LENS_TOP = 3
#: The split whose examples a training run records as probes.
SPLIT = "val"


class Result(ABC):
    """Something with attention maps, predictions and norms."""

    @abstractmethod
    def header(self) -> dict[str, Any]:
        """Return what the page needs before anything can be drawn."""

    @abstractmethod
    def position(self, t: int, *, top: int, against: "Result | None") -> dict[str, Any]:
        """Return predictions, lens and norms at one position, compared with another result."""

    @abstractmethod
    def head_map(self, kind: str, layer: int, head: str) -> AttentionMap:
        """Return one head's map, or the `mean` of a layer's."""

    @abstractmethod
    def heads(self, kind: str) -> list[int]:
        """Return the number of heads of each layer."""

    def map(self, kind: str, layer: int, head: str, *, minus: "Result | None") -> Bytes:
        """Return a map's cells, NaN where masked; minus another's, if one is given."""
        own = self.head_map(kind, layer, head)
        sent = own if minus is None else own - minus.head_map(kind, layer, head)
        values_TS = sent.tensor.float().masked_fill(~sent.allowed, torch.nan).numpy()
        dtype = np.dtype(np.float32 if values_TS.size <= EXACT else np.float16)
        return Bytes(values_TS.astype(dtype).tobytes(), values_TS.shape, dtype.name)

    def thumbnails(self, kind: str) -> Bytes:
        """Return (L, N, h, w) of bytes: the largest weight of each patch, `MASKED` if all are."""
        counts = self.heads(kind)
        small = [
            [_thumbnail(self.head_map(kind, layer, str(head))) for head in range(count)]
            for layer, count in enumerate(counts)
        ]
        every = np.zeros((len(counts), max(counts), *small[0][0].shape), np.uint8)
        for layer, row in enumerate(small):
            every[layer, : len(row)] = row
        return Bytes(every.tobytes(), every.shape, "uint8")


def _thumbnail(own: AttentionMap) -> NDArray[np.uint8]:
    weights = pooled(own.tensor.float().masked_fill(~own.allowed, 0.0).numpy(), most=THUMBNAIL)
    allowed = pooled(own.allowed.numpy(), most=THUMBNAIL)
    return np.where(allowed, np.rint(weights.clip(0, 1) * FULL), MASKED).astype(np.uint8)


def _head_number(text: str) -> int:
    number = plain_digits(text)
    if number is None or len(text) > 5:
        raise InputError(f"{text[:20]!r} is not a head", hint="a number, or mean")
    return number


def _layer_of(row: str) -> int | None:
    """Return 1 for the row `L1 mlp`; None for `embed` and `final`."""
    return plain_digits(row.partition(" ")[0].removeprefix("L"))


def _shown_words(words: Sequence[str] | None) -> list[str] | None:
    return None if words is None else [shown(word) for word in words]


# --- one pass of a model --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class InspectionResult(Result):
    """An inspection (after its ablation, if there is one), and what it was made from.

    `loaded` is the model in memory that it belongs to, or that its quantized copy was made from.
    `extended` is the text with the likeliest next token appended; None where nothing can follow.
    """

    inspection: Inspection
    loaded: Any
    run: str
    step: str
    precision: str
    parameters: int
    text: str
    target: str | None
    extended: str | None
    ablation: Ablation | None = None

    @property
    def baseline(self) -> Inspection:
        """The inspection with no head ablated."""
        return self.inspection if self.ablation is None else self.ablation.before

    def header(self) -> dict[str, Any]:
        """Return what the page needs before anything can be drawn."""
        own = self.inspection
        return {
            "run": self.run,
            "step": self.step,
            "precision": self.precision,
            "parameters": self.parameters,
            "text": self.text,
            "target": self.target,
            "extended": self.extended,
            "head": own.head,
            "words": [shown(word) for word in own.words],
            "source_words": _shown_words(own.source_words),
            "readout": own.readout.position,
            "kinds": {kind: _shape(own.attention.of(kind)) for kind in own.kinds},
            "ablated": [str(head) for head in own.ablated],
            "loss": own.loss,
            "loss_before": self.ablation.before.loss if self.ablation else None,
            "losses": own.losses.tolist(),
        }

    def position(self, t: int, *, top: int, against: Result | None) -> dict[str, Any]:
        """Return predictions, lens and norms, compared with before and with another model."""
        own = self.inspection
        t = own.lens.position(t)
        best = own.next(t, min(top, own.lens.predictions.ids.shape[-1]))
        ids = [i for i, *_ in best]
        others: dict[str, dict[str, Any]] = {}
        if self.ablation is not None:
            others["before"] = _compared(own, self.ablation.before, t, ids)
        if isinstance(against, InspectionResult):
            others["against"] = _compared(own, against.inspection, t, ids)
        target = own.target(t)
        return {
            "position": t,
            "next": [{"id": i, "word": shown(word), "p": share} for i, word, share in best],
            "target": None if target is None else {"id": target[0], "word": shown(target[1])},
            "loss": float(own.losses[t]),
            "entropy": float(own.entropy[t]),
            "lens": self._lens(t),
            "norms": self._norms(t),
            **others,
        }

    def _lens(self, t: int) -> list[dict[str, Any]]:
        lens = self.inspection.lens
        most = min(LENS_TOP, lens.predictions.ids.shape[-1])
        return [
            {
                "row": name,
                "layer": _layer_of(name),
                "kl": kl,
                "top": [
                    {"id": i, "word": shown(word), "p": share}
                    for i, word, share in lens.choices(t, most, row=name)
                ],
            }
            for name, kl in zip(lens.row_names, lens.kl[:, t].tolist(), strict=True)
        ]

    def _norms(self, t: int) -> list[dict[str, Any]]:
        norms = self.inspection.norms
        residual = zip(norms.row_names, norms.residual[:, t].tolist(), strict=True)
        return [
            {"row": name, "residual": norm, "added": norms.added(name, t)}
            for name, norm in residual
        ]

    def size(self) -> int:
        """Return the bytes of the maps, also those before an ablation, and of a quantized copy."""
        by_kind = self.inspection.attention.by_kind.values()
        maps = sum(each.nbytes for maps in by_kind for each in maps.weights)
        held = maps * (1 if self.ablation is None else 2)
        return held if self.precision == "float32" else held + self.parameters

    def head_map(self, kind: str, layer: int, head: str) -> AttentionMap:
        """Return one head's map, or the mean of a layer's heads."""
        maps = self.inspection.attention.of(kind)
        return maps.mean(layer) if head == "mean" else maps[layer, _head_number(head)]

    def heads(self, kind: str) -> list[int]:
        """Return the number of heads of each layer."""
        return [len(weights_NTS) for weights_NTS in self.inspection.attention.of(kind).weights]


def _shape(maps: KindMaps) -> dict[str, Any]:
    return {
        "heads": [len(weights_NTS) for weights_NTS in maps.weights],
        "rows": len(maps.rows_words),
        "columns": len(maps.columns_words),
    }


def _compared(own: Inspection, other: Inspection, t: int, ids: list[int]) -> dict[str, Any]:
    """Return another's probabilities of these ids, its loss, likeliest prediction and KL."""
    if not comparable(own, other):
        return {"p": [None] * len(ids), "loss": None, "top": None, "kl": None, "mean_loss": None}
    comparison = compare(own, other, t, ids)
    _, word, share = comparison.top
    return {
        "p": comparison.shares,
        "loss": comparison.loss,
        "mean_loss": comparison.mean_loss,
        "top": {"word": shown(word), "p": share},
        "kl": comparison.kl,
    }


# --- a training step without a checkpoint ---------------------------------------------------------


def probed_rows(directory: RunDirectory) -> list[int]:
    """Return the rows of the validation split that every snapshot holds, complete ones only."""
    files = probe_files(directory)
    if not files:
        return []
    probes = read_probes(next(reversed(files.values())))
    pairs = zip(probes.examples, probes.complete, strict=True)
    return [row for row, complete in pairs if complete]


def read_snapshot(
    directory: RunDirectory, step: int, split: str | None, row: int | None
) -> tuple[Probes, int]:
    """Read the probes of one step; return them and the index of this example in them."""
    path = probe_files(directory).get(step)
    if path is None:
        raise Unknown(f"the run has neither a checkpoint nor a snapshot of step {step}")
    probes = read_probes(path)
    if split != SPLIT or row not in probes.examples:
        rows = ", ".join(map(str, probes.examples))
        raise InputError(
            f"of step {step} only a snapshot is kept, of the validation examples {rows}",
            hint="choose one of them, or a step with a checkpoint",
        )
    return probes, list(probes.examples).index(row)


@dataclass(frozen=True, eq=False)
class SnapshotResult(Result):
    """Example `at` of the probes of one step.

    Attention is in steps of 1/254. What probes do not record (divergences, entropies, what each
    sublayer added) is None.
    """

    probes: Probes
    at: int
    run: str
    text: str
    target: str | None
    parameters: int

    def header(self) -> dict[str, Any]:
        """Return the same fields as an inspection."""
        probes, source = self.probes, self.probes.source_words
        words = probes.words[self.at]
        counted = probes.counted_BT[self.at][: len(words)]
        losses = [
            float(loss) if has_target else None
            for loss, has_target in zip(probes.losses_BT[self.at], counted, strict=False)
        ]
        known = [loss for loss in losses if loss is not None]
        rows = {"encoder": source, "self": probes.words, "cross": probes.words}
        columns = {"encoder": source, "self": probes.words, "cross": source}
        kinds = {
            kind: {
                "heads": self.heads(kind),
                "rows": len((rows[kind] or ())[self.at]),
                "columns": len((columns[kind] or ())[self.at]),
            }
            for kind in dict.fromkeys(name.partition(".")[0] for name in probes.attention)
        }
        return {
            "run": self.run,
            "step": str(probes.step),
            "at": self.at,
            "precision": "float32",
            "parameters": self.parameters,
            "text": self.text,
            "target": self.target,
            "extended": None,
            "head": probes.head,
            "words": [shown(word) for word in words],
            "source_words": _shown_words(None if source is None else source[self.at]),
            "readout": len(words) - 1,
            "kinds": kinds,
            "ablated": [],
            "snapshot": True,
            "loss": sum(known) / len(known) if known else None,
            "loss_before": None,
            "losses": losses,
        }

    def position(self, t: int, *, top: int, against: Result | None) -> dict[str, Any]:
        """Return the same fields as an inspection; what a snapshot lacks is None."""
        probes = self.probes
        if t >= len(probes.words[self.at]):
            raise InputError(f"no position {t}", hint=f"0 to {len(probes.words[self.at]) - 1}")

        def predictions(row: str, most: int) -> list[dict[str, Any]]:
            best = probes.top(self.at, t, row=row)[:most]
            return [{"word": shown(word), "p": share} for word, share in best]

        norms = probes.norms_BRT[self.at, :, t].tolist()
        has_target = bool(probes.counted_BT[self.at, t])
        return {
            "position": t,
            "next": predictions("final", top),
            "target": None,
            "loss": float(probes.losses_BT[self.at, t]) if has_target else None,
            "entropy": None,
            "lens": [
                {"row": row, "layer": _layer_of(row), "kl": None, "top": predictions(row, LENS_TOP)}
                for row in (*probes.row_names, "final")
            ],
            "norms": [
                {"row": row, "residual": norm, "added": None}
                for row, norm in zip(probes.row_names, norms, strict=True)
            ],
        }

    def heads(self, kind: str) -> list[int]:
        """Return the number of heads of each layer."""
        maps = self.probes.attention
        return [each.shape[1] for name, each in maps.items() if name.startswith(f"{kind}.")]

    def head_map(self, kind: str, layer: int, head: str) -> AttentionMap:
        """Return one head's map, or the mean of a layer's."""
        if head == "mean":
            return self.probes.mean(self.at, layer, kind=kind)
        return self.probes.map(self.at, HeadName(kind_of(kind), layer, _head_number(head)))
