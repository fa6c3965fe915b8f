"""Attention maps by layer and head, of each kind that a model has, and their means."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glassformer.lens.measure.attention_mask import allowed_of
from glassformer.lens.measure.capture import Capture
from glassformer.lens.measure.head_names import Kind, attentions, kinds_of, part_of, prefix_of
from glassformer.lens.show import html
from glassformer.lens.show.attention_map import Heat
from glassformer.lens.show.displayable import Face, Row
from glassformer.lens.show.token_text import shown
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.model import Attention, ModelSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# T queries (rows), S keys (columns), N heads, L layers


@dataclass(frozen=True, eq=False, repr=False)
class KindMaps(Face):
    """All maps of one kind: `[layer, head]` is one, `mean(layer)` a layer's average."""

    kind: Kind
    weights: tuple[Tensor, ...]  # a layer's heads: (N, T, S) each
    allowed: tuple[Tensor, ...]
    rows_words: tuple[str, ...]
    columns_words: tuple[str, ...]

    @property
    def title(self) -> str:  # type: ignore[override]
        """`self attention`."""
        return f"{self.kind} attention"

    @property
    def shape(self) -> tuple[int, int]:
        """Layers, and heads of the layer that has most."""
        return len(self.weights), max(len(each) for each in self.weights)

    @property
    def tensor(self) -> Tensor:
        """(L, N, T, S), where every layer has the same number of heads."""
        if len({len(each) for each in self.weights}) > 1:
            raise InputError("layers with different numbers of heads make no one tensor")
        return torch.stack(self.weights)

    def __getitem__(self, place: tuple[int, int]) -> Heat:
        layer, head = place
        weights_NTS = self._layer(layer)
        if not 0 <= head < len(weights_NTS):
            raise InputError(
                f"no head {head} in layer {layer}", hint=f"0 to {len(weights_NTS) - 1}"
            )
        return self._heat(weights_NTS[head], layer, f"L{layer}H{head}")

    def mean(self, layer: int | None = None) -> Heat:
        """The average over a layer's heads, or over all heads of all layers.

        Where layers see differently (windows), a cell is allowed if any of them may look there.
        """
        if layer is not None:
            return self._heat(self._layer(layer).mean(0), layer, f"L{layer} mean")
        every = torch.cat(self.weights).mean(0)
        return self._heat(every, None, "mean of all heads")

    def heads(self) -> Iterator[Heat]:
        """Every map, layer by layer."""
        for layer, weights_NTS in enumerate(self.weights):
            for head in range(len(weights_NTS)):
                yield self[layer, head]

    def _layer(self, layer: int) -> Tensor:
        if not 0 <= layer < len(self.weights):
            raise InputError(f"no layer {layer}", hint=f"0 to {len(self.weights) - 1}")
        return self.weights[layer]

    def _heat(self, weights_TS: Tensor, layer: int | None, name: str) -> Heat:
        allowed = self.allowed[layer] if layer is not None else torch.stack(self.allowed).any(0)
        title = name if self.kind == "self" else f"{self.kind}.{name}"
        return Heat(weights_TS, allowed, self.rows_words, self.columns_words, title)

    def rows(self) -> list[Row]:
        """Each head's strongest cell and how spread it is: entropy in nats, mean over its rows."""
        found = []
        for layer, weights_NTS in enumerate(self.weights):
            spread_N = torch.special.entr(weights_NTS.double()).sum(-1).mean(-1)
            for head, spread in enumerate(spread_N.tolist()):
                peaks = self[layer, head].peaks(1)
                t, s, weight = peaks[0] if peaks else (0, 0, 0.0)
                row: Row = {"kind": self.kind, "layer": layer, "head": head, "entropy": spread}
                peak = {"query": t, "key": s, "weight": weight}
                words = {"query_word": self.rows_words[t], "key_word": self.columns_words[s]}
                found.append(row | peak | words)
        return found

    def text(self) -> str:
        """A line a head."""
        T, S = self.weights[0].shape[1:]
        lines = [f"{self.title}: {len(self.weights)} layers, {T} x {S}"]
        for row in self.rows():
            words = f"{shown(row['query_word'], most=16)} -> {shown(row['key_word'], most=16)}"
            lines.append(
                f"  L{row['layer']}H{row['head']}  entropy {row['entropy']:.2f}  "
                f"peak {row['weight']:.3f}  {words}"
            )
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """A small picture a head, in rows of layers; then the table."""
        yield html.heading(self.title)
        for layer, weights_NTS in enumerate(self.weights):
            heats = [self[layer, head] for head in range(len(weights_NTS))]
            small = (html.captioned(heat.thumbnail(), heat.title) for heat in heats)
            yield f"<div>{''.join(small)}</div>"
        rows = self.rows()
        lines = (list(row.values()) for row in rows)
        yield html.folded("as a table", html.table(list(rows[0]), lines, caption=self.title))

    def figure(self) -> "Figure":
        """All heads, a line of pictures a layer."""
        from glassformer.lens.show.mpl import heat_figure

        return heat_figure(list(self.heads()), columns=self.shape[1], words=False)


