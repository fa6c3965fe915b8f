"""L2 norms of the residual stream, and of what each sublayer adds to it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glassformer.lens.capture import Capture, residual_rows
from glassformer.lens.heads import prefix_of
from glassformer.lens.measure.predictions import at_least_float32
from glassformer.lens.show import html, svg
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.lens.show.token_text import shown
from glassformer.spec.model import ModelSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# L layers, R rows of the residual, T positions, D d_model


@dataclass(frozen=True, eq=False, repr=False)
class Norms(Displayable):
    """`residual` (R, T) after each half-layer; `attention`, `cross`, `mlp` (L, T): what was added.

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
        yield html.heading("norms after each half-layer, mean over positions")
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
    norm_T: Tensor = at_least_float32(x_TD).norm(dim=-1)
    return norm_T.cpu()
