"""Attention of a whole batch, head by head, with each row's real places: what scores rest on."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glassformer.data.batch import Batch
from glassformer.lens.measure.attention_mask import allowed_of
from glassformer.lens.measure.capture import at_rest
from glassformer.lens.measure.head_names import HeadName, Kind, attentions, heads_of, kinds_of
from glassformer.models.inputs import Inputs
from glassformer.models.model import Model
from glassformer.nn.taps import Edit, Taps
from glassformer.spec.model import ModelSpec

# B batch, N heads, T queries, S keys


@dataclass(frozen=True, eq=False)
class Maps:
    """`weights[head]` and `allowed[kind, layer]`, (B, T, S) each, in float64 on the CPU.

    `place_q` and `place_k` number the real tokens of each side from 0, and are -1 on padding.
    """

    weights: Mapping[HeadName, Tensor]
    allowed: Mapping[tuple[Kind, int], Tensor]
    places: Mapping[str, Tensor]  # by side, "tokens" or "source": (B, T)

    def place_q(self, kind: Kind) -> Tensor:
        """Where each query stands, (B, T)."""
        return self.places["source" if kind == "encoder" else "tokens"]

    def place_k(self, kind: Kind) -> Tensor:
        """Where each key stands, (B, S)."""
        return self.places["tokens" if kind == "self" else "source"]

    def allow(self, head: HeadName) -> Tensor:
        """Which cells this head may attend to, (B, T, S)."""
        return self.allowed[head.kind, head.layer]

    def uniform(self, head: HeadName) -> Tensor:
        """What a head would show that looks everywhere it may alike: the chance level."""
        allow = self.allow(head).double()
        return allow / allow.sum(-1, keepdim=True).clamp(min=1.0)


def read_maps(
    model: Model,
    batch: "Batch | Inputs | Tensor | np.ndarray",
    *,
    edit: Mapping[str, Edit] | None = None,
) -> Maps:
    """Every head's attention over a batch, from one pass."""
    spec = model.spec
    taps = Taps(read=["*.attn.weights", *(["*.cross.weights"] if spec.encoder else [])], edit=edit)
    inputs = model.inputs(batch)
    with at_rest(model):
        model.hidden(inputs, taps=taps)
    seen = {name: x.double().cpu() for name, x in taps.seen.items()}
    weights = {head: seen[head.tap(spec, "weights")][:, head.head] for head in heads_of(spec)}
    places = {"tokens": _places(inputs.tokens_BT, inputs.valid_BT)}
    if inputs.source_BS is not None:
        places["source"] = _places(inputs.source_BS, inputs.source_valid_BS)
    return Maps(weights, allowed_maps(spec, inputs), places)


def allowed_maps(spec: ModelSpec, inputs: Inputs) -> dict[tuple[Kind, int], Tensor]:
    """Which cells may be attended to, by kind and layer, (B, T, S)."""
    allowed = {}
    for kind in kinds_of(spec):
        made: dict[tuple[bool, int | None], Tensor] = {}
        for layer, attention in enumerate(attentions(spec, kind)):
            reach = attention.causal, attention.window
            if reach not in made:
                rows = (_one(inputs, b) for b in range(len(inputs.tokens_BT)))
                made[reach] = torch.stack([allowed_of(attention, kind, row) for row in rows])
            allowed[kind, layer] = made[reach]
    return allowed


def _one(inputs: Inputs, b: int) -> Inputs:
    """One row of a batch, as a batch of one."""

    def row(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[b : b + 1]

    return Inputs(
        inputs.tokens_BT[b : b + 1],
        row(inputs.valid_BT),
        row(inputs.segments_BT),
        row(inputs.source_BS),
        row(inputs.source_valid_BS),
    )


def _places(tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
    valid_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if valid_BT is None else valid_BT
    return (valid_BT.cumsum(1) - 1).masked_fill(~valid_BT, -1).cpu()
