"""What each layer does: L2 norms of the residual stream and of what is added to it; its experts.

In a mixture of experts: which experts each token uses, and each expert's load.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glassformer.lens.capture import Capture, residual_rows
from glassformer.lens.heads import prefix_of
from glassformer.lens.show import html, svg
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.lens.show.text import shown
from glassformer.nn.norm import as_float
from glassformer.spec.model import ModelSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# L layers, R rows of the residual, T positions, D d_model


@dataclass(frozen=True, eq=False, repr=False)
class Norms(Displayable):
    """`residual` (R, T) after each sublayer; `attention`, `cross`, `mlp` (L, T): what was added.

    In a post-norm model the parts are measured before the norm, the residual after it.
    """

    row_names: tuple[str, ...]
    residual: Tensor
    attention: Tensor
    mlp: Tensor
    cross: Tensor | None
    words: tuple[str, ...]
    title: str = "norms"

    @property
    def tensor(self) -> Tensor:
        """The norms of the residual (R, T)."""
        return self.residual

    def parts_by_name(self) -> dict[str, Tensor]:
        """Return what the layers add: attention, cross where there is one, mlp."""
        added = {"attention": self.attention}
        if self.cross is not None:
            added["cross"] = self.cross
        return added | {"mlp": self.mlp}

    def rows(self) -> list[Row]:
        """One row per depth and position: the residual first, then what each layer added."""
        named = [(name, "residual", values) for name, values in self._residual()]
        for part, values_LT in self.parts_by_name().items():
            named += [(f"L{i}", part, values) for i, values in enumerate(values_LT.tolist())]
        return [
            {"row": name, "part": part, "position": t, "word": word, "norm": value}
            for name, part, values in named
            for t, (word, value) in enumerate(zip(self.words, values, strict=True))
        ]

    def _residual(self) -> Iterator[tuple[str, list[float]]]:
        yield from zip(self.row_names, self.residual.tolist(), strict=True)

    def text(self) -> str:
        """Means over positions."""
        lines = ["norms, mean over positions"]
        for name, values in self._residual():
            lines.append(f"  {name:10} residual {sum(values) / len(values):10.3f}")
        for part, values_LT in self.parts_by_name().items():
            for layer, value in enumerate(values_LT.mean(1).tolist()):
                lines.append(f"  {f'L{layer} {part}':20} {value:.3f}")
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """Lines over depth, then the table of the residual."""
        yield html.heading("norms after each sublayer, mean over positions")
        series = {"residual": self.residual.mean(1).tolist()}
        label = "residual norm by depth"
        yield svg.lines_svg(series, label=label, words=self.row_names)
        added = {name: values.mean(1).tolist() for name, values in self.parts_by_name().items()}
        yield svg.lines_svg(added, label="norm of what each layer adds, by layer")
        lines = ([name, *values] for name, values in self._residual())
        words = [shown(word, most=12) for word in self.words]
        inside = html.table(["", *words], lines, caption="residual norm by position")
        yield html.folded("as a table", inside)

    def figure(self) -> "Figure":
        """The residual by depth and position, and what each layer adds."""
        from glassformer.lens.show.mpl import norms_figure

        return norms_figure(self)


def read_norms(spec: ModelSpec, captured: Capture, *, words: tuple[str, ...]) -> Norms:
    """Measure a captured pass; of an encoder-decoder, its decoder."""
    rows = residual_rows(spec)
    at = prefix_of(spec, "self")

    def layers(leaf: str) -> Tensor:
        return torch.stack(
            [_norm(captured.taps[f"{at}blocks.{i}.{leaf}"]) for i in range(spec.n_layers)]
        )

    return Norms(
        row_names=tuple(name for name, _ in rows),
        residual=torch.stack([_norm(captured.taps[tap]) for _, tap in rows]),
        attention=layers("attn.out"),
        mlp=layers("ffn.out"),
        cross=None if spec.encoder is None else layers("cross.out"),
        words=words,
    )


def _norm(x_TD: Tensor) -> Tensor:
    norm_T: Tensor = as_float(x_TD).norm(dim=-1)
    return norm_T.cpu()


# --- experts --------------------------------------------------------------------------------------

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
