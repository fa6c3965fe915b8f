"""Heads ranked by their ablation: each one's output set to 0, alone, and the effect measured."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glassformer.lens.capture import ablations, edits_by_tap, eval_mode, repeated
from glassformer.lens.heads import HeadName, heads_of
from glassformer.lens.measure.predictions import NONE, Readout, divergence
from glassformer.lens.show import html
from glassformer.lens.show.chart import Bars
from glassformer.lens.show.chart_svg import chart_svg
from glassformer.lens.show.displayable import Displayable, Row
from glassformer.nn.taps import Edit, Taps
from glassformer.spec.errors import InputError
from glassformer.spec.model import ModelSpec

# B heads tried at once, T positions, D d_model, V vocabulary of the output head

#: Tokens run at once when every head is tried; only speed and memory depend on it.
CHUNK = 8_192


@dataclass(frozen=True, eq=False, repr=False)
class Ranking(Displayable):
    """Heads by the size of their effect: on the loss where there is a target, else the KL."""

    heads: tuple[HeadName, ...]
    loss_changes: tuple[float | None, ...]
    kls: tuple[float, ...]  # at the readout position
    title: str = "heads by the effect of ablating each"

    @property
    def effects(self) -> tuple[float, ...]:
        """The effects by which heads are ranked, in the order of `heads`: largest size first."""
        pairs = zip(self.loss_changes, self.kls, strict=True)
        return tuple(kl if change is None else change for change, kl in pairs)

    @property
    def tensor(self) -> Tensor:
        """The effects."""
        return torch.tensor(self.effects, dtype=torch.float64)

    def rows(self) -> list[Row]:
        """One row per head: head, effect, loss_change, kl."""
        columns = zip(self.heads, self.effects, self.loss_changes, self.kls, strict=True)
        return [
            {"head": str(head), "effect": effect, "loss_change": change, "kl": kl}
            for head, effect, change, kl in columns
        ]

    def text(self) -> str:
        """The sixteen strongest."""
        lines = [self.title]
        for row in self.rows()[:16]:
            change = row["loss_change"]
            loss = "" if change is None else f"loss {change:+.4f}  "
            lines.append(f"  {row['head']:14} {loss}KL {row['kl']:.4f}")
        if len(self.heads) > 16:
            lines.append(f"  ... {len(self.heads) - 16} more")
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """Bars of the strongest, and the table of all."""
        yield html.heading(self.title)
        every = self.chart()
        bars = replace(every, names=every.names[:24], values=every.values[:24])
        yield chart_svg(bars).svg()
        yield self.table()

    def chart(self) -> Bars:
        """Bars, the strongest at the top."""
        names = tuple(map(str, self.heads))
        return Bars(title=self.title, names=names, values=tuple(self.effects), form="+.4f")


def rank_heads(
    readout: Readout,
    hidden_TD: Tensor,
    *,
    loss: float | None,
    ablated: Sequence[HeadName] = (),
) -> Ranking:
    """Ablate each head alone, many in one pass, on top of those ablated already.

    `hidden_TD` and `loss` are the baseline: the pass with only `ablated` heads missing.
    """
    model = readout.model
    heads = [head for head in heads_of(model.spec) if head not in ablated]
    if not heads:
        raise InputError("every head is ablated already", hint="inspect again with some of them")
    step = max(1, CHUNK // len(hidden_TD))
    effects = []
    with eval_mode(model):
        before_1V = _at_readout(readout, hidden_TD)
        for start in range(0, len(heads), step):
            tried = heads[start : start + step]
            taps = Taps(edit=_one_each(model.spec, tried, ablated))
            hidden_BTD = model.hidden(repeated(readout.inputs, len(tried)), taps=taps)
            for head, without_TD in zip(tried, hidden_BTD, strict=True):
                kl = float(divergence(before_1V, _at_readout(readout, without_TD))[0])
                effects.append((head, loss_change(loss, mean_loss(readout, without_TD)), kl))
    effects.sort(key=lambda each: -abs(each[2] if each[1] is None else each[1]))
    ranked, changes, kls = zip(*effects, strict=True)
    return Ranking(ranked, changes, kls)


def loss_change(before: float | None, after: float | None) -> float | None:
    """Return the change of a loss; None without a target."""
    return None if before is None or after is None else after - before


def mean_loss(readout: Readout, hidden_TD: Tensor) -> float | None:
    """Return the mean of -log p(target) over the positions that have a target; None without."""
    targets_T = readout.targets_T.to(hidden_TD.device)
    targeted = (targets_T != NONE).nonzero().flatten()
    if not len(targeted):
        return None
    rows_TD = readout.rows_of(hidden_TD)
    losses = []
    for at in readout.pieces(len(targeted)):
        logp_TV = readout.log_probabilities(rows_TD[targeted[at]])
        losses.append(-logp_TV.gather(1, targets_T[targeted[at]][:, None])[:, 0])
    return float(torch.cat(losses).mean())


def _at_readout(readout: Readout, hidden_TD: Tensor) -> Tensor:
    """Return the log-probabilities (1, V) at the readout position."""
    at = slice(readout.position, readout.position + 1)
    return readout.log_probabilities(readout.rows_of(hidden_TD)[at])


def _one_each(
    spec: ModelSpec, tried: Sequence[HeadName], ablated: Sequence[HeadName]
) -> dict[str, Edit]:
    """Return edits for a batch in which row b lacks head b, and every row lacks `ablated`."""
    assignments = ablations(spec, ablated)
    for row, head in enumerate(tried):
        assignments += ablations(spec, [head], rows=row)
    return edits_by_tap(assignments)
