"""A moment of training that has no checkpoint any more: one watched example, as its probes hold it.

Attention in steps of 1/254, residual norms, the likeliest answers of the lens, losses. What a
snapshot does not hold (divergences, entropies, what a part wrote) is told as missing.
"""

from dataclasses import dataclass
from typing import Any

from glassformer.lab.runs.probing import probe_files
from glassformer.lens.heads import HeadName
from glassformer.lens.measure.probes import Probes, read_probes
from glassformer.lens.show.attention_map import AttentionMap
from glassformer.lens.show.token_text import shown
from glassformer.spec.errors import InputError
from glassformer.store.rundir import RunDirectory
from glassformer.web.app.query import Unknown
from glassformer.web.pages.kept_look import LENS_TOP, Maps, head_number, layer_of

SPLIT = "val"  # whose examples are watched


def watched(directory: RunDirectory) -> list[int]:
    """Rows of the validation split that every snapshot holds, whole ones alone."""
    files = probe_files(directory)
    if not files:
        return []
    probes = read_probes(next(reversed(files.values())))
    return [row for row, whole in zip(probes.examples, probes.complete, strict=True) if whole]


def snapshot(directory: RunDirectory, step: int, split: str | None, row: int | None) -> "Snapshot":
    """One watched example at one step."""
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
    return Snapshot(probes, probes.examples.index(row), directory.folder.name)


@dataclass(frozen=True, eq=False)
class Snapshot(Maps):
    """Example `at` of some probes."""

    probes: Probes
    at: int
    run: str

    def header(self) -> dict[str, Any]:
        """As an inspection's."""
        probes, source = self.probes, self.probes.source_words
        words = probes.words[self.at]
        asked = probes.counted_BT[self.at][: len(words)]
        losses = [
            float(loss) if counted else None
            for loss, counted in zip(probes.losses_BT[self.at], asked, strict=False)
        ]
        known = [loss for loss in losses if loss is not None]
        sides = {"encoder": source, "self": probes.words, "cross": probes.words}
        keys = {"encoder": source, "self": probes.words, "cross": source}
        kinds = {
            kind: {
                "heads": self.heads(kind),
                "rows": len((sides[kind] or ())[self.at]),
                "columns": len((keys[kind] or ())[self.at]),
            }
            for kind in dict.fromkeys(place.partition(".")[0] for place in probes.attention)
        }
        return {
            "run": self.run,
            "step": str(probes.step),
            "at": self.at,
            "precision": "float32",
            "head": probes.head,
            "words": [shown(word) for word in words],
            "source_words": None if source is None else [shown(w) for w in source[self.at]],
            "place": len(words) - 1,
            "kinds": kinds,
            "ablated": [],
            "snapshot": True,
            "loss": sum(known) / len(known) if known else None,
            "loss_before": None,
            "losses": losses,
        }

    def position(self, t: int, *, top: int, against: Maps | None) -> dict[str, Any]:
        """As an inspection's; what a snapshot lacks is None."""
        probes = self.probes
        if t >= len(probes.words[self.at]):
            raise InputError(f"no position {t}", hint=f"0 to {len(probes.words[self.at]) - 1}")

        def answers(row: str, most: int) -> list[dict[str, Any]]:
            found = probes.top(self.at, t, row=row)[:most]
            return [{"word": shown(word), "p": share} for word, share in found]

        rows = [*probes.row_names, "final"]
        norms = probes.norms_BRT[self.at, :, t].tolist()
        counted = bool(probes.counted_BT[self.at, t])
        return {
            "position": t,
            "next": answers("final", top),
            "target": None,
            "loss": float(probes.losses_BT[self.at, t]) if counted else None,
            "entropy": None,
            "lens": [
                {"row": row, "layer": layer_of(row), "kl": None, "top": answers(row, LENS_TOP)}
                for row in rows
            ],
            "norms": [
                {"row": row, "residual": norm, "added": None}
                for row, norm in zip(probes.row_names, norms, strict=True)
            ],
        }

    def heads(self, kind: str) -> list[int]:
        """Heads of each layer."""
        maps = self.probes.attention
        return [each.shape[1] for place, each in maps.items() if place.startswith(f"{kind}.")]

    def heat(self, kind: str, layer: int, head: str) -> AttentionMap:
        """One head's map, or the mean of a layer's."""
        if head == "mean":
            return self.probes.mean(self.at, layer, kind=kind)
        return self.probes.map(self.at, HeadName.parse(f"{kind}.L{layer}H{head_number(head)}"))
