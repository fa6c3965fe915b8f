"""Attention maps: who may attend to whom, one sequence's maps by layer and head, a batch's maps.

`read_attention` gives the maps of a captured pass as `AttentionMap` values; `batch_attention` gives
the weights of every head over a batch, with the positions of the real tokens, for scores of roles.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.lens.capture import Capture, eval_mode
from glassformer.lens.heads import (
    HeadName,
    Kind,
    attentions,
    heads_of,
    kinds_of,
    part_of,
    prefix_of,
)
from glassformer.lens.show import html
from glassformer.lens.show.attention_map import AttentionMap, maps_chart
from glassformer.lens.show.chart import Panels
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.lens.show.text import shown
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.nn.mask import build_mask
from glassformer.nn.norm import as_float
from glassformer.nn.taps import Taps
from glassformer.spec.errors import InputError, nearest
from glassformer.spec.model import Attention, ModelSpec

# B batch, L layers, N heads, T queries (rows), S keys (columns)

# --- which cells may be attended to ---------------------------------------------------------------


def allowed_maps(spec: ModelSpec, inputs: Inputs) -> dict[tuple[Kind, int], Tensor]:
    """Return by kind and layer, (B, T, S), on the CPU: True where a query may attend to a key.

    A row that may attend to nothing is all False.
    """
    allowed = {}
    for kind in kinds_of(spec):
        masks: dict[tuple[bool, int | None], Tensor] = {}
        for layer, attention in enumerate(attentions(spec, kind)):
            reach = attention.causal, attention.window
            if reach not in masks:
                masks[reach] = _allowed(attention, kind, inputs)
            allowed[kind, layer] = masks[reach]
    return allowed


def _allowed(attention: Attention, kind: Kind, inputs: Inputs) -> Tensor:
    B, T = inputs.tokens_BT.shape
    S = T if inputs.source_BS is None else inputs.source_BS.shape[1]
    queries, keys = {"self": (T, T), "encoder": (S, S), "cross": (T, S)}[kind]
    sides = {"tokens": inputs.valid_BT, "source": inputs.source_valid_BS}
    valid_q = sides["source" if kind == "encoder" else "tokens"]
    valid_k = sides["tokens" if kind == "self" else "source"]
    device = inputs.tokens_BT.device
    if valid_q is not None or valid_k is not None:
        ones = torch.ones(B, max(queries, keys), dtype=torch.bool, device=device)
        valid_q = ones[:, :queries] if valid_q is None else valid_q
        valid_k = ones[:, :keys] if valid_k is None else valid_k
    segments = inputs.segments_BT if kind == "self" else None
    mask = build_mask(
        queries,
        keys,
        causal=attention.causal,
        window=attention.window,
        valid_q_BT=valid_q,
        valid_k_BS=valid_k,
        segments_q_BT=segments,
        segments_k_BS=segments,
        device=device,
    )
    allow = mask.explicit(queries, device)
    if allow is None:
        allow = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if mask.empty is not None:
        allow = allow & ~mask.empty
    return allow.reshape(-1, queries, keys).expand(B, -1, -1).cpu()


# --- one sequence ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class KindMaps(Displayable):
    """All maps of one kind of attention: `[layer, head]` is one, `mean(layer)` an average."""

    kind: Kind
    weights: tuple[Tensor, ...]  # a layer's heads: (N, T, S) each
    allowed: tuple[Tensor, ...]
    rows_words: tuple[str, ...]
    columns_words: tuple[str, ...]

    @property
    def title(self) -> str:
        """`self attention`."""
        return f"{self.kind} attention"

    @property
    def shape(self) -> tuple[int, int]:
        """The number of layers, and of heads in the layer that has most."""
        return len(self.weights), max(len(each) for each in self.weights)

    @property
    def tensor(self) -> Tensor:
        """(L, N, T, S), where every layer has the same number of heads."""
        if len({len(each) for each in self.weights}) > 1:
            raise InputError("layers with different numbers of heads make no one tensor")
        return torch.stack(self.weights)

    def __getitem__(self, at: tuple[int, int]) -> AttentionMap:
        layer, head = at
        weights_NTS = self._layer(layer)
        if not 0 <= head < len(weights_NTS):
            raise InputError(
                f"no head {head} in layer {layer}", hint=f"0 to {len(weights_NTS) - 1}"
            )
        return self._map(weights_NTS[head], layer, HeadName(self.kind, layer, head))

    def mean(self, layer: int | None = None) -> AttentionMap:
        """Return the average over a layer's heads, or over all heads of all layers.

        Where layers have different windows, a cell is allowed if any of them may attend to it.
        """
        if layer is not None:
            return self._map(self._layer(layer).mean(0), layer, f"L{layer} mean")
        every = torch.cat(self.weights).mean(0)
        return self._map(every, None, "mean of all heads")

    def heads(self) -> Iterator[AttentionMap]:
        """Yield every map, layer by layer."""
        for layer, weights_NTS in enumerate(self.weights):
            for head in range(len(weights_NTS)):
                yield self[layer, head]

    def _layer(self, layer: int) -> Tensor:
        if not 0 <= layer < len(self.weights):
            raise InputError(f"no layer {layer}", hint=f"0 to {len(self.weights) - 1}")
        return self.weights[layer]

    def _map(self, weights_TS: Tensor, layer: int | None, of: HeadName | str) -> AttentionMap:
        allowed = self.allowed[layer] if layer is not None else torch.stack(self.allowed).any(0)
        words = self.rows_words, self.columns_words
        if isinstance(of, HeadName):
            return AttentionMap(weights_TS, allowed, *words, title=str(of), head=of)
        title = of if self.kind == "self" else f"{self.kind}.{of}"
        return AttentionMap(weights_TS, allowed, *words, title=title)

    def rows(self) -> list[Row]:
        """One row per head: its strongest cell, and its entropy in nats, the mean over queries."""
        rows = []
        for layer, weights_NTS in enumerate(self.weights):
            spread_N = torch.special.entr(weights_NTS.double()).sum(-1).mean(-1)
            for head, spread in enumerate(spread_N.tolist()):
                peaks = self[layer, head].peaks(1)
                t, s, weight = peaks[0] if peaks else (0, 0, 0.0)
                row: Row = {"kind": self.kind, "layer": layer, "head": head, "entropy": spread}
                peak = {"query": t, "key": s, "weight": weight}
                words = {"query_word": self.rows_words[t], "key_word": self.columns_words[s]}
                rows.append(row | peak | words)
        return rows

    def text(self) -> str:
        """One line per head."""
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
        """A small picture of each head, one row per layer; then the table."""
        yield html.heading(self.title)
        for layer, weights_NTS in enumerate(self.weights):
            maps = [self[layer, head] for head in range(len(weights_NTS))]
            small = (html.captioned(each.thumbnail(), each.title) for each in maps)
            yield f"<div>{''.join(small)}</div>"
        yield self.table()

    def chart(self) -> Panels:
        """All heads, one row of pictures per layer."""
        return maps_chart(list(self.heads()), columns=self.shape[1])


@dataclass(frozen=True, eq=False, repr=False)
class Attentions(Displayable):
    """Every kind of a model's attention. `[layer, head]`, `mean` and `shape` are of kind `self`."""

    by_kind: Mapping[str, KindMaps]
    title: str = "attention"

    def of(self, kind: str) -> KindMaps:
        """Return the maps of one kind: `self`, `encoder` or `cross`."""
        if kind not in self.by_kind:
            raise InputError(
                f"this model has no attention of kind '{kind}'", hint=nearest(kind, self.by_kind)
            )
        return self.by_kind[kind]

    def __getitem__(self, at: tuple[int, int]) -> AttentionMap:
        return self.of("self")[at]

    def mean(self, layer: int | None = None) -> AttentionMap:
        """Return the average over heads of self-attention: see `KindMaps.mean`."""
        return self.of("self").mean(layer)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of attention this model has: self, encoder, cross."""
        return tuple(self.by_kind)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of layers and of heads of self-attention."""
        return self.of("self").shape

    @property
    def tensor(self) -> Tensor:
        """The weights of self-attention (L, N, T, S)."""
        return self.of("self").tensor

    def rows(self) -> list[Row]:
        """The rows of all kinds."""
        return [row for maps in self.by_kind.values() for row in maps.rows()]

    def text(self) -> str:
        """The lines of all kinds."""
        return "\n".join(maps.text() for maps in self.by_kind.values())

    def parts(self) -> Iterator[str]:
        """The parts of all kinds."""
        for maps in self.by_kind.values():
            yield from maps.parts()

    def chart(self) -> Panels:
        """All heads of all kinds."""
        every = [each for maps in self.by_kind.values() for each in maps.heads()]
        return maps_chart(every, columns=max(maps.shape[1] for maps in self.by_kind.values()))


