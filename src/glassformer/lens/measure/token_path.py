"""One token's way through a model: the residual stream at its position, after every sublayer.

A row is a point of the stream: the vector itself, its norm, the norm of what the sublayer added,
and what the model would predict if it ended there (the logit lens).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glassformer.lens.capture import eval_mode, residual_rows
from glassformer.lens.measure.contributions import Norms
from glassformer.lens.measure.predictions import LogitLens, Readout
from glassformer.lens.show import html
from glassformer.lens.show.block_picture import STYLE, Element, path, rect, short, text
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.lens.show.svg import data_uri, heatmap_png
from glassformer.lens.show.text import shown
from glassformer.nn.taps import Edit, Taps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        heading = ["", "norm", "added", "predicts", "probability"]
        lines = (list(row.values()) for row in self.rows())
        yield html.folded("as a table", html.table(heading, lines, caption=self.title))

    def _repr_svg_(self) -> str:
        return self.element(style=True).svg()

    def figure(self) -> "Figure":
        """The vectors as a heat map, each row scaled to its largest number."""
        from glassformer.lens.show.mpl import grid_figure

        return grid_figure(
            self._scaled().numpy(),
            rows=self.row_names,
            columns=[str(i) for i in range(self.values_RD.shape[1])],
            title=self.title,
            label="of the row's largest",
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
        props = {
            "class": "glass-diagram way",
            "role": "img",
            "aria-label": self.title,
            "viewBox": f"0 0 {width:g} {y + 24:g}",
            "width": f"{width:g}",
            "height": f"{y + 24:g}",
        }
        if not style:
            return Element("svg", props, (*drawn, final))
        sheet = Element("style", {}, (STYLE,))
        paper = rect(0, 0, width, y + 24, "paper", round_=0)
        props = {"xmlns": "http://www.w3.org/2000/svg", **props}
        return Element("svg", props, (sheet, paper, *drawn, final))

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
    parts = {"attn": norms.attention, "cross": norms.cross, "mlp": norms.mlp}
    added = []
    for name in names:
        layer, _, part = name.partition(" ")
        written = parts.get(part)
        number = float("nan")
        if written is not None:
            number = float(written[int(layer.removeprefix("L")), position])
        added.append(number)
    rows = (*names, "final")
    return TokenPath(
        position=position,
        word=word,
        row_names=names,
        values_RD=values_RD,
        norms=tuple(norms.residual[:, position].tolist()),
        added=tuple(added),
        predicted=tuple(lens.top(position, 1, row=name)[0] for name in rows),
    )