@dataclass(frozen=True, eq=False, repr=False)
class Attentions(Face):
    """Every kind of a model's attention. `[layer, head]`, `mean` and `shape` are of kind `self`."""

    by_kind: Mapping[str, KindMaps]
    title: str = "attention"

    def of(self, kind: str) -> KindMaps:
        """`self`, `encoder` or `cross`."""
        if kind not in self.by_kind:
            raise InputError(
                f"this model has no attention of kind '{kind}'", hint=nearest(kind, self.by_kind)
            )
        return self.by_kind[kind]

    def __getitem__(self, place: tuple[int, int]) -> Heat:
        return self.of("self")[place]

    def mean(self, layer: int | None = None) -> Heat:
        """See `KindMaps.mean`."""
        return self.of("self").mean(layer)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those there are."""
        return tuple(self.by_kind)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads of the self-attention."""
        return self.of("self").shape

    @property
    def tensor(self) -> Tensor:
        """The self-attention's (L, N, T, S)."""
        return self.of("self").tensor

    def rows(self) -> list[Row]:
        """Of all kinds."""
        return [row for maps in self.by_kind.values() for row in maps.rows()]

    def text(self) -> str:
        """Of all kinds."""
        return "\n".join(maps.text() for maps in self.by_kind.values())

    def parts(self) -> Iterator[str]:
        """Of all kinds."""
        for maps in self.by_kind.values():
            yield from maps.parts()

    def figure(self) -> "Figure":
        """All heads of all kinds."""
        from glassformer.lens.show.mpl import heat_figure

        heats = [heat for maps in self.by_kind.values() for heat in maps.heads()]
        columns = max(maps.shape[1] for maps in self.by_kind.values())
        return heat_figure(heats, columns=columns, words=False)


def read_attention(
    spec: ModelSpec, seen: Capture, *, words: Sequence[str], source_words: Sequence[str]
) -> Attentions:
    """The maps of a capture, on the CPU in float32 at least, with who may look where."""
    found = {}
    for kind in kinds_of(spec):
        rows = tuple(source_words if kind == "encoder" else words)
        columns = tuple(words if kind == "self" else source_words)
        at = f"{prefix_of(spec, kind)}blocks.{{}}.{part_of(kind)}.weights"
        layers = attentions(spec, kind)
        taken = [seen.seen[at.format(layer)].cpu() for layer in range(len(layers))]
        weights = tuple(x if x.dtype == torch.float64 else x.float() for x in taken)
        made: dict[Attention, Tensor] = {}
        for attention in layers:
            if attention not in made:
                made[attention] = allowed_of(attention, kind, seen.inputs)
        allowed = tuple(made[attention] for attention in layers)
        found[kind] = KindMaps(kind, weights, allowed, rows, columns)
    return Attentions(found)