def read_attention(
    spec: ModelSpec, captured: Capture, *, words: Sequence[str], source_words: Sequence[str]
) -> Attentions:
    """Return the maps of a captured pass, on the CPU in float32 at least, with their masks."""
    by_kind: dict[str, KindMaps] = {}
    every = allowed_maps(spec, captured.inputs)
    for kind in kinds_of(spec):
        rows = tuple(source_words if kind == "encoder" else words)
        columns = tuple(words if kind == "self" else source_words)
        at = f"{prefix_of(spec, kind)}blocks.{{}}.{part_of(kind)}.weights"
        layers = attentions(spec, kind)
        taken = (captured.taps[at.format(layer)].cpu() for layer in range(len(layers)))
        weights = tuple(map(as_float, taken))
        allowed = tuple(every[kind, layer][0] for layer in range(len(layers)))
        by_kind[kind] = KindMaps(kind, weights, allowed, rows, columns)
    return Attentions(by_kind)


# --- a batch --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BatchAttention:
    """`weights[head]` and `allowed[kind, layer]`, (B, T, S) each, in float64 on the CPU.

    `positions` number the real tokens of each side from 0, and are -1 on padding.
    """

    weights: Mapping[HeadName, Tensor]
    allowed: Mapping[tuple[Kind, int], Tensor]
    positions: Mapping[str, Tensor]  # by side, "tokens" or "source": (B, T)

    def query_positions(self, kind: Kind) -> Tensor:
        """Return the position of each query, (B, T)."""
        return self.positions["source" if kind == "encoder" else "tokens"]

    def key_positions(self, kind: Kind) -> Tensor:
        """Return the position of each key, (B, S)."""
        return self.positions["tokens" if kind == "self" else "source"]

    def allow(self, head: HeadName) -> Tensor:
        """Return which cells this head may attend to, (B, T, S)."""
        return self.allowed[head.kind, head.layer]

    def uniform(self, head: HeadName) -> Tensor:
        """Return uniform attention over the allowed cells: the chance level."""
        allow = self.allow(head).double()
        return allow / allow.sum(-1, keepdim=True).clamp(min=1.0)


def batch_attention(model: Model, batch: Batch | Inputs | Tensor | NDArray[Any]) -> BatchAttention:
    """Return every head's attention over a batch, from one pass."""
    spec = model.spec
    taps = Taps(read=["*.attn.weights", *(["*.cross.weights"] if spec.encoder else [])])
    inputs = model.inputs(batch)
    with eval_mode(model):
        model.hidden(inputs, taps=taps)
    kept = {name: x.double().cpu() for name, x in taps.seen.items()}
    weights = {head: kept[head.tap(spec, "weights")][:, head.head] for head in heads_of(spec)}
    positions = {"tokens": _positions(inputs.tokens_BT, inputs.valid_BT)}
    if inputs.source_BS is not None:
        positions["source"] = _positions(inputs.source_BS, inputs.source_valid_BS)
    return BatchAttention(weights, allowed_maps(spec, inputs), positions)


def _positions(tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
    valid_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if valid_BT is None else valid_BT
    return (valid_BT.cumsum(1) - 1).masked_fill(~valid_BT, -1).cpu()
