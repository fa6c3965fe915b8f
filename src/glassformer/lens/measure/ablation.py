"""Silencing heads: the same pass with their outputs at 0, and what that does to the answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glassformer.lens.measure.capture import at_rest, repeated
from glassformer.lens.measure.head_names import HeadName, heads_of
from glassformer.lens.measure.predictions import NONE, Reading, divergence
from glassformer.lens.seen import Seen
from glassformer.lens.show import html, svg
from glassformer.lens.show.displayable import Face, Row
from glassformer.lens.show.token_text import shown
from glassformer.nn.taps import Edit, Taps
from glassformer.spec.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# B heads tried at once, T positions, D d_model, N heads, H d_head, V answers

#: Tokens run at once when every head is tried; only speed and memory depend on it.
CHUNK = 8_192


@dataclass(frozen=True, eq=False, repr=False)
class Ablation(Face):
    """Two looks at one sequence: `before`, and `after` these heads were silenced."""

    before: Seen
    after: Seen
    heads: tuple[HeadName, ...]
    loss_change: float | None  # after less before; None without a target
    kl: Tensor  # (T,): KL(before || after) in nats; NaN on padding

    @property
    def title(self) -> str:  # type: ignore[override]
        """Which heads are missing."""
        return f"without {' '.join(map(str, self.heads))}"

    @property
    def tensor(self) -> Tensor:
        """The divergence by position."""
        return self.kl

    def rows(self) -> list[Row]:
        """A line a position: the likeliest answer before and after, the loss, the divergence."""
        pairs = zip(self.before.rows(), self.after.rows(), self.kl.tolist(), strict=True)
        return [
            {
                "position": old["position"],
                "word": old["word"],
                "before": old["top"],
                "after": new["top"],
                "loss_before": old["loss"],
                "loss_after": new["loss"],
                "kl": kl,
            }
            for old, new, kl in pairs
        ]

    def summary(self) -> str:
        """One line."""
        change = self.loss_change
        loss = "" if change is None else f"loss {change:+.4f}, "
        place = self.before.reading.place
        return f"{self.title}: {loss}KL {float(self.kl[place]):.4f} at position {place}"

    def text(self) -> str:
        """A line a position whose likeliest answer changed, under the summary."""
        changed = [row for row in self.rows() if row["before"] != row["after"]]
        lines = [self.summary(), f"  {len(changed)} of {len(self.kl)} likeliest answers changed"]
        for row in changed[:24]:
            words = f"{shown(row['before'], most=16)} -> {shown(row['after'], most=16)}"
            lines.append(f"  {row['position']:4} {shown(row['word'], most=16):>16}  {words}")
        return "\n".join(lines)

    def parts(self) -> Iterator[str]:
        """The divergence by position, and the table."""
        yield html.heading(self.summary())
        label = "KL(before || after) in nats, by position"
        yield svg.lines_svg({label: self.kl.tolist()}, label=label, words=self.before.words)
        rows = self.rows()
        lines = (list(row.values()) for row in rows)
        yield html.folded("by position", html.table(list(rows[0]), lines, caption=self.title))

    def figure(self) -> "Figure":
        """The divergence by position."""
        from glassformer.lens.show.mpl import series_figure

        label = "KL(before || after), nats"
        return series_figure({label: self.kl.tolist()}, self.before.words, title=self.summary())


@dataclass(frozen=True, eq=False, repr=False)
class Ranking(Face):
    """Every head by the size of its effect: of the loss where there is a target, else of the KL."""

    heads: tuple[HeadName, ...]
    loss_changes: tuple[float | None, ...]
    kls: tuple[float, ...]  # at the position that matters most
    title: str = "heads by the effect of silencing each"

    @property
    def effects(self) -> tuple[float, ...]:
        """What the heads are ranked by, in their order here: largest size first."""
        pairs = zip(self.loss_changes, self.kls, strict=True)
        return tuple(kl if change is None else change for change, kl in pairs)

    @property
    def tensor(self) -> Tensor:
        """The effects."""
        return torch.tensor(self.effects, dtype=torch.float64)

    def rows(self) -> list[Row]:
        """head, effect, loss_change, kl."""
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
        names = [str(head) for head in self.heads[:24]]
        yield html.heading(self.title)
        yield svg.bars_svg(names, self.effects[:24], label=self.title, form="+.4f")
        rows = self.rows()
        lines = (list(row.values()) for row in rows)
        yield html.folded("as a table", html.table(list(rows[0]), lines, caption=self.title))

    def figure(self) -> "Figure":
        """Bars of the strongest."""
        from glassformer.lens.show.mpl import bars_figure

        return bars_figure([str(head) for head in self.heads], self.effects, title=self.title)


def compared(before: Seen, after: Seen, heads: tuple[HeadName, ...]) -> Ablation:
    """The two passes side by side."""
    apart_T = _apart(before.reading, before.hidden_TD, after.hidden_TD)
    return Ablation(before, after, heads, _change(before.loss, after.loss), apart_T)


def _change(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _apart(reading: Reading, before_TD: Tensor, after_TD: Tensor) -> Tensor:
    """KL(before || after) at each position."""
    with at_rest(reading.model):
        before_TD, after_TD = reading.rows_of(before_TD), reading.rows_of(after_TD)
        pieces = [
            divergence(
                reading.log_probabilities(before_TD[at]), reading.log_probabilities(after_TD[at])
            )
            for at in reading.pieces(len(before_TD))
        ]
    return torch.cat(pieces).masked_fill(~reading.real(), torch.nan).cpu()


def rank_heads(seen: Seen) -> Ranking:
    """Silence each head alone, many in one pass, on top of what is silent already."""
    reading, model = seen.reading, seen.reading.model
    heads = [head for head in heads_of(model.spec) if head not in seen.ablated]
    if not heads:
        raise InputError("every head is silent already", hint="look again with some of them")
    step = max(1, CHUNK // len(seen.words))
    found = []
    with at_rest(model):
        before_1V = _last(reading, seen.hidden_TD)
        for start in range(0, len(heads), step):
            tried = heads[start : start + step]
            taps = Taps(edit=_one_each(seen, tried))
            hidden_BTD = model.hidden(repeated(reading.inputs, len(tried)), taps=taps)
            for head, hidden_TD in zip(tried, hidden_BTD, strict=True):
                kl = float(divergence(before_1V, _last(reading, hidden_TD))[0])
                loss = mean_loss(reading, hidden_TD)
                found.append((head, _change(seen.loss, loss), kl))
    found.sort(key=lambda each: -abs(each[2] if each[1] is None else each[1]))
    return Ranking(*(tuple(column) for column in zip(*found, strict=True)))


def _last(reading: Reading, hidden_TD: Tensor) -> Tensor:
    at = slice(reading.place, reading.place + 1)
    return reading.log_probabilities(reading.rows_of(hidden_TD)[at])


def mean_loss(reading: Reading, hidden_TD: Tensor) -> float | None:
    """-log p(target), the mean over the positions that have one."""
    targets_T = reading.targets_T.to(hidden_TD.device)
    asked = (targets_T != NONE).nonzero().flatten()
    if not len(asked):
        return None
    rows_TD = reading.rows_of(hidden_TD)
    losses = []
    for at in reading.pieces(len(asked)):
        logp_TV = reading.log_probabilities(rows_TD[asked[at]])
        losses.append(-logp_TV.gather(1, targets_T[asked[at]][:, None])[:, 0])
    return float(torch.cat(losses).mean())


def _one_each(seen: Seen, tried: Sequence[HeadName]) -> dict[str, Edit]:
    """Edits for a batch in which row b lacks head b, and every row those silent already."""
    spec = seen.reading.model.spec
    by_tap: dict[str, list[tuple[slice | int, int]]] = {}
    for head in seen.ablated:
        by_tap.setdefault(head.tap(spec), []).append((slice(None), head.head))
    for row, head in enumerate(tried):
        by_tap.setdefault(head.tap(spec), []).append((row, head.head))

    def silence(places: list[tuple[slice | int, int]]) -> Edit:
        def edit(x_BNTH: Tensor) -> Tensor:
            x_BNTH = x_BNTH.clone()
            for row, head in places:
                x_BNTH[row, head] = 0.0
            return x_BNTH

        return edit

    return {tap: silence(places) for tap, places in by_tap.items()}
