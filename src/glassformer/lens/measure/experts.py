"""Router choices of a mixture of experts: which experts each token uses, and each expert's load."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glassformer.lens.capture import Capture
from glassformer.lens.heads import prefix_of
from glassformer.lens.show import html, svg
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.lens.show.text import shown
from glassformer.nn.precision import as_float
from glassformer.spec.model import ModelSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# L layers with experts, T positions, E experts

#: Lines of a long sequence that the text shows: the last ones.
LINES = 24


@dataclass(frozen=True, eq=False, repr=False)
class ExpertChoices(Displayable):
    """`weights` (L, T, E) of the experts that each token uses, 0 where it does not.

    `layers` are the numbers of the layers that have experts, `sizes` how many experts each has:
    where layers differ, the weights of missing experts are 0.
    """

    layers: tuple[int, ...]
    sizes: tuple[int, ...]
    weights: Tensor
    words: tuple[str, ...]
    title: str = "experts"

    @property
    def tensor(self) -> Tensor:
        """The weights (L, T, E)."""
        return self.weights

    @property
    def load(self) -> Tensor:
        """The share of tokens that use each expert (L, E)."""
        return (self.weights != 0).float().mean(1)

    def chosen(self, layer: int, position: int) -> list[tuple[int, float]]:
        """Return the experts of one token with their weights, largest first."""
        weights = self.weights[self.layers.index(layer), position].tolist()
        used = [(expert, weight) for expert, weight in enumerate(weights) if weight]
        return sorted(used, key=lambda pair: -pair[1])

    def rows(self) -> list[Row]:
        """One row per layer and position: the experts and their weights, largest first."""
        rows: list[Row] = []
        for layer in self.layers:
            for t, word in enumerate(self.words):
                chosen = self.chosen(layer, t)
                rows.append(
                    {
                        "layer": layer,
                        "position": t,
                        "word": word,
                        "experts": [expert for expert, _ in chosen],
                        "weights": [weight for _, weight in chosen],
                    }
                )
        return rows

    def text(self) -> str:
        """The load of every expert by layer, then each token's experts, the last ones of many."""
        lines = ["experts: share of the tokens that use each"]
        for layer, size, load in zip(self.layers, self.sizes, self.load.tolist(), strict=True):
            shares = " ".join(f"{share:4.0%}" for share in load[:size])
            lines.append(f"  L{layer:<3} {shares}")
        lines.append("experts of each token, by layer (largest weight first)")
        first = max(0, len(self.words) - LINES)
        for t, word in enumerate(self.words[first:], first):
            lines.append(f"  {t:4} {shown(word, most=16):>16}  {'  '.join(self._cells(t))}")
        return "\n".join(lines)

    def _cells(self, position: int) -> list[str]:
        """`L0 3,5`: the experts of one token in every layer."""
        return [
            f"L{layer} {','.join(str(expert) for expert, _ in self.chosen(layer, position))}"
            for layer in self.layers
        ]

    def parts(self) -> Iterator[str]:
        """Bars of the loads, layer by layer, then the choices as a table."""
        yield html.heading("experts: share of the tokens that use each")
        for layer, size, load in zip(self.layers, self.sizes, self.load.tolist(), strict=True):
            names = [f"L{layer} expert {expert}" for expert in range(size)]
            label = f"load of the experts of layer {layer}"
            yield html.captioned(svg.bars_svg(names, load[:size], label=label), label)
        heading = ["position", "word", *(f"L{layer}" for layer in self.layers)]
        lines = (
            [t, shown(word), *(cell.partition(" ")[2] for cell in self._cells(t))]
            for t, word in enumerate(self.words)
        )
        inside = html.table(heading, lines, caption="experts of each token, largest weight first")
        yield html.folded("experts of each token", inside)

    def figure(self) -> "Figure":
        """The load of every expert."""
        from glassformer.lens.show.mpl import bars_figure

        names = [f"L{layer} expert {e}" for layer in self.layers for e in range(max(self.sizes))]
        return bars_figure(names, self.load.flatten().tolist(), title="load of experts")


def read_experts(
    spec: ModelSpec, captured: Capture, *, words: tuple[str, ...]
) -> ExpertChoices | None:
    """Read the choices of a captured pass; of an encoder-decoder, its decoder's; None without."""
    prefix, mixtures = prefix_of(spec, "self"), spec.mixtures()
    own = {
        layer: mixtures[f"{prefix}blocks.{layer}"]
        for layer in range(spec.n_layers)
        if f"{prefix}blocks.{layer}" in mixtures
    }
    if not own:
        return None
    widest = max(ffn.n_experts for ffn in own.values())
    weights_LTE = torch.zeros(len(own), len(words), widest)
    for i, (layer, ffn) in enumerate(own.items()):
        routing_TE = as_float(captured.taps[f"{prefix}blocks.{layer}.ffn.routing"])
        weights_LTE[i, :, : ffn.n_experts] = routing_TE.cpu()
    sizes = tuple(ffn.n_experts for ffn in own.values())
    return ExpertChoices(tuple(own), sizes, weights_LTE, words)
