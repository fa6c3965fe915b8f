"""What each layer does: L2 norms of the residual stream and of what is added to it; its experts.

In a mixture of experts: which experts each token uses, and each expert's load.

One token's way through the model is the residual stream at its position, after every sublayer: the
vector, its norm, the norm of what was added, and what would be predicted there (the logit lens).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glassformer.lens.capture import Capture, eval_mode, residual_rows
from glassformer.lens.heads import prefix_of
from glassformer.lens.measure.predictions import LogitLens, Readout
from glassformer.lens.show import html
from glassformer.lens.show.block_picture import sheet
from glassformer.lens.show.chart import Bars, Grid, Lines, Panels, series
from glassformer.lens.show.chart_svg import chart_svg, data_uri, heatmap_png
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.lens.show.element import Element, path, rect, short, text
from glassformer.lens.show.text import shown
from glassformer.nn.norm import as_float
from glassformer.nn.taps import Edit, Taps
from glassformer.spec.model import ModelSpec

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

    def added(self, row: str, position: int) -> float | None:
        """Return the norm of what a row's sublayer has added; None for the embedding."""
        layer, _, part = row.partition(" ")
        written = {"attn": self.attention, "cross": self.cross, "mlp": self.mlp}.get(part)
        return None if written is None else float(written[int(layer.removeprefix("L")), position])

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
        norm, added = self._lines()
        yield chart_svg(norm, label="residual norm by depth", width=520).svg()
        yield chart_svg(added, width=520).svg()
        lines = ([name, *values] for name, values in self._residual())
        words = [shown(word, most=12) for word in self.words]
        inside = html.table(["", *words], lines, caption="residual norm by position")
        yield html.folded("as a table", inside)

    def _lines(self) -> tuple[Lines, Lines]:
        """Return the residual's norm by depth, and the norm of what is added, by layer."""
        residual = {"residual": self.residual.mean(1).tolist()}
        added = {name: values.mean(1).tolist() for name, values in self.parts_by_name().items()}
        title = "norm of what each layer adds, mean over positions"
        return (
            series(residual, words=self.row_names, title="norm of the residual stream"),
            series(added, words=[f"L{i}" for i in range(len(self.mlp))], title=title),
        )

    def chart(self) -> Panels:
        """The residual by depth and position, and what each layer adds."""
        values = self.residual.double().numpy()
        grid = Grid(
            title="norm of the residual stream",
            values=values,
            rows=self.row_names,
            columns=self.words,
            high=float(np.nanmax(values)),
            key="norm",
            x_title="token at each position",
            y_title="after",
            from_bottom=True,
        )
        return Panels(charts=(grid, self._lines()[1]), columns=2)


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
            bars = Bars(title=label, names=tuple(names), values=tuple(load[:size]))
            yield html.captioned(chart_svg(bars).svg(), label)
        heading = ["position", "word", *(f"L{layer}" for layer in self.layers)]
        lines = (
            [t, shown(word), *(cell.partition(" ")[2] for cell in self._cells(t))]
            for t, word in enumerate(self.words)
        )
        inside = html.table(heading, lines, caption="experts of each token, largest weight first")
        yield html.folded("experts of each token", inside)

    def chart(self) -> Bars:
        """The load of every expert."""
        names = [f"L{layer} expert {e}" for layer in self.layers for e in range(max(self.sizes))]
        values = tuple(self.load.flatten().tolist())
        return Bars(title="load of experts", names=tuple(names), values=values)


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


# R rows (embed, each sublayer), D d_model

#: The most numbers of a vector that are drawn.
DRAWN = 64
_LINE = 19  # height of a row


@dataclass(frozen=True, eq=False, repr=False)
class TokenPath(Displayable):
    """The stream at one position; `added` is NaN in the first row, which is the embedding.

    `predicted` has the likeliest word after each row and its probability, then the model's own.
    """

    position: int
    word: str
    row_names: tuple[str, ...]
    values_RD: Tensor
    norms: tuple[float, ...]
    added: tuple[float, ...]
    predicted: tuple[tuple[str, float], ...]

    @property
    def title(self) -> str:
        """Which token it is."""
        return f"position {self.position}, token '{shown(self.word)}'"

    @property
    def tensor(self) -> Tensor:
        """The vectors (R, D)."""
        return self.values_RD

    def rows(self) -> list[Row]:
        """One row per point of the stream."""
        lines = zip(self.row_names, self.norms, self.added, self.predicted, strict=False)
        return [
            {"row": name, "norm": norm, "added": added, "predicted": word, "probability": share}
            for name, norm, added, (word, share) in lines
        ]

    def text(self) -> str:
        """A line per point: norm, what was added, the likeliest word."""
        lines = [self.title, f"  {'':10}{'norm':>9}{'added':>9}  predicts"]
        for row in self.rows():
            added = "" if row["added"] != row["added"] else f"{row['added']:.3f}"
            word = f"{shown(row['predicted'], most=16)} {row['probability']:.3f}"
            lines.append(f"  {row['row']:10}{row['norm']:9.3f}{added:>9}  {word}")
        word, share = self.predicted[-1]
        lines.append(f"  {'final':10}{'':18}  {shown(word, most=16)} {share:.3f}")
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """Yield the picture, then the same as a table."""
        yield self.element(style=True).svg()
        yield self.table()

    def _repr_svg_(self) -> str:
        return self.element(style=True).svg()

    def chart(self) -> Grid:
        """The vectors as a heat map, each row scaled to its largest number."""
        return Grid(
            title=self.title,
            values=self._scaled().double().numpy(),
            rows=self.row_names,
            columns=tuple(str(i) for i in range(self.values_RD.shape[1])),
            low=-1.0,
            signed=True,
            key="of the row's largest",
        )

    def _scaled(self) -> Tensor:
        largest = self.values_RD.abs().amax(1, keepdim=True)
        return self.values_RD / largest.clamp_min(1e-12)

    def element(self, *, style: bool = False, narrow: bool = False) -> Element:
        """Return the picture as a tree; `narrow` fits it into 340 pixels instead of 620."""
        columns = (62, 84, 84, 92) if narrow else (74, 256, 146, 120)
        left, strip, bars, words = columns
        width, top = sum(columns) + 14, 24.0
        x_bars, x_words = left + strip + 8, left + strip + bars + 12
        D = self.values_RD.shape[1]
        numbers = f"{D} numbers" if D <= DRAWN else f"{DRAWN} of {D}"
        drawn = [
            text(left, 12, numbers),
            text(x_bars, 12, "norm" if narrow else "norm (and added)"),
            text(x_words, 12, "predicts"),
        ]
        longest = max(self.norms) or 1.0
        room = bars - (40 if narrow else 86)
        for number, row in enumerate(self.rows()):
            y = top + _LINE * number
            kind = _kind(row["row"])
            long = max(1.5, room * row["norm"] / longest)
            said = f"{row['norm']:.3g}"
            if row["added"] == row["added"] and not narrow:
                said += f" (+{row['added']:.2g})"
            word = f"{shown(row['predicted'], most=12)} {row['probability']:.2f}"
            inside = (
                text(0, y + 12, row["row"]),
                rect(x_bars, y + 2, long, _LINE - 6, "solid", round_=2),
                text(x_bars + long + 5, y + 12, said, kind="number"),
                rect(x_words, y + 2, max(0.0, words - 6) * row["probability"], 13, "faint"),
                text(x_words + 4, y + 12, short(word, words), kind="number"),
            )
            drawn.append(Element("g", {"class": kind, "data-row": row["row"]}, inside))
        drawn.append(self._strips(left, top, strip - 8))
        word, share = self.predicted[-1]
        y = top + _LINE * len(self.row_names) + 4
        drawn.append(path(f"M0 {y:g}H{width:g}", "wire"))
        final = text(
            0, y + 17, f"the model predicts {shown(word, most=20)} ({share:.3f})", kind="name"
        )
        box = 0.0, 0.0, float(width), y + 24
        way = Element("g", {"class": "way"}, (*drawn, final))
        return sheet([way], box, label=self.title, style=style, paper=style)

    def _strips(self, x: float, y: float, width: float) -> Element:
        """Return every row's numbers as cells, each row scaled to its largest."""
        props = {
            "x": f"{x:g}",
            "y": f"{y:g}",
            "width": f"{width:g}",
            "height": f"{_LINE * len(self.row_names):g}",
            "preserveAspectRatio": "none",
            "image-rendering": "pixelated",
            "href": data_uri(_strip_png(self._scaled()[:, :DRAWN])),
        }
        return Element("image", props)


def _strip_png(values_RD: Tensor) -> bytes:
    """Draw rows 15 pixels high with gaps of 4, so that neighbours are not taken for one map."""
    R, D = values_RD.shape
    tall = torch.zeros(R, _LINE, D)
    tall[:, 2:16] = values_RD.float()[:, None]
    return heatmap_png(tall.reshape(R * _LINE, D).numpy())


def _kind(row: str) -> str:
    """Return the class of a row's colour: the kind of part that wrote it."""
    part = row.rpartition(" ")[2]
    return {"attn": "attn", "cross": "cross", "mlp": "ffn"}.get(part, "embed")


def read_token_path(
    readout: Readout,
    position: int,
    *,
    edits: Mapping[str, Edit],
    word: str,
    lens: LogitLens,
    norms: Norms,
) -> TokenPath:
    """Run the model once more, and keep the residual stream at one position."""
    named = residual_rows(readout.model.spec)
    taps = Taps(read=[tap for _, tap in named], edit=dict(edits))
    with eval_mode(readout.model):
        readout.model.hidden(readout.inputs, taps=taps)
    values_RD = torch.stack([taps.seen[tap][0, position].float() for _, tap in named]).cpu()
    names = tuple(name for name, _ in named)
    added = (norms.added(name, position) for name in names)
    rows = (*names, "final")
    return TokenPath(
        position=position,
        word=word,
        row_names=names,
        values_RD=values_RD,
        norms=tuple(norms.residual[:, position].tolist()),
        added=tuple(math.nan if norm is None else norm for norm in added),
        predicted=tuple(lens.top(position, 1, row=name)[0] for name in rows),
    )
